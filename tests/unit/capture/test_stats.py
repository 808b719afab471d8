"""What is counted about storing, and when it counts as trouble."""

from __future__ import annotations

import time

from jetcapture_py.capture.storing import SLOW, Histogram, Storing
from jetcapture_py.errors import PermanentStoreError, StoreError


def test_a_histogram_counts_each_value_in_every_bucket_that_holds_it() -> None:
    histogram = Histogram()
    for seconds in (0.001, 0.005, 0.006, 59.0, 61.0):
        histogram.add(seconds)
    counts = histogram.buckets()
    assert [counts[bound] for bound in ("0.005", "0.01", "30.0", "60.0", "+Inf")] == [2, 3, 3, 4, 5]
    assert histogram.total == 0.001 + 0.005 + 0.006 + 59.0 + 61.0


def test_a_turn_that_failed_is_trouble_until_all_of_it_is_stored() -> None:
    storing, first, second = Storing(), object(), object()
    storing.began(first, 10.0)
    storing.began(second, 10.0)
    storing.failed(first, [PermanentStoreError("access denied"), StoreError("again")])
    storing.succeeded(0.1)
    storing.ended(second)
    assert storing.trouble(11.0) == "access denied"
    storing.began(first, 12.0)
    assert storing.trouble(12.0) == "access denied"
    storing.ended(first)
    assert storing.trouble(13.0) is None
    assert storing.errors == {"permanent": 1, "temporary": 1}


def test_an_error_that_is_none_of_ours_is_one_line() -> None:
    storing, turn = Storing(), object()
    storing.failed(turn, [ValueError("two\nlines")])
    assert storing.trouble(0.0) == "ValueError: two lines"


def test_a_store_that_does_not_answer_is_trouble_after_a_while() -> None:
    storing, turn = Storing(), object()
    storing.began(turn, 100.0)
    assert storing.trouble(100.0 + SLOW) is None
    assert storing.trouble(101.0 + SLOW) == "the store has not answered for 1 min 1 s"
    storing.ended(turn)
    assert storing.trouble(1e9) is None


def test_the_last_success_is_a_time_of_day() -> None:
    storing = Storing()
    assert storing.last_success is None
    storing.succeeded(0.2)
    assert storing.last_success is not None
    assert abs(time.time() - storing.last_success) < 5
