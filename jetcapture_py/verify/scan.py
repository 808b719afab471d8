"""Examine every object of a stream's archive in parallel, and collect sequences in sets of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import UserWriter, make_writer
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.block import BlockConfig
from jetcapture_py.errors import ConfigError, StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify.copies import Copies, Finder, Seen
from jetcapture_py.verify.examine import DamagedError, Held, examine, in_order
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scope import Incarnation

MOST_LISTED = 10_000
"""Maximum problems of each kind that are kept; all are counted."""
ROUNDS = 10
"""Maximum listings; listing repeats while objects disappear, because compaction moves their messages to others."""
_DEEP_THREADS = 4
_ATTEMPTS = 3

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done, and the total. From any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A damaged object: its path and the reason."""

    path: str
    reason: str


@dataclass(slots=True, kw_only=True)
class ArchiveScan:
    """Contents of the archive. `messages` counts all copies of the current incarnation's messages.

    `quarantined` are the sequences of those in quarantine; `older` counts messages of earlier incarnations, `by_name`
    objects that nothing can read. `damaged`, `foreign` and `unsigned` (objects without checksums) list the first of
    each kind. `newest` is the latest timestamp in microseconds in objects that end at or before the bound, 0 without
    one. `repeated` are sequences that several of the `seen` objects have, `forked` those with several timestamps if the
    incarnation is known. `restless`: objects disappeared in every round. `layouts` counts objects by their number of
    bundles, 0 for those under keys and None where it is unknown; the quarantine has none.
    """

    sequences: Sequences = field(default_factory=Sequences)
    quarantined: Sequences = field(default_factory=Sequences)
    repeated: Sequences = field(default_factory=Sequences)
    forked: Sequences = field(default_factory=Sequences)
    seen: list[Seen] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    objects: int = 0
    size: int = 0
    messages: int = 0
    older: int = 0
    newest: int = 0
    damaged: list[Problem] = field(default_factory=list)
    damaged_count: int = 0
    foreign: list[str] = field(default_factory=list)
    foreign_count: int = 0
    unsigned: list[str] = field(default_factory=list)
    unsigned_count: int = 0
    by_name: int = 0
    restless: bool = False
    layouts: Counter[int | None] = field(default_factory=Counter)


def user_writer(block: BlockConfig) -> UserWriter | None:
    """Return the user's writer that the configuration names. Raises ConfigError."""
    try:
        writer = make_writer(block.format, block.compression)
    except ValueError as error:
        raise ConfigError(f"block.format: {error}") from error
    return writer if isinstance(writer, UserWriter) else None


def survey(
    storage: ArchiveFiles,
    stream: str,
    life: Incarnation | None,
    bound: int,
    *,
    deep: bool,
    progress: Progress,
    writer: UserWriter | None = None,
) -> ArchiveScan:
    """Examine every object of the stream. Blocks; call it in a thread. Raises StoreError if listing fails.

    `writer` writes objects in a user's format.
    """
    found = ArchiveScan()
    seen: set[str] = set()
    for _ in range(ROUNDS):
        files = [file for file in storage.files(stream) if file.place not in seen]
        seen.update(file.place for file in files)
        gone = _look(storage, files, life, bound, found, writer, deep=deep, progress=progress)
        if not gone:
            break
    else:
        found.restless = True
    found.damaged.sort(key=lambda problem: problem.path)
    found.foreign.sort()
    found.unsigned.sort()
    finder = Finder(storage, life, found.seen, found.repeated, progress, writer)
    if life is None:
        found.forked = Sequences()
    else:
        found.forked.update(finder.forked())
    found.copies = finder.find()
    return found


def _look(
    storage: ArchiveFiles,
    files: list[File],
    life: Incarnation | None,
    bound: int,
    found: ArchiveScan,
    writer: UserWriter | None,
    *,
    deep: bool,
    progress: Progress,
) -> bool:
    """Examine these files and add their contents to `found`; return whether any of them was gone."""
    for file in files:
        if not _is_object(file.name, writer) and not _hidden(file.path):
            found.foreign_count += 1
            found.foreign += [file.path] if len(found.foreign) < MOST_LISTED else []
    # in stream order, to keep the set of sequences dense
    known = ((file, file.name) for file in files if file.name and _is_object(file.name, writer))
    named = sorted(known, key=lambda pair: pair[1].first_seq)
    gone = False
    workers = max(2, min(storage.threads, _DEEP_THREADS)) if deep else storage.threads

    def look(item: tuple[File, ObjectName]) -> _Outcome:
        return _examined(storage, *item, life, writer, deep=deep)

    for done, ((file, _), outcome) in enumerate(in_order("verify", workers, look, named), 1):
        if outcome is None:
            gone = True
        elif isinstance(outcome, Held):
            _add(found, file, outcome, bound)
        else:
            found.damaged_count += 1
            found.damaged += [Problem(path=file.path, reason=outcome)] if len(found.damaged) < MOST_LISTED else []
        progress("objects", done, len(named))
    return gone


def _is_object(name: ObjectName | None, writer: UserWriter | None) -> bool:
    """Whether a file is an object of a format that is known: anything can be named like one of a user's format."""
    if name is None or name.parquet or name.suffix in layout.TEXT_SUFFIXES:
        return name is not None
    return writer is not None and name.suffix == writer.suffix


def _hidden(path: str) -> bool:
    """Whether it is a temporary file of a killed process, which nobody reads."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(".tmp")


def _add(found: ArchiveScan, file: File, held: Held, bound: int) -> None:
    found.objects += 1
    if not held.signed:
        found.unsigned_count += 1
        found.unsigned += [file.path] if len(found.unsigned) < MOST_LISTED else []
    found.size += held.size
    found.by_name += held.by_name
    found.messages += held.messages
    found.older += held.older
    if held.name.quarantine:
        _join(found.quarantined, held)
    else:
        found.layouts[held.bundles if held.name.bundle else 0] += 1
    if held.messages:
        found.seen.append(Seen(file=file, name=held.name, whole=held.range is not None, bundles=held.bundles))
        if held.range is None:
            found.forked.add(held.seqs[1:][held.seqs[1:] == held.seqs[:-1]])
        again = _join(found.sequences, held)
        if len(again):
            found.repeated.add(again)
    if held.messages and held.name.last_seq <= bound:
        found.newest = max(found.newest, held.newest)


def _join(seqs: Sequences, held: Held) -> Any:
    """Add an object's sequences to a set; return those that were in it before."""
    return seqs.add_range(*held.range) if held.range is not None else seqs.add(held.seqs)


_Outcome = Held | str | None


def _examined(
    storage: ArchiveFiles,
    file: File,
    name: ObjectName,
    life: Incarnation | None,
    writer: UserWriter | None,
    *,
    deep: bool,
) -> _Outcome:
    """Return an object's contents, the reason why it is damaged, or None if it is gone. Damage is checked twice.

    Meanwhile a redelivery may have rewritten the object with the same messages in different bytes.
    """
    reason = ""
    for attempt in range(_ATTEMPTS):
        try:
            now = storage.again(file) if attempt else file
            return examine(storage, now, name, life, deep=deep, writer=writer)
        except VanishedError:
            return None
        except DamagedError as error:
            if reason == str(error):
                break
            reason = str(error)
        except StoreError as error:
            reason = str(error)
    return reason
