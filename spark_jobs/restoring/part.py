"""Read a range of the stream from the archive: merged, ordered, each message once; as a piece of a backup, or counted.

Runs wherever the archive can be read. A range is read as a whole: the planner keeps it small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.config.units import format_time, moment_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.transform.frames import header_blocks_of, subjects_of
from jetcapture_py.verify.ranges import Sequences
from spark_jobs.restoring import backup

MAX_SHOWN = 5
"""Maximum gaps that are listed; all are counted."""

_SURVEYED = (layout.SEQ, layout.TIMESTAMP, layout.NANOS, layout.ROW)
_HEADERS = (layout.HEADERS, layout.RAW_HEADERS, layout.STAGE)
_RESTORED = (*_SURVEYED, layout.SUBJECT, layout.PAYLOAD, *_HEADERS)
_TYPES = {layout.SUBJECT: pa.string(), layout.HEADERS: HEADERS_TYPE, layout.TIMESTAMP: pa.timestamp("us", "UTC")}
_ROWS, _BYTES = 1 << 16, 64 << 20
"""Messages and bytes to encode at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Row groups of an object."""

    path: str
    groups: tuple[int, ...]
    """Numbers of the row groups."""
    quarantine: bool
    span: tuple[int, int] | None = None
    """Only messages from one time until before another, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """A range of sequences to restore."""

    first: int
    """First sequence."""
    last: int
    """Last sequence, inclusive."""
    pieces: tuple[Piece, ...]
    """Row groups that contain all messages of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The archive, and how its messages are restored."""

    files: ArchiveFiles
    prefix: str = ""
    """Prefix of the subjects; ends in a dot."""
    until: int | None = None
    """Latest timestamp, in nanoseconds, where a sequence has two messages because the server rewound the stream."""
    erased: Erased = field(default_factory=Erased)
    """Messages to leave out."""
    removed: tuple[tuple[int, int], ...] = ()
    """Ranges of sequences of messages that have expired or were erased."""
    without_schedules: bool = False
    """Leave out schedules, which the server would fire again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSurvey:
    """The contents of a range of sequences."""

    messages: int = 0
    """Number of distinct messages to restore."""
    schedules: int = 0
    """Number of schedules that are left out."""
    quarantined: int = 0
    """Messages that are only in the quarantine."""
    copies: int = 0
    """Rows left out because another one has the same message."""
    first: int = 0
    """First stored sequence."""
    last: int = 0
    """Last stored sequence."""
    removed: int = 0
    """Sequences between them that are not stored, and have expired or were erased."""
    gaps: int = 0
    """Number of other gaps between them."""
    shown: tuple[tuple[int, int], ...] = ()
    """First and last sequence of up to `MAX_SHOWN` gaps."""
    oldest: int = 0
    """Earliest timestamp in nanoseconds."""
    newest: int = 0
    """Latest timestamp in nanoseconds."""
    until: int = 0
    """Last sequence with a timestamp not after the requested time; 0 without one."""
    later: int = 0
    """Number of messages with a timestamp after the requested time."""
    subjects: Mapping[str, int] = field(default_factory=dict)
    """Number of messages by subject, if requested."""
    largest: int = 0
    """Bytes of the largest message with its headers, if requested."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a range in order, each message once, with what identifies them."""

    table: pa.Table
    seqs: Any
    nanoseconds: Any
    quarantined: Any
    copies: int


def make_part(reading: Reading, spec: PartSpec) -> tuple[int, list[bytes]]:
    """Return the number of messages in a range, and the range as pieces of a backup. Raises JetcaptureError."""
    rows = _without_schedules(reading, _read(reading, spec, _RESTORED))
    return len(rows.seqs), [chunk for data in _entries(rows, reading.prefix) for chunk in backup.framed(data)]


def survey_part(reading: Reading, spec: PartSpec, *, by_subject: bool, by_size: bool = False) -> PartSurvey:
    """Count what a range has; `by_size` reads everything. Raises JetcaptureError."""
    columns = (*_SURVEYED, layout.SUBJECT) if by_subject else _SURVEYED
    columns = (*columns, *_HEADERS) if reading.without_schedules else columns
    stored = _read(reading, spec, _RESTORED if by_size else columns)
    seqs, times = stored.seqs, stored.nanoseconds
    if not len(seqs):
        return PartSurvey()
    rows = _without_schedules(reading, stored)
    starts, ends, removed = gaps_in(seqs, reading.removed)
    subjects = {}
    if by_subject:
        counted = pc.value_counts(rows.table[layout.SUBJECT])
        subjects = dict(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
    before = seqs if reading.until is None else seqs[times <= reading.until]
    return PartSurvey(
        messages=len(rows.seqs),
        schedules=len(seqs) - len(rows.seqs),
        quarantined=int(np.count_nonzero(rows.quarantined)),
        copies=rows.copies,
        first=int(seqs[0]),
        last=int(seqs[-1]),
        removed=removed,
        gaps=len(starts),
        shown=tuple(zip(starts[:MAX_SHOWN].tolist(), ends[:MAX_SHOWN].tolist(), strict=True)),
        oldest=int(rows.nanoseconds.min(initial=times.max())),
        newest=int(rows.nanoseconds.max(initial=times.min())),
        until=int(before[-1]) if len(before) else 0,
        later=len(seqs) - len(before),
        subjects=subjects,
        largest=max(map(_largest, _slices(rows)), default=0) if by_size else 0,
    )


def _read(reading: Reading, spec: PartSpec, columns: Sequence[str]) -> _Rows:
    """Read the rows of a range. Raises JetcaptureError, also if a sequence belongs to two messages."""
    tables, quarantined = [], []
    for piece in spec.pieces:
        found = [_within(table, spec, piece, reading.erased) for table in _fetch(reading.files, piece, columns)]
        tables += found
        quarantined += [np.full(table.num_rows, piece.quarantine) for table in found]
    others = np.concatenate(quarantined) if quarantined else np.zeros(0, bool)
    return _once(pa.concat_tables(tables, promote_options="default"), others, reading.until)


def _without_schedules(reading: Reading, rows: _Rows) -> _Rows:
    if not reading.without_schedules or not len(rows.seqs):
        return rows
    kept = ~np.concatenate([_schedules(some) for some in _slices(rows)])
    if kept.all():
        return rows
    table = rows.table.filter(pa.array(kept))
    return _Rows(table, rows.seqs[kept], rows.nanoseconds[kept], rows.quarantined[kept], rows.copies)


def _schedules(some: pa.RecordBatch) -> Any:
    """Return which messages are schedules, as a mask."""
    blocks = header_blocks_of(some)
    if blocks is None:
        return np.zeros(len(some), bool)
    return pc.match_substring(blocks, "\r\nNats-Schedule:", ignore_case=True).to_numpy(zero_copy_only=False)


def _once(table: pa.Table, others: Any, until: int | None) -> _Rows:
    """Return rows, of which `others` are from the quarantine, in order and each message once; `until` as in `Reading`.

    Raises JetcaptureError if a sequence belongs to two messages.
    """
    seqs = table[layout.SEQ].to_numpy()
    times = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
    nanos = pc.fill_null(table[layout.NANOS], -1).to_numpy().astype(np.int64)
    if (seqs[1:] > seqs[:-1]).all():
        return _Rows(table, seqs, times * 1000 + np.maximum(nanos, 0), others, 0)
    early = np.ones(len(seqs), bool) if until is None else times * 1000 + np.maximum(nanos, 0) <= until
    order = np.lexsort((others, seqs))
    seqs, times = seqs[order], times[order]
    again = np.concatenate([[False], seqs[1:] == seqs[:-1]])
    if (clash := again & np.concatenate([[False], times[1:] != times[:-1]])).any():
        if not early.all():
            return _once(table.filter(pa.array(early)), others[early], None)
        second = np.flatnonzero(clash)[0]
        later = format_time(moment_of(int(times[second - 1 : second + 1].max())))
        raise JetcaptureError(
            f"sequence {seqs[second]} has two messages: either the server rewound the stream and reused this number at "
            f"{later} (restore the earlier state with a --to-time before that), or the stream was recreated and its "
            "objects do not record which incarnation they belong to"
        )
    kept = order[~again]
    nanos = np.maximum(np.maximum.reduceat(nanos[order], np.flatnonzero(~again)), 0)
    return _Rows(table.take(pa.array(kept)), seqs[~again], times[~again] * 1000 + nanos, others[kept], int(again.sum()))


def _fetch(files: ArchiveFiles, piece: Piece, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read an object's row groups with these columns, those that it has, and always nanoseconds."""
    with files.parquet(files.at(piece.path)) as parquet:
        present = [name for name in columns if name in parquet.schema_arrow.names]
        for group in piece.groups:
            table = parquet.read_row_group(group, columns=present, use_threads=False).replace_schema_metadata(None)
            for name, kind in _TYPES.items():
                if name in present and table.schema.field(name).type != kind:
                    table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
            if layout.NANOS not in present:
                table = table.append_column(layout.NANOS, pa.nulls(table.num_rows, pa.int16()))
            yield table


def gaps_in(seqs: Any, removed: Sequence[tuple[int, int]]) -> tuple[Any, Any, int]:
    """Return the first and last sequences of the gaps between sorted sequences that are not `removed`, and how many
    sequences between them are."""
    breaks = np.flatnonzero(np.diff(seqs) > 1)
    starts, ends = seqs[breaks] + 1, seqs[breaks + 1] - 1
    if not len(starts) or not any(first <= ends[-1] and last >= starts[0] for first, last in removed):
        return starts, ends, 0
    known = Sequences()
    known.add(seqs)
    low, high = int(seqs[0]), int(seqs[-1])
    for first, last in removed:
        if first <= high and last >= low:
            known.add_range(max(first, low), min(last, high))
    left = list(known.gaps(low, high))
    none = np.zeros(0, np.int64)
    starts, ends = (np.concatenate([none, *(gap[side] for gap in left)]) for side in (0, 1))
    return starts, ends, len(known) - len(seqs)


def _within(table: pa.Table, spec: PartSpec, piece: Piece, erased: Erased) -> pa.Table:
    """Return the rows of a range, each message's first row only, without erased messages."""
    seqs = table[layout.SEQ].to_numpy()
    mask = (seqs >= spec.first) & (seqs <= spec.last)
    if layout.ROW in table.schema.names:
        mask &= pc.fill_null(table[layout.ROW], 0).to_numpy() == 0
        table = table.drop_columns([layout.ROW])
    if piece.span is not None or erased:
        times = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
        mask &= ~erased.contains(seqs, times)
        if piece.span is not None:
            mask &= (times >= piece.span[0]) & (times < piece.span[1])
    if mask.all():
        return table
    places = np.flatnonzero(mask)
    if len(places) > table.num_rows // 2 and places[-1] - places[0] + 1 == len(places):
        return table.slice(int(places[0]), len(places))  # a smaller slice would keep the whole in memory
    return table.take(pa.array(places))


def _slices(rows: _Rows) -> Iterator[pa.RecordBatch]:
    """Yield the rows, some at a time."""
    count = len(rows.seqs)
    size = max(1, min(_ROWS, count * _BYTES // max(1, rows.table.nbytes)))
    for start in range(0, count, size):
        yield from rows.table.slice(start, size).combine_chunks().to_batches()


def _largest(some: pa.RecordBatch) -> int:
    """Return the bytes of the largest message with its headers."""
    sizes = pc.fill_null(pc.binary_length(some.column(layout.PAYLOAD)), 0)
    blocks = header_blocks_of(some)
    return int(pc.max(sizes if blocks is None else pc.add(sizes, pc.binary_length(blocks))).as_py())


def _entries(rows: _Rows, prefix: str) -> Iterator[memoryview]:
    """Yield the entries of messages, some at a time."""
    start = 0
    for some in _slices(rows):
        subjects, blocks = subjects_of(some), header_blocks_of(some)
        if prefix:
            subjects = pc.binary_join_element_wise(pa.scalar(prefix.encode()), subjects, pa.scalar(b""))
        payloads = pc.fill_null(some.column(layout.PAYLOAD), b"")
        end = start + len(some)
        yield backup.messages(subjects, rows.nanoseconds[start:end], rows.seqs[start:end], blocks, payloads)
        start = end
