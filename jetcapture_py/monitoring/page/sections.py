"""The sections of the page about one capture, each a function of its facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from jetcapture_py.archive.layout import parse_path
from jetcapture_py.capture.recent import QuarantineReason
from jetcapture_py.monitoring import words
from jetcapture_py.monitoring.facts import CaptureFacts, LastObject, OpenBlock
from jetcapture_py.monitoring.notices import Notice
from jetcapture_py.monitoring.page.cards import cards
from jetcapture_py.monitoring.page.html import Content, Html, join, tag
from jetcapture_py.text import plural

MOST_OBJECTS = 6
_KINDS = {"Sealed by": "optional"}
_KINDS |= dict.fromkeys(("Age", "Rows", "Size", "Messages", "Stored", "Seen", "Length"), "number")
"""Classes of columns: aligned as numbers, or left out on a phone."""
STALE = 20.0
"""Seconds after which it is said that the server's figures are old."""
ICONS = {"healthy": "✓", "attention": "!", "failing": "✕", "starting": "…", "draining": "…", "ended": "✓"}


def capture(facts: CaptureFacts) -> Html:
    """Return everything about one capture."""
    return tag(
        "main",
        tag("h1", facts.stream, tag("small", " / ", facts.consumer)),
        _verdict(facts),
        cards(facts),
        _quarantine(facts),
        tag("div", _open_blocks(facts), _progress(facts), class_="columns"),
        _objects(facts),
        _past(facts),
        _settings(facts),
    )


# ------------------------------------------------------------------ is it well


def _verdict(facts: CaptureFacts) -> Html:
    what, since = facts.headline
    first, rest = (facts.notices[0], facts.notices[1:]) if facts.notices else (None, ())
    if first is not None and first.level == "note" and not first.check:
        first, rest = None, facts.notices
    text, action = (first.text, first.action) if first is not None else (_all_is_well(facts), "")
    return verdict(facts.state, what, text, action, since=since, more=rest)


def verdict(state: str, what: str, text: str, action: str, *, since: str = "", more: Sequence[Notice] = ()) -> Html:
    """Return the first thing that the page says."""
    items = [tag("li", tag("strong", notice.text), " ", notice.action, class_=notice.level) for notice in more]
    return tag(
        "section",
        tag("span", ICONS[state], class_="icon", aria_hidden="true"),
        tag("h2", what, tag("small", f" {since}") if since else None),
        tag("p", tag("strong", text) if action else text, " " if action else None, action),
        tag("ul", *items) if items else None,
        class_=f"verdict {state}",
        aria_label="Verdict",
    )


def _all_is_well(facts: CaptureFacts) -> str:
    last = facts.objects[0].acknowledged if facts.objects else None
    if last is not None:
        return f"Connected, consuming and storing; the last object was stored {_ago(facts.time, last)}."
    if facts.open_blocks:
        return f"Connected and consuming. Nothing is stored yet: blocks are stored after {words.age(facts.max_age)}."
    return "Connected and consuming. No message has arrived since the process started."


# ------------------------------------------------------------------ blocks and objects


def _open_blocks(facts: CaptureFacts) -> Html:
    count = facts.open_blocks
    summary = (
        f"{facts.open_rows:,} rows, {words.size(facts.open_bytes)}; at most {facts.open_blocks_limit:,} blocks"
        if count
        else "Everything received is stored."
        if facts.received
        else "No message has arrived."
    )
    if facts.blocks_waiting:
        summary += f". {facts.blocks_waiting:,} sealed blocks wait for the store"
    shown = _shown_blocks(facts)
    tables = []
    for title, blocks in shown:
        rows = [_block_row(block, facts) for block in blocks]
        tables += [
            tag("h3", title) if title else None,
            _table(("Key", "Bucket", "Age", "Rows", "Size"), rows, "blocks"),
        ]
    return _section(f"Open blocks: {count:,}", summary, *tables)


def _shown_blocks(facts: CaptureFacts) -> list[tuple[str, Sequence[OpenBlock]]]:
    """Return titles and blocks: all, if they are few, or the oldest and the largest."""
    every = list(
        {
            (block.key, block.bundle, block.quarantine, block.bucket): block
            for block in (*facts.oldest, *facts.largest)
        }.values()
    )
    if not every:
        return []
    if len(every) >= facts.open_blocks:
        return [("", sorted(every, key=lambda block: -block.age))]
    return [
        (f"The {len(facts.oldest)} oldest of {facts.open_blocks:,}", facts.oldest),
        (f"The {len(facts.largest)} largest", facts.largest),
    ]


def _block_row(block: OpenBlock, facts: CaptureFacts) -> Html:
    part = min(block.age / facts.max_age, 1) if facts.max_age else 1
    left = f"stored in {words.age(facts.max_age - block.age)} at the latest"
    return tag(
        "tr",
        _key(block.key, block.bundle, quarantine=block.quarantine),
        tag("td", tag("time", _bucket(block.bucket, facts.time), datetime=f"{block.bucket:%Y-%m-%dT%H:%M:%SZ}")),
        tag(
            "td",
            tag("span", tag("span", style=f"width:{100 * part:.0f}%"), class_="part", title=left),
            tag("span", words.age(block.age), class_="age"),
            class_="number",
        ),
        tag("td", f"{block.rows:,}", class_="number"),
        tag("td", words.size(block.bytes), class_="number"),
    )


def _key(key: str | None, bundle: str, *, quarantine: bool) -> Html:
    if quarantine:
        return tag("th", tag("em", "quarantine"), scope="row")
    if bundle:
        return tag("th", f"bundle {bundle}", scope="row")
    return tag("th", tag("em", "no key") if not key else tag("bdi", words.visible(key, 80), title=key), scope="row")


def _objects(facts: CaptureFacts) -> Html:
    rows = [row for each in facts.objects[:MOST_OBJECTS] for row in _object_rows(each, facts.time)]
    by_count = sorted(facts.sealed_by.items(), key=lambda item: -item[1])
    seals = ", ".join(f"{count:,} by {reason.replace('_', ' ')}" for reason, count in by_count)
    summary = "None since the process started."
    if rows:
        objects = plural(facts.stored_objects, "object", grouped=True)
        summary = f"{objects}, {words.size(facts.stored_bytes)} since the process started. Blocks sealed: {seals}."
    if facts.store_errors:
        summary += f" {plural(facts.store_errors, 'failed attempt was', 'failed attempts were', grouped=True)} retried."
    table = _table(("Key and bucket", "Rows", "Size", "Sealed by", "Stored"), rows, "objects") if rows else None
    return _section("Last stored objects", summary, table)


def _object_rows(stored: LastObject, now: datetime) -> tuple[Html, Html]:
    name = parse_path(stored.path)
    head = None
    if name is not None:
        bucket = _bucket(datetime.fromtimestamp(name.bucket, now.tzinfo), now)
        head = join(_object_key(name.key, name.bundle, quarantine=name.quarantine), tag("small", f" {bucket}"))
    location = tag("a", stored.location, href=stored.link) if stored.link else stored.location
    row = tag(
        "tr",
        tag("th", head, scope="row"),
        tag("td", f"{stored.rows:,}", class_="number"),
        tag("td", words.size(stored.bytes), class_="number"),
        tag("td", stored.sealed_by.replace("_", " "), class_="optional"),
        tag("td", _ago(now, stored.acknowledged), class_="number"),
    )
    return row, tag("tr", tag("td", tag("code", location), colspan=5), class_="path")


def _object_key(key: str | None, bundle: str, *, quarantine: bool) -> Html:
    if quarantine:
        return tag("em", "quarantine")
    if bundle:
        return join(f"bundle {bundle}")
    return tag("em", "no key") if key is None else tag("bdi", words.visible(key, 80))


# ------------------------------------------------------------------ quarantine, progress, replicas


def _quarantine(facts: CaptureFacts) -> Html | None:
    if not facts.quarantined:
        return None
    rows = [row for each in facts.quarantine for row in _reason_rows(each, facts.time)]
    summary = (
        f"{plural(facts.quarantined, 'message', grouped=True)} since the process started, of "
        f"{words.short(facts.received)} received. Their raw bytes are kept. Most recent reasons first."
    )
    return _section("Quarantine", summary, _table(("Reason", "Messages", "Seen"), rows, "reasons"))


def _reason_rows(reason: QuarantineReason, now: datetime) -> tuple[Html, Html]:
    subject = tag("bdi", words.visible(reason.subject, 120), title=reason.subject)
    row = tag(
        "tr",
        tag("th", tag("span", reason.stage, class_="stage"), " ", tag("bdi", reason.error), scope="row"),
        tag("td", f"{reason.messages:,}", class_="number"),
        tag("td", _ago(now, reason.time), class_="number"),
    )
    return row, tag("tr", tag("td", f"last: sequence {reason.seq:,}, subject ", subject, colspan=3), class_="path")


def _progress(facts: CaptureFacts) -> Html:
    consumer, now = facts.consumer_state, facts.time
    rows: list[tuple[str, Content, str]] = []
    if facts.watermark is not None:
        ago = words.age((now - facts.watermark).total_seconds())
        about = f"{ago} ago, sequence {facts.watermark_seq:,}; everything until then is stored"
        rows.append(("Watermark", f"{words.moment(facts.watermark)} UTC", about))
    elif facts.has_watermark:
        rows.append(("Watermark", "none yet", ""))
    else:
        rows.append(("Watermark", "none", "this store cannot keep one, or store.url contains {key}"))
    if consumer is None:
        return _section("Stream and replicas", "The consumer is not known yet.", _list(rows))
    others = consumer.other_pulls or consumer.other_unacked
    own = max(0, consumer.waiting_pulls - consumer.other_pulls)
    rows += [
        ("Stored up to", f"{consumer.ack_floor:,}", "the consumer's ack floor"),
        ("Delivered up to", f"{consumer.delivered:,}", f"{words.short(consumer.pending)} pending"),
        ("Redelivered", f"{facts.redelivered:,}", f"received here; {consumer.redelivered:,} of those unacknowledged"),
        ("This replica", _work(facts.unacked, own), ""),
        ("Other replicas", _work(consumer.other_unacked, consumer.other_pulls) if others else "none seen", ""),
    ]
    summary = "Reported by the server, over all replicas."
    if (stale := (now - consumer.asked).total_seconds()) > STALE:
        summary = f"Reported by the server {words.age(stale)} ago, over all replicas."
    return _section("Stream and replicas", summary, _list(rows))


def _work(unacked: int, pulls: int) -> str:
    return f"{plural(unacked, 'unacknowledged message', grouped=True)}, {plural(pulls, 'open pull')}"


def _past(facts: CaptureFacts) -> Html | None:
    if not facts.past:
        return None
    rows = [
        tag(
            "tr",
            tag("th", each.text, scope="row"),
            tag("td", f"{words.clock(each.began, facts.time)} to {words.clock(each.ended, facts.time)}"),
            tag("td", words.age((each.ended - each.began).total_seconds()), class_="number"),
        )
        for each in facts.past
    ]
    summary = "Since the process started, newest first."
    return _section("Earlier failures", summary, _table(("Failure", "Time, UTC", "Length"), rows, "past"))


def _settings(facts: CaptureFacts) -> Html:
    rows = [(name, tag("code", value), "") for name, value in facts.settings]
    return tag("section", tag("h2", "Configuration"), _list(rows), class_="settings")


# ------------------------------------------------------------------ parts


def _section(title: str, summary: str, *content: Html | None) -> Html:
    return tag("section", tag("h2", title), tag("p", summary, class_="summary"), *content)


def _table(columns: Sequence[str], rows: Iterable[Html], kind: str) -> Html:
    head = [tag("th", name, scope="col", class_=_KINDS.get(name)) for name in columns]
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_=kind)


def _list(rows: Iterable[tuple[str, Content, str]]) -> Html:
    items = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", f" · {about}") if about else None))
        for name, value, about in rows
    ]
    return tag("dl", *items)


def _bucket(bucket: datetime, now: datetime) -> str:
    return f"{bucket:%H:%M}" if bucket.date() == now.date() else f"{bucket:%Y-%m-%d %H:%M}"


def _ago(now: datetime, time: datetime) -> str:
    return f"{words.age((now - time).total_seconds())} ago"
