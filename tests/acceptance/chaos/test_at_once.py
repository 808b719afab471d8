"""Nearly every fault at the same time, from a fixed seed: nothing is lost, nothing is read twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_jobs.archive import read_archive
from tests.acceptance.chaos.storms import CLUSTER, HISTORY, QUICK, S3, survive
from tests.chaos.faults import FAULTS
from tests.chaos.trial import each_once
from tests.chaos.world import Shape
from tests.support.running import STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
