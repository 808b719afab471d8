"""Several captures in one process: one log, one port, one drain, and files that are read again at SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.test_run import awaited, three
from tests.integration.monitoring.test_http import get
from tests.support.nats_server import NatsServer
from tests.support.ports import accepts, free_port
from tests.support.running import CONSUMER, Command, connection, objects, publish, rows, settings
from tests.support.several import fill, of_stream, process, write

Start = Callable[..., NatsServer]
STREAMS = ("FIRST", "SECOND", "THIRD")
MESSAGES = 300


def held(url: str, stream: str) -> int:
    """Messages that are delivered and not acknowledged; -1 before there is a consumer."""

    async def ask() -> int:
        async with connection(url) as client:
            with contextlib.suppress(NotFoundError):
                return int((await client.jetstream().consumer_info(stream, CONSUMER)).num_ack_pending)
        return -1

    return asyncio.run(ask())


def all_held(url: str, streams: tuple[str, ...] = STREAMS) -> Callable[[], bool]:
    return lambda: all(held(url, stream) == MESSAGES for stream in streams)


def filled(start: Start, streams: tuple[str, ...] = STREAMS) -> NatsServer:
    server = start()
    asyncio.run(fill(server.url, streams, MESSAGES))
    return server


def listening(running: Command) -> int:
    awaited(lambda: list(running.events("http.listening")), "it serves")
    return int(next(running.events("http.listening"))["port"])


def unacked(port: int) -> dict[str, int]:
    """Messages that each capture of a process has received and not acknowledged, by stream; none without an answer."""
    status, text = get(port, "/status.json")
    return {each["stream"]: each["unacked"] for each in json.loads(text)["captures"]} if status == 200 else {}


def troubled(port: int) -> set[str]:
    return {line.split(":")[0] for line in get(port, "/readyz")[1].splitlines()}


def files(tmp_path: Path, url: str, streams: tuple[str, ...] = STREAMS, **sections: Any) -> Path:
    directory = tmp_path / "captures"
    for stream in streams:
        write(directory, stream.lower(), of_stream(url, stream, tmp_path / "archive", **sections))
    return directory


def sequences(archive: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows(archive):
        found.setdefault(row["_nats_stream"], []).append(row["_nats_seq"])
    return found


def counts(archive: Path) -> dict[str, int]:
    return {stream: len(each) for stream, each in sequences(archive).items()}


def test_one_port_answers_for_all_and_one_signal_drains_them_all(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    with process(files(tmp_path, server.url)) as running:
        port = listening(running.start("--http", "127.0.0.1:0"))
        awaited(lambda: unacked(port) == dict.fromkeys(STREAMS, MESSAGES), "all are received")
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "all are ready")
        assert get(port, "/livez") == (200, "alive\n")
        _, text = get(port, "/metrics")
        families = list(text_string_to_metric_families(text))
        names = [family.name for family in families]
        assert len(names) == len(set(names)), "all samples of a metric are one family"
        for family in families:
            if family.name.startswith("jetcapture_") and family.name != "jetcapture_captures_failed":
                found = {(each.labels["capture"], each.labels["stream"]) for each in family.samples}
                assert found == {("first", "FIRST"), ("second", "SECOND"), ("third", "THIRD")}, family.name
        assert text.count("# TYPE process_resident_memory_bytes ") == 1
        assert get(port, "/first/readyz") == (200, "ready\n")
        status, listed = get(port, "/")
        assert status == 200
        assert all(f'href="{name}/"' in listed for name in ("first", "second", "third"))
        assert "Healthy: 3 of 3 captures" in listed
        assert "FIRST / archive" in get(port, "/first/")[1]
        assert get(port, "/fourth")[0] == 404
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/first") as page:
            assert page.url == f"http://127.0.0.1:{port}/first/", "its links are relative"
        running.drain()
    assert sequences(tmp_path / "archive") == {stream: list(range(1, MESSAGES + 1)) for stream in STREAMS}
    (draining,) = running.events("capture.draining")
    assert draining["unacked"] == 3 * MESSAGES
    assert "capture" not in draining
    for name in ("capture.started", "blocks.stored", "capture.stopped"):
        assert sorted(each["capture"] for each in running.events(name)) == ["first", "second", "third"]


def test_a_failure_drains_the_others_and_ends_the_process(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url)

    async def delete() -> None:
        async with connection(server.url) as client:
            await client.jetstream().delete_consumer("SECOND", CONSUMER)

    with process(directory) as running:
        running.start()
        awaited(all_held(server.url), "all are delivered")
        asyncio.run(delete())
        assert running.wait() == 1, running.log
    (failed,) = running.events("capture.failed")
    assert failed["capture"] == "second"
    assert counts(tmp_path / "archive") == dict.fromkeys(STREAMS, MESSAGES)
    assert sorted(each["capture"] for each in running.events("capture.stopped")) == ["first", "third"]


def test_with_keep_going_a_broken_capture_harms_no_other(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url, STREAMS[:1])
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "SECOND").write_text("in the way")
    blocked: dict[str, Any] = {"block": {"max_age": "1s"}, "drain_timeout": "1s"}
    write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "blocked", **blocked))
    write(directory, "lost", of_stream(server.url, "NO_SUCH_STREAM", tmp_path / "archive"))
    with process(directory) as running:
        port = listening(running.start("--keep-going", "--until-caught-up", "--http", "127.0.0.1:0"))
        awaited(lambda: list(running.events("capture.stopped")), "the first has caught up")
        awaited(lambda: list(running.events("capture.failed")), "one has failed")
        awaited(lambda: list(running.events("store.failed")), "the second has neither ended nor failed")
        awaited(lambda: troubled(port) == {"second", "lost"}, "they are named, and the one that has ended is not")
        lost = "lost: failed: stream NO_SUCH_STREAM does not exist"
        awaited(lambda: lost in get(port, "/readyz")[1], "the failure is known")
        awaited(lambda: "<h2>Failed<" in get(port, "/lost/")[1], "its page says so")
        assert get(port, "/livez") == (200, "alive\n")
        ended_probe = (503, "consuming: drained and ended\n")
        awaited(lambda: get(port, "/first/readyz") == ended_probe, "the one that has ended is not ready")
        ended, failed = get(port, "/first/")[1], get(port, "/lost/")[1]
        assert "<h2>Ended<" in ended
        assert "Everything received is stored and acknowledged." in ended
        assert "It has failed: stream NO_SUCH_STREAM does not exist" in failed
        assert "reconnects by itself" not in ended + failed
        assert "NO_SUCH_STREAM does not exist" in get(port, "/")[1]
        assert "jetcapture_captures_failed 1.0" in get(port, "/metrics")[1]
        facts = json.loads(get(port, "/status.json")[1])["captures"]
        assert [each["state"] for each in facts] == ["ended", "failing", "failing"]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 1, running.log
    assert counts(tmp_path / "archive") == {"FIRST": MESSAGES}


HUNG_STORE = """
import threading

class Store:
    def probe(self):
        threading.Event().wait()

    put = probe

def make(url, options):
    return Store()
"""


def test_a_capture_that_hangs_at_its_start_keeps_no_process_from_ending(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server, STREAMS[:2])
    directory = files(tmp_path, server.url, STREAMS[:1])
    (tmp_path / "hung_store.py").write_text(HUNG_STORE)
    store = {"type": "hung_store:make", "url": "hung://store"}
    write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "archive", store=store))
    with process(directory, {"PYTHONPATH": str(tmp_path)}) as running:
        running.start()
        awaited(all_held(server.url, STREAMS[:1]), "the other one runs")
        awaited(lambda: held(server.url, "SECOND") == 0, "its consumer is there, so it checks its store")
        running.drain()
    assert counts(tmp_path / "archive") == {"FIRST": MESSAGES}


def hang_up(running: Command, then: str = "config.reloaded") -> dict[str, Any]:
    before = len(list(running.events(then)))
    running.process.send_signal(signal.SIGHUP)
    awaited(lambda: len(list(running.events(then))) > before, f"{then} is logged")
    return list(running.events(then))[-1]


def outcome(event: dict[str, Any]) -> tuple[list[str], list[str], list[str], int]:
    return event["started"], event["restarted"], event["stopped"], event["unchanged"]


def test_changed_files_are_restarted_and_unchanged_ones_left_alone(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server, (*STREAMS, "FOURTH"))
    directory = files(tmp_path, server.url)
    with process(directory) as running:
        running.start()
        awaited(all_held(server.url), "all are delivered")
        write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "archive", key="changed"))
        (directory / "third.yaml").unlink()
        write(directory, "fourth", of_stream(server.url, "FOURTH", tmp_path / "archive"))
        assert outcome(hang_up(running)) == (["fourth"], ["second"], ["third"], 1)
        assert {name.stream for name in objects(tmp_path / "archive")} == {"SECOND", "THIRD"}, "these are drained"
        assert held(server.url, "FIRST") == MESSAGES
        awaited(lambda: held(server.url, "FOURTH") == MESSAGES, "the new one runs")
        assert outcome(hang_up(running)) == ([], [], [], 3)
        asyncio.run(fill(server.url, ("SECOND",), 10))
        awaited(lambda: held(server.url, "SECOND") == 10, "the changed one runs")
        running.drain()
    assert [each["capture"] for each in running.events("capture.draining") if "capture" in each] == ["second", "third"]
    changed = [row["key"] for row in rows(tmp_path / "archive") if row["_nats_stream"] == "SECOND"]
    assert changed == ["second.new"] * MESSAGES + ["changed"] * 10


def test_files_are_taken_over_together_or_not_at_all(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server, (*STREAMS, "FOURTH"))
    directory, archive = files(tmp_path, server.url), tmp_path / "archive"
    with process(directory) as running:
        port = listening(running.start("--http", "127.0.0.1:0"))
        awaited(all_held(server.url), "all are delivered")

        def refused(*expected: str) -> None:
            before = len(list(running.events("config.refused")))
            running.process.send_signal(signal.SIGHUP)
            awaited(lambda: len(list(running.events("config.refused"))) == before + len(expected), "it is refused")
            errors = sorted(event["error"] for event in list(running.events("config.refused"))[before:])
            assert all(map(str.startswith, errors, expected)), errors

        write(directory, "fourth", of_stream(server.url, "FOURTH", archive))
        (directory / "third.yaml").unlink()
        first = write(directory, "first", of_stream(server.url, "FIRST", archive, key=5))
        second = write(directory, "second", of_stream(server.url, "SECOND", archive, block={"max_aeg": 1}))
        refused(
            f"{first}: key: expected text, got 5; put it in quotes", f"{second}: block.max_aeg: unknown setting; did"
        )
        write(directory, "first", of_stream(server.url, "FIRST", archive, key="changed"))
        write(directory, "second", of_stream(server.url, "SECOND", "az://container/a"))
        refused(f"{second}: store.options: az:// does not accept them; ValueError: unable to connect")
        write(directory, "second", of_stream(server.url, "SECOND", archive))
        directory.rename(tmp_path / "moved")
        refused(f"{directory}: cannot be read: No such file or directory")
        assert not list(running.events("capture.stopped")), "nothing has changed"
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "it is ready as before")
        (tmp_path / "moved").rename(directory)
        assert outcome(hang_up(running)) == (["fourth"], ["first"], ["third"], 1)
        running.drain()
    assert counts(archive) == dict.fromkeys((*STREAMS, "FOURTH"), MESSAGES)


KEY = """
import pandas as pd
import pyarrow as pa

def key(batch, fields):
    return pa.array(pd.Series(["a key", float("nan")] * len(batch))[: len(batch)])
"""


def test_a_file_may_ask_for_another_address_websockets_and_user_code(nats_server: Start, tmp_path: Path) -> None:
    websocket, taken, free = free_port(), free_port(), free_port()
    server = nats_server(f"websocket {{ host: 127.0.0.1, port: {websocket}, no_tls: true }}")
    asyncio.run(publish(server.url, []))
    (tmp_path / "key_of.py").write_text(KEY)
    first = settings(server.url, tmp_path / "archive", http={"listen": "127.0.0.1:0"})
    with (
        Command(tmp_path, first, environment={"PYTHONPATH": str(tmp_path)}) as running,
        socket.create_server(("127.0.0.1", taken)),
    ):
        port = listening(running.start())
        awaited(lambda: held(server.url, "ORDERS") == 0, "it runs")
        then = settings(f"ws://127.0.0.1:{websocket}", tmp_path / "archive", key="key_of:key")
        write(tmp_path, "replica", {**then, "http": {"listen": f"127.0.0.1:{taken}"}})
        refused = f"http.listen: cannot listen on 127.0.0.1:{taken}: Address already in use"
        assert hang_up(running, "config.refused")["error"] == refused
        assert len(list(running.events("capture.started"))) == 1, "nothing of it is used"
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "it is ready as before")
        write(tmp_path, "replica", {**then, "http": {"listen": f"127.0.0.1:{free}"}})
        assert outcome(hang_up(running)) == ([], ["replica"], [], 0)
        assert accepts(free)
        awaited(lambda: get(free, "/readyz") == (200, "ready\n"), "it is ready at the new address")
        assert not accepts(port)
        asyncio.run(publish(server.url, three(2)))
        awaited(lambda: held(server.url, "ORDERS") == 2, "it goes on")
        running.drain()
    assert [row["key"] for row in rows(tmp_path / "archive")] == ["a key", None]


def test_a_capture_that_cannot_store_is_replaced_by_one_that_can(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    soon: dict[str, Any] = {"block": {"max_age": "0.2s"}, "drain_timeout": "2s"}
    directory = files(tmp_path, server.url, **soon)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "SECOND").write_text("in the way")
    write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "blocked", **soon))
    with process(directory) as running:
        running.start()
        awaited(lambda: list(running.events("store.failed")), "it cannot store")
        write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "archive", **soon))
        assert outcome(hang_up(running)) == ([], ["second"], [], 2)
        awaited(lambda: all(held(server.url, stream) == 0 for stream in STREAMS), "all are stored")
        running.drain()
    assert counts(tmp_path / "archive") == dict.fromkeys(STREAMS, MESSAGES)


@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_changes_under_load_lose_and_redeliver_nothing(nats_server: Start, tmp_path: Path, times: int) -> None:
    server, ended, published = filled(nats_server), threading.Event(), MESSAGES
    directory = files(tmp_path, server.url, block={"max_age": "1s"})

    def load() -> None:
        nonlocal published
        while not ended.is_set():
            asyncio.run(fill(server.url, STREAMS, 1000, published))
            published += 1000

    loading = threading.Thread(target=load)
    with process(directory) as running:
        running.start()
        awaited(lambda: list(running.events("blocks.stored")), "it runs")
        loading.start()
        try:
            for number in range(times):
                stream = STREAMS[number % len(STREAMS)]
                block = {"max_age": f"{2 + number}s"}
                write(directory, stream.lower(), of_stream(server.url, stream, tmp_path / "archive", block=block))
                assert outcome(hang_up(running)) == ([], [stream.lower()], [], 2)
        finally:
            ended.set()
            loading.join()
        awaited(lambda: all(held(server.url, stream) >= 0 for stream in STREAMS), "all run")
        running.drain()
        assert running.start("--until-caught-up").wait() == 0
    assert sequences(tmp_path / "archive") == {stream: list(range(1, published + 1)) for stream in STREAMS}
    assert sum(name.rows for name in objects(tmp_path / "archive")) == published * len(STREAMS), "none is stored twice"
    assert sum(each["redelivered"] for each in running.events("capture.stopped")) == 0


def test_sighup_during_the_start_waits_until_files_can_be_read_again(nats_server: Start, tmp_path: Path) -> None:
    server, port = nats_server(), free_port()
    asyncio.run(publish(server.url, three()))
    configuration = settings(server.url, tmp_path / "archive", http={"listen": f"127.0.0.1:{port}"})
    with Command(tmp_path, configuration) as running:
        running.start()
        awaited(lambda: accepts(port), "probes are answered")
        running.process.send_signal(signal.SIGHUP)
        awaited(lambda: list(running.events("config.reloaded")) or running.process.poll() is not None, "it is read")
        assert not list(running.events("capture.draining")), running.log
        running.drain()


def test_a_signal_during_a_restart_that_cannot_drain_ends_with_exit_code_1(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server, STREAMS[:1])
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "FIRST").write_text("in the way")
    directory = files(tmp_path, server.url, STREAMS[:1], drain_timeout="3s")
    with process(directory) as running:
        running.start()
        awaited(all_held(server.url, STREAMS[:1]), "all are delivered")
        files(tmp_path, server.url, STREAMS[:1], drain_timeout="3s", key="changed")
        hang_up(running, "capture.draining")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 1, running.log
    (failed,) = running.events("capture.failed")
    late = f"drain_timeout: messages not stored and acknowledged in time: {MESSAGES}; they are redelivered"
    assert failed["error"] == late
    assert len(list(running.events("capture.started"))) == 1


def test_a_process_whose_reload_hangs_in_user_code_drains_and_ends(nats_server: Start, tmp_path: Path) -> None:
    server, imported = nats_server(), tmp_path / "imported"
    asyncio.run(publish(server.url, three()))
    code = f"import pathlib, time\npathlib.Path({str(imported)!r}).touch()\ntime.sleep(3600)"
    (tmp_path / "endless.py").write_text(code)
    wanted = settings(server.url, tmp_path / "archive")
    with Command(tmp_path, wanted, environment={"PYTHONPATH": str(tmp_path)}) as running:
        running.start()
        awaited(lambda: held(server.url, "ORDERS") == 1000, "all are delivered")
        write(tmp_path, "replica", {**wanted, "key": "endless:key"})
        running.process.send_signal(signal.SIGHUP)
        awaited(imported.exists, "it hangs")
        running.drain()
    assert len(list(running.events("capture.started"))) == 1
    assert len(rows(tmp_path / "archive")) == len(three())
