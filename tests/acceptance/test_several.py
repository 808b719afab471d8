"""Several captures in one process: one log, one port, one drain, and files that change while it runs."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nats.js.errors import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.test_run import awaited, three
from tests.integration.monitoring.test_http import get
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, Command, connection, publish, rows, settings
from tests.support.several import fill, of_stream, process, write

Start = Callable[..., NatsServer]
STREAMS = ("FIRST", "SECOND", "THIRD")
MESSAGES = 300


async def _held(url: str, stream: str, consumer: str) -> int:
    async with connection(url) as client:
        try:
            return int((await client.jetstream().consumer_info(stream, consumer)).num_ack_pending)
        except NotFoundError:
            return -1


def held(url: str, stream: str, consumer: str = CONSUMER) -> int:
    """Messages that are delivered and not acknowledged; -1 before there is a consumer."""
    return asyncio.run(_held(url, stream, consumer))


def all_held(url: str, streams: tuple[str, ...] = STREAMS, consumer: str = CONSUMER) -> Callable[[], bool]:
    return lambda: all(held(url, stream, consumer) == MESSAGES for stream in streams)


def filled(start: Start, streams: tuple[str, ...] = STREAMS) -> NatsServer:
    """A server with `MESSAGES` messages in each stream."""
    server = start()
    asyncio.run(fill(server.url, streams, MESSAGES))
    return server


def unacked(port: int) -> dict[str, int]:
    """Messages that each capture of a process has received and not acknowledged, by stream; none without an answer."""
    status, text = get(port, "/status.json")
    return {each["stream"]: each["unacked"] for each in json.loads(text)["captures"]} if status == 200 else {}


def troubled(port: int) -> set[str]:
    """The captures that /readyz names."""
    return {line.split(":")[0] for line in get(port, "/readyz")[1].splitlines()}


def files(tmp_path: Path, url: str, streams: tuple[str, ...] = STREAMS, **sections: Any) -> Path:
    """A directory with a configuration for each stream, all with the same archive."""
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


def test_every_stream_is_captured_and_one_signal_drains_them_all(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    with process(files(tmp_path, server.url)) as running:
        running.start("--http", "127.0.0.1:0")
        awaited(lambda: list(running.events("http.listening")), "it serves")
        port = next(running.events("http.listening"))["port"]
        awaited(lambda: unacked(port) == dict.fromkeys(STREAMS, MESSAGES), "all are received")
        running.drain()
    assert sequences(tmp_path / "archive") == {stream: list(range(1, MESSAGES + 1)) for stream in STREAMS}
    (draining,) = running.events("capture.draining")
    assert draining["unacked"] == 3 * MESSAGES
    assert "capture" not in draining
    for name in ("capture.started", "blocks.stored", "capture.stopped"):
        assert sorted(each["capture"] for each in running.events(name)) == ["first", "second", "third"]


def test_one_port_answers_for_all_and_for_each(nats_server: Start, tmp_path: Path) -> None:
    server = filled(nats_server)
    with process(files(tmp_path, server.url)) as running:
        running.start("--http", "127.0.0.1:0")
        awaited(lambda: list(running.events("http.listening")), "it serves")
        port = next(running.events("http.listening"))["port"]
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
        assert list(unacked(port).items()) == [(stream, MESSAGES) for stream in STREAMS]
        assert get(port, "/fourth")[0] == 404
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/first") as page:
            assert page.url == f"http://127.0.0.1:{port}/first/", "its links are relative"
        running.drain()


def test_with_one_file_nothing_in_logs_and_metrics_names_the_capture(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, three()))
    configuration = settings(server.url, tmp_path / "archive", http={"listen": "127.0.0.1:0"})
    with Command(tmp_path, configuration) as running:
        running.start()
        awaited(lambda: list(running.events("http.listening")), "it serves")
        port = next(running.events("http.listening"))["port"]
        awaited(lambda: get(port, "/readyz") == (200, "ready\n"), "it is ready")
        families = list(text_string_to_metric_families(get(port, "/metrics")[1]))
        running.drain()
    labels = {family.name: {*family.samples[0].labels} for family in families if family.name.startswith("jetcapture")}
    assert labels.pop("jetcapture_info") == {"version", "stream", "consumer"}
    assert labels.pop("jetcapture_blocks_sealed") == {"reason"}
    assert labels.pop("jetcapture_messages_quarantined_by_stage") == {"stage"}
    assert not any("capture" in each or "stream" in each for each in labels.values())
    assert "jetcapture_captures_failed" not in labels
    lines = [json.loads(line) for line in running.log.splitlines()]
    assert not any("capture" in line for line in lines)
    (started,) = running.events("capture.started")
    assert {*started} == {"ts", "level", "event", "stream", "consumer", "servers", "stored_within"}


def test_a_failure_drains_the_others_and_ends_the_process_with_its_exit_code(
    nats_server: Start, tmp_path: Path
) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url)
    with process(directory) as running:
        running.start()
        awaited(all_held(server.url), "all are delivered")

        async def delete() -> None:
            async with connection(server.url) as client:
                await client.jetstream().delete_consumer("SECOND", CONSUMER)

        asyncio.run(delete())
        assert running.wait() == 1, running.log
    (failed,) = running.events("capture.failed")
    assert failed["capture"] == "second"
    assert counts(tmp_path / "archive") == dict.fromkeys(STREAMS, MESSAGES)
    assert sorted(each["capture"] for each in running.events("capture.stopped")) == ["first", "third"]


def test_with_keep_going_a_broken_capture_harms_no_other_and_says_what_is_wrong(
    nats_server: Start, tmp_path: Path
) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url, block={"max_age": "1s"})
    write(directory, "lost", of_stream(server.url, "NO_SUCH_STREAM", tmp_path / "archive"))
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "THIRD").write_text("in the way")
    source, blocked = {"consumer": "blocked"}, {"block": {"max_age": "1s"}, "drain_timeout": "1s"}
    write(directory, "blocked", of_stream(server.url, "THIRD", tmp_path / "blocked", source=source, **blocked))
    with process(directory) as running:
        running.start("--keep-going", "--http", "127.0.0.1:0")
        awaited(lambda: all(held(server.url, stream) == 0 for stream in STREAMS), "the others are stored")
        awaited(lambda: list(running.events("store.failed")), "one cannot store")
        awaited(lambda: list(running.events("capture.failed")), "one has failed")
        port = next(running.events("http.listening"))["port"]
        awaited(lambda: troubled(port) == {"blocked", "lost"}, "both are named")
        failed = "lost: failed: stream NO_SUCH_STREAM does not exist"
        awaited(lambda: failed in get(port, "/readyz")[1], "the failure is known")
        assert get(port, "/livez") == (200, "alive\n")
        assert get(port, "/first/readyz") == (200, "ready\n")
        assert "jetcapture_captures_failed 1.0" in get(port, "/metrics")[1]
        assert "NO_SUCH_STREAM does not exist" in get(port, "/")[1]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 1, running.log
    assert counts(tmp_path / "archive") == dict.fromkeys(STREAMS, MESSAGES)


def test_a_capture_that_has_failed_or_ended_says_so_on_its_page_and_an_ended_one_does_not_make_the_process_unready(
    nats_server: Start, tmp_path: Path
) -> None:
    server = filled(nats_server)
    directory = files(tmp_path, server.url, STREAMS[:1])
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "SECOND").write_text("in the way")
    write(directory, "second", of_stream(server.url, "SECOND", tmp_path / "blocked", drain_timeout="1s"))
    write(directory, "lost", of_stream(server.url, "NO_SUCH_STREAM", tmp_path / "archive"))
    with process(directory) as running:
        running.start("--keep-going", "--until-caught-up", "--http", "127.0.0.1:0")
        awaited(lambda: list(running.events("capture.stopped")), "the first has caught up")
        awaited(lambda: list(running.events("capture.failed")), "one has failed")
        awaited(lambda: list(running.events("store.failed")), "the second has neither ended nor failed")
        port = next(running.events("http.listening"))["port"]
        awaited(lambda: troubled(port) == {"second", "lost"}, "they are named, and the one that has ended is not")
        awaited(lambda: "<h2>Failed<" in get(port, "/lost/")[1], "its page says so")
        assert get(port, "/livez") == (200, "alive\n")
        ended_probe = (503, "consuming: drained and ended\n")
        awaited(lambda: get(port, "/first/readyz") == ended_probe, "the one that has ended is not ready")
        ended, failed = get(port, "/first/")[1], get(port, "/lost/")[1]
        assert "<h2>Ended<" in ended
        assert "Everything received is stored and acknowledged." in ended
        assert "It has failed: stream NO_SUCH_STREAM does not exist" in failed
        assert "reconnects by itself" not in ended + failed
        facts = json.loads(get(port, "/status.json")[1])["captures"]
        assert [each["state"] for each in facts] == ["ended", "failing", "failing"]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 1, running.log


HUNG_STORE = """
import threading

class Store:
    def probe(self):
        threading.Event().wait()

    put = probe

def make(url, options):
    return Store()
"""


def test_a_capture_that_hangs_while_it_starts_does_not_keep_the_process_from_ending(
    nats_server: Start, tmp_path: Path
) -> None:
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
