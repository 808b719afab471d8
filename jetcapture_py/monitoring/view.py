"""The status page, which people on call open first.

A page is a function of facts. It has no scripts and loads nothing; it refreshes itself, unless it is a snapshot. The
templates have the words and the layout; this module has the computations beyond filters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from jetcapture_py.archive.layout import parse_path
from jetcapture_py.capture.watermark import SILENT
from jetcapture_py.config.shares import OPEN_SHARE, OPEN_UNACKED_SHARE
from jetcapture_py.monitoring.facts import CaptureFacts, MaintenanceState, OpenBlock, ProcessFacts
from jetcapture_py.monitoring.history import EVERY, SAMPLES
from jetcapture_py.monitoring.notices import Notice
from jetcapture_py.pages import words
from jetcapture_py.pages.charts import Sparkline
from jetcapture_py.pages.environment import environment
from jetcapture_py.text import plural

REFRESH = 5
"""Seconds after which the page loads itself again."""
STATES = {
    "failing": ("Failing", "✕", "cf222e"),
    "attention": ("With a warning", "!", "b35900"),
    "draining": ("Draining", "…", "57606a"),
    "starting": ("Starting", "…", "57606a"),
    "healthy": ("Healthy", "✓", "1a7f37"),
    "ended": ("Ended", "✓", "57606a"),
}
"""States, the worst first: the name for a process with this as its worst state, an icon, and a color."""
MAX_OBJECTS = 6
HIGH = 0.8
"""Share of a limit from which a meter warns."""
Words = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The headline of a page."""

    state: str
    title: str
    text: str
    since: str = ""
    action: str = ""
    """What to do about it."""
    more: Sequence[Notice] = ()
    """Further notices."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A figure with its sparkline; one with a limit has a meter."""

    value: str
    note: str
    chart: Sparkline
    parts: Sequence[tuple[str, float, str]] = ()
    """Parts of the limit: CSS class ("": only text), value, and description."""
    limit: float | None = None
    early: float = 0.0
    """Share of the limit from which on open blocks are sealed early."""

    @property
    def used(self) -> float:
        return sum(value for _, value, _ in self.parts)

    @property
    def level(self) -> str:
        if self.limit is None or self.used < HIGH * self.limit:
            return ""
        return " full" if self.used >= self.limit else " high"


def document(facts: CaptureFacts, *, refresh: bool = True) -> str:
    """Return the page about one capture."""
    return _page(
        "capture.html",
        facts.process,
        refresh=refresh,
        facts=facts,
        verdict=_verdict(facts),
        page_title=f"{facts.headline[0]} · {facts.stream} / {facts.consumer}",
        cards=_cards(facts),
        blocks=_shown_blocks(facts),
        objects=[(stored, parse_path(stored.path)) for stored in facts.objects[:MAX_OBJECTS]],
        seals=", ".join(
            f"{count:,} by {reason.replace('_', ' ')}"
            for reason, count in sorted(facts.flow.sealed_by.items(), key=lambda item: -item[1])
        ),
        replicas=_replicas(facts),
        progress=list(_progress(facts)),
    )


def overview(captures: Mapping[str, CaptureFacts], failures: Mapping[str, str], *, refresh: bool = True) -> str:
    """Return the page that lists the captures of this process by name, with links to their pages.

    `failures` has the reason for each capture that failed or could not start.
    """
    rows = []
    for name in captures.keys() | failures.keys():
        facts, failure = captures.get(name), failures.get(name, "")
        rows.append(_Row(name, facts, failure, "failing" if failure or facts is None else facts.state))
    rows.sort(key=lambda row: (list(STATES).index(row.state), row.name))
    counts = [(state, count) for state in STATES if (count := sum(row.state == state for row in rows))]
    worst, count = counts[0] if counts else ("starting", 0)
    title = f"{STATES[worst][0]}: {count} of {plural(len(rows), 'capture')}"
    text = "Each has its own page, probes and metrics under its name."
    total = {
        "rate": words.rate(sum(facts.rate for facts in captures.values())),
        "quarantined": sum(facts.flow.quarantined for facts in captures.values()),
        "memory": sum(facts.memory.memory for facts in captures.values()),
    }
    return _page(
        "captures.html",
        next((facts.process for facts in captures.values()), None),
        refresh=refresh,
        verdict=Verdict(state=worst, title=title, text=text),
        page_title=f"{title} · jetcapture",
        captures=rows,
        counts=counts,
        total=total,
    )


class _Row(NamedTuple):
    """A capture in the list."""

    name: str
    facts: CaptureFacts | None
    failure: str
    """Why it failed or could not start."""
    state: str
    """One of `STATES`."""


def no_answer(seconds: float) -> str:
    """Return the page for a process whose event loop has been stuck for some seconds."""
    verdict = Verdict(
        state="failing",
        title="Not answering",
        text=f"The event loop has not run for {words.age(seconds)}.",
        action="Nothing is captured until it runs again, and nothing is lost. After 30 s, /livez asks for a restart.",
    )
    return _page("status.html", None, refresh=True, verdict=verdict, page_title="Not answering · jetcapture")


def maintenance(host: ProcessFacts, states: Mapping[str, MaintenanceState], *, refresh: bool = True) -> str:
    """Return the page about the archives, by name, that this process maintains."""
    failing = sum(bool(state.failure) for state in states.values())
    running = sum(state.started is not None for state in states.values())
    archives = plural(len(states), "archive")
    if failing:
        verdict = Verdict(
            state="failing",
            title=f"Failing: {failing} of {archives}",
            text="The last pass failed.",
            action="Nothing is lost: the next pass tries again. Below is what failed.",
        )
    else:
        text = f"A pass is running over {running} of them." if running else "The next pass begins on time."
        verdict = Verdict(state="healthy", title=f"Healthy: {archives}", text=text)
    return _page(
        "maintenance.html",
        host,
        refresh=refresh,
        verdict=verdict,
        page_title=f"{verdict.title} · jetcapture maintain",
        archives=states.items(),
        now=host.time.timestamp(),
    )


def _page(template: str, host: ProcessFacts | None, *, refresh: bool, verdict: Verdict, **values: Any) -> str:
    """Render a page; `host` has the version, time and process for its header."""

    def ago(time: datetime) -> str:
        return "" if host is None else f"{words.age((host.time - time).total_seconds())} ago"

    def bucket(time: datetime | int) -> str:
        time = time if isinstance(time, datetime) else words.utc(time)
        return f"{time:%H:%M}" if host is not None and time.date() == host.time.date() else f"{time:%Y-%m-%d %H:%M}"

    return (
        environment("jetcapture_py.monitoring")
        .get_template(template)
        .render(
            values,
            host=host,
            verdict=verdict,
            refresh=REFRESH if refresh else 0,
            seconds=REFRESH,
            color=STATES[verdict.state][2],
            icons={state: icon for state, (_, icon, _) in STATES.items()},
            ago=ago,
            bucket=bucket,
            clock=lambda time: words.clock(time, host.time) if host is not None else "",
            short=words.short,
            rate=words.rate,
        )
        + "\n"
    )


def _verdict(facts: CaptureFacts) -> Verdict:
    title, since = facts.headline
    first, more = (facts.notices[0], facts.notices[1:]) if facts.notices else (None, ())
    if first is None or (first.level == "note" and not first.check):
        return Verdict(state=facts.state, title=title, since=since, text=_all_is_well(facts), more=facts.notices)
    return Verdict(state=facts.state, title=title, since=since, text=first.text, action=first.action, more=more)


def _all_is_well(facts: CaptureFacts) -> str:
    last = facts.objects[0].acknowledged if facts.objects else None
    if facts.role == "standby":
        return "Connected. Another replica receives, or no message has arrived; this one takes over when it is silent."
    if last is not None:
        ago = words.age((facts.process.time - last).total_seconds())
        return f"Connected, consuming and storing; the last object was stored {ago} ago."
    if facts.blocks.open_blocks:
        return f"Connected and consuming. Nothing is stored yet: blocks are stored after {words.age(facts.max_age)}."
    return "Connected and consuming. No message has arrived since the process started."


def _cards(facts: CaptureFacts) -> list[Card]:
    """Return the figures: lag, received, stored, pending, unacknowledged and memory."""
    consumer, flow, samples, now = facts.consumer_state, facts.flow, facts.series(), facts.process.time
    begin = words.clock(facts.started, now)
    ages = [now.timestamp() - sample.time for sample in facts.samples]
    lifetime = max((now - facts.started).total_seconds(), 1.0)
    max_age = words.age(facts.max_age)

    def chart(title: str, values: Sequence[float], show: Words) -> Sparkline:
        bars = show is words.rate
        return Sparkline(title=title, ages=ages, values=values, words=show, span=EVERY * SAMPLES, bars=bars)

    lag = replace(chart("Lag", samples["lag"], words.age), limit=facts.max_age)
    line = f"the dashed line is block.max_age, {max_age}" if lag.shown_limit else f"blocks are stored after {max_age}"
    received = samples["received"][-1] if samples["received"] else flow.received / lifetime
    stored = sum(samples["stored"]) / len(samples["stored"]) if samples["stored"] else flow.stored / lifetime
    return [
        Card(
            value=words.age(consumer.lag) if consumer else "unknown",
            note=f"age of the oldest message not stored; {line}",
            chart=lag,
        ),
        Card(
            value=words.rate(received),
            note=f"{words.short(flow.received)} messages since {begin}",
            chart=chart("Received", samples["received"], words.rate),
        ),
        Card(
            value=words.rate(stored),
            note=f"on average; {words.short(flow.stored)} messages, {words.size(flow.stored_bytes)} since {begin}",
            chart=chart("Stored", samples["stored"], words.rate),
        ),
        Card(
            value=words.short(consumer.pending) if consumer else "unknown",
            note="messages not delivered to any replica yet",
            chart=chart("Pending", samples["pending"], words.short),
        ),
        _unacked(facts, chart("Unacknowledged", samples["unacked"], words.short)),
        _memory(facts, chart("Memory", samples["memory"], words.size)),
    ]


def _unacked(facts: CaptureFacts, chart: Sparkline) -> Card:
    consumer = facts.consumer_state
    if consumer is None:
        return Card(value="unknown", note="messages delivered and not stored yet", chart=chart)
    parts = [("here", facts.flow.unacked, f"{words.short(facts.flow.unacked)} here")]
    if others := consumer.other_unacked:
        parts.append(("others", others, f"{words.short(others)} at other replicas"))
    limit = consumer.max_ack_pending
    note = "no limit" if limit is None else f"{words.share(consumer.unacked, limit)} of max_ack_pending"
    value, early = words.short(consumer.unacked), 1 / OPEN_UNACKED_SHARE
    return Card(value=value, note=note, chart=chart, parts=parts, limit=limit, early=early)


def _memory(facts: CaptureFacts, chart: Sparkline) -> Card:
    memory = facts.memory
    limit, rest = memory.memory_limit, max(0, memory.memory - memory.memory_open)
    in_blocks = f"{words.size(memory.memory_open)} in open blocks"
    parts: list[tuple[str, float, str]] = [("here", memory.memory_open, in_blocks)]
    if rest:
        parts.append(("others", rest, f"{words.size(rest)} being decoded or stored"))
    if memory.spool_limit:
        parts.append(("", 0, f"spool: {words.size(memory.spool)} of {words.size(memory.spool_limit)}"))
    note = f"{words.share(memory.memory, limit)} of limits.memory"
    value, early = words.size(memory.memory), 1 / OPEN_SHARE
    return Card(value=value, note=note, chart=chart, parts=parts, limit=limit, early=early)


def _shown_blocks(facts: CaptureFacts) -> list[tuple[str, Sequence[OpenBlock]]]:
    """Return titles and blocks: all if they are few, else the oldest and the largest."""
    blocks = facts.blocks
    if len(blocks.oldest) == blocks.open_blocks:
        return [("", blocks.oldest)] if blocks.oldest else []
    return [
        (f"The {len(blocks.oldest)} oldest of {blocks.open_blocks:,}", blocks.oldest),
        (f"The {len(blocks.largest)} largest", blocks.largest),
    ]


def _replicas(facts: CaptureFacts) -> str:
    if facts.consumer_state is None:
        return "The consumer is not known yet."
    stale = (facts.process.time - facts.consumer_state.asked).total_seconds() - facts.consumer_state.ahead
    return f"Reported by the server{f' {words.age(stale)} ago' if stale > SILENT else ''}, over all replicas."


def _progress(facts: CaptureFacts) -> Iterator[tuple[str, str, str]]:
    """Yield names, values and remarks about the capture's progress."""
    watermark, flow = facts.watermark, facts.flow
    if watermark.watermark is not None:
        ago = words.age((facts.process.time - watermark.watermark).total_seconds())
        about = f"{ago} ago, sequence {watermark.watermark_seq:,}; everything until then is stored"
        yield "Watermark", f"{words.moment(watermark.watermark)} UTC", about
    elif watermark.has_watermark:
        yield "Watermark", "none yet", ""
    else:
        yield "Watermark", "none", "this store cannot keep one, or store.url contains {key}"
    if (consumer := facts.consumer_state) is None:
        return
    others = consumer.other_pulls or consumer.other_unacked
    pulls = max(0, consumer.waiting_pulls - consumer.other_pulls)
    yield "Stored up to", f"{consumer.ack_floor:,}", "the consumer's ack floor"
    yield "Delivered up to", f"{consumer.delivered:,}", f"{words.short(consumer.pending)} pending"
    yield (
        "Redelivered",
        f"{flow.redelivered:,}",
        f"received here; {consumer.redelivered:,} of those unacknowledged",
    )
    yield "This replica", _work(flow.unacked, pulls), "" if facts.role == "shared" else facts.role
    yield "Other replicas", _work(consumer.other_unacked, consumer.other_pulls) if others else "none seen", ""


def _work(unacked: int, pulls: int) -> str:
    return f"{plural(unacked, 'unacknowledged message')}, {plural(pulls, 'open pull')}"
