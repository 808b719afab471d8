"""Every fault at least once, from fixed seeds: nothing is lost, nothing is read twice. `make chaos` is the long run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture import side_tasks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import SourceError
from jetcapture_py.store import LocalStore
from spark_jobs.archive import read_archive
from tests.chaos.archive import mount, unmount
from tests.chaos.faults import FAULTS
from tests.chaos.proxy import Proxy
from tests.chaos.trial import Outcome, Storm, each_once, in_turn, trial
from tests.chaos.world import Shape, World
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, config, connection, consumer, publish, rows, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK: dict[str, Any] = {"ack_wait": 1.0, "max_age": 0.5, "hold": 0.3}
CLUSTER = ("server.kill_leader", "server.step_down", "server.lose_quorum")
S3 = tuple(name for name in FAULTS if name.startswith("store.") and name not in ("store.unwritable", "store.full"))
HISTORY = ("consumer.delete", "stream.delete_messages", "stream.purge", "stream.recreate")
V2 = "jetstream { domain: chaos }\nfeature_flags { js_ack_fc_v2: true }"
"""Servers put their domain and the account into the subjects of acknowledgements."""


def survive(directory: Path, storm: Storm, shape: Shape) -> Outcome:
    """The outcome of a storm, after which publishing goes on until enough is published, however slow the machine is."""

    async def long_enough(world: World) -> None:
        await storm(world)
        while world.publisher.published - int(world.ledger.excused.sum()) <= 1000:
            world.check_alive()
            await asyncio.sleep(0.1)

    outcome = asyncio.run(trial(directory, shape, 20261121, long_enough, settle=600))
    assert outcome.problems == []
    assert outcome.verdict.messages > 1000
    return outcome


def test_nothing_is_lost_or_read_twice_when_the_disk_is_full(tmp_path: Path) -> None:
    try:
        mount(tmp_path, 1 << 20)
    except OSError as error:
        pytest.skip(f"it takes a disk of its own to fill it up, and one cannot be mounted here: {error}")
    unmount(tmp_path)
    outcome = survive(tmp_path, in_turn(["store.full"], pause=0.2), Shape(**QUICK, disk=64 << 20))
    logs = "".join(path.read_text() for path in tmp_path.glob("replica-*.log"))
    assert "the disk is full" in logs
    assert outcome.verdict.messages == outcome.published


@pytest.mark.exhaustive
def test_nothing_is_lost_or_read_twice_when_s3_answers_wrongly_late_or_not_at_all(tmp_path: Path) -> None:
    bundles = {"block": {"bundles": 4}}
    outcome = survive(tmp_path, in_turn(S3, pause=0.1), Shape(**QUICK, store="s3", rate=1000, sections=bundles))
    assert outcome.counts["store faults"] == len(S3)
    assert outcome.verdict.messages == outcome.published


def test_nothing_is_lost_or_read_twice_when_consumer_and_stream_are_deleted_and_created_again(tmp_path: Path) -> None:
    order = [name for fault in HISTORY for name in (fault, "daemon.stop")]

    async def marked(world: World) -> None:
        await in_turn(["daemon.stop"], pause=0.3)(world)  # it writes the watermark
        while not any((tmp_path / "archive" / "_watermark").rglob("*.json")):
            world.check_alive()
            await asyncio.sleep(0.1)
        await in_turn(order, pause=0.3)(world)

    outcome = survive(tmp_path, marked, Shape(**QUICK, replicas=3))
    assert 0 < outcome.verdict.excused < outcome.published
    assert outcome.verdict.watermarks >= 1


def test_nothing_is_lost_or_read_twice_when_the_active_replica_is_killed_frozen_or_stopped(tmp_path: Path) -> None:
    faults = ["daemon.kill", "daemon.freeze", "daemon.stop", "server.kill"]
    outcome = survive(tmp_path, in_turn(faults, pause=0.3), Shape(**QUICK, replicas=2, ordered=True))
    assert outcome.counts["daemon kills"] > 0
    assert outcome.verdict.messages == outcome.published


@pytest.mark.exhaustive
def test_nothing_is_lost_or_read_twice_when_a_cluster_loses_leader_and_quorum_and_acks_name_domain_and_account(
    tmp_path: Path,
) -> None:
    lengths = set()
    storm = in_turn(CLUSTER, pause=0.5)

    async def listening(world: World) -> None:
        async def note(message: Any) -> None:
            lengths.add(len(message.subject.split(".")))

        await world.client.subscribe("$JS.ACK.chaos.>", cb=note)
        await storm(world)

    few = {"nats": {"domain": "chaos"}, "source": {"max_ack_pending": 300}}  # a block would take more
    shape = Shape(**QUICK, servers=3, rate=500, server_config=V2, sections=few)
    outcome = survive(tmp_path, listening, shape)
    assert lengths == {11}
    assert outcome.verdict.messages == outcome.published


@pytest.mark.exhaustive
@pytest.mark.spark
def test_nothing_is_lost_or_read_twice_while_daemons_servers_network_store_clock_and_consumer_fail_at_once(
    tmp_path: Path, spark: SparkSession
) -> None:
    faults = [name for name in FAULTS if name not in (*CLUSTER, *S3, *HISTORY, "daemon.stall", "store.full")]
    outcome = survive(tmp_path, each_once(faults), Shape(**QUICK, replicas=2))
    assert outcome.counts["daemon kills"] > 0
    assert outcome.counts["server kills"] > 0
    root = str((tmp_path / "archive").resolve())
    read = [read_archive(spark, root, STREAM, quarantine=quarantine) for quarantine in (False, True)]
    assert sum(frame.count() for frame in read) == outcome.verdict.messages == outcome.published


COUNT = 50


class WaitingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.go = threading.Event()

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.go.wait(60)
        return super().put(name, data)


@pytest.mark.parametrize("cut_off", [False, True], ids=["connected", "cut off"])
async def test_what_is_held_of_a_stream_that_is_gone_is_stored_and_not_acknowledged_to_the_one_in_its_place(
    nats_server: Callable[..., NatsServer], tmp_path: Path, cut_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_tasks, "POLL", 600)  # the server says it first where nobody asks
    server, root = nats_server(), tmp_path / "archive"
    root.mkdir()
    await publish(server.url, ((f"orders.{number}", b"old", None) for number in range(COUNT)))
    async with Proxy(lambda: server.port) as proxy, connection(server.url) as client:
        store = WaitingStore(root)
        url = f"nats://127.0.0.1:{proxy.port}"
        capture = Capture(config(url, root, key="", block={"max_age": "300ms"}), store=store)
        running = asyncio.create_task(capture.run(asyncio.Event()))
        await until(lambda: capture.opened and capture.archiver.blocks.sealed == 1, "everything is held")
        if cut_off:
            proxy.refusing = True
            proxy.cut()
        stream = client.jetstream()

        async def waits() -> bool:
            return bool((await stream.consumer_info(STREAM, CONSUMER)).num_waiting)

        same = (await stream.consumer_info(STREAM, CONSUMER)).config
        if not cut_off:
            await until(waits, "the server has a pull to answer")
        await stream.delete_stream(STREAM)
        await publish(server.url, ((f"orders.{number}", b"new", None) for number in range(COUNT)))
        await stream.add_consumer(STREAM, same)
        other = await stream.pull_subscribe_bind(CONSUMER, STREAM)
        assert len(await other.fetch(COUNT)) == COUNT
        if cut_off:
            proxy.heal()
            await until(lambda: capture.source.reconnects > 0, "the capture is connected again")
        else:
            await until(lambda: capture.source.failure is not None, "the deletion is noticed")
        store.go.set()
        with pytest.raises(SourceError, match="created again" if cut_off else "Consumer Deleted"):
            await asyncio.wait_for(running, 60)
    assert (await consumer(server.url)).num_ack_pending == COUNT
    assert {row["_nats_payload"] for row in rows(root)} == {b"old"}
