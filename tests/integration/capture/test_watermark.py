"""The watermark of a real capture: written when it should be, true, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.watermark import ConsumerWatermark, stretches
from jetcapture_py.capture import marks
from jetcapture_py.errors import StoreError
from jetcapture_py.store import LocalStore, NoteChange
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.nats_server import NatsServer
from tests.support.running import (
    CONSUMER,
    STREAM,
    capture_all,
    config,
    connection,
    metrics,
    publish,
    rows,
    running,
    until,
)

Start = Callable[..., NatsServer]


def written(root: Path) -> ConsumerWatermark | None:
    found = ArchiveFiles(str(root), {}).watermark(STREAM)
    return found and found.of(CONSUMER)


def test_a_capture_that_has_caught_up_leaves_it_at_the_streams_end(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"%d" % index, None) for index in range(500)])
        await capture_all(config(server.url, tmp_path / "a"))
        found = written(tmp_path / "a")
        assert found is not None
        assert (found.stream, found.consumer, found.seq) == (STREAM, CONSUMER, 500)
        newest = max(row[layout.TIMESTAMP] for row in rows(tmp_path / "a"))
        assert newest <= found.time < datetime.now(UTC)  # a job that runs now reads everything

    asyncio.run(scenario())


def test_one_that_promises_nothing_by_time_yet_is_no_metric(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"held", None)])
        async with running(config(server.url, tmp_path / "a")) as capture:
            await until(lambda: capture.source.unacked == 1, "it is held")
            found = written(tmp_path / "a")
            assert (found and found.time, capture.marks.watermark) == (watermark.NEVER, found)
            assert "jetcapture_watermark_timestamp_seconds" not in metrics(capture)

    asyncio.run(scenario())


class Watching(LocalStore):
    """Notes which messages are stored whenever the watermark is about to be written."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.seen: list[tuple[ConsumerWatermark, set[int]]] = []

    def change_note(self, path: str, change: NoteChange) -> None:
        stored = {row[layout.SEQ] for row in rows(Path(self.root))}
        super().change_note(path, change)
        if path == watermark.path(STREAM, CONSUMER) and (found := written(Path(self.root))):
            self.seen.append((found, stored))


def test_everything_that_it_promises_is_stored_when_it_is_written(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(marks, "MARK", 0.05)
        server = nats_server()
        await publish(server.url, [])
        settings = config(server.url, tmp_path / "a", key="{subject[1]}", block={"max_messages": 30, "max_age": "1s"})
        messages = [(f"orders.{'eu' if index % 7 else 'us'}", b"x", None) for index in range(400)]
        store = Watching(tmp_path / "a")
        async with running(settings, store=store):
            for start in range(0, 400, 100):
                await publish(server.url, messages[start : start + 100])
                last = start + 100
                await until(lambda last=last: store.seen[-1:] and store.seen[-1][0].seq == last, "all are promised")
        everything = {row[layout.SEQ]: row[layout.TIMESTAMP] for row in rows(tmp_path / "a")}
        assert len(everything) == 400
        assert len({found.seq for found, _ in store.seen}) > 4, "some are stored before others"
        for found, stored in store.seen:
            promised = {seq for seq, time in everything.items() if seq <= found.seq or time <= found.time}
            assert promised <= stored

    asyncio.run(scenario())


def test_a_time_in_the_future_is_corrected_and_said(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        await capture_all(config(server.url, tmp_path / "a"))
        first = written(tmp_path / "a")
        assert first is not None
        wrong = replace(first, time=datetime(2100, 1, 1, tzinfo=UTC))
        LocalStore(str(tmp_path / "a")).write_note(watermark.path(STREAM, CONSUMER), wrong.encode())
        with caplog.at_level(logging.WARNING, "jetcapture"):
            await capture_all(config(server.url, tmp_path / "a"))
        found = written(tmp_path / "a")
        assert found is not None
        assert first.time - watermark.MARGIN <= found.time < datetime.now(UTC)
        assert found.seq == 10
        assert "watermark.corrected" in caplog.text

    asyncio.run(scenario())


async def filtered(url: str, *subjects: str) -> None:
    """The consumer selects these subjects from now on."""
    async with connection(url) as client:
        settings = (await client.jetstream().consumer_info(STREAM, CONSUMER)).config
        settings.filter_subject, settings.filter_subjects = None, list(subjects)
        await client.jetstream().add_consumer(STREAM, settings)


def test_it_says_which_filters_selected_the_messages(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server()
        both = ("orders.a", "orders.b")
        settings = config(server.url, tmp_path / "a", source={"filter_subjects": both})
        messages = [(f"orders.{'ab'[index % 2]}", b"x", None) for index in range(10)]
        await publish(server.url, messages)
        await capture_all(settings)
        found = written(tmp_path / "a")
        assert found is not None
        (entry,) = found.filters
        assert (entry.after, entry.subjects, entry.doubtful, entry.consumer[:2]) == (0, both, None, "20")
        with caplog.at_level(logging.WARNING, "jetcapture"):
            for subjects in (both[:1], both):
                await filtered(server.url, *subjects)
                await publish(server.url, messages)
                await capture_all(settings)
            await publish(server.url, messages)
            await capture_all(settings)
        found = written(tmp_path / "a")
        assert found is not None
        assert found.seq == 40
        stored = {row[layout.SEQ] for row in rows(tmp_path / "a")}
        assert 12 not in stored
        present = found.filters[-1]
        assert present.subjects == both
        assert set(range(present.certain_after + 1, 41)) <= stored
        (held,) = (part for part in stretches(found.filters) if part.first <= 12 <= part.last)
        assert held.doubtful or both[1] not in held.candidates[0]
        assert [record.msg for record in caplog.records].count("watermark.filters") == 2

    asyncio.run(scenario())


class NoNotes(LocalStore):
    def write_note(self, path: str, data: bytes) -> None:
        raise StoreError("no notes today")


def test_a_store_that_refuses_it_keeps_nothing_else_from_being_stored(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        with caplog.at_level(logging.WARNING, "jetcapture"):
            await capture_all(config(server.url, tmp_path / "a"), store=NoNotes(str(tmp_path / "a")))
        assert len(rows(tmp_path / "a")) == 10
        assert "watermark.failed" in caplog.text

    asyncio.run(scenario())


def test_a_stop_without_the_server_does_not_blame_the_store(
    nats_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.a", b"1", None)])
        wanted = config(server.url, tmp_path / "archive", block={"max_age": "0.1s"})
        with contextlib.suppress(ExceptionGroup):  # it cannot know whether a message was in flight
            async with running(wanted) as capture:
                await until(lambda: capture.stats.acked == 1, "all is stored")
                server.stop()
                await until(lambda: not capture.source.connected, "the connection is lost")
        assert 'watermark.failed error="NATS did not answer in time"' in caplog.text
        assert "the store did not answer" not in caplog.text
        assert not capture.marks.store_hangs

    with caplog.at_level(logging.WARNING, "jetcapture"):
        asyncio.run(scenario())


def test_where_every_key_has_a_root_of_its_own_there_is_none(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"x", None)] * 10)
        await capture_all(config(server.url, f"{tmp_path}/{{key}}"))
        assert not list(tmp_path.rglob("_watermark"))

    asyncio.run(scenario())
