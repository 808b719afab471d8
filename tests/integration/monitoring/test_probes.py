"""Probes are answered whatever the process, its decoder and other clients are doing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from nats.js.errors import NotFoundError

from jetcapture_py.capture import side_tasks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.config.model import HttpConfig
from jetcapture_py.monitoring import health, http_server
from jetcapture_py.monitoring import http as endpoint
from jetcapture_py.monitoring.http_server import Answer, HttpServer, Starting
from jetcapture_py.transform.batch import Decoded, MessageBatch
from tests.integration.monitoring.test_http import asked, get, ready, samples
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.running import Command, config, consumer, publish, running, serve, settings, until

Start = Callable[..., NatsServer]


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send nothing by themselves."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]


def exchanged(client: socket.socket, data: bytes) -> bytes:
    """Everything that is sent back until the server closes the connection."""
    client.sendall(data)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while some := client.recv(65536):
            found += some
    return found


@contextlib.contextmanager
def served() -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", Starting())
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"], ids=["idle", "half a request"])
def test_connections_that_are_held_open_keep_no_probe_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server._Request, "timeout", 60.0)
    with served() as server, connections(server.port, 128) as held:
        for client in held:
            client.sendall(sent)
        for _ in range(3):
            assert get(server.port, "/livez") == (200, "alive\n")
    assert not caplog.records


def test_clients_that_take_no_answers_keep_no_probe_out_and_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        def answer(self, path: str) -> Answer:
            return Answer(http.HTTPStatus.OK, "text/plain", bytes(16 << 20) if path == "/large" else b"small")

    monkeypatch.setattr(http_server._Request, "timeout", 0.2)
    before = threading.active_count()
    with served() as server, connections(server.port, 4) as held:
        server.application = Large()
        for client in held:
            client.sendall(b"GET /large HTTP/1.1\r\n\r\n" * 50)
        assert get(server.port, "/small") == (200, "small")
        asyncio.run(until(lambda: threading.active_count() <= before + 1, "only the server's own thread is left"))
        for client in held:
            assert len(exchanged(client, b"")) < 16 << 20


def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server._Request, "timeout", 0.2)
    with served() as server, connections(server.port, 1) as (client,):
        assert exchanged(client, b"GET /livez HTTP/1.1\r\n") == b""


def test_what_is_no_request_is_refused_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    for sent in (
        b"\r\n\r\n",
        b"GET /livez SMTP/1.0\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        bytes(100_000),
    ):
        with served() as server, connections(server.port, 1) as (client,):
            with contextlib.suppress(BrokenPipeError):
                assert b"alive" not in exchanged(client, sent)
            assert get(server.port, "/livez") == (200, "alive\n")
    assert not caplog.records


def test_a_connection_is_for_one_request() -> None:
    for sent, status, body in (
        (b"GET /livez?a=b HTTP/1.1\r\n\r\n", b"200 OK", b"alive\n"),
        (b"HEAD /livez HTTP/1.1\r\n\r\n", b"200 OK", b""),
        (b"GET /readyz HTTP/1.0\r\n\r\nGET /livez HTTP/1.1\r\n\r\n", b"503 Service Unavailable", b"starting\n"),
    ):
        with served() as server, connections(server.port, 1) as (client,):
            head, answer = exchanged(client, sent).split(b"\r\n\r\n")
        first, *headers = head.split(b"\r\n")
        assert (first.split(b" ", 1)[1], answer) == (status, body)
        assert {b"Server: jetcapture", b"Connection: close", b"Cache-Control: no-store"} <= set(headers)


def test_an_error_in_an_answer_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def answer(self, path: str) -> Answer:
            raise RuntimeError("a bug")

    with served() as server:
        server.application = Broken()
        assert get(server.port, "/metrics") == (500, "internal error\n")
    assert [record.msg for record in caplog.records] == ["http.failed"]


def test_probes_are_answered_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    async def scenario() -> None:
        with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "127.0.0.1:0") as port:
            assert await asked(port, "/livez") == (200, "alive\n")
            answers: list[tuple[int, str]] = []
            thread = threading.Thread(target=lambda: answers.extend(get(port, path) for path in ("/livez", "/readyz")))
            thread.start()
            thread.join()  # the loop waits here, and does nothing else
            assert answers == [(200, "alive\n"), (503, "connected: not connected yet\n")]

    asyncio.run(scenario())


def test_an_event_loop_that_stands_still_for_long_is_not_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LATE", 0.3)
    monkeypatch.setattr(endpoint, "STUCK", 0.6)

    async def scenario() -> None:
        with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "127.0.0.1:0") as port:
            answers: list[tuple[int, str]] = []

            def ask() -> None:
                while not answers:
                    if get(port, "/livez")[0] == 503:
                        answers.extend(get(port, path) for path in ("/livez", "/readyz", "/metrics"))

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(30)
            alive, ready_, metrics = answers
            assert alive == metrics == (503, "the event loop does not answer\n")
            assert "running: the event loop has not run for " in ready_[1]

            async def again() -> bool:
                return await asked(port, "/livez") == (200, "alive\n")

            await until(again, "it is alive again")

    asyncio.run(scenario())


# ------------------------------------------------------------------ a decoder that hangs


class Hanging:
    """Decodes nothing until it may."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def decode(self, batch: MessageBatch) -> Decoded:
        self.goes_on.wait(60)
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))


def test_a_decoder_that_does_not_return_shows_in_readiness_and_then_in_liveness(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_tasks, "DECODER_SLOW", 0.3)

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)] * 20)
        decoder = Hanging()
        async with running(config(server.url, tmp_path / "archive"), decoder=decoder) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                try:
                    await ready(port, 503, "decoding: a batch of 20 messages has been in the decoder for ")
                    assert await asked(port, "/livez") == (200, "alive\n")
                    values = samples((await asked(port, "/metrics"))[1])
                    assert values["jetcapture_decoding_seconds", ""] > 0.3
                    assert values["jetcapture_ready", ""] == 0
                    await until(lambda: "decoder.slow" in [record.msg for record in caplog.records], "it is logged")
                    monkeypatch.setattr(health, "DECODER_STUCK", 0.4)
                    monkeypatch.setattr(health, "DECODER_STUCK_PER_MESSAGE", 0.02)

                    async def stuck() -> bool:
                        status, text = await asked(port, "/livez")
                        return status == 503 and text.startswith("decoding: a batch of 20 messages has been in the ")

                    await until(stuck, "it is not alive")
                    monkeypatch.setattr(health, "DECODER_STUCK_PER_MESSAGE", 60.0)
                    assert await asked(port, "/livez") == (200, "alive\n")
                finally:
                    decoder.goes_on.set()
                await ready(port, 200, "ready")
                assert samples((await asked(port, "/metrics"))[1])["jetcapture_decoding_seconds", ""] == 0

    asyncio.run(scenario())


def test_a_drain_with_a_hanging_key_function_ends_at_its_deadline(nats_server: Start, tmp_path: Path) -> None:
    (tmp_path / "that_hangs.py").write_text("import time\ndef key(batch, fields):\n    time.sleep(3600)\n")

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)] * 20)
        source = {"ack_wait": "1h"}
        wanted = settings(server.url, tmp_path / "archive", source=source, drain_timeout="1s", key="that_hangs:key")
        with Command(tmp_path, wanted, environment={"PYTHONPATH": str(tmp_path)}) as command:
            command.start()

            async def delivered() -> bool:
                with contextlib.suppress(NotFoundError):  # there is no consumer yet
                    return bool((await consumer(server.url)).num_ack_pending == 20)
                return False

            await until(delivered, "all are delivered", 60)
            command.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(command.wait, 60) == 1
            (failed,) = command.events("capture.failed")
            assert failed["error"].startswith("drain_timeout: messages not stored and acknowledged in time: 20")
        wanted = settings(server.url, tmp_path / "archive", source=source)
        with Command(tmp_path, wanted, "again") as command:
            assert command.start("--until-caught-up").wait() == 0, "what was given back comes at once"

    asyncio.run(scenario())


# ------------------------------------------------------------------ at the start


def test_the_command_answers_while_it_is_still_being_imported(nats_server: Start, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "def key(batch, fields):\n"
        "    return batch.column('_nats_subject').cast('string')\n"
    )

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        port = free_port()
        wanted = settings(
            server.url, tmp_path / "archive", key="slow_to_import:key", http={"listen": f"127.0.0.1:{port}"}
        )
        with Command(tmp_path, wanted, environment={"PYTHONPATH": str(tmp_path)}) as command:
            command.start()

            async def answers() -> bool:
                with contextlib.suppress(OSError):
                    return await asked(port, "/livez") == (200, "alive\n")
                return False

            await until(answers, "it answers", 60)
            assert await asked(port, "/readyz") == (503, "starting\n")
            assert (await asked(port, "/metrics"))[0] == 503
            status, page = await asked(port, "/")
            assert status == 503
            assert "http-equiv=refresh" in page, "a browser that is early gets to the status page"
            assert "capture.started" not in command.log
            (tmp_path / "go").touch()
            await ready(port, 200, "ready")
            (listening,) = command.events("http.listening")
            assert listening["port"] == port
            command.process.terminate()
            assert await asyncio.to_thread(command.wait, 60) == 0

    asyncio.run(scenario())


def test_a_start_that_takes_for_ever_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_STARTING", 0.0)
    with served() as server:
        assert get(server.port, "/livez") == (503, "starting\n")


def test_what_listens_early_is_what_the_configuration_says_and_never_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("http: {listen: '127.0.0.1:0'}\nno_such: setting\n", "http: {listen: '${NO_SUCH:-127.0.0.1:0}'}\n"):
        path.write_text(text)
        server = http_server.start_early(path)
        assert server is not None, text
        assert get(server.port, "/readyz") == (503, "starting\n")
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            get(server.port, "/readyz")
    for text in (
        "http: null\n",
        "http:\n",
        "http: {listen: '127.0.0.1:none'}\n",
        "http: {listen: '203.0.113.1:80'}\n",
        "http: []\n",
        "- http\n",
        ": : :",
    ):
        path.write_text(text)
        assert http_server.start_early(path) is None, text
    assert http_server.start_early(tmp_path / "missing.yaml") is None


def test_what_listens_early_without_a_setting_is_the_settings_default() -> None:
    assert HttpConfig().listen == http_server.DEFAULT_LISTEN


def test_a_wrong_configuration_is_still_one_line_when_something_listened_early(tmp_path: Path) -> None:
    wanted = settings(
        "nats://127.0.0.1:1", tmp_path / "archive", http={"listen": "127.0.0.1:0"}, block={"interval": "7m"}
    )
    with Command(tmp_path, wanted) as command:
        assert command.start().wait() == 2
        assert len(command.log.splitlines()) == 1
        assert "block.interval" in command.log


def test_an_address_that_turns_out_to_be_another_one_is_listened_on_instead(tmp_path: Path) -> None:
    early = http_server.start_early(Path("/no/such/file"), listen="127.0.0.1:0")
    assert early is not None
    wanted = settings("nats://127.0.0.1:1", tmp_path / "archive", http={"listen": "localhost:0"})
    with Command(tmp_path, wanted) as command:
        files = CaptureFiles([command.path])
    selected = files.select()
    server = http_server.server_at(selected.listen, early, required=selected.listen_required)
    assert server is not None
    try:
        assert get(server.port, "/readyz") == (503, "starting\n")
        assert get(server.port, "/livez") == (200, "alive\n")
        with pytest.raises(ConnectionRefusedError):
            get(early.port, "/readyz")
    finally:
        server.stop()
