"""Random histories of a stream and its archive, while a query of the source `jetcapture` stops and goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from spark_jobs.restore import main as restore
from tests.integration.spark.live import Live
from tests.integration.spark.reading.test_combined import Query
from tests.integration.spark.reading.test_read_stream import Captured
from tests.support.archives import merge
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, objects, settings

HISTORIES = int(os.environ.get("JETCAPTURE_TEST_HISTORIES", "3"))
STEPS = 14
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, HISTORIES))]


class History:
    """A stream and what must be read of it: a plain list of the messages that the capture selects."""

    def __init__(self, live: Live, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.captured = Captured(live, root, {"key": self.chance.choice(["{subject}", "{subject[1]}", ""])})
        self.captured.sections["decode"] = {"format": "json"}
        self.interval = self.chance.choice(["1s", "1m", "1h"])  # copies under another one take dedupe="full"
        self.last = self.archived = 0
        self.expected: list[int] = []
        self.end: dict[str, Any] | None = None
        self.found: list[int] = []
        self.told: list[str] = []

    def publish(self) -> None:
        count = self.chance.randrange(1, 30)
        drifting = self.chance.choice(["{}", '"{}"'])
        values = (self.last + 1 + number for number in range(count))
        payloads = [(value, f'{{"n": {drifting.format(value)}}}'.encode()) for value in values]
        self.captured.live.send([(f"orders.{value % 3}.{value % 2}", payload) for value, payload in payloads])
        self.expected += [value for value, _ in payloads]
        self.last += count

    def capture(self) -> None:
        bundles = self.chance.choice([0, 0, 3])
        self.captured.sections["block"] = {"interval": self.interval, "bundles": bundles, "max_messages": 7}
        self.captured.capture()
        self.archived = self.last

    def compact(self) -> None:
        """Merge some objects of a key and bucket, and leave some of the sources."""
        by_group: dict[Any, list[Any]] = {}
        for name in objects(self.captured.root):
            by_group.setdefault(name.group, []).append(name)
        several = [names for names in by_group.values() if len(names) > 1]
        if not several:
            return
        root, names = self.captured.root, self.chance.choice(several)
        with suppress(pa.ArrowInvalid):  # of columns that have drifted: this merge takes equal ones only
            merged = merge(root, names, keep=True)
            for name in names if self.chance.random() < 0.5 else ():
                if root / name.path != merged:
                    (root / name.path).unlink()

    def expire(self) -> None:
        """Remove from the stream what is archived."""
        if self.archived:
            self.captured.live.purge(seq=self.chance.randrange(1, self.archived + 1) + 1)

    def restore(self) -> None:
        """Delete the stream, and create it from the archive, up to what was read or later: a fork."""
        if not self.archived or self.end is None:
            return
        read_to = max([*self.found, 1])
        to = self.chance.randrange(min(read_to, self.archived), self.archived + 1)
        if read_to > to:
            return
        servers = ["--servers", self.captured.live.server.url]
        arguments = [f"file://{self.captured.root}", STREAM, "--as", "COPY", "--to-seq", str(to), *servers]
        if restore([*arguments, "--dry-run"]):  # what is left of the newest incarnation is none of its own messages
            return
        self.captured.live.do(lambda stream: stream.delete_stream(STREAM))
        assert restore([STREAM if argument == "COPY" else argument for argument in arguments]) == 0
        self.last = self.archived = to
        self.expected = [value for value in self.expected if value <= to]
        self.capture()  # which notes that there is one more incarnation

    def config(self) -> str:
        path = self.captured.root.parent / "capture.yaml"
        path.write_text(
            yaml.safe_dump(settings(self.captured.live.server.url, self.captured.root, **self.captured.sections))
        )
        return str(path)

    def read(self) -> None:
        """Some batches of the query, which then stops; the last one may be planned and never read."""
        if not self.archived:
            return
        limit = str(self.chance.randrange(1, 40))
        options = self.chance.choice([{}, {"maxOffsetsPerTrigger": limit}, {"maxBytesPerTrigger": "2KiB"}])
        query = Query(self.captured, self.end, config=self.config(), **options)
        for _ in range(self.chance.randrange(1, 4)):
            if not query.plan():
                break
            if self.chance.random() < 0.3:
                self.chance.choice([self.capture, self.expire, self.compact])()
            rows = query.run()
            assert not self.found or not rows or rows[0] > self.found[-1]
            self.found += rows
            self.end = query.end
        query.reader.stop()

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self.publish, self.publish, self.capture, self.compact, self.expire]
        steps += [self.read, self.read, self.restore]
        self.publish()
        for _ in range(STEPS):
            step = self.chance.choice(steps)
            self.told.append(f"next {step.__name__}")
            step()
            self.told.append(f"{step.__name__}: published {self.last}, archived {self.archived}, {self.end}")
        self.capture()
        while True:
            before = len(self.found)
            self.read()
            if len(self.found) == before:
                break
        print(*self.told, sep="\n")  # in the report of a failure
        assert self.found == self.expected


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_is_read_once_and_in_order(
    nats_server: Callable[..., NatsServer], tmp_path: Path, seed: int
) -> None:
    History(Live(nats_server()), tmp_path / "archive", seed).run()
