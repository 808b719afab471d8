"""Which rows a task of a replay publishes, and how long it waits between them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.errors import SourceError
from spark_jobs.publishing.prepare import ID, PAYLOAD, ROW, SEQ, SUBJECT, TIME
from spark_jobs.publishing.publish import DUE
from spark_jobs.replaying.task import Pace, _first_rows, _timed


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


def test_of_a_message_of_several_rows_the_first_one_is_published_which_has_the_payload() -> None:
    def batch(*rows: tuple[int, int, bytes | None]) -> pa.RecordBatch:
        seqs, numbers, payloads = map(list, zip(*rows, strict=True))
        texts = {SUBJECT: ["a"] * len(rows), ID: [f"S:{seq}:r" for seq in seqs]}
        return pa.RecordBatch.from_pydict({**texts, TIME: seqs, SEQ: seqs, ROW: numbers, PAYLOAD: payloads})

    batches = [batch((1, 0, b"1"), (1, 1, None), (2, 0, b"2")), batch((2, 1, None), (2, 2, None), (3, 0, None))]
    published = [row for rows in _first_rows(batches) for row in rows.to_pylist()]
    assert [(row[SEQ], row[PAYLOAD]) for row in published] == [(1, b"1"), (2, b"2"), (3, None)]
    with pytest.raises(SourceError, match="message 2: its payload is in its first row"):
        list(_first_rows([batch((1, 0, b"1"), (2, 1, None))]))
