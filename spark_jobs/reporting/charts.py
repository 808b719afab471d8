"""Compute the report's charts as shapes and labels, which templates draw as responsive SVG.

Every chart has a title and a description, every bar a tooltip with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from spark_jobs.reporting.coverage import IncarnationCoverage
from spark_jobs.reporting.text import day, duration, plural, share, short, size, utc

MOST_BARS = 72
_DAY = 86_400
_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, *(_DAY * n for n in (1, 2, 7, 14, 28, 91, 364)))
_OUTLIERS = 0.005
"""Share of messages at either end of the time axis that charts may leave out to show the others."""
_HEIGHT = 1000
_WAITS: tuple[float, ...] = (0.01, 0.1, 1, 5, 15, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200)
_WAITS += tuple(days * _DAY for days in (1, 2, 5, 10, 30, 100, 300, 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Time in `bars` steps of `step` seconds from `begin`, in seconds since the epoch."""

    begin: int
    step: int
    bars: int

    @classmethod
    def over(cls, messages: Mapping[int, int], interval: int) -> Axis:
        """Return the axis for the messages of each bucket of `interval` seconds, without a few distant outliers."""
        begin, end = _range(messages)
        step = next((each for each in _STEPS if each >= interval and (end - begin) // each < MOST_BARS), 0)
        step = step or -(-(end - begin + 1) // (MOST_BARS * _DAY)) * _DAY
        begin -= begin % min(step, _DAY)
        return cls(begin=begin, step=step, bars=(end - begin) // step + 1)

    def place(self, bucket: int) -> int | None:
        """Return the bar of a bucket; None if it is left out."""
        bar = (bucket - self.begin) // self.step
        return bar if 0 <= bar < self.bars else None

    def label(self, bar: int) -> str:
        """Return the start of the bar for the axis."""
        at = self.begin + bar * self.step
        if self.step >= _DAY:
            return day(at, year=utc(self.begin).year != utc(self.begin + self.bars * self.step).year)
        return f"{day(at)} {utc(at):%H:%M}" if self.bars * self.step > _DAY else f"{utc(at):%H:%M}"

    def when(self, bar: int) -> str:
        """Return the date, time and length of the bar for tooltips."""
        at = self.begin + bar * self.step
        date = day(at, year=True)
        return date if self.step == _DAY else f"{date} {utc(at):%H:%M}, {duration(self.step)}"


def _range(messages: Mapping[int, int]) -> tuple[int, int]:
    buckets = sorted(messages)
    ignored = sum(messages.values()) * _OUTLIERS
    ends = []
    for ordered in (buckets, buckets[::-1]):
        seen = 0
        for bucket in ordered:
            seen += messages[bucket]
            if seen > ignored:
                ends.append(bucket)
                break
    near, whole = ends[1] - ends[0], buckets[-1] - buckets[0]
    return (ends[0], ends[1]) if near * 10 < whole and near else (buckets[0], buckets[-1])


class Rectangle(NamedTuple):
    """A rectangle; `kind` is the class that colors it."""

    x: float
    y: float
    width: float
    height: float
    kind: str


class Bar(NamedTuple):
    """The shapes of a bar, and its figures."""

    title: str
    shapes: Sequence[Rectangle]


class Label(NamedTuple):
    """An axis label: `place` is its position as a share of the chart's width or height; `kind` is its class."""

    place: float
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: `scale` labels the height, `below` the width."""

    title: str
    text: str
    width: int
    height: int = _HEIGHT
    bars: Sequence[Bar]
    scale: Sequence[Label] = ()
    below: Sequence[Label]


def stacked(
    axis: Axis,
    layers: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    unit: Callable[[float], str],
    ticks: Callable[[float], list[float]],
    mark: Callable[[float], str],
    tone: str = "k",
) -> Chart:
    """Return stacked bars over time. `layers`, from the bottom up, are names with one value per bar.

    `unit` formats a value, `ticks` chooses the axis values for a maximum, `mark` formats these. `tone` followed by the
    layer's number is the class that colors it.
    """
    totals = [sum(values) for values in zip(*(values for _, values in layers), strict=True)]
    scale = ticks(max(totals))
    bars = []
    for bar, total in enumerate(totals):
        if not total:
            continue
        lines, shapes, base = [f"{axis.when(bar)}: {unit(total)}"], [_hit(bar)], 0.0
        for number, (name, values) in enumerate(layers):
            if not values[bar]:
                continue
            height = max(values[bar] / scale[-1] * _HEIGHT, 4)
            gap = 4 if height > 16 else 0
            shapes.append(_shape(bar * 10 + 1, base + height, 8, height - gap, f"{tone}{number}"))
            base += height
            lines += [f"{name}: {unit(values[bar])} ({share(values[bar], total)})"] * (len(layers) > 1)
        bars.append(Bar("\n".join(lines), shapes))
    highest = max(range(axis.bars), key=lambda bar: totals[bar])
    text = f"{plural(axis.bars, 'bar')} of {duration(axis.step)} each. The highest is {axis.when(highest)}: "
    return _over_time(
        axis, bars, [Label(tick / scale[-1], mark(tick)) for tick in scale], title, text + unit(totals[highest])
    )


def waits(axis: Axis, points: Mapping[int, tuple[float, float, float]], *, title: str) -> Chart:
    """Return a chart of waits over time: median, 95th percentile and maximum in seconds, on a logarithmic axis."""
    worst = max(point[2] for point in points.values())
    least = max(min(point[0] for point in points.values()) / 4, 0.01)
    top = math.log10(max(worst, 10 * least) * 1.3)

    def height(seconds: float) -> float:
        return (math.log10(max(seconds / least, 1))) / (top - math.log10(least)) * _HEIGHT

    bars = []
    for bar, point in sorted(points.items()):
        half, most, longest = map(duration, point)
        middle, upper, end = map(height, point)
        shapes = [
            _hit(bar),
            _shape(bar * 10 + 4.4, end, 1.2, max(end - middle, 4), "w2"),
            _shape(bar * 10 + 2, upper, 6, max(upper - middle, 8), "w1"),
            _shape(bar * 10 + 1, middle + 8, 8, 16, "w0"),
        ]
        bars.append(Bar(f"{axis.when(bar)}: half within {half}, 95 % within {most}, all within {longest}", shapes))
    scale: list[Label] = []
    for seconds in _WAITS:
        place = height(seconds) / _HEIGHT
        if seconds >= least and place <= 1 and (not scale or place - scale[-1].place > 0.13):
            scale.append(Label(place, duration(seconds)))
    return _over_time(axis, bars, scale, title, f"The longest wait is {duration(worst)}. The axis is logarithmic.")


def strip(life: IncarnationCoverage) -> Chart:
    """Return the range of sequences as a band, filled by the share stored, with a mark below every part with a hole."""
    bars, at = [], 0
    for stored, run in groupby(life.cells):
        width = len(list(run))
        first = life.first + at * life.cell
        last = min(first + width * life.cell - 1, life.last)
        height = 700 * (stored if stored in (0, 1) else min(max(stored, 0.08), 0.92))
        shapes = [Rectangle(at, 700 - height, width, height, "stored")] if height else []
        if height < 700:
            shapes += [Rectangle(at, 0, width, 700 - height, "gap"), Rectangle(at, 780, width, 220, "gap")]
        bars.append(Bar(f"Sequences {first:,} to {last:,}: {share(stored, 1)} stored", shapes))
        at += width
    broken = sum(stored < 1 for stored in life.cells)
    below = [Label(0, f"{life.first:,}"), Label(1, f"{life.last:,}", "end")]
    if life.settled is not None and life.first <= life.settled < life.last:
        place = (life.settled - life.first) / (life.last - life.first + 1)
        below.append(Label(place, f"watermark {life.settled:,}", "watermark flip" if place > 0.5 else "watermark"))
    about = f"{plural(len(life.cells), 'part')} of {plural(life.cell, 'sequence')} each; {broken:,} of them with holes."
    return Chart(
        title="Coverage of the sequences",
        text=about,
        width=len(life.cells),
        height=_HEIGHT if broken else 700,
        bars=bars,
        below=below,
    )


def count_ticks(most: float) -> list[float]:
    """Return round counts from 0 to at least `most`, three to five of them."""
    return _ticks(most, 1.0)


def size_ticks(most: float) -> list[float]:
    """Return sizes that are round in their unit, from 0 to at least `most`."""
    unit = 1.0
    while most / unit >= 1024:
        unit *= 1024
    return _ticks(most / unit, 1 / unit, unit)


def _ticks(most: float, least: float, unit: float = 1.0) -> list[float]:
    step = 10 ** math.floor(math.log10(max(most, 1e-9)))
    step = next(each for each in (step / 5, step / 2, step, step * 2, step * 5) if most / each <= 4)
    step = max(step, least)
    return [number * step * unit for number in range(math.ceil(round(most / step, 9)) + 1)]


def count_mark(value: float) -> str:
    """Return a count for an axis."""
    return short(value)


def size_mark(value: float) -> str:
    """Return a size for an axis."""
    return size(value) if value else "0"


def _hit(bar: int) -> Rectangle:
    """Return the full-height area of a bar that shows its tooltip."""
    return Rectangle(bar * 10, 0, 10, _HEIGHT, "hit")


def _shape(x: float, top: float, width: float, height: float, kind: str) -> Rectangle:
    """Return a rectangle whose upper edge is `top` above the x axis."""
    return Rectangle(x, _HEIGHT - top, width, height, kind)


def _over_time(axis: Axis, bars: Sequence[Bar], scale: Sequence[Label], title: str, text: str) -> Chart:
    every = max(1, -(-axis.bars // 5))
    below = [
        Label(bar / axis.bars, axis.label(bar), "alternate" if bar // every % 2 else "")
        for bar in range(0, axis.bars, every)
        if bar <= axis.bars * 0.82
    ]
    return Chart(title=title, text=text, width=axis.bars * 10, bars=bars, scale=scale, below=below)
