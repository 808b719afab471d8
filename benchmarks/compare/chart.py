"""A small chart in SVG: for each figure the runners' medians as bars, and their ranges as lines.

The picture follows the reader's preference for light or dark, and has a background of its own, so that it can be read
wherever it is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 860, 150, 110
ROW, GAP, TITLE, HEAD = 22, 6, 34, 56
STYLE = """
  .back { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1f2328 } .head { font-size: 16px }
  .title { font-weight: 600 } .small { font-size: 11px; fill: #59636e }
  .ours { fill: #0969da } .other { fill: #8c959f } .limit { fill: #c8ced5 } .range { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
    .ours { fill: #4493f8 } .other { fill: #6e7681 } .limit { fill: #3d444d } .range { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One figure: a title, and every runner's values; `digits` behind the decimal point are shown."""

    title: str
    values: Sequence[tuple[str, Sequence[float]]]
    digits: int = 0


def chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The picture."""
    parts: list[str] = []
    top = HEAD
    for panel in panels:
        parts += _panel(panel, top)
        top += TITLE + len(panel.values) * (ROW + GAP)
    height = top + 16
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
            f'<text class="head title" x="16" y="28">{escape(title)}</text>',
            f'<text class="small" x="16" y="46">{escape(subtitle)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _panel(panel: Panel, top: int) -> list[str]:
    parts = [f'<text class="title" x="16" y="{top + 22}">{escape(panel.title)}</text>']
    most = max((max(values) for _, values in panel.values), default=0) or 1
    scale = (WIDTH - LEFT - RIGHT) / most
    for index, (name, values) in enumerate(panel.values):
        y = top + TITLE + index * (ROW + GAP)
        middle = statistics.median(values)
        kind = "limit" if name.startswith("limit") else "ours" if name.startswith("jetcapture") else "other"
        low, high = LEFT + min(values) * scale, LEFT + max(values) * scale
        label = f"{middle:,.{panel.digits}f}"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{middle * scale:.1f}" height="{ROW - 2}" rx="2"/>',
            f'<path class="range" d="M{low:.1f} {y + ROW / 2 - 1} H{high:.1f}"/>',
            f'<text x="{max(high, LEFT) + 8:.1f}" y="{y + 15}">{label}</text>',
        ]
    return parts
