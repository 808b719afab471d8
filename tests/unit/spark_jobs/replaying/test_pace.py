"""How long a replay waits between messages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spark_jobs.publishing.prepare import TIME
from spark_jobs.publishing.publish import DUE
from spark_jobs.replaying.task import Pace, _timed


def test_gaps_follow_from_speed_longest_gap_and_rate() -> None:
    moments = np.array([0, 1_000_000, 1_000_000, 5_000_000, 4_000_000])
    assert Pace(speed=2).gaps(moments).tolist() == [500_000, 0, 2_000_000, 0]
    assert Pace(speed=0.5, max_gap=3).gaps(moments).tolist() == [2_000_000, 0, 3_000_000, 0]
    assert Pace(speed=2, rate=4).gaps(moments).tolist() == [500_000, 250_000, 2_000_000, 250_000]
    assert Pace(rate=10).gaps(moments).tolist() == [100_000] * 4
    assert Pace(rate=10).gaps(moments[:0]).tolist() == []


def test_a_message_is_due_after_all_gaps_since_the_first_one_whatever_batches_there_are() -> None:
    times = [[0, 1_000_000], [], [3_000_000], [3_000_000, 4_000_000]]
    batches = (pa.RecordBatch.from_pydict({TIME: pa.array(moments, pa.int64())}) for moments in times)
    dues = [batch.column(DUE).to_pylist() for batch in _timed(batches, Pace(speed=2))]
    assert dues == [[0, 500_000], [1_500_000], [1_500_000, 2_000_000]]
