"""Building blocks of the report's page: sections, tables, tiles, commands, and how things are named on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_jobs.reporting.facts import Facts
from spark_jobs.reporting.html import Html, clipped, join, share, tag

LONGEST_KEY = 60


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: `kind` is n for numbers, t for text on one line, w for text that may be long, bar for bars."""

    name: object
    kind: str = ""


def section(name: str, title: str, intro: object, *content: object) -> Html:
    """A part of the page, which links find by `name`."""
    return tag("section", tag("h2", title), tag("p", intro, class_="intro"), *content, id=name)


def note(*content: object) -> Html:
    """A remark in small print."""
    return tag("p", *content, class_="note")


def chart(title: str, picture: Html) -> Html:
    """A chart and what it is called, beside others where there is room."""
    return tag("div", tag("h3", title), picture)


def tile(label: str, value: str, remark: str = "") -> Html:
    """One figure."""
    return tag(
        "div",
        tag("div", label, class_="label"),
        tag("div", value, class_="value small" if len(value) > 9 else "value"),
        tag("div", remark, class_="note"),
        class_="tile",
    )


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Html:
    """A table, which scrolls by itself where the page is narrower."""
    head = tag("tr", *(tag("th", column.name, class_=column.kind or None, scope="col") for column in columns))
    body = [tag("tr", *(_cell(column, value) for column, value in zip(columns, row, strict=True))) for row in rows]
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(column: Column, value: object) -> Html:
    return tag("td", value, class_=column.kind or None)


def bar(part: float, whole: float) -> Html:
    """A bar in a cell, for a column of kind `bar`."""
    width = 100 * part / whole if whole else 0
    return tag("span", style=f"width:{width:.1f}%", title=share(part, whole)) if part else Html("")


def key_name(key: str | None) -> Html:
    """A key as it is, or that there is none."""
    return tag("span", "no key", class_="none") if key is None else join(clipped(key, LONGEST_KEY))


def key_text(key: str | None) -> str:
    """A key where there is room for plain text only."""
    return "(no key)" if key is None else clipped(key, LONGEST_KEY)


def command(facts: Facts, job: str, *arguments: str) -> Html:
    """How to run a job over this archive, ready to be pasted into a shell."""
    words = ["jetcapture", "spark", job, facts.url, facts.stream, *arguments]
    return tag("pre", tag("code", " ".join(map(shlex.quote, words))))
