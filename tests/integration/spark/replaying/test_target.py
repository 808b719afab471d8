"""Where a replay may go, and what is said of it before and while it runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import nats
import pytest
import yaml
from nats.js.api import ConsumerConfig

from jetcapture_py.archive.watermark import ConsumerWatermark, path
from spark_jobs.replay import main
from spark_jobs.replaying.origin import origin_of
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, ask, stored
from tests.support.running import settings

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

Start = Callable[..., NatsServer]
Said = pytest.CaptureFixture[str]


def last_seq(server: NatsServer, stream: str) -> int:
    return int(ask(server.url, f"STREAM.INFO.{stream}")["state"]["last_seq"])


def add_consumer(server: NatsServer, stream: str, name: str, *filters: str) -> None:
    async def add() -> None:
        nc = await nats.connect(server.url)
        await nc.jetstream().add_consumer(stream, ConsumerConfig(durable_name=name, filter_subjects=list(filters)))
        await nc.close()

    asyncio.run(add())


@pytest.fixture
def captured(nats_server: Start, archive: Archive) -> NatsServer:
    """A server with the stream that the archive is of."""
    server = nats_server()
    add_stream(server.url, "ORDERS", "orders.>", "again.>")
    created = ask(server.url, "STREAM.INFO.ORDERS")["created"]
    archive.write([1, 2, 3], created=created, consumer="archive")
    return server


def test_a_replay_into_what_the_capture_ingests_is_refused(
    captured: NatsServer, archive: Archive, capsys: Said
) -> None:
    add_consumer(captured, "ORDERS", "archive")
    add_stream(captured.url)
    arguments = [archive.url, "ORDERS", "--servers", captured.url]
    for subject in ("{subject}", "again.a", "again.{key}"):
        assert main([*arguments, "--subject", subject]) == 1
        _, error = capsys.readouterr().err.splitlines()  # after the line with the replay id
        assert error.startswith("replay: this archive's capture consumes ")
        assert "from stream ORDERS, directly or through sources and mirrors, and would archive its own " in error
    assert last_seq(captured, "ORDERS") == 0
    assert main([*arguments, "--subject", "replay.{subject}"]) == 0
    assert main([*arguments, "--allow-loop"]) == 0
    assert (last_seq(captured, "REPLAY"), last_seq(captured, "ORDERS")) == (3, 3)


def test_a_replay_into_what_the_captured_stream_sources_or_mirrors_is_refused(
    captured: NatsServer, archive: Archive, capsys: Said
) -> None:
    add_consumer(captured, "ORDERS", "archive", "orders.>")
    add_stream(captured.url)
    ask(captured.url, "STREAM.CREATE.BETWEEN", {"name": "BETWEEN", "mirror": {"name": "REPLAY"}})
    ask(captured.url, "STREAM.CREATE.OTHER", {"name": "OTHER", "sources": [{"name": "REPLAY"}]})
    settings = ask(captured.url, "STREAM.INFO.ORDERS")["config"]
    arguments = [archive.url, "ORDERS", "--servers", captured.url, "--subject", "replay.{key}"]
    some = {"subject_transforms": [{"src": "replay.*", "dest": "orders.again"}]}
    for feed in ({"name": "BETWEEN"}, {"name": "REPLAY", **some}):
        ask(captured.url, "STREAM.UPDATE.ORDERS", {**settings, "sources": [feed]})
        assert main(arguments) == 1
        assert "from stream REPLAY, directly or through sources and mirrors, and" in capsys.readouterr().err
        assert last_seq(captured, "REPLAY") == 0
    others = {"name": "REPLAY", "filter_subject": "replay.of.others"}
    ask(captured.url, "STREAM.UPDATE.ORDERS", {**settings, "sources": [others]})
    assert main(arguments) == 0
    assert last_seq(captured, "REPLAY") == 3


def test_a_stream_is_the_archives_own_by_its_creation_or_by_its_consumer(
    captured: NatsServer, archive: Archive, capsys: Said
) -> None:
    arguments = [archive.url, "ORDERS", "--servers", captured.url]
    assert main(arguments) == 1  # no consumer any more, but the stream itself
    ask(captured.url, "STREAM.DELETE.ORDERS")
    add_stream(captured.url, "ORDERS", "orders.>", "again.>")
    add_consumer(captured, "ORDERS", "archive", "orders.>")
    assert main(arguments) == 1  # another stream, which the capture goes on with
    assert last_seq(captured, "ORDERS") == 0
    assert main([*arguments, "--subject", "again.{key}"]) == 0  # which the consumer does not take
    assert last_seq(captured, "ORDERS") == 3
    capsys.readouterr()


def test_every_consumer_of_a_shared_archive_is_known(captured: NatsServer, archive: Archive) -> None:
    archive.write([4], created="2026-01-01T00:00:00Z", consumer="other")
    archive.write([5], created="2026-01-01T00:00:00Z", consumer="archive")
    archive.write([6], bucket=HOUR + 3600, created="2026-01-01T00:00:00Z", consumer="archive")
    assert origin_of(archive.url, "ORDERS", {}).consumers == ("archive",)
    time = datetime(2026, 5, 1, 14, tzinfo=UTC)
    for name in ("archive", "other"):
        mark = ConsumerWatermark(stream="ORDERS", consumer=name, created="2026-01-01T00:00:00Z", seq=6, time=time)
        file = archive.root / path("ORDERS", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(mark.encode())
    add_consumer(captured, "ORDERS", "archive", "orders.>")
    add_consumer(captured, "ORDERS", "other", "again.>")
    assert main([archive.url, "ORDERS", "--servers", captured.url, "--subject", "again.{key}"]) == 1
    assert last_seq(captured, "ORDERS") == 0


def test_an_empty_stream_of_the_same_name_elsewhere_takes_everything_back(
    captured: NatsServer, archive: Archive, nats_server: Start
) -> None:
    elsewhere = nats_server()
    add_stream(elsewhere.url, "ORDERS", "orders.>")
    add_consumer(elsewhere, "ORDERS", "someone-else")
    assert main([archive.url, "ORDERS", "--servers", elsewhere.url]) == 0
    assert [message.subject for message in stored(elsewhere.url, "ORDERS")] == ["orders.new"] * 3


def test_nothing_is_published_when_a_message_has_no_stream_to_go_to(
    archive: Archive, nats_server: Start, capsys: Said
) -> None:
    server = nats_server()
    add_stream(server.url, "ORDERS", "orders.new")
    archive.write([1, 2])
    archive.write([3], subject="orders.used")
    for subject, message in (
        ("nowhere.{key}", r"no stream at nats://127\.0\.0\.1:\d+ listens on nowhere\.>; nothing was published"),
        ("{subject}", r"no stream listens on orders\.used; nothing was published"),
    ):
        assert main([archive.url, "ORDERS", "--servers", server.url, "--subject", subject]) == 1
        assert re.fullmatch(rf"replay: {message}", capsys.readouterr().err.splitlines()[-1])
    assert last_seq(server, "ORDERS") == 0


def test_a_dry_run_counts_and_publishes_nothing(archive: Archive, nats_server: Start, capsys: Said) -> None:
    server = nats_server()
    add_stream(server.url)
    archive.write([1, 2], payloads=[b"12345", b""], subject="orders.a")
    archive.write([3], "b", payloads=[b"123"])
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{subject}", "--dry-run"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "would replay 3 messages with 8 B",
        "to 2 subjects: replay.orders.a (2), replay.orders.new (1)",
        "from 2026-05-01T12:00:00.000001Z to 2026-05-01T12:00:00.000003Z",
        "into stream REPLAY (replay.>)",
    ]
    assert output.err == ""
    archive.write(list(range(10, 20)), columns={"_nats_subject": [f"orders.{number}" for number in range(10)]})
    assert main(arguments) == 0
    assert ", replay.orders.1 (1), " in capsys.readouterr().out
    assert main([*arguments, "--from-seq", "1000"]) == 0
    assert capsys.readouterr().out.startswith("would replay 0 messages with 0 B\ninto stream")
    assert last_seq(server, "REPLAY") == 0


def test_a_short_duplicate_window_is_worth_one_line(
    archive: Archive, nats_server: Start, tmp_path: Path, capsys: Said
) -> None:
    server = nats_server()
    add_stream(server.url, duplicate_window=100)
    add_stream(server.url, "LONG", "long.>", duplicate_window=120)
    archive.write([1, 2], timestamps=[1, 200_000_000])
    config = tmp_path / "config.yaml"  # which says where archive and servers are
    config.write_text(yaml.safe_dump(settings(server.url, archive.url)))
    arguments = ["--config", str(config)]
    assert main([*arguments, "--subject", "long.{key}"]) == 0
    assert "duplicate_window" not in capsys.readouterr().err
    assert main([*arguments, "--subject", "replay.{key}"]) == 0
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith("replay: stream REPLAY remembers message ids for only 1m40s (duplicate_window); 2m ")
