"""Every fault at least once, from fixed seeds: nothing is lost, nothing is read twice. `make chaos` is the long run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.chaos.storms import CLUSTER, HISTORY, QUICK, S3, survive
from tests.chaos.archive import mount, unmount
from tests.chaos.trial import in_turn
from tests.chaos.world import Shape, World

DISK = 64 << 20
BUNDLES = {"block": {"bundles": 4}}
V2 = "jetstream { domain: chaos }\nfeature_flags { js_ack_fc_v2: true }"
"""Servers put their domain and the account into the subjects of acknowledgements."""


def test_nothing_is_lost_or_read_twice_when_the_disk_is_full(tmp_path: Path) -> None:
    try:
        mount(tmp_path, 1 << 20)
    except OSError as error:
        pytest.skip(f"it takes a disk of its own to fill it up, and one cannot be mounted here: {error}")
    unmount(tmp_path)
    outcome = survive(tmp_path, in_turn(["store.full"], pause=0.2), Shape(**QUICK, disk=DISK))
    logs = "".join(path.read_text() for path in tmp_path.glob("replica-*.log"))
    assert "the disk is full" in logs
    assert outcome.verdict.messages == outcome.published


@pytest.mark.exhaustive
def test_nothing_is_lost_or_read_twice_when_s3_answers_wrongly_late_or_not_at_all(tmp_path: Path) -> None:
    outcome = survive(tmp_path, in_turn(S3, pause=0.1), Shape(**QUICK, store="s3", rate=1000, sections=BUNDLES))
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
