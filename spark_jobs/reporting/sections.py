"""The report's chapters about what is stored: volume, lateness, objects."""

from __future__ import annotations

from spark_jobs.compaction.unit import SEALED_BY
from spark_jobs.reporting.charts import Axis, count_mark, count_ticks, legend, size_mark, size_ticks, stacked
from spark_jobs.reporting.charts import waits as wait_chart
from spark_jobs.reporting.facts import Facts
from spark_jobs.reporting.figures import (
    SMALL,
    after_compaction,
    by_key,
    over_time,
    sealed,
    size_classes,
    small_for_good,
    waits,
    worth_compacting,
)
from spark_jobs.reporting.html import Html, clipped, day, duration, join, moment, plural, share, size, tag
from spark_jobs.reporting.parts import Column, bar, chart, command, key_name, key_text, note, section, table

MOST_LAYERS, MOST_KEYS, MOST_DAYS, MOST_SEALS = 8, 20, 14, 12

_SEALED = {
    "age": "the block was as old as block.max_age allows",
    "bytes": "the block had block.max_bytes",
    "messages": "the block had block.max_messages",
    "pressure": "memory, open blocks or unacknowledged messages were near their limit",
    "drain": "the capture was stopped",
    "caught_up": "the capture had nothing left to do",
    "error": "the block could not be written as it was, and went to the quarantine",
    SEALED_BY: "compaction merged smaller objects",
}


def volume(facts: Facts, axis: Axis) -> Html:
    """How much is stored, of what, and when."""
    keys = by_key(facts)
    names = [key_text(each.key) for each in keys[:MOST_LAYERS]] + ["all other keys"] * (len(keys) > MOST_LAYERS)
    number = {each.key: min(rank, MOST_LAYERS) for rank, each in enumerate(keys)}
    each_bar = duration(axis.step)
    layer = (lambda stored: number[stored.name.key]), len(names)
    messages = over_time(axis, facts.objects, lambda stored: facts.messages([stored]), *layer)
    sizes = over_time(axis, facts.objects, lambda stored: stored.size, *layer)
    labels: list[tuple[str, object]] = [
        (f"k{rank}", key_name(each.key)) for rank, each in enumerate(keys[:MOST_LAYERS])
    ]
    labels += [("k8", plural(len(keys) - MOST_LAYERS, "other key"))] * (len(keys) > MOST_LAYERS)
    left_out = sum(facts.messages([stored]) for stored in facts.objects if axis.place(stored.name.bucket) is None)
    return section(
        "volume",
        "Volume over time",
        f"What is stored, by the time bucket and the key of the messages; each bar is {each_bar}. Point at a bar for "
        "its figures. A gap means that nothing was published in that time, or nothing stored.",
        legend(labels) if len(labels) > 1 else "",
        tag(
            "div",
            chart(
                "Messages",
                stacked(
                    axis,
                    list(zip(names, messages, strict=True)),
                    title="Messages over time by key",
                    unit=lambda value: plural(int(value), "message"),
                    ticks=count_ticks,
                    mark=count_mark,
                ),
            ),
            chart(
                "Stored size",
                stacked(
                    axis,
                    list(zip(names, sizes, strict=True)),
                    title="Stored bytes over time by key",
                    unit=size,
                    ticks=size_ticks,
                    mark=size_mark,
                ),
            ),
            class_="charts",
        ),
        note(f"Not drawn: {plural(left_out, 'message')} in buckets far from all others.") if left_out else "",
        tag("h3", "Keys"),
        _keys(facts),
    )


def _keys(facts: Facts) -> Html:
    keys = by_key(facts)
    total = sum(each.messages for each in keys)
    columns = [
        Column("key", "w"),
        Column("messages", "n"),
        Column("share", "n"),
        Column("", "bar"),
        Column("stored", "n"),
        Column("per message", "n"),
        Column("objects", "n"),
        Column("first bucket (UTC)", "t"),
        Column("last bucket (UTC)", "t"),
    ]
    rows = [
        (
            join(tag("i", class_=f"swatch k{min(rank, MOST_LAYERS)}"), key_name(each.key)),
            f"{each.messages:,}",
            share(each.messages, total),
            bar(each.messages, keys[0].messages),
            size(each.size),
            size(each.size / max(each.messages, 1)),
            f"{each.objects:,}",
            moment(each.first * 1e6, seconds=False),
            moment(each.last * 1e6, seconds=False),
        )
        for rank, each in enumerate(keys[:MOST_KEYS])
    ]
    rest = keys[MOST_KEYS:]
    messages = sum(each.messages for each in rest)
    caption = f"The {MOST_KEYS} keys with the most messages, of {len(keys):,}." if rest else "Every key."
    more = f"{plural(len(rest), 'more key')} with {plural(messages, 'message')} together ({share(messages, total)})."
    return join(table(caption, columns, rows), note(more) if rest else "")


def lateness(facts: Facts, axis: Axis) -> Html:
    """How long messages took, and which came late or again."""
    return section(
        "lateness",
        "Lateness: how long until a message is safe",
        "How long a message was in NATS only: from when the stream had it until the object that holds it was written. "
        "All messages of an object count with the wait of its oldest, so the true waits are these or shorter. About "
        "as long as the capture's block.max_age is normal. Much longer means that the capture was down or behind, or "
        "began on a stream that already held messages.",
        _waits(facts, axis),
        tag("h3", "Late and repeated messages"),
        _late(facts),
        _repeated(facts),
    )


def _waits(facts: Facts, axis: Axis) -> Html:
    points = waits(facts.objects, lambda stored: axis.place(stored.name.bucket))
    days = waits(facts.objects, lambda stored: stored.name.bucket // 86_400)
    rewritten = sum(stored.sealed_by == SEALED_BY for stored in facts.objects)
    left_out = note(f"Left out: {plural(rewritten, 'object')} written by compaction, long after the messages came.")
    if not points:
        return join(tag("p", "No object tells both when it was written and when its messages came."), left_out)
    columns = [
        Column("day (UTC)", "t"),
        Column("objects", "n"),
        Column("half of the messages within", "n"),
        Column("95 % within", "n"),
        Column("all within", "n"),
        Column("last object written after the end of its bucket", "n"),
    ]
    rows = [
        (
            day(number * 86_400, year=True),
            f"{found.objects:,}",
            *(duration(seconds) for seconds in (found.half, found.most, found.all)),
            duration(found.closed) if found.closed > 0 else "before the end",
        )
        for number, found in sorted(days.items(), reverse=True)[:MOST_DAYS]
    ]
    caption = f"The last {MOST_DAYS} of {len(days):,} days." if len(days) > MOST_DAYS else "By the day of the bucket."
    return join(
        legend([("w0", "half of the messages within"), ("w1", "up to 95 %"), ("w2", "up to the longest wait")]),
        wait_chart(
            axis,
            {bar: (found.half, found.most, found.all) for bar, found in points.items()},
            title="Wait until stored, over time",
        ),
        left_out if rewritten else "",
        table(caption, columns, rows),
    )


def _late(facts: Facts) -> Html:
    late, early = facts.delivery.late, facts.delivery.early
    if not late and not early:
        return tag("p", "Every message lies in the bucket of the time at which the stream had it: none came late.")
    total = facts.messages(facts.objects)
    return tag(
        "p",
        "Some buckets are not those of the time at which the stream stored the messages. ",
        f"{plural(late, 'message')} ({share(late, total)}) reached the stream after the bucket's end: half of them "
        f"within {duration(facts.delivery.median)}, 95 % within {duration(facts.delivery.most)}, all within "
        f"{duration(facts.delivery.worst)} of it. "
        if late
        else "None reached the stream after its bucket's end. ",
        f"{plural(early, 'message')} reached it before the bucket's beginning: their time lies in the future. "
        if early
        else "",
    )


def _repeated(facts: Facts) -> Html:
    total, again = facts.messages(facts.objects), facts.delivery.redelivered
    if not again:
        return tag("p", "Every message was stored at its first delivery.")
    return tag(
        "p",
        f"{plural(again, 'message')} ({share(again, total)}) were delivered more than once until they were stored. "
        "That is normal after a restart or a failed store; many, all the time, mean that replicas die or that ack_wait "
        "is too short.",
    )


def objects(facts: Facts, axis: Axis) -> Html:
    """How large objects are, and whether compaction is worth it."""
    found = facts.objects
    counts = over_time(axis, found, lambda _: 1, lambda _: 0, 1)
    classes = size_classes(found)
    most = max(count for _, count, _ in classes)
    small = sum(stored.size < SMALL for stored in found)
    return section(
        "objects",
        "Objects and their sizes",
        "The archive is made of Parquet objects, each with messages of one key and one bucket. Few large ones are "
        "read faster and cost less than many small ones. "
        f"Smaller than {size(SMALL)}: {small:,} of {plural(len(found), 'object')} ({share(small, len(found))}).",
        _compaction(facts),
        _copies(facts),
        table(
            "Objects by size.",
            [Column("size"), Column("objects", "n"), Column("share", "n"), Column("", "bar"), Column("stored", "n")],
            [
                (
                    f"{size(bound // 4)} to {size(bound)}",
                    f"{count:,}",
                    share(count, len(found)),
                    bar(count, most),
                    size(all_),
                )
                for bound, count, all_ in classes
            ],
        ),
        tag("h3", "Objects over time"),
        stacked(
            axis,
            [("objects", counts[0])],
            title="Objects over time",
            unit=lambda value: plural(int(value), "object"),
            ticks=count_ticks,
            mark=count_mark,
        ),
        tag("h3", "Why blocks became objects"),
        table(
            "What ended the collecting of messages for an object.",
            [
                Column("reason"),
                Column("meaning"),
                *(Column(name, "n") for name in ("objects", "messages", "median size")),
            ],
            [
                (clipped(reason, 30) or "unknown", _SEALED.get(reason, ""), f"{count:,}", f"{messages:,}", size(middle))
                for reason, count, messages, middle in sealed(found)[:MOST_SEALS]
            ],
        ),
    )


def _copies(facts: Facts) -> Html:
    copies = sum(facts.copies.get(stored.name, 0) for stored in facts.objects)
    if not copies:
        return Html("")
    return tag(
        "p",
        f"Stored twice: {plural(copies, 'message')}, which came again after a failure, or which compaction is merging. "
        "Readers return each message once, and here it counts once. Compaction removes the copies.",
    )


def _compaction(facts: Facts) -> Html:
    after, now = after_compaction(facts.objects), len(facts.objects)
    if worth_compacting(facts):
        return join(
            tag(
                "p", tag("strong", f"Compaction would make about {after:,} of these {plural(now, 'object')}."), " Run:"
            ),
            command(facts, "compact"),
        )
    if small_for_good(facts):
        text = "Compaction merges objects of one key and bucket, which would change little here. "
        return tag("p", text, "For larger objects, choose a longer block.interval or a coarser key.")
    return Html("")
