"""What a restore refuses, in one line, before it creates anything; and that a restore which fails leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.restore import StreamRestore
from jetcapture_py.restoring import command, plan, send
from jetcapture_py.restoring.command import PreparedRestore, prepare, restore
from tests.support.archives import HOUR, Archive, write_parquet
from tests.support.nats_server import NatsServer, older_servers
from tests.support.restores import api, main, next_sequence, opened, request, state_of

Start = Callable[..., NatsServer]
CREATED = "2026-05-01T00:00:00.123456789Z"
CONFIG: dict[str, Any] = {"name": "ORDERS", "subjects": ["orders.>"], "storage": "file"}


@pytest.fixture
def kept(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "archive")
    archive.write(list(range(1, 11)), created=CREATED)
    keep(archive, CONFIG)
    return archive


def keep(archive: Archive, config: dict[str, Any]) -> None:
    path = archive.root / stream_config.path("ORDERS", CREATED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(StreamConfig(stream="ORDERS", created=CREATED, config=config).encode())


def restored(archive: Archive, url: str, *options: str) -> None:
    assert main([archive.url, "ORDERS", "--servers", url, *options]) == 0


def error(capfd: pytest.CaptureFixture[str], archive: Archive, url: str, *options: str) -> str:
    """The line with which a restore fails."""
    capfd.readouterr()
    assert main([archive.url, "ORDERS", "--servers", url, *options]) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "creating stream" not in line]
    assert len(lines) == 1, lines
    return lines[0].removeprefix("jetcapture: ")


async def streams(url: str) -> list[str]:
    async with opened(url) as client:
        return [each["config"]["name"] for each in (await api(client, "STREAM.LIST"))["streams"] or ()]


async def create(url: str, config: dict[str, Any]) -> None:
    async with opened(url) as client:
        await api(client, f"STREAM.CREATE.{config['name']}", config)


async def delete(url: str, stream: str) -> None:
    async with opened(url) as client:
        await api(client, f"STREAM.DELETE.{stream}")


def test_an_archive_without_the_configuration_needs_a_file(
    nats_server: Start, kept: Archive, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, file = nats_server().url, tmp_path / "stream.yaml"
    next((kept.root / "_streams").rglob("*.json")).unlink()
    assert error(capfd, kept, url).endswith("of stream ORDERS: name a file with --stream-config")
    file.write_text("stream: {name: ORDERS, subjects: ['orders.>'], max_msgs: unlimited, description: again}\n")
    restored(kept, url, "--stream-config", str(file))
    assert asyncio.run(state_of(url, "ORDERS"))["messages"] == 10


def test_a_stream_that_exists_is_left_as_it_is(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    url = nats_server().url
    asyncio.run(create(url, CONFIG))
    exists = "stream ORDERS already exists: restore under another name with --as"
    assert error(capfd, kept, url).startswith(exists)
    assert asyncio.run(state_of(url, "ORDERS"))["messages"] == 0
    overlap = error(capfd, kept, url, "--as", "COPY")
    assert "stream COPY: " in overlap
    assert "subjects overlap with an existing stream" in overlap
    assert asyncio.run(streams(url)) == ["ORDERS"]
    restored(kept, url, "--as", "COPY", "--subject-prefix", "copy")
    assert asyncio.run(state_of(url, "COPY"))["messages"] == 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "command"), list(older_servers())[-1:])
def test_an_older_server_is_named(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str], version: str, command: str
) -> None:
    server = nats_server(command=command)
    assert error(capfd, kept, server.url).startswith(
        f"the server is nats-server {version}: an exact restore needs 2.15 or later; jetcapture spark replay publishes"
    )


def test_a_range_that_the_archive_does_not_have_as_a_whole_has_holes(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    url, options = nats_server().url, ["--from-seq", "15", "--to-seq", "100"]
    kept.write(list(range(20, 23)), created=CREATED)
    assert main([kept.url, "ORDERS", "--dry-run", *options]) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("missing: ")] == [
        "missing: 5 sequences at the beginning: 15 to 19; the stream begins later",
        "missing: 78 sequences at the end: 23 to 100; the next message gets sequence 23",
    ]
    assert error(capfd, kept, url, *options).startswith(
        "the archive of stream ORDERS lacks 5 sequences at the beginning: 15 to 19; 78 sequences at the end: 23 to 100."
    )
    restored(kept, url, "--allow-holes", *options)
    state = asyncio.run(state_of(url, "ORDERS"))
    assert (state["first_seq"], state["last_seq"]) == (20, 22)
    until = prepare(request(kept.url, first=20, last=100, until=1 << 62))
    assert not until.survey.absent, "a time was the bound"


def test_a_range_that_the_latest_incarnation_lacks_is_not_taken_from_an_earlier_one(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    url, anew = nats_server().url, "2026-05-02T00:00:00Z"
    kept.write([1, 2], bucket=HOUR + 86_400, created=anew)
    assert error(capfd, kept, url, "--from-seq", "5") == (
        f"the archive of stream ORDERS has no messages in this range of the incarnation created {anew}; --created "
        f"chooses another, with messages there: {CREATED}"
    )
    assert asyncio.run(streams(url)) == []
    restored(kept, url, "--from-seq", "5", "--created", CREATED[:10])
    assert asyncio.run(state_of(url, "ORDERS"))["messages"] == 6


def test_messages_newer_than_the_requested_time_are_counted(kept: Archive, capfd: pytest.CaptureFixture[str]) -> None:
    kept.write([12], created=CREATED)
    kept.write([11], bucket=HOUR + 900, created=CREATED)  # rewound; the first 11 was never stored
    assert main([kept.url, "ORDERS", "--dry-run", "--to-time", "2026-05-01T12:10:00Z"]) == 0
    assert "1 message with a sequence below 12 and a time after --to-time: " in capfd.readouterr().out


SIZE = 50 + len(b"NATS/1.0\r\nName: value\r\n\r\n")
DROPPED = "stream ORDERS would drop messages: it keeps"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_age": 3_600_000_000_000}, "", rf"{DROPPED} messages for 1h \(max_age\), but the oldest is of 2026-05-01T12"),
    ({"max_msgs": 9}, "", rf"{DROPPED} 9 messages \(max_msgs\), not 10"),
    ({"max_bytes": 300}, "", rf"{DROPPED} 300B \(max_bytes\), not about \d"),
    ({"max_msgs_per_subject": 9}, "", rf"{DROPPED} 9 messages per subject \(max_msgs_per_subject\), not 10"),
    ({"retention": "interest"}, "", rf"{DROPPED} only messages that a consumer waits for \(retention: interest\)"),
    (
        *({"max_msg_size": SIZE - 1}, "--allow-drops"),
        rf"stream ORDERS takes messages of up to {SIZE - 1} bytes .*, but the largest has {SIZE}: .* --without-limits",
    ),
    (
        *({}, "--to-seq 8 --consumer good=8 --consumer late=9"),
        "--consumer late=9: the last restored sequence is 8, and the consumer would skip messages that are published",
    ),
]


def test_what_would_not_be_complete_is_refused_before_anything_is_created(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    url = nats_server().url
    next(kept.root.rglob("*.parquet")).unlink()
    headers = [None] * 9 + [[("Name", ["value"])]]
    kept.write(list(range(1, 11)), created=CREATED, payloads=[b"{}"] * 9 + [b"x" * 50], headers=headers)
    for config, options, message in REFUSED:
        keep(kept, {**CONFIG, **config})
        line = error(capfd, kept, url, *options.split())
        assert re.match(message, line), line
        assert asyncio.run(streams(url)) == []
    keep(kept, {**CONFIG, "max_msgs": 9, "max_age": 3_600_000_000_000, "max_msg_size": 1})
    restored(kept, url, "--without-limits")
    assert asyncio.run(state_of(url, "ORDERS"))["messages"] == 10
    keep(kept, {**CONFIG, "max_msgs": 9, "max_msg_size": SIZE})
    restored(kept, url, "--as", "LESS", "--subject-prefix", "less", "--allow-drops")
    assert asyncio.run(state_of(url, "LESS"))["messages"] == 9
    keep(kept, {**CONFIG, "retention": "interest"})
    restored(kept, url, "--as", "INTEREST", "--subject-prefix", "interest", "--consumer", "reader=4")
    state = asyncio.run(state_of(url, "INTEREST"))
    assert (state["messages"], state["last_seq"]) == (6, 10), "what the consumer has acknowledged is not kept"


# ------------------------------------------------------------------ failures


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    archive = Archive(tmp_path / "large")
    for number in range(40):
        seqs = list(range(number * 1000 + 1, number * 1000 + 1001))
        archive.write(seqs, payloads=[os.urandom(500) for _ in seqs], created=CREATED)
    keep(archive, CONFIG)
    monkeypatch.setattr(plan, "PART_BYTES", 500_000)
    return archive


def fails(prepared: PreparedRestore, server: NatsServer, reason: str) -> str:
    with pytest.raises(JetcaptureError, match=reason) as caught:
        restore(prepared, NatsConfig(servers=(server.url,)))
    return str(caught.value)


def test_a_restore_that_fails_in_the_middle_leaves_no_stream(
    server: NatsServer, large: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, abort = prepare(request(large.url)), StreamRestore.abort
    last = max(large.root.rglob("*.parquet"))
    write_parquet(pq.ParquetFile(last).read().drop_columns([layout.PAYLOAD]), last)
    fails(prepared, server, "was stored again: read it again")
    assert asyncio.run(streams(server.url)) == []
    last.unlink()

    async def terminated(started: StreamRestore) -> str | None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        return await abort(started)

    monkeypatch.setattr(StreamRestore, "abort", terminated)  # signals do not end the removal
    fails(prepared, server, "is gone, removed by maintenance: read it again")
    assert asyncio.run(streams(server.url)) == []


@contextlib.contextmanager
def in_the_middle(action: Callable[[], object]) -> Iterator[None]:
    """Do something after each restore has sent ten ranges."""
    ahead = send.ahead

    def futures(make: Any, ranges: Any) -> Any:
        for number, future in enumerate(ahead(make, ranges)):
            if number == 10:
                with ThreadPoolExecutor() as thread:  # an event loop runs in this one
                    thread.submit(action).result()
            yield future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ahead", futures)
        yield


def test_a_lost_connection_ends_the_restore_and_leaves_no_stream(server: NatsServer, large: Archive) -> None:
    prepared = prepare(request(large.url))

    def restart() -> None:
        server.kill()
        server.start()

    with in_the_middle(restart):
        fails(prepared, server, r"connection was lost|restore was interrupted")
    assert asyncio.run(streams(server.url)) == []


SLOW = """
import sys, time
from jetcapture_py import cli
from jetcapture_py.restoring import command, plan
plan.PART_BYTES = 500_000
make = command.make_part
def slowly(*arguments):
    time.sleep(0.2)
    return make(*arguments)
command.make_part = slowly
cli.main()
"""


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGTERM", 1, "jetcapture: terminated; the incomplete stream ORDERS was removed"),
        pytest.param("SIGINT", 130, "jetcapture: interrupted", marks=pytest.mark.exhaustive),
        pytest.param("SIGKILL", -signal.SIGKILL, "", marks=pytest.mark.exhaustive),
    ],
)
def test_a_restore_that_is_ended_leaves_no_stream_or_says_how_to_remove_it(
    nats_server: Start, large: Archive, capfd: pytest.CaptureFixture[str], name: str, code: int, line: str
) -> None:
    url, deadline = nats_server().url, time.monotonic() + 120
    words = [sys.executable, "-c", SLOW, "restore", large.url, "ORDERS", "--servers", url]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while "ORDERS" not in asyncio.run(streams(url)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.Signals[name])
        _, said = process.communicate(timeout=120)
    first, *others = said.splitlines()
    assert "remove what it has left with: nats stream rm ORDERS" in first
    assert (process.returncode, "".join(others)) == (code, line)
    if line:
        assert asyncio.run(streams(url)) == []
    else:
        assert "nats stream rm ORDERS" in error(capfd, large, url)


@pytest.mark.parametrize("subject", ["other", "orders"])
def test_a_stream_that_somebody_creates_meanwhile_is_left_alone(
    server: NatsServer, kept: Archive, monkeypatch: pytest.MonkeyPatch, subject: str
) -> None:
    prepared, begin = prepare(request(kept.url)), StreamRestore.begin
    taken = "stream ORDERS already exists"

    async def overtaken(started: StreamRestore, *arguments: Any) -> None:
        await begin(started, *arguments)
        await create(server.url, {"name": "ORDERS", "subjects": [f"{subject}.>"]})

    monkeypatch.setattr(StreamRestore, "begin", overtaken)
    fails(prepared, server, taken)
    assert asyncio.run(streams(server.url)) == ["ORDERS"]
    assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 0
    asyncio.run(delete(server.url, "ORDERS"))
    next(kept.root.rglob("*.parquet")).unlink()
    fails(prepared, server, taken if subject == "other" else "is gone")
    assert asyncio.run(next_sequence(server.url, "ORDERS", f"{subject}.one")) == 1


def test_a_stream_that_may_be_somebody_elses_is_left_alone_and_said(server: NatsServer, large: Archive) -> None:
    prepared = prepare(request(large.url))

    def replace() -> None:
        asyncio.run(delete(server.url, "ORDERS"))
        asyncio.run(create(server.url, {"name": "ORDERS", "subjects": ["other.>"]}))
        raise JetcaptureError("this range cannot be read")

    with in_the_middle(replace):
        error = fails(prepared, server, "this range cannot be read")
    assert error.endswith(
        "the incomplete stream ORDERS could not be removed (somebody else has created it, or another server of the "
        "cluster leads it now); if this restore created it, delete it: nats stream rm ORDERS"
    )
    assert asyncio.run(next_sequence(server.url, "ORDERS", "other.one")) == 1
