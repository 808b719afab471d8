"""Erase messages from an archive for good: every copy, in every object, and, if asked, in the stream.

A tombstone is written first (see `archive.removed`). From then on the messages are not stored again, and the next run
completes a killed one, including tombstones of earlier runs. Then every object with one of the messages is written
again without them, read back and compared; tables get the new files; the old objects are removed. This repeats until a
listing has no such object, because a compaction may have read an old object earlier.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.archive.removed import Erased, Tombstone
from jetcapture_py.compaction.memory import MemoryBudget, rewriting, searching
from jetcapture_py.compaction.rewrite import Rewritten, remove_replaced, rewrite
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError, MissingStreamError, SourceError, VanishedError
from jetcapture_py.reading.plan import no_archive
from jetcapture_py.retry import retried
from jetcapture_py.rewriting.old_versions import delete_old_versions
from jetcapture_py.rewriting.select import THREADS, Condition, Search, source_of
from jetcapture_py.rewriting.stream_deletion import StreamDeletion, delete_from_stream
from jetcapture_py.rewriting.text_objects import rewrite_text
from jetcapture_py.store import ABANDONED, change_note
from jetcapture_py.store.archive import ArchiveFiles, File, OldVersion, open_archive
from jetcapture_py.table.erase import TablesErased, check_tables, drop_objects
from jetcapture_py.text import plural
from jetcapture_py.verify.examine import DamagedError, ObjectExaminer
from jetcapture_py.verify.findings import Progress, ignore

SEALED_BY = "erase"
"""The `sealed_by` of rewritten objects."""
REMOTE_THREADS = 8
"""Remote objects rewritten at once; the requests mostly wait."""
_ROUNDS = 20
"""Maximum listings while compactions bring messages back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedObject:
    """An object that had erased messages."""

    path: str
    messages: int
    """Number of its erased messages."""
    sha256: str
    """SHA-256 of its bytes; "" in a dry run."""
    after: str | None = None
    """The object with its remaining messages; None without any."""
    sha256_after: str | None = None
    """SHA-256 of that object's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureRequest:
    """A request to erase messages of a stream, with author, time and reason."""

    stream: str
    reason: str
    by: str
    dry_run: bool
    started: datetime


@dataclass(slots=True, kw_only=True)
class Erasure:
    """The certificate of an erasure or its dry run."""

    request: ErasureRequest
    tombstone: str | None = None
    """Path of the new tombstone; None without messages to erase."""
    searched: int = 0
    """Number of listed objects."""
    up_to: int | None = None
    """The watermark's sequence when the search began; None without a watermark."""
    messages: int = 0
    """Selected messages."""
    earlier: int = 0
    """Further messages left behind by earlier erasures."""
    objects: list[ErasedObject] = field(default_factory=list)
    """Objects that had these messages."""
    versions: int = 0
    """Old versions of objects that had them, in a versioned bucket."""
    snapshots: int = 0
    """Number of forgotten table snapshots."""
    dropped: list[str] = field(default_factory=list)
    """Dropped tables of newest rows, which maintenance makes again."""
    in_stream: StreamDeletion | None = None
    """Deletions from the stream; None if not requested."""
    remains: list[str] = field(default_factory=list)
    """Remaining references to the messages, and places that could not be searched."""
    notes: list[str] = field(default_factory=list)
    """Places that were not searched."""

    @property
    def copies(self) -> int:
        """Number of copies of the messages in objects."""
        return sum(item.messages for item in self.objects)

    @property
    def remaining(self) -> list[str]:
        """All remains in the archive and in the stream."""
        return [*self.remains, *(self.in_stream.remains if self.in_stream else ())]


async def erase(
    config: Config,
    condition: Condition,
    reason: str,
    *,
    in_stream: bool = False,
    dry_run: bool = False,
    progress: Progress = ignore,
) -> Erasure:
    """Erase the messages of a condition; with `dry_run`, only count them.

    `progress` is called with a stage and its progress. Raises ConfigError, JetcaptureError; finished work stays, and
    another run continues.
    """
    archive = open_archive(config.store.url, config.store.options)
    check_tables(config, archive)
    stream, now = config.source.stream, datetime.now(UTC)
    request = ErasureRequest(stream=stream, reason=reason, by=_who(), dry_run=dry_run, started=now)
    eraser = _Eraser(config, archive, request, progress)
    done = eraser.done
    erased = eraser.run(condition)
    if in_stream and (eraser.clean or dry_run):
        try:
            done.in_stream = await delete_from_stream(config, erased, dry_run=dry_run, progress=progress)
        except MissingStreamError as error:
            done.notes.append(f"the stream: {error}")
        except SourceError as error:
            done.remains.append(f"the stream was not reached: {error}")
    elif in_stream:
        done.remains.append("the stream still has them: they are deleted there once nothing remains in the archive")
    elif erased:
        done.notes.append("the stream: it was not changed (--in-stream deletes them there)")
    return done


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user id without a name, as in containers
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class _Holder:
    """An object with erased messages."""

    file: File
    messages: MessageSet


class _Eraser:
    """One run."""

    def __init__(self, config: Config, archive: ArchiveFiles, request: ErasureRequest, progress: Progress) -> None:
        self.done = Erasure(request=request)
        self._config, self._archive, self._progress = config, archive, progress
        self._examiner = ObjectExaminer(archive, None)
        self._budget = MemoryBudget(config.limits.memory)
        self._left: dict[str, str] = {}
        """Reasons why objects keep erased messages, by path."""
        self._clean: set[str] = set()
        """Paths of objects without erased messages, which never change."""
        self._others = 0
        """Number of files that are not objects."""
        self._unfinished: list[str] = []
        """Temporary and other files that may have messages."""
        self._threads = THREADS if archive.local else 0
        """Objects read at once; 0 for the archive's default."""
        self.clean = False
        """Whether no object has erased messages."""

    def run(self, condition: Condition) -> Erased:
        """Erase everything except in the stream; return all erased messages. Raises ConfigError, JetcaptureError."""
        done, stream = self.done, self._config.source.stream
        known = self._archive.erased(stream)
        with suppress(JetcaptureError):
            mark = self._archive.watermark(stream)
            done.up_to = None if mark is None else mark.seq
        with Search(self._archive, self._config, condition, self._progress) as search:
            selected = retried(lambda: search.run(self._files()))
        if not known and not done.searched:
            raise no_archive(self._archive, stream)
        erased = self._write_tombstone(selected.messages, known)
        if erased:
            self._remove(erased, selected.messages)
            self._remove_versions(erased)
        if erased and not done.request.dry_run:
            self._forget(erased)
            present = self._tidy()
        else:
            present = {file.path for file in self._files()} if self._left else set()
        left = {path: reason for path, reason in self._left.items() if path in present}  # others were compacted
        self.clean = not left
        done.remains += self._unfinished
        done.remains += _grouped({**selected.undecided, **left})
        self._say_what_was_not_searched()
        return erased

    def _files(self) -> list[File]:
        """List the objects, and count the other files."""
        files = list(self._archive.files(self._config.source.stream))
        objects = [file for file in files if file.name is not None]
        self.done.searched = max(self.done.searched, len(objects))
        self._others = len(files) - len(objects)
        return sorted(objects, key=lambda file: file.path)

    def _write_tombstone(self, chosen: MessageSet, known: Erased) -> Erased:
        """Write the tombstone of selected messages without one; return all erased messages."""
        done, request = self.done, self.done.request
        new = chosen.without(known)
        done.messages = len(chosen)
        if not len(new):
            return known
        stone = Tombstone(
            stream=request.stream, time=request.started, by=request.by, reason=request.reason, messages=new
        )
        path = stone.path
        if request.dry_run:
            return Erased({path: stone}, known)
        data = stone.encode()
        change_note(self._archive.store, path, lambda _: data)
        done.tombstone = path
        erased = self._archive.erased(request.stream, known)
        if path not in erased.tombstones:
            raise JetcaptureError(f"{path} was written and cannot be read: nothing was erased")
        return erased

    # ------------------------------------------------------------------ objects

    def _holders(self, erased: Erased) -> list[_Holder]:
        """Return the objects with erased messages. Raises VanishedError, StoreError."""

        def hold(file: File) -> _Holder | None:
            try:
                with self._budget.taken(searching(source_of(file), local=self._archive.local)):
                    _, seqs, times = self._examiner.identities(file, _name(file))
            except DamagedError as error:
                self._left[file.path] = f"may have erased messages: {error}"
                return None
            mask = erased.contains(seqs, times)
            if not mask.any():
                self._clean.add(file.path)
                return None
            if self._archive.local and Path(file.place).is_symlink():
                self._left[file.path] = (
                    "it is a symbolic link, and the file it points to would stay; put that file in its place"
                )
                return None
            return _Holder(file, MessageSet(seqs[mask], times[mask]))

        near = [file for file in self._files() if erased.near(_name(file).first_seq, _name(file).last_seq)]
        near = [file for file in near if file.path not in self._left and file.path not in self._clean]
        holders = self._archive.map(hold, near, threads=self._threads)
        return [holder for holder in holders if holder is not None]

    def _remove(self, erased: Erased, chosen: MessageSet) -> None:
        """Rewrite the objects with erased messages, until none has any."""
        done, seen = self.done, MessageSet()
        self._clean.clear()
        for _ in range(_ROUNDS):
            holders = retried(lambda: self._holders(erased))
            if not holders:
                break
            seen = MessageSet.union([seen, *(holder.messages for holder in holders)])
            done.earlier = len(seen.without(chosen))
            if done.request.dry_run:
                done.objects = [
                    ErasedObject(path=holder.file.path, messages=len(holder.messages), sha256="") for holder in holders
                ]
                return
            self._round(holders, erased)
        else:
            self._left |= dict.fromkeys(
                (holder.file.path for holder in holders), "it was stored again each time: run it again"
            )

    def _round(self, holders: Sequence[_Holder], erased: MessageSet) -> None:
        """Rewrite these objects, update tables, and remove the old objects."""
        rewritten: list[tuple[_Holder, str, Rewritten]] = []

        def work(names: Sequence[ObjectName]) -> int:
            for name in names:
                holder = by_name[name]
                file = holder.file
                source = source_of(file)
                try:
                    with self._budget.taken(rewriting(source, local=self._archive.local)):
                        digest = _sha256(self._archive, file)
                        if name.parquet:
                            others = rewrite(self._archive, source, erased, SEALED_BY)
                        else:
                            others = rewrite_text(self._archive, file, erased)
                        rewritten.append((holder, digest, others))
                except VanishedError:  # a compaction has moved its messages: the next round finds them
                    continue
                except JetcaptureError as error:
                    self._left[file.path] = str(error)
            return len(names)

        by_name = {_name(holder.file): holder for holder in holders}
        done = 0
        # overlapping objects may become one, and are not rewritten concurrently
        threads = THREADS if self._archive.local else REMOTE_THREADS
        for count in self._archive.map(work, layout.clusters(by_name), threads=threads):
            done += count
            self._progress("objects", done, len(holders))
        for _, _, others in rewritten:
            # another process may be about to remove the target in favor of the source, also in a later round
            if others.removal is None and others.target not in (None, others.source.name):
                self._left[others.source.name.path] = "kept, because an older copy has its other messages: run it again"
        ready = [others for _, _, others in rewritten if others.removal]
        paths = [others.source.name.path for others in ready]
        if paths and self._count(drop_objects(self._config, self._archive, paths)):
            self._left |= dict.fromkeys(paths, "kept, because a table may still name it")
            return
        _, errors = remove_replaced(self._archive, ready)
        present = {file.path for file in self._files()}
        # if several became one object, the last one wrote it
        written = {others.target.path: others.sha256 for _, _, others in rewritten if others.target and others.sha256}
        for holder, digest, others in rewritten:
            path = holder.file.path
            if others.removal and path not in present:
                self._record(holder, digest, others.target, written)
            elif error := next((text for text in errors if path in text), ""):
                self._left[path] = error

    def _record(
        self, holder: _Holder, digest: str, target: ObjectName | None, written: Mapping[str, str | None]
    ) -> None:
        """Record an object's removed messages. `written` has the SHA-256 of this run's objects by path."""
        after = None if target is None else target.path
        digest_after = None if after is None else written.get(after)
        if after is not None and digest_after is None:
            with suppress(VanishedError):  # compacted already
                digest_after = _sha256(self._archive, self._archive.at(after))
        messages = len(holder.messages)
        self.done.objects.append(
            ErasedObject(
                path=holder.file.path, messages=messages, sha256=digest, after=after, sha256_after=digest_after
            )
        )

    # ------------------------------------------------------------------ remains of objects

    def _remove_versions(self, erased: Erased) -> None:
        """Delete old versions of objects with erased messages, and their delete markers."""
        done, stream = self.done, self._config.source.stream
        done.versions, problems = delete_old_versions(
            self._archive,
            (stream, f"{layout.QUARANTINE}/{stream}"),
            lambda version: self._has_erased(version, erased),
            dry_run=done.request.dry_run,
        )
        done.remains += problems

    def _has_erased(self, version: OldVersion, erased: Erased) -> bool:
        """Whether an old version has erased messages. Raises DamagedError, StoreError."""
        name = version.file.name
        if name is None or not erased.near(name.first_seq, name.last_seq):
            return False
        with self._budget.taken(searching(source_of(version.file), local=False)):
            _, seqs, times = replace(self._examiner, storage=version.archive).identities(version.file, name)
        return bool(erased.contains(seqs, times).any())

    def _tidy(self) -> set[str]:
        """Remove files of killed processes and empty directories of keys; return all objects."""
        stream, present = self._config.source.stream, set[str]()
        for file in self._archive.files(stream):
            name = file.path.rpartition("/")[2]
            if file.name is not None:
                present.add(file.path)
            elif not (name.startswith(".") and name.endswith(".tmp")):
                self._unfinished.append(f"{file.path}: not searched: it is no object")
            else:
                self._remove_abandoned(file)
        self._archive.remove_empty(stream)
        return present

    def _forget(self, erased: Erased) -> None:
        """Remove from tables the files that maintenance or killed runs have put back; delete unreferenced metadata."""
        tables = drop_objects(self._config, self._archive, self._left, erased)
        self._count(tables)
        for file in tables.unnamed:
            self._remove_abandoned(file)
        dropped = tuple(f"{directory}/" for directory in tables.dropped)
        if directories := [*tables.directories, *tables.dropped]:
            versions, problems = delete_old_versions(
                self._archive,
                directories,
                lambda version: version.file.path.endswith(".avro") or version.file.path.startswith(dropped),
            )
            self.done.versions += versions
            self.done.remains += problems
        self.done.dropped += [directory.rpartition("/")[2] for directory in tables.dropped]
        self.done.notes += tables.notes

    def _remove_abandoned(self, file: File) -> None:
        """Remove an abandoned file, unless a process may still write it."""
        if file.modified is None or time.time() - file.modified <= ABANDONED:
            self._unfinished.append(f"{file.path}: a process is writing it, or was killed: run it again in an hour")
        else:
            self._archive.remove(file)

    def _count(self, tables: TablesErased) -> bool:
        """Record changes of tables in the certificate; return whether something remains."""
        done = self.done
        done.snapshots += tables.snapshots
        done.remains += [line for line in tables.remains if line not in done.remains]
        return bool(tables.remains)

    def _say_what_was_not_searched(self) -> None:
        archive, notes = self._archive, self.done.notes
        scheme = archive.url.partition("://")[0]
        if self._others:
            notes.append(f"{plural(self._others, 'file')} below the stream's directories that are no objects")
        protection = archive.protection
        if protection is None and not archive.local:
            notes.append(f"old versions and deleted objects that {scheme}:// may keep")
        if protection is not None and protection.unsearched:
            notes.append(protection.unsearched)
        if protection is not None and protection.deleted_days:
            days = plural(protection.deleted_days, "day")
            text = f"deleted objects can be restored for {days}, because the account has soft delete"
            (self.done.remains if self.done.objects else notes).append(text)
        notes.append(
            "backups and snapshots of the store, temporary files of queries that were killed, and what other programs "
            "have read and stored elsewhere"
        )
        if self._config.limits.spool is not None:
            notes.append("the spool (limits.spool): rows of open blocks are in it until their block is stored")
        after = "" if self.done.up_to is None else f" (after sequence {self.done.up_to})"
        notes.append(
            f"messages that were not stored yet{after}, and what running captures and compactions store after this: "
            "run the command again"
        )


def _grouped(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per reason, with the first path and the number of paths."""
    paths: dict[str, list[str]] = {}
    for path, reason in sorted(reasons.items()):
        paths.setdefault(reason, []).append(path)
    for reason, several in paths.items():
        more = f" and {plural(len(several) - 1, 'other')}" if several[1:] else ""
        yield f"{several[0]}{more}: {reason}"


def _name(file: File) -> ObjectName:
    assert file.name is not None  # noqa: S101  # only objects are asked for it
    return file.name


def _sha256(archive: ArchiveFiles, file: File) -> str:
    """Return the SHA-256 of an object's bytes. Raises VanishedError, StoreError."""
    digest: Any = hashlib.sha256()
    for piece in archive.pieces(file):
        digest.update(piece)
    return str(digest.hexdigest())
