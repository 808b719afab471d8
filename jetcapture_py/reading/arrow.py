"""Read an archive with Arrow: each message once, in bounded memory, with the next row groups read ahead.

If objects vanish before the first row is returned, the read is planned again; after it, the read fails.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s, Mask
from jetcapture_py.archive.footer import group_bounds, statistics
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Range
from jetcapture_py.archive.schema import unify
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import INSTANT, Columns, Table, take_nulled
from jetcapture_py.reading.convert import convert, forced
from jetcapture_py.reading.plan import Bound, Dedupe, Keep, ReadPlan, ReadRequest
from jetcapture_py.reading.selection import Keys, Moment, Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles, File, open_archive
from jetcapture_py.store.object_file import belongs

log = logging.getLogger("jetcapture.reading")

_BATCH_BYTES = 8 << 20
_MAX_ROWS = 1 << 16
_PIECE_BYTES = 8 << 20
"""Decoded bytes after which other objects get their turn."""
_REMOTE_OBJECTS = 8
"""Remote objects read at the same time; for local ones, the number of cores plus one."""

Batches = Generator[pa.RecordBatch]
Rows = npt.NDArray[np.bytes_]
"""Identities of rows: byte strings of one length, the sequence first, most significant byte first."""


def read_archive(
    url: str | os.PathLike[str],
    stream: str,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    event_start: Moment | None = None,
    event_end: Moment | None = None,
    keys: Keys | None = None,
    columns: Columns | None = None,
    dedupe: Dedupe = "auto",
    quarantine: bool = False,
    parquet_only: bool = False,
    types: Mapping[str, pa.DataType | str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> pa.RecordBatchReader:
    """Return the archive of `stream` under `url` as Arrow batches, with `key`, `date` and `hour` as string columns.

    `start` (inclusive) and `end` (exclusive) filter by `_nats_timestamp`, `event_start` and `event_end` by
    `_nats_time`, or `_nats_timestamp` in objects without that column. Each is a datetime with a time zone, a date (its
    beginning in UTC), or RFC 3339 text. `keys` filters by key; None stands for messages without one.
    `columns` lists the columns to return, or is a predicate on names.

    `dedupe`: `auto` drops copies where object names allow any; `full` compares all messages, for archives whose key
    rule, `block.interval` or decoding changed while copies were in flight; `none` returns all rows.

    Objects in formats other than Parquet are an error, unless `parquet_only` leaves them out. Integers in some objects
    that are floats in others, also inside structs and lists, become double, if that holds them exactly; other types
    that do not go together become string, structs and lists as JSON. `types` gives columns a type of Arrow or its name,
    such as `bigint`: values that do not convert are null, and the log has a warning with their number when the read
    ends. `options` are the capture's `store.options`. The order of rows is not specified.

    Only the needed objects, row groups and columns are read. The result has all messages archived now, and perhaps some
    that are stored during the read. Raises JetcaptureError, also during the read.
    """
    selection = Selection.of(start, end, keys, event_start, event_end)
    request = ReadRequest(
        files=open_archive(url, options or {}),
        stream=stream,
        selection=selection,
        columns=columns,
        dedupe=dedupe,
        quarantine=quarantine,
        parquet_only=parquet_only,
        types=types,
    )
    plan = request.plan()
    return pa.RecordBatchReader.from_batches(_schema(plan), _batches(plan, request.plan))


def read_planned(planned: Callable[[], ReadPlan]) -> Batches:
    """Yield the rows of a plan with its outputs, each message once.

    `planned` is called again if objects vanish before the first row. Raises JetcaptureError.
    """
    yield from _batches(planned(), planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReader:
    """Reads objects of a plan. It can be pickled, for workers."""

    files: ArchiveFiles
    table: Table
    columns: Sequence[str]
    """Names of the batches' columns in order; distinct."""
    bounds: Sequence[Bound]
    keys: Sequence[str | None] | None
    """The keys to return from objects in bundles; None for all."""
    seqs: Range | None = None
    """The sequences to return, inclusive; None for all."""
    keep: Keep | None = None
    """Chooses messages; None for all."""

    @classmethod
    def of(cls, plan: ReadPlan, columns: Iterable[str]) -> PlanReader:
        """Return a reader for the objects of a plan."""
        return cls(
            files=plan.files,
            table=plan.table,
            columns=list(dict.fromkeys(columns)),
            bounds=plan.bounds,
            keys=plan.selection.keys,
            seqs=plan.selection.seqs,
            keep=plan.keep,
        )

    def batches(self, file: File, name: ObjectName, ranges: Sequence[Range] | None = None) -> Batches:
        """Yield the plan's rows of an object, or of its ranges of sequences.

        Raises VanishedError, StoreError, JetcaptureError if a column no longer fits the plan.
        """
        partitions = self.table.partitions
        by_key = self.keys is not None and bool(name.bundle)
        ranges = self._limited(name, ranges)
        sources = {column.lower() for column in self.columns if column not in partitions}
        exact = {layout.SEQ} if ranges is not None else set()
        exact |= {column for bound in self.bounds for column in bound.columns}
        exact |= set() if self.keep is None else {layout.SEQ, layout.TIMESTAMP}
        if by_key or (name.bundle and layout.KEY in self.columns):
            exact.add(layout.KEY)
        with self.files.parquet(file) as parquet:
            source_of = {stored.lower(): stored for stored in parquet.schema_arrow.names if stored.lower() in sources}
            chosen = {*source_of.values(), *exact.intersection(parquet.schema_arrow.names)} or {layout.SEQ}
            metadata = parquet.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            indexes = [index for index, group in enumerate(groups) if self._may_hold(group, by_key, ranges)]
            rows = _batch_rows([groups[index] for index in indexes], chosen)
            for batch in parquet.batches(rows, indexes, chosen):
                chosen_rows = self._chosen(batch, name, ranges)
                if chosen_rows.num_rows:
                    yield self._shaped(chosen_rows, name, source_of)

    def rows(self, batch: pa.RecordBatch, name: ObjectName) -> pa.RecordBatch:
        """Return the plan's rows of a batch, as if an object of this name held it.

        Raises JetcaptureError if a column does not fit the plan.
        """
        chosen = self._chosen(batch, name, self._limited(name, None))
        return self._shaped(chosen, name, {stored.lower(): stored for stored in batch.schema.names})

    def _limited(self, name: ObjectName, ranges: Sequence[Range] | None) -> Sequence[Range] | None:
        """Limit the ranges of an object (None: all of it) to the sequences to return."""
        if self.seqs is None or (self.seqs[0] <= name.first_seq and name.last_seq <= self.seqs[1]):
            return ranges
        low, high = self.seqs
        within = ((max(first, low), min(last, high)) for first, last in ([self.seqs] if ranges is None else ranges))
        return [(first, last) for first, last in within if first <= last]

    def _chosen(self, batch: pa.RecordBatch, name: ObjectName, ranges: Sequence[Range] | None) -> pa.RecordBatch:
        """Return the rows that pass all filters: ranges, bounds, keys and `keep`."""
        masks = [_within(batch.column(layout.SEQ), ranges)] if ranges is not None else []
        masks += [_bounded(batch, bound) for bound in self.bounds]
        if self.keys is not None and name.bundle:
            masks.append(pc.is_in(batch.column(layout.KEY), pa.array(self.keys, pa.string())))
        if self.keep is not None:
            times = batch.column(layout.TIMESTAMP).cast(INSTANT).cast(pa.int64())
            masks.append(pa.array(self.keep(batch.column(layout.SEQ).to_numpy(), times.to_numpy())))
        return batch.filter(reduce(pc.and_, masks)) if masks else batch

    def _may_hold(self, group: Any, by_key: bool, ranges: Sequence[Range] | None) -> bool:
        """Whether a row group may have rows of the result."""
        if by_key and not _may_have_key(group, self.keys or ()):
            return False
        if any(_outside(group, bound) for bound in self.bounds):
            return False
        seqs = None if ranges is None else group_bounds(group, layout.SEQ)
        return seqs is None or any(first <= seqs[1] and seqs[0] <= last for first, last in ranges or ())

    def _shaped(self, batch: pa.RecordBatch, name: ObjectName, source_of: Mapping[str, str]) -> pa.RecordBatch:
        """Return the rows with exactly the reader's columns; missing ones are null."""
        table, arrays = self.table, []
        for column in self.columns:
            if column in table.partitions:
                if name.bundle and column == layout.KEY:
                    arrays.append(convert(batch.column(layout.KEY), pa.string()))
                else:
                    arrays.append(pa.repeat(pa.scalar(partition_of(name, column), pa.string()), batch.num_rows))
                continue
            folded = column.lower()
            source, target = source_of.get(folded), table.columns[folded].type
            stored = pa.nulls(batch.num_rows) if source is None else batch.column(source)
            if folded in table.given:
                values, nulled = forced(stored, target)
                arrays.append(values)
                if nulled:
                    table.nulled.append((table.columns[folded], nulled))
                continue
            try:
                arrays.append(convert(stored, target))
            except pa.ArrowException as error:  # it was stored after the plan
                changed = f"column {column} is {stored.type} in {name.path}, and was {target} when the read began"
                raise JetcaptureError(f"{changed}: read it again") from error
        return pa.RecordBatch.from_arrays(arrays, list(self.columns))


def partition_of(name: ObjectName, column: str) -> str | None:
    """Return the value of a column that follows from an object's path."""
    if column == layout.KEY:
        return name.key
    date, hour = (part.partition("=")[2] for part in name.directory.split("/")[-2:])
    return date if column == "date" else hour


def _batch_rows(groups: Sequence[Any], columns: Iterable[str]) -> int:
    """Return how many rows to decode at once."""
    names, size = set(columns), 0
    for group in groups:
        leaves = (group.column(number) for number in range(group.num_columns))
        size += sum(leaf.total_uncompressed_size for leaf in leaves if belongs(leaf, names))
    rows: int = sum(group.num_rows for group in groups)
    return max(1, min(_MAX_ROWS, _BATCH_BYTES * rows // max(1, size)))


def _outside(group: Any, bound: Bound) -> bool:
    """Whether the statistics show that no row of a row group is within a bound."""
    limits = group_bounds(group, bound.columns[-1])
    for column in bound.columns[:-1]:
        known = statistics(group, column)
        if known is not None:  # None without the column: the next one counts
            complete = known.has_null_count and not known.null_count
            limits = (known.min, known.max) if complete and known.has_min_max else None
            break
    if limits is None:
        return False
    return (bound.start is not None and limits[1] < bound.start) or (bound.end is not None and limits[0] >= bound.end)


def _may_have_key(group: Any, keys: Sequence[str | None]) -> bool:
    """Whether a row group may have rows of one of `keys`, by the statistics of its key column, if any."""
    known = statistics(group, layout.KEY)
    if known is None or not known.has_null_count:
        return True
    if None in keys and known.null_count:
        return True
    return bool(known.has_min_max) and any(key is not None and known.min <= key <= known.max for key in keys)


def _within(seqs: pa.Array, ranges: Iterable[Range]) -> pa.Array:
    inside = (pc.and_(pc.greater_equal(seqs, first), pc.less_equal(seqs, last)) for first, last in ranges)
    return reduce(pc.or_, inside, pa.array(np.zeros(len(seqs), bool)))


def _bounded(batch: pa.RecordBatch, bound: Bound) -> pa.Array:
    columns = (batch.column(column) for column in bound.columns if column in batch.schema.names)
    values = pc.coalesce(
        *(column.cast(INSTANT) if pa.types.is_timestamp(column.type) else column for column in columns)
    )
    masks = [pc.is_valid(values)]
    if bound.start is not None:
        masks.append(pc.greater_equal(values, pa.scalar(bound.start, values.type)))
    if bound.end is not None:
        masks.append(pc.less(values, pa.scalar(bound.end, values.type)))
    return reduce(pc.and_kleene, masks)


@dataclass(slots=True, kw_only=True)
class _Object:
    """An object to read, and its next rows."""

    name: ObjectName
    batches: Batches
    compared: bool
    """Whether it may contain copies of rows in other objects."""
    step: Future[tuple[list[pa.RecordBatch], bool]] = field(default_factory=Future)


def _schema(plan: ReadPlan) -> pa.Schema:
    types = plan.table.schema
    return pa.schema([(name, types.field(source).type) for name, source in plan.outputs])


def _batches(plan: ReadPlan, planned: Callable[[], ReadPlan]) -> Batches:
    """Yield all rows of a plan, or of a new one if objects vanish before the first row. Raises JetcaptureError."""
    schema, plans = _schema(plan), chain([plan], iter(planned, None))

    def begun() -> Iterable[pa.RecordBatch]:
        current = next(plans)
        united = unify([schema, _schema(current)], lossless=True)  # it may reorder fields, or lack columns
        if changed := {*(united or _schema(current))} - {*schema}:
            names = ", ".join(sorted({field.name for field in changed}))
            raise JetcaptureError(f"columns changed before the first row was read ({names}): read it again")
        table = copy(current.table)
        table.columns = current.table.columns | plan.table.columns
        rows = _rows(replace(current, table=table, outputs=plan.outputs))
        return chain(list(islice(rows, 1)), rows)

    yield from retried(begun)


def _rows(plan: ReadPlan) -> Batches:
    """Yield a plan's rows from several objects at a time, in the same order for the same objects."""
    schema, sources = _schema(plan), [source for _, source in plan.outputs]
    extra = [layout.ROW] if plan.table.several_rows else []
    identity = [layout.SEQ, *(name for name in (*plan.identity, *extra) if name != layout.SEQ)]
    reader, comparing = PlanReader.of(plan, sources), PlanReader.of(plan, [*sources, *identity])
    shared = set(plan.shared)
    pending = deque(
        _Object(
            name=name,
            batches=(comparing if name in shared else reader).batches(plan.objects[name], name, plan.parts.get(name)),
            compared=name in shared,
        )
        for name in sorted(plan.names, key=lambda name: (name.first_seq, name.path))
    )
    local, returned = plan.files.local, _Identities()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    objects = cores + 1 if local else _REMOTE_OBJECTS
    window: deque[_Object] = deque()
    pool = ThreadPoolExecutor(cores if local else objects, "read")
    try:
        while pending or window:
            while pending and len(window) < objects:
                item = pending.popleft()
                item.step = pool.submit(_step, item.batches)
                window.append(item)
            current = window.popleft()
            pieces, more = current.step.result()
            if more:
                current.step = pool.submit(_step, current.batches)
                window.append(current)
            for batch in pieces:
                rows = batch
                if current.compared:
                    rows = batch.filter(pa.array(returned.add_new(_identities(batch, identity))))
                if rows.num_rows:
                    yield pa.RecordBatch.from_arrays([rows.column(source) for source in sources], schema=schema)
            if current.compared and not more:
                begins = [item.name.first_seq for item in (*window, *islice(pending, 1))]
                returned.forget(min(begins, default=0))
    finally:
        pool.shutdown(cancel_futures=True)
        for item in window:
            item.batches.close()
        log_nulled(plan.table)


def log_nulled(table: Table) -> None:
    """Log how many values did not convert to the types that were asked for."""
    if nulled := take_nulled(table.nulled):
        log.warning(nulled)


def _step(batches: Batches) -> tuple[list[pa.RecordBatch], bool]:
    """Decode up to `_PIECE_BYTES`; the flag is False at the end of the object."""
    pieces, size = [], 0
    for batch in batches:
        pieces.append(batch)
        size += batch.nbytes
        if size >= _PIECE_BYTES:
            return pieces, True
    return pieces, False


class _Identities:
    """A set of rows' identities."""

    def __init__(self) -> None:
        self._sorted: list[Rows] = []
        """Sorted arrays, each at least twice as long as the next."""

    def add_new(self, identities: Rows) -> Mask:
        """Add identities; return a mask of the new ones, and of equal ones the first."""
        distinct, first = np.unique(identities, return_index=True)
        new = np.ones(len(distinct), bool)
        for known in self._sorted:
            at = np.minimum(np.searchsorted(known, distinct), len(known) - 1)
            new &= known[at] != distinct
        self._insert(distinct[new])
        mask = np.zeros(len(identities), bool)
        mask[first[new]] = True
        return mask

    def _insert(self, identities: Rows) -> None:
        if not len(identities):
            return
        runs = self._sorted
        runs.append(identities)
        while len(runs) > 1 and len(runs[-2]) < 2 * len(runs[-1]):
            last = runs.pop()
            runs[-1] = np.sort(np.concatenate([runs[-1], last]), kind="stable")

    def forget(self, seq: int) -> None:
        """Remove identities of lower sequences."""
        bound = np.bytes_(seq.to_bytes(8, "big"))
        rest = (known[np.searchsorted(known, bound) :] for known in self._sorted)
        self._sorted = [known.copy() for known in rest if len(known)]


def _identities(rows: pa.RecordBatch, columns: Sequence[str]) -> Rows:
    parts = []
    for name in columns:
        column = rows.column(name)
        if pa.types.is_string(column.type):
            parts.append(_digests(column))
            continue
        numbers = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        parts.append(numbers.astype(">i8").view(np.uint8).reshape(-1, 8))
    joined = np.ascontiguousarray(np.concatenate(parts, axis=1))
    identities: Rows = joined.view(f"S{joined.shape[1]}").ravel()
    return identities


def _digests(texts: pa.StringArray) -> npt.NDArray[np.uint8]:
    """Return a hash of 8 bytes for each text or null."""
    encoded = texts.dictionary_encode(null_encoding="encode")
    digests = [blake2b(repr(text).encode(), digest_size=8).digest() for text in encoded.dictionary.to_pylist()]
    indices: Int64s = encoded.indices.to_numpy()
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 8)[indices]
