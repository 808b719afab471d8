"""Sort the rows of a block and drop repeated messages, copying one piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Floats, Int64s, Mask, Micros, Seqs
from jetcapture_py.archive.bundles import key_order, row_group_rows
from jetcapture_py.archive.encodings import is_text
from jetcapture_py.archive.messages import first_of_each

PIECE_BYTES = 28 << 20
"""Bytes to copy at once: those of a row group, without the column of the stream's name."""
_PIECE = 64
"""From this mean number of rows per slice, writing slices is cheaper than concatenating them."""


def ordered(table: pa.Table, size: int = PIECE_BYTES, *, by_key: bool = False) -> tuple[Iterator[pa.Table], int]:
    """Sort rows by identity and drop repeated ones: a block may contain a message twice.

    Return an iterator of tables of about `size` bytes, and the number of dropped rows. Rows that are already in order,
    in slices that are not tiny, are not copied. With `by_key`, rows are sorted by key first; each table is a row group.
    """
    order, messages = _order(table)
    if by_key:
        sorted_rows = key_order(table.column(layout.KEY), order)
        texts = _text_bytes(table)
        held = table.get_total_buffer_size()  # shared buffers count once, and whole
        nbytes = max(held, int(texts.sum()))
        shared = held < sum(batch.get_total_buffer_size() for batch in table.to_batches())  # nulls, which are copied
        if nbytes > size or shared:
            nbytes = table.nbytes  # which takes long for many slices
        ends = _group_ends(_upto(texts, sorted_rows, nbytes), nbytes, size)
        if nbytes <= 2 * size:
            table = table.combine_chunks()  # one extra copy; sorting rows of many batches would take several
        return _pieces(table, sorted_rows, ends), table.num_rows - len(sorted_rows)
    ends = _ends(table, order, messages, size)
    return _pieces(table, order, ends), table.num_rows - ends[-1]


def identity(table: pa.Table) -> tuple[Seqs, Micros]:
    """Return sequences and timestamps in microseconds of all rows."""
    seqs = table.column(layout.SEQ).to_numpy()
    return seqs, table.column(layout.TIMESTAMP).to_numpy().view(np.int64)


def _order(table: pa.Table) -> tuple[Int64s | None, Mask | None]:
    """Return the rows to write, in order (None: all, as they are), and which of them begin a message (None: all)."""
    seqs, timestamps = identity(table)
    if (seqs[1:] > seqs[:-1]).all():
        return None, None
    row = np.zeros(len(seqs), np.int32)
    if layout.ROW in table.schema.names:
        row = pc.fill_null(table.column(layout.ROW), 0).to_numpy()
    order = np.lexsort((row, timestamps, seqs))
    seqs, timestamps, row = seqs[order], timestamps[order], row[order]
    begins = first_of_each(seqs, timestamps)
    first = begins.copy()
    first[1:] |= row[1:] != row[:-1]
    return order[first], begins[first]


def _ends(table: pa.Table, order: Int64s | None, begins: Mask | None, size: int) -> list[int]:
    """Return the ends of the pieces, which take about as many bytes each.

    All rows of a message are in one piece.
    """
    rows, total = table.num_rows if order is None else len(order), table.nbytes
    count = -(-total // size)
    if count <= 1:
        return [rows]
    upto = _upto(_text_bytes(table), order, total)
    ends = np.searchsorted(upto, upto[-1] * np.arange(1, count) / count)
    if begins is not None:
        starts = np.append(np.flatnonzero(begins), rows)
        ends = starts[np.searchsorted(starts, ends)]
    return [*(int(end) for end in np.unique(ends) if 0 < end < rows), rows]


def _group_ends(upto: Floats, nbytes: int, size: int) -> list[int]:
    """Return the ends of the row groups of rows that take `upto` bytes up to each; a row group takes at most `size`."""
    count = len(upto)
    rows = row_group_rows(count) or 1
    if nbytes <= size:
        return [*range(rows, count, rows), count]
    ends = [0]
    while ends[-1] < count:
        start = ends[-1]
        fitting = int(np.searchsorted(upto, (upto[start - 1] if start else 0.0) + size, side="right"))
        ends.append(min(start + rows, max(fitting, start + 1), count))
    return ends[1:]


def _upto(texts: Floats, order: Int64s | None, nbytes: int) -> Floats:
    """Return the bytes of the rows up to each one in order: of their texts, and an equal share of the rest."""
    sizes = texts + max(nbytes - texts.sum(), 0.0) / max(len(texts), 1)
    return np.cumsum(sizes if order is None else sizes[order])


def _text_bytes(table: pa.Table) -> Floats:
    """Return the bytes of each row's texts and payloads."""
    sizes = np.zeros(table.num_rows)
    for column in table.columns:
        if is_text(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return sizes


def _pieces(table: pa.Table, order: Int64s | None, ends: Sequence[int]) -> Iterator[pa.Table]:
    batches = table.to_batches()
    start = 0
    for end in ends:
        if order is not None:
            yield _in_order(batches, order[start:end])
        else:
            piece = table.slice(start, end - start)
            yield piece if _is_coarse(piece.column(0).num_chunks, end - start) else piece.combine_chunks()
        start = end


def _in_order(batches: Sequence[pa.RecordBatch], order: Int64s) -> pa.Table:
    """Return the rows of `order`: as slices of the batches if these are few, else copied."""
    if len(batches) == 1:
        return pa.Table.from_batches([batches[0].take(pa.array(order))])
    ends = np.cumsum([len(batch) for batch in batches])
    cut = np.zeros(ends[-1] + 1, bool)  # whether no part goes on beyond this row
    cut[ends] = True
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(order) != 1) | cut[order[1:]]]))
    if not _is_coarse(len(starts), len(order)):
        return _copied(batches, ends, order)
    lengths = np.diff(starts, append=len(order))
    owners = np.searchsorted(ends, order[starts], side="right")
    offsets = order[starts] - (ends[owners] - [len(batches[owner]) for owner in owners])
    slices = zip(owners.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
    return pa.Table.from_batches([batches[owner].slice(offset, length) for owner, offset, length in slices])


def _copied(batches: Sequence[pa.RecordBatch], ends: Int64s, order: Int64s) -> pa.Table:
    """Copy the rows of `order` out of their batches."""
    owners = np.searchsorted(ends, order, side="right")
    grouped = np.argsort(owners, kind="stable")
    rows, owners = order[grouped], owners[grouped]
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
    parts = []
    for start, stop in pairwise(edges):
        batch = batches[owners[start]]
        parts.append(batch.take(pa.array(rows[start:stop] - (ends[owners[start]] - len(batch)))))
    whole = pa.Table.from_batches(parts).combine_chunks()
    back = np.empty(len(grouped), np.int64)
    back[grouped] = np.arange(len(grouped))
    return whole.take(pa.array(back)) if len(parts) > 1 else whole


def _is_coarse(parts: int, rows: int) -> bool:
    return parts * _PIECE <= rows or parts == 1
