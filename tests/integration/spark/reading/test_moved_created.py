"""A stream whose creation time a server moves, though nothing was created again, is the same for every reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jetcapture_py.archive import watermark
from jetcapture_py.capture import marks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.verify.proof import verify
from tests.integration.spark.live import Live
from tests.integration.spark.live import Query as StreamQuery
from tests.integration.spark.reading.test_combined import Query as CombinedQuery
from tests.integration.spark.reading.test_read_stream import Captured
from tests.support.losses import api
from tests.support.nats_server import NatsServer, older_servers
from tests.support.running import CONSUMER, STREAM, connection, running, status_of, until

if TYPE_CHECKING:
    pass

Start = Callable[..., NatsServer]
MOVING = [found for found in older_servers() if found[0].startswith(("2.10.", "2.11.", "2.12."))][-1:] or [
    pytest.param("", "", marks=pytest.mark.skip(reason="no older nats-server in $JETCAPTURE_TEST_SERVERS"))
]
"""A server that moves the creation time."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the watermark often."""
    monkeypatch.setattr(marks, "MARK", 0.2)


async def created(live: Live) -> tuple[str, str]:
    """The creation times of stream and consumer."""
    async with connection(live.server.url) as client:
        stream, consumer = await api(client, f"STREAM.INFO.{STREAM}"), f"CONSUMER.INFO.{STREAM}.{CONSUMER}"
        return str(stream["created"]), str((await api(client, consumer))["created"])


async def restart_edit_restart(live: Live) -> None:
    """Do what moves creation times on servers before 2.15.1."""

    def restart() -> None:
        live.server.stop()
        live.server.start()

    await asyncio.to_thread(restart)
    async with connection(live.server.url) as client:
        stream = (await api(client, f"STREAM.INFO.{STREAM}"))["config"]
        await api(client, f"STREAM.UPDATE.{STREAM}", {**stream, "max_msgs": 1_000_000})
        consumer = (await api(client, f"CONSUMER.INFO.{STREAM}.{CONSUMER}"))["config"]
        changed = {"stream_name": STREAM, "config": {**consumer, "max_waiting": 512, "max_ack_pending": 5000}}
        await api(client, f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", changed)
    await asyncio.to_thread(restart)


async def stored(state: Capture, seq: int) -> None:
    """Wait until everything up to `seq` is stored, and the watermark says so."""

    def done() -> bool:
        state.archiver.seal_all("age")
        assert state.source.failure is None
        return state.marks.watermark is not None and state.marks.watermark.seq == seq

    await until(done, f"the watermark is at {seq}")


async def check(captured: Captured, state: Capture, seq: int) -> None:
    """Everything is stored, nothing is missing, nothing was lost."""
    await stored(state, seq)
    assert state.marks.stream.losses.total() == 0
    report = await verify(captured.config)
    assert (report.exit_code(strict=True), report.stored, report.older) == (0, seq, 0), [*report.findings]
    assert (await status_of(captured.config)).problems == ()
    assert len([*(captured.root / "_streams" / STREAM).iterdir()]) == 1


def captures(captured: Captured, read: Callable[[int], None]) -> None:
    """Capture through moves of the creation times, and from a new start after them; `read` is called with the stream's
    last sequence. The first queries begin while the archive has a part of the messages."""
    live = captured.live

    async def scenario() -> None:
        await asyncio.to_thread(live.fill, 100)
        async with running(captured.config) as state:
            await stored(state, 100)
            await asyncio.to_thread(read, 100)
            before = await created(live)
            await restart_edit_restart(live)
            await asyncio.to_thread(live.fill, 100)
            await check(captured, state, 200)
            assert before[0] != (await created(live))[0]
            await asyncio.to_thread(read, 200)
        await asyncio.to_thread(live.fill, 50)
        await asyncio.to_thread(read, 250)
        await restart_edit_restart(live)
        await asyncio.to_thread(live.fill, 50)
        async with running(captured.config) as state:
            await check(captured, state, 300)
            await asyncio.to_thread(read, 300)

    asyncio.run(scenario())


@pytest.mark.parametrize(("version", "command"), MOVING)
def test_a_moved_creation_time_changes_nothing(nats_server: Start, tmp_path: Path, version: str, command: str) -> None:
    captured = Captured(Live(nats_server(command=command)), tmp_path / "archive", {})
    queries = Queries(captured)
    captures(captured, queries.read)


class Queries:
    """Both streaming queries, which start again for each read."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.ends: list[dict[str, Any] | None] = [None, None]
        self._seen: list[list[int]] = [[], []]

    def read(self, last: int) -> None:
        """Read what is new; altogether each message once."""
        stream = StreamQuery(self._captured.live.read_options(maxOffsetsPerTrigger="70"), self.ends[0])
        with stream:
            while (batch := stream.batch()) is not None:
                self._seen[0] += batch
        combined = CombinedQuery(self._captured, self.ends[1], maxOffsetsPerTrigger="70")
        self._seen[1] += [seq for batch in combined.batches() for seq in batch]
        self.ends = [stream.end, combined.end]
        assert self._seen == [list(range(1, last + 1))] * 2


def test_an_archive_and_checkpoints_that_know_another_creation_time_know_the_stream_by_a_message(
    live: Live, tmp_path: Path
) -> None:
    captured, other = Captured(live, tmp_path / "archive", {}), "2026-01-01T00:00:00.123456789Z"
    queries = Queries(captured)
    live.fill(100)
    captured.capture()
    queries.read(100)
    mark = captured.root / watermark.path(STREAM, CONSUMER)
    moved = mark.read_text().replace(asyncio.run(created(live))[0], other)
    assert other in moved
    mark.write_text(moved)
    for end in queries.ends:
        assert end is not None
        end["message"][2] = end["created"] = other
    live.fill(20)
    queries.read(120)

    async def goes_on() -> None:
        async with running(captured.config) as state:
            await stored(state, 120)
            assert state.marks.stream.losses.total() == 0
            assert state.source.origin.created == other
            assert (await verify(captured.config)).exit_code() == 0
            assert (await status_of(captured.config)).problems == ()

    asyncio.run(goes_on())
    queries.read(120)
    assert json.loads(mark.read_text())["stream_created"] == other
