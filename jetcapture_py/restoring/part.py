"""Read a range of the stream from the archive, sorted and without copies: as a piece of a backup, or to count it.

A range is read as a whole, because the planner keeps it small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask, Micros, Nanos, Seqs
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.config.units import format_time, moment_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.columns import Table
from jetcapture_py.restoring import backup
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.transform.frames import header_blocks_of, subjects_of

_TABLE = Table(
    [pa.schema([*ENVELOPE, (layout.ROW, pa.int32()), (layout.RAW_HEADERS, pa.binary()), (layout.STAGE, pa.string())])],
    quarantine=False,
    columns=None,
)
_IDENTITY = (layout.SEQ, layout.TIMESTAMP, layout.NANOS, layout.ROW)
_QUARANTINE = (layout.RAW_HEADERS, layout.STAGE)
"""Columns of the quarantine; elsewhere, fields of messages may have these names."""
_HEADERS = (layout.HEADERS, *_QUARANTINE)
_RESTORED = (*_IDENTITY, layout.SUBJECT, layout.PAYLOAD, *_HEADERS)
_ROWS, _BYTES = 1 << 16, 64 << 20
"""Messages and bytes to encode at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreObject:
    """An object with messages of the restored stream."""

    name: layout.ObjectName
    file: File
    span: tuple[int, int] | None = None
    """Time range of its messages (end exclusive), in microseconds; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRange:
    """A range of sequences to restore."""

    first: int
    """First sequence."""
    last: int
    """Last sequence, inclusive."""
    objects: tuple[RestoreObject, ...]
    """The objects that contain all messages of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The archive, and the options of reading it."""

    files: ArchiveFiles
    prefix: str = ""
    """Prefix of the subjects; ends in a dot."""
    until: int | None = None
    """Latest timestamp, in nanoseconds, for sequences with two messages after a rewind."""
    erased: Erased = field(default_factory=Erased)
    """Messages to leave out."""
    without_schedules: bool = False
    """Leave out schedules, which the server would fire again."""
    by_subject: bool = False
    """Count messages by subject."""
    by_size: bool = False
    """Find the largest message, which requires reading everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeContents:
    """The contents of a range of sequences."""

    seqs: Seqs
    """Its stored sequences, schedules included, in order."""
    counts: Mapping[str, int]
    """`messages`, `schedules`, `quarantined`, `copies` and `later`, as in `RestoreSurvey`."""
    oldest: int
    """Earliest timestamp in nanoseconds."""
    newest: int
    """Latest timestamp in nanoseconds."""
    subjects: Mapping[str, int]
    """Number of messages by subject, if requested."""
    largest: int
    """Size of the largest message with its headers, if requested; else 0."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a range in order, each message once, with their identities."""

    table: pa.Table
    seqs: Seqs
    nanoseconds: Nanos
    quarantined: Mask
    copies: int

    def filter(self, mask: Mask) -> _Rows:
        if mask.all():
            return self
        table = self.table.filter(pa.array(mask))
        return _Rows(table, self.seqs[mask], self.nanoseconds[mask], self.quarantined[mask], self.copies)


def make_part(reading: Reading, range_: RestoreRange) -> tuple[int, list[bytes]]:
    """Return the number of messages in a range, and the range as pieces of a backup. Raises JetcaptureError."""
    rows = _without_schedules(reading, _read(reading, range_, _RESTORED))
    return len(rows.seqs), [chunk for data in _entries(rows, reading.prefix) for chunk in backup.framed(data)]


def survey_part(reading: Reading, range_: RestoreRange) -> RangeContents | None:
    """Return the contents of a range; None without messages. Raises JetcaptureError."""
    columns = [*_IDENTITY, *([layout.SUBJECT] * reading.by_subject), *(_HEADERS * reading.without_schedules)]
    stored = _read(reading, range_, _RESTORED if reading.by_size else columns)
    if not len(stored.seqs):
        return None
    rows = _without_schedules(reading, stored)
    times = rows.nanoseconds if len(rows.seqs) else stored.nanoseconds
    counts = Counter(
        messages=len(rows.seqs),
        schedules=len(stored.seqs) - len(rows.seqs),
        copies=stored.copies,
        quarantined=int(np.count_nonzero(rows.quarantined)),
        later=0 if reading.until is None else int(np.count_nonzero(stored.nanoseconds > reading.until)),
    )
    subjects = {}
    if reading.by_subject:
        counted = pc.value_counts(rows.table[layout.SUBJECT])
        subjects = dict(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
    return RangeContents(
        seqs=stored.seqs,
        counts=counts,
        oldest=int(times.min()),
        newest=int(times.max()),
        subjects=subjects,
        largest=max(map(_largest, _slices(rows)), default=0) if reading.by_size else 0,
    )


def last_until(reading: Reading, range_: RestoreRange) -> int:
    """Return the last sequence of a range with a timestamp not after `reading.until`; 0 without one."""
    rows = _read(reading, range_, _IDENTITY)
    seqs = rows.seqs if reading.until is None else rows.seqs[rows.nanoseconds <= reading.until]
    return int(seqs.max(initial=0))


def _read(reading: Reading, range_: RestoreRange, columns: Sequence[str]) -> _Rows:
    """Read the rows of a range. Raises JetcaptureError, also if a sequence belongs to two messages."""
    schema = pa.schema([_TABLE.schema.field(name) for name in columns])
    tables, quarantined = [schema.empty_table()], [np.zeros(0, bool)]
    for part in range_.objects:

        def keep(seqs: Seqs, times: Micros, span: tuple[int, int] | None = part.span) -> Mask:
            mask = ~reading.erased.contains(seqs, times)
            return mask if span is None else mask & (times >= span[0]) & (times < span[1])

        reader = PlanReader(
            files=reading.files,
            table=_TABLE,
            columns=[name for name in columns if part.name.quarantine or name not in _QUARANTINE],
            bounds=(),
            keys=None,
            seqs=(range_.first, range_.last),
            keep=keep if part.span is not None or reading.erased else None,
        )
        for batch in reader.batches(part.file, part.name):
            rows = batch.column(layout.ROW)
            if rows.null_count < len(rows):  # the first row of a message has all that is needed
                batch = batch.filter(pc.equal(pc.fill_null(rows, 0), 0))
            if layout.PAYLOAD in columns and batch.column(layout.PAYLOAD).null_count:
                raise JetcaptureError(f"{part.name.path} has messages without {layout.PAYLOAD}; restore needs it")
            tables.append(pa.Table.from_batches([batch]))
            quarantined.append(np.full(len(batch), part.name.quarantine))
    return _once(pa.concat_tables(tables, promote_options="default"), np.concatenate(quarantined), reading.until)


def _without_schedules(reading: Reading, rows: _Rows) -> _Rows:
    if not reading.without_schedules or not len(rows.seqs):
        return rows
    return rows.filter(~np.concatenate([_schedules(batch) for batch in _slices(rows)]))


def _schedules(batch: pa.RecordBatch) -> Mask:
    """Return a mask of the schedules."""
    blocks = header_blocks_of(batch)
    if blocks is None:
        return np.zeros(len(batch), bool)
    schedules: Mask = pc.match_substring(blocks, "\r\nNats-Schedule:", ignore_case=True).to_numpy(zero_copy_only=False)
    return schedules


def _once(table: pa.Table, quarantined: Mask, until: int | None) -> _Rows:
    """Sort rows and keep each message once; `quarantined` is a mask of them, `until` as in `Reading`.

    Raises JetcaptureError if a sequence belongs to two messages.
    """
    seqs = table[layout.SEQ].to_numpy()
    times = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
    nanos = pc.fill_null(table[layout.NANOS], -1).to_numpy().astype(np.int64)
    if (seqs[1:] > seqs[:-1]).all():
        return _Rows(table, seqs, times * 1000 + np.maximum(nanos, 0), quarantined, 0)
    in_time = np.ones(len(seqs), bool) if until is None else times * 1000 + np.maximum(nanos, 0) <= until
    order = np.lexsort((quarantined, seqs))
    seqs, times = seqs[order], times[order]
    repeated = np.concatenate([[False], seqs[1:] == seqs[:-1]])
    if (clash := repeated & np.concatenate([[False], times[1:] != times[:-1]])).any():
        if not in_time.all():
            return _once(table.filter(pa.array(in_time)), quarantined[in_time], None)
        second = np.flatnonzero(clash)[0]
        later = format_time(moment_of(int(times[second - 1 : second + 1].max())))
        raise JetcaptureError(
            f"sequence {seqs[second]} has two messages: either the server rewound the stream and reused this number at "
            f"{later} (restore the earlier state with a --to-time before that), or the stream was recreated and its "
            "objects do not record which incarnation they belong to"
        )
    first = ~repeated
    rows = order[first]
    nanos = np.maximum(np.maximum.reduceat(nanos[order], np.flatnonzero(first)), 0)
    nanoseconds = times[first] * 1000 + nanos
    return _Rows(table.take(pa.array(rows)), seqs[first], nanoseconds, quarantined[rows], len(order) - len(rows))


def _slices(rows: _Rows) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches."""
    count = len(rows.seqs)
    size = max(1, min(_ROWS, count * _BYTES // max(1, rows.table.nbytes)))
    for start in range(0, count, size):
        yield from rows.table.slice(start, size).combine_chunks().to_batches()


def _largest(batch: pa.RecordBatch) -> int:
    """Return the bytes of the largest message with its headers."""
    sizes = pc.binary_length(batch.column(layout.PAYLOAD))
    blocks = header_blocks_of(batch)
    return int(pc.max(sizes if blocks is None else pc.add(sizes, pc.binary_length(blocks))).as_py())


def _entries(rows: _Rows, prefix: str) -> Iterator[memoryview]:
    """Yield the entries of messages in batches."""
    start = 0
    for batch in _slices(rows):
        subjects, blocks = subjects_of(batch), header_blocks_of(batch)
        if prefix:
            subjects = pc.binary_join_element_wise(pa.scalar(prefix.encode()), subjects, pa.scalar(b""))
        end = start + len(batch)
        payloads = batch.column(layout.PAYLOAD)
        yield backup.messages(subjects, rows.nanoseconds[start:end], rows.seqs[start:end], blocks, payloads)
        start = end
