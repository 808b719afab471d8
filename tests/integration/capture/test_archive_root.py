"""The real daemon, whose archive's directory goes away under load and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.manage.check import check
from jetcapture_py.store import LocalStore
from tests.support.mounts import Volume
from tests.support.nats_server import NatsServer
from tests.support.outages import readiness
from tests.support.ports import free_port
from tests.support.running import Command, capture_all, config, consumer, objects, publish, settings, until

COUNT = 300


class Replaced:
    """A directory in the place of a volume, which leaves an empty one behind."""

    def __init__(self, directory: Path) -> None:
        self.point, self.real = directory / "mnt", directory / "mnt"
        self.point.mkdir()

    def unmount(self) -> None:
        self.real = self.point.rename(self.point.with_name("elsewhere"))
        self.point.mkdir()

    def mount(self) -> None:
        self.point.rmdir()
        self.real = self.real.rename(self.point)

    def close(self) -> None:
        """Nothing is mounted."""


@pytest.fixture(params=[Replaced, Volume])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replaced | Volume]:
    found = request.param(tmp_path)
    yield found
    found.close()


def stored(root: Path) -> Counter[int]:
    """How often each sequence is stored."""
    found = Counter[int]()
    for name in objects(root):
        found.update(pq.ParquetFile(root / name.path).read([layout.SEQ]).column(0).to_pylist())
    return found


async def acknowledged(url: str, published: int) -> int:
    state = await consumer(url)
    return published - int(state.num_pending or 0) - int(state.num_ack_pending or 0)


async def test_nothing_is_acknowledged_while_the_root_is_away_and_everything_is_stored_once_it_is_back(
    server: NatsServer, tmp_path: Path, volume: Replaced | Volume
) -> None:
    port = free_port()
    messages = [(f"orders.{index % 5}", b"%d" % index, None) for index in range(COUNT)]
    await publish(server.url, messages)
    sections = {"block": {"max_age": "200ms"}, "http": {"listen": f"127.0.0.1:{port}"}}
    with Command(tmp_path, settings(server.url, volume.point, **sections)) as command:
        command.start()
        await until(lambda: readiness(port)[0] == 200, "it is ready", timeout=60)

        async def all_of(count: int) -> bool:
            assert command.process.poll() is None, command.log
            return await acknowledged(server.url, count) == count

        await until(lambda: all_of(COUNT), "the first ones are stored and acknowledged", timeout=60)
        publishing = asyncio.create_task(publish(server.url, messages * 4))
        first = len(objects(volume.real))
        await until(lambda: len(objects(volume.real)) > first, "more is stored", timeout=60)
        volume.unmount()
        await publishing
        await publish(server.url, messages)

        async def unready() -> bool:
            status, text = await asyncio.to_thread(readiness, port)
            return status == 503 and "is it mounted" in text and str(volume.point) in text

        await until(unready, "/readyz says so", timeout=60)
        failures = len(list(command.events("store.failed")))
        await until(lambda: len(list(command.events("store.failed"))) > failures, "it is tried again", timeout=60)
        assert await acknowledged(server.url, 6 * COUNT) <= len(stored(volume.real)) <= 5 * COUNT
        assert not volume.point.exists() or list(volume.point.iterdir()) == []
        volume.mount()
        await until(lambda: all_of(6 * COUNT), "everything is stored and acknowledged", timeout=120)

        async def ready() -> bool:
            return (await asyncio.to_thread(readiness, port))[0] == 200

        await until(ready, "it is ready again", timeout=60)
    assert stored(volume.real) == Counter(range(1, 6 * COUNT + 1))
    assert (volume.real / layout.MARKER).exists()


async def test_a_new_archive_of_a_consumer_that_has_acknowledged_before_is_warned_of(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    await publish(server.url, [("orders.a", b"x", None)] * 20)
    settings = config(server.url, archive)
    for _ in range(2):
        await capture_all(settings)
    assert logged("archive.new") == []
    archive.rename(archive.with_name("elsewhere"))
    for mount_point in (False, True):
        if mount_point:
            archive.mkdir()
        findings = await check(settings)
        (warning,) = [each for each in findings.items if (each.about, each.level) == ("store", "warning")]
        assert "is empty or missing, but the consumer has acknowledged messages" in warning.text
        assert (archive.exists(), list(archive.glob("*"))) == (mount_point, [])
    LocalStore(str(archive)).probe()  # a start that ended before it stored anything
    await capture_all(settings)
    (found,) = logged("archive.new")
    assert (found["root"], found["ack_floor"]) == (str(archive), 20)
