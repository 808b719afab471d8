"""Repair an archive: read missing messages from the stream, and store them as the daemon would have.

A damaged object is replaced under its name, or moved aside if all of its messages are in other objects.

The consumer is not touched, and nothing is acknowledged. The watermark keeps its position, because the repair fulfills
it. Names follow from messages, so after a killed repair another one stores the remaining messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Seqs
from jetcapture_py.archive.layout import BlockId, ObjectName
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.recapture import Recapture, Rows
from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError, StoreError
from jetcapture_py.jetstream.acks import sequences
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store import NoteStore, change_note
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.store.removal import move_aside
from jetcapture_py.text import plural
from jetcapture_py.threads import in_thread
from jetcapture_py.transform.keys import Run
from jetcapture_py.verify.examine import DamagedError, ObjectExaminer
from jetcapture_py.verify.findings import MAX_LISTED, Kind, Progress, Report, ignore, indented
from jetcapture_py.verify.proof import SERVER_TIMEOUT_S, Evidence, prove
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import examined

MAX_READ_THROUGH = 1_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""
MAX_REPLACED = 100
"""Maximum damaged objects to replace under their own names; each needs a range of the stream."""

_UNLIMITED = 1 << 62
_SEALED_BY: Final = "repair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepairable:
    """A damaged object, and a range of its sequences that is in no other object and not in the stream."""

    path: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The result of a repair."""

    messages: int = 0
    """Messages stored again."""
    quarantined: int = 0
    """Messages stored again in the quarantine."""
    stored: int = 0
    """New objects."""
    bytes: int = 0
    """Size of the new objects."""
    replaced: int = 0
    """Number of replaced damaged objects."""
    moved: tuple[str, ...] = ()
    """New paths of damaged objects that were moved aside, because other objects have their messages."""
    skipped: int = 0
    """Skipped messages, which may be in unreadable objects."""
    errors: tuple[str, ...] = ()
    """Failures to store or move objects."""
    objects: tuple[str, ...] = ()
    """Paths of the first new objects."""
    gone: tuple[tuple[int, int], ...] = ()
    """Ranges of sequences that left the stream before they could be read."""
    unrepairable: tuple[Unrepairable, ...] = ()
    """Ranges of sequences that only damaged objects have."""

    def with_object(self, encoded: EncodedBlock, *, replaced: bool) -> Self:
        """Count a stored object."""
        return replace(
            self,
            messages=self.messages + encoded.messages,
            quarantined=self.quarantined + (encoded.messages if encoded.name.quarantine else 0),
            stored=self.stored + 1,
            bytes=self.bytes + encoded.data.size,
            replaced=self.replaced + replaced,
            objects=(*self.objects, encoded.name.path) if self.stored < MAX_LISTED else self.objects,
        )

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    def lines(self, after: Report) -> Iterator[str]:
        """Yield lines of text; `after` is the proof after the repair."""
        if not self.stored:
            missing = self.gone or self.skipped or self.errors or after.missing
            reason = "" if missing else ", because no message of the stream is known to be missing"
            yield f"repair: nothing was stored{reason}"
        else:
            parts = [f"{plural(self.messages, 'message')} stored in {plural(self.stored, 'object')}"]
            parts += [f"{self.replaced:,} replaced a damaged one"] if self.replaced else []
            parts += [f"{plural(self.quarantined, 'message')} went to the quarantine"] if self.quarantined else []
            yield f"repair: {', '.join(parts)}"
            yield from indented(self.objects, self.stored)
        lost = [f"{first} to {last}: left the stream before the repair" for first, last in self.gone]
        lost += [f"{part.first} to {part.last}: {part.path} is damaged" for part in self.unrepairable]
        if lost:
            yield "cannot be repaired: neither the stream nor another object has these sequences"
            yield from indented(lost, len(lost))
        if self.moved:
            objects = plural(len(self.moved), "damaged object")
            yield f"moved aside: {objects}, because other objects have all their messages"
            yield from indented(self.moved, len(self.moved))
        if self.skipped:
            yield f"not stored: {plural(self.skipped, 'message')}, which may be in objects that could not be read"
        if self.errors:
            yield "failed:"
            yield from indented(self.errors, len(self.errors))
        if after.of(Kind.DAMAGED):
            yield "readers fail on the remaining damaged objects: restore them from a copy, or remove them"


async def verify_and_repair(
    config: Config, *, deep: bool = False, content: bool = False, progress: Progress = ignore
) -> tuple[Report, Repair]:
    """Store the stream's messages that the archive lacks; return the proof afterwards, and the repair. `deep` and
    `content` as in `verify`. Raises ConfigError, SourceError, StoreError."""
    proof = partial(prove, config, deep=deep, content=content, progress=progress)
    before = await proof()
    absent = Sequences.union(before.missing, before.doubtful)
    after, done = before, Repair()
    if len(absent):
        damaged = [] if "{key}" in config.store.url else _names(before.report, Kind.DAMAGED)
        unread = _names(before.report, Kind.NOT_CHECKED)
        repairer = _Repairer(config, before.report, absent, damaged, unread, progress)
        with repairer.recapture:
            done = await repairer.run()
        after = await proof()
    if after.report.of(Kind.DAMAGED):
        moved, errors = await in_thread(_move_aside, config, after, deep=deep)
        done = replace(done, moved=moved, errors=(*done.errors, *errors))
        after = await proof() if moved else after
    done = replace(done, unrepairable=_unrepairable(after.report, after.accounted))
    findings = [*after.report.findings]
    findings = [replace(finding, action="") if finding.kind is Kind.DAMAGED else finding for finding in findings]
    return replace(after.report, findings=tuple(findings)), done


def _names(report: Report, kind: Kind) -> list[ObjectName]:
    """Return the objects listed by findings of a kind."""
    return [name for name in (layout.parse_path(file.path) for file in report.paths(kind)) if name is not None]


def _move_aside(config: Config, evidence: Evidence, *, deep: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Move aside damaged objects whose messages are all in other objects; return their new paths and the failures."""
    storage, report = ArchiveFiles(config.store.url, config.store.options), evidence.report
    examiner = ObjectExaminer(storage, None)
    damaged = {file.path for file in report.paths(Kind.DAMAGED)}
    named = [(file, file.name) for file in storage.files(config.source.stream) if file.name is not None]
    intact = [pair for pair in named if pair[0].path not in damaged]
    # no sequence has two messages
    single = report.stream_created is not None and not (report.older or report.of(Kind.FORK, Kind.REWIND))
    moved, errors = [], []
    for file, name in named:
        if file.path not in damaged or not isinstance(examined(examiner, file, name, deep=deep), str):
            continue
        try:
            gaps = evidence.accounted.gaps(name.first_seq, name.last_seq)
            if (single and not any(gaps)) or _is_elsewhere(examiner, name, intact):
                moved.append(move_aside(storage, file))
        except StoreError as error:
            errors.append(str(error))
    return tuple(moved), tuple(errors)


def _is_elsewhere(examiner: ObjectExaminer, name: ObjectName, intact: Sequence[tuple[File, ObjectName]]) -> bool:
    """Whether other objects of the block have exactly the messages of the object's name."""
    seqs, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for file, other in intact:
        if layout.overlap(other, name) and (other.directory, other.bucket) == (name.directory, name.bucket):
            with suppress(DamagedError):
                _, stored, moments = examiner.identities(file, other)
                inside = (stored >= name.first_seq) & (stored <= name.last_seq)
                seqs.append(stored[inside])
                times.append(moments[inside])
    seq, time = np.unique(np.stack([np.concatenate(seqs), np.concatenate(times)]), axis=1)
    return layout.digest(seq.tobytes(), time.tobytes()) == name.digest


class _Repairer:
    """Stores the sequences `absent`, except those that may be in the objects `unread`.

    Rewrites `damaged` objects under their names if possible.
    """

    def __init__(
        self,
        config: Config,
        before: Report,
        absent: Sequences,
        damaged: Sequence[ObjectName],
        unread: Sequence[ObjectName],
        progress: Progress,
    ) -> None:
        self.recapture = Recapture(config, _SEALED_BY, self._choose, self._put)
        self._config = config
        self._created, self._mark = before.stream_created or "", before.watermark
        self.recapture.set_source(self._created, config.source.consumer)
        self._absent, self._taken, self._skipped = absent, Sequences(), Sequences()
        self._damaged = {name.path: name for name in damaged}
        self._unread: dict[BlockId, list[ObjectName]] = {}
        for name in unread:
            self._unread.setdefault(_block(name), []).append(name)
        self._only: BlockId | None = None
        """Store only messages of this block."""
        self._progress = progress
        self._done = Repair()

    async def run(self) -> Repair:
        """Read and store everything. Raises SourceError, StoreError."""
        source = self._config.source
        await self.recapture.check_store()
        name = f"jetcapture repair {source.stream}/{source.consumer}"
        async with ReadSession(self._config.nats, name, timeout=SERVER_TIMEOUT_S) as session:
            if self._mark is not None:
                session.know(source.stream, self._mark.origin, progressed=True)  # verify has compared them
            if (await session.state(source.stream)).created != self._created:
                raise SourceError(f"stream {source.stream} was deleted and created again; nothing was stored")
            for damaged in [*self._damaged.values()][:MAX_REPLACED]:
                self._only = _block(damaged)
                await self._store_range(session, damaged.first_seq, damaged.last_seq)
            self._only = None
            await self._store_range(session, self._absent.first or 0, self._absent.last or 0)
        return replace(self._done, gone=tuple(self._gone()), skipped=len(self._skipped))

    async def _store_range(self, session: ReadSession, first: int, last: int) -> None:
        """Store the absent messages from `first` to `last`."""
        for start, end in list(self._stretches(first, last)):
            part = StreamRange(stream=self._config.source.stream, first=start, end=end + 1)
            async with aclosing(RangeReader(session, part).messages()) as messages:
                async for consumer, received in messages:
                    await self.recapture.add(consumer, self._absent_of(consumer, received, last))
        await self.recapture.flush()

    def _left(self, first: int, last: int) -> Iterator[Any]:
        """Yield the remaining absent sequences from `first` to `last` as sorted arrays."""
        for low, high in list(self._absent.windows()):
            if low <= last and high >= first:
                seqs = self._absent.within(max(low, first), min(high, last))
                yield seqs[~self._taken.contains(seqs)]

    def _stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of sequences to read, without long gaps."""
        for seqs in self._left(first, last):
            yield from _runs(seqs, MAX_READ_THROUGH)

    def _gone(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges that the stream no longer had when it was read."""
        for seqs in self._left(0, _UNLIMITED):
            yield from _runs(seqs, 1)

    def _absent_of(self, consumer: str, received: Received, last: int) -> Received:
        """Return the messages to store."""
        seqs = sequences(self._config.source.stream, consumer, received.replies)
        return received.where(self._absent.contains(seqs) & ~self._taken.contains(seqs) & (seqs <= last))

    def _choose(self, rows: pa.RecordBatch, runs: Sequence[Run], quarantine: bool) -> Rows:
        if self._only is None and not self._unread:
            self._taken.add(rows.column(layout.SEQ).to_numpy())
            return rows, runs
        seqs = rows.column(layout.SEQ).to_numpy()
        indices, chosen, start = [np.zeros(0, np.int64)], [], 0
        for run in runs:
            block = BlockId(key=run.key, bucket=run.bucket, quarantine=quarantine, bundle=run.bundle)
            if self._only not in (None, block):
                continue
            index = np.arange(run.start, run.start + run.length)
            self._taken.add(seqs[index])
            for name in self._unread.get(block, ()):
                inside = (seqs[index] >= name.first_seq) & (seqs[index] <= name.last_seq)
                self._skipped.add(seqs[index[inside]])
                index = index[~inside]
            if len(index):
                indices.append(index)
                chosen.append(replace(run, start=start, length=len(index)))
                start += len(index)
        # a copy, so that a block does not hold the memory of other rows
        return rows.take(pa.array(np.concatenate(indices))), chosen

    async def _put(self, encoded: EncodedBlock) -> None:
        """Store an object; replace a damaged one of the same name, which the store's `put` may not do.

        A failure does not prevent storing the others.
        """
        uploads, path = self.recapture.archiver.uploads, encoded.name.path
        replaced = path in self._damaged and isinstance(uploads.store, NoteStore)
        try:
            if replaced:
                await uploads.call(self.recapture.archiver.types.write)
                await uploads.call(change_note, uploads.store, path, lambda _: bytes(encoded.data))
            else:
                await self.recapture.put(encoded)
        except StoreError as error:
            self._done = replace(self._done, errors=(*self._done.errors, f"{path}: {error}"))
            uploads.retry_for = 0.0  # the others are tried, and not waited for
            return
        self._done = self._done.with_object(encoded, replaced=replaced)
        self._progress("repair", self._done.messages, len(self._absent))


def _unrepairable(report: Report, accounted: Sequences) -> tuple[Unrepairable, ...]:
    """Return the sequences of damaged objects that are in neither the archive nor the stream.

    They include sequences of deleted messages, which were never in the object.
    """
    if not report.proven:
        return ()
    parts: list[Unrepairable] = []
    for file in report.paths(Kind.DAMAGED):
        name = layout.parse_path(file.path)
        gaps = accounted.gaps(name.first_seq, name.last_seq) if name else iter(())
        for starts, ends in gaps:
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            parts += [Unrepairable(path=file.path, first=first, last=last) for first, last in pairs]
            if len(parts) > MAX_LISTED:
                return tuple(parts[:MAX_LISTED])
    return tuple(parts)


def _block(name: ObjectName) -> BlockId:
    return BlockId(key=name.key, bucket=name.bucket, quarantine=name.quarantine, bundle=name.bundle)


def _runs(seqs: Seqs, close: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last sequence of each run of sorted sequences; join runs at most `close` apart."""
    for part in np.split(seqs, np.flatnonzero(np.diff(seqs) > close) + 1):
        if len(part):
            yield int(part[0]), int(part[-1])
