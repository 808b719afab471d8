"""The list of captures of a process that has several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from jetcapture_py.monitoring import words
from jetcapture_py.monitoring.facts import CaptureFacts
from jetcapture_py.monitoring.page.html import Content, Html, tag
from jetcapture_py.monitoring.page.sections import ICONS, verdict
from jetcapture_py.text import plural

_COLUMNS = {
    "Capture": "",
    "State": "",
    "Lag": "number",
    "Unacknowledged": "number optional",
    "Memory": "number optional",
}

_WORST_FIRST = {
    "failing": "Failing",
    "attention": "With a warning",
    "draining": "Draining",
    "starting": "Starting",
    "healthy": "Healthy",
    "ended": "Ended",
}
"""States, and what the process is called if no capture has a worse one."""


def captures(found: Mapping[str, CaptureFacts], failures: Mapping[str, str]) -> tuple[str, str, Html]:
    """Return the worst state, a title, and the list. `failures` has the reasons of captures that failed."""
    states: dict[str, str] = {name: facts.state for name, facts in found.items()}
    states |= dict.fromkeys(failures, "failing")
    state = next((each for each in _WORST_FIRST if each in states.values()), "starting")
    count = sum(each == state for each in states.values())
    title = f"{_WORST_FIRST[state]}: {count} of {plural(len(states), 'capture')}"
    rows = [row for name in sorted(states) for row in _rows(name, states[name], found.get(name), failures.get(name))]
    head = tag("thead", tag("tr", *(tag("th", name, class_=kind or None) for name, kind in _COLUMNS.items())))
    text = "Each has its own page, probes and metrics under its name."
    table = tag("section", tag("table", head, tag("tbody", *rows)), aria_label="Captures")
    return state, title, tag("main", tag("h1", "Captures"), verdict(state, title, text, ""), table)


def _rows(name: str, state: str, facts: CaptureFacts | None, failure: str | None) -> Iterator[Html]:
    """Yield the row of a capture, and one with what is wrong with it."""
    what = "Failed" if failure or facts is None else facts.headline[0]
    trouble = failure or " ".join(each.text for each in (facts.notices if facts else ()) if each.level != "note")
    shown: tuple[Content, ...] = ("", "", "")
    title: Content = name
    if facts is not None:
        title = tag("a", name, href=f"{quote(name, safe='')}/")
        lag = words.age(facts.consumer_state.lag) if facts.consumer_state else ""
        memory = f"{words.size(facts.memory)} of {words.size(facts.memory_limit)}"
        shown = (lag, f"{facts.unacked:,}", memory)
    source = tag("small", f" {facts.stream} / {facts.consumer}") if facts is not None else None
    cells = zip(shown, [*_COLUMNS.values()][2:], strict=True)
    numbers = [tag("td", text, class_=kind) for text, kind in cells]
    yield tag("tr", tag("td", title, source), tag("td", f"{ICONS[state]} {what}"), *numbers)
    if trouble:
        yield tag("tr", tag("td", trouble, colspan=len(_COLUMNS)), class_="path")
