"""Random histories of a stream and its archive, while a query of the source `jetcapture` stops and goes on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nats.js import JetStreamContext

from jetcapture_py.archive import layout
from jetcapture_py.capture import watermark
from jetcapture_py.errors import SourceError
from jetcapture_py.maintain.compact import CompactionSettings
from tests.integration.spark.live import Captured, Live
from tests.integration.spark.live import CombinedQuery as Query
from tests.support.archives import merge
from tests.support.maintaining import Maintenance
from tests.support.nats_server import NatsServer
from tests.support.restores import main as restore
from tests.support.running import CONSUMER, STREAM, objects

HISTORIES = int(os.environ.get("JETCAPTURE_TEST_HISTORIES", "3"))
STEPS = 16
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, HISTORIES))]
FILTERS: Sequence[tuple[str, ...]] = ((), (), ("orders.0.*",), ("orders.0.*", "orders.1.*"), ("orders.*.1",))


class Sent(NamedTuple):
    """A message: its sequence, and a number that no other one of the history has, of any incarnation."""

    seq: int
    number: int
    subject: str


class History:
    """A stream and what must be read of it: a plain list of the messages that the capture selects."""

    def __init__(self, live: Live, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.captured = Captured(live, root, {"key": self.chance.choice(["{subject}", "{subject[1]}", ""])})
        self.captured.sections["decode"] = {"format": "json"}
        self.interval = self.chance.choice(["1s", "1s", "1m", "1h"])  # copies under another one take dedupe="full"
        self.watched = self.chance.choice([True, True, False])
        self.last = self.archived = self.numbers = 0
        self.filters: tuple[str, ...] = ()
        self.expected: list[Sent] = []
        self.optional: set[int] = set()
        """Numbers of messages of which nobody can say whether they are read."""
        self.passed_over: list[Sent] = []
        """What was not selected, after the last message that was."""
        self.query: Query | None = None
        self.end: dict[str, Any] | None = None
        self.recreated = False
        """Whether the stream was created again since the query read."""
        self.found: list[tuple[int, int]] = []
        self.told: list[str] = []

    def publish(self) -> None:
        drifting = self.chance.choice(["{}", '"{}"'])
        messages = []
        for _ in range(self.chance.randrange(1, 30)):
            self.last += 1
            self.numbers += 1
            sent = Sent(self.last, self.numbers, f"orders.{self.last % 3}.{self.numbers % 2}")
            payload = f'{{"n": {drifting.format(self.last)}, "number": {self.numbers}}}'
            messages.append((sent.subject, payload.encode()))
            if _selected(sent.subject, self.filters):
                self.expected.append(sent)
                self.passed_over.clear()
            else:
                self.passed_over.append(sent)
        self.captured.live.send(messages)

    def expire_in_stream(self) -> None:
        """Remove from the stream what is archived."""
        if self.archived:
            self.captured.live.purge(seq=self.chance.randrange(1, self.archived + 1) + 1)

    def recreate(self) -> None:
        """Delete the stream, and create an empty one of the same name."""
        self.compare(self.expected[: self._read_to()])
        self.captured.live.recreate()
        self.last = self.archived = 0
        self.expected, self.found, self.passed_over = [], [], []
        self.recreated = self.end is not None

    def restore(self) -> None:
        """Delete the stream, and create it from the archive, up to what was read or later: a fork."""
        if not self.archived or self.end is None or self.recreated:
            return
        read_to = max(1, self.end["seq"] - 1)
        to = self.chance.randrange(min(read_to, self.archived), self.archived + 1)
        if self.end.get("message", [0])[0] > to:  # without the message that the query knows, the stream is another one
            return
        there = self._numbers_in_archive()
        left = [sent for sent in self.expected if sent.seq <= to and sent.number in there]
        if not left or left[-1].seq < read_to:  # it would end before what was read
            return
        where = [f"file://{self.captured.root}", STREAM, "--servers", self.captured.live.server.url]
        part = ["--to-seq", str(to), "--allow-holes"]
        with redirect_stdout(StringIO()) as plan:
            refused = restore([*where, *part, "--as", "COPY", "--dry-run"])
        print(plan.getvalue())
        # what is left of the newest incarnation is none of its own messages, or does not reach `to`
        if refused or " at the end: " in plan.getvalue():
            return
        self.captured.live.do(lambda stream: stream.delete_stream(STREAM))
        assert restore([*where, *part, "--as", STREAM]) == 0
        self.last = self.archived = left[-1].seq
        read = {number for _, number in self.found}
        self.expected = [sent for sent in self.expected if sent.seq <= to and sent.number in there | read]
        self.passed_over = []
        self.capture()  # which notes that there is one more incarnation

    def capture(self) -> None:
        bundles = self.chance.choice([0, 0, 3])
        self.captured.sections["block"] = {"interval": self.interval, "bundles": bundles, "max_messages": 7}
        self.captured.sections["source"] = {"filter_subjects": list(self.filters)}
        self.captured.capture()
        self.archived = self.last

    def select(self) -> None:
        """Let the capture select other subjects from now on."""
        self.capture()
        self.filters = self.chance.choice(FILTERS)
        # the server does not tell whether it has searched these already
        unsure = [sent for sent in self.passed_over if _selected(sent.subject, self.filters)]
        self.optional |= {sent.number for sent in unsure}
        self.expected += unsure
        self.passed_over = []
        self.captured.live.do(self._update_consumer)
        self.capture()

    async def _update_consumer(self, stream: JetStreamContext) -> None:
        config = (await stream.consumer_info(STREAM, CONSUMER)).config
        config.filter_subject, config.filter_subjects = None, list(self.filters) or None
        await stream.add_consumer(STREAM, config)

    def merge(self) -> None:
        """Merge some objects of a key and bucket, and leave some of the sources, as a compaction that was killed."""
        root, present = self.captured.root, objects(self.captured.root)
        groups = {name.group: [other for other in present if other.group == name.group] for name in present}
        several = [group for group in groups.values() if len(group) > 1]
        if not several:
            return
        names = self.chance.choice(several)
        with suppress(pa.ArrowInvalid):  # of columns that have drifted: this merge takes equal ones only
            merged = merge(root, names, keep=True)
            for name in names if self.chance.random() < 0.5 else ():
                if root / name.path != merged:
                    (root / name.path).unlink()

    def compact(self) -> None:
        target = self.chance.choice([4 << 10, 1 << 20])
        compact = CompactionSettings(target=target, after=0, grace=0, incomplete=True)
        if objects(self.captured.root):
            before = self._numbers_in_archive()
            assert not Maintenance(self.captured.config, compact=compact).run().errors
            assert self._numbers_in_archive() == before

    def expire(self) -> None:
        """Remove old buckets from the archive, as `maintain.keep` does."""
        before = self._numbers_in_archive()
        if not before:
            return
        self.captured.sections["maintain"] = {"keep": "1s", "compact": self.chance.choice([None, {"after": "0s"}])}
        assert not Maintenance(self.captured.config).run().errors
        del self.captured.sections["maintain"]
        gone = before - self._numbers_in_archive()
        read = {number for _, number in self.found}
        self.expected = [sent for sent in self.expected if sent.number in read or sent.number not in gone]

    def _numbers_in_archive(self) -> set[int]:
        found: set[int] = set()
        for name in objects(self.captured.root):
            payloads = pq.ParquetFile(self.captured.root / name.path).read([layout.PAYLOAD])[layout.PAYLOAD]
            found |= {json.loads(payload)["number"] for payload in payloads.to_pylist()}
        return found

    def read(self) -> None:
        """Some batches of the query, which may have been stopped before, at a batch that was planned and never read."""
        if not self.archived or not objects(self.captured.root):
            return
        query = self._restart(self.end) if self.query is None or self.chance.random() < 0.5 else self.query
        if self.recreated and self.watched:
            with pytest.raises(SourceError, match="was deleted and created again"):
                query.plan()
            query = self._restart(None)
        self.recreated = False
        for _ in range(self.chance.randrange(1, 4)):
            if not query.plan():
                break
            self._meanwhile()
            rows = [(seq, int(json.loads(payload)["number"])) for seq, payload in query.rows()]
            assert not self.found or not rows or rows[0][0] > self.found[-1][0]
            self.found += rows
            self.end = query.end

    def _restart(self, end: dict[str, Any] | None) -> Query:
        """Start the query, again if it runs, from a checkpoint with `end`."""
        self.stop()
        limit = str(self.chance.randrange(1, 40))
        options = self.chance.choice([{}, {"maxOffsetsPerTrigger": limit}, {"maxBytesPerTrigger": "2KiB"}])
        options["failOnDataLoss"] = str(self.watched).lower()
        self.query = Query(self.captured, end, **options)
        return self.query

    def stop(self) -> None:
        if self.query is not None:
            self.query.reader.stop()

    def _meanwhile(self) -> None:
        """Do one or two things between the plan of a batch and its reading."""
        while self.chance.random() < 0.4:
            step = self.chance.choice([self.capture, self.expire_in_stream, self.merge, self.compact, self.expire])
            before = list(self.expected)
            self.told.append(f"meanwhile {step.__name__}")
            step()
            self.optional |= {sent.number for sent in before} - {sent.number for sent in self.expected}
            self.expected = before

    def _read_to(self) -> int:
        """How many of the expected messages the query has passed."""
        seq = 0 if self.end is None or self.recreated else int(self.end["seq"])
        return sum(sent.seq < seq for sent in self.expected)

    def compare(self, expected: Sequence[Sent]) -> None:
        """Compare what was read."""
        wanted = [(sent.seq, sent.number) for sent in expected if sent.number not in self.optional]
        assert [row for row in self.found if row[1] not in self.optional] == wanted

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self.publish, self.publish, self.capture, self.merge, self.expire_in_stream]
        steps += [self.read, self.read, self.restore, self.compact, self.expire, self.select]
        steps += [self.recreate] if self.chance.random() < 0.5 else []
        self.publish()
        try:
            for _ in range(STEPS):
                step = self.chance.choice(steps)
                self.told.append(f"next {step.__name__}")
                step()
                self.told.append(f"published {self.last}, archived {self.archived}, {self.filters}, {self.end}")
            self.capture()
            before: Any = ...
            while self.end != before:
                before = self.end
                self.read()
            self.compare(self.expected)
        except BaseException:
            print(*self.told, sep="\n")  # in the report of a failure
            raise


def _selected(subject: str, filters: Sequence[str]) -> bool:
    parts = subject.split(".")
    matches = (all(own in ("*", part) for own, part in zip(each.split("."), parts, strict=True)) for each in filters)
    return not filters or any(matches)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_is_read_once_and_in_order(
    nats_server: Callable[..., NatsServer], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermark, "MARGIN", timedelta())  # nobody waits until a time is certain
    history = History(Live(nats_server()), tmp_path / "archive", seed)
    history.run()
    history.stop()
