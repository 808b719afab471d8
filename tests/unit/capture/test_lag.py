"""The lag counts from the oldest message that may not be stored, however long that takes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic

from jetcapture_py.capture.watermark import SILENT, Observer
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTES = 60


def state(unacked: int, seconds: int) -> ConsumerState:
    """The consumer's state, asked for so long after the epoch."""
    asked = (EPOCH + timedelta(seconds=seconds)).isoformat()
    return consumer_state({"config": {}, "num_ack_pending": unacked, "ts": asked})


def test_it_is_that_of_the_first_message_while_nothing_is_stored() -> None:
    for batches in (1, 20):
        observer, ended = Observer("S", "c"), 21 * MINUTES
        for index in range(ended * batches):
            observer.saw(1 + 50 * index, index * 1_000_000 // batches)
        assert observer.lag(state(1, ended)) == timedelta(seconds=ended)


def test_it_grows_while_the_server_does_not_answer() -> None:
    observer = Observer("S", "c")
    observer.saw(1, 0)
    for unacked, age in ((1, 51), (0, 0)):
        for silence, counted in ((SILENT / 2, 0), (20 * MINUTES, 20 * MINUTES)):
            lag = observer.lag(replace(state(unacked, 51), answered=monotonic() - silence)).total_seconds()
            assert age + counted <= lag < age + counted + SILENT / 2
