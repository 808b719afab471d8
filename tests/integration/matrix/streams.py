"""Cells: streams as they are set up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.js.api import KeyValueConfig

from jetcapture_py.capture.pipeline import Capture
from tests.integration.matrix.cell import Cell
from tests.integration.matrix.stage import (
    COUNT,
    ServerRefusedError,
    Stage,
    polled,
    subjects,
)

SECOND = 10**9
HOUR = 3600 * SECOND
ONE_PER_SUBJECT = {"allow_rollup_hdrs": True, "max_msgs_per_subject": 1}
"""Then a message's TTL may be shorter than that of its delete marker."""


async def nothing(stage: Stage) -> None:
    """Leave the stream empty for now."""


async def is_empty(stage: Stage) -> None:
    """Acknowledged messages have left the stream."""
    await stage.holds(0)


async def is_whole(stage: Stage) -> None:
    """Acknowledged messages have stayed in the stream."""
    assert (await stage.state())["messages"] == len(stage.seen)


# ------------------------------------------------------------------ retention and limits


async def fill_past_the_limit(stage: Stage) -> None:
    await stage.fill()
    with pytest.raises(ServerRefusedError, match="maximum messages"):
        await stage.send("{p}.0", b"too many")


async def fill_unconfirmed(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.client.publish(stage.own("{p}.a"), b"%d" % number)
    await stage.holds(COUNT)


async def fill_with_duplicates(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.send("{p}.a", b"%d" % number, {"Nats-Msg-Id": str(number // 2)})


async def fill_with_rollups(stage: Stage) -> None:
    await stage.fill()
    await stage.send("{p}.1", b"all that is left of {p}.1", {"Nats-Rollup": "sub"})


async def play_interest_of_two(stage: Stage) -> None:
    await stage.create(retention="interest")
    await stage.consumer("other")
    await stage.consumer()
    await stage.fill()
    await stage.look()
    await stage.capture()
    await stage.check_archive()
    await is_whole(stage)


async def play_shared_work_queue(stage: Stage) -> None:
    await stage.create(retention="workqueue")
    await stage.consumer("other", filter_subject="{p}.0")
    await stage.fill()
    await stage.look()
    stage.selects = lambda messages: [each for each in messages if each.subject != f"{stage.prefix}.0"]
    await stage.capture(filter_subjects=["{p}.1", "{p}.2", "{p}.3", "{p}.4"])
    await stage.check_archive()
    assert (await stage.state())["messages"] == 2


async def fill_and_seal(stage: Stage) -> None:
    await stage.fill()
    await stage.update(sealed=True)


RETENTION = (
    Cell(name="Limits retention, file storage"),
    Cell(name="Memory storage", stream={"storage": "memory"}),
    Cell(name="Compression `s2`", stream={"compression": "s2"}),
    Cell(
        name="Interest retention: acknowledged messages leave the stream",
        stream={"retention": "interest"},
        consumer={},
        after=is_empty,
    ),
    Cell(name="Interest retention with another consumer: its messages stay", play=play_interest_of_two),
    Cell(name="Work queue: acknowledged messages leave the stream", stream={"retention": "workqueue"}, after=is_empty),
    Cell(name="Work queue shared with another consumer, by `source.filter_subjects`", play=play_shared_work_queue),
    Cell(name="`max_msgs`, the oldest are discarded", stream={"max_msgs": 4}),
    Cell(name="`discard: new` at `max_msgs`", stream={"discard": "new", "max_msgs": COUNT}, fill=fill_past_the_limit),
    Cell(
        name="`discard_new_per_subject`",
        stream={"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 2},
        fill=fill_past_the_limit,
    ),
    Cell(name="`max_msgs_per_subject`", stream={"max_msgs_per_subject": 1}),
    Cell(name="`no_ack`", stream={"no_ack": True}, fill=fill_unconfirmed),
    Cell(name="`first_seq`", stream={"first_seq": 1_000_000}),
    Cell(name="`persist_mode: async`", stream={"persist_mode": "async"}, since=(2, 12)),
    Cell(name="Duplicates that the server drops (`Nats-Msg-Id`)", fill=fill_with_duplicates),
    Cell(name="Rollups", stream={"allow_rollup_hdrs": True}, fill=fill_with_rollups),
    Cell(name="`deny_delete` and `deny_purge`", stream={"deny_delete": True, "deny_purge": True}),
    Cell(name="Sealed", fill=fill_and_seal),
    Cell(name="Empty", fill=nothing),
)


# ------------------------------------------------------------------ mirrors, sources, transforms, republish


async def origin(stage: Stage, name: str, tokens: str) -> None:
    """Another stream, with messages."""
    await stage.create(name, subjects=[f"{tokens}.>"])
    for number in range(COUNT):
        await stage.send(f"{tokens}.{number % 3}", b"%d" % number, {"From": name})


def play_copies(count: int, second: bool = False, **settings: Any) -> Any:
    async def play(stage: Stage) -> None:
        await origin(stage, stage.own("{s}-A"), stage.own("{p}-a"))
        if second:
            await origin(stage, stage.own("{s}-B"), stage.own("{p}-b"))
        await stage.create(**settings)
        if "subjects" in settings:
            await stage.fill()
        await stage.holds(count)
        await stage.look()
        await stage.capture()
        await stage.check_archive()
        await stage.check_consumer()

    return play


async def play_republished(stage: Stage) -> None:
    await stage.create(stage.own("{s}-A"), subjects=["{p}-a.>"], republish={"src": ">", "dest": "{p}.>"})
    await stage.create()
    for number in range(COUNT):
        await stage.send("{p}-a.x", b"%d" % number)
    await stage.holds(COUNT)
    await stage.look()
    assert all("Nats-Sequence" in dict(each.headers or []) for each in stage.expected)
    await stage.capture()
    await stage.check_archive()


COPIES = (
    Cell(name="Mirror", play=play_copies(COUNT, mirror={"name": "{s}-A"})),
    Cell(
        name="Mirror of some subjects, from a sequence on: gaps and first sequence as in the origin",
        play=play_copies(2, mirror={"name": "{s}-A", "filter_subject": "{p}-a.1", "opt_start_seq": 4}),
    ),
    Cell(
        name="Mirror with subject transforms",
        play=play_copies(
            COUNT, mirror={"name": "{s}-A", "subject_transforms": [{"src": "{p}-a.>", "dest": "{p}-copy.>"}]}
        ),
    ),
    Cell(
        name="Sources: several streams in one",
        play=play_copies(2 * COUNT, second=True, sources=[{"name": "{s}-A"}, {"name": "{s}-B"}]),
    ),
    Cell(
        name="Sources with filters and subject transforms, and the stream's own messages",
        play=play_copies(
            2 * COUNT - 6,
            sources=[{"name": "{s}-A", "subject_transforms": [{"src": "{p}-a.0", "dest": "{p}-copy.0"}]}],
            subjects=["{p}.>"],
        ),
    ),
    Cell(name="Subject transform", stream={"subject_transform": {"src": "{p}.>", "dest": "changed.{p}.>"}}),
    Cell(name="Republish: the stream itself", stream={"republish": {"src": ">", "dest": "again.{p}.>"}}),
    Cell(name="Republish: a stream of republished messages, with their headers", play=play_republished),
)


# ------------------------------------------------------------------ messages of a special kind


async def fill_with_ttl(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.send("{p}.a", b"%d" % number, {"Nats-TTL": "1h" if number % 2 else "never"})


async def expire_by_age(stage: Stage, state: Capture) -> None:
    await stage.update(max_age=200_000_000, duplicate_window=100_000_000)
    await stage.holds(0)


async def expire_with_marker(stage: Stage, state: Capture) -> None:
    await stage.send("{p}.a", b"short", {"Nats-TTL": "1s"})
    await polled(stage, lambda seen: len(seen) == 2, "the message has made way for a delete marker")
    assert dict(stage.seen[2].headers or []).keys() >= {"Nats-Marker-Reason", "Nats-TTL"}
    await stage.received(state)


async def fill_counters(stage: Stage) -> None:
    for number in range(COUNT):
        await stage.send(f"{{p}}.{number % 3}", b"", {"Nats-Incr": f"+{number + 1}"})


async def fill_batch(stage: Stage) -> None:
    head = {"Nats-Batch-Id": stage.own("batch-{n}")}
    for number in range(1, COUNT):
        headers = {**head, "Nats-Batch-Sequence": str(number)}
        if number == 1:
            await stage.send("{p}.a", b"1", headers)
        else:
            await stage.client.publish(stage.own("{p}.a"), b"%d" % number, headers=headers)
    await stage.send("{p}.a", b"last", {**head, "Nats-Batch-Sequence": str(COUNT), "Nats-Batch-Commit": "1"})


async def fill_fast(stage: Stage) -> None:
    inbox = stage.client.new_inbox()
    answers = await stage.client.subscribe(f"{inbox}.>")
    for number in range(1, COUNT + 1):
        operation = 0 if number == 1 else 2 if number == COUNT else 1
        reply = f"{inbox}.batch-{stage.number}.10.fail.{number}.{operation}.$FI"
        await stage.client.publish(stage.own("{p}.a"), b"%d" % number, reply=reply)
        if number == 1:
            await answers.next_msg(30)
    await stage.holds(COUNT)


async def fill_schedule(stage: Stage) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for number in range(3):
        headers = {"Nats-Schedule": f"@at {later}", "Nats-Schedule-Target": stage.own("{p}.due")}
        await stage.send(f"{{p}}.schedule.{number}", b"%d" % number, headers)


async def fall_due(stage: Stage, state: Capture) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    headers = {"Nats-Schedule": f"@at {soon}", "Nats-Schedule-Target": stage.own("{p}.due")}
    await stage.send("{p}.schedule.1", b"due", headers)
    await polled(stage, lambda seen: stage.own("{p}.due") in subjects(seen.values()), "the schedule is due")
    await stage.received(state)
    assert dict(stage.expected[-1].headers or []).keys() >= {"Nats-Scheduler"}


async def play_key_value(stage: Stage) -> None:
    bucket = stage.own("b{n}")
    stage.stream = f"KV_{bucket}"
    store = await stage.client.jetstream().create_key_value(KeyValueConfig(bucket=bucket, history=5))
    for number in range(COUNT):
        await store.put(f"key.{number % 3}", b"%d" % number)
    await store.delete("key.0")
    await store.purge("key.1")
    await stage.look()
    await stage.capture()
    await stage.check_archive()
    assert [("KV-Operation", ["DEL"])] in [each.headers for each in stage.expected]


async def play_object_store(stage: Stage) -> None:
    bucket = stage.own("o{n}")
    stage.stream = f"OBJ_{bucket}"
    store = await stage.client.jetstream().create_object_store(bucket)
    await store.put("small", b"content")
    await store.put("large", bytes(300_000))
    await stage.look()
    await stage.capture()
    await stage.check_archive()


MESSAGES = (
    Cell(
        name="`max_age`: messages that expire while they are held are archived",
        during=expire_by_age,
    ),
    Cell(name="Message TTL", stream={"allow_msg_ttl": True}, fill=fill_with_ttl, since=(2, 11)),
    Cell(
        name="Delete markers, and the messages they replace",
        stream={"subject_delete_marker_ttl": HOUR, "allow_msg_ttl": True, **ONE_PER_SUBJECT},
        fill=nothing,
        during=expire_with_marker,
        since=(2, 11),
    ),
    Cell(
        name="Counters: increment and total of each message",
        stream={"allow_msg_counter": True},
        fill=fill_counters,
        since=(2, 12),
    ),
    Cell(name="Atomic batches", stream={"allow_atomic": True}, fill=fill_batch, since=(2, 12)),
    Cell(name="Fast batches", stream={"allow_batched": True}, fill=fill_fast, since=(2, 14)),
    Cell(
        name="Scheduled messages that wait in the stream",
        stream={"allow_msg_schedules": True, "allow_rollup_hdrs": True},
        fill=fill_schedule,
        since=(2, 12),
    ),
    Cell(
        name="Scheduled messages that fall due: the schedule, and what it publishes",
        stream={"allow_msg_schedules": True, "allow_rollup_hdrs": True},
        fill=nothing,
        during=fall_due,
        since=(2, 12),
    ),
    Cell(name="Stream of a KV bucket, with deletes and purges", play=play_key_value),
    Cell(name="Stream of an object store bucket", play=play_object_store),
)


# ------------------------------------------------------------------ streams that allow no capture


async def play_missing(stage: Stage) -> None:
    await stage.check_refused(MISSING)


async def play_full(stage: Stage) -> None:
    await stage.create(max_consumers=1)
    await stage.consumer("other")
    await stage.check_refused(TOO_MANY)


async def play_taken_work_queue(stage: Stage) -> None:
    await stage.create(retention="workqueue")
    await stage.consumer("other")
    await stage.check_refused(TAKEN)


_REFUSED = "NATS refused: "
MISSING = "stream {stream} does not exist; create it, or correct source.stream"
TOO_MANY = _REFUSED + "maximum consumers limit reached"
TAKEN = _REFUSED + "multiple non-filtered consumers not allowed on workqueue stream"

REFUSED = (
    Cell(name="Stream that does not exist", play=play_missing, refused=MISSING),
    Cell(name="`max_consumers` reached", play=play_full, refused=TOO_MANY),
    Cell(
        name="`consumer_limits.max_ack_pending` below `source.max_ack_pending`",
        stream={"consumer_limits": {"max_ack_pending": 100}},
        refused=_REFUSED + "consumer max ack pending exceeds system limit of 100",
    ),
    Cell(name="Work queue with another consumer of the same subjects", play=play_taken_work_queue, refused=TAKEN),
    Cell(
        name="Work queue, `deliver_policy: new`",
        stream={"retention": "workqueue"},
        source={"deliver_policy": "new"},
        refused=_REFUSED + "consumer must be deliver all on workqueue stream",
    ),
    Cell(
        name="Subjects that overlap `nats.inbox_prefix`, `$JS.ACK.>` or `$JS.API.>`, or a mirror of such a stream",
        stream={"subjects": ["{p}.>", "_INBOX.{p}.>"]},
        refused="stream {stream} takes _INBOX.{prefix}.>, which overlaps _INBOX.*.>, so it would store every "
        "delivery again, without end; give it other subjects",
    ),
    Cell(
        name="Sequence 2^62 - 1 reached, the last one that servers deliver",
        stream={"first_seq": (1 << 62) - COUNT},
        refused="stream {stream} ends at sequence 4611686018427387903, and servers deliver nothing from sequence "
        "4611686018427387904 on; create the stream again, with sequences from 1 on",
    ),
)
