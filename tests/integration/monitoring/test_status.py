"""`jetcapture status` tells what the server and the archive know, of all replicas together."""

from __future__ import annotations

import asyncio
import json
import re
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
from tests.acceptance.test_run import awaited
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
    words = command(directory, wanted, *options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


async def test_it_tells_how_far_the_archive_is_behind(nats_server: Start, tmp_path: Path) -> None:
    server, archive, subjects = nats_server(), tmp_path / "archive", ("orders.>", "other.>")
    wanted = settings(server.url, archive, source={"filter_subjects": ["orders.>", "other.x"]})

    async def told() -> dict[str, Any]:
        return dict(json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json")))

    await publish(server.url, [("orders.a", b"", None)] * 40 + [("other.y", b"", None)] * 5, subjects=subjects)
    await capture_all(parse(wanted))
    found = await told()
    assert (found["lag"], found["pending"], found["unacked"], found["redelivered"]) == (0, 0, 0, 0)
    assert (found["delivered"], found["ack_floor"], found["watermark_seq"]) == (40, 40, 40)
    assert (found["max_ack_pending"], found["problems"]) == (50_000, [])
    assert found["last_stored"]
    before = datetime.now(UTC)
    await publish(server.url, [("other.y", b"", None), ("other.x", b"", None)], subjects=subjects)
    async with running(parse(wanted)) as capture:
        await until(lambda: capture.archiver.blocks.messages == 1, "it is held")
        found = await told()
        assert (found["unacked"], found["pending"], found["ack_floor"]) == (1, 0, 40)
        assert 0 < found["lag"] <= (datetime.now(UTC) - before).total_seconds()

        async def pulling() -> bool:
            return bool((await told())["waiting_pulls"] >= 1)

        await until(pulling, "a pull waits")  # there is none for a moment when one has ended
        titles, values = (await asyncio.to_thread(status, tmp_path, wanted)).splitlines()
        assert titles.split()[:4] == ["capture", "lag", "pending", "unacked"]
        assert re.match(r"status .*1 of 50,000.*  40, .* ago$", values), "40 is the watermark"


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


def test_a_missing_consumer_and_a_server_that_is_down_are_one_line(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.a", b"", None)]))
    wanted = settings(server.url, tmp_path / "archive")
    problem = "  problem: consumer archive does not exist on stream ORDERS"
    assert status(tmp_path, wanted, code=1).splitlines()[1:] == ["status", problem]
    server.stop()
    assert status(tmp_path, wanted, code=1).splitlines()[2].startswith("  problem: cannot connect to NATS at ")
    assert not (tmp_path / "archive").exists()


def test_watching_goes_on_until_it_is_interrupted_and_survives_the_server(nats_server: Start, tmp_path: Path) -> None:
    server, output = nats_server(), tmp_path / "watched"
    publish_and_capture(server.url, tmp_path / "archive", [("orders.a", b"", None)])
    words = command(tmp_path, settings(server.url, tmp_path / "archive"), "--watch", "--json")
    with output.open("wb") as sink:
        watching = subprocess.Popen(words, stdout=sink, stderr=sink)

    def shown() -> list[dict[str, Any]]:
        return [json.loads(line) for line in output.read_text().splitlines(keepends=True) if line[-1] == "\n"]

    try:
        awaited(lambda: len(shown()) >= 1, "it shows something")
        server.stop()
        awaited(lambda: "lag" not in shown()[-1], "it says that nobody answers")
        server.start()
        asyncio.run(publish(server.url, [("orders.a", b"", None)] * 2))
        awaited(lambda: shown()[-1].get("pending") == 2, "it goes on")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    finally:
        watching.kill()
        watching.wait()


def test_a_watermark_that_is_wrong_or_held_back_is_a_problem(nats_server: Start, tmp_path: Path) -> None:
    server, archive, source = nats_server(), tmp_path / "archive", {"filter_subjects": ["orders.a"]}
    wanted = settings(server.url, archive, source=source)
    publish_and_capture(server.url, archive, [("orders.a", b"", None)] * 40, source=source)
    mark = archive / "_watermark" / "ORDERS" / "archive.json"
    whole = mark.read_text()
    own = json.loads(whole)
    for text, problem in (
        ("{", "watermark: _watermark/ORDERS/archive.json is damaged"),
        (json.dumps({**own, "time": "2100-01-01T00:00:00Z"}), "in the future"),
        (json.dumps({**own, "stream": "OTHER"}), "_watermark/ORDERS/archive.json belongs to stream OTHER"),
    ):
        mark.write_text(text)
        found = json.loads(status(tmp_path, wanted, "--json", code=1))
        (said,) = found["problems"]
        assert problem in said
        assert found["ack_floor"] == 40, "the rest is shown"
    mark.write_text(whole)

    other = [{"after": 0, "subjects": ["orders.b"]}]
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

    async def add_consumer() -> None:
        async with connection(server.url) as client:
            await client.jetstream().add_consumer("ORDERS", durable_name="late", ack_policy="explicit")

    asyncio.run(add_consumer())
    found = json.loads(status(tmp_path, wanted, "--json", code=1))
    (said,) = found["problems"]
    assert said.startswith("watermark: the capture with consumer late has held it back for ")
    assert said.endswith("; start it")
    assert found["watermark_seq"] == own["seq"]

    subprocess.run(shlex.split(remove), check=True)
    assert json.loads(status(tmp_path, wanted, "--json"))["problems"] == []
