"""Objects that are stored together, and a store that fails slowly."""

from __future__ import annotations

import asyncio
import time

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture import storing
from jetcapture_py.capture.storing import SLOW, Histogram, Storing, Uploads
from jetcapture_py.errors import PermanentStoreError, StoreError
from jetcapture_py.store import Store
from tests.support.running import config


class SlowlyFailing:
    """Needs a moment to refuse the objects that begin with `refused`; takes all others."""

    def __init__(self, *refused: int) -> None:
        self.refused = set(refused)
        self.asked: list[int] = []

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        self.asked.append(name.first_seq)
        if name.first_seq in self.refused:
            time.sleep(0.05)
            raise StoreError("no answer in time")
        return name.path

    def probe(self) -> None:
        """Nothing is asked of it here."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "MAX_TURN", 0.02)
    monkeypatch.setattr(storing, "FIRST_RETRY", 0.01)


def uploads(store: Store, retry_for: str) -> Uploads:
    wanted = {"url": "file:///nowhere", "retry_for": retry_for, "concurrency": 1}
    return Uploads(store, config("nats://127.0.0.1:1", "/nowhere", store=wanted).store)


def encoded(seq: int) -> EncodedBlock:
    name = ObjectName(
        stream="S", key="k", bucket=0, first_seq=seq, last_seq=seq, rows=1, digest=f"{seq:016x}", quarantine=False
    )
    return EncodedBlock(name=name, data=pa.py_buffer(b"content"), messages=1, duplicates=0)


def test_a_store_that_is_silent_costs_one_timeout_for_a_turn_and_not_one_for_each_object(hasty: None) -> None:
    store = SlowlyFailing(*range(10))

    async def scenario() -> None:
        async for _ in uploads(store, "1ms").put_all([encoded(seq) for seq in range(10)]):
            pytest.fail("nothing was stored")

    with pytest.raises(StoreError, match="no answer in time"):
        asyncio.run(scenario())
    assert store.asked == [0]


def test_one_object_that_fails_slowly_does_not_keep_those_beside_it_from_being_stored(hasty: None) -> None:
    store = SlowlyFailing(0, 3)

    async def scenario() -> None:
        found: list[int] = []
        objects = [encoded(seq) for seq in range(10)]
        capture = uploads(store, "60s")
        async for index, _ in capture.put_all(objects):
            found.append(index)
            if len(found) == 8:
                assert sorted(found) == [1, 2, 4, 5, 6, 7, 8, 9]
                store.refused.clear()
        assert sorted(found) == list(range(10))
        assert capture.storing.retries >= 2
        assert capture.storing.trouble(asyncio.get_running_loop().time()) is None

    asyncio.run(asyncio.wait_for(scenario(), 60))


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
    before = time.time()
    storing.succeeded(0.1)
    assert storing.last_success is not None
    assert before <= storing.last_success <= time.time()
    storing.ended(second)
    assert storing.trouble(11.0) == "access denied"
    storing.began(first, 12.0)
    assert storing.trouble(12.0) == "access denied"
    storing.ended(first)
    assert storing.trouble(13.0) is None
    assert storing.errors == {"permanent": 1, "temporary": 1}
    storing.failed(first, [ValueError("two\nlines")])
    assert storing.trouble(14.0) == "ValueError: two lines"


def test_a_store_that_does_not_answer_is_trouble_after_a_while() -> None:
    storing, turn = Storing(), object()
    storing.began(turn, 100.0)
    assert storing.trouble(100.0 + SLOW) is None
    assert storing.trouble(101.0 + SLOW) == "the store has not answered for 1 min 1 s"
    storing.ended(turn)
    assert storing.trouble(1e9) is None
