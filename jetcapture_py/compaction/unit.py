"""Compact one unit (see `plan`): write new objects, read them back and compare them with the sources.

Nothing is removed here. An `Outcome` names the objects that may be removed after the grace period, if those that
replace them still exist.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import MAX_INTERVAL, BlockId, ObjectName
from jetcapture_py.archive.messages import RowIds
from jetcapture_py.archive.ordering import ordered
from jetcapture_py.archive.schema import with_key_column
from jetcapture_py.archive.writer import ROW_GROUP_BYTES, EncodedBlock, Encoder, ObjectWriter
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.merge import classes, read_rows, survey
from jetcapture_py.compaction.plan import TOLERANCE, Source, Span, Unit, removable, spans
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.removal import Removal
from jetcapture_py.text import one_line

SEALED_BY = "compact"
OPEN = "the bucket is not closed yet"
CHANGED = "another compaction changed it meanwhile"
DRIFTED = "incompatible column types; only objects with compatible types were merged"
REPLACING = "an erasure or redecoding of its rows is unfinished: run it again"
SEVERAL = "objects from layouts with different bundle counts; only objects with the same count were merged"

_STEPS = 64
"""Minimum number of marks per object of the target size or row group, at which it could end."""
_PIECE_ROWS = 1 << 18
"""Rows that are read at once, at most about."""
_CLOSE = 0.05
"""Share of its intended size that an object may lack."""
_MAX_COPIES = 2
"""Average copies of a row above which copies are dropped while reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSpec:
    """Settings: make objects of `target` bytes in buckets that ended before `closed` (seconds since the epoch).

    A row counts as `row_bytes` of an object at least: its identity is in memory while the object is written.
    """

    target: int
    closed: float
    dry_run: bool = False
    row_bytes: float = 0.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result for a unit, or for the objects of a unit with compatible schemas.

    A dry run only counts the `objects` to read and their `size` in bytes. `written` has path and bytes of new objects.
    `holders` together have all messages, so `removable` may be removed, as `removals` say; `sizes` are their bytes. The
    last of all these was written at `since` (seconds since the epoch). `duplicates` counts copied rows. `left` is the
    reason why not everything was compacted; `failed`: that is an error.
    """

    key: str | None
    bucket: int
    bundle: str = ""
    objects: int = 0
    size: int = 0
    written: list[tuple[str, int]] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    removable: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    removals: Sequence[Removal] = ()
    since: float = 0.0
    duplicates: int = 0
    left: str = ""
    failed: bool = False


def compact_unit(files: Files, spec: CompactionSpec, sources: Sequence[Source]) -> list[Outcome]:
    """Compact the objects of one unit. Failures are reported as outcomes."""
    return list(_caught(sources[0].name, _outcomes(files, spec, sources)))


def _caught(name: ObjectName, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Yield outcomes; an error becomes one, so that other units continue."""
    try:
        yield from outcomes
    except VanishedError:
        yield _left(name, CHANGED)
    except Exception as error:
        yield _failed(name, error)


def _outcomes(files: Files, spec: CompactionSpec, sources: Sequence[Source]) -> Iterator[Outcome]:
    name = sources[0].name
    known: list[tuple[Source, ObjectInfo]] = []
    failed: list[Outcome] = []
    for some in (sources[:1], sources[1:]):  # the first object usually shows already that a bucket is open
        for source, footer in zip(some, files.map(partial(_footer, files), some), strict=True):
            if isinstance(footer, ObjectInfo):
                known.append((source, footer))
            else:
                failed.append(_failed(source.name, footer))
        interval = MAX_INTERVAL if failed else _interval([footer for _, footer in known])
        if name.bucket + interval > spec.closed:
            yield from (*failed, _left(name, OPEN))
            return
    yield from failed
    digests = {source.name.digest for source, _ in known}
    if any(not digests.isdisjoint(replaced_by(footer)) for _, footer in known):
        yield _left(name, REPLACING)
        return
    groups: defaultdict[int, list[tuple[Source, ObjectInfo]]] = defaultdict(list)
    for source, footer in known:
        groups[footer.bundles].append((source, footer))
    if len(groups) > 1:
        yield _left(name, SEVERAL)
    for bundles, members in groups.items():
        yield from _caught(name, _merged(files, spec, bundles, members))


def replaced_by(footer: ObjectInfo) -> Sequence[str]:
    """Return the digests of the objects that an object replaces although it has fewer rows (see `rewrite`)."""
    return footer.details.replaces


def _left(name: ObjectName, reason: str) -> Outcome:
    return Outcome(key=name.key, bucket=name.bucket, bundle=name.bundle, left=reason)


def _outcome_of(unit: Unit) -> Outcome:
    name, size = unit.sources[0].name, sum(source.size for source in unit.sources)
    return Outcome(key=name.key, bucket=name.bucket, bundle=name.bundle, objects=len(unit.sources), size=size)


def _failed(name: ObjectName, error: Exception) -> Outcome:
    text = str(error) if isinstance(error, JetcaptureError) else one_line(error)
    return replace(_left(name, text), failed=True)


def _footer(files: Files, source: Source) -> ObjectInfo | Exception:
    """Read an object's footer; return why it cannot be used. Raises VanishedError."""
    try:
        footer = files.footer(source)
        if not layout.is_one_of(source.name.bundle, str(footer.bundles or "")):
            raise JetcaptureError(f"{files.shown}/{source.name.path} has bundles {footer.bundles} in its footer")
    except VanishedError:
        raise
    except Exception as error:
        return error
    return footer


def _merged(
    files: Files, spec: CompactionSpec, bundles: int, known: Sequence[tuple[Source, ObjectInfo]]
) -> Iterator[Outcome]:
    """Compact the objects of one key or bundle."""
    name = known[0][0].name
    existing = {source.name.path: source for source, _ in known}
    kinds = classes([footer.schema for _, footer in known])
    if len(kinds) > 1:
        yield _left(name, DRIFTED)
    for schema, members in kinds:
        footers = {known[index][0].name.path: known[index][1] for index in members}
        unit = Unit((known[index][0] for index in members), spec.row_bytes)
        if len(unit.sources) == 1:
            continue
        if spec.dry_run:
            yield _outcome_of(unit)
            continue
        block = BlockId(key=name.key, bucket=name.bucket, quarantine=name.quarantine, bundle=name.bundle)
        columns = schema if name.quarantine else with_key_column(schema)
        own = [footers[each.name.path] for each in unit.sources]
        yield _Compaction(files, spec, unit, own, columns, existing, block, bundles).run()


def _interval(footers: Sequence[ObjectInfo]) -> int:
    """Return the length of the bucket in seconds; the longest possible if a footer lacks it."""
    return max(footer.interval or MAX_INTERVAL for footer in footers)


class _Compaction:
    """Compacts objects of one unit with compatible schemas; also their `Tally` for planning."""

    def __init__(
        self,
        files: Files,
        spec: CompactionSpec,
        unit: Unit,
        footers: Sequence[ObjectInfo],
        schema: pa.Schema,
        existing: Mapping[str, Source],
        block: BlockId,
        bundles: int,
    ) -> None:
        self._files = files
        self._spec = spec
        self._unit = unit
        self._footers = footers
        self._schema = schema
        self._existing = existing
        self._survey = survey(files, unit, footers, min(spec.target, ROW_GROUP_BYTES) / _STEPS)
        self._ratio: float | None = None
        self._block = block
        self._encoder = encoder_like(unit.sources[0].name.stream, footers, bundles)

    def run(self) -> Outcome:
        """Write new objects and find the objects that may be removed."""
        unit, survey_ = self._unit, self._survey
        done = _outcome_of(unit)
        holders: list[ObjectName] = []
        for span in spans(unit, self._spec.target, self):
            if span.kept is not None:
                holders.append(unit.sources[span.kept].name)
            else:
                holders += self._write(span, done)
        done.duplicates = int(unit.counts.sum()) - survey_.rows(unit.first, unit.end)
        done.holders = [name.path for name in holders]
        gone = [unit.sources[index] for index in removable(unit, holders)]
        self._read_through(done.holders, gone)
        done.removals = self._removals(holders, gone)
        present = {removal.target.path for removal in done.removals}
        gone = [source for source in gone if source.name.path in present]
        done.removable, done.sizes = [source.name.path for source in gone], [source.size for source in gone]
        if done.removals:
            now = time.time()  # a store's clock may be ahead
            files = [file for removal in done.removals for file in (removal.target, *removal.holders)]
            done.since = now if done.written else min(now, max(file.modified or now for file in files))
        return done

    def _removals(self, holders: Sequence[ObjectName], gone: Sequence[Source]) -> list[Removal]:
        """Return the objects to remove that have not changed since they were read, each with its holders."""
        paths = [name.path for name in (*holders, *(source.name for source in gone))] if gone else []
        now = {file.path: file for file in self._files.map(self._files.at, paths) if file is not None}
        if not now.keys() >= {name.path for name in holders if gone}:
            raise VanishedError(f"{self._files.shown}: {CHANGED}")
        return [
            Removal(
                target=now[source.name.path],
                holders=[now[name.path] for name in holders if layout.overlap(name, source.name)],
            )
            for source in gone
            if source.name.path in now and now[source.name.path].size == source.size
        ]

    def _read_through(self, holders: Sequence[str], gone: Sequence[Source]) -> None:
        """Read existing objects in full before they replace others: a killed pass may have written them without
        comparing them. Raises JetcaptureError if one is damaged."""
        for source in self._existing.values():
            if source.name.path in holders and any(layout.overlap(source.name, other.name) for other in gone):
                self._files.read_through(source)

    def rows(self, first: int, end: int) -> int:
        """Return the number of distinct rows."""
        return self._survey.rows(first, end)

    def size(self, first: int, end: int) -> float:
        """Estimate the compressed bytes by the last rows written, or before that by the unit's first rows."""
        return self._counted(self._survey.weight(first, end) * self._compression(), first, end)

    def _counted(self, size: float, first: int, end: int) -> float:
        """Return what an object of `size` bytes with these rows counts as."""
        return max(size, self.rows(first, end) * self._spec.row_bytes)

    def _compression(self) -> float:
        """Return the ratio of compressed to uncompressed bytes."""
        if self._ratio is None:
            begin = self._unit.first
            upto = self._ahead(begin, self._unit.end, ROW_GROUP_BYTES)
            with ObjectWriter(self._encoder, self._block, self._schema) as sample:
                for piece in self._rows(begin, upto):
                    sample.write(piece)
                self._ratio = sample.size / self._survey.weight(begin, upto)
        return self._ratio

    def _rows(self, first: int, end: int) -> Iterator[pa.Table]:
        """Yield the distinct rows of a range as they are written, in bundles sorted by key; a table is a row group."""
        bundle = bool(self._block.bundle)
        many = self._unit.copies(first, end) > _MAX_COPIES * self.rows(first, end)
        table = read_rows(
            self._files, self._unit, self._footers, self._schema, first, end, in_file=bundle, many_copies=many
        )
        return ordered(table, by_key=bundle)[0] if table.num_rows else iter(())

    def _write(self, span: Span, done: Outcome) -> list[ObjectName]:
        """Write a span as objects of about the target size."""
        names = []
        begin = span.first
        while begin < span.end:
            encoded, end = self._encode(begin, span.end)
            counted = self._counted(encoded.data.size, begin, end)
            if self._block.bundle and end < span.end and counted * TOLERANCE < self._spec.target:
                encoded, end = self._encode(begin, span.end)  # planned as a whole, by rows that compress worse
            while encoded.data.size > self._spec.target * TOLERANCE:  # its rows compress worse than those before
                before = end
                encoded, end = self._encode(begin, span.end)
                if end >= before:
                    break
            stored = self._existing.get(encoded.name.path)
            if stored is None:
                stored = Source(encoded.name, encoded.data.size)
                self._files.put(encoded.name, encoded.data)
                done.written.append((encoded.name.path, encoded.data.size))
                if not self._files.has(stored, encoded.data):  # damaged, or another process wrote the same rows
                    stored = self._files.lookup(encoded.name.path) or stored
                    self._files.read_through(stored)
            self._check(stored, begin, end)
            names.append(encoded.name)
            begin = end
        return names

    def _encode(self, begin: int, end: int) -> tuple[EncodedBlock, int]:
        """Encode one object of the rows from `begin` on; return it and the start of the next one."""
        with ObjectWriter(self._encoder, self._block, self._schema) as writer:
            position = begin
            while (cut := self._cut(begin, position, end, self._counted(writer.size, begin, position))) > position:
                first, position = position, cut
                if not self._block.bundle:  # else it is sorted by key as a whole
                    weight = self._survey.weight(first, cut)
                    row_groups = max(1, round(weight / ROW_GROUP_BYTES))
                    position = min(cut, self._ahead(first, cut, weight / row_groups))
                for piece in self._rows(first, position):
                    writer.write(piece)
                    self._ratio = writer.size / self._survey.weight(begin, position)
                if self._block.bundle:
                    break
            return writer.finish(SEALED_BY), position

    def _ahead(self, first: int, end: int, weight: float) -> int:
        """Return the first mark `weight` bytes ahead, or about `_PIECE_ROWS`: repeated values are large in memory."""
        each = self._survey.weight(first, end) / max(self.rows(first, end), 1)
        return self._survey.ahead(first, min(weight, each * _PIECE_ROWS))

    def _cut(self, begin: int, position: int, end: int, written: float) -> int:
        """Return the planned end of the object that starts at `begin` and has `written` bytes up to `position`."""
        target, survey_, unit = self._spec.target, self._survey, self._unit
        if position == end or unit.sizes[unit.touching(begin, end)].sum() < target * TOLERANCE:
            return end
        left = self.size(position, end)
        total = written + left
        intended = total / max(1, round(total / target))
        if intended == total or not left:  # without rows that are left, none can be moved to a further object
            return end
        lacking = intended - written
        weight = lacking / left * survey_.weight(position, end)
        near = position if lacking <= intended * _CLOSE else survey_.ahead(position, weight)
        for mark in survey_.marks[(survey_.marks >= near) & (survey_.marks < end)].tolist():
            if unit.may_hold(begin, mark, self.rows(begin, mark)) and unit.may_hold(mark, end, self.rows(mark, end)):
                return int(mark)
        return end

    def _check(self, stored: Source, first: int, end: int) -> None:
        """Read an object back. Raises JetcaptureError unless it has exactly the rows of the span and of its name."""
        name = stored.name
        footer = self._files.footer(stored)
        found = RowIds.of(self._files.rows(stored, columns=(layout.SEQ, layout.TIMESTAMP, layout.ROW)))
        found = found.take(found.order(np.zeros(len(found.seqs), np.int64)))  # those of bundles are sorted by key
        messages = ~RowIds(found.seqs, found.times, 0 * found.rows).repeated()
        digest = layout.digest(found.seqs[messages].tobytes(), found.times[messages].tobytes())
        checks = int(found.hashes().sum()) if len(found.seqs) else 0
        if (
            (footer.details.rows, len(found.seqs)) != (name.rows, name.rows)
            or found.repeated().any()
            or digest != name.digest
            or (name.rows, checks) != (self._survey.rows(first, end), self._survey.check(first, end))
        ):
            raise JetcaptureError(f"{self._files.shown}/{name.path} does not match its sources, which are kept")


def encoder_like(stream: str, footers: Sequence[ObjectInfo], bundles: int) -> Encoder:
    """Return what writes rows of objects with these footers as further objects, in this number of bundles."""
    return Encoder(
        stream=stream,
        bundles=bundles,
        interval=_interval(footers),
        compression=footers[0].details.codec,
        compatible=all(footer.details.compatible for footer in footers),
        stream_created=_joined(footer.details.created for footer in footers),
        consumer=_joined(footer.details.consumers for footer in footers),
        key_rule=_agreed(footer.details.key_rule for footer in footers),
        time="; ".join(dict.fromkeys(filter(None, (footer.details.event_time for footer in footers)))),
    )


def _agreed(rules: Iterable[str | None]) -> str | None:
    """Return the rule that all objects agree on; None if they differ or one lacks it."""
    distinct = set(rules)
    return distinct.pop() if len(distinct) == 1 else None


def _joined(names: Iterable[Sequence[str]]) -> str:
    """Join distinct names, several for recreated streams and renamed consumers; "" if an object has none."""
    every = list(names)
    return ",".join(dict.fromkeys(name for some in every for name in some)) if all(every) else ""
