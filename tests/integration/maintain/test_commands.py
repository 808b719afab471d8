"""The commands `maintain` and `compact` on real archives: what they do, print and return."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from jetcapture_py import read_archive
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.maintain.command import maintain
from tests.support.archives import Archive
from tests.support.commands import jetcapture
from tests.support.running import objects
from tests.support.several import of_stream, write

NOWHERE = "nats://127.0.0.1:1"
"""No server is needed."""


def capture(directory: Path, stream: str, archive: Path, compact: object = "at once", **sections: Any) -> Path:
    if compact == "at once":
        compact = {"after": "0s", "grace": "0s"}
    return write(
        directory, stream.lower(), of_stream(NOWHERE, stream, archive, maintain={"compact": compact}, **sections)
    )


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
    (archive.root / "_watermark" / "EVENTS").mkdir(parents=True)
    (archive.root / "_watermark" / "EVENTS" / "archive.json").write_text("{")
    for stream in ("ORDERS", "EVENTS"):
        capture(tmp_path / "captures", stream, archive.root)
    done = jetcapture("maintain", tmp_path / "captures")
    assert done.returncode == 1
    assert done.stdout.startswith("events  failed: _watermark/EVENTS/archive.json is damaged: ")
    assert (done.stdout.count("\n"), done.stderr) == (2, "")
    assert len(objects(archive.root)) == 15 + 3


def test_a_stream_or_store_without_an_archive_is_an_error(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    fill(archive)
    misspelled = capture(tmp_path / "captures", "ORDRS", archive.root)
    for command in ("maintain", "compact"):
        done = jetcapture(command, misspelled)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"no archive of stream ORDRS under file://{archive.root}; there are: ORDERS" in done.stderr
    (archive.root / "_watermark" / "ORDRS").mkdir(parents=True)
    # a capture has begun, and stored nothing yet
    (archive.root / "_watermark" / "ORDRS" / "archive.json").write_text("{}")
    assert "no archive" not in jetcapture("maintain", misspelled).stderr


def test_the_command_leaves_the_handler_of_interrupts_as_it_was(tmp_path: Path) -> None:
    archive, before = Archive(tmp_path / "archive"), signal.getsignal(signal.SIGINT)
    archive.write(range(1, 3), "a")
    path = capture(tmp_path, "ORDERS", archive.root)
    assert maintain(CaptureFiles([path])) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_bucket_waits_until_it_has_ended_long_enough(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    fill(archive)
    path = capture(tmp_path, "ORDERS", archive.root, {"after": "36500d", "grace": "0s"})
    assert jetcapture("maintain", path).returncode == 0
    assert len(objects(archive.root)) == 15
