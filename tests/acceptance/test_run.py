"""The real command, real signals, and what an operator sees."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from nats.js.errors import NotFoundError

from tests.drains import drains, full_stream
from tests.support.nats_server import NatsServer
from tests.support.running import (
    STREAM,
    Command,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
    settings,
)

Start = Callable[..., NatsServer]
ATTEMPTS = 5
"""How often something may take too long, as on a machine that is busy with something else."""


def awaited(condition: Callable[[], Any], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout} s it is still not so that {what}"
        time.sleep(0.02)


def delivered(url: str) -> int:
    """Messages that are delivered and not acknowledged; -1 before there is a consumer."""
    with contextlib.suppress(NotFoundError):
        return int(asyncio.run(consumer(url)).num_ack_pending)
    return -1


def three(count: int = 1000) -> list[Any]:
    return [(f"orders.{index % 3}", b"%d" % index, None) for index in range(count)]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jetcapture_py", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_an_interrupt_stores_and_acknowledges_everything_and_exits_0(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, tmp_path / "archive", drain_timeout="120s")) as replica:
        replica.start()
        awaited(lambda: delivered(server.url) == 1000, "all are delivered")
        assert not list((tmp_path / "archive").rglob("*.parquet"))
        replica.process.send_signal(signal.SIGINT)
        assert replica.wait() == 0, replica.log
    assert len(rows(tmp_path / "archive")) == 1000
    state = asyncio.run(consumer(server.url))
    assert (state.num_pending, state.num_ack_pending) == (0, 0)
    first, *lines, stopped = map(json.loads, replica.log.splitlines())
    assert {*first} == {"ts", "level", "event", "stream", "consumer", "servers", "stored_within"}
    assert (first["event"], first["servers"], first["stored_within"]) == ("capture.started", server.url, "15m")
    assert not any("capture" in line for line in lines), "which names one of several"
    assert "blocks.stored" in [line["event"] for line in lines]
    assert (stopped["event"], stopped["received"], stopped["acked"]) == ("capture.stopped", 1000, 1000)
    assert stopped["sealed_by"] == {"drain": 3}


def test_a_terminal_that_closes_drains_the_process_once(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), blocked_archive(tmp_path)
    asyncio.run(publish(server.url, three()))
    replica = Command(tmp_path, settings(server.url, archive, drain_timeout="60s", block={"max_age": "0.2s"}))
    terminal, its = os.openpty()

    def take_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = [sys.executable, "-m", "jetcapture_py", "run", str(replica.path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as for most users
    process = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=environment, preexec_fn=take_the_terminal)
    os.close(its)
    try:
        said = b""
        while b"store.failed" not in said:
            said += os.read(terminal, 65536)
        os.close(terminal)
        for _ in range(3):
            time.sleep(0.2)
            process.send_signal(signal.SIGHUP)
        assert process.poll() is None, "it drains"
        (archive / "ORDERS").unlink()
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
    assert len(rows(archive)) == 1000
    assert asyncio.run(consumer(server.url)).num_ack_pending == 0


def test_a_process_under_nohup_outlives_its_terminal(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, tmp_path / "archive", block={"max_age": "1s"})) as replica:
        replica.start(before=["nohup"])
        awaited(lambda: list(replica.events("capture.started")), "it has started")
        replica.process.send_signal(signal.SIGHUP)
        awaited(lambda: list(replica.events("blocks.stored")), "it goes on")
        assert replica.process.poll() is None
        assert not list(replica.events("capture.draining"))


def blocked_archive(directory: Path) -> Path:
    """An archive in which nothing can be stored, though it could when the process began: a file is in the way."""
    archive = directory / "archive"
    archive.mkdir()
    (archive / "ORDERS").write_text("in the way")
    return archive


def test_a_drain_that_cannot_store_ends_at_its_deadline_and_loses_nothing(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), blocked_archive(tmp_path)
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, archive, drain_timeout="1s", block={"max_age": "0.2s"})) as replica:
        replica.start()
        awaited(lambda: list(replica.events("store.failed")), "the store fails")
        replica.process.send_signal(signal.SIGTERM)
        assert replica.wait(50) == 1, "the default is 60 s"
        (failure,) = replica.events("capture.failed")
        late = "drain_timeout: messages not stored and acknowledged in time: 1000; they are redelivered"
        assert failure["error"] == late
        (archive / "ORDERS").unlink()
        assert replica.start("--until-caught-up").wait(90) == 0, "what was given back comes at once"
    assert len(rows(archive)) == 1000


def test_a_second_signal_ends_the_process_at_once(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), blocked_archive(tmp_path)
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, archive, drain_timeout="120s", block={"max_age": "0.2s"})) as replica:
        replica.start()
        awaited(lambda: list(replica.events("store.failed")), "the store fails")
        replica.process.send_signal(signal.SIGTERM)
        awaited(lambda: list(replica.events("capture.draining")), "the drain begins")
        assert replica.process.poll() is None
        replica.process.send_signal(signal.SIGTERM)
        assert replica.wait(100) == 1, "before drain_timeout"
    assert asyncio.run(consumer(server.url)).num_ack_pending == 1000


def test_a_signal_while_nothing_can_be_reached_ends_the_process(tmp_path: Path) -> None:
    with Command(tmp_path, settings("nats://127.0.0.1:1", tmp_path / "archive", drain_timeout="120s")) as replica:
        replica.start()
        awaited(lambda: list(replica.events("capture.started")), "it tries")
        replica.process.send_signal(signal.SIGTERM)
        assert replica.wait(100) == 0, "before drain_timeout"


def test_a_quiet_streams_block_is_stored_within_two_seconds_of_its_age(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, []))
    with Command(tmp_path, settings(server.url, tmp_path / "archive", block={"max_age": "3s"})) as replica:
        replica.start()
        awaited(lambda: "capture.started" in replica.log, "it has started")
        took: list[float] = []
        while len(took) < ATTEMPTS and not (took and min(took) < 5):
            began = time.monotonic()
            asyncio.run(publish(server.url, [("orders.x", b"alone", None)]))
            awaited(lambda: len(objects(tmp_path / "archive")) > len(took), "the block is stored")
            took.append(time.monotonic() - began)
        assert 2.5 < min(took) < 5, took
        awaited(lambda: asyncio.run(consumer(server.url)).num_ack_pending == 0, "it is acknowledged")


def test_a_wrong_setting_is_named_with_its_path_and_a_suggestion_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for wrong, line in (
        ({"source": {"ack_wiat": "2m"}}, "source.ack_wiat: unknown setting; did you mean ack_wait?"),
        ({"key": "no_such:function"}, "key: cannot import no_such:function: ModuleNotFoundError"),
    ):
        sections: dict[str, Any] = {"http": {"listen": "127.0.0.1:0"}, **wrong}  # it listens before it reads them
        path.write_text(yaml.safe_dump(settings("nats://127.0.0.1:4222", tmp_path / "archive", **sections)))
        done = command("run", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert line in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr


def test_what_keeps_a_capture_from_starting_is_one_clear_line_and_exits_1(nats_server: Start, tmp_path: Path) -> None:
    server, guarded = nats_server(), nats_server("authorization { user: app, password: right }")
    archive, names = tmp_path / "archive", itertools.count()

    async def delete() -> None:
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)

    def failure(url: str, archive: Path = archive, **sections: Any) -> str:
        configuration = settings(url, archive, **sections)
        with Command(tmp_path, configuration, f"{next(names)}", module="tests.support.impatient") as replica:
            assert replica.start().wait() == 1
        (error,) = [line["error"] for line in map(json.loads, replica.log.splitlines()) if line["level"] == "error"]
        assert "Traceback" not in replica.log
        assert "wr0ng-secret" not in replica.log
        return str(error)

    absent = "stream ORDERS does not exist; create it, or correct source.stream"
    assert failure(server.url) == absent
    assert failure("nats://127.0.0.1:1").startswith("cannot connect to NATS at nats://127.0.0.1:1: ")
    refused = failure(guarded.url, nats={"user": "app", "password": "wr0ng-secret"})
    assert refused == "NATS refused the connection: Authorization Violation"
    asyncio.run(publish(server.url, three()))
    assert failure(server.url, source={"create": False}) == "consumer archive does not exist on stream ORDERS"
    (tmp_path / "file").write_text("not a directory")
    unwritable = failure(server.url, tmp_path / "file" / "archive")
    assert unwritable == f"cannot write {tmp_path}/file/archive/_probe: Not a directory"
    assert asyncio.run(consumer(server.url)).num_ack_pending == 0, "nothing was pulled"
    asyncio.run(capture_all(config(server.url, archive)))
    asyncio.run(delete())
    assert failure(server.url) == f"{absent}; or restore it: jetcapture restore {archive} ORDERS"


@pytest.mark.parametrize(("servers", "count"), [("single", 1), pytest.param("far", 3, marks=pytest.mark.exhaustive)])
async def test_a_drain_under_a_backlog_leaves_nothing_unacknowledged(tmp_path: Path, servers: str, count: int) -> None:
    async with full_stream(tmp_path, servers, 120_000) as url:
        async for drain in drains(url, tmp_path, count):
            assert drain.clean, drain


def test_a_drain_without_a_connection_says_so_and_exits_1(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, three()))
    with Command(tmp_path, settings(server.url, tmp_path / "archive", block={"max_age": "0.2s"})) as replica:
        replica.start()
        awaited(lambda: list(replica.events("blocks.stored")), "all is stored")
        server.kill()
        awaited(lambda: list(replica.events("nats.disconnected")), "the connection is lost")
        replica.process.send_signal(signal.SIGTERM)
        assert replica.wait() == 1
        (failure,) = replica.events("capture.failed")
        assert failure["error"].startswith("drain: the connection to NATS was lost")
    assert len(rows(tmp_path / "archive")) == 1000
