"""The report as one HTML page that needs nothing else: a verdict, the key figures, then a chapter for each question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_jobs.reporting import missing, sections
from spark_jobs.reporting.charts import Axis
from spark_jobs.reporting.facts import Facts
from spark_jobs.reporting.figures import after_compaction, by_key, small_for_good, waits, worth_compacting
from spark_jobs.reporting.html import Html, clipped, duration, join, moment, plural, share, size, tag, trusted
from spark_jobs.reporting.parts import key_text, tile
from spark_jobs.reporting.style import STYLE

CHAPTERS = {
    "volume": "Volume",
    "coverage": "Coverage and holes",
    "quarantine": "Quarantine",
    "lateness": "Lateness",
    "objects": "Objects",
    "words": "Words",
}
_WORDS = {
    "stream": "messages that a NATS server keeps in order, each with a sequence number",
    "capture": "the process that takes messages from a stream and stores them here",
    "key": "what the archive is divided by, for example a customer or a region",
    "bucket": "the interval of time that a message falls in",
    "object": "one Parquet file with messages of one key and one bucket; it is written once and never changed",
    "quarantine": "where messages are kept that could not be decoded, with the reason and their bytes",
    "hole": "sequences that are neither in the archive nor in the quarantine",
    "watermark": "the sequence up to which the capture has stored all that it was asked to capture",
    "life": "a stream that is deleted and created again begins at sequence 1 again: that is another life",
    "compaction": "a job that merges small objects into large ones and drops second copies",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the reader should know; `look` says that it may need a hand. `chapter` has more."""

    look: bool
    text: str
    chapter: str


def page(facts: Facts) -> str:
    """The report, complete."""
    messages: dict[int, int] = {}
    for stored in (*facts.objects, *facts.quarantine):
        messages[stored.name.bucket] = messages.get(stored.name.bucket, 0) + stored.messages
    chapters = {"coverage": missing.holes(facts), "words": _words()}
    if messages:
        axis = Axis.over(messages, max(stored.interval for stored in (*facts.objects, *facts.quarantine)))
        chapters["quarantine"] = missing.quarantine(facts, axis)
        if facts.objects:
            chapters["volume"] = sections.volume(facts, axis)
            chapters["lateness"] = sections.lateness(facts, axis)
            chapters["objects"] = sections.objects(facts, axis)
    shown = [name for name in CHAPTERS if name in chapters]
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{facts.stream}: archive report"),
        tag("style", trusted(STYLE)),
    )
    links = tag("nav", *(tag("a", CHAPTERS[name], href=f"#{name}") for name in shown), aria_label="Chapters")
    main = tag("main", _verdict(facts), _tiles(facts), *(chapters[name] for name in shown))
    body = tag("body", _header(facts, links), main, tag("footer", "Made by jetcapture's report job."))
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def _header(facts: Facts, links: Html) -> Html:
    times = [stored for stored in (*facts.objects, *facts.quarantine) if stored.oldest is not None]
    span = "none"
    if times:
        oldest = min(stored.oldest or 0 for stored in times)
        newest = max(stored.newest or 0 for stored in times)
        span = f"{moment(oldest)} to {moment(newest)} UTC ({duration((newest - oldest) / 1e6)})"
    return tag(
        "header",
        tag("p", "Archive report", class_="eyebrow"),
        tag("h1", facts.stream),
        tag(
            "dl",
            *_entry("Archive", tag("code", facts.url)),
            *_entry("Messages from", span),
            *_entry("Part shown", " ".join(_part(facts)) or "everything"),
            *_entry("Made", f"{moment(facts.generated)} UTC"),
            class_="head",
        ),
        links,
        class_="top",
    )


def _entry(name: str, value: object) -> tuple[Html, Html]:
    return tag("dt", name), tag("dd", value)


def _part(facts: Facts) -> Iterator[str]:
    choice = facts.choice
    if choice.start or choice.end or choice.complete:
        yield "complete buckets" if choice.complete else "buckets"
    if choice.start:
        yield f"from {moment(choice.start)}"
    if choice.end:
        yield f"to {moment(choice.end)}"
    if choice.keys is not None:
        keys = [key_text(key) for key in choice.keys]
        more = f" and {len(keys) - 10:,} more" if len(keys) > 10 else ""
        yield f"{'key' if len(keys) == 1 else 'keys'} {', '.join(keys[:10])}{more}"


def _verdict(facts: Facts) -> Html:
    look, sentence, more = verdict(facts)
    found = list(findings(facts))
    listed = [
        tag(
            "li",
            tag("b", "Look" if each.look else "Note"),
            tag("span", each.text, " ", tag("a", "More", href=f"#{each.chapter}")),
        )
        for each in found
    ]
    return tag(
        "section",
        tag("div", "!" if look else "✓", class_="icon", aria_hidden="true"),
        tag("h2", sentence),
        tag("div", tag("p", more), class_="more") if more else "",
        tag("ul", *listed, class_="findings") if listed else "",
        class_="verdict look" if look else "verdict good",
        aria_label="Verdict",
    )


def verdict(facts: Facts) -> tuple[bool, str, str]:
    """Whether somebody should have a look, the state of the archive in a sentence, and what to know about that."""
    lost = sum(life.missing - life.open_missing for life in facts.lives)
    holes = sum(life.holes - life.open_holes for life in facts.lives)
    span = sum(life.last - life.first + 1 for life in facts.lives)
    coming = sum(life.open_missing for life in facts.lives)
    bad = facts.messages(facts.quarantine)
    kept = f"{plural(bad, 'message')} could not be decoded and {'is' if bad == 1 else 'are'} in quarantine"
    if lost:
        sentence = f"{lost:,} of {plural(span, 'sequence')}, in {plural(holes, 'hole')}, "
        sentence += "is not stored" if lost == 1 else "are not stored"
        why = (
            "That need not be a loss: what the capture's filter leaves out leaves holes, too, and so does what was "
            "deleted or expired before it was captured."
        )
        largest = max(hole.missing for life in facts.lives for hole in life.largest if not hole.open)
        if holes >= 1000 and largest * 100 < lost:
            why += " So many small ones are what a filter leaves."
        return True, f"{sentence}{f', and {kept}' if bad else ''}.", why
    if not facts.objects and not facts.quarantine:
        return True, "Nothing in this archive is in the part that was asked for.", ""
    waiting = (
        f"{coming:,} sequences beyond the watermark are not stored yet, which is normal while the capture runs."
        if coming
        else ""
    )
    if bad:
        return True, f"No sequence is missing, but {kept}.", waiting
    if coming or len(facts.lives) != 1:
        return False, "Complete: no sequence is missing, and nothing is in quarantine.", waiting
    life = facts.lives[0]
    whole = f"every sequence from {life.first:,} to {life.last:,} is stored"
    return False, f"Complete: {whole}, and nothing is in quarantine.", ""


def findings(facts: Facts) -> Iterator[Finding]:
    """What else there is to know, the most important first."""
    bad, total = facts.messages(facts.quarantine), facts.messages(facts.objects)
    closed = [hole for life in facts.lives for hole in life.largest if not hole.open]
    if closed:
        hole = max(closed, key=lambda hole: hole.missing)
        text = (
            f"The largest hole is {plural(hole.missing, 'sequence')}, from {hole.first:,}, between messages of "
            f"{moment(hole.after)} and {moment(hole.before)} UTC."
        )
        yield Finding(look=True, text=text, chapter="coverage")
    if facts.reasons:
        first = facts.reasons[0]
        text = f"{plural(bad, 'message')} in quarantine ({share(bad, bad + total)}). Most frequent reason: "
        text += f"{clipped(first.error, 90)}."
        yield Finding(look=True, text=text, chapter="quarantine")
    if worth_compacting(facts):
        after = after_compaction(facts.objects)
        text = f"{plural(len(facts.objects), 'object')} could be about {after:,}: run compaction."
        yield Finding(look=True, text=text, chapter="objects")
    elif small_for_good(facts):
        text = f"{plural(len(facts.objects), 'object')} are small, and compaction would change little."
        yield Finding(look=False, text=text, chapter="objects")
    copies = sum(facts.copies.get(stored.name, 0) for stored in facts.objects)
    if copies:
        text = f"{plural(copies, 'message')} stored twice. Readers return each once."
        yield Finding(look=False, text=text, chapter="objects")
    if facts.delivery.redelivered * 20 > total:
        again = facts.delivery.redelivered
        text = (
            f"{plural(again, 'message')} ({share(again, total)}) were delivered more than once until they were stored."
        )
        yield Finding(look=False, text=text, chapter="lateness")
    if facts.delivery.late:
        late = facts.delivery.late
        text = f"{plural(late, 'message')} ({share(late, total)}) came after their bucket had ended."
        yield Finding(look=False, text=text, chapter="lateness")


def _tiles(facts: Facts) -> Html:
    total, stored = facts.messages(facts.objects), sum(each.size for each in facts.objects)
    rows = sum(each.name.rows for each in facts.objects)
    bad = facts.messages(facts.quarantine)
    copies = sum(facts.copies.get(each.name, 0) for each in facts.objects)
    kept = sum(each.size for each in facts.quarantine)
    keys = by_key(facts)
    waited = waits(facts.objects, lambda _: 0).get(0)
    newest = max((each.newest for each in (*facts.objects, *facts.quarantine) if each.newest is not None), default=None)
    found = [
        tile("Messages", f"{total:,}", f"{plural(rows, 'row')} stored"),
        tile("Stored", size(stored), f"{size(stored / total)} a message" if total else ""),
        tile(
            "Objects", f"{len(facts.objects):,}", f"{size(stored / len(facts.objects))} each" if facts.objects else ""
        ),
        tile("Keys", f"{len(keys):,}", f"most: {clipped(key_text(keys[0].key), 24)}" if len(keys) > 1 else ""),
        tile(
            "In quarantine",
            f"{bad:,}",
            f"{share(bad, bad + total)} of all; {size(kept)}" if bad else "all were decoded",
        ),
        tile(
            "Stored twice",
            "not counted" if facts.dedupe == "none" else f"{copies:,}",
            "second copies; readers skip them" if copies else "",
        ),
        *_sequences(facts),
    ]
    if waited is not None:
        found.append(tile("95 % stored within", duration(waited.most), f"all within {duration(waited.all)}"))
    if newest is not None:
        age = facts.generated.timestamp() - newest / 1e6
        found.append(tile("Newest message", moment(newest), f"{duration(max(age, 0))} before this report"))
    return tag("div", *found, class_="tiles")


def _sequences(facts: Facts) -> Iterator[Html]:
    which = "of the newest life" if len(facts.lives) > 1 else "first and last stored"
    for life in facts.lives[:1]:
        yield tile("Sequences", f"{life.first:,} to {life.last:,}", which)
    if facts.mark is None:
        yield tile("Watermark", "none", "written by a running capture")
    else:
        yield tile("Watermark", f"{facts.mark.seq:,}", f"complete to {moment(facts.mark.time)} UTC")


def _words() -> Html:
    entries = (part for name, meaning in _WORDS.items() for part in (tag("dt", name), tag("dd", meaning)))
    return tag("section", tag("h2", "Words"), tag("dl", *entries, class_="words"), id="words")
