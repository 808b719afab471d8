"""The watermark of a real capture: written when it should be, true, and never in the way."""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.capture import marks
from jetcapture_py.errors import StoreError
from jetcapture_py.store import LocalStore, NoteChange
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, capture_all, config, metrics, publish, rows, running, until


def written(root: Path) -> ConsumerWatermark | None:
    found = ArchiveFiles(str(root), {}).watermark(STREAM)
    return found and found.of(CONSUMER)


async def test_a_capture_leaves_it_at_the_streams_end_and_corrects_a_time_in_the_future(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    await publish(server.url, [("orders.eu", b"%d" % index, None) for index in range(500)])
    async with running(config(server.url, archive)) as capture:
        await until(lambda: capture.source.unacked == 500, "all are held")
        found = written(archive)
        assert (found and found.time, capture.marks.watermark) == (watermark.NEVER, found)
        assert "jetcapture_watermark_timestamp_seconds" not in metrics(capture), "it promises nothing by time yet"
    first = written(archive)
    assert first is not None
    assert (first.stream, first.consumer, first.seq) == (STREAM, CONSUMER, 500)
    newest = max(row[layout.TIMESTAMP] for row in rows(archive))
    assert newest <= first.time < datetime.now(UTC)  # a job that runs now reads everything
    wrong = replace(first, time=datetime(2100, 1, 1, tzinfo=UTC))
    LocalStore(str(archive)).write_note(watermark.path(STREAM, CONSUMER), wrong.encode())
    await capture_all(config(server.url, archive))
    found = written(archive)
    assert found is not None
    assert first.time - watermark.MARGIN <= found.time < datetime.now(UTC)
    assert (found.seq, len(logged("watermark.corrected"))) == (500, 1)


@pytest.mark.parametrize(("refused", "event"), [("_watermark", "watermark"), ("_streams", "stream_config")])
async def test_a_store_that_refuses_small_files_keeps_nothing_else_from_being_stored(
    server: NatsServer, archive: Path, logged: Any, refused: str, event: str
) -> None:
    class Refusing(LocalStore):
        def write_note(self, path: str, data: bytes) -> None:
            if path.startswith(refused):
                raise StoreError("not today")
            super().write_note(path, data)

    await publish(server.url, [("orders.eu", b"x", None)] * 10)
    await capture_all(config(server.url, archive), store=Refusing(str(archive)))
    assert len(rows(archive)) == 10
    assert {"_watermark", "_streams"} - {path.name for path in archive.iterdir()} == {refused}
    assert logged(f"{event}.failed")


async def test_a_store_that_hangs_with_the_watermark_goes_on_storing(
    server: NatsServer, archive: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "TIMEOUT", 0.2)
    monkeypatch.setattr(marks, "LAST_MARK", 0.2)
    released = threading.Event()

    class Hanging(LocalStore):
        def change_note(self, path: str, change: NoteChange) -> None:
            released.wait(60)

    await publish(server.url, [("orders.eu", b"x", None)] * 10)
    try:
        capture = await capture_all(config(server.url, archive, drain_timeout="2s"), store=Hanging(str(archive)))
    finally:
        released.set()
    assert (len(rows(archive)), capture.marks.store_hangs) == (10, True)
    assert {failed["error"] for failed in logged("watermark.failed")} == {"the store did not answer in time"}


async def test_a_stop_without_the_server_does_not_blame_the_store(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    await publish(server.url, [("orders.a", b"1", None)])
    with contextlib.suppress(ExceptionGroup):  # it cannot know whether a message was in flight
        async with running(config(server.url, archive, block={"max_age": "0.1s"})) as capture:
            await until(lambda: capture.stats.acked == 1, "all is stored")
            server.stop()
            await until(lambda: not capture.source.connected, "the connection is lost")
    assert "NATS did not answer in time" in [failed["error"] for failed in logged("watermark.failed")]
    assert "the store did not answer" not in str(logged(""))
    assert not capture.marks.store_hangs


async def test_where_every_key_has_a_root_of_its_own_there_is_none(server: NatsServer, tmp_path: Path) -> None:
    await publish(server.url, [("orders.eu", b"x", None)] * 10)
    await capture_all(config(server.url, f"{tmp_path}/{{key}}"))
    assert not list(tmp_path.rglob("_watermark"))
