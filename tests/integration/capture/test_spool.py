"""Blocks larger than the memory: rows go to the spool, and a spool that fails costs nothing but room."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture import spool
from tests.support.mounts import Volume
from tests.support.nats_server import NatsServer
from tests.support.running import Message, config, consumer, metrics, objects, publish, rows, running, until

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


def payloads(tmp_path: Path) -> list[bytes]:
    return [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")]


async def test_a_block_larger_than_the_memory_becomes_one_object(server: NatsServer, tmp_path: Path) -> None:
    sent = messages()
    most_memory = most_spooled = most_allocated = 0
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
        assert "jetcapture_spool_bytes_limit 1.073741824e+09" in metrics(capture)
        assert "jetcapture_spool_failures_total 0.0" in metrics(capture)
    state = await consumer(server.url)
    assert (state.num_ack_pending, state.num_redelivered) == (0, 0)
    assert [name.rows for name in objects(tmp_path / "archive")] == [COUNT]
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    assert capture.stats.redelivered == 0
    assert most_spooled > COUNT * SIZE // 2
    assert most_memory < 64 << 20
    assert most_allocated < 64 << 20, "of 80 MB"
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize(
    ("size", "error"),
    [("40MiB", ""), ("1GiB", "File exists"), ("1GiB", "No space left on device")],
    ids=["used up", "not a directory", "full"],
)
async def test_a_spool_that_is_used_up_or_fails_costs_nothing_but_room(
    server: NatsServer, tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch, size: str, error: str
) -> None:
    sent, most, place = messages(), 0, tmp_path / "spool"
    await publish(server.url, sent)
    with contextlib.ExitStack() as stack:
        if error == "File exists":
            monkeypatch.setattr(spool, "RETRY", 0.1)
            place.write_text("a file")
        elif error:
            volume = stack.enter_context(contextlib.closing(Volume(tmp_path)))
            volume.mount_another(24)
            place = volume.point
        limits = {"memory": "32MiB", "spool": {"path": str(place), "size": size}}
        async with running(settings(server, tmp_path, limits=limits)) as capture:

            def all_received() -> bool:
                nonlocal most
                assert capture.archiver.spooling is not None
                most = max(most, capture.archiver.spooling.spool.bytes)
                return capture.stats.received == COUNT

            await until(all_received, "all are received")
    state = await consumer(server.url)
    assert (state.num_ack_pending, state.num_redelivered, capture.stats.redelivered) == (0, 0, 0)
    assert payloads(tmp_path) == [payload for _, payload, _ in sent]
    assert capture.archiver.sealed_by["pressure"] > 0
    failures = logged("spool.failed")
    assert [(entry["path"], error in entry["error"]) for entry in failures] == [(str(place), True)] * bool(error)
    if not error:
        assert 0 < most <= 40 << 20
        assert len(objects(tmp_path / "archive")) < COUNT * SIZE / (16 << 20), "fewer than without a spool"
