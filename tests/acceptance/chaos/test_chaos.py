"""Every fault at least once, from fixed seeds: nothing is lost, nothing is read twice. `make chaos` is the long run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark_jobs.archive import read_archive
from tests.chaos.archive import mount, unmount
from tests.chaos.faults import FAULTS
from tests.chaos.trial import Outcome, Storm, each_once, in_turn, trial
from tests.chaos.world import Shape, World
from tests.support.running import STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK: dict[str, Any] = {"ack_wait": 1.0, "max_age": 0.5, "hold": 0.3}
CLUSTER = ("server.kill_leader", "server.step_down", "server.lose_quorum")
S3 = tuple(name for name in FAULTS if name.startswith("store.") and name not in ("store.unwritable", "store.full"))
HISTORY = ("consumer.delete", "stream.delete_messages", "stream.purge", "stream.recreate")
DISK = 64 << 20
V2 = "jetstream { domain: chaos }\nfeature_flags { js_ack_fc_v2: true }"
"""Servers put their domain and the account into the subjects of acknowledgements."""


def survive(directory: Path, storm: Storm, shape: Shape, seed: int = 20261121) -> Outcome:
    """The outcome of a storm, after which publishing goes on until enough is published, however slow the machine is."""

    async def long_enough(world: World) -> None:
        await storm(world)
        while world.publisher.published - int(world.ledger.excused.sum()) <= 1000:
            world.check_alive()
            await asyncio.sleep(0.1)

    outcome = asyncio.run(trial(directory, shape, seed, long_enough, settle=600))
    assert outcome.problems == []
    assert outcome.verdict.messages > 1000
    return outcome


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


def test_nothing_is_lost_or_read_twice_when_the_disk_is_full(tmp_path: Path) -> None:
    try:
        mount(tmp_path, 1 << 20)
    except OSError as error:
        pytest.skip(f"it takes a disk of its own to fill it up, and one cannot be mounted here: {error}")
    unmount(tmp_path)
    outcome = survive(tmp_path, in_turn(["store.full"], pause=0.2), Shape(**QUICK, disk=DISK))
    logs = "".join(path.read_text() for path in tmp_path.glob("replica-*.log"))
    assert os.strerror(28) in logs
    assert outcome.verdict.messages == outcome.published


def test_nothing_is_lost_or_read_twice_when_s3_answers_wrongly_late_or_not_at_all(tmp_path: Path) -> None:
    outcome = survive(tmp_path, in_turn(S3, pause=0.1), Shape(**QUICK, store="s3", rate=1000))
    assert outcome.counts["store faults"] == len(S3)
    assert outcome.verdict.messages == outcome.published


def test_nothing_is_lost_or_read_twice_when_consumer_and_stream_are_deleted_and_created_again(tmp_path: Path) -> None:
    order = ["daemon.stop", *(name for fault in HISTORY for name in (fault, "daemon.stop"))]  # it writes the watermark
    outcome = survive(tmp_path, in_turn(order, pause=0.3), Shape(**QUICK, replicas=3))
    assert 0 < outcome.verdict.excused < outcome.published
    assert outcome.verdict.watermarks >= 1


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
