"""Capture again what an archive lacks: read it from the stream, and store it as the daemon would have.

The consumer is not touched, and nothing is acknowledged. The watermark keeps its position, because a repair makes true
what it says. Names follow from messages: after a repair that was killed, another one stores what is still missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.layout import BlockId, ObjectName
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.recapture import Recapture, Rows
from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.acks import sequences
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store import NoteStore, change_note, configured_store
from jetcapture_py.text import plural
from jetcapture_py.transform.keys import Run
from jetcapture_py.verify.findings import MAX_LISTED, Kind, Progress, Report, ignore, indented
from jetcapture_py.verify.proof import TIMEOUT, prove
from jetcapture_py.verify.ranges import Sequences

CLOSE = 1_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""
MAX_REPLACED = 100
"""Maximum damaged objects that are replaced under their own names; for each, a range of the stream is read."""

_UNLIMITED = 1 << 62
_SEALED_BY = "repair"
_count = partial(plural, grouped=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepairable:
    """A damaged object, and a range of its sequences that neither another object nor the stream has."""

    path: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The result of a repair."""

    messages: int = 0
    """Messages that were stored again."""
    quarantined: int = 0
    """Those of them that are in the quarantine."""
    stored: int = 0
    """New objects."""
    bytes: int = 0
    """Size of the new objects."""
    replaced: int = 0
    """New objects that have replaced a damaged one."""
    objects: tuple[str, ...] = ()
    """Paths of the first new objects."""
    gone: tuple[tuple[int, int], ...] = ()
    """Ranges of sequences that left the stream before they could be read."""
    unrepairable: tuple[Unrepairable, ...] = ()
    """Ranges of sequences of damaged objects that are nowhere else."""

    def with_object(self, encoded: EncodedBlock, *, replaced: bool) -> Self:
        """Count an object that has been stored."""
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
            yield "repair: nothing was stored, because no message of the stream is known to be missing"
        else:
            parts = [f"{_count(self.messages, 'message')} stored in {_count(self.stored, 'object')}"]
            parts += [f"{self.replaced:,} replaced a damaged one"] if self.replaced else []
            parts += [f"{_count(self.quarantined, 'message')} went to the quarantine"] if self.quarantined else []
            yield f"repair: {', '.join(parts)}"
            yield from indented(self.objects, self.stored)
        lost = [f"{first} to {last}: left the stream before the repair" for first, last in self.gone]
        lost += [f"{part.first} to {part.last}: {part.path} is damaged" for part in self.unrepairable]
        if lost:
            yield "cannot be repaired: neither the stream nor another object has these sequences"
            yield from indented(lost, len(lost))
        if after.of(Kind.DAMAGED) and not after.missing and after.proven:
            yield (
                "readers fail on the damaged objects until they are removed; try to get them back from a copy first"
                if lost
                else "remove the damaged objects: all of their messages are stored in other objects"
            )


async def verify_and_repair(
    config: Config, *, deep: bool = False, content: bool = False, progress: Progress = ignore
) -> tuple[Report, Repair]:
    """Store the messages that are in the stream and missing in the archive; return the proof after that, and what was
    done. `deep` and `content` are those of `verify`. Raises ConfigError, SourceError, StoreError."""
    proof = partial(prove, config, deep=deep, content=content, progress=progress)
    before = await proof()
    if len(before.uncertain) and isinstance(store := configured_store(config.store), NoteStore):
        await asyncio.to_thread(change_note, store, watermark.path(config.source.stream), _repaired)
        before = await proof()  # there may be more without what archived messages tell
    absent = before.missing
    absent.update(before.uncertain)
    if not len(absent):
        return before.report, Repair(unrepairable=_unrepairable(before.report, before.accounted))
    paths = [] if "{key}" in config.store.url else [file.path for file in before.report.paths(Kind.DAMAGED)]
    damaged = [name for name in map(layout.parse_path, paths) if name is not None]
    with _Repairer(config, before.report.stream_created or "", absent, damaged, progress) as repairer:
        done = await repairer.run()
    after = await proof()
    return after.report, replace(done, unrepairable=_unrepairable(before.report, after.accounted))


class _Repairer(Recapture):
    """Stores the sequences `absent`; those of `damaged` objects as far as possible in objects of the same names."""

    def __init__(
        self, config: Config, created: str, absent: Sequences, damaged: Sequence[ObjectName], progress: Progress
    ) -> None:
        super().__init__(config, _SEALED_BY)
        self.set_source(created, config.source.consumer)
        self._created = created
        self._absent, self._taken = absent, Sequences()
        self._damaged = {name.path: name for name in damaged}
        self._only: ObjectName | None = None
        """Store only messages of the block that this object is of."""
        self._progress = progress
        self._done = Repair()

    async def run(self) -> Repair:
        """Read and store everything. Raises SourceError, StoreError."""
        source = self.config.source
        await self.check_store()
        name = f"jetcapture repair {source.stream}/{source.consumer}"
        async with ReadSession(self.config.nats, name, timeout=TIMEOUT) as session:
            if (await session.state(source.stream)).created != self._created:
                raise SourceError(f"stream {source.stream} was deleted and created again; nothing was stored")
            for damaged in [*self._damaged.values()][:MAX_REPLACED]:
                self._only = damaged
                await self._store_range(session, damaged.first_seq, damaged.last_seq)
            self._only = None
            await self._store_range(session, self._absent.first or 0, self._absent.last or 0)
        return replace(self._done, gone=tuple(self._gone()))

    async def _store_range(self, session: ReadSession, first: int, last: int) -> None:
        """Store what is absent from `first` to `last`."""
        for start, end in list(self._stretches(first, last)):
            part = StreamRange(stream=self.config.source.stream, first=start, end=end + 1)
            async with aclosing(RangeReader(session, part).messages()) as messages:
                async for consumer, received in messages:
                    await self.add(consumer, self._absent_of(consumer, received, last))
        await self.flush()

    def _left(self, first: int, last: int) -> Iterator[Any]:
        """Yield the absent sequences from `first` to `last` that are not taken yet, as sorted arrays."""
        for low, high in list(self._absent.windows()):
            if low <= last and high >= first:
                seqs = self._absent.within(max(low, first), min(high, last))
                yield seqs[~self._taken.contains(seqs)]

    def _stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of sequences to read, without long gaps."""
        for seqs in self._left(first, last):
            yield from _runs(seqs, CLOSE)

    def _gone(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges that the stream no longer had when it was read."""
        for seqs in self._left(0, _UNLIMITED):
            yield from _runs(seqs, 1)

    def _absent_of(self, consumer: str, received: Received, last: int) -> Received:
        """Return the messages that are to be stored."""
        seqs = sequences(self.config.source.stream, consumer, received.replies)
        return received.where(self._absent.contains(seqs) & ~self._taken.contains(seqs) & (seqs <= last))

    def choose(self, rows: pa.RecordBatch, runs: Sequence[Run], *, quarantine: bool) -> Rows:
        """Return the rows to store."""
        own, own_runs = (rows, runs) if self._only is None else _of(self._only, rows, runs, quarantine=quarantine)
        if own_runs:
            self._taken.add(own.column(layout.SEQ).to_numpy())
        return own, own_runs

    async def put(self, encoded: EncodedBlock) -> None:
        """Store an object; a damaged one of the same name is replaced, which the store's `put` need not do."""
        state, path, replaced = self.state, encoded.name.path, False
        if path in self._damaged and isinstance(state.store, NoteStore):
            data = bytes(encoded.data)
            await state.in_thread(state.store_threads, partial(change_note, state.store, path, lambda _: data))
            replaced = True
        else:
            await super().put(encoded)
        self._done = self._done.with_object(encoded, replaced=replaced)
        self._progress("repair", self._done.messages, len(self._absent))


def _unrepairable(before: Report, accounted: Sequences) -> tuple[Unrepairable, ...]:
    """Return which sequences of objects that were damaged are not in the archive after the repair.

    The stream does not have them either. Those of deleted messages, which were never in the object, are among them.
    """
    if not before.proven:
        return ()
    parts: list[Unrepairable] = []
    for file in before.paths(Kind.DAMAGED):
        name = layout.parse_path(file.path)
        gaps = accounted.gaps(name.first_seq, name.last_seq) if name else iter(())
        for starts, ends in gaps:
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            parts += [Unrepairable(path=file.path, first=first, last=last) for first, last in pairs]
            if len(parts) > MAX_LISTED:
                return tuple(parts[:MAX_LISTED])
    return tuple(parts)


def _repaired(data: bytes | None) -> bytes | None:
    """Return the watermark with the note that messages near its changes of filters were stored again."""
    if data is None:
        return None
    mark = watermark.decode(data)

    def noted(mark: watermark.Watermark) -> watermark.Watermark:
        return replace(mark, filters=tuple(replace(entry, repaired=not entry.sure) for entry in mark.filters))

    return replace(noted(mark), parts=tuple(map(noted, mark.parts))).encode()


def _of(
    damaged: ObjectName, rows: pa.RecordBatch, runs: Sequence[Run], *, quarantine: bool
) -> tuple[pa.RecordBatch, Sequence[Run]]:
    """Return the rows of the block that a damaged object is of, and where they are."""
    block = BlockId(key=damaged.key, bucket=damaged.bucket, quarantine=damaged.quarantine, bundle=damaged.bundle)
    for run in runs:
        if BlockId(key=run.key, bucket=run.bucket, quarantine=quarantine, bundle=run.bundle) == block:
            # a copy, so that a block does not hold the memory of other rows
            own = rows.take(pa.array(np.arange(run.start, run.start + run.length)))
            return own, [replace(run, start=0)]
    return rows.slice(0, 0), ()


def _runs(seqs: Any, close: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of sorted sequences; join those at most `close` apart."""
    for part in np.split(seqs, np.flatnonzero(np.diff(seqs) > close) + 1):
        if len(part):
            yield int(part[0]), int(part[-1])
