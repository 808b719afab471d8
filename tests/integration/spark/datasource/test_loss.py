"""Messages that disappear before a task has read them: an error, or what could be had, but never silence."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream import range_reader
from jetcapture_py.jetstream.connection import Api
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.read import BatchReader
from tests.integration.spark.live import ENVELOPE, Live, Query
from tests.support.running import STREAM, connection

MESSAGES = 6000
STEP = 200
SEEDS = [0, 8, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(14) if seed not in (0, 8))]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few messages at a time: whatever is done to the stream meets a task that has most of its range before it."""
    monkeypatch.setattr(range_reader, "BATCH", STEP)
    monkeypatch.setattr(range_reader, "ENOUGH", STEP // 2)
    monkeypatch.setattr(range_reader, "WAITING", 20_000)


class Reading:
    """A read in steps, whose sequences are `seqs`; `meanwhile` is done once after `when` messages."""

    def __init__(self, when: int = 0, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.seqs: list[int] = []
        self._when, self._meanwhile = when, meanwhile

    def take(self, batches: Iterator[Any]) -> None:
        """Read all that they give."""
        for batch in batches:
            self.seqs += batch.column(layout.SEQ).to_pylist()
            if len(self.seqs) > self._when:
                self._when = 1 << 62
                self._meanwhile()

    def batch(self, options: ReadOptions) -> list[int]:
        """A bounded read."""
        reader = BatchReader(options.for_batch(), ENVELOPE)
        for part in reader.partitions():
            self.take(reader.read(part))
        return self.seqs

    def stream(self, options: ReadOptions) -> list[int]:
        """A streaming query until nothing is new."""
        with Query(options) as query:
            for _ in range(100):
                if not query.plan():
                    return self.seqs
                for part in query.reader.partitions(query.start, query.next_end):
                    self.take(query.reader.read(part))
                query.end = query.next_end
        raise AssertionError("it never came to the stream's end")


def update(live: Live, **limits: Any) -> None:
    """Give the stream a limit, which the server applies at once, or within seconds to what is too old."""
    live.do(lambda stream: stream.update_stream(name=STREAM, subjects=["orders.>"], **limits))


def expire(live: Live) -> None:
    """Let all messages become too old, and wait until they are gone."""
    update(live, max_age=0.2)

    async def gone() -> None:
        async with connection(live.server.url) as client:
            while (await client.jetstream().stream_info(STREAM)).state.messages:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(gone(), 60))


WAYS = ("purge", "keep", "messages", "age", "delete", "recreate", "keep beside consumer")


@dataclass
class History:
    """One loss: what happens to the stream, and when, chosen by chance from the seed; what remains of its messages."""

    seed: int

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.way = WAYS[self.seed % len(WAYS)]
        self.when = chance.randrange(0, MESSAGES // 2)
        self.keep = chance.randrange(1, MESSAGES // 4)
        self.streaming = bool(self.seed // len(WAYS))
        self.parts = chance.choice(["1", "3"])

    def happen(self, live: Live) -> None:
        """Lose messages."""
        match self.way:
            case "purge":
                live.purge()
            case "keep":
                live.purge(keep=self.keep)
            case "messages":
                update(live, max_msgs=self.keep)
            case "age":
                expire(live)
            case "delete":
                live.do(lambda stream: stream.delete_stream(STREAM))
            case "recreate":
                live.recreate()
                live.fill(50)
            case "keep beside consumer":
                live.purge(keep=self.keep)
                with contextlib.suppress(Exception):
                    for name in live.consumers():
                        live.do(partial(_delete_consumer, name=name))

    def read(self, live: Live, **options: str) -> list[int]:
        """The sequences that are read while this happens."""
        reading = Reading(self.when, lambda: self.happen(live))
        options = {"minPartitions": self.parts, "timeout": "30s", **options}
        if self.streaming:
            return reading.stream(live.read_options(**options))
        return reading.batch(live.read_options(**options))


async def _delete_consumer(stream: Any, name: str) -> None:
    await stream.delete_consumer(STREAM, name)


def remaining(live: Live) -> list[int]:
    """The sequences that the stream holds."""
    with contextlib.suppress(SourceError):
        return Reading().batch(live.read_options(failOnDataLoss="false"))
    return []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_is_an_error(live: Live, seed: int) -> None:
    live.fill(MESSAGES)
    history = History(seed)
    with pytest.raises(SourceError, match=r"are gone: it starts at|was deleted and created again|stream not found"):
        history.read(live)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_may_be_leaves_all_that_could_be_had(live: Live, seed: int) -> None:
    live.fill(MESSAGES)
    history = History(seed)
    if history.streaming and history.way in ("delete", "recreate"):
        with pytest.raises(SourceError, match=r"was deleted and created again|stream not found"):
            history.read(live, failOnDataLoss="false")
        return
    read = history.read(live, failOnDataLoss="false")
    left = [] if history.way == "recreate" else remaining(live)
    if not history.streaming:
        left = [seq for seq in left if seq <= MESSAGES]
    assert read == sorted(set(read))
    assert history.when < len([seq for seq in read if seq <= MESSAGES]) < MESSAGES
    assert set(left) <= set(read)


def test_gaps_that_open_inside_the_stream_are_no_loss(live: Live) -> None:
    live.send((f"orders.{'gone' if seq % 7 == 0 else 'left'}", b"") for seq in range(1, MESSAGES + 1))

    def open_gaps() -> None:
        live.delete(MESSAGES - 100, MESSAGES - 50, MESSAGES - 49, MESSAGES - 1)
        live.purge(subject="orders.gone")

    reading = Reading(0, open_gaps)
    read = reading.batch(live.read_options(minPartitions="1"))
    assert set(remaining(live)) <= set(read)
    assert len(read) < MESSAGES


def test_what_goes_behind_the_reader_is_no_loss(live: Live) -> None:
    live.fill(MESSAGES)
    live.delete(1000, 5000)
    everything = [seq for seq in range(1, MESSAGES + 1) if seq not in (1000, 5000)]
    reading = Reading(2500, partial(live.purge, seq=2400))
    assert reading.batch(live.read_options(minPartitions="1")) == everything


def test_a_loss_of_what_the_subjects_match_is_an_error(live: Live) -> None:
    live.send((f"orders.{'rare' if seq % 5 == 0 else 'often'}", b"") for seq in range(MESSAGES))
    with pytest.raises(SourceError, match=f"are gone: it starts at {MESSAGES + 1}"):
        Reading(0, live.purge).batch(live.read_options(minPartitions="1", subjects="orders.rare,orders.none"))


def test_what_goes_before_the_first_message_of_the_subjects_is_no_loss(live: Live) -> None:
    live.send((f"orders.{'late' if seq > 1000 else 'early'}", b"") for seq in range(1, 1101))
    reader = BatchReader(live.read_options(subjects="orders.late"), ENVELOPE)
    (part,) = reader.partitions()
    live.purge(seq=900)
    reading = Reading()
    reading.take(reader.read(part))
    assert reading.seqs == list(range(1001, 1101))


def test_a_purge_is_a_loss_to_a_read_of_the_last_of_each_subject(live: Live) -> None:
    live.fill(MESSAGES)
    reading = Reading(0, partial(live.purge, keep=10))
    with pytest.raises(SourceError, match=f"are gone: it starts at {MESSAGES - 9}"):
        reading.batch(live.read_options(startingOffsets="last_per_subject"))


def test_newer_messages_of_a_subject_are_no_loss_to_a_read_of_the_last_of_each(live: Live) -> None:
    update(live, max_msgs_per_subject=1)
    live.fill(MESSAGES)
    reading = Reading(0, partial(live.fill, MESSAGES - 100))
    read = reading.batch(live.read_options(startingOffsets="last_per_subject"))
    assert read == sorted(set(read))
    assert set(read) >= set(range(MESSAGES - 99, MESSAGES + 1))


def test_a_consumer_beside_a_replica_that_lags_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.fill(100)
    request = Api.request

    async def lagging(self: Api, subject: str, body: Any = None) -> dict[str, Any]:
        answer = await request(self, subject, body)
        if subject.startswith("CONSUMER.CREATE"):
            answer["num_pending"] = 0  # as a replica says that has not got the messages yet
        if subject.startswith("STREAM.INFO"):
            answer["config"]["num_replicas"] = 3
        return answer

    monkeypatch.setattr(Api, "request", lagging)
    assert Reading().batch(live.read_options(minPartitions="1")) == list(range(1, 101))
