"""The lag counts from the oldest message that may not be stored, however long that takes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic

import pytest

from jetcapture_py.capture.watermark import SILENT, Observer
from jetcapture_py.jetstream.consumer import consumer_state

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTES = 60


@pytest.mark.parametrize("batches", [1, 20, 100], ids="{} batches a second".format)
def test_it_is_that_of_the_first_message_while_nothing_is_stored(batches: int) -> None:
    observer, ended = Observer("S", "c"), 21 * MINUTES
    for index in range(ended * batches):
        observer.saw(1 + 50 * index, index * 1_000_000 // batches)
    state = consumer_state({"config": {}, "num_ack_pending": 1, "ts": (EPOCH + timedelta(seconds=ended)).isoformat()})
    assert observer.lag(state) == timedelta(seconds=ended)


@pytest.mark.parametrize(
    ("unacked", "silence", "expected"),
    [(1, SILENT / 2, 51), (1, 20 * MINUTES, 51 + 20 * MINUTES), (0, SILENT / 2, 0), (0, 20 * MINUTES, 20 * MINUTES)],
)
def test_it_grows_while_the_server_does_not_answer(unacked: int, silence: float, expected: float) -> None:
    observer = Observer("S", "c")
    observer.saw(1, 0)
    state = consumer_state(
        {"config": {}, "num_ack_pending": unacked, "ts": (EPOCH + timedelta(seconds=51)).isoformat()}
    )
    lag = observer.lag(replace(state, answered=monotonic() - silence)).total_seconds()
    assert expected <= lag < expected + SILENT / 2
