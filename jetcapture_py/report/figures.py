"""Compute the figures and charts of the report's chapters from the facts. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median
from typing import Any, TypeVar

from jetcapture_py.compaction.plan import TARGET_SIZE
from jetcapture_py.compaction.unit import SEALED_BY
from jetcapture_py.pages import charts
from jetcapture_py.pages.charts import Axis, Bar, Chart, Label, Rectangle
from jetcapture_py.pages.words import clipped, plural, share, short, size
from jetcapture_py.report.facts import Coverage, Facts, StoredObject

SMALL = TARGET_SIZE // 8
"""An object below this size in bytes is small."""
FEW, MANY = 10, 100
"""Number of objects below which compaction is not suggested, and from which on mostly small objects are reported."""
MAX_LAYERS = 8
"""Maximum number of keys with their own color in charts."""
CELLS = 240
"""Maximum number of parts of equal width that show an incarnation's sequences."""

_CLASSES = tuple(4**power for power in range(5, 16))
"""Upper bounds of the size classes in bytes."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Totals of one key, or of one bundle; `size` in bytes, `first` and `last` bucket in seconds since the epoch."""

    key: str | None
    bundle: str
    messages: int
    size: int
    objects: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Upper bounds in seconds within which half, 95 % and all of the messages were stored.

    `closed` is the time of the last write of their objects, in seconds after the bucket's end.
    """

    objects: int
    half: float
    most: float
    all: float
    closed: float


def by_key(facts: Facts) -> list[Key]:
    """Return the totals of every key and bundle, most messages first."""
    objects: dict[tuple[str | None, str], list[StoredObject]] = defaultdict(list)
    for stored in facts.objects:
        objects[stored.name.key, stored.name.bundle].append(stored)
    keys = [
        Key(
            key=key,
            bundle=bundle,
            messages=facts.messages(stored_objects),
            size=sum(stored.size for stored in stored_objects),
            objects=len(stored_objects),
            first=min(stored.name.bucket for stored in stored_objects),
            last=max(stored.name.bucket for stored in stored_objects),
        )
        for (key, bundle), stored_objects in objects.items()
    ]
    return sorted(keys, key=lambda key: (-key.messages, key.key or "", key.bundle))


def key_text(key: str | None, bundle: str = "") -> str:
    """Return a key or a bundle for plain text."""
    if bundle:
        return f"bundle {bundle}"
    return "(no key)" if key is None else clipped(key, 60)


Value = Callable[[StoredObject], float]
Layer = Callable[[StoredObject], int]


def over_time(
    axis: Axis, objects: Iterable[StoredObject], value: Value, layer: Layer = lambda _: 0, layers: int = 1
) -> list[list[float]]:
    """Return the sum of `value` for each layer and bar."""
    sums = [[0.0] * axis.bars for _ in range(layers)]
    for stored in objects:
        bar = axis.place(stored.name.bucket)
        if bar is not None:
            sums[layer(stored)][bar] += value(stored)
    return sums


def waits(objects: Iterable[StoredObject], by: Callable[[StoredObject], K | None]) -> dict[K, Wait]:
    """Return how long messages waited to be stored, grouped by `by`; objects with None are left out.

    All messages of an object count with the wait of its oldest message. Objects with unknown times are left out, and so
    are those of compaction, written long after their messages were first stored.
    """
    known: dict[K, list[StoredObject]] = defaultdict(list)
    for stored in objects:
        group = by(stored)
        timed = stored.oldest is not None and stored.modified is not None and stored.sealed_by != SEALED_BY
        if group is not None and timed:
            known[group].append(stored)
    waits = {}
    for group, objects in known.items():
        waited = sorted(
            (max((stored.modified or 0) - (stored.oldest or 0) / 1e6, 0), stored.messages) for stored in objects
        )
        upto = list(accumulate(messages for _, messages in waited))
        half, most = (waited[bisect_left(upto, upto[-1] * part)][0] for part in (0.5, 0.95))
        closed = max((stored.modified or 0) - stored.end for stored in objects)
        waits[group] = Wait(objects=len(objects), half=half, most=most, all=waited[-1][0], closed=closed)
    return waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Late, early and redelivered messages: number of objects with some, and of the messages in these."""

    late: int
    late_messages: int
    latest: float
    """Seconds after the end of its bucket, of the latest message."""
    early: int
    redelivered: int
    deliveries: int
    """The most deliveries of a message."""


def delivery(facts: Facts) -> Delivery:
    """Evaluate the first and last times and the maximum deliveries in footers."""
    late = [stored for stored in facts.objects if stored.late >= 0]
    return Delivery(
        late=len(late),
        late_messages=facts.messages(late),
        latest=max((stored.late for stored in late), default=0),
        early=sum(stored.early > 0 for stored in facts.objects),
        redelivered=sum(stored.deliveries > 1 for stored in facts.objects),
        deliveries=max((stored.deliveries for stored in facts.objects), default=1),
    )


def size_classes(objects: Iterable[StoredObject]) -> list[tuple[int, int, int]]:
    """Return upper bound, objects and bytes of each size class, from the smallest to the largest in use."""
    counts, sizes = [0] * (len(_CLASSES) + 1), [0] * (len(_CLASSES) + 1)
    for stored in objects:
        place = next((index for index, bound in enumerate(_CLASSES) if stored.size < bound), len(_CLASSES))
        counts[place] += 1
        sizes[place] += stored.size
    used = [index for index, count in enumerate(counts) if count]
    bounds = [*_CLASSES, 4 * _CLASSES[-1]]
    return [(bounds[index], counts[index], sizes[index]) for index in range(used[0], used[-1] + 1)] if used else []


def sealed(objects: Iterable[StoredObject]) -> list[tuple[str, int, int, float]]:
    """Return objects, messages and median size per seal reason, most frequent first."""
    by_reason: dict[str, list[StoredObject]] = defaultdict(list)
    for stored in objects:
        by_reason[stored.sealed_by].append(stored)
    rows = [
        (reason, len(objects), sum(stored.messages for stored in objects), median(stored.size for stored in objects))
        for reason, objects in by_reason.items()
    ]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def after_compaction(objects: Iterable[StoredObject]) -> int:
    """Estimate the number of objects after compaction, which merges those of one key and bucket."""
    sizes: dict[tuple[object, ...], int] = defaultdict(int)
    for stored in objects:
        sizes[stored.name.group] += stored.size
    return sum(max(1, -(-size // TARGET_SIZE)) for size in sizes.values())


def worth_compacting(facts: Facts) -> bool:
    """Whether compaction would reduce the number of objects by at least a fifth."""
    now = len(facts.objects)
    return now >= FEW and after_compaction(facts.objects) <= now * 0.8


def small_for_good(facts: Facts) -> bool:
    """Whether there are many objects, most are small, and compaction would not help."""
    small = sum(stored.size < SMALL for stored in facts.objects)
    return len(facts.objects) >= MANY and small > len(facts.objects) / 2 and not worth_compacting(facts)


def volume(facts: Facts, keys: Sequence[Key], axis: Axis) -> dict[str, Any]:
    """Return the charts of messages and bytes by key over time, their legend, and the number of messages left out."""
    objects = facts.objects
    number = {(key.key, key.bundle): min(rank, MAX_LAYERS) for rank, key in enumerate(keys)}
    names = [key_text(key.key, key.bundle) for key in keys[:MAX_LAYERS]]
    names += ["all other keys"] * (len(keys) > MAX_LAYERS)
    layer = (lambda stored: number[stored.name.key, stored.name.bundle]), len(names)
    messages = over_time(axis, objects, lambda stored: facts.messages([stored]), *layer)
    sizes = over_time(axis, objects, lambda stored: stored.size, *layer)
    others = [("k8", plural(len(keys) - MAX_LAYERS, "other key"))] * (len(keys) > MAX_LAYERS)
    return {
        "layers": [(f"k{rank}", name) for rank, name in enumerate(names[:MAX_LAYERS])] + others,
        "left_out": facts.messages(stored for stored in objects if axis.place(stored.name.bucket) is None),
        "messages": _counts(axis, list(zip(names, messages, strict=True)), "Messages over time by key", "message"),
        "sizes": charts.stacked(
            axis,
            list(zip(names, sizes, strict=True)),
            title="Stored bytes over time by key",
            unit=size,
            ticks=charts.size_ticks,
            mark=size,
        ),
    }


def quarantine(facts: Facts, axis: Axis) -> dict[str, Any]:
    """Return the number of messages in quarantine, and their chart over time."""
    layers = over_time(axis, facts.quarantine, lambda stored: facts.messages([stored]))
    chart = (
        _counts(axis, [("", layers[0])], "Quarantined messages over time", "message", "q") if any(layers[0]) else None
    )
    return {"total": facts.messages(facts.quarantine), "chart": chart}


def waiting(facts: Facts, axis: Axis) -> dict[str, Any]:
    """Return the chart of waits over time, the waits per day, newest first, and the number of compacted objects."""
    points = waits(facts.objects, lambda stored: axis.place(stored.name.bucket))
    known = {bar: (wait.half, wait.most, wait.all) for bar, wait in points.items()}
    days = waits(facts.objects, lambda stored: stored.name.bucket // 86_400)
    return {
        "chart": charts.waits(axis, known, title="Wait until stored, over time") if known else None,
        "days": sorted(days.items(), reverse=True),
        "compacted": sum(stored.sealed_by == SEALED_BY for stored in facts.objects),
    }


def sizes(facts: Facts, axis: Axis) -> dict[str, Any]:
    """Return object sizes, seal reasons and the benefit of compaction."""
    layers = over_time(axis, facts.objects, lambda _: 1)
    return {
        "small": sum(stored.size < SMALL for stored in facts.objects),
        "sizes": size_classes(facts.objects),
        "sealed": sealed(facts.objects),
        "chart": _counts(axis, [("", layers[0])], "Objects over time", "object"),
        "after": after_compaction(facts.objects),
        "worth_compacting": worth_compacting(facts),
        "small_for_good": small_for_good(facts),
    }


def cells(coverage: Coverage) -> tuple[int, list[float]]:
    """Return the sequences per cell, and the present share of each cell; the last may be shorter."""
    first, last = coverage.first, coverage.last
    width = -(-(last - first + 1) // CELLS)
    ranges = [(start, min(start + width - 1, last)) for start in range(first, last + 1, width)]
    return width, [coverage.accounted.count(start, end) / (end - start + 1) for start, end in ranges]


def strip(coverage: Coverage) -> Chart:
    """Return the range of sequences as a band, filled by the share stored, with a mark below every part with a hole."""
    bars, at = [], 0
    cell, shares = cells(coverage)
    for stored, run in groupby(shares):
        width = len(list(run))
        first = coverage.first + at * cell
        last = min(first + width * cell - 1, coverage.last)
        height = 700 * (stored if stored in (0, 1) else min(max(stored, 0.08), 0.92))
        shapes = [Rectangle(at, 700 - height, width, height, "stored")] if height else []
        if height < 700:
            shapes += [Rectangle(at, 0, width, 700 - height, "gap"), Rectangle(at, 780, width, 220, "gap")]
        bars.append(Bar(f"Sequences {first:,} to {last:,}: {share(stored, 1)} stored", shapes))
        at += width
    broken = sum(stored < 1 for stored in shares)
    below = [Label(0, f"{coverage.first:,}"), Label(1, f"{coverage.last:,}", "end")]
    if coverage.settled is not None and coverage.first <= coverage.settled < coverage.last:
        position = (coverage.settled - coverage.first) / (coverage.last - coverage.first + 1)
        kind = "watermark flip" if position > 0.5 else "watermark"
        below.append(Label(position, f"watermark {coverage.settled:,}", kind))
    about = f"{plural(len(shares), 'part')} of {plural(cell, 'sequence')} each; {broken:,} of them with holes."
    return Chart(
        title="Coverage of the sequences",
        text=about,
        width=len(shares),
        height=1000 if broken else 700,
        bars=bars,
        below=below,
    )


def _counts(axis: Axis, layers: Sequence[tuple[str, Sequence[float]]], title: str, noun: str, tone: str = "k") -> Chart:
    return charts.stacked(
        axis,
        layers,
        title=title,
        unit=lambda value: plural(int(value), noun),
        ticks=charts.count_ticks,
        mark=short,
        tone=tone,
    )
