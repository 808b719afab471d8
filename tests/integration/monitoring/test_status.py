"""`jetcapture status` tells what the server and the archive know, of all replicas together."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config import block
from jetcapture_py.config.model import Config, parse
from jetcapture_py.monitoring import status as status_command
from jetcapture_py.monitoring.http_server import Answer, HttpServer
from jetcapture_py.monitoring.status import ask_replica, curve, lines, styled
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, publish, publish_and_capture, running, serve, settings, until

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
            await until(lambda: capture.blocks.unacked == 1, "it is held")
            await asyncio.sleep(0.5)
            found = json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))
            assert (found["unacked"], found["pending"], found["ack_floor"]) == (1, 0, 40)
            assert 0.5 < found["lag"] <= (datetime.now(UTC) - before).total_seconds() + 1

            async def pulling() -> bool:
                return json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))["waiting_pulls"] >= 1

            await until(pulling, "a pull waits")  # there is none for a moment when one has ended
            text = await asyncio.to_thread(status, tmp_path, wanted)
            lines = text.splitlines()
            assert lines[0].startswith("ORDERS / archive at 20")
            assert any(line.split()[:4] == ["unacked", "1", "of", "50,000"] for line in lines)
            assert any(line.startswith("watermark") and "sequence 40" in line for line in lines)
            assert any(line.startswith("last stored") for line in lines)

    asyncio.run(scenario())


def test_messages_that_wait_while_nothing_is_stored_are_a_problem(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(block, "STORING_TIME", 0.0)
    server, archive = nats_server(), tmp_path / "archive"
    soon, late = (config(server.url, archive, block={"max_age": age}) for age in ("1s", "1h"))
    asyncio.run(publish(server.url, [("orders.a", b"", None)]))
    asyncio.run(capture_all(soon))
    asyncio.run(publish(server.url, [("orders.a", b"", None)] * 3))
    asyncio.run(until(lambda: asyncio.to_thread(shown, soon, 1), "it is a problem"))
    problem = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("problem"))
    assert "storing: 3 messages wait, the oldest for " in problem
    assert ", and nothing was stored for " in problem
    assert problem.endswith("; no replica is pulling: start one")
    assert shown(late, 0)  # a block may still hold them
    asyncio.run(capture_all(soon))
    assert shown(soon, 0)


def shown(wanted: Config, code: int) -> bool:
    return asyncio.run(status_command.once(wanted)) == code


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    archive = tmp_path / "archive"
    publish_and_capture(server.url, archive, [("orders.a", b"", None)])
    (archive / "_watermark" / "ORDERS.json").write_text("{")
    found = json.loads(status(tmp_path, settings(server.url, archive), "--json", code=1))
    assert found["ack_floor"] == 1
    (problem,) = found["problems"]
    assert problem.startswith("watermark: the watermark is damaged")


def test_a_consumer_that_is_not_there_and_a_server_that_does_not_answer_are_one_line(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.a", b"", None)]))
    wanted = settings(server.url, tmp_path / "archive")
    assert status(tmp_path, wanted, code=1) == "jetcapture: consumer archive does not exist on stream ORDERS\n"
    server.stop()
    assert status(tmp_path, wanted, code=1).startswith("jetcapture: cannot connect to NATS at ")
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


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_watching_shows_all_on_a_narrow_terminal_and_on_one_that_cannot_move_its_cursor(
    nats_server: Start, tmp_path: Path, terminal: str
) -> None:
    server = nats_server()
    publish_and_capture(server.url, tmp_path / "archive", [("orders.a", b"", None)])
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (60, 40))
    watching = subprocess.Popen(
        command(tmp_path, settings(server.url, tmp_path / "archive"), "--watch"),
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": terminal},
    )
    os.close(its)
    try:
        shown = b""
        while shown.count(b"ack floor") < 2:
            assert select.select([ours], [], [], 120)[0], shown
            shown += os.read(ours, 65536)
        assert (b"\x1b" in shown) == (terminal == "xterm")
        assert "deliveredandnotstoredyet" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\s", "", shown.decode())
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time": "2100-01-01T00:00:00Z"}, "in the future"),
        ({"stream": "OTHER"}, "the watermark belongs to stream OTHER"),
    ],
)
def test_a_watermark_that_cannot_be_true_is_a_problem(
    nats_server: Start, tmp_path: Path, changes: dict[str, str], problem: str
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    publish_and_capture(server.url, archive, [("orders.a", b"", None)] * 40)
    mark = archive / "_watermark" / "ORDERS.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), **changes}))
    found = json.loads(status(tmp_path, settings(server.url, archive), "--json", code=1))
    (said,) = found["problems"]
    assert problem in said


def test_a_capture_of_other_subjects_that_holds_the_watermark_back_is_a_problem(
    nats_server: Start, tmp_path: Path
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    publish_and_capture(server.url, archive, [("orders.a", b"", None)] * 40)
    mark = archive / "_watermark" / "ORDERS.json"
    own = json.loads(mark.read_text())
    late = {**own, "consumer": "late", "seq": 50, "time": "2026-01-01T00:00:00Z"}
    idle = {**own, "consumer": "idle", "seq": 1}
    mark.write_text(json.dumps({**idle, "time": late["time"], "captures": [own, late, idle]}))
    found = json.loads(status(tmp_path, settings(server.url, archive), "--json", code=1))
    (said,) = found["problems"]
    assert said.startswith("watermark: the capture with consumer late has held it back for ")
    assert found["watermark_seq"] == own["seq"]


# ------------------------------------------------------------------ with a replica on this machine


def test_a_replica_on_this_machine_adds_what_only_it_knows(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        messages = [(f"orders.{index}", b'{"a": 1}', None) for index in range(20)]
        await publish(server.url, [*messages, ("orders.\u202ered", b"{", None)])
        sections: dict[str, Any] = {"decode": {"format": "json"}, "block": {"max_age": "1h"}}
        async with running(config(server.url, tmp_path / "archive", **sections)) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await until(lambda: capture.stats.received == 21, "all is in blocks")
                wanted = settings(server.url, tmp_path / "archive", http={"listen": f":{port}"}, **sections)
                found = json.loads(await asyncio.to_thread(status, tmp_path, wanted, "--json"))
                assert found["unacked"] == found["replica"]["unacked"] == 21
                assert found["replica"]["open_blocks"] == 21
                assert found["replica"]["quarantine"][0]["messages"] == 1
                text = await asyncio.to_thread(status, tmp_path, wanted)
                assert re.search(r"^this replica: (Ready|Healthy) for ", text, re.MULTILINE)
                assert "\nopen blocks  21 of 1,000, 21 rows, " in text
                assert "\nquarantine   1 message since " in text
                assert "\u202e" not in text
                assert "orders.\ufffdred" in text
                other = {**wanted, "source": {**wanted["source"], "consumer": "other"}}
                assert await asyncio.to_thread(ask_replica, parse(wanted)) is not None
                assert await asyncio.to_thread(ask_replica, parse(other)) is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage",
        b"[]",
        b"{}",
        b'{"captures": 1}',
        b'{"captures": [{"stream": 1}]}',
        b'{"captures": [[]]}',
        b"[" * 9999,
    ],
)
def test_what_listens_there_and_is_no_replica_is_ignored(answer: bytes) -> None:
    class Other:
        async def answer(self, path: str) -> Answer:
            return Answer(HTTPStatus.OK, "application/json", answer)

    server = HttpServer("127.0.0.1:0", Other())
    try:
        assert ask_replica(config("nats://h", "/a", http={"listen": f"127.0.0.1:{server.port}"})) is None
    finally:
        server.stop()
    assert ask_replica(config("nats://h", "/a", http={"listen": f"127.0.0.1:{server.port}"})) is None


@pytest.mark.parametrize(
    ("values", "shape"),
    [([], ""), ([0, 0], "▁▁"), ([0, 4, 8], "▁▅█"), ([*range(900)], None)],
)
def test_a_curve_is_as_high_as_its_values_and_never_too_wide(values: list[float], shape: str | None) -> None:
    found = curve(values)
    assert len(found) <= 45
    assert shape is None or found == shape
    if shape is None:
        assert found == "".join(sorted(found))


def test_lines_are_broken_below_their_values_and_coloured_by_what_they_mean() -> None:
    found = [
        "ORDERS / archive at 12:00 UTC",
        f"{'pending':<13}{'12,345':<22}not delivered yet",
        "problem      " + "x " * 30,
    ]
    whole = styled(found)
    assert whole.plain.splitlines() == [line.rstrip() for line in found]
    narrow = styled(found, 40)
    lines = narrow.plain.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert narrow.plain.split() == whole.plain.split()
    assert lines[2] == " " * 13 + "delivered yet"
    assert [str(span.style) for span in whole.spans if "red" in str(span.style)] == ["bold red"]


def test_an_answer_of_another_version_is_one_line() -> None:
    assert [*lines(None, "no server", {"time": "2026-05-01T00:00:00Z"}, {})] == [
        "no server",
        "",
        "cannot read the replica's answer; it may run another version",
    ]
