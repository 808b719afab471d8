"""A KV bucket at some moment (ADR-8), computed from the envelopes of its archived entries and its limits.

An entry is in the bucket until its TTL (`Nats-TTL`, ADR-43) or the bucket's `max_age` has run out, or until newer
entries of its key have replaced it: all older ones for a purge, else all but the newest `max_msgs_per_subject`. A
TTL of `never` exempts an entry from `max_age`. The server does all this without a trace in the stream, or with markers
that come later (ADR-48), so the moments follow from the entries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby
from math import floor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.archive.incarnations import Bounds, bounds_by_incarnation, continued
from jetcapture_py.archive.messages import MessageSet, RowIds
from jetcapture_py.config import buckets
from jetcapture_py.config.buckets import COLUMNS, PREFIXES, PUT, SUBJECTS, is_name
from jetcapture_py.config.units import microseconds_of, parse_nanoseconds, parse_time, quoted
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.reading.columns import INSTANT, listed, outputs
from jetcapture_py.reading.convert import convert
from jetcapture_py.reading.plan import Dedupe
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.transform.batch import header_values
from jetcapture_py.transform.kv import operations

NEEDED = (layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.HEADERS)
"""Columns that define an entry's key, operation and lifetime."""
EXPIRES = "_nats_expires"
"""Column of the end of an entry's lifetime; null for never."""
KEY, OPERATION, REVISION = COLUMNS
QUARANTINED = "_nats_quarantined"
"""Column for `EntryReader.read`: whether an entry is in the quarantine."""
_UNLIMITED = 1 << 30
_MAX_SECONDS = 10**10
"""Seconds from which on a TTL counts as never: the server's durations end before."""
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
"""Units of Go's durations, in seconds."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(h|ms|m|s|[uµμ]s|ns)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketIncarnation:
    """One incarnation of a bucket, and its limits."""

    created: int
    """In microseconds since 1970."""
    continues: bool
    """Whether it may have entries of the earlier one, because it is a mirror or was restored."""
    max_age: int
    """In microseconds; 0 for no limit."""
    per_key: int
    """Number of entries kept per key."""
    ttls: bool
    """Whether entries may have TTLs of their own."""

    @property
    def uncovers(self) -> bool:
        """Whether an older entry of a key becomes the newest again when newer ones expire first."""
        return self.per_key > 1 and (self.ttls or self.max_age > 0)


def check_name(bucket: str) -> None:
    """Raise JetcaptureError unless NATS accepts a bucket of this name."""
    if not is_name(bucket):
        raise JetcaptureError(f"bucket={quoted(bucket)}: expected ASCII letters, digits, '-' and '_'")


def incarnations(
    files: ArchiveFiles, stream: str, max_age: str | float | timedelta | None, per_key: int | None
) -> list[BucketIncarnation]:
    """Return the recorded incarnations of the bucket, oldest first; at least one.

    `max_age` and `per_key` replace the recorded limits. Raises JetcaptureError.
    """
    age = None if max_age is None else _microseconds(max_age)
    if per_key is not None and per_key < 1:
        raise JetcaptureError(f"max_msgs_per_subject={per_key}: expected at least 1")

    def incarnation(created: int, config: Mapping[str, Any], *, continues: bool) -> BucketIncarnation:
        recorded = int(config.get("max_msgs_per_subject", -1))
        return BucketIncarnation(
            created=created,
            continues=continues,
            max_age=int(config.get("max_age", 0)) // 1000 if age is None else age,
            per_key=min(per_key or (recorded if recorded > 0 else _UNLIMITED), _UNLIMITED),
            # they cannot be turned off, so there were none; but an incarnation that it continues may have had them
            ttls=continues or config.get("allow_msg_ttl") is not False,
        )

    recorded = [
        incarnation(microseconds_of(parse_time(config.created)), config.config, continues=config.continues)
        for config in files.stream_configs(stream)
    ]
    return recorded or [incarnation(0, {"max_msgs_per_subject": 1}, continues=False)]


def _microseconds(max_age: str | float | timedelta) -> int:
    if isinstance(max_age, timedelta):
        return max_age // timedelta(microseconds=1)
    try:
        return parse_nanoseconds(max_age) // 1000
    except ValueError as error:
        raise JetcaptureError(f"max_age: {error}") from None


def start_of(
    known: Sequence[BucketIncarnation], until: int | None, bounds: Mapping[int, Bounds]
) -> tuple[BucketIncarnation, int]:
    """Return the incarnation at a time (None: the newest), and the time of its first entries, in microseconds since
    1970.

    A recreated bucket starts its revisions again. A recreated mirror and a restored bucket continue theirs, so all
    older entries belong to them. `bounds` are the first and last sequence of each incarnation by creation time; a
    single incarnation needs none.
    """
    known = [one for one in known if until is None or one.created <= until] or list(known[:1])
    created = [one.created for one in known]
    anew = {one.created for one in known if not one.continues}
    first = continued(created, bounds, anew)[0]
    return known[-1], 0 if first == created[0] else first


def read_bucket(
    url: str | os.PathLike[str],
    bucket: str,
    *,
    as_of: buckets.AsOf | None = None,
    history: bool = False,
    max_age: str | float | timedelta | None = None,
    max_msgs_per_subject: int | None = None,
    columns: Sequence[str] | None = None,
    dedupe: Dedupe = "auto",
    parquet_only: bool = False,
    options: Mapping[str, Any] | None = None,
) -> pa.RecordBatchReader:
    """Return the key-value bucket `bucket` at a moment as Arrow batches: one entry for each key that clients could get.

    `as_of` is a time as for `read_archive`, inclusive, or a revision, for the moment when it was stored; by default
    now, as far as the archive goes. Keys deleted, purged or expired by then are left out, even if the archive has no
    marker for it. `history` returns all entries up to that moment instead, including deletions and expired entries:
    more than the bucket itself keeps.

    Columns: `key_name`, `operation` (put, delete, purge, expire), `revision`, `_nats_expires` (null: never), the
    envelope, with the value in `_nats_payload`, and the decoded columns, which are null if a value could not be
    decoded. `columns` lists the columns to return.

    TTLs and limits are those that the capture recorded; `max_age` (a duration, 0 for no limit) and
    `max_msgs_per_subject` override them. The other arguments are those of `read_archive`. Sequences, times, keys and
    the headers that count are held in memory for all entries; values are not. Raises JetcaptureError.
    """
    check_name(bucket)
    names = None if columns is None else listed(columns)
    stream, moment = f"{PREFIXES['bucket']}{bucket}", buckets.moment(as_of)
    until = moment if isinstance(moment, datetime) else None
    known = incarnations(open_archive(url, options or {}), stream, max_age, max_msgs_per_subject)
    read: dict[str, Any] = {
        "end": None if until is None else until + timedelta(microseconds=1),
        "dedupe": dedupe,
        "parquet_only": parquet_only,
        "options": options,
    }

    def reader_of(chosen: Any, *, quarantine: bool) -> pa.RecordBatchReader:
        return read_archive(url, stream, columns=chosen, quarantine=quarantine, **read)

    # the quarantine first: entries are archived before they leave the quarantine
    bad, good = (
        [_facts(batch) for batch in reader_of(NEEDED.__contains__, quarantine=quarantine)]
        for quarantine in (True, False)
    )
    counts = [sum(batch.num_rows for batch in batches) for batches in (good, bad)]
    entries = _Entries.of([*good, *bad], np.repeat([False, True], counts))
    bounds = bounds_by_incarnation([one.created for one in known], entries.seqs, entries.times)
    incarnation, since = start_of(known, None if until is None else microseconds_of(until), bounds)
    entries = entries.where(entries.times >= since)
    time = microseconds_of(datetime.now(UTC) if until is None else until)
    if isinstance(moment, int):
        entries = entries.where(entries.seqs <= moment)
        if len(entries.seqs):
            time = int(entries.times[np.argmax(entries.seqs)])
    entries = entries.where(pc.not_equal(entries.facts.column(KEY), "").to_numpy(zero_copy_only=False))
    needed = None if names is None else {*NEEDED, *names}.__contains__
    good_rows, bad_rows = (reader_of(needed, quarantine=quarantine) for quarantine in (False, True))
    types = entry_types(good_rows.schema, bad_rows.schema)
    chosen = [(name, name) for name in types] if names is None else outputs(list(types), names)
    schema = pa.schema([(name, types[source]) for name, source in chosen])
    reader = EntryReader(bucket=incarnation, moment=time, history=history, types=types)
    kept = entries.where(reader.chosen(entries))

    def batches() -> Iterator[pa.RecordBatch]:
        for quarantined, rows in enumerate((good_rows, bad_rows)):
            messages = kept.messages(kept.quarantined == bool(quarantined))
            returned = np.zeros(len(messages), bool)
            for batch in rows if len(messages) else ():
                ids = RowIds.of(batch)
                positions = messages.positions(ids.seqs, ids.times)
                mask = positions >= 0
                returned[positions[mask]] = True
                if mask.any():
                    arrays = reader.described(batch.filter(pa.array(mask)))
                    yield pa.RecordBatch.from_arrays([arrays[source] for _, source in chosen], schema=schema)
            if not returned.all():
                raise VanishedError(f"entries of bucket {bucket} were decoded or removed meanwhile: read it again")

    return pa.RecordBatchReader.from_batches(schema, batches())


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryReader:
    """Selects entries at a moment, and returns them with the columns of the result. It can be pickled, for workers."""

    bucket: BucketIncarnation
    moment: int
    """In microseconds since 1970."""
    history: bool
    """Whether to return all entries."""
    types: Mapping[str, pa.DataType]
    """The columns and types of the result: a part of `entry_types`."""

    def read(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Choose from all entries, decoded or not (`QUARANTINED`).

        They are sorted by key, sequence and time, quarantined ones before decoded ones. Of earlier batches, memory
        holds only entries of one key that may still be in the bucket.
        """
        held: pa.RecordBatch | None = None
        for batch in chain(batches, (None,)):
            rows = batch if held is None else held if batch is None else pa.concat_batches([held, batch])
            if rows is None or not rows.num_rows:
                continue
            entries = _Entries.of([_facts(rows)], rows.column(QUARANTINED).to_numpy(zero_copy_only=False))
            last = np.zeros(rows.num_rows, bool) if batch is None else self._last(entries)
            held = rows.filter(pa.array(last))
            held = held.filter(pa.array(self._may_stay(entries.where(last))))
            kept = rows.filter(pa.array(~last)).filter(pa.array(self.chosen(entries.where(~last))))
            if kept.num_rows:
                arrays = self.described(kept)
                yield pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))

    def _last(self, entries: _Entries) -> Mask:
        """Return a mask of the last rows, which may have to be compared with later ones."""
        keys = entries.facts.column(KEY)
        last: Mask = pc.equal(keys, keys[-1]).to_numpy(zero_copy_only=False)
        return last & (entries.seqs == entries.seqs[-1]) if self.history else last

    def _may_stay(self, entries: _Entries) -> Mask:
        """Return a mask of the entries, all of one key, that may still be in the bucket after newer ones."""
        if self.history or not len(entries.seqs):
            return np.ones(len(entries.seqs), bool)
        stored = [int(entries.seqs.argmax())]
        if self.bucket.uncovers:
            stored = _History(entries, self.bucket).stored(range(len(entries.seqs)))
        return np.isin(entries.seqs, entries.seqs[stored])

    def chosen(self, entries: _Entries) -> Mask:
        """Return a mask of the entries to return."""
        return _first_copies(entries) if self.history else _present(entries, self.bucket, self.moment)

    def described(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return the columns of the result for stored entries."""
        facts = _facts(batch)
        added = {
            KEY: facts.column(KEY),
            OPERATION: _operations(facts),
            REVISION: facts.column(layout.SEQ),
            EXPIRES: _ends(facts, self.bucket).cast(pa.timestamp("us")).cast(INSTANT),
        }
        stored = dict(zip(batch.schema.names, batch.columns, strict=True))
        stored = {f"{name}_": values for name, values in stored.items() if name.lower() in COLUMNS} | stored
        absent = pa.nulls(batch.num_rows)
        return {
            name: added[name] if name in added else convert(stored.get(name, absent), type_)
            for name, type_ in self.types.items()
        }


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of a bucket, decoded or not, by row."""

    facts: pa.RecordBatch
    quarantined: Mask

    @classmethod
    def of(cls, facts: Sequence[pa.RecordBatch], quarantined: Mask) -> _Entries:
        return cls(pa.concat_batches([pa.RecordBatch.from_pylist([], _FACTS), *facts]), quarantined)

    @property
    def seqs(self) -> Seqs:
        seqs: Seqs = self.facts.column(layout.SEQ).to_numpy()
        return seqs

    @property
    def times(self) -> Micros:
        times: Micros = self.facts.column(layout.TIMESTAMP).to_numpy()
        return times

    def where(self, mask: Mask) -> _Entries:
        return _Entries(self.facts.filter(pa.array(mask)), self.quarantined[mask])

    def messages(self, mask: Mask) -> MessageSet:
        return MessageSet(self.seqs[mask], self.times[mask])


_OPERATION, _REASON, _TTL, _ROLLUP = _HEADERS = (buckets.OPERATION, buckets.MARKER, "Nats-TTL", "Nats-Rollup")
"""Headers that matter; the first value counts."""
_FACTS = pa.schema(
    [(layout.SEQ, pa.int64()), (layout.TIMESTAMP, pa.int64()), *((name, pa.string()) for name in (KEY, *_HEADERS))]
)


def _facts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return sequences, times in microseconds, keys ("" for messages that are no entries), and the headers."""
    times = batch.column(layout.TIMESTAMP).cast(pa.int64())
    keys = pc.struct_field(pc.extract_regex(batch.column(layout.SUBJECT), f"{SUBJECTS}(?P<key>.+)$"), "key")
    headers = (header_values(batch.column(layout.HEADERS), name) for name in _HEADERS)
    return pa.RecordBatch.from_arrays(
        [batch.column(layout.SEQ), times, pc.fill_null(keys, ""), *headers], schema=_FACTS
    )


def _operations(facts: pa.RecordBatch) -> pa.Array:
    return operations(facts.column(_OPERATION), facts.column(_REASON))


def _ends(facts: pa.RecordBatch, bucket: BucketIncarnation) -> pa.Array:
    """Return the expiry of entries, in microseconds since 1970; null for never."""
    encoded, stored = facts.column(_TTL).dictionary_encode(), facts.column(layout.TIMESTAMP)
    texts = encoded.dictionary.to_pylist()
    ends = pa.nulls(len(stored), pa.int64())
    if bucket.ttls:
        seconds = pa.array([seconds_of(text) for text in texts], pa.int64()).take(encoded.indices)
        ends = pc.add(stored, pc.multiply(seconds, 1_000_000))
    if bucket.max_age:
        exempt = pa.array([text.lower() == "never" for text in texts], pa.bool_()).take(encoded.indices)
        aged = pc.if_else(pc.fill_null(exempt, False), None, pc.add(stored, bucket.max_age))  # noqa: FBT003
        ends = pc.min_element_wise(ends, aged)
    return ends


def seconds_of(ttl: str) -> int | None:
    """Parse a TTL, a number of seconds or a Go duration, to whole seconds; None for never."""
    if ttl.isascii() and ttl.isdecimal():
        seconds = float(ttl)
    else:
        seconds = round(sum((float(number) * _UNITS[unit] for number, unit in _DURATION.findall(ttl)), 0.0), 9)
    return floor(seconds) if 1 <= seconds < _MAX_SECONDS else None


def _first_copies(entries: _Entries) -> Mask:
    """Return a mask without quarantined rows whose entry is also decoded."""
    decoded = entries.messages(~entries.quarantined)
    return ~(entries.quarantined & decoded.contains(entries.seqs, entries.times))


def _present(entries: _Entries, bucket: BucketIncarnation, moment: int) -> Mask:
    """Return a mask of the entries that clients could get at a moment: one per existing key."""
    seqs, quarantined = entries.seqs, entries.quarantined
    ends = _ends(entries.facts, bucket)
    put: Mask = pc.equal(_operations(entries.facts), PUT).to_numpy(zero_copy_only=False)
    codes = entries.facts.column(KEY).dictionary_encode().indices.to_numpy()
    order = np.lexsort((quarantined, -seqs, codes))
    newest = order[np.unique(codes[order], return_index=True)[1]]
    if bucket.uncovers:
        history = _History(entries, bucket)
        rows = np.lexsort((~quarantined, entries.times, seqs, codes)).tolist()
        by_key = (list(group) for _, group in groupby(rows, key=codes.tolist().__getitem__))
        newest = np.array([row for rows in by_key for row in history.newest(rows, moment)], np.int64)
    else:
        put = put & pc.fill_null(pc.greater(ends, moment), True).to_numpy(zero_copy_only=False)  # noqa: FBT003
    chosen = np.full(int(codes.max(initial=-1)) + 1, -1)
    chosen[codes[newest]] = newest
    row = chosen[codes]
    same: Mask = (row >= 0) & (seqs == seqs[row]) & (quarantined == quarantined[row])
    return put & same


class _History:
    """Replays the history of a key: each new entry removes expired ones, and the oldest beyond the limit.

    So older entries become the newest again when newer ones expire first.
    """

    def __init__(self, entries: _Entries, bucket: BucketIncarnation) -> None:
        self._per_key = bucket.per_key
        self._seqs, self._times = entries.seqs.tolist(), entries.times.tolist()
        self._ends = _ends(entries.facts, bucket).to_pylist()
        marked = pc.not_equal(pc.fill_null(entries.facts.column(_REASON), ""), "")
        rolled = pc.equal(pc.fill_null(entries.facts.column(_ROLLUP), ""), "sub")
        self._clears = pc.or_(marked, rolled).to_pylist()

    def newest(self, rows: Sequence[int], moment: int) -> list[int]:
        """Return the row of a key's newest entry at a moment, if any; `rows` are all of the key, in order."""
        if self._lives(rows[-1], moment):
            return [rows[-1]]
        return [row for row in self.stored(rows) if self._lives(row, moment)][-1:]

    def stored(self, rows: Iterable[int]) -> list[int]:
        """Return the rows of the entries in the bucket once the last one is stored."""
        seqs, times, stored = self._seqs, self._times, list[int]()
        for new in rows:
            kept = [
                old
                for old in stored
                if not self._clears[new]
                and (seqs[old], times[old]) != (seqs[new], times[new])
                and self._lives(old, times[new])
            ]
            stored = [*kept, new][-self._per_key :]
        return stored

    def _lives(self, row: int, at: int) -> bool:
        return self._ends[row] is None or self._ends[row] > at


def entry_types(good: pa.Schema, bad: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns of a bucket's entries, decoded or not, and their types.

    In a bucket captured as a stream, fields of values with these names get `_` appended.
    """
    captured = set(COLUMNS) <= {name.lower() for name in good.names}
    types = {KEY: pa.string(), OPERATION: pa.string(), REVISION: pa.int64(), EXPIRES: INSTANT}
    for field in good:
        lower = field.name.lower()
        if lower not in layout.PARTITIONS and not (captured and lower in COLUMNS):
            types[f"{field.name}_" if lower in COLUMNS else field.name] = field.type
    for field in bad:
        if field.name.startswith("_nats_"):
            types.setdefault(field.name, field.type)
    return types
