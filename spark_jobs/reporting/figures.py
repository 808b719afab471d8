"""Figures that the report's chapters are made of, counted from what is known of each object. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TypeVar

from spark_jobs.compaction.plan import TARGET_SIZE
from spark_jobs.compaction.unit import SEALED_BY
from spark_jobs.reporting.charts import Axis
from spark_jobs.reporting.facts import Facts
from spark_jobs.reporting.source import Stored

SMALL = TARGET_SIZE // 8
"""Bytes below which an object is small."""
FEW, MANY = 10, 100
"""Objects that are not worth a word, and so many that their size always is."""

_CLASSES = tuple(4**power for power in range(5, 16))
"""Upper bounds of the classes of sizes, in bytes."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is stored of one key; `size` in bytes, `first` and `last` bucket in seconds since the epoch."""

    key: str | None
    messages: int
    size: int
    objects: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Seconds within which half, 95 % and all of some messages were stored, at most.

    `closed` is when the last of their objects was written, in seconds after the end of its bucket.
    """

    objects: int
    half: float
    most: float
    all: float
    closed: float


def by_key(facts: Facts) -> list[Key]:
    """Every key, the one with the most messages first."""
    objects: dict[str | None, list[Stored]] = defaultdict(list)
    for stored in facts.objects:
        objects[stored.name.key].append(stored)
    keys = [
        Key(
            key=key,
            messages=facts.messages(own),
            size=sum(stored.size for stored in own),
            objects=len(own),
            first=min(stored.name.bucket for stored in own),
            last=max(stored.name.bucket for stored in own),
        )
        for key, own in objects.items()
    ]
    return sorted(keys, key=lambda each: (-each.messages, each.key or ""))


def over_time(
    axis: Axis, objects: Iterable[Stored], value: Callable[[Stored], float], layer: Callable[[Stored], int], layers: int
) -> list[list[float]]:
    """The sum of `value` for each layer and bar."""
    sums = [[0.0] * axis.bars for _ in range(layers)]
    for stored in objects:
        bar = axis.place(stored.name.bucket)
        if bar is not None:
            sums[layer(stored)][bar] += value(stored)
    return sums


def waits(objects: Iterable[Stored], by: Callable[[Stored], K | None]) -> dict[K, Wait]:
    """How long messages waited until they were stored, for the objects of each value of `by` that is not None.

    All messages of an object count with the wait of its oldest. Objects that do not tell are left out, and so are those
    that compaction wrote, long after their messages were stored.
    """
    known: dict[K, list[Stored]] = defaultdict(list)
    for stored in objects:
        group = by(stored)
        tells = stored.oldest is not None and stored.modified is not None and stored.sealed_by != SEALED_BY
        if group is not None and tells:
            known[group].append(stored)
    return {group: _wait(own) for group, own in known.items()}


def _wait(objects: Sequence[Stored]) -> Wait:
    waited = sorted((max((each.modified or 0) - (each.oldest or 0) / 1e6, 0), each.messages) for each in objects)
    upto = list(accumulate(messages for _, messages in waited))
    half, most = (waited[bisect_left(upto, upto[-1] * part)][0] for part in (0.5, 0.95))
    closed = max((each.modified or 0) - each.end for each in objects)
    return Wait(objects=len(objects), half=half, most=most, all=waited[-1][0], closed=closed)


def size_classes(objects: Iterable[Stored]) -> list[tuple[int, int, int]]:
    """Objects and bytes for each class of sizes, between the smallest and the largest: its upper bound comes first."""
    counts, sizes = [0] * (len(_CLASSES) + 1), [0] * (len(_CLASSES) + 1)
    for stored in objects:
        place = next((index for index, bound in enumerate(_CLASSES) if stored.size < bound), len(_CLASSES))
        counts[place] += 1
        sizes[place] += stored.size
    used = [index for index, count in enumerate(counts) if count]
    bounds = [*_CLASSES, 4 * _CLASSES[-1]]
    return [(bounds[index], counts[index], sizes[index]) for index in range(used[0], used[-1] + 1)] if used else []


def sealed(objects: Iterable[Stored]) -> list[tuple[str, int, int, float]]:
    """For each reason why blocks were sealed: objects, messages and the median size, the most frequent first."""
    found: dict[str, list[Stored]] = defaultdict(list)
    for stored in objects:
        found[stored.sealed_by].append(stored)
    rows = [
        (reason, len(own), sum(stored.messages for stored in own), median(stored.size for stored in own))
        for reason, own in found.items()
    ]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def after_compaction(objects: Iterable[Stored]) -> int:
    """About how many objects compaction would leave: it merges those of one key and bucket."""
    sizes: dict[tuple[object, ...], int] = defaultdict(int)
    for stored in objects:
        sizes[stored.name.group] += stored.size
    return sum(max(1, -(-size // TARGET_SIZE)) for size in sizes.values())


def worth_compacting(facts: Facts) -> bool:
    """Whether compaction would make clearly fewer objects."""
    now = len(facts.objects)
    return now >= FEW and after_compaction(facts.objects) <= now * 0.8


def small_for_good(facts: Facts) -> bool:
    """Whether there are many small objects, which compaction cannot help."""
    small = sum(stored.size < SMALL for stored in facts.objects)
    return len(facts.objects) >= MANY and small > len(facts.objects) / 2 and not worth_compacting(facts)
