"""The report's chapters about what is missing: holes in the sequences, and the quarantine."""

from __future__ import annotations

from spark_jobs.reporting.charts import Axis, count_mark, count_ticks, legend, stacked, strip
from spark_jobs.reporting.coverage import MOST_HOLES, Hole, Life
from spark_jobs.reporting.facts import Choice, Facts
from spark_jobs.reporting.figures import over_time
from spark_jobs.reporting.html import Html, clipped, join, moment, plural, tag
from spark_jobs.reporting.parts import Column, bar, command, note, section, table


def holes(facts: Facts) -> Html:
    """Which sequences are stored, and which are not."""
    filtered = facts.choice != Choice()
    lives = [_life(facts, life) for life in facts.lives]
    older = f"{plural(facts.older_lives, 'older life', 'older lives')} of the stream were not looked at."
    return section(
        "coverage",
        "Coverage and holes",
        "A stream numbers its messages 1, 2, 3 and so on. This shows which of these sequences are in the archive or "
        "in the quarantine, from the first that is stored to the last"
        + ("; it covers the whole stream, not just the part chosen for this report." if filtered else "."),
        *lives,
        note(older) if facts.older_lives else "",
        note(
            "A hole is not always a loss. A message that the capture's filter leaves out, or that was deleted or "
            "expired before it was captured, looks the same: the stream itself was not asked. To see whether it still "
            "has a message: ",
            tag("code", "nats stream get STREAM SEQUENCE"),
            ".",
        )
        if any(life.holes for life in facts.lives)
        else "",
    )


def _life(facts: Facts, life: Life) -> Html:
    settled, pending = life.holes - life.open_holes, life.open_holes
    said = [f"Stored: {life.present:,} of {plural(life.last - life.first + 1, 'sequence')}"]
    if settled:
        said.append(f"missing: {life.missing - life.open_missing:,}, in {plural(settled, 'hole')}")
    if pending:
        said.append(f"not there yet, beyond the watermark: {life.open_missing:,}, in {plural(pending, 'hole')}")
    if not life.holes:
        said.append("none is missing")
    heading = "Sequences"
    if len(facts.lives) + facts.older_lives > 1:
        created = clipped(life.created, 40)[:19].replace("T", " ") if life.created else "at an unknown time"
        heading = f"Stream created {created}"
    before = life.first > 1 and f" Sequences 1 to {life.first - 1:,} came before the first one that is stored."
    return join(
        tag("h3", heading),
        tag("p", f"{'; '.join(said)}. Messages from {moment(life.oldest)} to {moment(life.newest)} UTC.", before),
        legend([("stored", "stored"), ("gap", "not stored; the lower band marks every part with a hole")])
        if life.holes
        else legend([("stored", "stored")]),
        strip(life),
        _holes(life) if life.holes else "",
    )


def _holes(life: Life) -> Html:
    shown = sum(hole.missing for hole in life.largest)
    rest, missing = life.holes - len(life.largest), life.missing - shown
    columns = [
        Column("first missing", "n"),
        Column("last missing", "n"),
        Column("sequences", "n"),
        Column("", "bar"),
        Column("message before (UTC)", "t"),
        Column("message after (UTC)", "t"),
        Column("beyond the watermark"),
    ]
    if life.settled is None or not life.open_holes:
        columns.pop()
    most = max(hole.missing for hole in life.largest)
    rows = [_hole(hole, most)[: len(columns)] for hole in life.largest]
    caption = f"The {MOST_HOLES} largest of {plural(life.holes, 'hole')}, by sequence." if rest else "Every hole."
    more = f"{plural(rest, 'more hole')} with {plural(missing, 'sequence')} together, none larger than these."
    return join(table(caption, columns, rows), note(more) if rest else "")


def _hole(hole: Hole, most: int) -> list[object]:
    late = "yes: may still come" if hole.open else "no"
    numbers = [f"{hole.first:,}", f"{hole.last:,}", f"{hole.missing:,}", bar(hole.missing, most)]
    return [*numbers, moment(hole.after), moment(hole.before), late]


def quarantine(facts: Facts, axis: Axis) -> Html:
    """What could not be decoded, and why."""
    intro = (
        "A message that could not be decoded or stored as it should is kept here, with its bytes and the reason, "
        "and does not stop the others. It can be replayed once the cause is fixed."
    )
    total = facts.messages(facts.quarantine)
    if not total:
        return section("quarantine", "Quarantine", intro, tag("p", tag("strong", "It is empty.")))
    counts = over_time(axis, facts.quarantine, lambda stored: facts.messages([stored]), lambda _: 0, 1)
    columns = [
        Column("stage", "t"),
        Column("reason", "w"),
        Column("messages", "n"),
        Column("", "bar"),
        Column("first (UTC)", "t"),
        Column("last (UTC)", "t"),
    ]
    rows = [
        (
            clipped(each.stage, 20),
            clipped(each.error, 200),
            f"{each.messages:,}",
            bar(each.messages, facts.reasons[0].messages),
            moment(each.first),
            moment(each.last),
        )
        for each in facts.reasons
    ]
    rest = total - sum(each.messages for each in facts.reasons)
    examples = [
        (f"{each.seq:,}", moment(each.at), tag("code", clipped(each.subject, 80)), clipped(each.example, 240))
        for each in facts.reasons
    ]
    sql = f"SELECT * FROM quarantine WHERE _nats_seq = {facts.reasons[0].seq}"  # noqa: S608 - shown, and a number
    kinds = [
        Column("sequence", "n"),
        Column("stored in the stream (UTC)", "t"),
        Column("subject", "w"),
        Column("error", "w"),
    ]
    return section(
        "quarantine",
        "Quarantine",
        intro,
        tag("h3", "Quarantined messages over time"),
        stacked(
            axis,
            [("quarantined", counts[0])],
            title="Quarantined messages over time",
            unit=lambda value: plural(int(value), "message"),
            ticks=count_ticks,
            mark=count_mark,
            tone="q",
        )
        if any(counts[0])
        else "",
        tag("h3", "Reasons"),
        table("Numbers are shown as N and quoted text as …, so that alike errors count together.", columns, rows),
        note(f"{plural(rest, 'more message')} for other reasons.") if rest else "",
        tag("h3", "Examples"),
        table("For each reason, its message with the lowest sequence.", kinds, examples),
        note("To see one in full:"),
        command(facts, "query", sql, "--format", "json"),
    )
