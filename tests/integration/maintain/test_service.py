"""`jetcapture maintain --every` as a process: passes, what it tells over HTTP, signals, and kills at any moment."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.maintain.test_commands import capture, fill, seqs
from tests.support.archives import Archive
from tests.support.commands import jetcapture
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.running import Command, consumer, objects, publish, settings

TIMEOUT = 240.0


@contextmanager
def service(*words: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jetcapture_py", "maintain", *map(str, words)], stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def samples(port: int) -> dict[tuple[str, str], float]:
    text = ask(port, "/metrics")[1]
    return {
        (sample.name, sample.labels["capture"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "capture" in sample.labels
    }


def until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_passes_leave_what_they_replaced_to_a_later_one_and_tell_how_it_goes(tmp_path: Path) -> None:
    archive, captures, port = Archive(tmp_path / "archive"), tmp_path / "captures", free_port()
    fill(archive)
    before = seqs(archive.root)
    capture(captures, "ORDERS", archive.root, {"after": "0s", "grace": "3s"})
    log = tmp_path / "log"
    with service(captures, "--every", "200ms", "--http", f"127.0.0.1:{port}", log=log) as process:
        until(lambda: len(objects(archive.root)) == 15 + 3, "new objects beside those that they replace")
        assert seqs(archive.root) == before
        until(lambda: len(objects(archive.root)) == 3, "a later pass removes them")
        until(lambda: samples(port).get(("jetcapture_maintain_removed_objects_total", "orders")) == 15, "counted")
        found = samples(port)
        assert found["jetcapture_maintain_objects_after", "orders"] == 3
        assert found["jetcapture_maintain_failing", "orders"] == 0
        assert found["jetcapture_maintain_waiting_objects", "orders"] == 0
        assert found["jetcapture_maintain_last_pass_timestamp_seconds", "orders"] > time.time() - TIMEOUT
        assert "Healthy: 1 archive" in ask(port, "/")[1]
        assert json.loads(ask(port, "/status.json")[1])["archives"][0]["capture"] == "orders"
        assert ask(port, "/nothing")[0] == 404
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "_watermark" / "EVENTS").mkdir(parents=True)
        (broken / "_watermark" / "EVENTS" / "archive.json").write_text("{")
        capture(captures, "EVENTS", broken)  # the files are read again before each pass
        until(lambda: ask(port, "/readyz")[0] == 503, "not ready")
        assert ask(port, "/readyz")[1].startswith("events: the last pass failed: ")
        assert "Failing: 1 of 2 archives" in ask(port, "/snapshot")[1]
        assert ask(port, "/livez") == (200, "alive\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    events = Counter(json.loads(line)["event"] for line in log.read_text().splitlines())
    assert events["maintain.started"] == events["maintain.stopping"] == 1
    assert events["maintain.failed"] >= 1
    assert seqs(archive.root) == before


@pytest.mark.exhaustive
def test_fifty_devices_end_as_one_object_each_and_bucket_after_passes_beside_the_capture(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    """A limit seals blocks all the time, as with the defaults at higher rates."""
    server, archive = nats_server(), tmp_path / "archive"
    sections: dict[str, Any] = {
        "source": {"max_ack_pending": 500},
        "key": "{subject[1]}",
        "block": {"interval": "4s"},
        "maintain": {"compact": {"after": "0s", "grace": "1s"}},
    }
    configuration = settings(server.url, archive, **sections)
    with Command(tmp_path, configuration) as replica:
        asyncio.run(publish(server.url, []))
        replica.start()
        with service(replica.path, "--every", "500ms", log=tmp_path / "maintain.log") as process:
            for _ in range(4):
                batch = [(f"orders.device{number % 50}", b"%d" % number, None) for number in range(1500)]
                wanted = asyncio.run(publish(server.url, batch)) - 500
                until(lambda: objects(archive), "the consumer is there")
                until(lambda: asyncio.run(consumer(server.url)).ack_floor.stream_seq >= wanted, "captured")  # noqa: B023
            removed = re.compile(r'"removed": [1-9]')
            until(lambda: removed.search((tmp_path / "maintain.log").read_text()), "a pass beside the capture")
            replica.drain()
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
    before = objects(archive)
    until(lambda: time.time() > 4 + max(name.bucket for name in before), "the last bucket has ended")
    assert jetcapture("compact", replica.path, "--incomplete", "--grace", "0s").returncode == 0
    found = objects(archive)
    assert len({name.group for name in found}) == len(found)
    assert sum(name.rows for name in found) == 6_000
