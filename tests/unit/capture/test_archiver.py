"""Received messages in, objects out: each message lies in one object, and is handed on when the store has that."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import InferredColumns
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.archive.removed import Erased, Tombstone
from jetcapture_py.capture import parts
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.capture.blocks import StoredBlock, replies_of
from jetcapture_py.capture.stats import Stats
from jetcapture_py.errors import StoreError
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.store import LocalStore, NoteChange, Store
from tests.support.running import config
from tests.unit.archive.test_removed import NOON

SECOND = 1_700_000_100
"""The first message's, at the start of a time slice."""


class GatedStore:
    """Takes objects once `gate` is open."""

    def __init__(self) -> None:
        self.asked, self.gate = threading.Event(), threading.Event()
        self.objects: dict[ObjectName, pa.Table] = {}

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.asked.set()
        assert self.gate.wait(60)
        self.objects[name] = pq.read_table(pa.BufferReader(data))
        return name.path

    def probe(self) -> None:
        """Nothing is asked of it here."""


class TypedStore(LocalStore):
    """Records the types in the archive at each put, and refuses the first `refusals` changes of them."""

    def __init__(self, root: Path, refusals: int) -> None:
        super().__init__(str(root))
        self.refusals, self.asked, self.types = refusals, 0, list[Any]()

    def change_note(self, path: str, change: NoteChange) -> None:
        self.asked += 1
        if self.asked <= self.refusals:
            raise StoreError(f"cannot write {path}")
        super().change_note(path, change)

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        note = self.read_note("_columns/ORDERS/archive.json")
        self.types.append(None if note is None else json.loads(note)["types"])
        return super().put(name, data)


def archiver(store: Store) -> Archiver:
    block = {"max_messages": 7, "interval": "15m"}
    settings = config("nats://127.0.0.1:1", "/nowhere", decode={"format": "json"}, key="{id}", block=block)
    preparer, encoder = parts.preparer(settings, None, None), parts.encoder(settings, None, None)
    return Archiver(settings, Ledger(Memory(64 << 20)), store, preparer, encoder)


def received(seqs: range) -> Received:
    """Messages, a second apart and of three keys; each tenth is no JSON, each fifth was delivered before."""
    return messages(seqs, [b"{" if seq % 10 == 0 else json.dumps({"id": f"k{seq % 3}"}).encode() for seq in seqs])


def messages(seqs: range, payloads: list[bytes]) -> Received:
    times = [(SECOND + seq - 1) * 1_000_000_000 for seq in seqs]
    return Received.of(
        subjects=[b"orders"] * len(seqs),
        replies=[
            b"$JS.ACK.ORDERS.archive.%d.%d.%d.%d.0" % (1 + (seq % 5 == 0), seq, seq, time)
            for seq, time in zip(seqs, times, strict=True)
        ],
        headers=[b""] * len(seqs),
        payloads=payloads,
    )


async def stored_by(run: Archiver) -> list[StoredBlock]:
    """Store and forget all blocks, as a capture does that acknowledges them at once."""
    run.seal_all("drain")
    blocks: list[StoredBlock] = []
    while run.blocks.sealed:
        await run.store()
        for block in await run.stored():
            blocks.append(block)
            run.forget(block.block)
    return blocks


def test_each_message_lies_in_one_object_of_its_key_and_time_slice() -> None:
    async def scenario() -> None:
        store, stats = GatedStore(), Stats()
        store.gate.set()
        run = archiver(store)
        for seqs in (range(1, 60), range(60, 61), range(61, 1001)):
            async for prepared in run.decoding.pieces(received(seqs)):
                run.add(prepared)
                stats.count_prepared(prepared)
        blocks = await stored_by(run)
        stats.count_stored(blocks)
        run.close()
        places = {}
        for name, table in store.objects.items():
            assert name.rows <= 7
            for seq in table.column(layout.SEQ).to_pylist():
                assert seq not in places
                places[seq] = (name.quarantine, name.key, name.bucket)
        assert places == {
            seq: (seq % 10 == 0, None if seq % 10 == 0 else f"k{seq % 3}", SECOND + (seq - 1) // 900 * 900)
            for seq in range(1, 1001)
        }
        assert sorted(replies_of(blocks).to_pylist()) == sorted(received(range(1, 1001)).replies.to_pylist())
        assert (stats.received, stats.redelivered, stats.quarantine.messages) == (1000, 200, 100)
        assert (stats.stored_messages, stats.stored_rows, stats.stored_blocks) == (1000, 1000, len(store.objects))
        assert (run.blocks.open, run.ledger.unacked, run.ledger["encoded"]) == (0, 0, 0)

    asyncio.run(scenario())


def test_a_block_is_handed_on_when_the_store_has_its_object_and_not_before() -> None:
    async def scenario() -> None:
        store = GatedStore()
        run = archiver(store)
        async for prepared in run.decoding.pieces(received(range(1, 4))):
            run.add(prepared)
        run.seal_all("drain")
        storing, stored = asyncio.create_task(run.store()), asyncio.create_task(run.stored())
        await asyncio.to_thread(store.asked.wait, 60)
        await asyncio.sleep(0)
        assert not stored.done()
        store.gate.set()
        await storing
        assert [block.name for block in await stored] == list(store.objects)
        run.close()

    asyncio.run(scenario())


def test_erased_messages_are_acknowledged_and_not_stored_again() -> None:
    async def scenario() -> None:
        store = GatedStore()
        store.gate.set()
        run = archiver(store)
        seqs = np.array([1, 4, 5], np.int64)
        messages = MessageSet(seqs, (SECOND + seqs - 1) * 1_000_000)
        tombstone = Tombstone(stream="ORDERS", time=NOON, by="ops@host", reason="asked for", messages=messages)
        notes = {"x.json": tombstone.encode()}
        run.encoding.erased = Erased.read("ORDERS", lambda _: list(notes), lambda paths: map(notes.get, paths))
        async for prepared in run.decoding.pieces(received(range(1, 8))):
            run.add(prepared)
        blocks = await stored_by(run)
        run.close()
        kept = [seq for table in store.objects.values() for seq in table.column(layout.SEQ).to_pylist()]
        assert sorted(kept) == [2, 3, 6, 7]
        assert sorted(replies_of(blocks).to_pylist()) == sorted(received(range(1, 8)).replies.to_pylist())
        assert run.encoding.left_out == 3

    asyncio.run(scenario())


def test_objects_wait_until_the_types_of_their_columns_are_in_the_archive(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TypedStore(tmp_path, refusals=2)
        run = archiver(store)
        for seqs in (range(1, 10), range(11, 20)):
            async for prepared in run.decoding.pieces(received(seqs)):
                run.add(prepared)
            await stored_by(run)
        run.close()
        assert store.types == [{"id": "string"}] * 6
        assert store.asked == 3  # no request when nothing is new
        assert run.uploads.storing.errors["temporary"] > 1

    asyncio.run(scenario())


def test_an_open_object_ends_where_the_type_of_another_replica_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = LocalStore(str(tmp_path))
        run = archiver(store)
        other = InferredColumns(stream="ORDERS", consumer="archive", types={"id": "string", "x": "string"}).encode()
        store.change_note("_columns/ORDERS/archive.json", lambda _: other)
        for seq, x in enumerate((1, 2, "a", "b"), 1):
            async for prepared in run.decoding.pieces(
                messages(range(seq, seq + 1), [json.dumps({"id": "k", "x": x}).encode()])
            ):
                run.add(prepared)
            run.types.write()  # as with the next object
        blocks = await stored_by(run)
        run.close()
        paths = [block.name.path for block in blocks if block.name is not None]
        tables = [pq.ParquetFile(tmp_path / path).read() for path in sorted(paths)]
        assert [table["x"].to_pylist() for table in tables] == [[1, 2], ["a", "b"]]
        assert run.sealed_by == {"columns": 1, "drain": 1}

    asyncio.run(scenario())
