"""Plan a restore: which objects belong to the stream, and into which ranges of sequences they are divided.

A stream that was restored, and a mirror that was created again, have another creation time than before, but continue
the sequences. A stream that was created again starts them again: its incarnations are told apart.

Ranges are chosen from the row groups' statistics, such that each has about `PART_BYTES`. A row group is read for every
range that it reaches into; where that would be read too often, because many keys are interleaved, ranges are larger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import entries, group_bounds
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import runs
from jetcapture_py.archive.removed import Erased, Expired
from jetcapture_py.archive.stream_config import incarnations
from jetcapture_py.config.units import format_time, microseconds_of
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import plural
from spark_jobs.restoring.part import PartSpec, Piece

PART_BYTES = 24 << 20
"""Bytes of messages in a range."""
LARGEST_PART_BYTES = 128 << 20
READ_AGAIN = 3.0
"""How often the archive may be read before ranges become larger."""

Bounds = Mapping[str, tuple[int, int]]
"""The first and the last sequence of each incarnation, by its creation time."""

_ROW_BYTES = 32
"""Bytes of memory that a message takes beside its payload, subject and headers."""
_WEIGHED = (layout.SUBJECT, layout.HEADERS, layout.PAYLOAD, layout.RAW_HEADERS)
_REQUIRED = {layout.PAYLOAD: "payload (decode.keep_payload: false)", layout.HEADERS: "headers"}


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group."""

    source: int
    """Number of its object."""
    number: int
    """Its number in the object."""
    first: int
    """First sequence."""
    last: int
    """Last sequence."""
    weight: int
    """Bytes of messages."""
    rows: int


@dataclass(frozen=True, slots=True)
class _Footer:
    name: ObjectName
    created: tuple[str, ...]
    bounds: Bounds
    missing: tuple[str, ...]
    groups: tuple[tuple[int, int, int, int], ...]  # first and last sequence, bytes of messages, and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The ranges of a restore."""

    parts: tuple[PartSpec, ...]
    """The ranges in order."""
    created: str
    """Creation time of the restored incarnation of the stream; "" if unknown."""
    continued: tuple[str, ...]
    """Creation times of the incarnations whose sequences it continues."""
    others: tuple[str, ...]
    """Creation times of other incarnations in the archive."""
    begins: int
    """First sequence of the restored incarnation and those that it continues."""
    objects: int
    """Number of objects to read."""
    weight: int
    """Bytes of messages in all row groups."""
    rows: int
    """Rows of all row groups."""
    read: int
    """Bytes read for all ranges; an object may be read for several."""

    def size_of(self, messages: int) -> int:
        """Estimate the bytes of this many messages."""
        return self.weight * messages // max(1, self.rows)


def plan_restore(files: ArchiveFiles, stream: str, *, first: int, last: int | None, created: str | None) -> RestorePlan:
    """Plan the restore of sequences `first` to `last`. `created` chooses one of several incarnations of the stream by
    the beginning of its creation time; default: the last one. Raises JetcaptureError, VanishedError."""
    footers = list(files.map(lambda pair: _footer(files, *pair), _objects(files, stream, first, last)))
    incarnations = sorted({each for footer in footers for each in footer.created}, key=_moment)
    chosen = _choose(incarnations, created, stream)  # of all, because the last one may have nothing in the range
    united, begins = _unite((footer.bounds for footer in footers), chosen)
    within = [footer for footer in footers if _is_within(footer.name, first, last)]
    own = [footer for footer in within if not footer.created or not set(united).isdisjoint(footer.created)]
    for column, text in _REQUIRED.items():
        if lacking := [footer for footer in own if column in footer.missing]:
            raise JetcaptureError(
                f"{plural(len(lacking), 'object')} of stream {stream} were stored without {text}, such as "
                f"{lacking[0].name.path}: their messages cannot be restored"
            )
    groups = [
        _Group(number, index, max(low, first), high if last is None else min(high, last), weight, rows)
        for number, footer in enumerate(own)
        for index, (low, high, weight, rows) in enumerate(footer.groups)
        if high >= first and (last is None or low <= last)
    ]
    if not groups:
        raise JetcaptureError(
            f"the archive of stream {stream} has no messages in this range"
            f"{_elsewhere(chosen, united, within)}{_gone(files, stream)}"
        )
    cuts = _cuts(groups)
    parts, read = _parts(groups, cuts, own, united)
    return RestorePlan(
        parts=parts,
        created=chosen,
        continued=united[:-1],
        others=tuple(each for each in incarnations if each not in united),
        begins=begins,
        objects=len(own),
        weight=sum(group.weight for group in groups),
        rows=sum(group.rows for group in groups),
        read=read,
    )


def removed_ranges(
    plan: RestorePlan, expired: Expired | None, erased: Erased, *, continues: bool = False
) -> list[tuple[int, int]]:
    """Return the sequences of the restored incarnation, and those that it continues, that are gone on purpose.

    `continues`: it has messages from before its creation, as a mirror has.
    """
    own = (*plan.continued, plan.created)
    ranges = [] if expired is None else expired.ranges(own)
    creations = sorted(filter(None, (*own, *plan.others)), key=_moment)
    kept = [at for at, created in enumerate(creations) if created in own]
    if not creations:
        return ranges + list(runs(erased.seqs))
    gone = np.isin(incarnations(creations, erased.times), kept)
    if continues and plan.created:
        gone |= erased.times < microseconds_of(_moment(plan.created))
    return ranges + list(runs(erased.seqs[gone]))


def _elsewhere(chosen: str, united: Collection[str], within: Iterable[_Footer]) -> str:
    """Name the other incarnations with objects in a range where `chosen` has none, for an error; "" without any."""
    others = sorted({created for footer in within for created in footer.created}.difference(united), key=_moment)
    if not others:
        return ""
    return f" of the incarnation created {chosen}; --created chooses another, with messages there: {', '.join(others)}"


def _gone(files: ArchiveFiles, stream: str) -> str:
    """Describe what has expired, for an error about a range without messages; "" if nothing has."""
    expired = files.expired(stream)
    if expired is None:
        return ""
    return f"; {plural(expired.messages, 'message', grouped=True)} up to {format_time(expired.until)} expired"


def _objects(files: ArchiveFiles, stream: str, first: int, last: int | None) -> list[tuple[ObjectName, File]]:
    objects = [(file.name, file) for file in files.files(stream) if file.name is not None]
    if not objects:
        known = _gone(files, stream) or files.known_streams()
        raise JetcaptureError(f"no archive of stream {stream} under {files.shown}{known}")
    if others := [name for name, _ in objects if not name.parquet and _is_within(name, first, last)]:
        kinds = ", ".join(sorted({name.suffix.removeprefix(".") for name in others}))
        raise JetcaptureError(
            f"{files.shown} has {plural(len(others), 'object')} of stream {stream} in {kinds}: "
            "only messages that are stored in Parquet can be restored"
        )
    return sorted((pair for pair in objects if pair[0].parquet), key=lambda pair: pair[1].path)


def _is_within(name: ObjectName, first: int, last: int | None) -> bool:
    return name.last_seq >= first and (last is None or name.first_seq <= last)


def _footer(files: ArchiveFiles, name: ObjectName, file: File) -> _Footer:
    times = None
    with files.parquet(file) as parquet:
        metadata = parquet.metadata
        created = tuple(filter(None, entries(metadata.metadata).get("stream_created", "").split(",")))
        if len(created) > 1:
            times = parquet.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
    columns = {metadata.schema.column(index).path.split(".")[0] for index in range(metadata.num_columns)}
    groups = [_measured(metadata.row_group(index), name) for index in range(metadata.num_row_groups)]
    if times is not None:
        moments = times[layout.TIMESTAMP].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        bounds = _divide(created, times[layout.SEQ].to_numpy(), moments.to_numpy())
    else:
        bounds = {each: (min(group[0] for group in groups), max(group[1] for group in groups)) for each in created}
    return _Footer(
        name=name,
        created=created,
        bounds=bounds,
        missing=tuple(column for column in _REQUIRED if column not in columns),
        groups=tuple(groups),
    )


def _measured(group: Any, name: ObjectName) -> tuple[int, int, int, int]:
    """Return the first and the last sequence of a row group, its bytes of messages, and its rows."""
    low, high = group_bounds(group, layout.SEQ) or (name.first_seq, name.last_seq)
    columns = (group.column(index) for index in range(group.num_columns))
    weight = sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] in _WEIGHED)
    return int(low), int(high), int(weight + group.num_rows * _ROW_BYTES), int(group.num_rows)


def _cuts(groups: Sequence[_Group]) -> Any:
    """Return the first sequences of the ranges, which end where the next one begins, or with the last message."""
    target = PART_BYTES
    firsts, lasts, weights = (
        np.array([getattr(group, name) for group in groups], np.int64) for name in ("first", "last", "weight")
    )
    while True:
        cuts = _divided(firsts, lasts, weights, target)
        reached = np.searchsorted(cuts, lasts, "right") - np.searchsorted(cuts, firsts, "right") + 1
        if (reached * weights).sum() <= READ_AGAIN * weights.sum() or target >= LARGEST_PART_BYTES:
            return cuts
        target *= 2


def _divided(firsts: Any, lasts: Any, weights: Any, target: int) -> Any:
    """Divide the sequences into ranges of about equal weight, as if each group's weight were spread evenly."""
    places = np.unique(np.concatenate([firsts, lasts + 1]))
    slopes = np.zeros(len(places))
    rates = weights / (lasts + 1 - firsts)
    np.add.at(slopes, np.searchsorted(places, firsts), rates)
    np.add.at(slopes, np.searchsorted(places, lasts + 1), -rates)
    upto = np.concatenate([[0.0], np.cumsum(np.cumsum(slopes)[:-1] * np.diff(places))])
    count = max(1, round(upto[-1] / target))
    wanted = upto[-1] * np.arange(1, count) / count
    return np.unique(np.concatenate([places[:1], np.interp(wanted, upto, places).astype(np.int64)]))


def _parts(
    groups: Sequence[_Group], cuts: Any, own: Sequence[_Footer], united: Sequence[str]
) -> tuple[tuple[PartSpec, ...], int]:
    """Return the ranges that have messages, and how many bytes are read for all of them."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    read = 0
    for group in groups:
        low, high = np.searchsorted(cuts, (group.first, group.last), "right") - 1
        for part in range(int(low), int(high) + 1):
            found[part][group.source].append(group.number)
            read += group.weight
    end = max(group.last for group in groups)
    spans = {number: _span(footer.created, united) for number, footer in enumerate(own)}
    parts = []
    for part in sorted(found):
        last = int(cuts[part + 1]) - 1 if part + 1 < len(cuts) else end
        pieces = tuple(
            Piece(path=name.path, groups=tuple(groups), quarantine=name.quarantine, span=spans[number])
            for name, number, groups in sorted(
                ((own[number].name, number, groups) for number, groups in found[part].items()),
                key=lambda piece: piece[0].first_seq,
            )
        )
        parts.append(PartSpec(first=int(cuts[part]), last=last, pieces=pieces))
    return tuple(parts), read


def _moment(created: str) -> datetime:
    return datetime.fromisoformat(created)


def _choose(incarnations: Sequence[str], prefix: str | None, stream: str) -> str:
    """Return the only incarnation whose creation time begins with `prefix`; the last one for None, "" without any.

    Raises JetcaptureError.
    """
    if prefix is None:
        return incarnations[-1] if incarnations else ""
    matching = [created for created in incarnations if created.startswith(prefix)]
    if len(matching) != 1:
        known = ", ".join(incarnations) or "none is known"
        raise JetcaptureError(
            f"--created {prefix}: {len(matching)} incarnations of stream {stream} were created then; there are: {known}"
        )
    return matching[0]


def _divide(created: Sequence[str], seqs: Any, times: Any) -> Bounds:
    """Return the bounds in an object with messages of several incarnations; `times` in microseconds."""
    ordered = sorted(created, key=_moment)
    owners = incarnations(ordered, times)
    parts = ((each, seqs[owners == at]) for at, each in enumerate(ordered))
    return {each: (int(own.min()), int(own.max())) for each, own in parts if len(own)}


def _unite(objects: Iterable[Bounds], chosen: str) -> tuple[tuple[str, ...], int]:
    """Return the incarnation `chosen` and those that it continues, oldest first, and the first sequence of all older
    ones: one that begins after all sequences of the previous one continues it."""
    known: dict[str, tuple[int, int]] = {}
    for bounds in objects:
        for each, (low, high) in bounds.items():
            lowest, highest = known.get(each, (low, high))
            known[each] = min(low, lowest), max(high, highest)
    if chosen not in known:
        return (chosen,), 1 << 62
    ordered = sorted((each for each in known if _moment(each) <= _moment(chosen)), key=_moment)
    start = len(ordered) - 1
    while start and known[ordered[start - 1]][1] < known[ordered[start]][0]:
        start -= 1
    return tuple(ordered[start:]), min(known[each][0] for each in ordered)


def _span(created: Sequence[str], own: Sequence[str]) -> tuple[int, int] | None:
    """Return the time of the incarnations `own` in microseconds, for an object that also has messages of others."""
    if set(created) <= set(own):
        return None
    began, ended = _moment(own[0]), _moment(own[-1])
    moments = sorted(map(_moment, created))
    later = [each for each in moments if each > ended]
    since = microseconds_of(began) if moments[0] < began else -1 << 62  # the oldest has all earlier messages
    return since, microseconds_of(later[0]) if later else 1 << 62
