"""What a streaming query reads, and where it goes on, batch by batch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from jetcapture_py.archive.incarnations import Origin
from jetcapture_py.errors import SourceError
from spark_jobs.datasource import offsets
from spark_jobs.datasource.offsets import split
from tests.integration.spark.live import Captured, Live


def test_batches_follow_each_other_without_a_gap_and_without_one_for_nothing(live: Live) -> None:
    live.fill(10)
    with live.query() as query:
        assert query.batch() == list(range(1, 11))
        assert query.batch() is None
        live.fill(5)
        assert query.batch() == list(range(11, 16))
        assert query.batch() is None
        assert query.end is not None
        assert query.end.pop("message")[0] == 15
        assert query.end == {"stream": "ORDERS", "created": query.start["created"], "seq": 16}
        live.fill(3)
        live.delete(16, 17, 18)
        assert query.batch() is None
        with (
            live.query(startingOffsets="last") as last,
            live.query(startingOffsets="last", subjects="orders.*") as some,
        ):
            assert [last.batch(), some.batch(), last.batch(), some.batch()] == [[15], [15], None, None]
            live.fill(1)
            assert query.batch() == last.batch() == some.batch() == [19]
    live.do(lambda stream: stream.add_stream(name="OTHER", subjects=["other.>"]))
    with live.query(query.end, stream="OTHER", failOnDataLoss="false") as other:
        error = "the checkpoint is one of stream ORDERS, not of OTHER: give every query a checkpointLocation of its own"
        with pytest.raises(SourceError, match=error):
            other.plan()
        other.next_end = other.start  # what Spark has in its log of a batch that was interrupted
        with pytest.raises(SourceError, match=error):
            other.run()


def test_a_query_begins_as_the_deliver_policy_says_and_then_goes_on(live: Live) -> None:
    live.send([(f"orders.{name}", b"") for name in "aabcca"])
    firsts: dict[str, list[int]] = {"earliest": [1, 2, 3, 4, 5, 6], "latest": [], "new": [], "last": [6]}
    firsts |= {"4": [4, 5, 6], "last_per_subject": [3, 5, 6]}
    with ExitStack() as stack:
        queries = {start: stack.enter_context(live.query(startingOffsets=start)) for start in firsts}
        assert {start: query.batch() for start, query in queries.items()} == firsts
        live.send([("orders.a", b"")])
        for then in ([7], None):
            assert {start: query.batch() for start, query in queries.items()} == dict.fromkeys(firsts, then)


def test_a_limited_batch_of_a_rare_subject_counts_its_messages(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "GAP_SEARCH_TIME", 3600.0)
    live.send([("orders.rare" if number % 100 == 99 else "orders.often", b"") for number in range(300)])
    for subjects in ("orders.rare", "orders.rare,orders.never"):
        with live.query(subjects=subjects, maxOffsetsPerTrigger="2") as query:
            assert [query.batch() for _ in range(3)] == [[100, 200], [300], None]


def test_gaps_do_not_count_in_a_limited_batch_unless_there_is_no_time_to_look_for_them(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1, 2, 3, 4, 300, 301, 500, *range(990, 996), 1000]
    live.send((f"orders.{'left' if seq in left else 'gone'}", b"") for seq in range(1, 1001))
    live.purge(subject="orders.gone")
    monkeypatch.setattr(offsets, "GAP_SEARCH_TIME", 3600.0)
    with live.query(maxOffsetsPerTrigger="5") as query:
        batches = [query.batch() or [] for _ in range(5)]
    assert [seq for batch in batches for seq in batch] == left
    assert max(map(len, batches)) <= 5
    assert batches[-1] == []
    monkeypatch.setattr(offsets, "GAP_SEARCH_TIME", 0.0)
    live.purge(seq=995)
    with live.query(startingOffsets="995", maxOffsetsPerTrigger="2") as query:
        assert [query.batch() for _ in range(3)] == [[995], [1000], None]


def test_other_subjects_make_no_batches_until_the_stream_might_forget_the_place(live: Live) -> None:
    live.fill(100, "orders.mine")
    with live.query(subjects="orders.mine") as query:
        assert query.batch() == list(range(1, 101))
        live.fill(50, "orders.other")
        assert query.batch() is None
        live.fill(60, "orders.other")
        assert query.batch() == []
        assert query.end is not None
        assert query.end["seq"] == 211
        live.purge(seq=150)
        live.fill(1, "orders.mine")
        assert query.batch() == [211]


def test_a_limited_query_reads_what_was_there_when_it_began_and_messages_that_are_gone_end_it_or_are_skipped(
    live: Live,
) -> None:
    live.fill(10)
    with live.query(maxOffsetsPerTrigger="4") as query:
        query.reader.prepareForTriggerAvailableNow()
        live.fill(2)
        assert query.batch() == [1, 2, 3, 4]
        live.purge(seq=8)
        with pytest.raises(SourceError, match="messages 5 to 7 of stream ORDERS are gone: it starts at 8"):
            query.batch()
        with live.query(query.end, failOnDataLoss="false") as patient:
            assert patient.batch() == [8, 9, 10, 11, 12]
            live.purge()
            live.fill(2)
            assert patient.batch() == [13, 14]
    with live.query(maxOffsetsPerTrigger="4") as query:
        query.reader.prepareForTriggerAvailableNow()
        live.fill(4)
        assert [query.batch() for _ in range(2)] == [[13, 14], None]
    with live.query(startingOffsets="30") as query, pytest.raises(SourceError, match="ends at 18, before 30"):
        query.batch()
    with live.query(startingOffsets="30", failOnDataLoss="false") as query:
        assert query.batch() == []
        live.fill(1)
        assert query.batch() == [19]


def test_a_query_killed_in_its_first_batch_reads_that_batch_again(live: Live) -> None:
    live.fill(3, "orders.a")
    with ExitStack() as stack:
        starts = ("latest", "last", "last_per_subject")
        killed = {start: stack.enter_context(live.query(startingOffsets=start)) for start in starts}
        for query in killed.values():
            query.reader.initialOffset()
        live.fill(4, "orders.a")
        assert all(query.plan() for query in killed.values())
    live.fill(5, "orders.a")
    read = {}
    for start in starts:
        with live.query(startingOffsets=start) as restarted:
            restarted.next_end = killed[start].next_end  # what Spark has in its log
            read[start] = restarted.run() + (restarted.batch() or [])
    assert read == {"latest": [*range(4, 13)], "last": [*range(3, 13)], "last_per_subject": [*range(8, 13)]}


def test_a_stream_created_again_ends_the_query(live: Live) -> None:
    live.fill(10)
    with live.query() as query, live.query(failOnDataLoss="false") as patient:
        assert query.batch() == patient.batch() == list(range(1, 11))
        for count in (3, 20):  # it ends before what was read, or after it
            live.recreate()
            live.fill(count)
            for each in (query, patient):
                with pytest.raises(SourceError, match="ORDERS was deleted and created again"):
                    each.batch()


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_query_goes_on_in_its_restored_stream(live: Live, tmp_path: Path, strict: str) -> None:
    options, captured = (
        {"maxOffsetsPerTrigger": "6", "failOnDataLoss": strict},
        Captured(live, tmp_path / "archive", {}),
    )
    live.fill(10)
    with live.query(**options) as query:
        assert query.batch() == [1, 2, 3, 4, 5, 6]
    with live.query(query.end, **options) as killed:
        assert killed.plan()
    captured.capture()
    captured.restore()
    with live.query(query.end, **options) as between:
        assert between.batch() == [7, 8, 9, 10]
    with live.query(query.end, **options) as restarted:
        restarted.next_end = killed.next_end  # what Spark has in its log
        assert restarted.run() == [7, 8, 9, 10]
        live.fill(8)
        assert restarted.batch() == [11, 12, 13, 14, 15, 16]
    captured.restore()  # up to 10: what came since is not in the archive
    live.fill(8)
    with live.query(restarted.end, **options) as ahead:
        ahead.next_end = restarted.end
        for again in (ahead.run, ahead.batch):
            with pytest.raises(SourceError, match="or restored to an earlier sequence"):
                again()


def test_a_range_is_divided_into_equal_parts_without_gaps() -> None:
    def bounds(first: int, end: int, parts: int | None) -> list[tuple[int, int]]:
        return [(part.first, part.end) for part in split(first, end, Origin(""), parts)]

    assert bounds(1, 11, 3) == [(1, 4), (4, 7), (7, 11)]
    assert bounds(5, 7, 4) == [(5, 6), (6, 7)]
    assert bounds(5, 5, 4) == bounds(6, 5, None) == []
    assert bounds(1, 1000, None) == [(1, 1000)]  # a second task would not pay off
