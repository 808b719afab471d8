"""The commands `maintain` and `compact` on real archives: what they do, print, return, and tell as a service."""

from __future__ import annotations

import json
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

from prometheus_client.parser import text_string_to_metric_families

from jetcapture_py import read_archive
from tests.support.archives import Archive
from tests.support.commands import jetcapture
from tests.support.ports import free_port
from tests.support.running import objects
from tests.support.several import of_stream, write

NOWHERE = "nats://127.0.0.1:1"
"""No server is needed."""


def capture(directory: Path, stream: str, archive: Path, grace: str = "0s", **sections: Any) -> Path:
    maintain = {"compact": {"after": "0s", "grace": grace}}
    return write(directory, stream.lower(), of_stream(NOWHERE, stream, archive, maintain=maintain, **sections))


def fill(archive: Archive, stream: str = "ORDERS") -> None:
    """Twelve small objects of two keys, an overlap among them, and two of the quarantine."""
    for key in "ab":
        first = 1 + 100 * "ab".index(key)
        for number in range(6):
            archive.write(range(first + 10 * number, first + 10 * number + 10), key, stream=stream)
    archive.write(range(35, 55), "a", stream=stream)
    archive.write([301], None, stream=stream, quarantine=True)
    archive.write([302], None, stream=stream, quarantine=True)


def seqs(root: Path, stream: str = "ORDERS") -> list[int]:
    return sorted(read_archive(str(root), stream).read_all()["_nats_seq"].to_pylist())


def test_a_pass_merges_messages_and_quarantine_of_every_file_and_a_second_one_finds_nothing(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    fill(archive)
    fill(archive, "EVENTS")
    before = seqs(archive.root)
    for stream in ("ORDERS", "EVENTS"):
        capture(tmp_path / "captures", stream, archive.root)
    planned = jetcapture("maintain", tmp_path / "captures", "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    plans = [json.loads(line) for line in planned.stdout.splitlines()]
    assert [plan["capture"] for plan in plans] == ["events", "orders"]
    assert [sum(unit["objects"] for unit in plan["compacted"]["messages"]["planned"]) for plan in plans] == [13, 13]
    assert len(objects(archive.root)) == 30
    done = jetcapture("maintain", tmp_path / "captures")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(", ")[0] for line in lines] == ["events  13 objects", "orders  13 objects"]
    assert all("; quarantine: 2 objects, " in line for line in lines)
    assert "20 duplicate rows removed; quarantine" in lines[1]
    assert len(objects(archive.root)) == 6
    assert seqs(archive.root) == seqs(archive.root, "EVENTS") == before
    again = jetcapture("maintain", tmp_path / "captures", "--json")
    assert [json.loads(line)["compacted"]["messages"]["changes"] for line in again.stdout.splitlines()] == [[], []]


def test_compact_needs_no_section_takes_options_and_limits_itself_to_keys(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    fill(archive)
    path = write(tmp_path / "captures", "orders", of_stream(NOWHERE, "ORDERS", archive.root))
    refused = jetcapture("maintain", path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("jetcapture: maintain: required by `jetcapture maintain`")
    done = jetcapture("compact", path, "--key", "b", "--grace", "0s", "--after", "1h")
    assert (done.returncode, done.stderr) == (0, "")
    assert [name.key for name in objects(archive.root) if not name.quarantine].count("b") == 1
    assert len(objects(archive.root)) == 10
    wrong = jetcapture("compact", path, "--target", "big")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.startswith("jetcapture: --target: expected a size such as 128MiB")


def test_a_capture_whose_archive_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    fill(archive)
    fill(archive, "EVENTS")
    break_watermark(archive.root, "EVENTS")
    for stream in ("ORDERS", "EVENTS"):
        capture(tmp_path / "captures", stream, archive.root)
    done = jetcapture("maintain", tmp_path / "captures")
    assert done.returncode == 1
    assert done.stdout.startswith("events  failed: _watermark/EVENTS/archive.json is damaged: ")
    assert (done.stdout.count("\n"), done.stderr) == (2, "")
    assert len(objects(archive.root)) == 15 + 3


def break_watermark(root: Path, stream: str, text: str = "{") -> None:
    (root / "_watermark" / stream).mkdir(parents=True)
    (root / "_watermark" / stream / "archive.json").write_text(text)


# ------------------------------------------------------------------ as a service


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


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_passes_leave_what_they_replaced_to_a_later_one_and_tell_how_it_goes(tmp_path: Path) -> None:
    archive, captures, port = Archive(tmp_path / "archive"), tmp_path / "captures", free_port()
    fill(archive)
    before = seqs(archive.root)
    capture(captures, "ORDERS", archive.root, "3s")
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
        break_watermark(tmp_path / "broken", "EVENTS")
        capture(captures, "EVENTS", tmp_path / "broken")  # the files are read again before each pass
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
