"""Blocks that become objects, and the memory that they are given for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.block_writer import TextWriter, UserWriter
from jetcapture_py.capture import encoding, parts
from jetcapture_py.capture.archiver import Archiver
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.store import open_store
from tests.support.running import config
from tests.unit.archive.test_writer import ENCODER
from tests.unit.capture.test_blocks import add

MEMORY = 32 << 20


class Whole:
    """A user's writer, which gets the whole block as one table."""

    suffix = ".whole"

    def write(self, table: pa.Table) -> bytes:
        return b"x"


@pytest.mark.parametrize("own", [True, False])
def test_a_block_that_its_writer_needs_whole_counts_as_memory_although_it_is_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr(encoding, "PIECE_BYTES", 1 << 20)
    spool = {"path": str(tmp_path / "spool"), "size": "1GiB"}
    settings = config(
        "nats://127.0.0.1:1",
        tmp_path / "archive",
        block={"max_bytes": "1GiB"},
        limits={"memory": "32MiB", "spool": spool},
    )

    async def scenario() -> None:
        encoder = replace(ENCODER, format=UserWriter(Whole()) if own else TextWriter("csv", "none"))
        store, preparer = open_store(str(tmp_path), {}), parts.preparer(settings, None, None)
        archiver = Archiver(settings, Ledger(Memory(MEMORY)), store, preparer, encoder)
        assert archiver.blocks.rules.max_bytes == (MEMORY // 4 if own else 1 << 30)
        assert archiver.spooling is not None
        add(archiver.blocks, [("a", 0)] * 1000, size=6000)
        assert archiver.spooling.begin(starved=True)
        async for _ in archiver.spooling.steps():
            pass
        (block,) = archiver.blocks.seal_all("drain")
        assert block.spooled
        taken: list[int] = []
        acquire = archiver.ledger.encoding
        archiver.ledger.encoding = lambda weight: (taken.append(weight), acquire(weight))[1]  # type: ignore[method-assign]
        (encoded,) = await archiver.encode([block])
        assert encoded.messages == 1000
        (weight,) = taken
        assert weight == (3 * block.bytes if own else 4 << 20)
        del encoded
        archiver.close()

    asyncio.run(scenario())
