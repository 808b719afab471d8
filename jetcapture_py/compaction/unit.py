"""Compact one unit (see `plan`): write new objects, read them back and compare them with the sources.

Nothing is removed here. An `Outcome` names the objects that may be removed after the grace period, if their
replacements still exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.ordering import ordered
from jetcapture_py.archive.writer import ROW_GROUP_BYTES, EncodedBlock
from jetcapture_py.compaction.checked import check, columns_to_write, put, writer_like
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.merge import read_rows, survey
from jetcapture_py.compaction.plan import (
    OPEN,
    REPLACING,
    TOLERANCE,
    Source,
    Span,
    Unit,
    is_open,
    mergeable,
    removable,
    spans,
)
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store.removal import Removal
from jetcapture_py.text import one_line

T = TypeVar("T")

SEALED_BY = "compact"
CHANGED = "another compaction changed it meanwhile"

_STEPS = 64
"""Minimum number of marks, where it could end, per object of the target size or row group."""
_PIECE_ROWS = 1 << 18
"""Approximate maximum number of rows read at once."""
_CLOSE = 0.05
"""An object may be smaller than intended by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSpec:
    """Settings: make objects of `target` bytes in buckets that ended before `closed` (seconds since the epoch).

    A row counts as at least `row_bytes`, because its identity is in memory while its object is written.
    """

    target: int
    closed: float
    dry_run: bool = False
    row_bytes: float = 0.0


@dataclass(slots=True, kw_only=True)
class Merged:
    """Objects of one key or bundle with compatible columns, and the result; a dry run has no result."""

    key: str | None
    bucket: int
    bundle: str
    objects: int
    """Number of objects read."""
    size: int
    """Size of the objects read, in bytes."""
    written: Sequence[tuple[str, int]] = ()
    """Paths and bytes of new objects."""
    holders: Sequence[str] = ()
    """Paths of the objects that together hold every message."""
    removals: Sequence[Removal] = ()
    """How to remove the replaced objects after the grace."""
    since: float = 0.0
    """Time of the last write of a holder or a replaced object, in seconds since the epoch."""
    duplicates: int = 0
    """Number of dropped duplicate rows."""

    @property
    def removable(self) -> list[str]:
        """Paths of the replaced objects."""
        return [removal.target.path for removal in self.removals]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Objects that were not compacted, or only in part."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Objects that could not be compacted."""

    reason: str


Outcome = Merged | Skipped | Failed


class _ReplacedError(Exception):
    """The result would be an object that an erasure or redecoding has replaced by one of the sources.

    If that ran again, it would remove the result in favor of the source, and compaction the source in favor of the
    result.
    """


def compact_unit(files: Files, spec: CompactionSpec, sources: Sequence[Source]) -> list[Outcome]:
    """Compact the objects of one unit. Errors are outcomes, so that other units continue."""
    outcomes = _attempted(partial(_outcomes, files, spec, sources))
    return outcomes if isinstance(outcomes, list) else [outcomes]


def _attempted(work: Callable[[], T]) -> T | Skipped | Failed:
    """Return the result of `work`, or its failure."""
    try:
        return work()
    except VanishedError:
        return Skipped(CHANGED)
    except _ReplacedError:
        return Skipped(REPLACING)
    except Exception as error:
        return Failed(str(error) if isinstance(error, JetcaptureError) else one_line(error))


def _outcomes(files: Files, spec: CompactionSpec, sources: Sequence[Source]) -> list[Outcome]:
    infos: list[ObjectInfo] = []
    outcomes: list[Outcome] = []
    for some in (sources[:1], sources[1:]):  # the first object usually shows that a bucket is open
        for info in files.archive.map(lambda source: _attempted(partial(_info, files, source)), some):
            if isinstance(info, Skipped):
                return [info]
            if isinstance(info, Failed):
                outcomes.append(info)
            else:
                infos.append(info)
        if is_open(sources[0].name.bucket, infos, spec.closed, unreadable=bool(outcomes)):
            return [*outcomes, Skipped(OPEN)]
    parts, reasons = mergeable(infos)
    outcomes += map(Skipped, reasons)
    for schema, members in parts:
        unit = Unit(members, spec.row_bytes)
        outcomes.append(_attempted(partial(_merged, files, spec, unit, schema, infos)))
    return outcomes


def _info(files: Files, source: Source) -> ObjectInfo:
    """Read an object's footer. Raises JetcaptureError, also if it is of another bundle than its name says."""
    info = files.info(source)
    if not layout.is_one_of(source.name.bundle, str(info.bundles or "")):
        raise JetcaptureError(f"{files.shown}/{source.name.path} has bundles {info.bundles} in its footer")
    return info


def _merged(
    files: Files, spec: CompactionSpec, unit: Unit[ObjectInfo], schema: pa.Schema, infos: Iterable[ObjectInfo]
) -> Merged:
    """Merge objects with compatible columns; a dry run only counts them."""
    name, size = unit.sources[0].name, sum(info.size for info in unit.sources)
    merged = Merged(key=name.key, bucket=name.bucket, bundle=name.bundle, objects=len(unit.sources), size=size)
    return merged if spec.dry_run else _Compaction(files, spec, unit, columns_to_write(name, schema), infos).run(merged)


class _Compaction:
    """Compacts objects of one unit with compatible schemas; also their `Tally` for planning."""

    def __init__(
        self,
        files: Files,
        spec: CompactionSpec,
        unit: Unit[ObjectInfo],
        schema: pa.Schema,
        infos: Iterable[ObjectInfo],
    ) -> None:
        """`infos` are all objects of the key or bundle, including those not merged with these."""
        self._files = files
        self._spec = spec
        self._unit = unit
        self._schema = schema
        self._existing = {info.name.path: Source(info.name, info.size) for info in infos}
        self._survey = survey(files, unit, min(spec.target, ROW_GROUP_BYTES) / _STEPS)
        self._ratio: float | None = None
        self._bundle = bool(unit.sources[0].name.bundle)
        self._new_writer = writer_like(unit.sources, schema)

    def run(self, merged: Merged) -> Merged:
        """Write new objects and find the objects that may be removed."""
        unit = self._unit
        holders: list[ObjectName] = []
        written: list[Source] = []
        for span in spans(unit, self._spec.target, self):
            if span.kept is not None:
                holders.append(unit.sources[span.kept].name)
                continue
            for stored in self._write(span):
                holders.append(stored.name)
                if stored.name.path not in self._existing:
                    written.append(stored)
        removals = self._removals(holders, [unit.sources[index] for index in removable(unit, holders)])
        since = now = time.time()  # a store's clock may be ahead
        if not written:
            files = [file for removal in removals for file in (removal.target, *removal.holders)]
            since = min(now, max((file.modified or now for file in files), default=now))
        return replace(
            merged,
            written=[(source.name.path, source.size) for source in written],
            holders=[name.path for name in holders],
            removals=removals,
            since=since,
            duplicates=int(unit.counts.sum()) - self._survey.rows(unit.first, unit.end),
        )

    def _removals(self, holders: Sequence[ObjectName], obsolete: Sequence[ObjectInfo]) -> list[Removal]:
        """Return the removals of objects that have not changed since they were read, with their holders."""
        if not obsolete:
            return []
        self._read_through({name.path for name in holders}, obsolete)
        paths = [name.path for name in (*holders, *(info.name for info in obsolete))]
        now = {file.path: file for file in self._files.archive.map(self._files.at, paths) if file is not None}
        if not now.keys() >= {name.path for name in holders}:
            raise VanishedError(f"{self._files.shown}: {CHANGED}")
        return [
            Removal(
                target=now[info.name.path],
                holders=[now[name.path] for name in holders if layout.overlap(name, info.name)],
            )
            for info in obsolete
            if info.name.path in now and now[info.name.path].size == info.size
        ]

    def _read_through(self, holders: Collection[str], obsolete: Sequence[ObjectInfo]) -> None:
        """Read existing objects in full before they replace others: a killed pass may have written them unchecked.
        Raises JetcaptureError if one is damaged."""
        for source in self._existing.values():
            if source.name.path in holders and any(layout.overlap(source.name, other.name) for other in obsolete):
                self._files.read_through(source)

    def rows(self, first: int, end: int) -> int:
        """Return the number of distinct rows."""
        return self._survey.rows(first, end)

    def size(self, first: int, end: int) -> float:
        """Estimate the compressed bytes from the last rows written, or at first from the unit's first rows."""
        return self._counted(self._survey.weight(first, end) * self._compression(), first, end)

    def _counted(self, size: float, first: int, end: int) -> float:
        """Return the counted size of an object of `size` bytes with these rows."""
        return max(size, self.rows(first, end) * self._spec.row_bytes)

    def _compression(self) -> float:
        """Return the ratio of compressed to uncompressed bytes."""
        if self._ratio is None:
            begin = self._unit.first
            upto = self._ahead(begin, self._unit.end, ROW_GROUP_BYTES)
            with self._new_writer() as sample:
                for piece in self._rows(begin, upto):
                    sample.write(piece)
                self._ratio = sample.size / self._survey.weight(begin, upto)
        return self._ratio

    def _rows(self, first: int, end: int) -> Iterator[pa.Table]:
        """Yield the distinct rows of a range, one table per row group; those of a bundle are sorted by key."""
        table = read_rows(self._files, self._unit, self._schema, first, end, in_file=self._bundle)
        return ordered(table, by_key=self._bundle)[0] if table.num_rows else iter(())

    def _write(self, span: Span) -> Iterator[Source]:
        """Write a span as objects of about the target size, each read back and compared."""
        begin = span.first
        while begin < span.end:
            encoded, end = self._encode(begin, span.end)
            counted = self._counted(encoded.data.size, begin, end)
            if self._bundle and end < span.end and counted * TOLERANCE < self._spec.target:
                encoded, end = self._encode(begin, span.end)  # planned as a whole, by rows that compress worse
            while encoded.data.size > self._spec.target * TOLERANCE:  # its rows compress worse than those before
                before = end
                encoded, end = self._encode(begin, span.end)
                if end >= before:
                    break
            if any(encoded.name.digest in source.details.replaces for source in self._unit.sources):
                raise _ReplacedError
            stored = self._existing.get(encoded.name.path) or put(self._files, encoded)
            check(self._files, stored, self._survey.rows(begin, end), self._survey.check(begin, end))
            yield stored
            begin = end

    def _encode(self, begin: int, end: int) -> tuple[EncodedBlock, int]:
        """Encode one object of rows starting at `begin`; return it and the start of the next one."""
        with self._new_writer() as writer:
            position = begin
            while (cut := self._cut(begin, position, end, self._counted(writer.size, begin, position))) > position:
                first, position = position, cut
                if not self._bundle:  # else it is sorted by key as a whole
                    weight = self._survey.weight(first, cut)
                    row_groups = max(1, round(weight / ROW_GROUP_BYTES))
                    position = min(cut, self._ahead(first, cut, weight / row_groups))
                for piece in self._rows(first, position):
                    writer.write(piece)
                    self._ratio = writer.size / self._survey.weight(begin, position)
                if self._bundle:
                    break
            return writer.finish(SEALED_BY), position

    def _ahead(self, first: int, end: int, weight: float) -> int:
        """Return the first mark `weight` bytes ahead, or about `_PIECE_ROWS`: repeated values are large in memory."""
        row_weight = self._survey.weight(first, end) / max(self.rows(first, end), 1)
        return self._survey.ahead(first, min(weight, row_weight * _PIECE_ROWS))

    def _cut(self, begin: int, position: int, end: int, written: float) -> int:
        """Return the planned end of the object that starts at `begin` and has `written` bytes up to `position`."""
        target, survey_, unit = self._spec.target, self._survey, self._unit
        if position == end or unit.sizes[unit.touching(begin, end)].sum() < target * TOLERANCE:
            return end
        left = self.size(position, end)
        total = written + left
        intended = total / max(1, round(total / target))
        if intended == total or not left:  # the last rows cannot be moved to another object
            return end
        lacking = intended - written
        weight = lacking / left * survey_.weight(position, end)
        near = position if lacking <= intended * _CLOSE else survey_.ahead(position, weight)
        for mark in survey_.marks[(survey_.marks >= near) & (survey_.marks < end)].tolist():
            if unit.may_hold(begin, mark, self.rows(begin, mark)) and unit.may_hold(mark, end, self.rows(mark, end)):
                return int(mark)
        return end
