from __future__ import annotations

import random
from collections import defaultdict
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
FOREVER, HUGE = 1e9, 1 << 40
NUMBERS = iter(range(1 << 60))


def make(*, max_age: float = FOREVER, max_bytes: int = HUGE, max_rows: int = HUGE) -> Blocks:
    return Blocks(SealRules(max_age=max_age, max_bytes=max_bytes, max_rows=max_rows), Ledger(Memory(1 << 30)))


def rows_of(numbers: Iterable[int], payloads: Sequence[bytes]) -> pa.RecordBatch:
    """Rows with these sequences, and ack subjects that follow from them."""
    known = {
        layout.SEQ: pa.array(numbers, pa.int64()),
        layout.PAYLOAD: pa.array(payloads, pa.binary()),
        REPLY: pa.array([b"ack.%d" % number for number in numbers], pa.binary()),
    }
    arrays = [known.get(field.name, pa.nulls(len(payloads), field.type)) for field in ENVELOPE]
    return pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)


def add(
    blocks: Blocks,
    places: Sequence[tuple[str | None, int]],
    now: float = 0.0,
    *,
    size: int = 10,
    quarantine: bool = False,
) -> list[Block]:
    """Add a message for each (key, bucket), numbered across the whole test run."""
    numbers = [next(NUMBERS) for _ in places]
    rows, runs = group(
        rows_of(numbers, [b"%d " % number + b"x" * size for number in numbers]),
        pa.array([key for key, _ in places], pa.string()),
        np.array([bucket for _, bucket in places], np.int64),
    )
    return blocks.add(rows, runs, now, quarantine=quarantine)


def numbers_of(block: Block) -> list[int]:
    found: list[int] = []
    for rows in block.batches():
        numbers = rows.column(layout.SEQ).to_pylist()
        assert rows.column(REPLY).to_pylist() == [b"ack.%d" % number for number in numbers]
        assert [payload.split()[0] for payload in rows.column(layout.PAYLOAD).to_pylist()] == [
            b"%d" % number for number in numbers
        ]
        found += numbers
    return found


def finish(blocks: Blocks, sealed: list[Block]) -> None:
    for block in sealed:
        blocks.release(block)
        blocks.forget(block)


def assert_empty(blocks: Blocks) -> None:
    assert (blocks.rows, blocks.bytes, blocks.memory, blocks.resident) == (0, 0, 0, 0)
    assert (blocks.open, blocks.sealed, list(blocks)) == (0, 0, [])


# ------------------------------------------------------------------ seal rules


def test_all_rows_of_a_message_lie_in_one_block_because_its_object_acknowledges_it() -> None:
    per_message = [3, 1, 4, 2, 2, 6, 1]
    origins = [message for message, count in enumerate(per_message) for _ in range(count)]
    numbers = pa.array([row for count in per_message for row in range(count)], pa.int32())
    rows = rows_of(origins, [b"x"] * len(origins)).append_column(layout.ROW, numbers)
    rows, runs = group(rows, pa.nulls(len(origins), pa.string()), np.zeros(len(origins), np.int64))
    blocks = make(max_bytes=150)
    full = blocks.add(rows, runs, 0.0)
    assert len(full) >= 2
    in_blocks = [
        {origin for part in block.batches() for origin in part.column(layout.SEQ).to_pylist()} for block in blocks
    ]
    assert sorted(origin for found in in_blocks for origin in found) == list(range(len(per_message)))
    assert sum(block.rows for block in blocks) == len(origins)
    assert sum(block.messages for block in blocks) == len(per_message)


def test_a_block_knows_its_bytes_by_its_own_payloads() -> None:
    blocks = make()
    rows = rows_of(range(20), [b"x" * (100_000 if number < 10 else 10) for number in range(20)])
    keys = pa.array(["large"] * 10 + ["small"] * 10)
    blocks.add(*group(rows, keys, np.zeros(20, np.int64)), 0.0)
    large, small = blocks
    assert large.bytes > 1_000_000
    assert small.bytes < 10 * 1000 + CHUNK_OVERHEAD


# ------------------------------------------------------------------ memory


def test_ten_thousand_keys_cost_no_tables_of_their_own() -> None:
    blocks = make()
    add(blocks, [(f"k{index}", 0) for index in range(10_000)], size=10)
    assert blocks.open == 10_000
    assert blocks.memory < 4 << 20
    order = blocks.seal_all("drain")
    random.Random(1).shuffle(order)
    finish(blocks, order)
    assert_empty(blocks)


# ------------------------------------------------------------------ small chunks


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


def test_messages_that_come_one_by_one_are_held_together() -> None:
    blocks = make()
    numbers: dict[str, list[int]] = defaultdict(list)
    for index in range(1000):
        key = "abc"[index % 3]
        add(blocks, [(key, 0)])
        numbers[key].append(numbers_of(next(block for block in blocks if block.id.key == key))[-1])
    assert {block.id.key: numbers_of(block) for block in blocks} == numbers
    assert all(len(block.batches()) < 40 for block in blocks)
    assert blocks.memory < 1000 * 1000
    assert blocks.bytes < 1000 * 1000
    finish(blocks, blocks.seal_all("drain"))
    assert_empty(blocks)


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


def test_wide_messages_that_come_one_by_one_are_held_together() -> None:
    blocks = make()
    document: dict[str, object] = {f"c{index}": index for index in range(300)}
    for _ in range(64):
        add_decoded(blocks, [document])
    (held,) = blocks
    assert decoded(held) == [document] * 64
    assert blocks.memory < 64 * 300 * 16 + 30 * 300 * 1024


def test_messages_with_different_columns_are_held_together_and_lack_what_they_lacked() -> None:
    blocks = make()
    documents: list[dict[str, object]] = [{"a": n} if n % 3 else {"b": "x", "s": {f"f{n % 2}": n}} for n in range(64)]
    for document in documents:
        add_decoded(blocks, [document])
    (held,) = blocks
    assert len(held.batches()) == 1
    rows = [{k: v for k, v in row.items() if v is not None} for row in decoded(held)]
    assert [row.get("a") for row in rows] == [document.get("a") for document in documents]
    assert [row.get("b") for row in rows] == [document.get("b") for document in documents]


def test_values_are_not_converted_to_be_held_together() -> None:
    blocks = make()
    documents: list[dict[str, object]] = [{"a": 2**60 + 1} if n % 2 else {"a": 0.5} for n in range(8)]
    for document in documents:
        add_decoded(blocks, [document])
    (held,) = blocks
    assert decoded(held) == documents


def test_messages_with_ever_other_columns_are_not_filled_up_with_nulls() -> None:
    blocks = make()
    for batch in range(64):
        add_decoded(blocks, [{f"c{batch}_{index}": 1 for index in range(20)}] * 200)
    assert blocks.memory < 64 * (200 * (20 * 9 + 200) + 40 * 1024)


def test_the_quarantine_and_the_others_are_not_held_together() -> None:
    blocks = make()
    for _ in range(8):
        add(blocks, [("a", 0)])
        add(blocks, [(None, 0)], quarantine=True)
    assert [block.rows for block in blocks] == [8, 8]
    assert [len(block.batches()) for block in blocks] == [1, 1]


def test_what_is_left_of_stored_batches_is_held_together() -> None:
    blocks = make()
    for turn in range(64):
        add(blocks, [("slow", 0), *([(f"fast{turn}", 0)] * 500)])
        finish(blocks, blocks.seal([block for block in blocks if block.id.key != "slow"], "age"))
    (slow,) = blocks
    assert slow.rows == len(numbers_of(slow)) == 64
    assert len(slow.batches()) < 20
    assert blocks.memory < 20 * 16 * 1024


# ------------------------------------------------------------------ drifting columns


def test_columns_that_come_and_go_seal_no_block_early() -> None:
    chance = np.random.default_rng(1)
    blocks = make(max_age=10, max_bytes=200_000, max_rows=5000)
    sealed: list[Block] = []
    seq = 1
    for number in range(300):
        count = int(chance.integers(1, 2000))
        seqs = np.arange(seq, seq + count)
        payloads = [chance.bytes(int(size)) for size in chance.integers(1, 400, count)]
        columns = {layout.SEQ: seqs, layout.PAYLOAD: payloads, REPLY: [b"r%d" % seq for seq in seqs]}
        columns |= {f"c{chance.integers(0, 40)}": np.arange(count) for _ in range(3)}
        keys = pa.array([f"k{key}" for key in chance.integers(0, 20, count)])
        rows, runs = group(pa.RecordBatch.from_pydict(columns), keys, np.zeros(count, np.int64))
        sealed += blocks.add(rows, runs, number / 10) + blocks.seal_due(number / 10)
        seq += count
    sealed += blocks.seal_all("drain")
    assert sorted(seq for block in sealed for rows in block.batches() for seq in rows[layout.SEQ].to_pylist()) == list(
        range(1, seq)
    )
    assert max(block.bytes for block in sealed) <= 200_000
    assert len(sealed) <= 410, "645 when the nulls of missing columns counted"
    finish(blocks, sealed)
    assert_empty(blocks)


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
    assert (blocks.memory, blocks.resident) == (0, 0)
