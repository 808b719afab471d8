"""SIGHUP reads the configuration files again: what has changed is drained and restarted, and nothing else."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_run import awaited, three
from tests.acceptance.test_several import MESSAGES, STREAMS, all_held, counts, files, filled, held, sequences
from tests.integration.monitoring.test_http import get
from tests.support.nats_server import NatsServer
from tests.support.ports import accepts, free_port
from tests.support.running import Command, objects, publish, rows, settings
from tests.support.several import fill, of_stream, process, write

Start = Callable[..., NatsServer]


def hang_up(running: Command, then: str = "config.reloaded") -> dict[str, Any]:
    """Send SIGHUP, and return the event that follows."""
    before = len(list(running.events(then)))
    running.process.send_signal(signal.SIGHUP)
    awaited(lambda: len(list(running.events(then))) > before, f"{then} is logged")
    return list(running.events(then))[-1]


def outcome(event: dict[str, Any]) -> tuple[list[str], list[str], list[str], int]:
    return event["started"], event["restarted"], event["stopped"], event["unchanged"]


def test_changed_files_are_restarted_new_ones_started_removed_ones_drained_and_others_left_alone(
    nats_server: Start, tmp_path: Path
) -> None:
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


def test_files_are_taken_over_together_or_not_at_all_and_every_problem_is_logged(
    nats_server: Start, tmp_path: Path
) -> None:
    server = filled(nats_server, (*STREAMS, "FOURTH"))
    directory = files(tmp_path, server.url)
    archive = tmp_path / "archive"
    with process(directory) as running:
        running.start("--http", "127.0.0.1:0")
        awaited(all_held(server.url), "all are delivered")
        port = next(running.events("http.listening"))["port"]

        def refused(count: int) -> list[str]:
            before = len(list(running.events("config.refused")))
            running.process.send_signal(signal.SIGHUP)
            awaited(lambda: len(list(running.events("config.refused"))) == before + count, "it is refused")
            return sorted(event["error"] for event in list(running.events("config.refused"))[before:])

        write(directory, "fourth", of_stream(server.url, "FOURTH", archive))
        (directory / "third.yaml").unlink()
        first = write(directory, "first", of_stream(server.url, "FIRST", archive, key=5))
        second = write(directory, "second", of_stream(server.url, "SECOND", archive, block={"max_aeg": 1}))
        assert refused(2) == [
            f"{first}: key: expected text, got 5; put it in quotes",
            f"{second}: block.max_aeg: unknown setting; did you mean max_age?",
        ]
        write(directory, "first", of_stream(server.url, "FIRST", archive, key="changed"))
        write(directory, "second", of_stream(server.url, "SECOND", "az://container/a"))
        (unusable,) = refused(1)
        assert unusable.startswith(
            f"{second}: store.options: az:// does not accept them; ValueError: unable to connect"
        )
        write(directory, "second", of_stream(server.url, "SECOND", archive))
        copy = write(directory, "third", of_stream(server.url, "FIRST", archive))
        taken = f"{first} already captures stream FIRST with consumer archive into this archive"
        assert refused(1) == [f"{copy}: {taken}; remove one of the two files"]
        directory.rename(tmp_path / "moved")
        assert refused(1) == [f"{directory}: cannot be read: No such file or directory"]
        assert not list(running.events("capture.stopped")), "nothing has changed"
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "it is ready as before")
        (tmp_path / "moved").rename(directory)
        copy.unlink()
        assert outcome(hang_up(running)) == (["fourth"], ["first"], ["third"], 1)
        running.drain()
    assert counts(archive) == dict.fromkeys((*STREAMS, "FOURTH"), MESSAGES)


KEY = """
import pandas as pd
import pyarrow as pa

def key(batch, fields):
    return pa.array(pd.Series(["a key", float("nan")] * len(batch))[: len(batch)])
"""


def test_a_file_may_ask_for_another_address_websockets_and_user_code_without_a_restart_of_the_process(
    nats_server: Start, tmp_path: Path
) -> None:
    websocket, taken, free = free_port(), free_port(), free_port()
    server = nats_server(f"websocket {{ host: 127.0.0.1, port: {websocket}, no_tls: true }}")
    asyncio.run(publish(server.url, []))
    (tmp_path / "key_of.py").write_text(KEY)
    first = settings(server.url, tmp_path / "archive", http={"listen": "127.0.0.1:0"})
    with (
        Command(tmp_path, first, environment={"PYTHONPATH": str(tmp_path)}) as running,
        socket.create_server(("127.0.0.1", taken)),
    ):
        running.start()
        awaited(lambda: held(server.url, "ORDERS") == 0, "it runs")
        port = next(running.events("http.listening"))["port"]
        then = settings(f"ws://127.0.0.1:{websocket}", tmp_path / "archive", key="key_of:key")
        write(tmp_path, "replica", {**then, "http": {"listen": f"127.0.0.1:{taken}"}})
        refused = hang_up(running, "config.refused")["error"]
        taken_by_another = f"http.listen: cannot listen on 127.0.0.1:{taken}: Address already in use"
        assert refused == taken_by_another
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


def test_a_capture_that_cannot_store_is_replaced_by_one_that_can_and_loses_nothing(
    nats_server: Start, tmp_path: Path
) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url, block={"max_age": "0.2s"}, drain_timeout="2s")
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "SECOND").write_text("in the way")
    write(
        directory,
        "second",
        of_stream(server.url, "SECOND", tmp_path / "blocked", block={"max_age": "0.2s"}, drain_timeout="2s"),
    )
    with process(directory) as running:
        running.start()
        awaited(lambda: list(running.events("store.failed")), "it cannot store")
        write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "archive", block={"max_age": "0.2s"}))
        assert outcome(hang_up(running)) == ([], ["second"], [], 2)
        awaited(lambda: all(held(server.url, stream) == 0 for stream in STREAMS), "all are stored")
        running.drain()
    assert counts(tmp_path / "archive") == dict.fromkeys(STREAMS, MESSAGES)


@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_files_that_change_under_load_lose_nothing(nats_server: Start, tmp_path: Path, times: int) -> None:
    redelivered, _ = change_under_load(nats_server().url, tmp_path, times)
    assert redelivered == 0


def change_under_load(url: str, tmp_path: Path, times: int) -> tuple[int, int]:
    """Change one of three files `times` times while messages arrive; return how many were redelivered, and how many
    there were."""
    asyncio.run(fill(url, STREAMS, MESSAGES))
    directory, ended = files(tmp_path, url, block={"max_age": "1s"}), threading.Event()
    published = MESSAGES

    def load() -> None:
        nonlocal published
        while not ended.is_set():
            asyncio.run(fill(url, STREAMS, 1000, published))
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
                write(directory, stream.lower(), of_stream(url, stream, tmp_path / "archive", block=block))
                assert outcome(hang_up(running)) == ([], [stream.lower()], [], 2)
        finally:
            ended.set()
            loading.join()
        awaited(lambda: all(held(url, stream) >= 0 for stream in STREAMS), "all run")
        running.drain()
        assert running.start("--until-caught-up").wait() == 0
    assert sequences(tmp_path / "archive") == {stream: list(range(1, published + 1)) for stream in STREAMS}
    assert sum(name.rows for name in objects(tmp_path / "archive")) == published * len(STREAMS), "none is stored twice"
    return sum(each["redelivered"] for each in running.events("capture.stopped")), published * len(STREAMS)


def test_sighup_during_the_start_is_held_until_the_process_can_read_its_file_again(
    nats_server: Start, tmp_path: Path
) -> None:
    """Before, the process has imported nothing: probes are answered first."""
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
    assert (
        failed["error"]
        == f"drain_timeout: messages not stored and acknowledged in time: {MESSAGES}; they are redelivered"
    )
    assert len(list(running.events("capture.started"))) == 1


def test_a_process_whose_reload_hangs_in_user_code_drains_and_ends(nats_server: Start, tmp_path: Path) -> None:
    server, imported = nats_server(), tmp_path / "imported"
    asyncio.run(publish(server.url, three()))
    code = f"import pathlib, time\npathlib.Path({str(imported)!r}).touch()\ntime.sleep(3600)"
    (tmp_path / "endless.py").write_text(code)
    with Command(
        tmp_path, settings(server.url, tmp_path / "archive"), environment={"PYTHONPATH": str(tmp_path)}
    ) as running:
        running.start()
        awaited(lambda: held(server.url, "ORDERS") == 1000, "all are delivered")
        write(tmp_path, "replica", settings(server.url, tmp_path / "archive", key="endless:key"))
        running.process.send_signal(signal.SIGHUP)
        awaited(imported.exists, "it hangs")
        running.drain()
    assert len(list(running.events("capture.started"))) == 1
    assert len(rows(tmp_path / "archive")) == len(three())
