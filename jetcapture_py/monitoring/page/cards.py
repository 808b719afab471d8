"""The figures of the page, each with its picture; limits have a meter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jetcapture_py.config.shares import OPEN_SHARE, OPEN_UNACKED_SHARE
from jetcapture_py.monitoring import words
from jetcapture_py.monitoring.facts import CaptureFacts, ConsumerFacts
from jetcapture_py.monitoring.page.html import Html, join, tag
from jetcapture_py.monitoring.page.pictures import Picture

HIGH = 0.8
"""Share of a limit from which a meter warns."""
Show = Callable[[float], str]
Part = tuple[str, float, str]
"""A part of a meter: the class that colors it, its value, and what it is."""


def cards(facts: CaptureFacts) -> Html:
    """Return a card for each figure: lag, received, stored, pending, unacknowledged and memory."""
    consumer, samples, begin = facts.consumer_state, facts.samples, words.clock(facts.started, facts.time)
    ages = [(facts.time - time).total_seconds() for time in samples.time]
    whole = max((facts.time - facts.started).total_seconds(), 1.0)
    max_age = words.age(facts.max_age)

    def picture(title: str, values: Sequence[float], show: Show, *, limit: float | None = None) -> Picture:
        return Picture(title=title, ages=ages, values=values, words=show, limit=limit, bars=show is words.rate)

    lag = picture("Lag", samples.lag, words.age, limit=facts.max_age)
    line = f"the dashed line is block.max_age, {max_age}" if lag.shown_limit else f"blocks are stored after {max_age}"
    found = [
        _card(
            "Lag",
            words.age(consumer.lag) if consumer else "unknown",
            f"age of the oldest message not stored; {line}",
            lag,
        ),
        _card(
            "Received",
            words.rate(samples.received[-1] if samples.received else facts.received / whole),
            f"{words.short(facts.received)} messages since {begin}",
            picture("Messages received", samples.received, words.rate),
        ),
        _card(
            "Stored",
            words.rate(sum(samples.stored) / len(samples.stored) if samples.stored else facts.stored / whole),
            f"on average; {words.short(facts.stored)} messages, {words.size(facts.stored_bytes)} since {begin}",
            picture("Messages stored", samples.stored, words.rate),
        ),
        _card(
            "Pending",
            words.short(consumer.pending) if consumer else "unknown",
            "messages not delivered to any replica yet",
            picture("Messages pending", samples.pending, words.short),
        ),
        _unacked(facts, consumer, picture("Unacknowledged messages", samples.unacked, words.short)),
        _memory(facts, picture("Memory", samples.memory, words.size)),
    ]
    return tag("div", *found, class_="cards")


def _card(title: str, value: str, note: str, picture: Picture, meter: Html | None = None) -> Html:
    peak = picture.words(picture.most) if picture.most else ""
    return tag(
        "section",
        tag("h3", title, tag("small", f"max {peak}") if peak else None),
        tag("p", value, class_="value"),
        tag("p", note, class_="note"),
        meter,
        tag("div", picture.draw(), class_="picture"),
        tag("p", tag("span", "15 min ago"), tag("span", "now"), class_="axis", aria_hidden="true"),
        class_="card",
    )


def _unacked(facts: CaptureFacts, consumer: ConsumerFacts | None, picture: Picture) -> Html:
    title = "Unacknowledged"
    if consumer is None:
        return _card(title, "unknown", "messages delivered and not stored yet", picture)
    limit, others = consumer.max_ack_pending, consumer.other_unacked
    parts: list[Part] = [("here", facts.unacked, f"{words.short(facts.unacked)} here")]
    if others:
        parts.append(("others", others, f"{words.short(others)} at other replicas"))
    if limit is None:
        return _card(title, words.short(consumer.unacked), _legend(parts, "no limit"), picture)
    meter = _meter(title, parts, limit, words.short, 1 / OPEN_UNACKED_SHARE)
    note = _legend(parts, f"{words.share(consumer.unacked, limit)} of max_ack_pending")
    return _card(title, _of(words.short(consumer.unacked), words.short(limit)), note, picture, meter)


def _memory(facts: CaptureFacts, picture: Picture) -> Html:
    limit, rest = facts.memory_limit, max(0, facts.memory - facts.memory_open)
    parts: list[Part] = [
        ("here", facts.memory_open, f"{words.size(facts.memory_open)} in open blocks"),
        *([("others", rest, f"{words.size(rest)} being decoded or stored")] if rest else []),
    ]
    meter = _meter("Memory", parts, limit, words.size, 1 / OPEN_SHARE)
    note = _legend(parts, f"{words.share(facts.memory, limit)} of limits.memory")
    if facts.spool_limit:
        note = join(note, f"; spool: {words.size(facts.spool)} of {words.size(facts.spool_limit)}")
    return _card("Memory", _of(words.size(facts.memory), words.size(limit)), note, picture, meter)


def _of(value: str, limit: str) -> Html:
    return join(value, tag("small", f" of {limit}"))


def _legend(parts: Iterable[Part], text: str) -> Html:
    swatches = ((tag("span", class_=f"swatch {kind}"), about) for kind, _, about in parts)
    return join(text, *(join("; ", tag("span", *each)) for each in swatches))


def _meter(title: str, parts: Iterable[Part], limit: float, show: Show, early: float) -> Html:
    """Return a bar of parts of a limit; the mark says from where on open blocks are sealed early."""
    found = [(kind, value) for kind, value, _ in parts if value]
    total = sum(value for _, value in found)
    state = "full" if total >= limit else "high" if total >= HIGH * limit else ""
    mark = f"{show(limit * early)}: with more in open blocks, the largest are sealed early"
    return tag(
        "div",
        *(tag("span", class_=kind, style=f"width:{min(100 * value / limit, 100):.1f}%") for kind, value in found),
        tag("u", style=f"left:{100 * early:.1f}%", title=mark),
        role="meter",
        aria_label=title,
        aria_valuemin=0,
        aria_valuemax=int(limit),
        aria_valuenow=int(min(total, limit)),
        aria_valuetext=f"{show(total)} of {show(limit)}",
        class_=f"meter {state}".strip(),
    )
