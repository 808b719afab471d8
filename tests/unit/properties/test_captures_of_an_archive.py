"""Several captures of one archive: no reader passes over a message that somebody still owes it.

The model knows what a simulated server delivered to whom, and what is stored. It shares nothing with the code that
writes and reads watermarks but the files.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive.incarnations import Origin, Sample
from jetcapture_py.archive.watermark import ConsumerWatermark, path
from jetcapture_py.capture.watermark import Observer, move_watermark
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state
from jetcapture_py.store import LocalStore, removal_of
from jetcapture_py.store.archive import ArchiveFiles

BASE = datetime(2026, 1, 1, tzinfo=UTC)
FILTERS = [(), ("o.a",), ("o.b",), ("o.c",), ("o.a", "o.b"), ("o.*",)]
QUICK, STEPS = 25, 70


def matches(filters: Any, subject: str) -> bool:
    return not filters or subject in filters or "o.*" in filters


@dataclass
class Stream:
    """A stream of the server; `created` moves, `known` are all its creation times."""

    created: str
    messages: list[tuple[str, int]] = field(default_factory=list)
    """Subjects and times in microseconds, from sequence 1 on."""
    stored: set[int] = field(default_factory=set)
    known: set[str] = field(default_factory=set)


@dataclass
class Consumer:
    """A consumer of the server: `at` is where it searches next."""

    created: str
    filters: tuple[str, ...]
    at: int
    delivered: int
    deliveries: int = 0
    unacked: set[int] = field(default_factory=set)
    acked: int = 0
    """Every message that was delivered up to here is acknowledged."""
    given: set[int] = field(default_factory=set)
    """All that it has ever delivered."""
    seen: bool = False
    """Whether a replica knows its filters; nobody notices a change that is undone before that."""
    begun: bool = False
    """Whether a capture has written its watermark since it was created."""


class Capture:
    """Two replicas of a capture."""

    def __init__(self, name: str) -> None:
        self.name, self.consumer = name, None  # type: str, Consumer | None
        self.first_created = ""
        self.observers: list[Observer] = []
        self.asleep: list[tuple[Observer, ConsumerWatermark, list[ConsumerState]]] = []
        """Writes that the store has not answered yet."""
        self.ever: set[int] = set()
        """What its consumers have delivered of the present stream, of earlier ones as far as the file says."""


class World:
    """A server, an archive, and what happens to them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.chance = root, random.Random(seed)
        self.store = LocalStore(str(root))
        self.now = 0
        self.passes_skipped = self.chance.random() < 0.5
        self.captures = [Capture(f"c{number}") for number in range(self.chance.randint(1, 4))]
        self.stream = Stream("")
        self.recreate()
        self.moved = 0

    def later(self, most: float = 20.0) -> None:
        self.now += 1 + int(self.chance.random() * most * 1e6)

    def text(self) -> str:
        self.later()
        return (BASE + timedelta(microseconds=self.now)).isoformat().replace("+00:00", "Z")

    # what happens at the server

    def recreate(self) -> None:
        created = self.text()
        self.stream = Stream(created, known={created})
        for capture in self.captures:
            capture.consumer, capture.observers, capture.asleep, capture.ever = None, [], [], set()
            capture.first_created = ""

    def move_stream(self) -> None:
        self.stream.created = self.text()
        self.stream.known.add(self.stream.created)

    def publish(self) -> None:
        for _ in range(self.chance.randint(1, 6)):
            self.later(3)
            self.stream.messages.append((self.chance.choice(("o.a", "o.a", "o.b", "o.c")), self.now))

    def create(self, capture: Capture) -> None:
        last = len(self.stream.messages)
        start = self.chance.choice((1, 1, last + 1, self.chance.randint(1, last + 1)))
        recorded = self.fields(capture).get("filters", [{"subjects": []}])[-1]["subjects"]
        filters = tuple(recorded) if self.chance.random() < 0.4 else self.chance.choice(FILTERS)
        capture.consumer = Consumer(self.text(), filters, start, start - 1, acked=start - 1)

    def delete(self, capture: Capture) -> None:
        capture.consumer, capture.observers, capture.asleep = None, [], []
        written = self.fields(capture)
        known = written["seq"] if written.get("stream_created") in self.stream.known else 0
        capture.ever = {seq for seq in capture.ever if seq <= known}

    def next_match(self, consumer: Consumer) -> int | None:
        numbers = range(consumer.at, len(self.stream.messages) + 1)
        return next((seq for seq in numbers if matches(consumer.filters, self.stream.messages[seq - 1][0])), None)

    def search(self, consumer: Consumer) -> None:
        """The server looks ahead, and passes over what does not match now."""
        consumer.at = self.next_match(consumer) or len(self.stream.messages) + 1

    def deliver(self, capture: Capture) -> None:
        consumer = capture.consumer
        assert consumer is not None
        observer = self.chance.choice(capture.observers)
        for _ in range(self.chance.randint(1, 5)):
            if (seq := self.next_match(consumer)) is None:
                return
            consumer.at, consumer.delivered = seq + 1, seq
            consumer.deliveries += 1
            consumer.unacked.add(seq)
            consumer.given.add(seq)
            capture.ever.add(seq)
            observer.saw(seq, self.micros(self.stream.messages[seq - 1][1]))

    def store_and_ack(self, capture: Capture, share: float) -> None:
        consumer = capture.consumer
        assert consumer is not None
        for seq in sorted(consumer.unacked):
            if self.chance.random() < share:
                self.stream.stored.add(seq)
                if self.chance.random() < max(share, 0.9):  # an acknowledgement may be lost
                    consumer.unacked.discard(seq)

    def micros(self, offset: int) -> int:
        return int(BASE.timestamp()) * 1_000_000 + offset

    def state(self, consumer: Consumer) -> ConsumerState:
        if consumer.unacked:
            below = {seq for seq in consumer.given if seq < min(consumer.unacked)}
            floor = min(consumer.unacked) - 1 if self.passes_skipped else max(below, default=0)
        else:
            floor = consumer.at - 1 if self.passes_skipped else max(consumer.given, default=0)
        consumer.acked = max(consumer.acked, floor)
        pending = [matches(consumer.filters, subject) for subject, _ in self.stream.messages[consumer.at - 1 :]]
        asked = BASE + timedelta(microseconds=self.now, seconds=self.chance.random() * 4.9)
        return consumer_state(
            {
                "config": {"filter_subjects": list(consumer.filters)},
                "created": consumer.created,
                "num_pending": sum(pending),
                "num_ack_pending": len(consumer.unacked),
                "ack_floor": {"stream_seq": consumer.acked, "consumer_seq": 0},
                "delivered": {"stream_seq": consumer.delivered, "consumer_seq": consumer.deliveries},
                "ts": asked.isoformat(),
            }
        )

    # what captures do

    def origin(self, capture: Capture) -> Origin:
        sample = None
        if self.stream.messages:
            last = len(self.stream.messages)
            sample = Sample(last, self.micros(self.stream.messages[-1][1]), self.stream.created)
        return Origin(capture.first_created, sample)

    def start(self, capture: Capture) -> None:
        """A replica starts. It mostly knows the stream by the archive, else by its present creation time."""
        consumer = capture.consumer
        assert consumer is not None
        if not capture.first_created:
            known = self.chance.random() < 0.7
            capture.first_created = min(self.stream.known) if known else self.stream.created
        observer = Observer("S", capture.name)
        state = self.state(consumer)
        observer.began(state)
        capture.observers = [*(other for other in capture.observers[-2:] if other.seen), observer]
        self.write(capture, observer)
        consumer.begun = True

    def write(self, capture: Capture, observer: Observer, fate: float = 1.0) -> None:
        """Write a replica's watermark, unless the store is not available, or does not answer for now."""
        consumer = capture.consumer
        assert consumer is not None
        if any(observer is other for other, *_ in capture.asleep):
            return
        state = self.state(consumer)
        mark = observer.watermark(state, self.origin(capture))
        assert mark is not None
        consumer.seen = True
        if fate < 0.15:
            return
        capture.asleep.append((observer, mark, [*observer.seen, state]))
        if fate > 0.3:
            self.wake(capture, -1)

    def wake(self, capture: Capture, index: int) -> None:
        observer, mark, states = capture.asleep.pop(index)
        move_watermark(self.store, mark, states, timedelta(minutes=self.chance.choice((0, 1))))
        observer.recorded()

    def remove(self, capture: Capture) -> None:
        """A capture is removed for good, and its file with the command that is printed."""
        self.delete(capture)
        capture.ever = set()
        command = shlex.split(removal_of(str(self.root), {}, path("S", capture.name)))
        if (self.root / path("S", capture.name)).exists():
            subprocess.run(command, check=True)

    def step(self) -> None:
        self.later()
        capture, chance = self.chance.choice(self.captures), self.chance.random()
        consumer = capture.consumer
        if chance < 0.02:
            self.recreate()
        elif chance < 0.04 and self.stream.messages:
            self.move_stream()
        elif chance < 0.2:
            self.publish()
        elif consumer is None:
            if chance < 0.7:
                self.create(capture)
        elif chance < 0.22:
            self.remove(capture)
        elif chance < 0.25:
            self.delete(capture)
        elif chance < 0.27 and consumer.deliveries:
            consumer.created = self.text()
        elif not capture.observers or chance < 0.3:
            self.start(capture)
        elif chance < 0.35 and consumer.seen:
            consumer.seen = False
            consumer.filters = self.chance.choice(FILTERS)
        elif chance < 0.4:
            self.search(consumer)
        elif chance < 0.62:
            self.deliver(capture)
        elif chance < 0.78:
            self.store_and_ack(capture, self.chance.choice((0.3, 1)))
        elif chance < 0.84 and capture.asleep:
            self.wake(capture, 0)
        else:
            self.write(capture, self.chance.choice(capture.observers), self.chance.random())

    # what must hold

    def check(self) -> None:
        mark = ArchiveFiles(str(self.root), {}).watermark("S", future=True)
        messages, stored = self.stream.messages, self.stream.stored
        for capture in self.captures:
            self.check_file(capture)
        if mark is None:
            return
        until = int((mark.time - BASE) / timedelta(microseconds=1))
        passed = mark.seq if mark.created in self.stream.known else 0
        for capture in self.captures:
            consumer = capture.consumer
            if consumer is None or not consumer.begun:
                self.check_stopped(capture, passed)
                continue
            for seq, (subject, time) in enumerate(messages, 1):
                owed = seq in consumer.unacked or (seq >= consumer.at and matches(consumer.filters, subject))
                if owed and seq not in stored:
                    assert seq > passed, (capture.name, seq, passed)
                    # until a replica has seen a change of filters, nobody knows that it selects earlier messages
                    known = self.fields(capture)["filters"][-1]["subjects"] == sorted(consumer.filters)
                    assert time > until or not known, (capture.name, seq, time, until)
        if passed:
            self.check_live(mark.filters, passed)

    def check_stopped(self, capture: Capture, passed: int) -> None:
        """Readers wait where a capture has stopped: at the beginning, if the stream was created again since."""
        if not (fields := self.fields(capture)):
            return
        position = fields["seq"] if fields["stream_created"] in self.stream.known else 0
        for seq, (subject, _) in enumerate(self.stream.messages, 1):
            if seq > position and matches(fields["filters"][-1]["subjects"], subject) and seq not in self.stream.stored:
                assert seq > passed, (capture.name, seq, passed)

    def check_live(self, filters: Any, passed: int) -> None:
        """Beyond the watermark, its filters select all that captures are going to deliver."""
        for capture in self.captures:
            consumer = capture.consumer
            if consumer is None or not consumer.begun:
                continue
            recorded = self.fields(capture)["filters"]
            if recorded[-1]["subjects"] != sorted(consumer.filters):
                continue  # the change is not recorded yet
            for seq in range(max(passed, recorded[0]["after"]) + 1, len(self.stream.messages) + 1):
                subject = self.stream.messages[seq - 1][0]
                coming = seq in capture.ever or (seq >= consumer.at and matches(consumer.filters, subject))
                there = [subjects for after, subjects in filters if after < seq][-1]
                assert not coming or matches(there, subject), (capture.name, seq, subject, filters)

    def fields(self, capture: Capture) -> dict[str, Any]:
        file = self.root / path("S", capture.name)
        fields: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return fields

    def check_file(self, capture: Capture) -> None:
        """What its filters selected by the file is stored, but for doubtful messages; and the other way round."""
        fields = self.fields(capture)
        if fields.get("stream_created") not in self.stream.known:
            return
        filters = fields["filters"]
        for seq in range(filters[0]["after"] + 1, min(fields["seq"], len(self.stream.messages)) + 1):
            ranges = [entry["doubtful"] for entry in filters if "doubtful" in entry]
            if any(first <= seq and (last is None or seq <= last) for first, last in ranges):
                continue
            entry = [entry for entry in filters if entry["after"] < seq][-1]
            selected = matches(entry["subjects"], self.stream.messages[seq - 1][0])
            assert not selected or seq in self.stream.stored, (capture.name, seq, filters)
            assert selected or seq not in capture.ever, (capture.name, seq, filters)

    def finish(self) -> None:
        """In the end, everything is stored, and the watermark has got as far as the captures that are left."""
        for capture in self.captures:
            if capture.consumer is None:
                self.remove(capture)
            elif not capture.observers:
                self.start(capture)
        for _ in range(2):
            self.later()
            self.stream.messages += [(subject, self.now) for subject in ("o.a", "o.b", "o.c")]
            self.now += 10_000_000
            for capture in self.captures:
                if (consumer := capture.consumer) is None:
                    continue
                while self.next_match(consumer) is not None:
                    self.deliver(capture)
                while consumer.unacked:
                    self.store_and_ack(capture, 1)
                while capture.asleep:
                    self.wake(capture, 0)
            self.now += 200_000_000  # so that the time has passed a minute
            for capture in self.captures:
                for observer in capture.observers:
                    self.write(capture, observer)
            self.check()
        left = [capture for capture in self.captures if capture.consumer is not None]
        mark = ArchiveFiles(str(self.root), {}).watermark("S", future=True)
        if not left:
            assert mark is None
            return
        assert mark is not None
        assert mark.created in self.stream.known
        assert mark.seq >= min(capture.consumer.acked for capture in left if capture.consumer is not None)
        assert mark.time >= BASE + timedelta(microseconds=self.stream.messages[-1][1])
        for capture in left:
            doubts = [entry["doubtful"] for entry in self.fields(capture)["filters"] if "doubtful" in entry]
            assert all(last is not None for _, last in doubts)


@pytest.mark.parametrize(
    "seeds", [range(QUICK), *(pytest.param(range(n, n + 25), marks=pytest.mark.exhaustive) for n in range(25, 300, 25))]
)
def test_no_reader_passes_over_what_a_capture_owes(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        world = World(tmp_path / str(seed), seed)
        for _ in range(STEPS):
            world.step()
            world.check()
        world.finish()
