"""Cells: consumers, made by somebody else or by the capture."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import nats.errors
import pytest

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.manage.check import check
from tests.integration.matrix.cell import Cell
from tests.integration.matrix.stage import Stage, StreamMessage
from tests.integration.matrix.streams import HOUR, SECOND, nothing
from tests.support.proofs import unchecked
from tests.support.running import CONSUMER, until

LATER = "2100-01-01T00:00:00Z"


def last(messages: list[StreamMessage]) -> list[StreamMessage]:
    return messages[-1:]


def from_the_fourth(messages: list[StreamMessage]) -> list[StreamMessage]:
    return messages[3:]


def last_of_each_subject(messages: list[StreamMessage]) -> list[StreamMessage]:
    newest = {message.subject: message for message in messages}
    return [message for message in messages if newest[message.subject] is message]


def of_two_subjects(messages: list[StreamMessage]) -> list[StreamMessage]:
    return [message for message in messages if message.subject.endswith((".1", ".3"))]


# ------------------------------------------------------------------ settings of others


def ephemeral(**settings: Any) -> Any:
    async def play(stage: Stage) -> None:
        await stage.create()
        await stage.consumer(durable=False, **settings)
        await stage.fill()
        await stage.look()
        await stage.capture()
        await stage.check_archive()
        await stage.check_consumer()

    return play


def warned_of(setting: str) -> Any:
    async def after(stage: Stage) -> None:
        found = (await check(stage.config())).items
        assert {each.level for each in found if each.about == "consumer" and setting in each.text} == {"warning"}

    return after


async def play_sampled(stage: Stage) -> None:
    """Samples of acknowledgements are published as for any other client."""
    await stage.create()
    await stage.consumer(sample_freq="100")
    await stage.fill()
    samples = await stage.client.subscribe(f"$JS.EVENT.METRIC.CONSUMER.ACK.{stage.stream}.{CONSUMER}")
    await stage.look()
    await stage.capture()
    await stage.check_archive()
    for _ in stage.expected:
        await samples.next_msg(30)


async def play_given_up(stage: Stage) -> None:
    """Another client has taken messages as often as they are delivered: no capture gets them."""
    await stage.create()
    await stage.consumer(max_deliver=1, ack_wait=SECOND)
    await stage.fill()
    other = await stage.client.jetstream().pull_subscribe_bind(CONSUMER, stage.stream)
    taken = {message.metadata.sequence.stream for message in await other.fetch(3)}

    async def given_up() -> bool:
        return bool((await stage.ask(f"CONSUMER.INFO.{stage.stream}.{CONSUMER}"))["num_ack_pending"] == 0)

    await stage.look()
    await stage.capture()
    await until(given_up, "the server has given up on what was taken")
    stage.selects = lambda messages: [message for message in messages if message.seq not in taken]
    await stage.check_archive(proven=False)
    report = await stage.proof()
    assert report.missing in (0, len(taken)), "the ack floor may stay below them, or pass them"
    assert any("whether the server gave up on messages" in note for note in unchecked(report))


# ------------------------------------------------------------------ paused


async def play_paused(stage: Stage) -> None:
    """Nothing comes until somebody resumes it."""
    await stage.create()
    await stage.consumer(pause_until=LATER)
    await stage.fill()
    await stage.look()
    problems = (await check(stage.config())).problems
    assert [each.text for each in problems] == [f"it is paused until {LATER}; resume it"]
    capture = asyncio.create_task(stage.capture())

    async def waits() -> bool:
        return bool((await stage.ask(f"CONSUMER.INFO.{stage.stream}.{CONSUMER}"))["num_waiting"])

    await until(waits, "the capture pulls")
    assert not capture.done()
    await stage.ask(f"CONSUMER.PAUSE.{stage.stream}.{CONSUMER}", {})
    await capture
    await stage.check_archive()
    await stage.check_consumer()


async def cannot_be_paused(stage: Stage) -> None:
    await stage.create()
    assert "pause_until" not in (await stage.consumer(pause_until=LATER))["config"]


async def paused_for_a_while(stage: Stage, state: Capture) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=0.5)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    await stage.ask(f"CONSUMER.PAUSE.{stage.stream}.{CONSUMER}", {"pause_until": soon})
    await stage.refill(state)


async def cannot_be_reset(stage: Stage) -> None:
    await stage.create()
    await stage.consumer()
    with pytest.raises(nats.errors.TimeoutError):  # an unknown request is not answered
        await stage.client.request(f"$JS.API.CONSUMER.RESET.{stage.stream}.{CONSUMER}", b"{}", 0.3)


async def reset(stage: Stage, state: Capture) -> None:
    before = state.source.fetched
    await stage.ask(f"CONSUMER.RESET.{stage.stream}.{CONSUMER}", {})
    await until(lambda: state.source.fetched >= 2 * before, "everything has been delivered again")
    await stage.fill(3)
    await stage.look()
    await until(lambda: state.source.fetched >= 2 * before + 3, "what follows is received")


async def more(stage: Stage, state: Capture) -> None:
    await stage.refill(state)


WORKING = (
    Cell(name="Made by the capture"),
    Cell(name="`max_deliver`", note="`check` warns.", consumer={"max_deliver": 5}, after=warned_of("max_deliver")),
    Cell(
        name="`max_deliver` used up by another client: these messages are not delivered any more",
        note="`verify` lists them as holes, or says that it cannot know.",
        play=play_given_up,
    ),
    Cell(name="`backoff`", consumer={"max_deliver": 3, "backoff": [SECOND, 5 * SECOND, 30 * SECOND]}),
    Cell(name="`sample_freq`", play=play_sampled),
    Cell(
        name="`inactive_threshold`",
        note="`check` warns.",
        consumer={"inactive_threshold": HOUR},
        after=warned_of("inactive_threshold"),
    ),
    Cell(name="Ephemeral", note="The server deletes it soon after the capture has stopped.", play=ephemeral()),
    Cell(name="`mem_storage`", consumer={"mem_storage": True}),
    Cell(name="`max_waiting: 1`", consumer={"max_waiting": 1}),
    Cell(
        name="`max_batch`, `max_expires`, `max_bytes`",
        consumer={"max_batch": 2, "max_expires": 50_000_000, "max_bytes": 2_000},
    ),
    Cell(name="`max_ack_pending: 3`", consumer={"max_ack_pending": 3}),
    Cell(name="`max_ack_pending: unlimited`", consumer={"max_ack_pending": -1}),
    Cell(name="`replay_policy: original`", consumer={"replay_policy": "original"}),
    Cell(name="`description`, `metadata`", consumer={"description": "of others", "metadata": {"team": "b"}}),
    Cell(name="`deliver_policy: last`", source={"deliver_policy": "last"}, selects=last),
    Cell(
        name="`deliver_policy: last_per_subject`",
        source={"deliver_policy": "last_per_subject"},
        selects=last_of_each_subject,
    ),
    Cell(
        name="`deliver_policy: new`",
        source={"deliver_policy": "new"},
        fill=nothing,
        during=more,
    ),
    Cell(
        name="`deliver_policy: by_start_sequence`",
        source={"deliver_policy": "by_start_sequence", "start_sequence": 4},
        selects=from_the_fourth,
    ),
    Cell(
        name="`deliver_policy: by_start_time`",
        source={"deliver_policy": "by_start_time", "start_time": "2020-01-01T00:00:00Z"},
    ),
    Cell(name="Several filter subjects", source={"filter_subjects": ["{p}.1", "{p}.3"]}, selects=of_two_subjects),
    Cell(
        name="Paused: the capture waits until it is resumed",
        note="`check` reports it.",
        consumer={"pause_until": LATER},
        play=play_paused,
        since=(2, 11),
    ),
    Cell(
        name="Paused for a while under a capture",
        during=paused_for_a_while,
        since=(2, 11),
        lacking=cannot_be_paused,
    ),
    Cell(
        name="Reset under a capture: delivered again, read once", during=reset, since=(2, 14), lacking=cannot_be_reset
    ),
)


_POLICY = (
    "consumer {consumer} of stream {stream} has ack_policy %s; explicit is required, "
    "or messages count as handled before they are stored"
)
_PUSH = "consumer {consumer} of stream {stream} is a push consumer; a pull consumer is required"
_HEADERS = (
    "consumer {consumer} of stream {stream} has headers_only set; it must be off, "
    "or messages are delivered without their payload"
)
_GROUPS = "consumer {consumer} of stream {stream} has priority groups (%s); source.mode shared pulls without a group"


def grouped(policy: str) -> dict[str, Any]:
    return {"priority_policy": policy, "priority_groups": ["a"]}


REFUSED_CONSUMERS = (
    Cell(name="`ack_policy: none`", consumer={"ack_policy": "none"}, refused=_POLICY % "none"),
    Cell(name="`ack_policy: all`", consumer={"ack_policy": "all"}, refused=_POLICY % "all"),
    Cell(name="`headers_only`", consumer={"headers_only": True}, refused=_HEADERS),
    Cell(name="Push consumer", consumer={"deliver_subject": "{p}-push"}, refused=_PUSH),
    Cell(
        name="Push consumer with `ack_policy: flow_control`",
        consumer={
            "ack_policy": "flow_control",
            "deliver_subject": "{p}-push",
            "flow_control": True,
            "idle_heartbeat": SECOND,
            "max_ack_pending": 1000,
        },
        refused=_PUSH,
        since=(2, 14),
    ),
    Cell(name="Priority groups, `overflow`", consumer=grouped("overflow"), refused=_GROUPS % "overflow", since=(2, 11)),
    Cell(
        name="Priority groups, `pinned_client`",
        consumer=grouped("pinned_client"),
        refused=_GROUPS % "pinned_client",
        since=(2, 11),
    ),
    Cell(
        name="Priority groups, `prioritized`",
        consumer=grouped("prioritized"),
        refused=_GROUPS % "prioritized",
        since=(2, 12),
    ),
)
