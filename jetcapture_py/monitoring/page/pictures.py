"""Small pictures of a quarter of an hour, as inline SVG without scripts; each says in words what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from jetcapture_py.monitoring.history import EVERY, SAMPLES
from jetcapture_py.monitoring.page.html import Html, join, tag

SECONDS = EVERY * SAMPLES
BINS = 60
_WIDTH, _HEIGHT = 600, 100
_BIN = _WIDTH // BINS
_MARGIN = 1.06
"""Height of a picture, as a multiple of its highest value."""
_FAR = 2.5
"""A limit that is further above the values than this is not drawn, because it would flatten them."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Values over time, in bins of a quarter of a minute: their mean for `bars`, else their maximum.

    `ages` are the seconds since each of `values`, oldest first; `words` formats a value. `limit` is a dashed line.
    """

    title: str
    ages: Sequence[float]
    values: Sequence[float]
    words: Callable[[float], str]
    bars: bool = False
    limit: float | None = None

    @cached_property
    def bins(self) -> list[float | None]:
        """Return the value of each bin, oldest first; None where there is none."""
        found: list[list[float]] = [[] for _ in range(BINS)]
        for age, value in zip(self.ages, self.values, strict=True):
            place = BINS - 1 - int(age / SECONDS * BINS)
            if 0 <= place < BINS:
                found[place].append(value)
        return [None if not each else sum(each) / len(each) if self.bars else max(each) for each in found]

    @cached_property
    def most(self) -> float:
        """Return the highest value that is drawn; 0 without any."""
        return max((value for value in self.bins if value is not None), default=0.0)

    @property
    def shown_limit(self) -> float | None:
        """Return the limit if it is drawn."""
        return self.limit if self.limit is not None and 0 < self.limit <= _FAR * self.most else None

    @property
    def text(self) -> str:
        """Return in words what it shows."""
        if not self.values:
            return f"{self.title}: no samples yet"
        now, most = self.words(self.values[-1]), self.words(self.most)
        return f"{self.title} over the last quarter of an hour: now {now}, at most {most}"

    def draw(self) -> Html:
        """Return the picture; every bin has a tooltip with its value."""
        top = max(self.most, self.shown_limit or 0.0) * _MARGIN or 1.0
        line = None
        if self.shown_limit is not None:
            line = tag("path", d=f"M0 {_HEIGHT - self.shown_limit / top * _HEIGHT:.1f}H{_WIDTH}", class_="limit")
        tooltips = (
            f'<rect class="hit" x="{place * _BIN}" width="{_BIN}" height="{_HEIGHT}"><title>{_when(place)}: '
            f"{escape(self.words(value))}</title></rect>"
            for place, value in enumerate(self.bins)
            if value is not None
        )
        return tag(
            "svg",
            tag("title", self.text),
            _bars(self.bins, top) if self.bars else _area(self.bins, top),
            line,
            Html("".join(tooltips)),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            preserveAspectRatio="none",
            role="img",
            aria_label=self.text,
        )


def _bars(bins: Sequence[float | None], top: float) -> Html:
    shapes = [
        f"M{place * _BIN + 1} {_HEIGHT}v-{max(value / top * _HEIGHT, 1.5):.1f}h{_BIN - 2}V{_HEIGHT}z"
        for place, value in enumerate(bins)
        if value
    ]
    return tag("path", d="".join(shapes), class_="bars")


def _area(bins: Sequence[float | None], top: float) -> Html:
    """Return an area under a line, for each run of known values."""
    areas, lines = [], []
    run: list[tuple[int, str]] = []
    for place, value in enumerate([*bins, None]):
        if value is not None:
            run.append((place, f"{_HEIGHT - value / top * _HEIGHT:.1f}"))
        elif run:
            left, right = run[0][0] * _BIN, place * _BIN
            points = "L".join(f"{at * _BIN + _BIN // 2} {y}" for at, y in run)
            shape = f"{left} {run[0][1]}L{points}L{right} {run[-1][1]}"
            lines.append(f"M{shape}")
            areas.append(f"M{left} {_HEIGHT}L{shape}V{_HEIGHT}z")
            run = []
    return join(tag("path", d="".join(areas), class_="area"), tag("path", d="".join(lines), class_="line"))


def _when(place: int) -> str:
    seconds = SECONDS / BINS * (BINS - place)
    return f"{seconds:.0f} s ago" if seconds < 60 else f"{seconds // 60:.0f} min ago"
