"""Render the report as one self-contained HTML page: a verdict, the key figures, then one chapter per question.

The templates are in `templates`; `jetcapture_py.pages` has their environment, charts and words.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jetcapture_py.compaction.unit import SEALED_BY
from jetcapture_py.config.units import format_time
from jetcapture_py.pages.charts import Axis
from jetcapture_py.pages.environment import environment
from jetcapture_py.pages.words import clipped, duration, moment, plural, share, size
from jetcapture_py.report import figures
from jetcapture_py.report.facts import Facts, Scope

CHAPTERS = {
    "volume": "Volume",
    "coverage": "Coverage and holes",
    "quarantine": "Quarantine",
    "lateness": "Lateness",
    "objects": "Objects",
    "words": "Glossary",
}


class Finding(NamedTuple):
    """A remark below the verdict. `action`: the reader should act on it. `chapter` has the details."""

    action: bool
    text: str
    chapter: str


class Verdict(NamedTuple):
    """Whether the archive needs action, its state in a sentence, and an explanation."""

    action: bool
    sentence: str
    more: str = ""


def page(facts: Facts) -> str:
    """Render the report."""
    every = [*facts.objects, *facts.quarantine]
    times = [
        (stored.oldest, stored.newest) for stored in every if stored.oldest is not None and stored.newest is not None
    ]
    oldest, newest = min((span[0] for span in times), default=None), max((span[1] for span in times), default=None)
    messages: Counter[int] = Counter()
    for stored in every:
        messages[stored.name.bucket] += stored.messages
    chapters, charts, keys = {"coverage", "words"}, dict[str, Any](), figures.by_key(facts)
    if messages:
        axis = Axis.over(messages, max(stored.interval for stored in every))
        charts = {"axis": axis, "quarantine": figures.quarantine(facts, axis)}
        chapters.add("quarantine")
        if facts.objects:
            charts |= {"volume": figures.volume(facts, keys, axis), "waits": figures.waiting(facts, axis)}
            charts |= {"objects": figures.sizes(facts, axis)}
            chapters |= CHAPTERS.keys()
    return (
        environment("jetcapture_py.report")
        .get_template("page.html")
        .render(
            facts=facts,
            oldest=oldest,
            newest=newest,
            part="" if facts.scope == Scope() else " ".join(_part(facts.scope)),
            chapters={name: title for name, title in CHAPTERS.items() if name in chapters},
            verdict=verdict(facts),
            findings=list(findings(facts)),
            tiles=list(_tiles(facts, keys, newest)),
            keys=keys,
            incarnations=[(incarnation, figures.strip(incarnation)) for incarnation in facts.incarnations],
            delivery=figures.delivery(facts),
            copies=_copies(facts),
            compacted=SEALED_BY,
            small_size=figures.SMALL,
            query=lambda sql: shlex.join(["jetcapture", "query", facts.url, facts.stream, sql, "--format", "json"]),
            **charts,
        )
    )


def _part(scope: Scope) -> Iterator[str]:
    start, end, keys = scope.selection.start, scope.selection.end, scope.selection.keys
    if start or end or scope.complete:
        yield "complete time slices" if scope.complete else "time slices"
    if start:
        yield f"from {moment(start)}"
    if end:
        yield f"to {moment(end)}"
    if keys is not None:
        names = [figures.key_text(key) for key in keys]
        more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
        yield f"{'key' if len(names) == 1 else 'keys'} {', '.join(names[:10])}{more}"


def verdict(facts: Facts) -> Verdict:
    """Return the state of the archive in a sentence."""
    lost = sum(incarnation.missing - incarnation.open_missing for incarnation in facts.incarnations)
    coming = sum(incarnation.open_missing for incarnation in facts.incarnations)
    bad = facts.messages(facts.quarantine)
    kept = f"{plural(bad, 'message')} could not be decoded and {'is' if bad == 1 else 'are'} in quarantine"
    if lost:
        holes = sum(incarnation.holes - incarnation.open_holes for incarnation in facts.incarnations)
        span = sum(incarnation.last - incarnation.first + 1 for incarnation in facts.incarnations)
        sentence = f"{lost:,} of {plural(span, 'sequence')}, in {plural(holes, 'hole')}, "
        sentence += f"{'is' if lost == 1 else 'are'} not stored{f', and {kept}' if bad else ''}."
        more = "This is not necessarily a loss: messages that the capture's filter excludes leave holes, and so do "
        more += "messages that were deleted or expired before they were captured."
        closed = [hole for incarnation in facts.incarnations for hole in incarnation.largest if not hole.open]
        largest = max((hole.missing for hole in closed), default=0)  # open ones may all be larger
        if holes >= 1000 and largest * 100 < lost:
            more += " Many small holes are typical of a filter."
        return Verdict(action=True, sentence=sentence, more=more)
    if not facts.objects and not facts.quarantine:
        return Verdict(action=True, sentence="The selected part of this archive is empty.")
    more = ""
    if coming:
        more = f"{plural(coming, 'sequence')} beyond the watermark {'is' if coming == 1 else 'are'} not stored yet, "
        more += "which is normal while the capture runs."
    if bad:
        return Verdict(action=True, sentence=f"No sequence is missing, but {kept}.", more=more)
    whole = "no sequence is missing"
    removed = sum(incarnation.removed for incarnation in facts.incarnations)
    if not coming and not removed and len(facts.incarnations) == 1:
        whole = f"every sequence from {facts.incarnations[0].first:,} to {facts.incarnations[0].last:,} is stored"
    return Verdict(action=False, sentence=f"Complete: {whole}, and nothing is in quarantine.", more=more)


def findings(facts: Facts) -> Iterator[Finding]:
    """Yield remarks, the most important first."""
    bad, total = facts.messages(facts.quarantine), facts.messages(facts.objects)
    if facts.unread:
        said = f"{plural(facts.unread, 'object')} could not be read, and {'its' if facts.unread == 1 else 'their'} "
        said += "messages count as not stored: jetcapture verify says why."
        yield Finding(action=True, text=said, chapter="coverage")
    if facts.expired_until is not None:
        said = f"{plural(facts.expired, 'message')} expired, in time slices up to "
        said += f"{format_time(facts.expired_until)}: they were removed on purpose."
        yield Finding(action=False, text=said, chapter="coverage")
    if facts.erased:
        said = f"{plural(facts.erased, 'message')} {'was' if facts.erased == 1 else 'were'} erased."
        yield Finding(action=False, text=said, chapter="coverage")
    closed = [hole for incarnation in facts.incarnations for hole in incarnation.largest if not hole.open]
    if closed:
        hole = max(closed, key=lambda hole: hole.missing)
        said = f"The largest hole is {plural(hole.missing, 'sequence')}, from {hole.first:,}, between messages of "
        said += f"{moment(hole.after)} and {moment(hole.before)} UTC."
        yield Finding(action=True, text=said, chapter="coverage")
    if facts.reasons:
        said = f"{plural(bad, 'message')} in quarantine ({share(bad, bad + total)}). Most frequent reason: "
        said += f"{clipped(facts.reasons[0].error, 90)}."
        yield Finding(action=True, text=said, chapter="quarantine")
    many = plural(len(facts.objects), "object")
    if figures.worth_compacting(facts):
        said = f"{many} could be about {figures.after_compaction(facts.objects):,}: run compaction."
        yield Finding(action=True, text=said, chapter="objects")
    elif figures.small_for_good(facts):
        said = f"Most of {many} are small, and compaction would not help much."
        yield Finding(action=False, text=said, chapter="objects")
    if copies := _copies(facts):
        said = f"{plural(copies, 'message')} stored twice."
        said += "".join(f" {finding.summary}." for finding in facts.read_twice) or " Readers return each once."
        yield Finding(action=bool(facts.read_twice), text=said, chapter="objects")
    delivery = figures.delivery(facts)
    if delivery.late:
        said = f"{plural(delivery.late, 'object')} with messages that arrived after the end of their time slice, up to "
        yield Finding(action=False, text=f"{said}{duration(delivery.latest)}.", chapter="lateness")


def _copies(facts: Facts) -> int:
    return sum(facts.copies.get(stored.name, 0) for stored in facts.objects)


def _tiles(facts: Facts, keys: Sequence[figures.Key], newest: int | None) -> Iterator[tuple[str, ...]]:
    """Yield the key figures as label, value and remark."""
    total, bad, copies = facts.messages(facts.objects), facts.messages(facts.quarantine), _copies(facts)
    stored, kept = (sum(entry.size for entry in objects) for objects in (facts.objects, facts.quarantine))
    count = len(facts.objects)
    yield (
        "Messages",
        f"{total:,}",
        f"{plural(sum(entry.name.rows for entry in facts.objects), 'row')} stored",
    )
    yield "Stored", size(stored), f"{size(stored / total)} per message" if total else ""
    yield "Objects", f"{count:,}", f"{size(stored / count)} each" if count else ""
    most = f"most: {clipped(figures.key_text(keys[0].key, keys[0].bundle), 24)}" if len(keys) > 1 else ""
    bundles = any(key.bundle for key in keys)
    yield "Keys and bundles" if bundles else "Keys", f"{len(keys):,}", most
    remark = f"{share(bad, bad + total)} of all; {size(kept)}" if bad else "all were decoded"
    yield "In quarantine", f"{bad:,}", remark
    yield "Stored twice", f"{copies:,}", "copies, which readers skip" if copies and not facts.read_twice else ""
    for incarnation in facts.incarnations[:1]:
        which = "of the newest incarnation" if len(facts.incarnations) > 1 else "first and last stored"
        yield "Sequences", f"{incarnation.first:,} to {incarnation.last:,}", which
    if facts.mark is None:
        yield "Watermark", "none", "written by a running capture"
    else:
        yield "Watermark", f"{facts.mark.seq:,}", f"complete to {moment(facts.mark.time)} UTC"
    if waited := figures.waits(facts.objects, lambda _: 0).get(0):
        yield "95 % stored within", duration(waited.most), f"all within {duration(waited.all)}"
    if newest is not None:
        age = max(facts.generated.timestamp() - newest / 1e6, 0)
        yield "Newest message", moment(newest), f"{duration(age)} before this report"
