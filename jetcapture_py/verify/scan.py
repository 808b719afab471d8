"""Examine every object of a stream's archive in parallel, and collect sequences in sets of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import UserWriter, make_writer
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.block import BlockConfig
from jetcapture_py.errors import ConfigError, StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import plural
from jetcapture_py.verify.copies import Finder, Seen
from jetcapture_py.verify.examine import DamagedError, Held, examine, in_order
from jetcapture_py.verify.findings import FileList, Finding, Kind, Severity, file_findings, not_checked
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scope import Incarnation

ROUNDS = 10
"""Maximum listings; listing repeats while objects disappear, because compaction moves their messages to others."""
_DEEP_THREADS = 4
_ATTEMPTS = 3

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done, and the total. From any thread."""


@dataclass(slots=True, kw_only=True)
class ArchiveScan:
    """Contents of the archive."""

    sequences: Sequences = field(default_factory=Sequences)
    """Of the current incarnation's messages."""
    quarantined: Sequences = field(default_factory=Sequences)
    """Those of them that are in quarantine."""
    repeated: Sequences = field(default_factory=Sequences)
    """Those that several objects have."""
    forked: Sequences = field(default_factory=Sequences)
    """Those with several timestamps, if the incarnation is known."""
    seen: list[Seen] = field(default_factory=list)
    """Objects with messages of the current incarnation."""
    copies: tuple[Finding, ...] = ()
    """Findings about copies."""
    objects: int = 0
    size: int = 0
    """Bytes of all objects."""
    messages: int = 0
    """All copies of the current incarnation's messages."""
    older: int = 0
    """Messages of earlier incarnations."""
    newest: int = 0
    """Latest timestamp in microseconds in objects that end at or before the bound, 0 without one."""
    damaged: FileList = field(default_factory=FileList)
    foreign: FileList = field(default_factory=FileList)
    unsigned: FileList = field(default_factory=FileList)
    """Objects without checksums."""
    by_name: int = 0
    """Objects that nothing can read."""
    unstable: bool = False
    """Some objects vanished in every listing."""
    layouts: Counter[int | None] = field(default_factory=Counter)
    """Objects outside the quarantine by their number of bundles, 0 under keys, None where it is unknown."""

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the objects, and what could not be checked."""
        note, warning, failure = Severity.NOTE, Severity.WARNING, Severity.FAILURE
        yield from file_findings(
            Kind.DAMAGED,
            failure,
            self.damaged,
            "objects that are not counted until they are restored",
            "jetcapture verify --repair stores their messages again, as far as the stream has them",
        )
        yield from file_findings(Kind.FOREIGN, warning, self.foreign, "files that are not objects of this archive")
        yield from file_findings(Kind.UNSIGNED, warning, self.unsigned, "objects not written by jetcapture")
        yield from self.copies
        if duplicates := self.messages - len(self.sequences) - len(self.forked):
            twice = any(finding.kind is Kind.READ_TWICE for finding in self.copies)
            dropped = "readers drop those under one key and bucket" if twice else "readers drop them"
            summary = f"{plural(duplicates, 'further copy', 'further copies', grouped=True)}; {dropped}"
            yield Finding(kind=Kind.DUPLICATES, severity=note, summary=summary, count=duplicates)
        if self.by_name:
            objects = plural(self.by_name, "object", grouped=True)
            yield not_checked(f"{objects}: their custom writer has no `read`, so only their names were checked")
        if self.older:
            messages = plural(self.older, "message", grouped=True)
            yield not_checked(f"{messages} of earlier incarnations of the stream: it no longer has them")
        if self.unstable:
            yield not_checked("some objects: they vanished during every listing (is a compaction running?)", failure)

    def layout_counts(self) -> dict[str, int]:
        """Count objects outside the quarantine by layout, as text."""
        names: dict[int | None, str] = {0: "under keys"}
        for number in sorted(filter(None, self.layouts)):
            names[number] = f"in {plural(number, 'bundle', grouped=True)}"
        names[None] = "in an unknown number of bundles"
        return {name: self.layouts[number] for number, name in names.items() if number in self.layouts}


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
        found.unstable = True
    finder = Finder(storage, life, found.seen, found.repeated, progress, writer)
    if life is None:
        found.forked = Sequences()
    else:
        found.forked.update(finder.forked())
    found.copies = tuple(finder.find())
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
            found.foreign.add(file.path)
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
            found.damaged.add(file.path, outcome)
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
        found.unsigned.add(file.path)
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
