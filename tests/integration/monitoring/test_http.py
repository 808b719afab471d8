"""What the running process answers: metrics, liveness, readiness, and the status page."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture import storing
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.errors import JetcaptureError, PermanentStoreError, StoreError
from jetcapture_py.jetstream import pulls
from jetcapture_py.monitoring import http as endpoint
from jetcapture_py.monitoring.facts import CaptureFacts, ProcessFacts, gather
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import server_at
from jetcapture_py.store import LocalStore
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    SITES,
    STREAM,
    Command,
    config,
    connection,
    publish,
    running,
    serve,
    settings,
    until,
)

Start = Callable[..., NatsServer]

ASKED_FOR = {
    "jetcapture_messages_fetched",
    "jetcapture_messages_stored",
    "jetcapture_messages_acked",
    "jetcapture_messages_redelivered",
    "jetcapture_messages_quarantined",
    "jetcapture_open_blocks",
    "jetcapture_blocks_sealed",
    "jetcapture_stored_rows",
    "jetcapture_stored_bytes",
    "jetcapture_oldest_open_block_seconds",
    "jetcapture_buffered_bytes",
    "jetcapture_store_seconds",
    "jetcapture_store_retries",
    "jetcapture_store_errors",
    "jetcapture_consumer_pending_messages",
    "jetcapture_consumer_unacked_messages",
    "jetcapture_consumer_max_ack_pending",
    "jetcapture_lag_seconds",
    "jetcapture_last_store_timestamp_seconds",
    "jetcapture_reconnects",
}


class MoodyStore(LocalStore):
    """Refuses with `error`, or does not answer while `hangs` is cleared."""

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


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """What is answered, with the facts of this moment if the capture runs in this loop."""
    if port in SITES:
        SITES[port].update()
    return await asyncio.to_thread(get, port, path, method)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by name and label values."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def ready(port: int, expected: int, words: str) -> None:
    """Wait until /readyz answers so."""

    async def answers() -> bool:
        status, body = await asked(port, "/readyz")
        return status == expected and words in body

    await until(answers, f"/readyz says {expected} {words}")


def test_the_metrics_count_what_has_happened(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        good = [(f"orders.{index % 3}", b'{"a": 1}', None) for index in range(900)]
        await publish(server.url, [*good, *[("orders.bad", b"{", None)] * 7])
        store = MoodyStore(tmp_path / "archive")
        store.error = StoreError("not today")
        wanted = config(server.url, tmp_path / "archive", decode={"format": "json"}, block={"max_age": "0.5s"})
        async with running(wanted, store=store) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await until(
                    lambda: capture.stats.received == 907 and capture.archiver.blocks.open == 4, "all is in blocks"
                )
                values = samples((await asked(port, "/metrics"))[1])
                assert values["jetcapture_messages_fetched_total", ""] == 907
                assert values["jetcapture_messages_quarantined_total", ""] == 7
                assert values["jetcapture_messages_stored_total", ""] == 0
                assert values["jetcapture_open_blocks", ""] == 4
                assert values["jetcapture_open_block_rows", ""] == 907
                assert values["jetcapture_unacked_messages", ""] == 907
                assert values["jetcapture_buffered_bytes", ""] > 907 * 8
                assert 0 < values["jetcapture_oldest_open_block_seconds", ""] < 10
                await until(lambda: capture.archiver.uploads.storing.retries > 0, "the store was tried again")
                store.error = None
                await until(lambda: capture.stats.acked == 907, "all is acknowledged")
                await capture.source.refresh()
                text = (await asked(port, "/metrics"))[1]
        values = samples(text)
        for name in ("stored", "acked", "fetched"):
            assert values[f"jetcapture_messages_{name}_total", ""] == 907
        assert values["jetcapture_blocks_sealed_total", "age"] == 4
        assert values["jetcapture_stored_rows_total", ""] == 907
        assert values["jetcapture_stored_bytes_total", ""] == sum(
            path.stat().st_size for path in (tmp_path / "archive").rglob("*.parquet")
        )
        assert values["jetcapture_store_errors_total", "temporary"] >= 1
        assert values["jetcapture_store_retries_total", ""] >= 1
        assert values["jetcapture_store_seconds_count", ""] == 4
        assert values["jetcapture_store_seconds_bucket", "+Inf"] == 4
        assert abs(time.time() - values["jetcapture_last_store_timestamp_seconds", ""]) < 30
        assert values["jetcapture_consumer_max_ack_pending", ""] == wanted.source.max_ack_pending
        assert values["jetcapture_consumer_ack_floor", ""] == 907
        assert values["jetcapture_consumer_pending_messages", ""] == 0
        assert values["jetcapture_lag_seconds", ""] == 0
        families = list(text_string_to_metric_families(text))
        assert {family.name for family in families} >= ASKED_FOR
        labels = {label for family in families for sample in family.samples for label in sample.labels}
        assert labels == {"version", "stream", "consumer", "reason", "stage", "kind", "receiver", "le"}

    asyncio.run(scenario())


def test_metrics_tell_the_lag_and_the_ages_that_are_allowed(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        async with running(config(server.url, tmp_path / "archive", block={"max_age": "1h"})) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await until(lambda: capture.stats.received == 1, "it is in a block")
                async with connection(server.url) as client:
                    await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], max_age=86_400)
                assert await capture.source.consumer.stream_info() is not None
                assert await capture.source.refresh()
                values = samples((await asked(port, "/metrics"))[1])
                assert values["jetcapture_lag_seconds", ""] > 0
                assert values["jetcapture_block_max_age_seconds", ""] == 3600
                assert values["jetcapture_stream_max_age_seconds", ""] == 86_400

    asyncio.run(scenario())


def test_readiness_tells_of_a_store_that_refuses_and_of_one_that_hangs(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "SLOW", 0.3)

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        store = MoodyStore(tmp_path / "archive")
        store.error = PermanentStoreError("access denied")
        wanted = config(server.url, tmp_path / "archive", block={"max_age": "0.1s"})
        async with running(wanted, store=store) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await ready(port, 503, "storing: access denied")
                assert samples((await asked(port, "/metrics"))[1])["jetcapture_storing", ""] == 0
                assert await asked(port, "/livez") == (200, "alive\n")
                store.error = None
                await ready(port, 200, "ready")
                store.answers.clear()
                await publish(server.url, [("orders.eu", b"", None)])
                await ready(port, 503, "storing: the store has not answered for ")
                store.answers.set()
                await ready(port, 200, "ready")
                assert samples((await asked(port, "/metrics"))[1])["jetcapture_ready", ""] == 1

    asyncio.run(scenario())


def test_a_store_that_is_away_at_the_start_is_waited_for_and_nothing_is_pulled_before(
    nats_server: Start, tmp_path: Path
) -> None:
    class AwayStore(MoodyStore):
        def probe(self) -> None:
            if self.error is not None:
                raise self.error
            super().probe()

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        store = AwayStore(tmp_path / "archive")
        store.error = StoreError("not there yet")
        whole = Capture(config(server.url, tmp_path / "archive"), store=store)
        capture, stop = whole, asyncio.Event()
        with serve(capture, "127.0.0.1:0") as port:
            task = asyncio.create_task(whole.run(stop))
            await ready(port, 503, "storing: not there yet")
            await ready(port, 503, "connected: waiting for the store\n")
            await until(lambda: capture.archiver.uploads.storing.errors["temporary"] >= 3, "it is tried again")
            assert capture.source.fetched == 0
            assert capture.source.state.unacked == 0
            store.error = None
            await ready(port, 200, "ready")
            await until(lambda: capture.stats.received == 1, "it is pulled")
            stop.set()
            await task
        store.error = PermanentStoreError("access denied")
        with pytest.raises(PermanentStoreError, match="access denied"):
            await Capture(config(server.url, tmp_path / "archive"), store=store).run(asyncio.Event())
        store.error = StoreError("not today")
        impatient = config(server.url, tmp_path / "archive", store={"retry_for": "0.5s"})
        with pytest.raises(StoreError, match="not today"):
            await asyncio.wait_for(Capture(impatient, store=store).run(asyncio.Event()), 60)
        stop.set()
        await asyncio.wait_for(Capture(config(server.url, tmp_path / "archive"), store=store).run(stop), 60)

    asyncio.run(scenario())


def test_readiness_tells_of_a_server_that_is_gone_and_of_one_that_does_not_serve(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=0.1, heartbeat=0.2, silence=1.0))

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_page_shows_names_and_values_and_nothing_else_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        wanted = config("nats://127.0.0.1:1", tmp_path, source={"consumer": "<b&archive"})
        with serve(Capture(wanted), "127.0.0.1:0") as port:
            status, page = await asked(port, "/?x=1")
            assert status == 200
            assert f"<h1>{STREAM}<small> / &lt;b&amp;archive</small></h1>" in page
            assert "<strong>Not connected yet.</strong>" in page
            assert "0 messages since" in page
            assert "<b&" not in page
            assert await asked(port, "/", "HEAD") == (200, "")
            assert (await asked(port, "/etc/passwd"))[0] == 404
            assert (await asked(port, "/metrics", "POST"))[0] == 501

    asyncio.run(scenario())


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
        assert server_at(selected.listen, None, required=False) is None
        (off,) = [record.getMessage() for record in caplog.records]
        assert off.startswith(f'http.off reason="http.listen: cannot listen on {listen}: ')


def test_the_command_answers_while_it_runs(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        wanted = settings(server.url, tmp_path / "archive", http={"listen": ":0"})
        with Command(tmp_path, wanted) as command:
            command.start()
            await until(lambda: any(command.events("http.listening")), "it listens")
            (listening,) = command.events("http.listening")
            assert listening["page"] == f"http://localhost:{listening['port']}/"
            await ready(listening["port"], 200, "ready")
            values = samples((await asked(listening["port"], "/metrics"))[1])
            assert values["process_resident_memory_bytes", ""] > 1 << 20
            assert ("jetcapture_info", f"{CONSUMER},{STREAM},0.1.0") in values
            command.process.terminate()
            assert command.wait() == 0

    asyncio.run(scenario())


def test_facts_that_cannot_be_made_stop_nothing_and_hide_no_other_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_an_address_that_is_not_ours_is_one_clear_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "203.0.113.1:80"):
            pass

    with pytest.raises(JetcaptureError, match=r"^http.listen: cannot listen on 203.0.113.1:80: Cannot assign"):
        asyncio.run(scenario())
