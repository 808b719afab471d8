"""`jetcapture status` tells what the server and the archive know, of all replicas together."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config import block
from jetcapture_py.config.model import Config, parse
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import (
    capture_all,
    config,
    connection,
    publish,
    publish_and_capture,
    running,
    settings,
    status_of,
    until,
)

Start = Callable[..., NatsServer]


def command(directory: Path, wanted: dict[str, Any], *options: str) -> list[str]:
    path = directory / "status.yaml"
    path.write_text(yaml.safe_dump(wanted))
    return [sys.executable, "-m", "jetcapture_py", "status", str(path), *options]


def status(directory: Path, wanted: dict[str, Any], *options: str, code: int = 0) -> str:
    done = subprocess.run(
        command(directory, wanted, *options), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 or done.stdout else done.stderr


def test_it_tells_how_far_the_archive_is_behind(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        archive = tmp_path / "archive"
        wanted = settings(server.url, archive, source={"filter_subjects": ["orders.>", "other.x"]})
        subjects = ("orders.>", "other.>")
        await publish(server.url, [("orders.a", b"", None)] * 40 + [("other.y", b"", None)] * 5, subjects=subjects)
        await capture_all(config(server.url, archive, source={"filter_subjects": ["orders.>", "other.x"]}))
        found = json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))
        assert (found["lag"], found["pending"], found["unacked"], found["redelivered"]) == (0, 0, 0, 0)
        assert (found["delivered"], found["ack_floor"]) == (40, 40)
        assert found["max_ack_pending"] == 50_000
        assert found["watermark_seq"] == 40
        assert found["last_stored"]
        assert found["problems"] == []
        before = datetime.now(UTC)
        await publish(server.url, [("other.y", b"", None), ("other.x", b"", None)], subjects=subjects)
        async with running(config(server.url, archive, source={"filter_subjects": ["orders.>", "other.x"]})) as capture:
            await until(lambda: capture.archiver.blocks.messages == 1, "it is held")
            found = json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))
            assert (found["unacked"], found["pending"], found["ack_floor"]) == (1, 0, 40)
            assert 0 < found["lag"] <= (datetime.now(UTC) - before).total_seconds()

            async def pulling() -> bool:
                return json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))["waiting_pulls"] >= 1

            await until(pulling, "a pull waits")  # there is none for a moment when one has ended
            titles, values = (await asyncio.to_thread(status, tmp_path, wanted)).splitlines()
            assert titles.split()[:4] == ["capture", "lag", "pending", "unacked"]
            assert values.startswith("status")
            assert values.endswith(" ago")
            assert "1 of 50,000" in values
            assert "  40, " in values  # the watermark

    asyncio.run(scenario())


def test_messages_that_wait_while_nothing_is_stored_are_a_problem(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "STORING_TIME", 0.0)
    server, archive = nats_server(), tmp_path / "archive"
    soon, late = (config(server.url, archive, block={"max_age": age}) for age in ("1s", "1h"))
    asyncio.run(publish(server.url, [("orders.a", b"", None)]))
    asyncio.run(capture_all(soon))
    asyncio.run(publish(server.url, [("orders.a", b"", None)] * 3))

    async def problems(wanted: Config) -> tuple[str, ...]:
        return (await status_of(wanted)).problems

    async def waits() -> bool:
        return bool(await problems(soon))

    asyncio.run(until(waits, "it is a problem"))
    (problem,) = asyncio.run(problems(soon))
    assert problem.startswith("storing: 3 messages wait, the oldest for ")
    assert ", and nothing was stored for " in problem
    assert problem.endswith("; no replica is pulling: start one")
    assert asyncio.run(problems(late)) == ()  # a block may still hold them
    asyncio.run(capture_all(soon))
    assert asyncio.run(problems(soon)) == ()


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    archive = tmp_path / "archive"
    publish_and_capture(server.url, archive, [("orders.a", b"", None)])
    (archive / "_watermark" / "ORDERS" / "archive.json").write_text("{")
    found = json.loads(status(tmp_path, settings(server.url, archive), "--json", code=1))
    assert found["ack_floor"] == 1
    (problem,) = found["problems"]
    assert problem.startswith("watermark: _watermark/ORDERS/archive.json is damaged")


def test_a_consumer_that_is_not_there_and_a_server_that_does_not_answer_are_one_line(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.a", b"", None)]))
    wanted = settings(server.url, tmp_path / "archive")
    problem = "  problem: consumer archive does not exist on stream ORDERS"
    assert status(tmp_path, wanted, code=1).splitlines()[1:] == ["status", problem]
    server.stop()
    assert status(tmp_path, wanted, code=1).splitlines()[2].startswith("  problem: cannot connect to NATS at ")
    assert not (tmp_path / "archive").exists()


def test_watching_goes_on_until_it_is_interrupted_and_survives_the_server(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.a", b"", None)])
        archive = tmp_path / "archive"
        await capture_all(config(server.url, archive))
        output = tmp_path / "watched"
        with output.open("wb") as sink:
            watching = subprocess.Popen(
                command(tmp_path, settings(server.url, archive), "--watch", "--json"), stdout=sink, stderr=sink
            )
        try:

            def shown() -> list[dict[str, Any]]:
                return [json.loads(line) for line in output.read_text().splitlines(keepends=True) if line[-1] == "\n"]

            await until(lambda: len(shown()) >= 1, "it shows something")
            await asyncio.to_thread(server.stop)
            await until(lambda: "lag" not in shown()[-1], "it says that nobody answers")
            server.start()
            await publish(server.url, [("orders.a", b"", None)] * 2)
            await until(lambda: shown()[-1].get("pending") == 2, "it goes on")
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 0
        finally:
            if watching.poll() is None:
                os.kill(watching.pid, signal.SIGKILL)
                watching.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time": "2100-01-01T00:00:00Z"}, "in the future"),
        ({"stream": "OTHER"}, "_watermark/ORDERS/archive.json belongs to stream OTHER"),
    ],
)
def test_a_watermark_that_cannot_be_true_is_a_problem(
    nats_server: Start, tmp_path: Path, changes: dict[str, str], problem: str
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    publish_and_capture(server.url, archive, [("orders.a", b"", None)] * 40)
    mark = archive / "_watermark" / "ORDERS" / "archive.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), **changes}))
    found = json.loads(status(tmp_path, settings(server.url, archive), "--json", code=1))
    (said,) = found["problems"]
    assert problem in said


def test_a_capture_that_holds_the_watermark_back_is_a_problem(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    wanted = settings(server.url, archive, source={"filter_subjects": ["orders.a"]})
    publish_and_capture(server.url, archive, [("orders.a", b"", None)] * 40, source={"filter_subjects": ["orders.a"]})
    mark = archive / "_watermark" / "ORDERS" / "archive.json"
    own, other = json.loads(mark.read_text()), [{"after": 0, "subjects": ["orders.b"]}]
    late = {**own, "consumer": "late", "seq": 20, "time": "2026-01-01T00:00:00Z", "filters": other}
    mark.with_name("late.json").write_text(json.dumps(late))
    (said,) = json.loads(status(tmp_path, wanted, "--json", code=1))["problems"]
    remove = f"rm {mark.with_name('late.json')}"
    assert said == (
        "watermark: consumer late does not exist any more, and readers wait for its capture at sequence 20; "
        f"if it was removed for good: {remove}"
    )
    report = asyncio.run(verify(parse(wanted)))
    assert (report.complete, report.exit_code(strict=True)) == (True, 0)
    assert f"consumer: {said.removeprefix('watermark: ')}" in report.as_text().splitlines()

    asyncio.run(add_consumer(server.url, "late"))
    found = json.loads(status(tmp_path, wanted, "--json", code=1))
    (said,) = found["problems"]
    assert said.startswith("watermark: the capture with consumer late has held it back for ")
    assert said.endswith("; start it")
    assert found["watermark_seq"] == own["seq"]

    subprocess.run(shlex.split(remove), check=True)
    assert json.loads(status(tmp_path, wanted, "--json"))["problems"] == []


async def add_consumer(url: str, name: str) -> None:
    async with connection(url) as client:
        await client.jetstream().add_consumer("ORDERS", durable_name=name, ack_policy="explicit")
