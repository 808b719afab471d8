"""Blocks larger than the memory: rows go to the spool, and a spool that fails costs nothing but room."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py import log
from jetcapture_py.archive import layout
from jetcapture_py.capture import spool
from tests.support.mounts import Volume
from tests.support.nats_server import NatsServer
from tests.support.running import (
    Message,
    capture_all,
    config,
    consumer,
    metrics,
    objects,
    publish,
    rows,
    running,
    until,
)

Start = Callable[..., NatsServer]
COUNT, SIZE = 4000, 20_000
CHANCE = random.Random(11)


def messages(count: int = COUNT, size: int = SIZE) -> list[Message]:
    """Messages that do not compress."""
    return [("orders.eu", CHANCE.randbytes(size), None) for _ in range(count)]


def settings(server: NatsServer, tmp_path: Path, **sections: Any) -> Any:
    """One block of 80 MB, in 32 MiB of memory."""
    return config(
        server.url,
        tmp_path / "archive",
        **{
            "key": "",
            "source": {"max_ack_pending": 100_000},
            "block": {"max_bytes": "1GiB", "compression": "none", "interval": "24h"},
            "limits": {"memory": "32MiB", "spool": {"path": str(tmp_path / "spool"), "size": "1GiB"}},
            **sections,
        },
    )


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    text = io.StringIO()
    log.setup("json", "debug", text)
    yield text
    log.setup("json", "info")


def failures(said: io.StringIO) -> list[dict[str, Any]]:
    return [entry for entry in map(json.loads, said.getvalue().splitlines()) if entry["event"] == "spool.failed"]


def payloads(tmp_path: Path) -> list[bytes]:
    return [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")]


def test_a_block_larger_than_the_memory_becomes_one_object(nats_server: Start, tmp_path: Path) -> None:
    sent = messages()
    most_memory = most_spooled = most_allocated = 0

    async def scenario() -> Any:
        nonlocal most_memory, most_spooled, most_allocated
        server = nats_server()
        await publish(server.url, sent)
        before = pa.total_allocated_bytes()
        async with running(settings(server, tmp_path)) as capture:

            def all_received() -> bool:
                nonlocal most_memory, most_spooled, most_allocated
                assert capture.archiver.spooling is not None
                most_memory = max(most_memory, capture.ledger.held)
                most_spooled = max(most_spooled, capture.archiver.spooling.spool.bytes)
                most_allocated = max(most_allocated, pa.total_allocated_bytes() - before)
                return capture.stats.received == COUNT

            await until(all_received, "all are received")
            assert capture.archiver.blocks.open == 1
            text = metrics(capture)
            assert "jetcapture_spool_bytes_limit 1.073741824e+09" in text
            assert "jetcapture_spool_failures_total 0.0" in text
        state = await consumer(server.url)
        assert (state.num_ack_pending, state.num_redelivered) == (0, 0)
        return capture

    capture = asyncio.run(scenario())
    assert [name.rows for name in objects(tmp_path / "archive")] == [COUNT]
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    assert capture.stats.redelivered == 0
    assert most_spooled > COUNT * SIZE // 2
    assert most_memory < 64 << 20
    assert most_allocated < 64 << 20, "of 80 MB"
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_disk_that_is_full_costs_nothing_but_room(nats_server: Start, tmp_path: Path, said: io.StringIO) -> None:
    volume = Volume(tmp_path)
    volume.mount_another(24)
    sent = messages()

    async def scenario() -> Any:
        server = nats_server()
        await publish(server.url, sent)
        limits = {"memory": "32MiB", "spool": {"path": str(volume.point), "size": "1GiB"}}
        async with running(settings(server, tmp_path, limits=limits)) as capture:
            await until(lambda: capture.stats.received == COUNT, "all are received")
        state = await consumer(server.url)
        assert (state.num_ack_pending, state.num_redelivered) == (0, 0)
        return capture

    try:
        capture = asyncio.run(scenario())
    finally:
        volume.close()
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    assert capture.stats.redelivered == 0
    assert capture.archiver.sealed_by["pressure"] > 0
    (entry,) = failures(said)
    assert "No space left on device" in entry["error"]
    assert entry["path"] == str(volume.point)


def test_a_spool_that_is_used_up_means_pressure_and_no_warning(
    nats_server: Start, tmp_path: Path, said: io.StringIO
) -> None:
    sent = messages()
    most = 0

    async def scenario() -> Any:
        nonlocal most
        server = nats_server()
        await publish(server.url, sent)
        limits = {"memory": "32MiB", "spool": {"path": str(tmp_path / "spool"), "size": "40MiB"}}
        async with running(settings(server, tmp_path, limits=limits)) as capture:

            def all_received() -> bool:
                nonlocal most
                assert capture.archiver.spooling is not None
                most = max(most, capture.archiver.spooling.spool.bytes)
                return capture.stats.received == COUNT

            await until(all_received, "all are received")
        return capture

    capture = asyncio.run(scenario())
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    assert capture.archiver.sealed_by["pressure"] > 0
    assert 0 < most <= 40 << 20
    assert len(objects(tmp_path / "archive")) < COUNT * SIZE / (16 << 20), "fewer than without a spool"
    assert failures(said) == []


def test_a_spool_that_cannot_be_made_is_warned_of_and_the_capture_goes_on(
    nats_server: Start, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "RETRY", 0.1)
    (tmp_path / "spool").write_text("a file")
    sent = messages()

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, sent)
        await capture_all(settings(server, tmp_path))

    asyncio.run(scenario())
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    (entry,) = failures(said)
    assert "File exists" in entry["error"]


def test_a_disk_that_hangs_is_warned_of_and_used_again_when_it_answers(
    nats_server: Start, tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "TIMEOUT", 0.5)
    monkeypatch.setattr(spool, "RETRY", 0.1)
    volume = Volume(tmp_path)
    volume.mount_disk(400)
    sent = messages()

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, sent[: COUNT // 2])
        limits = {"memory": "32MiB", "spool": {"path": str(volume.point / "spool"), "size": "1GiB"}}
        async with running(settings(server, tmp_path, limits=limits)) as capture:
            await until(lambda: capture.stats.received == COUNT // 2, "all are received")
            assert capture.archiver.sealed_by["pressure"] > 0
            volume.thaw()
            await publish(server.url, sent[COUNT // 2 :])
            assert capture.archiver.spooling is not None
            spooled = capture.archiver.spooling.spool
            await until(lambda: spooled.bytes > 0, "it is used again")
            await until(lambda: capture.stats.received == COUNT, "all are received")

    volume.freeze()
    try:
        asyncio.run(scenario())
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            volume.thaw()
        volume.close()
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    (entry,) = failures(said)
    assert "the disk did not answer" in entry["error"]
