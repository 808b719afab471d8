"""Plan a restore: find the stream's objects, and divide them into ranges of sequences.

Ranges of about `PART_BYTES` are chosen from the row groups' statistics. A row group is read for every range that it
overlaps. If many interleaved keys would cause too many reads, ranges are larger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s, Seqs
from jetcapture_py.archive.incarnations import (
    Bounds,
    bounds_by_incarnation,
    continued,
    in_order,
    moment,
    owners,
    span,
)
from jetcapture_py.archive.info import BadObject, ObjectInfo
from jetcapture_py.archive.messages import runs
from jetcapture_py.archive.removed import Erased, Expired
from jetcapture_py.archive.weights import cut
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.plan import no_archive, read_identities
from jetcapture_py.reading.selection import Selection
from jetcapture_py.restoring.part import RestoreObject, RestoreRange
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import plural

PART_BYTES = 24 << 20
"""Bytes of messages in a range."""
LARGEST_PART_BYTES = 128 << 20
READ_AGAIN = 3.0
"""Maximum reads of the archive, on average, before ranges become larger."""

_LAST = 1 << 62
"""A sequence beyond any stream."""
_ROW_BYTES = 32
"""Memory of a message besides its payload, subject and headers, in bytes."""
_REQUIRED = {layout.PAYLOAD: "payload (decode.keep_payload: false)", layout.HEADERS: "headers"}


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of the stream, with the first and last sequence of each incarnation in it."""

    info: ObjectInfo
    file: File
    bounds: Mapping[str, Bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The ranges of a restore."""

    parts: tuple[RestoreRange, ...]
    """The ranges in order."""
    created: str
    """Creation time of the restored incarnation of the stream; "" if unknown."""
    continued: tuple[str, ...]
    """Creation times of the incarnations that it continues."""
    others: tuple[str, ...]
    """Creation times of other incarnations in the archive."""
    begins: int
    """First sequence of the restored incarnation and those before it."""
    weight: int
    """Bytes of messages in all row groups."""
    rows: int
    """Rows of all row groups."""
    read: int
    """Bytes read for all ranges; a row group may be read for several."""

    def size_of(self, messages: int) -> int:
        """Estimate the bytes of this many messages."""
        return self.weight * messages // max(1, self.rows)

    def up_to(self, last: int) -> RestorePlan:
        """Return the plan without the sequences after `last`."""
        parts = (replace(part, last=min(part.last, last)) for part in self.parts if part.first <= last)
        return replace(self, parts=tuple(parts))


def plan_restore(files: ArchiveFiles, stream: str, *, first: int, last: int | None, created: str | None) -> RestorePlan:
    """Plan the restore of sequences `first` to `last`. `created` chooses one of several incarnations of the stream by
    the beginning of its creation time; default: the last one. Raises JetcaptureError, VanishedError."""
    seqs = first, _LAST if last is None else last
    selection = Selection(seqs=seqs)
    objects = list(files.map(partial(_object, files), _infos(files, stream, selection)))
    bounds = _united(stored.bounds for stored in objects)
    incarnations = in_order(bounds)
    chosen = _choose(incarnations, created, stream)  # of all, because the last one may have nothing in the range
    until = [created for created in incarnations if moment(created) <= moment(chosen)]
    united = tuple(continued(until, bounds)) or ("",)
    within = [stored for stored in objects if selection.may_hold_name(stored.info.name)]
    sources = [stored for stored in within if not stored.bounds or not {*united}.isdisjoint(stored.bounds)]
    for column, text in _REQUIRED.items():
        if lacking := [stored for stored in sources if stored.info.schema.get_field_index(column) < 0]:
            raise JetcaptureError(
                f"{plural(len(lacking), 'object')} of stream {stream} were stored without {text}, such as "
                f"{lacking[0].info.name.path}: their messages cannot be restored"
            )
    groups = [
        (max(group.first, seqs[0]), min(group.last, seqs[1]), group.message_bytes + group.rows * _ROW_BYTES, group.rows)
        for stored in sources
        for group in stored.info.details.groups
        if group.last >= seqs[0] and group.first <= seqs[1]
    ]
    if not groups:
        raise JetcaptureError(
            f"the archive of stream {stream} has no messages in this range"
            f"{_elsewhere(chosen, united, within)}{_gone(files, stream)}"
        )
    parts = [
        RestoreObject(name=stored.info.name, file=stored.file, span=span(stored.bounds, united)) for stored in sources
    ]
    firsts, lasts, weights, rows = np.array(groups, np.int64).T
    cuts, reads = _cut(firsts, lasts, weights)
    return RestorePlan(
        parts=tuple(_ranges(parts, cuts, int(lasts.max()))),
        created=chosen,
        continued=united[:-1],
        others=tuple(created for created in incarnations if created not in united),
        begins=min((bounds[created][0] for created in until), default=_LAST),
        weight=int(weights.sum()),
        rows=int(rows.sum()),
        read=int((reads * weights).sum()),
    )


def removed_ranges(
    plan: RestorePlan, expired: Expired | None, erased: Erased, *, continues: bool = False
) -> list[tuple[int, int]]:
    """Return the sequences that were removed on purpose from the restored incarnation and those that it continues.

    `continues`: it has messages from before its creation, like a mirror.
    """
    united = (*plan.continued, plan.created)
    ranges = [] if expired is None else expired.ranges(united)
    creations = in_order((*united, *plan.others))
    if not creations:
        return ranges + list(runs(erased.seqs))
    owner = owners([moment(created) for created in creations], erased.times)
    gone = np.isin(owner, [creations.index(created) for created in united if created])
    if continues and plan.created:
        gone |= erased.times < moment(plan.created)
    return ranges + list(runs(erased.seqs[gone]))


def _elsewhere(chosen: str, united: Collection[str], within: Iterable[_Object]) -> str:
    """Name the other incarnations with objects in a range without `chosen` ones, for an error; "" without any."""
    others = in_order({created for stored in within for created in stored.bounds}.difference(united))
    if not others:
        return ""
    return f" of the incarnation created {chosen}; --created chooses another, with messages there: {', '.join(others)}"


def _gone(files: ArchiveFiles, stream: str) -> str:
    """Describe expired messages for an error about an empty range; "" without any."""
    expired = files.expired(stream)
    if expired is None:
        return ""
    return f"; {plural(expired.messages, 'message')} up to {format_time(expired.until)} expired"


def _infos(files: ArchiveFiles, stream: str, selection: Selection) -> Iterator[tuple[ObjectInfo, File]]:
    """Yield all objects of the stream, by path. Raises JetcaptureError if a selected one is not Parquet."""
    objects = {file.name: file for file in files.files(stream) if file.name is not None}
    if not objects:
        if expired := _gone(files, stream):
            raise JetcaptureError(f"no archive of stream {stream} under {files.shown}{expired}")
        raise no_archive(files, stream)
    if others := [name for name in objects if not name.parquet and selection.may_hold_name(name)]:
        kinds = ", ".join(sorted({name.suffix.removeprefix(".") for name in others}))
        raise JetcaptureError(
            f"{files.shown} has {plural(len(others), 'object')} of stream {stream} in {kinds}: "
            "only messages that are stored in Parquet can be restored"
        )
    parquet = sorted((file for name, file in objects.items() if name.parquet), key=lambda file: file.path)
    for file, info in zip(parquet, files.infos(parquet, detailed=lambda _: True), strict=True):
        if isinstance(info, BadObject):
            raise files.refusal(info)
        yield info, file


def _object(files: ArchiveFiles, pair: tuple[ObjectInfo, File]) -> _Object:
    info, file = pair
    created, groups = in_order(info.details.created), info.details.groups
    if len(created) < 2:
        whole = min(group.first for group in groups), max(group.last for group in groups)
        return _Object(info, file, dict.fromkeys(created, whole))
    ((seqs, times),) = read_identities(files, {info.name: file}, [info.name])
    return _Object(info, file, bounds_by_incarnation(created, seqs, times))


def _cut(firsts: Seqs, lasts: Seqs, weights: Int64s) -> tuple[Seqs, Int64s]:
    """Return the first sequences of the ranges, and the number of ranges that each row group is read for."""
    target = PART_BYTES
    while True:
        cuts = cut(firsts, lasts, weights, target)
        reads = np.searchsorted(cuts, lasts, "right") - np.searchsorted(cuts, firsts, "right") + 1
        if (reads * weights).sum() <= READ_AGAIN * weights.sum() or target >= LARGEST_PART_BYTES:
            return cuts, reads
        target *= 2


def _ranges(objects: Sequence[RestoreObject], cuts: Seqs, last: int) -> Iterator[RestoreRange]:
    """Yield the ranges with objects; each ends before the next one's start."""
    objects = sorted(objects, key=lambda item: item.name.first_seq)
    firsts, lasts = np.array([(item.name.first_seq, min(item.name.last_seq, last)) for item in objects], np.int64).T
    for low, high in zip(cuts.tolist(), [*(cuts[1:] - 1).tolist(), last], strict=True):
        inside = np.flatnonzero((firsts <= high) & (lasts >= low)).tolist()
        if inside:
            yield RestoreRange(first=low, last=high, objects=tuple(objects[number] for number in inside))


def _choose(incarnations: Sequence[str], prefix: str | None, stream: str) -> str:
    """Return the only incarnation whose creation time begins with `prefix`; the last one for None, "" without any.

    Raises JetcaptureError.
    """
    if prefix is None:
        return incarnations[-1] if incarnations else ""
    matching = [created for created in incarnations if created.startswith(prefix)]
    if len(matching) != 1:
        times = ", ".join(incarnations) or "none is known"
        raise JetcaptureError(
            f"--created {prefix}: {len(matching)} incarnations of stream {stream} were created then; there are: {times}"
        )
    return matching[0]


def _united(parts: Iterable[Mapping[str, Bounds]]) -> dict[str, Bounds]:
    """Return the bounds of each incarnation in all objects."""
    bounds: dict[str, list[Bounds]] = {}
    for created, span_ in (item for part in parts for item in part.items()):
        bounds.setdefault(created, []).append(span_)
    return {created: (min(spans)[0], max(last for _, last in spans)) for created, spans in bounds.items()}
