"""What the running process answers whatever it, its decoder and other clients are doing: readiness and probes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture import side_tasks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.config.model import HttpConfig
from jetcapture_py.errors import PermanentStoreError, StoreError
from jetcapture_py.jetstream import pulls
from jetcapture_py.monitoring import health, http_server
from jetcapture_py.monitoring import http as endpoint
from jetcapture_py.monitoring.facts import CaptureFacts, ProcessFacts, gather
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import Answer, HttpServer, Starting
from jetcapture_py.store import LocalStore
from jetcapture_py.transform.batch import Decoded, MessageBatch
from tests.acceptance.test_run import awaited
from tests.support.nats_server import NatsServer
from tests.support.ports import accepts, free_port
from tests.support.report_page import Page
from tests.support.running import CONSUMER, SITES, STREAM, Command, config, publish, running, serve, settings, until

Start = Callable[..., NatsServer]


class MoodyStore(LocalStore):
    """Refuses with `error`, or does not answer while `answers` is cleared."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.error: StoreError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.answers.wait(60)
        if self.error is not None:
            raise self.error
        return super().put(name, data)


def get(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


async def asked(port: int, path: str) -> tuple[int, str]:
    """What is answered, with the facts of this moment if the capture runs in this loop."""
    if port in SITES:
        SITES[port].update()
    return await asyncio.to_thread(get, port, path)


def samples(text: str) -> dict[tuple[str, str], float]:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in found}


async def ready(port: int, expected: int, words: str) -> None:
    async def answers() -> bool:
        status, body = await asked(port, "/readyz")
        return status == expected and words in body

    await until(answers, f"/readyz says {expected} {words}")


async def test_a_store_that_is_away_at_the_start_is_waited_for(nats_server: Start, tmp_path: Path) -> None:
    class AwayStore(MoodyStore):
        def probe(self) -> None:
            if self.error is not None:
                raise self.error
            super().probe()

    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)])
    store = AwayStore(tmp_path / "archive")
    wanted, impatient = (config(server.url, tmp_path / "archive", store={"retry_for": time}) for time in ("1h", "0.5s"))
    store.error = StoreError("not there yet")
    capture, stop = Capture(wanted, store=store), asyncio.Event()
    with serve(capture, "127.0.0.1:0") as port:
        task = asyncio.create_task(capture.run(stop))
        await ready(port, 503, "storing: not there yet")
        await ready(port, 503, "connected: waiting for the store\n")
        await until(lambda: capture.archiver.uploads.storing.errors["temporary"] >= 3, "it is tried again")
        assert (capture.source.fetched, capture.source.state.unacked) == (0, 0)
        store.error = None
        await ready(port, 200, "ready")
        await until(lambda: capture.stats.received == 1, "it is pulled")
        stop.set()
        await task
    for configuration, error in ((wanted, PermanentStoreError("access denied")), (impatient, StoreError("not to"))):
        store.error = error
        with pytest.raises(type(error), match=str(error)):
            await asyncio.wait_for(Capture(configuration, store=store).run(asyncio.Event()), 60)
    await asyncio.wait_for(Capture(wanted, store=store).run(stop), 60)


async def test_readiness_tells_of_a_server_that_is_gone_and_of_one_that_does_not_serve(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=0.1, heartbeat=0.2, silence=1.0))
    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)])
    async with running(config(server.url, tmp_path / "archive")) as capture:
        with serve(capture, "127.0.0.1:0") as port:
            await ready(port, 200, "ready")
            server.pause()
            try:
                await ready(port, 503, "consuming: the server does not answer pulls")
            finally:
                server.resume()
            await ready(port, 200, "ready")
            server.stop()
            await ready(port, 503, "connected: no connection to NATS: [Errno 111] Connect call failed")
            server.extra_config = "authorization: {user: app, password: changed}"
            server.start()
            await ready(port, 503, "connected: no connection to NATS: Authorization Violation")
            capture.source.consumer.state = replace(capture.source.state, answered=time.monotonic() - 7200)
            assert samples((await asked(port, "/metrics"))[1])["jetcapture_lag_seconds", ""] > 7200
            page = (await asked(port, "/"))[1]
            assert "The server refuses the login." in page
            assert "held by another replica" not in page
            server.stop()
            server.extra_config = ""
            server.start()
            await ready(port, 200, "ready")
            reconnects = samples((await asked(port, "/metrics"))[1])["jetcapture_reconnects_total", ""]
            assert reconnects == capture.source.reconnects >= 1


def test_an_address_that_is_taken_ends_the_process_only_where_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        wanted = settings("nats://127.0.0.1:1", tmp_path / "archive", http={"listen": listen})
        with Command(tmp_path, wanted) as command:
            assert command.start("--until-caught-up").wait() == 1
            (failed,) = command.events("capture.failed")
            assert failed["error"] == f"http.listen: cannot listen on {listen}: Address already in use"
            files = CaptureFiles([command.path])
        selected = files.select()
        assert selected.listen_required
        # as for the default, which other processes on this machine may use
        assert http_server.server_at(selected.listen, None, required=False) is None
        (off,) = [record.getMessage() for record in caplog.records]
        assert off.startswith(f'http.off reason="http.listen: cannot listen on {listen}: ')


async def test_facts_that_cannot_be_made_stop_nothing_and_hide_no_other_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = {name: Capture(config("nats://127.0.0.1:1", tmp_path)) for name in ("bad", "good")}
    site = endpoint.Site(single=False)
    site.show(captures, {})

    def broken(history: History, process: ProcessFacts, before: CaptureFacts | None = None) -> CaptureFacts:
        return gather(history, process, before) if history.capture is captures["good"] else {}["x"]

    monkeypatch.setattr(endpoint, "gather", broken)
    late = site._made
    for _ in range(3):
        site.update()
    assert site._made > late
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "jetcapture.http"]
    assert logged.startswith("monitoring.failed error=\"KeyError: 'x'\" traceback=")
    assert "in broken" in logged
    assert site.answer("/livez").status == 200
    assert b"bad: monitoring: its state is not known since 20" in site.answer("/readyz").body
    assert b"good: connected: not connected yet" in site.answer("/readyz").body
    assert b"KeyError: &#39;x&#39;" in site.answer("/bad/").body
    monkeypatch.setattr(endpoint, "gather", gather)
    site.update()
    assert b"monitoring" not in site.answer("/readyz").body
    site.stop()


# ------------------------------------------------------------------ probes


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
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


def test_open_connections_keep_no_probe_out_and_are_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server._Request, "timeout", 60.0)
    with served() as server, connections(server.port, 128) as held:
        for number, client in enumerate(held):
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"")
        for _ in range(3):
            assert get(server.port, "/livez") == (200, "alive\n")
    monkeypatch.setattr(http_server._Request, "timeout", 0.2)
    with served() as server, connections(server.port, 1) as (client,):
        assert exchanged(client, b"GET /livez HTTP/1.1\r\n") == b""
    assert not caplog.records


def test_a_connection_is_for_one_request_and_nothing_that_is_sent_does_harm(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def answer(self, path: str) -> Answer:
            raise RuntimeError("a bug")

    long = b"GET /" + b"x" * 100_000
    with served() as server:
        for sent, status, body in (
            (b"GET /livez?a=b HTTP/1.1\r\n\r\n", b"200 OK", b"alive\n"),
            (b"HEAD /livez HTTP/1.1\r\n\r\n", b"200 OK", b""),
            (b"GET /readyz HTTP/1.0\r\n\r\nGET /livez HTTP/1.1\r\n\r\n", b"503 Service Unavailable", b"starting\n"),
        ):
            with connections(server.port, 1) as (client,):
                head, answer = exchanged(client, sent).split(b"\r\n\r\n")
            first, *headers = head.split(b"\r\n")
            assert (first.split(b" ", 1)[1], answer) == (status, body)
            assert {b"Server: jetcapture", b"Connection: close", b"Cache-Control: no-store"} <= set(headers)
        for sent in (b"\r\n\r\n", b"GET /livez SMTP/1.0\r\n\r\n", b"GET //[ HTTP/1.1\r\n\r\n", long, bytes(100_000)):
            with connections(server.port, 1) as (client,), contextlib.suppress(BrokenPipeError):
                assert b"alive" not in exchanged(client, sent)
        assert get(server.port, "/livez") == (200, "alive\n")
        assert not caplog.records
        server.application = Broken()
        assert get(server.port, "/metrics") == (500, "internal error\n")
    assert [record.msg for record in caplog.records] == ["http.failed"]


async def test_a_busy_event_loop_is_alive_and_one_that_stands_still_for_long_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LATE", 0.3)
    monkeypatch.setattr(endpoint, "STUCK", 2.0)
    with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "127.0.0.1:0") as port:
        alive = (200, "alive\n")
        answers: list[tuple[int, str]] = []

        def ask() -> None:
            answers.append(get(port, "/livez"))
            while get(port, "/livez") == alive:
                time.sleep(0.05)
            answers.extend(get(port, path) for path in ("/livez", "/readyz", "/metrics", "/"))

        thread = threading.Thread(target=ask)
        assert await asked(port, "/livez") == alive
        thread.start()
        thread.join(30)  # the loop waits here, and does nothing else
        busy, stuck, readiness, metrics, (status, page) = answers
        assert busy == alive
        assert stuck == metrics == (503, "the event loop does not answer\n")
        assert "running: the event loop has not run for " in readiness[1]
        assert (status, Page.of(page).verdict) == (503, "Not answering")
        assert "/livez asks for a restart" in page

        async def again() -> bool:
            return await asked(port, "/livez") == alive

        await until(again, "it is alive again")


class Hanging:
    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def decode(self, batch: MessageBatch) -> Decoded:
        self.goes_on.wait(60)
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))


async def test_a_decoder_that_does_not_return_shows_in_readiness_and_then_in_liveness(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_tasks, "DECODER_SLOW", 0.3)
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


# ------------------------------------------------------------------ at the start


def test_the_command_answers_while_it_is_still_being_imported(nats_server: Start, tmp_path: Path) -> None:
    waits = f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    key = "def key(batch, fields):\n    return batch.column('_nats_subject').cast('string')\n"
    (tmp_path / "slow_to_import.py").write_text(f"import pathlib, time\n{waits}{key}")

    server, port = nats_server(), free_port()
    asyncio.run(publish(server.url, [("orders.eu", b"", None)]))
    listen = {"listen": f":{port}"}
    wanted = settings(server.url, tmp_path / "archive", key="slow_to_import:key", http=listen)
    with Command(tmp_path, wanted, environment={"PYTHONPATH": str(tmp_path)}) as command:
        command.start()
        awaited(lambda: accepts(port), "it answers")
        assert get(port, "/livez") == (200, "alive\n")
        assert get(port, "/readyz") == (503, "starting\n")
        assert get(port, "/metrics")[0] == 503
        status, page = get(port, "/")
        assert status == 503
        assert "http-equiv=refresh" in page, "a browser that is early gets to the status page"
        assert "capture.started" not in command.log
        (tmp_path / "go").touch()
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "it is ready")
        (listening,) = command.events("http.listening")
        assert (listening["port"], listening["page"]) == (port, f"http://localhost:{port}/")
        values = samples(get(port, "/metrics")[1])
        assert values["process_resident_memory_bytes", ""] > 1 << 20
        assert ("jetcapture_info", f"{CONSUMER},{STREAM},{version('jetcapture')}") in values
        command.drain()


def test_what_listens_early_is_what_the_configuration_says_and_never_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_STARTING", 0.0)
    assert HttpConfig().listen == http_server.DEFAULT_LISTEN
    path = tmp_path / "config.yaml"
    for text in ("http: {listen: '127.0.0.1:0'}\nno_such: setting\n", "http: {listen: '${NO_SUCH:-127.0.0.1:0}'}\n"):
        path.write_text(text)
        server = http_server.start_early(path)
        assert server is not None, text
        assert [get(server.port, path) for path in ("/readyz", "/livez")] == [(503, "starting\n")] * 2, "for too long"
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            get(server.port, "/readyz")
    wrong = ("http: null", "http:", "http: {listen: '127.0.0.1:none'}", "http: {listen: '203.0.113.1:80'}", "http: []")
    for text in (*wrong, "- http", ": : :"):
        path.write_text(f"{text}\n")
        assert http_server.start_early(path) is None, text
    assert http_server.start_early(tmp_path / "missing.yaml") is None


def test_an_address_that_turns_out_to_be_another_one_is_listened_on_instead() -> None:
    early = http_server.start_early(Path("/no/such/file"), listen="127.0.0.1:0")
    assert early is not None
    server = http_server.server_at("localhost:0", early, required=True)
    assert server is not None
    try:
        assert get(server.port, "/readyz") == (503, "starting\n")
        assert get(server.port, "/livez") == (200, "alive\n")
        with pytest.raises(ConnectionRefusedError):
            get(early.port, "/readyz")
    finally:
        server.stop()
