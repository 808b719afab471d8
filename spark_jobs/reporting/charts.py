"""The report's charts: SVG that stretches with the page, with the labels around it as text that does not.

Each chart says in its title and description what it shows, each bar in its own title what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from spark_jobs.reporting.coverage import Life
from spark_jobs.reporting.html import Html, day, duration, plural, share, short, size, tag, utc

MOST_BARS = 72
_DAY = 86_400
_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, *(_DAY * n for n in (1, 2, 7, 14, 28, 91, 364)))
_FARAWAY = 0.005
"""The share of messages, at either end of time, that may be left out of the charts to see the others."""
_HEIGHT = 1000
_WAITS = (*(part / 100 for part in (1, 10)), 1, 5, 15, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200)
_WAITS += tuple(days * _DAY for days in (1, 2, 5, 10, 30, 100, 300, 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Time in `bars` steps of `step` seconds from `begin`, in seconds since the epoch."""

    begin: int
    step: int
    bars: int

    @classmethod
    def over(cls, messages: Mapping[int, int], interval: int) -> Axis:
        """For buckets of `interval` seconds with so many messages. A few far off must not press all others together."""
        begin, end = _range(messages)
        step = next((each for each in _STEPS if each >= interval and (end - begin) // each < MOST_BARS), 0)
        step = step or -(-(end - begin + 1) // (MOST_BARS * _DAY)) * _DAY
        begin -= begin % min(step, _DAY)
        return cls(begin=begin, step=step, bars=(end - begin) // step + 1)

    def place(self, bucket: int) -> int | None:
        """The bar that a bucket belongs to; None when it is left out."""
        bar = (bucket - self.begin) // self.step
        return bar if 0 <= bar < self.bars else None

    def label(self, bar: int) -> str:
        """When the bar begins."""
        at = self.begin + bar * self.step
        years = utc(self.begin).year != utc(self.begin + self.bars * self.step).year
        if self.step >= _DAY:
            return day(at, year=years)
        return f"{day(at)} {utc(at):%H:%M}" if self.bars * self.step > _DAY else f"{utc(at):%H:%M}"

    def when(self, bar: int) -> str:
        """The time that the bar stands for, in full."""
        at = self.begin + bar * self.step
        return (
            day(at, year=True) if self.step == _DAY else f"{day(at, year=True)} {utc(at):%H:%M}, {duration(self.step)}"
        )


def _range(messages: Mapping[int, int]) -> tuple[int, int]:
    buckets = sorted(messages)
    ignored = sum(messages.values()) * _FARAWAY
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


def stacked(
    axis: Axis,
    layers: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    unit: Callable[[float], str],
    ticks: Callable[[float], list[float]],
    mark: Callable[[float], str],
    tone: str = "k",
) -> Html:
    """Bars over time, made of layers, the first at the bottom: a name and a value for each bar.

    `unit` writes a value, `ticks` chooses those at the axis for a maximum, `mark` writes them there. `tone` and the
    layer's number are the class that gives it its colour.
    """
    totals = [sum(values) for values in zip(*(values for _, values in layers), strict=True)]
    scale = ticks(max(totals))
    bars = []
    for bar, total in enumerate(totals):
        if not total:
            continue
        lines = [f"{axis.when(bar)}: {unit(total)}"]
        parts, base = [], 0.0
        for number, (name, values) in enumerate(layers):
            if not values[bar]:
                continue
            high = max(values[bar] / scale[-1] * _HEIGHT, 4)
            parts.append(_rect(bar * 10 + 1, base + high, 8, high - (4 if high > 16 else 0), f"{tone}{number}"))
            base += high
            lines += [f"{name}: {unit(values[bar])} ({share(values[bar], total)})"] * (len(layers) > 1)
        hit = tag("rect", x=bar * 10, y=0, width=10, height=_HEIGHT, class_="hit")
        bars.append(tag("g", tag("title", "\n".join(lines)), hit, *parts))
    highest = max(range(axis.bars), key=lambda bar: totals[bar])
    text = f"{plural(axis.bars, 'bar')} of {duration(axis.step)} each. The highest is {axis.when(highest)}: "
    return _plot(axis, bars, [(tick / scale[-1], mark(tick)) for tick in scale], title, text + unit(totals[highest]))


def waits(axis: Axis, points: Mapping[int, tuple[float, float, float]], *, title: str) -> Html:
    """For each bar the median, 95th percentile and maximum of a wait in seconds, on a logarithmic axis."""
    worst = max(point[2] for point in points.values())
    least = max(min(point[0] for point in points.values()) / 4, 0.01)
    top = math.log10(max(worst, 10 * least) * 1.3)

    def height(seconds: float) -> float:
        return (math.log10(max(seconds / least, 1))) / (top - math.log10(least)) * _HEIGHT

    bars = []
    for bar, (median, most, longest) in sorted(points.items()):
        text = f"{axis.when(bar)}: half within {duration(median)}, 95 % within {duration(most)}, all within "
        middle, upper, end = height(median), height(most), height(longest)
        bars.append(
            tag(
                "g",
                tag("title", text + duration(longest)),
                tag("rect", x=bar * 10, y=0, width=10, height=_HEIGHT, class_="hit"),
                _rect(bar * 10 + 4.4, end, 1.2, max(end - middle, 4), "w2"),
                _rect(bar * 10 + 2, upper, 6, max(upper - middle, 8), "w1"),
                _rect(bar * 10 + 1, middle + 8, 8, 16, "w0"),
            )
        )
    scale: list[tuple[float, str]] = []
    for seconds in _WAITS:
        place = height(seconds) / _HEIGHT
        if seconds >= least and place <= 1 and (not scale or place - scale[-1][0] > 0.13):
            scale.append((place, duration(seconds)))
    return _plot(axis, bars, scale, title, f"The longest wait is {duration(worst)}. The axis is logarithmic.")


def strip(life: Life) -> Html:
    """A life's range of sequences as a band: full where all is stored, and a mark below every part that has a hole."""
    cells = len(life.cells)
    shapes, at = [], 0
    for stored, run in groupby(life.cells):
        width = len(list(run))
        first = life.first + at * life.cell
        last = min(life.first + (at + width) * life.cell - 1, life.last)
        text = f"Sequences {first:,} to {last:,}: {share(stored, 1)} stored"
        high = 700 * (stored if stored in (0, 1) else min(max(stored, 0.08), 0.92))
        band = [tag("rect", x=at, y=700 - high, width=width, height=high, class_="stored")] if high else []
        if high < 700:
            band.append(tag("rect", x=at, y=0, width=width, height=700 - high, class_="gap"))
            band.append(tag("rect", x=at, y=780, width=width, height=220, class_="gap"))
        shapes.append(tag("g", tag("title", text), *band))
        at += width
    broken = sum(stored < 1 for stored in life.cells)
    about = f"{plural(cells, 'part')} of {plural(life.cell, 'sequence')} each; {broken:,} of them with holes."
    picture = tag(
        "svg",
        tag("title", "Coverage of the sequences"),
        tag("desc", about),
        *shapes,
        role="img",
        viewBox=f"0 0 {cells} {1000 if broken else 700}",
        preserveAspectRatio="none",
    )
    marks = [_mark(0.0, f"{life.first:,}"), tag("span", f"{life.last:,}", class_="end")]
    if life.settled is not None and life.first <= life.settled < life.last:
        place = (life.settled - life.first) / (life.last - life.first + 1)
        side = "flip" if place > 0.5 else ""
        marks.append(_mark(place, f"watermark {life.settled:,}", f"watermark {side}".strip()))
    canvas = tag("div", picture, class_="canvas" if broken else "canvas whole")
    return tag("div", canvas, tag("div", *marks, class_="x"), class_="strip")


def count_ticks(most: float) -> list[float]:
    """Round counts from 0 to at least `most`, three to five of them."""
    return _ticks(most, 1.0)


def size_ticks(most: float) -> list[float]:
    """Sizes that are round in their unit, from 0 to at least `most`."""
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
    """A count at an axis."""
    return short(value)


def size_mark(value: float) -> str:
    """A size at an axis."""
    return size(value) if value else "0"


def _rect(x: float, top: float, width: float, height: float, class_: str) -> Html:
    """A bar whose upper edge is `top` above the ground."""
    return tag("rect", x=f"{x:g}", y=f"{_HEIGHT - top:.1f}", width=f"{width:g}", height=f"{height:.1f}", class_=class_)


def _mark(place: float, text: str, class_: str = "") -> Html:
    return tag("span", text, style=f"left:{100 * place:.2f}%", class_=class_ or None)


def _plot(axis: Axis, bars: Sequence[Html], scale: Sequence[tuple[float, str]], title: str, text: str) -> Html:
    """Bars with an axis on the left, `scale` as the share of its height and the label, and time below."""
    lines = [
        tag("line", x1=0, x2=axis.bars * 10, y1=y, y2=y, class_="grid")
        for y in (round(_HEIGHT * (1 - place), 1) for place, _ in scale)
    ]
    picture = tag(
        "svg",
        tag("title", title),
        tag("desc", text),
        *lines,
        *bars,
        role="img",
        viewBox=f"0 0 {axis.bars * 10} {_HEIGHT}",
        preserveAspectRatio="none",
    )
    every = max(1, -(-axis.bars // 5))
    below = [
        _mark(bar / axis.bars, axis.label(bar), "alternate" if bar // every % 2 else "")
        for bar in range(0, axis.bars, every)
        if bar <= axis.bars * 0.82
    ]
    left = [tag("span", label, style=f"bottom:{100 * place:.1f}%") for place, label in scale]
    return tag(
        "div",
        tag("div", *left, class_="y", aria_hidden="true"),
        tag("div", picture, class_="canvas"),
        tag("div", *below, class_="x", aria_hidden="true"),
        class_="plot",
        style=f"max-width:{max(axis.bars * 64, 160)}px",
    )


def legend(names: Sequence[tuple[str, object]]) -> Html:
    """What the colours stand for: classes and names."""
    return tag("ul", *(tag("li", tag("i", class_=f"swatch {kind}"), name) for kind, name in names), class_="legend")
