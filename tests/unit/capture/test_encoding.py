"""Blocks that become objects, and the memory that they are given for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py.archive.block_writer import TextWriter, UserWriter
from jetcapture_py.capture import encoding
from jetcapture_py.capture.encoding import Encoding
from jetcapture_py.capture.state import CaptureState
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
        state = CaptureState(settings, open_store(str(tmp_path), {}), whole_blocks=encoder.whole_blocks)
        assert state.blocks.rules.max_bytes == (MEMORY // 4 if own else 1 << 30)
        assert state.spooling is not None
        add(state.blocks, [("a", 0)] * 1000, size=6000)
        assert state.spooling.begin(starved=True)
        async for _ in state.spooling.steps():
            pass
        (block,) = state.blocks.seal_all("drain")
        assert block.spooled
        taken: list[int] = []
        acquire = state.ledger.encoding
        state.ledger.encoding = lambda weight: (taken.append(weight), acquire(weight))[1]  # type: ignore[method-assign]
        (encoded,) = await Encoding(state, encoder).encode([block])
        assert encoded.messages == 1000
        (weight,) = taken
        assert weight == (3 * block.bytes if own else 4 << 20)
        del encoded
        state.spooling.close()

    asyncio.run(scenario())
