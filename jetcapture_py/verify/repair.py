"""Capture again what an archive lacks: read it from the stream, and store it as the daemon would have.

The consumer is not touched, and nothing is acknowledged. The watermark keeps its position, because a repair makes true
what it says. Names follow from messages: after a repair that was killed, another one stores what is still missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
from jetcapture_py.capture import parts, pressure
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.decoding import Decoding
from jetcapture_py.capture.encoding import Encoding
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.storing import probe, put_all
from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.ack_subject import sequences
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store import NoteStore, change_note, configured_store
from jetcapture_py.text import plural
from jetcapture_py.transform.keys import Run
from jetcapture_py.verify.findings import MAX_LISTED, Kind, Report, indented
from jetcapture_py.verify.holes import Details
from jetcapture_py.verify.proof import TIMEOUT, verify
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import Progress

CLOSE = 1_000
"""Distance in sequences up to which reading on is cheaper than starting a new range."""
MOST_REPLACED = 100
"""Maximum damaged objects that are replaced under their own names; for each, a range of the stream is read."""
RETRY_FOR = 60.0
"""Seconds for which a failing store is retried at most: somebody waits for the answer."""

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
    """The result of a repair. `messages` were stored again, `quarantined` of them in the quarantine.

    They are in `stored` new objects, the first of which are `objects`, and `bytes` large; `replaced` of these have
    replaced a damaged object. `gone` are ranges of sequences that left the stream before they could be read, and
    `unrepairable` those of damaged objects that are nowhere else.
    """

    messages: int = 0
    quarantined: int = 0
    stored: int = 0
    bytes: int = 0
    replaced: int = 0
    objects: tuple[str, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    unrepairable: tuple[Unrepairable, ...] = ()

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
        lost += [f"{each.first} to {each.last}: {each.path} is damaged" for each in self.unrepairable]
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
    config: Config, *, deep: bool = False, content: bool = False, progress: Progress | None = None
) -> tuple[Report, Repair]:
    """Store the messages that are in the stream and missing in the archive; return the proof after that, and what was
    done. `deep` and `content` are those of `verify`. Raises ConfigError, SourceError, StoreError."""
    found, left = Details(), Details()
    before = await verify(config, deep=deep, content=content, progress=progress, details=found)
    if len(found.uncertain) and isinstance(store := configured_store(config.store), NoteStore):
        await asyncio.to_thread(change_note, store, watermark.path(config.source.stream), _repaired)
        found = Details()  # there may be more without what archived messages tell
        before = await verify(config, deep=deep, content=content, progress=progress, details=found)
    absent = found.missing
    absent.update(found.uncertain)
    if not len(absent):
        return before, Repair(unrepairable=_unrepairable(before, found.archived))
    damaged = (
        [] if "{key}" in config.store.url else [layout.parse_path(each.path) for each in before.paths(Kind.DAMAGED)]
    )
    repairer = _Repairer(config, before.stream_created or "", absent, [name for name in damaged if name], progress)
    try:
        done = await repairer.run()
    finally:
        repairer.close()
    after = await verify(config, deep=deep, content=content, progress=progress, details=left)
    return after, replace(done, unrepairable=_unrepairable(before, left.archived))


class _Repairer:
    """Stores the sequences `absent`; those of `damaged` objects as far as possible in objects of the same names."""

    def __init__(
        self, config: Config, created: str, absent: Sequences, damaged: Sequence[ObjectName], progress: Progress | None
    ) -> None:
        limits = config.limits.model_copy(update={"spool": None})
        store = config.store.model_copy(update={"retry_for": min(config.store.retry_for, RETRY_FOR)})
        self._config = config = config.model_copy(update={"limits": limits, "store": store})
        self._preparer = parts.preparer(config, None, None)
        encoder = parts.encoder(config, None, None).for_stream(created, config.source.consumer)
        self._state = CaptureState(config, configured_store(store), whole_blocks=encoder.whole_blocks)
        self._encoding = Encoding(self._state, encoder)
        self._decoding: tuple[str, Decoding] | None = None
        self._absent, self._taken = absent, Sequences()
        self._damaged = {name.path: name for name in damaged}
        self._progress = progress
        self._done = Repair()

    async def run(self) -> Repair:
        """Read and store everything. Raises SourceError, StoreError."""
        config = self._config
        await probe(self._state, asyncio.Event())
        name = f"jetcapture repair {config.source.stream}/{config.source.consumer}"
        async with ReadSession(config.nats, name, timeout=TIMEOUT) as session:
            if (await session.state(config.source.stream)).created != self._encoding.encoder.stream_created:
                raise SourceError(f"stream {config.source.stream} was deleted and created again; nothing was stored")
            for damaged in [*self._damaged.values()][:MOST_REPLACED]:
                await self._store_range(session, damaged.first_seq, damaged.last_seq, damaged)
            await self._store_range(session, self._absent.first or 0, self._absent.last or 0, None)
        return replace(self._done, gone=tuple(self._gone()))

    def close(self) -> None:
        """End the threads."""
        self._state.decode_threads.shutdown(wait=False, cancel_futures=True)
        self._state.store_threads.shutdown(wait=False, cancel_futures=True)

    async def _store_range(self, session: ReadSession, first: int, last: int, only: ObjectName | None) -> None:
        """Store what is absent from `first` to `last`, or what of it belongs to the block of one damaged object."""
        for start, end in list(self._stretches(first, last)):
            wanted = StreamRange(stream=self._config.source.stream, first=start, end=end + 1)
            async with aclosing(RangeReader(session, wanted).messages()) as messages:
                async for consumer, received in messages:
                    await self._add(consumer, self._wanted(consumer, received, last), only)
        await self._store(self._state.blocks.seal_all(_SEALED_BY))

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

    def _wanted(self, consumer: str, received: Received, last: int) -> Received:
        """Return the messages that are to be stored."""
        seqs = sequences(self._config.source.stream, consumer, received.replies)
        return received.where(self._absent.contains(seqs) & ~self._taken.contains(seqs) & (seqs <= last))

    async def _add(self, consumer: str, wanted: Received, only: ObjectName | None) -> None:
        """Decode and route messages, and put them into blocks; store those that are full, or too much together."""
        state, decoding = self._state, self._decoder(consumer)
        state.preparing = wanted
        while state.preparing:
            prepared = await decoding.next()
            if prepared is None:
                continue  # too many at once: fewer come next time
            self._encoding.set_columns(prepared.columns)
            full: list[Block] = []
            for quarantine, rows, runs in (
                (False, prepared.rows, prepared.runs),
                (True, prepared.quarantine, prepared.quarantine_runs),
            ):
                own, places = (rows, runs) if only is None else _of(only, rows, runs, quarantine=quarantine)
                if places:
                    self._taken.add(own.column(layout.SEQ).to_numpy())
                    full += state.blocks.add(own, places, 0.0, quarantine=quarantine)
            state.preparing = decoding.rest
            await self._store([*full, *pressure.seal(state.blocks, self._config.limits)])

    def _decoder(self, consumer: str) -> Decoding:
        """Return what decodes messages delivered to `consumer`."""
        if self._decoding is None or self._decoding[0] != consumer:
            self._decoding = consumer, Decoding(self._state, replace(self._preparer, consumer=consumer))
        return self._decoding[1]

    async def _store(self, blocks: Sequence[Block]) -> None:
        """Encode blocks and store their objects, several at a time."""
        waiting = deque(blocks)

        async def work() -> None:
            while waiting:
                block = waiting.popleft()
                for encoded in await self._encoding.encode([block]):
                    await self._put(encoded)
                    self._state.encoded_bytes -= encoded.memory
                self._state.blocks.forget(block)

        await asyncio.gather(*(work() for _ in range(min(len(blocks), self._config.store.concurrency))))

    async def _put(self, encoded: EncodedBlock) -> None:
        """Store an object; a damaged one of the same name is replaced, which `put` need not do."""
        state, path, replaced = self._state, encoded.name.path, False
        if path in self._damaged and isinstance(state.store, NoteStore):
            data = bytes(encoded.data)
            await state.in_thread(state.store_threads, partial(change_note, state.store, path, lambda _: data))
            replaced = True
        else:
            async for _ in put_all(state, [encoded]):
                pass
        self._done = self._done.with_object(encoded, replaced=replaced)
        if self._progress is not None:
            self._progress("repair", self._done.messages, len(self._absent))


def _unrepairable(before: Report, archived: Sequences) -> tuple[Unrepairable, ...]:
    """Return which sequences of objects that were damaged are not in the archive after the repair.

    The stream does not have them either. Those of deleted messages, which were never in the object, are among them.
    """
    if not before.proven:
        return ()
    found: list[Unrepairable] = []
    for file in before.paths(Kind.DAMAGED):
        name = layout.parse_path(file.path)
        gaps = archived.gaps(name.first_seq, name.last_seq) if name else iter(())
        for starts, ends in gaps:
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            found += [Unrepairable(path=file.path, first=first, last=last) for first, last in pairs]
            if len(found) > MAX_LISTED:
                return tuple(found[:MAX_LISTED])
    return tuple(found)


def _repaired(data: bytes | None) -> bytes | None:
    """Return the watermark with the note that messages near its changes of filters were stored again."""
    if data is None:
        return None
    mark = watermark.decode(data)
    return replace(mark, filters=tuple(replace(entry, repaired=not entry.sure) for entry in mark.filters)).encode()


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
