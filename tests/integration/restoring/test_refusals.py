"""What a restore refuses, in one line, before it creates anything; and what a restore that fails leaves: nothing."""

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
from jetcapture_py.restoring.command import prepare, restore
from tests.integration.security.test_permissions import EXAMPLE, as_user, listed, without
from tests.integration.verify.test_replicas import answer
from tests.support.archives import HOUR, Archive, write_parquet
from tests.support.nats_server import NatsServer, cluster_configs, older_servers
from tests.support.restores import api, main, next_sequence, opened, request, state_of

Start = Callable[..., NatsServer]
CREATED = "2026-05-01T00:00:00.123456789Z"
CONFIG: dict[str, Any] = {"name": "ORDERS", "subjects": ["orders.>"], "storage": "file"}


@pytest.fixture
def kept(tmp_path: Path) -> Archive:
    """An archive of ten messages, with the stream's configuration."""
    archive = Archive(tmp_path / "archive")
    archive.write(list(range(1, 11)), created=CREATED)
    keep(archive, CONFIG)
    return archive


def keep(archive: Archive, config: dict[str, Any]) -> None:
    """Keep the stream's configuration, as the daemon does."""
    path = archive.root / stream_config.path("ORDERS", CREATED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(StreamConfig(stream="ORDERS", created=CREATED, config=config).encode())


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
    server = nats_server()
    next((kept.root / "_streams").rglob("*.json")).unlink()
    assert error(capfd, kept, server.url).endswith("of stream ORDERS: name a file with --stream-config")
    file = tmp_path / "stream.yaml"
    file.write_text("stream: {name: ORDERS, subjects: ['orders.>'], max_msgs: unlimited, description: again}\n")
    assert main([kept.url, "ORDERS", "--servers", server.url, "--stream-config", str(file)]) == 0
    assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 10


def test_a_stream_that_exists_is_left_as_it_is(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    asyncio.run(create(server.url, CONFIG))
    assert error(capfd, kept, server.url).startswith(
        "stream ORDERS already exists: restore under another name with --as"
    )
    assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 0
    overlap = error(capfd, kept, server.url, "--as", "COPY")
    assert "stream COPY: " in overlap
    assert "subjects overlap with an existing stream" in overlap
    assert asyncio.run(streams(server.url)) == ["ORDERS"]
    assert main([kept.url, "ORDERS", "--as", "COPY", "--servers", server.url, "--subject-prefix", "copy"]) == 0
    assert asyncio.run(state_of(server.url, "COPY"))["messages"] == 10


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
    server = nats_server()
    kept.write(list(range(20, 23)), created=CREATED)
    options = ["--from-seq", "15", "--to-seq", "100"]
    assert main([kept.url, "ORDERS", "--dry-run", *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("missing: ")] == [
        "missing: 5 sequences at the beginning: 15 to 19; the stream begins later",
        "missing: 78 sequences at the end: 23 to 100; the next message gets sequence 23",
    ]
    assert error(capfd, kept, server.url, *options).startswith(
        "the archive of stream ORDERS lacks 5 sequences at the beginning: 15 to 19; 78 sequences at the end: 23 to 100."
    )
    assert main([kept.url, "ORDERS", "--servers", server.url, "--allow-holes", *options]) == 0
    state = asyncio.run(state_of(server.url, "ORDERS"))
    assert (state["first_seq"], state["last_seq"]) == (20, 22)
    until = prepare(request(kept.url, first=20, last=100, until=1 << 62))
    assert not until.survey.absent, "a time was the bound"


def test_a_range_that_the_latest_incarnation_lacks_is_not_taken_from_an_earlier_one(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    anew = "2026-05-02T00:00:00Z"
    kept.write([1, 2], bucket=HOUR + 86_400, created=anew)
    server = nats_server()
    assert error(capfd, kept, server.url, "--from-seq", "5") == (
        f"the archive of stream ORDERS has no messages in this range of the incarnation created {anew}; --created "
        f"chooses another, with messages there: {CREATED}"
    )
    assert asyncio.run(streams(server.url)) == []
    assert main([kept.url, "ORDERS", "--servers", server.url, "--from-seq", "5", "--created", CREATED[:10]]) == 0
    assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 6


def test_messages_newer_than_the_requested_time_are_counted(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    kept.write([12], created=CREATED)
    kept.write([11], bucket=HOUR + 900, created=CREATED)  # rewound; the first 11 was never stored
    options = ["--to-time", "2026-05-01T12:10:00Z"]
    assert main([kept.url, "ORDERS", "--dry-run", *options]) == 0
    said = "1 message with a sequence below 12 and a time after --to-time: "
    assert said in capfd.readouterr().out
    assert main([kept.url, "ORDERS", "--servers", nats_server().url, *options]) == 0
    assert said in capfd.readouterr().err


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"max_age": 3_600_000_000_000}, [], r"it keeps messages for 1h \(max_age\), but the oldest is of 2026-05-01T12"),
    ({"max_msgs": 9}, [], r"it keeps 9 messages \(max_msgs\), not 10"),
    ({"max_bytes": 300}, [], r"it keeps 300B \(max_bytes\), not about \d"),
    ({"max_msgs_per_subject": 9}, [], r"it keeps 9 messages per subject \(max_msgs_per_subject\), not 10"),
    ({"retention": "interest"}, [], r"it keeps only messages that a consumer waits for \(retention: interest\)"),
    (
        {},
        ["--to-seq", "8", "--consumer", "good=8", "--consumer", "late=9"],
        "--consumer late=9: the last restored sequence is 8, and the consumer would skip messages that are published",
    ),
]


def test_what_would_not_be_complete_is_refused_before_anything_is_created(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    for config, options, message in REFUSED:
        keep(kept, {**CONFIG, **config})
        line = error(capfd, kept, server.url, *options)
        assert re.match(message if options else f"stream ORDERS would drop messages: {message}", line), line
        assert asyncio.run(streams(server.url)) == []


def test_limits_can_be_left_out_or_drop_messages(nats_server: Start, kept: Archive) -> None:
    server = nats_server()
    keep(kept, {**CONFIG, "max_msgs": 9, "max_age": 3_600_000_000_000, "max_msg_size": 1})
    assert main([kept.url, "ORDERS", "--servers", server.url, "--without-limits"]) == 0
    assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 10
    keep(kept, {**CONFIG, "max_msgs": 9})
    options = ["--as", "LESS", "--subject-prefix", "less", "--allow-drops"]
    assert main([kept.url, "ORDERS", "--servers", server.url, *options]) == 0
    assert asyncio.run(state_of(server.url, "LESS"))["messages"] == 9


def test_messages_larger_than_the_stream_takes_are_found_before_the_restore(
    nats_server: Start, kept: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    size = 40 + len(b"NATS/1.0\r\nName: value\r\n\r\n")
    kept.write([11, 12], payloads=[b"x" * 50, b"x" * 40], headers=[None, [("Name", ["value"])]])
    keep(kept, {**CONFIG, "max_msg_size": size - 1})
    assert error(capfd, kept, server.url, "--allow-drops") == (
        f"stream ORDERS takes messages of up to {size - 1} bytes (max_msg_size), but the largest has {size}: restore "
        "with --without-limits, or another setting in --stream-config"
    )
    assert asyncio.run(streams(server.url)) == []
    keep(kept, {**CONFIG, "max_msg_size": size})
    assert main([kept.url, "ORDERS", "--servers", server.url]) == 0


def test_an_interest_stream_keeps_what_its_consumer_waits_for(nats_server: Start, kept: Archive) -> None:
    server = nats_server()
    keep(kept, {**CONFIG, "retention": "interest"})
    assert main([kept.url, "ORDERS", "--servers", server.url, "--consumer", "reader=4"]) == 0
    state = asyncio.run(state_of(server.url, "ORDERS"))
    assert (state["messages"], state["last_seq"]) == (6, 10), "what the consumer has acknowledged is not kept"


@pytest.mark.parametrize("subject", listed("RESTORER", optional=False))
@pytest.mark.exhaustive
def test_a_missing_permission_is_named(
    nats_server: Start, kept: Archive, monkeypatch: pytest.MonkeyPatch, subject: str
) -> None:
    server = permitted(nats_server, monkeypatch, without(subject, of="RESTORER"))
    with pytest.raises(JetcaptureError, match=f"this user may not publish to {re.escape(subject)}"):
        restore_as(server, kept)


@pytest.mark.parametrize("less", [False, True])
def test_what_the_example_allows_is_enough_to_restore(
    nats_server: Start, kept: Archive, monkeypatch: pytest.MonkeyPatch, less: bool
) -> None:
    text = without(*listed("RESTORER", optional=True), of="RESTORER") if less else EXAMPLE
    server = permitted(nats_server, monkeypatch, text)
    restore_as(server, kept)
    assert less or "Violation" not in server.log


def permitted(nats_server: Start, monkeypatch: pytest.MonkeyPatch, text: str) -> NatsServer:
    for user in re.findall(r"\$(\w+)_PASSWORD", EXAMPLE):
        monkeypatch.setenv(f"{user}_PASSWORD", f"{user.lower()}-password")
    return nats_server(text)


def restore_as(server: NatsServer, archive: Archive) -> None:
    prepared = prepare(request(archive.url, target="RESTORED"))
    assert restore(prepared, NatsConfig.model_validate(as_user(server, "restorer"))) == 10


# ------------------------------------------------------------------ failures


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """An archive of many ranges."""
    archive = Archive(tmp_path / "large")
    for number in range(40):
        seqs = list(range(number * 1000 + 1, number * 1000 + 1001))
        archive.write(seqs, payloads=[os.urandom(500) for _ in seqs], created=CREATED)
    keep(archive, CONFIG)
    monkeypatch.setattr(plan, "PART_BYTES", 500_000)
    return archive


def test_a_restore_that_fails_in_the_middle_leaves_no_stream(
    nats_server: Start, large: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    last = max(large.root.rglob("*.parquet"))
    table = pq.ParquetFile(last).read()
    prepared = prepare(request(large.url))
    write_parquet(table.drop_columns([layout.PAYLOAD]), last)
    with pytest.raises(JetcaptureError, match="was stored again: read it again"):
        restore(prepared, NatsConfig(servers=(server.url,)))
    assert asyncio.run(streams(server.url)) == []
    last.unlink()
    with pytest.raises(JetcaptureError, match="is gone, removed by maintenance: read it again"):
        restore(prepared, NatsConfig(servers=(server.url,)))
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


def test_a_lost_connection_ends_the_restore_and_leaves_no_stream(nats_server: Start, large: Archive) -> None:
    server = nats_server()
    prepared = prepare(request(large.url))

    def restart() -> None:
        server.kill()
        server.start()

    with (
        in_the_middle(restart),
        pytest.raises(JetcaptureError, match=r"the connection was lost|restore was interrupted"),
    ):
        restore(prepared, NatsConfig(servers=(server.url,)))
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


def test_a_cancellation_that_a_flush_swallows_ends_the_restore(nats_server: Start, large: Archive) -> None:
    server = nats_server()
    prepared = prepare(request(large.url))
    send, created = StreamRestore.send, StreamRestore.create

    async def create(restoring: StreamRestore, head: bytes) -> None:
        await created(restoring, head)
        patch.setattr(StreamRestore, "send", swallowing)

    async def swallowing(restoring: StreamRestore, data: bytes) -> None:
        patch.setattr(StreamRestore, "send", send)
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await send(restoring, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamRestore, "create", create)
        with pytest.raises(JetcaptureError, match="terminated; the incomplete stream ORDERS was removed"):
            restore(prepared, NatsConfig(servers=(server.url,)))
    assert asyncio.run(streams(server.url)) == []


def test_further_signals_do_not_end_the_removal_of_the_incomplete_stream(nats_server: Start, large: Archive) -> None:
    server = nats_server()
    prepared = prepare(request(large.url))
    max(large.root.rglob("*.parquet")).unlink()
    abort = StreamRestore.abort

    async def terminated(started: StreamRestore) -> str | None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        return await abort(started)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamRestore, "abort", terminated)
        with pytest.raises(JetcaptureError, match="is gone"):
            restore(prepared, NatsConfig(servers=(server.url,)))
    assert asyncio.run(streams(server.url)) == []


@pytest.mark.parametrize(
    "end",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_a_restore_that_is_ended_leaves_no_stream_or_says_how_to_remove_it(
    nats_server: Start, large: Archive, capfd: pytest.CaptureFixture[str], end: signal.Signals
) -> None:
    server = nats_server()
    words = [sys.executable, "-c", SLOW, "restore", large.url, "ORDERS", "--servers", server.url]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while "ORDERS" not in asyncio.run(streams(server.url)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(end)
        _, said = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == {signal.SIGTERM: 1, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[end]
    assert "remove what it has left with: nats stream rm ORDERS" in said.splitlines()[0]
    if end is signal.SIGKILL:
        assert "nats stream rm ORDERS" in error(capfd, large, server.url)
    else:
        assert asyncio.run(streams(server.url)) == []
        assert said.splitlines()[1] == (
            "jetcapture: interrupted"
            if end is signal.SIGINT
            else "jetcapture: terminated; the incomplete stream ORDERS was removed"
        )


@pytest.mark.parametrize("subject", ["other", "orders"])
def test_a_stream_that_somebody_creates_meanwhile_is_left_alone(
    nats_server: Start, kept: Archive, subject: str
) -> None:
    server = nats_server()
    prepared = prepare(request(kept.url))
    with overtaking(server, f"{subject}.>"):
        with pytest.raises(JetcaptureError, match="stream ORDERS already exists"):
            restore(prepared, NatsConfig(servers=(server.url,)))
        assert asyncio.run(streams(server.url)) == ["ORDERS"]
        assert asyncio.run(state_of(server.url, "ORDERS"))["messages"] == 0
        asyncio.run(delete(server.url, "ORDERS"))
        next(kept.root.rglob("*.parquet")).unlink()
        with pytest.raises(JetcaptureError, match="stream ORDERS already exists" if subject == "other" else "is gone"):
            restore(prepared, NatsConfig(servers=(server.url,)))
    assert asyncio.run(next_sequence(server.url, "ORDERS", f"{subject}.one")) == 1


def test_a_stream_that_somebody_creates_after_the_server_has_refused_is_left_alone(
    nats_server: Start, kept: Archive
) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {**CONFIG, "name": "TAKEN"}))
    prepared = prepare(request(kept.url))
    info, asked = StreamRestore._info, 0

    async def late(started: StreamRestore) -> Any:
        nonlocal asked
        found, asked = await info(started), asked + 1
        if asked == 3:
            await create(server.url, {"name": "ORDERS", "subjects": ["other.>"]})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamRestore, "_info", late)
        with pytest.raises(JetcaptureError, match="stream ORDERS already exists"):
            restore(prepared, NatsConfig(servers=(server.url,)))
    assert asyncio.run(next_sequence(server.url, "ORDERS", "other.one")) == 1


@contextlib.contextmanager
def overtaking(server: NatsServer, subject: str) -> Iterator[None]:
    """Create the stream ORDERS after each restore has begun."""
    begin = StreamRestore.begin

    async def overtaken(started: StreamRestore, config: Any, state: Any) -> None:
        await begin(started, config, state)
        await create(server.url, {"name": "ORDERS", "subjects": [subject]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamRestore, "begin", overtaken)
        yield


def test_a_stream_that_may_be_somebody_elses_is_left_alone_and_said(nats_server: Start, large: Archive) -> None:
    server = nats_server()
    prepared = prepare(request(large.url))

    def replace() -> None:
        asyncio.run(delete(server.url, "ORDERS"))
        asyncio.run(create(server.url, {"name": "ORDERS", "subjects": ["other.>"]}))
        raise JetcaptureError("this range cannot be read")

    with in_the_middle(replace), pytest.raises(JetcaptureError, match="this range cannot be read") as raised:
        restore(prepared, NatsConfig(servers=(server.url,)))
    assert str(raised.value).endswith(
        "the incomplete stream ORDERS could not be removed (somebody else has created it, or another server of the "
        "cluster leads it now); if this restore created it, delete it: nats stream rm ORDERS"
    )
    assert asyncio.run(next_sequence(server.url, "ORDERS", "other.one")) == 1


@pytest.mark.exhaustive
def test_what_is_left_in_a_cluster_whose_leader_dies_is_said(tmp_path: Path, large: Archive) -> None:
    keep(large, {**CONFIG, "num_replicas": 3})
    prepared = prepare(request(large.url))
    servers = [NatsServer(tmp_path / f"n{number}", extra) for number, extra in enumerate(cluster_configs())]
    killed = []

    def kill_leader() -> None:
        info = asyncio.run(answer(servers[0].url, "STREAM.INFO.ORDERS"))
        killed.append(servers[int(info["cluster"]["leader"][1:])])
        killed[0].kill()

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor() as threads:
            list(threads.map(stack.enter_context, servers))
        asyncio.run(answer(servers[0].url, "STREAM.CREATE.OTHER", {"name": "OTHER", "num_replicas": 3}))
        with in_the_middle(kill_leader), pytest.raises(JetcaptureError) as raised:
            restore(prepared, NatsConfig(servers=tuple(server.url for server in servers)))
        killed[0].start()
        remaining = asyncio.run(answer(servers[0].url, "STREAM.NAMES"))["streams"]
    assert "ORDERS" not in remaining or str(raised.value).endswith("delete it: nats stream rm ORDERS"), raised.value


def test_a_restore_that_may_not_ask_whose_the_stream_is_leaves_it(
    nats_server: Start, large: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = permitted(nats_server, monkeypatch, without("$JS.API.STREAM.INFO.RESTORED", of="RESTORER"))
    prepared = prepare(request(large.url, target="RESTORED"))
    max(large.root.rglob("*.parquet")).unlink()
    with pytest.raises(
        JetcaptureError, match=r"the incomplete stream RESTORED could not be removed \(.*STREAM.INFO.RESTORED"
    ):
        restore(prepared, NatsConfig.model_validate(as_user(server, "restorer")))
