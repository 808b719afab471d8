from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.ordering import ordered
from jetcapture_py.archive.schema import ENVELOPE
from tests.unit.archive.test_writer import batch, plain

Row = tuple[int, int]  # sequence, row in the message


def table(rows: list[Row], cuts: list[int]) -> pa.Table:
    """Rows of multi-row messages, in batches that end at `cuts`."""
    whole = batch([(seq, seq * 1000) for seq, _ in rows])
    whole = whole.append_column(layout.ROW, pa.array([row for _, row in rows], pa.int32()))
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    return pa.Table.from_batches([whole.slice(a, b - a) for a, b in pairwise(edges)])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
    st.integers(1, 3000),
)
def test_the_pieces_are_all_rows_in_order_and_no_message_in_two(rows: list[Row], cuts: list[int], size: int) -> None:
    pieces, repeated = ordered(table(rows, cuts), size)
    found = [list(zip(*piece.select([layout.SEQ, layout.ROW]).to_pydict().values(), strict=True)) for piece in pieces]
    assert [row for piece in found for row in piece] == sorted(set(rows))
    assert repeated == len(rows) - len(set(rows))
    messages = [{seq for seq, _ in piece} for piece in found]
    assert sum(map(len, messages)) == len({seq for seq, _ in rows})


def with_payloads(count: int, payloads: list[bytes], keys: list[str]) -> pa.RecordBatch:
    rows = batch(plain(count), key=keys)
    at = rows.schema.get_field_index(layout.PAYLOAD)
    return rows.set_column(at, ENVELOPE.field(layout.PAYLOAD), pa.array(payloads, pa.binary()))


@pytest.mark.parametrize("by_key", [False, True])
def test_only_the_rows_of_one_piece_are_copied_at_a_time(by_key: bool) -> None:
    rows = with_payloads(400, [bytes(50_000)] * 400, [f"k{at * 7 % 50}" for at in range(400)])
    order = np.random.default_rng(7).permutation(400)
    whole = pa.Table.from_batches([rows.take(pa.array(part)) for part in np.split(order, 8)])
    before = pa.total_allocated_bytes()
    pieces, _ = ordered(whole, 1_000_000, by_key=by_key)
    largest = max(pa.total_allocated_bytes() - before for _ in pieces)
    assert largest < 6_000_000, "of 20 MB"


def test_a_row_group_of_a_bundle_ends_at_its_bytes_also_where_one_key_has_all_the_large_rows() -> None:
    count = 5000
    keys = ["small" if at % 10 else "large" for at in range(count)]
    values = [b"x" * (100 if key == "small" else 20_000) for key in keys]
    texts = batch(plain(count), key=keys, text=[value.decode() for value in values])
    for rows in (with_payloads(count, values, keys), texts):
        shuffled = pa.Table.from_batches([rows.take(pa.array(np.random.default_rng(7).permutation(count)))])
        for table in (shuffled, shuffled.slice(0, 1000)):
            pieces, _ = ordered(table, 1_000_000, by_key=True)
            sizes = [(piece.nbytes, piece.num_rows) for piece in pieces]
            assert sum(size for size, _ in sizes) > 1_500_000
            assert max(size for size, _ in sizes) < 1_300_000
            assert sum(rows for _, rows in sizes) == table.num_rows
            assert len(sizes) < 20
