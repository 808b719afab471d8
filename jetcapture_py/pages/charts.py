"""Compute charts as shapes and labels, which templates draw as SVG without scripts.

Every chart has a title and a description, every bar a tooltip with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar, NamedTuple

from jetcapture_py.pages.words import day, duration, plural, share, utc

MAX_BARS = 72
_DAY = 86_400
_STEPS = (60, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, *(_DAY * n for n in (1, 2, 7, 14, 28, 91, 364)))
_OUTLIERS = 0.005
"""Maximum share of messages at either end of the time axis that charts may leave out."""
_HEIGHT = 1000
_MARGIN = 1.06
"""Height of a sparkline, as a multiple of its highest value."""
_FAR = 2.5
"""A sparkline's limit is drawn up to this multiple of its highest value."""
_WAITS: tuple[float, ...] = (0.01, 0.1, 1, 5, 15, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200)
_WAITS += tuple(days * _DAY for days in (1, 2, 5, 10, 30, 100, 300, 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Time in steps of the same length."""

    begin: int
    """Seconds since the epoch."""
    step: int
    """Seconds."""
    bars: int
    """The number of steps."""

    @classmethod
    def over(cls, messages: Mapping[int, int], interval: int) -> Axis:
        """Return the axis for the messages of each bucket of `interval` seconds, without a few distant outliers."""
        begin, end = _range(messages)
        step = next((seconds for seconds in _STEPS if seconds >= interval and (end - begin) // seconds < MAX_BARS), 0)
        step = step or -(-(end - begin + 1) // (MAX_BARS * _DAY)) * _DAY
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
    """A rectangle; `kind` is its CSS class."""

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
    """An axis label; `position` is a share of the chart's width or height, `kind` its class."""

    position: float
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart."""

    title: str
    text: str
    width: int
    height: int = _HEIGHT
    bars: Sequence[Bar]
    scale: Sequence[Label] = ()
    """Labels of the height."""
    below: Sequence[Label]
    """Labels of the width."""


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

    `unit` formats a value, `ticks` chooses the axis values for a maximum, `mark` formats these. `tone` with the layer's
    number is its CSS class.
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
        position = height(seconds) / _HEIGHT
        if seconds >= least and position <= 1 and (not scale or position - scale[-1].position > 0.13):
            scale.append(Label(position, duration(seconds)))
    return _over_time(axis, bars, scale, title, f"The longest wait is {duration(worst)}. The axis is logarithmic.")


def size_ticks(highest: float) -> list[float]:
    """Return sizes that are round in their unit, from 0 to at least `highest`."""
    unit = 1.0
    while highest / unit >= 1024:
        unit *= 1024
    return count_ticks(highest / unit, 1 / unit, unit)


def count_ticks(highest: float, least: float = 1.0, unit: float = 1.0) -> list[float]:
    """Return three to five round multiples of `unit` from 0 to at least `highest`, at least `least` apart."""
    step = 10 ** math.floor(math.log10(max(highest, 1e-9)))
    step = next(wide for wide in (step / 5, step / 2, step, step * 2, step * 5) if highest / wide <= 4)
    step = max(step, least)
    return [number * step * unit for number in range(math.ceil(round(highest / step, 9)) + 1)]


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


@dataclass(frozen=True, kw_only=True)
class Sparkline:
    """Values over time, in bins."""

    title: str
    ages: Sequence[float]
    """Seconds since each of the values, oldest first."""
    values: Sequence[float]
    words: Callable[[float], str]
    """Formats a value."""
    span: float
    """Time span in seconds."""
    bars: bool = False
    """Draw the mean of each bin as a bar, rather than the maximum as a line."""
    limit: float | None = None
    """A dashed line."""

    BINS: ClassVar = 60
    WIDTH: ClassVar = 600
    HEIGHT: ClassVar = 100
    BIN: ClassVar = WIDTH // BINS

    @cached_property
    def bins(self) -> list[float | None]:
        """The value of each bin, oldest first; None for an empty bin."""
        bins: list[list[float]] = [[] for _ in range(self.BINS)]
        for age, value in zip(self.ages, self.values, strict=True):
            number = self.BINS - 1 - int(age / self.span * self.BINS)
            if 0 <= number < self.BINS:
                bins[number].append(value)
        return [None if not part else sum(part) / len(part) if self.bars else max(part) for part in bins]

    @cached_property
    def peak(self) -> float:
        """The highest drawn value; 0 without any."""
        return max((value for value in self.bins if value is not None), default=0.0)

    @property
    def shown_limit(self) -> float | None:
        """The limit, if drawn: one far above the values would flatten them."""
        return self.limit if self.limit is not None and 0 < self.limit <= _FAR * self.peak else None

    @property
    def text(self) -> str:
        if not self.values:
            return f"{self.title}: no samples yet"
        now, peak = self.words(self.values[-1]), self.words(self.peak)
        return f"{self.title} over the last quarter of an hour: now {now}, at most {peak}"

    @property
    def tooltips(self) -> list[tuple[int, str]]:
        """Position and text of each bin with a value."""
        seconds = [self.span / self.BINS * (self.BINS - number) for number in range(self.BINS)]
        ago = [duration(moment) for moment in seconds]
        return [
            (number * self.BIN, f"{ago[number]} ago: {self.words(value)}")
            for number, value in enumerate(self.bins)
            if value is not None
        ]

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The class and the SVG path of each line and area."""
        scale = self.HEIGHT / (max(self.peak, self.shown_limit or 0.0) * _MARGIN or 1.0)
        paths = [("bars", self._bar_path(scale))] if self.bars else self._area_paths(scale)
        if self.shown_limit is not None:
            paths.append(("limit", f"M0 {self.HEIGHT - self.shown_limit * scale:.1f}H{self.WIDTH}"))
        return paths

    def _bar_path(self, scale: float) -> str:
        return "".join(
            f"M{number * self.BIN + 1} {self.HEIGHT}v-{max(value * scale, 1.5):.1f}h{self.BIN - 2}V{self.HEIGHT}z"
            for number, value in enumerate(self.bins)
            if value
        )

    def _area_paths(self, scale: float) -> list[tuple[str, str]]:
        """Return an area under a line, for each run of known values."""
        areas, lines = "", ""
        for known, group in groupby(enumerate(self.bins), lambda item: item[1] is not None):
            run = [(number, f"{self.HEIGHT - (value or 0) * scale:.1f}") for number, value in group]
            if known:
                left, right = run[0][0] * self.BIN, (run[-1][0] + 1) * self.BIN
                points = "L".join(f"{number * self.BIN + self.BIN // 2} {y}" for number, y in run)
                shape = f"{left} {run[0][1]}L{points}L{right} {run[-1][1]}"
                lines += f"M{shape}"
                areas += f"M{left} {self.HEIGHT}L{shape}V{self.HEIGHT}z"
        return [("area", areas), ("line", lines)]
