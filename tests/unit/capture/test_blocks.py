from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.capture import blocks as block_module
from jetcapture_py.capture import sealing
from jetcapture_py.capture.blocks import BUFFER_OVERHEAD, Block, Blocks
from jetcapture_py.capture.sealing import SealRules
from jetcapture_py.ledger import Ledger, Memory
from jetcapture_py.transform.keys import Run, group

CHUNK_OVERHEAD = 32 * BUFFER_OVERHEAD
HUGE = 1 << 40
NUMBERS = iter(range(1 << 60))


def make() -> Blocks:
    return Blocks(SealRules(max_age=1e9, max_bytes=HUGE, max_rows=HUGE), Ledger(Memory(1 << 30)))


def rows_of(numbers: Iterable[int], payloads: Sequence[bytes]) -> pa.RecordBatch:
    """Rows with these sequences, and ack subjects that follow from them."""
    known = {
        layout.SEQ: pa.array(numbers, pa.int64()),
        layout.PAYLOAD: pa.array(payloads, pa.binary()),
        REPLY: pa.array([b"ack.%d" % number for number in numbers], pa.binary()),
    }
    arrays = [known.get(field.name, pa.nulls(len(payloads), field.type)) for field in ENVELOPE]
    return pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)


def add(blocks: Blocks, places: Sequence[tuple[str | None, int]], size: int = 10) -> list[Block]:
    """Add a message for each (key, bucket), numbered across the whole test run."""
    numbers = [next(NUMBERS) for _ in places]
    keys, buckets = pa.array([key for key, _ in places], pa.string()), np.array([bucket for _, bucket in places])
    return blocks.add(*group(rows_of(numbers, [b"%d " % n + b"x" * size for n in numbers]), keys, buckets), 0.0)


def numbers_of(block: Block) -> list[int]:
    """The numbers of the block's rows; everything else in a row says the same."""
    found: list[int] = []
    for rows in block.batches():
        numbers = rows.column(layout.SEQ).to_pylist()
        assert rows.column(REPLY).to_pylist() == [b"ack.%d" % number for number in numbers]
        payloads = [payload.split()[0] for payload in rows.column(layout.PAYLOAD).to_pylist()]
        assert payloads == [b"%d" % number for number in numbers]
        found += numbers
    return found


def finish(blocks: Blocks, sealed: list[Block]) -> None:
    for block in sealed:
        blocks.release(block)
        blocks.forget(block)


def assert_empty(blocks: Blocks) -> None:
    assert (blocks.rows, blocks.bytes, blocks.memory, blocks.resident) == (0, 0, 0, 0)
    assert (blocks.open, blocks.sealed, list(blocks)) == (0, 0, [])


def test_a_block_knows_its_bytes_by_its_own_payloads() -> None:
    blocks = make()
    rows = rows_of(range(20), [b"x" * (100_000 if number < 10 else 10) for number in range(20)])
    keys = pa.array(["large"] * 10 + ["small"] * 10)
    blocks.add(*group(rows, keys, np.zeros(20, np.int64)), 0.0)
    large, small = blocks
    assert large.bytes > 1_000_000
    assert small.bytes < 10 * 1000 + CHUNK_OVERHEAD


def add_decoded(blocks: Blocks, documents: Sequence[dict[str, object]], key: str = "a") -> list[Block]:
    """Add messages with decoded columns, those that have a value, all to one block."""
    numbers = [next(NUMBERS) for _ in documents]
    rows = rows_of(numbers, [b"%d " % number for number in numbers])
    for name in dict.fromkeys(name for document in documents for name in document):
        rows = rows.append_column(name, pa.array([document.get(name) for document in documents]))
    return blocks.add(rows, [Run(key=key, bucket=0, start=0, length=len(numbers))], 0.0)


def decoded(block: Block) -> list[dict[str, object]]:
    """What the block's rows have in decoded columns."""
    rows = [row for batch in block.batches() for row in batch.to_pylist()]
    return [{k: v for k, v in row.items() if k not in ENVELOPE.names and v is not None} for row in rows]


def test_each_row_is_copied_once_for_every_power_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    conform = block_module.conform

    def counting(batch: pa.RecordBatch, *arguments: Any) -> pa.RecordBatch:
        copied.append(len(batch))
        return conform(batch, *arguments)

    monkeypatch.setattr(block_module, "conform", counting)
    blocks = make()
    for _ in range(512):
        add(blocks, [("a", 0)])
    assert sum(copied) <= 3 * 512


def test_a_block_is_sealed_before_very_many_values_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_NULLS", 2500)
    fields: dict[str, object] = {f"c{index}": 1 for index in range(200)}
    cases: list[tuple[dict[str, object], dict[str, object], int]] = [
        (fields, {"a": 1}, 22),
        ({"n": fields}, {"a": 1}, 22),
        ({"l": [fields]}, {"l": [{"a": 1}] * 2}, 16),
    ]
    for wide, narrow, full_rows in cases:
        blocks = make()
        assert add_decoded(blocks, [wide] * 10) == []
        full = add_decoded(blocks, [narrow] * 1000)
        assert [(block.rows, block.sealed_by) for block in full] == [(full_rows, "bytes")]
        assert blocks.rows == 1010 - full_rows, "rows of the same columns miss nothing"
        (narrow_block,) = add_decoded(blocks, [wide] * 10)
        assert narrow_block.rows == 1010 - full_rows


def test_what_a_chunk_takes_is_counted_until_it_is_released() -> None:
    blocks = make()
    before = pa.total_allocated_bytes()
    for _ in range(30):
        add(blocks, [("a", 0)] * 50 + [("b", 0)] * 50, size=1000)
    allocated = pa.total_allocated_bytes() - before
    assert allocated <= blocks.memory < 1.2 * allocated
    assert blocks.memory - 30 <= blocks.resident <= blocks.memory
    sealed = blocks.seal(blocks.oldest(1), "age")
    assert blocks.memory * 0.49 < blocks.resident < blocks.memory * 0.51
    finish(blocks, sealed)
    assert blocks.memory - 30 <= blocks.resident <= blocks.memory
    finish(blocks, blocks.seal_all("drain"))
    assert_empty(blocks)
