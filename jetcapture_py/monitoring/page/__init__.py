"""The status page, which people on call open first.

A page is a function of facts. It has no scripts and loads nothing; it refreshes itself, unless it is a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jetcapture_py.monitoring.facts import CaptureFacts
from jetcapture_py.monitoring.page import sections
from jetcapture_py.monitoring.page.captures import captures
from jetcapture_py.monitoring.page.html import Html, join, tag
from jetcapture_py.monitoring.words import moment

REFRESH = 5
"""Seconds after which the page loads itself again."""
COLORS = {
    "ended": "57606a",
    "healthy": "1a7f37",
    "draining": "57606a",
    "starting": "57606a",
    "attention": "b35900",
    "failing": "cf222e",
}
"""Of the icon in the browser's tab, by state."""

__all__ = ["document", "no_answer", "overview"]


def document(facts: CaptureFacts, *, refresh: bool = True) -> str:
    """Return the page about one capture."""
    title = f"{facts.headline[0]} · {facts.stream} / {facts.consumer}"
    body = join(_header(facts), sections.capture(facts), _footer(refresh=refresh))
    return _page(title, facts.state, body, refresh=refresh)


def overview(found: Mapping[str, CaptureFacts], failures: Mapping[str, str], *, refresh: bool = True) -> str:
    """Return the page that lists the captures of this process by name, with links to their pages.

    `failures` has the reason for each capture that failed or could not start.
    """
    state, title, listed = captures(found, failures)
    header = _header(next(iter(found.values()))) if found else None
    return _page(f"{title} · jetcapture", state, join(header, listed, _footer(refresh=refresh)), refresh=refresh)


def _header(facts: CaptureFacts) -> Html:
    return tag(
        "header",
        tag("p", tag("strong", "jetcapture"), f" {facts.version}", class_="brand"),
        tag(
            "p",
            f"{moment(facts.time)} UTC · ",
            tag("span", f"{facts.host}, process {facts.pid}", class_="host"),
            class_="when",
        ),
    )


def no_answer(seconds: float) -> str:
    """Return the page for a process whose event loop has not run for some seconds, so that nothing is known."""
    notice = sections.verdict(
        "failing",
        "Not answering",
        f"The event loop has not run for {seconds:.0f} s.",
        "Nothing is captured until it runs again, and nothing is lost. After 30 s, /livez asks for a restart.",
    )
    top = tag("header", tag("p", tag("strong", "jetcapture"), class_="brand"))
    return _page(
        "Not answering · jetcapture", "failing", join(top, tag("main", notice), _footer(refresh=True)), refresh=True
    )


def _page(title: str, state: str, body: Html, *, refresh: bool) -> str:
    circle = f"<circle cx='8' cy='8' r='7' fill='%23{COLORS[state]}'/>"
    icon = f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{circle}</svg>"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=REFRESH) if refresh else None,
        tag("link", rel="icon", href=icon),
        tag("title", title),
        tag("style", _style()),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _footer(*, refresh: bool) -> Html:
    other = ("snapshot", "stop refreshing") if refresh else ("./", "refresh automatically")
    links = [("status.json", "JSON"), ("metrics", "metrics"), ("readyz", "readiness"), ("livez", "liveness")]
    return tag(
        "footer",
        tag("p", f"Refreshed every {REFRESH} s: " if refresh else "A snapshot: ", tag("a", other[1], href=other[0])),
        tag("nav", *(tag("a", text, href=path) for path, text in links), aria_label="For machines"),
    )


@cache
def _style() -> Html:
    return Html(Path(__file__).with_name("style.css").read_text())
