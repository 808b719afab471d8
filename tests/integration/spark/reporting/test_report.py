"""The report says of an archive what is in it: figures, holes, reasons; and it is a page that needs nothing else."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from pyspark.sql import SparkSession

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.archive.schema import ENVELOPE, HEADERS_TYPE, REPLY
from jetcapture_py.archive.watermark import ConsumerWatermark, path
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store import LocalStore
from spark_jobs.compact import compact
from spark_jobs.report import main, report
from spark_jobs.reporting.coverage import MAX_HOLES, IncarnationCoverage
from spark_jobs.reporting.facts import MAX_REASONS, Choice, Facts, collect
from spark_jobs.reporting.source import ReportSource
from tests.integration.spark.conftest import HOUR
from tests.support import s3
from tests.support.archives import lay_out
from tests.support.erasing import bury
from tests.support.examples import examples
from tests.support.nats_server import NatsServer
from tests.support.report_page import Page
from tests.support.running import capture_all, config, publish

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

STREAM = "ORDERS"
CREATED = "2026-04-01T08:00:00.123456789Z"
INTERVAL = 900


@dataclass(frozen=True)
class Store:
    """An archive that a test fills with objects as a capture writes them."""

    root: Path

    def put(
        self,
        seqs: Sequence[int],
        key: str | None = "a",
        *,
        bucket: int = HOUR,
        times: Sequence[int] | None = None,
        delivered: Sequence[int] | None = None,
        errors: Sequence[tuple[str, str]] | None = None,
        subject: str = "orders.new",
        sealed_by: str = "age",
        created: str = CREATED,
        waited: float = 60.0,
        stream: str = STREAM,
    ) -> Path:
        """Store one object: with `errors`, stage and text, in the quarantine. Without `times`, in microseconds,
        messages come a millisecond apart from the bucket's start; the object is written `waited` seconds after the
        first one came."""
        count = len(seqs)
        times = times or [bucket * 1_000_000 + number * 1000 for number in range(count)]
        columns: dict[str, pa.Array] = {
            layout.SUBJECT: pa.array([subject] * count),
            layout.SEQ: pa.array(seqs, pa.int64()),
            layout.TIMESTAMP: pa.array(times, ENVELOPE.field(layout.TIMESTAMP).type),
            layout.DELIVERED: pa.array(delivered or [1] * count, pa.int32()),
            layout.HEADERS: pa.nulls(count, HEADERS_TYPE),
            layout.PAYLOAD: pa.array([b"{}"] * count, pa.binary()),
            REPLY: pa.nulls(count, pa.binary()),
        }
        if errors is not None:
            columns[layout.STAGE] = pa.array([stage for stage, _ in errors])
            columns[layout.ERROR] = pa.array([error for _, error in errors])
        encoder = Encoder(stream=stream, interval=INTERVAL, compression="zstd", stream_created=created)
        block = BlockId(key=key if errors is None else None, bucket=bucket, quarantine=errors is not None)
        encoded = encoder.encode(block, sealed_by, [pa.RecordBatch.from_pydict(columns)])
        target = self.root / encoded.name.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(encoded.data)
        os.utime(target, (times[0] / 1e6 + waited,) * 2)
        return target

    def mark(self, seq: int, time: datetime, created: str = CREATED) -> None:
        """Leave a watermark."""
        target = self.root / path(STREAM, "archive")
        target.parent.mkdir(parents=True, exist_ok=True)
        known = ConsumerWatermark(stream=STREAM, consumer="archive", created=created, seq=seq, time=time)
        target.write_bytes(known.encode())

    def facts(self, spark: SparkSession, *, dedupe: Any = "auto", **chosen: Any) -> Facts:
        return collect(spark, str(self.root), STREAM, Choice(**chosen), dedupe, {})

    def page(self, spark: SparkSession, **chosen: Any) -> Page:
        return Page.of(report(spark, str(self.root), STREAM, **chosen))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "archive")


def missing(life: IncarnationCoverage) -> list[tuple[int, int]]:
    return [(hole.first, hole.last) for hole in life.largest]


def unreadable_rows(file: Path) -> None:
    """Overwrite everything but the footer."""
    data = bytearray(file.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little") + 8
    data[4:-footer] = b"\0" * (len(data) - footer - 4)
    file.write_bytes(data)


def three_quarters(store: Store) -> Store:
    """Three keys in three quarters of an hour; five messages stored twice, three quarantined, none missing."""
    start = HOUR * 1_000_000
    store.put(range(1, 41), "eu")
    again = [*range(36, 41), 42, 43]
    store.put(again, "eu", waited=90, times=[start + 1000 * (seq - 1) for seq in again])
    store.put([41, 44], "us", times=[start + 40_000, start + 43_000])
    store.put(range(45, 65), "eu", bucket=HOUR + 900, waited=300)
    store.put(range(65, 70), None, bucket=HOUR + 900, waited=1000)
    errors = [("decode", "bad byte 7"), ("decode", "bad byte 12"), ("key", "none")]
    store.put(range(70, 73), bucket=HOUR + 1800, errors=errors)
    store.put(range(73, 90), "us", bucket=HOUR + 1800, delivered=[1] * 15 + [2, 5])
    return store


@pytest.fixture
def orders(store: Store) -> Store:
    return three_quarters(store)


@pytest.fixture(scope="module")
def described(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """The same, which no test changes, and its report."""
    store = three_quarters(Store(tmp_path_factory.mktemp("described")))
    return store, report(spark, str(store.root), STREAM)


class TestFigures:
    def test_they_are_those_that_another_engine_counts(self, described: tuple[Store, str]) -> None:
        orders, page = described[0], Page.of(described[1])
        files = [*orders.root.glob("ORDERS/**/*.parquet")]
        query = f"""SELECT key, count(DISTINCT (_nats_seq, _nats_timestamp)), count(*)
                    FROM read_parquet('{orders.root}/ORDERS/**/*.parquet', hive_partitioning=true) GROUP BY key"""
        counted = {key: (distinct, rows) for key, distinct, rows in duckdb.connect().execute(query).fetchall()}
        keys = {row["key"]: row for row in page.table("volume", "Every key")}
        assert {name: int(row["messages"]) for name, row in keys.items()} == {
            "eu": counted["eu"][0],
            "us": counted["us"][0],
            "no key": counted[None][0],
        }
        distinct, rows = (sum(each[place] for each in counted.values()) for place in (0, 1))
        stored = sum(file.stat().st_size for file in files)
        assert page.tiles["Messages"] == str(distinct) == "86"
        assert page.tiles["Stored twice"] == str(rows - distinct) == "5"
        assert page.tiles["Objects"] == str(len(files)) == "6"
        assert page.tiles["Stored"] == f"{stored / 1024:.1f} KiB"
        assert page.tiles["Keys"] == "3"
        assert page.tiles["In quarantine"] == "3"
        assert page.tiles["Sequences"] == "1 to 89"
        assert {row["objects"] for row in keys.values()} == {"3", "2", "1"}

    def test_bars_add_up_to_the_messages(self, described: tuple[Store, str]) -> None:
        bars = [each.one("title").text for each in Page.of(described[1]).section("volume").all("g")]
        assert [line for line in bars if "message" in line] == [
            "1 May 2026 12:00, 15 min: 44 messages eu: 42 messages (95.5 %) us: 2 messages (4.5 %)",
            "1 May 2026 12:15, 15 min: 25 messages eu: 20 messages (80.0 %) (no key): 5 messages (20.0 %)",
            "1 May 2026 12:30, 15 min: 17 messages us: 17 messages (100 %)",
        ]

    def test_the_verdict_comes_first_and_says_what_is_wrong(self, described: tuple[Store, str]) -> None:
        page = Page.of(described[1])
        assert page.verdict == "No sequence is missing, but 3 messages could not be decoded and are in quarantine."
        assert [line.split(".")[0] for line in page.findings] == [
            "Action needed 3 messages in quarantine (3",
            "Note 5 messages stored twice",
        ]

    def test_an_archive_without_a_fault_is_called_complete(self, spark: SparkSession, store: Store) -> None:
        store.put(range(7, 20))
        page = store.page(spark)
        assert page.verdict == "Complete: every sequence from 7 to 19 is stored, and nothing is in quarantine."
        assert page.findings == []
        assert "The quarantine is empty." in page.section("quarantine").text
        assert "Sequences 1 to 6 are older than" in page.section("coverage").text

    def test_copies_count_unless_they_are_looked_for(self, spark: SparkSession, store: Store) -> None:
        for _ in range(2):
            store.put([1, 2, 3])
            store.put([1, 2])
        tiles = store.page(spark, dedupe="none").tiles
        assert (tiles["Messages"], tiles["Stored twice"]) == ("5", "not counted")

    @pytest.mark.exhaustive
    def test_messages_in_several_layouts_count_once_and_bundles_are_named(
        self, spark: SparkSession, store: Store
    ) -> None:
        messages = {(seq, HOUR * 1_000_000 + seq): f"k{seq % 5}" for seq in range(1, 31)}
        for bundles in (0, 4, 16):
            lay_out(store.root, messages, bundles, bucket=HOUR)
        page = store.page(spark)
        assert (page.tiles["Messages"], page.tiles["Stored twice"]) == ("30", "60")
        assert f"bundle {bundle_of('k1', 4)}" in page.section("volume").text
        assert "Keys and bundles" in page.tiles
        with pytest.raises(JetcaptureError, match="has bundles, whose objects hold many keys"):
            report(spark, f"file://{store.root}", STREAM, keys=["k1"])

    @pytest.mark.exhaustive
    def test_copies_under_another_key_are_found_by_full_deduplication(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2, 3], "a")
        store.put([1, 2, 3], "b")
        store.put([4], "b")
        counts = {}
        for dedupe in ("auto", "full"):
            facts = store.facts(spark, dedupe=dedupe)
            counts[dedupe] = facts.messages(facts.objects)
            assert [life.holes for life in facts.incarnations] == [0]
        assert counts == {"auto": 7, "full": 4}

    def test_several_rows_of_a_message_are_one_message(self, spark: SparkSession, store: Store) -> None:
        name = layout.ObjectName(stream=STREAM, key="a", bucket=HOUR, first_seq=1, last_seq=2, rows=5, digest="0" * 16)
        target = store.root / name.path
        target.parent.mkdir(parents=True)
        table = pa.table(
            {
                layout.SEQ: pa.array([1, 1, 1, 2, 2]),
                layout.TIMESTAMP: pa.array([HOUR * 1_000_000] * 5, pa.timestamp("us", "UTC")),
                layout.DELIVERED: pa.array([1] * 5, pa.int32()),
                layout.ROW: pa.array([0, 1, 2, 0, 1], pa.int32()),
            }
        ).replace_schema_metadata({"jetcapture.messages": "2", "jetcapture.interval": "900"})
        pq.write_table(table, target)
        page = store.page(spark)
        assert page.tiles["Messages"] == "2"
        assert "5 rows" in page.root.one("div", "tiles").text
        assert page.verdict.startswith("Complete")


class TestCoverage:
    def test_what_was_removed_on_purpose_is_no_hole(self, spark: SparkSession, store: Store) -> None:
        """Between objects, inside one, before all, and of a message that was captured again."""
        store.put([11, 12, 14, 15, 19])
        store.put([25, 26])
        removed = [*range(1, 11), 13, 20, 21, 26]
        expired = Expired(stream=STREAM, until=datetime(2026, 5, 1, tzinfo=UTC))
        expired = expired.with_messages(CREATED, np.array(removed), expired.until, expired.until)
        LocalStore(str(store.root)).write_note(expired_path(STREAM), expired.encode())
        at = datetime.fromtimestamp(HOUR, UTC)
        bury(store.root, [{"_nats_seq": seq, "_nats_timestamp": at} for seq in (16, 23)])
        facts = store.facts(spark)
        (life,) = facts.incarnations
        assert (life.first, life.last, life.present, life.removed, life.missing) == (11, 26, 7, 5, 4)
        assert [(hole.first, hole.last) for hole in life.largest] == [(17, 18), (22, 22), (24, 24)]
        text = store.page(spark).root.text
        assert "14 messages expired, in buckets up to 2026-05-01T00:00:00Z: they were removed on purpose." in text
        assert "2 messages were erased." in text

    def test_holes_are_found_exactly(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2, 3, 7, 9, 10], "a")
        store.put([4, 5, 12], "b", times=[(HOUR + 3) * 1_000_000 + n for n in range(3)])
        store.put([13, 20], errors=[("decode", "x")] * 2)
        store.put([30, 31], "a", bucket=HOUR + 900)
        life = store.facts(spark).incarnations[0]
        assert missing(life) == [(6, 6), (8, 8), (11, 11), (14, 19), (21, 29)]
        assert (life.first, life.last, life.present, life.missing, life.holes) == (1, 31, 13, 18, 5)
        page = store.page(spark)
        assert page.verdict.startswith("18 of 31 sequences, in 5 holes, are not stored, and 2 messages")
        table = page.table("coverage", "Every hole")
        assert [(row["first missing"], row["last missing"], row["sequences"]) for row in table] == [
            ("6", "6", "1"),
            ("8", "8", "1"),
            ("11", "11", "1"),
            ("14", "19", "6"),
            ("21", "29", "9"),
        ]
        assert table[-1]["message after (UTC)"] == "2026-05-01 12:15:00"
        assert "this report does not query the stream" in page.section("coverage").text

    def test_a_hole_and_a_sequence_with_two_messages_do_not_cancel_out(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2, 6])
        store.put([4, 5, 6], bucket=HOUR + 900)
        life = store.facts(spark).incarnations[0]
        assert missing(life) == [(3, 3)]
        assert (life.present, life.forked) == (5, 1)

    @settings(examples(cost=8), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        blocks=some.lists(
            some.tuples(
                some.sampled_from("abq"), some.integers(0, 2), some.sets(some.integers(1, 30), min_size=1, max_size=15)
            ),
            min_size=1,
            max_size=8,
        ),
        settled=some.none() | some.integers(0, 40),
        dedupe=some.sampled_from(("auto", "auto", "full", "none")),
    )
    @pytest.mark.exhaustive
    def test_any_archive_has_the_holes_that_its_sequences_leave(
        self,
        spark: SparkSession,
        tmp_path_factory: pytest.TempPathFactory,
        blocks: list[tuple[str, int, set[int]]],
        settled: int | None,
        dedupe: str,
    ) -> None:
        store = Store(tmp_path_factory.mktemp("holes"))
        if dedupe != "full":  # then no message is under two keys, but it may be in two buckets: the stream was rewound
            under_a = {(step, seq) for kind, step, numbers in blocks if kind == "a" for seq in numbers}
            blocks = [
                (kind, step, {seq for seq in numbers if kind != "b" or (step, seq) not in under_a})
                for kind, step, numbers in blocks
            ]
        blocks = [block for block in blocks if block[2]]
        for kind, step, numbers in blocks:
            seqs = sorted(numbers)
            errors = [("decode", "x")] * len(seqs) if kind == "q" else None
            bucket = HOUR + step * 900
            times = [bucket * 1_000_000 + seq for seq in seqs]
            store.put(seqs, kind, bucket=bucket, times=times, errors=errors)
        if settled is not None:
            store.mark(settled, datetime(2026, 5, 1, tzinfo=UTC))
        life = store.facts(spark, dedupe=dedupe).incarnations[0]
        stored = set().union(*(numbers for _, _, numbers in blocks))
        absent = [seq for seq in range(min(stored), max(stored) + 1) if seq not in stored]
        beyond = [seq for seq in absent if settled is not None and seq > settled]
        found = [(seq, hole.open) for hole in life.largest for seq in range(hole.first, hole.last + 1)]
        assert found == [(seq, seq in beyond) for seq in absent]
        assert (life.first, life.last) == (min(stored), max(stored))
        assert (life.present, life.missing, life.open_missing) == (len(stored), len(absent), len(beyond))
        assert (life.holes, life.open_holes) == (len(life.largest), sum(hole.open for hole in life.largest))
        shares = [
            (sum(n in stored for n in range(a, a + life.cell)), a) for a in range(life.first, life.last + 1, life.cell)
        ]
        widths = [min(life.cell, life.last - a + 1) for _, a in shares]
        assert life.cells == pytest.approx([count / width for (count, _), width in zip(shares, widths, strict=True)])

    def test_rows_are_not_read_where_names_and_footers_tell(self, spark: SparkSession, store: Store) -> None:
        unreadable_rows(store.put([1, 3, 5], "a"))
        unreadable_rows(store.put([2, 4, 6], "b"))
        unreadable_rows(store.put([10, 11], "b", bucket=HOUR + 900))
        assert missing(store.facts(spark).incarnations[0]) == [(7, 9)]
        unreadable_rows(store.put([13, 15], "b", bucket=HOUR + 1800))
        with pytest.raises(Exception, match="cannot read"):  # it was a real test: now they have to be
            store.facts(spark)

    def test_a_message_in_the_quarantine_and_in_the_archive_hides_no_hole(
        self, spark: SparkSession, store: Store
    ) -> None:
        store.put([1, 2, 3, 5], times=[HOUR * 1_000_000 + n for n in (1, 2, 3, 5)])
        store.put([3], errors=[("decode", "not by the old decoder")], times=[HOUR * 1_000_000 + 3])
        facts = store.facts(spark)
        assert missing(facts.incarnations[0]) == [(4, 4)]
        assert (facts.messages(facts.objects), facts.messages(facts.quarantine), facts.reasons) == (4, 0, [])

    def test_what_is_beyond_the_watermark_may_still_come(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2, 5, 9])
        store.mark(5, datetime(2026, 5, 1, 12, tzinfo=UTC))
        page = store.page(spark)
        assert page.verdict == "2 of 9 sequences, in 1 hole, are not stored."
        assert page.tiles["Watermark"] == "5"
        assert [row["beyond the watermark"] for row in page.table("coverage", "Every hole")] == [
            "no",
            "yes: may still come",
        ]
        store.put([3, 4], times=[HOUR * 1_000_000 + 1500, HOUR * 1_000_000 + 1600])
        page = store.page(spark)
        assert page.verdict == "Complete: no sequence is missing, and nothing is in quarantine."
        assert "3 sequences beyond the watermark are not stored yet" in page.root.one("section", "verdict").text

    def test_a_stream_created_again_is_another_life(self, spark: SparkSession, store: Store) -> None:
        store.put(range(1, 11))
        store.put([1, 2, 4], bucket=HOUR + 7200, created="2026-05-01T13:30:00Z")
        store.mark(3, datetime(2026, 5, 1, 14, tzinfo=UTC), created="2026-05-01T13:30:00Z")
        newer, older = store.facts(spark).incarnations
        assert (newer.created, missing(newer), newer.open_missing) == ("2026-05-01T13:30:00Z", [(3, 3)], 0)
        assert (older.created, older.first, older.last, older.holes) == (CREATED, 1, 10, 0)
        headings = [each.text for each in store.page(spark).section("coverage").all("h3")]
        assert headings == ["Stream created 2026-05-01 13:30:00", "Stream created 2026-04-01 08:00:00"]

    def test_sequences_with_two_messages_are_called_lost_by_the_server(self, spark: SparkSession, store: Store) -> None:
        store.put(range(1, 11))
        store.put([9, 10, 11], times=[(HOUR + 60) * 1_000_000 + n for n in range(3)])
        (life,) = store.facts(spark).incarnations
        assert (life.forked, life.present, missing(life)) == (2, 11, [])
        assert "Lost by the server: 2 messages." in store.page(spark).section("coverage").text

    @pytest.mark.exhaustive
    def test_copies_in_one_life_hide_no_hole_of_another(self, spark: SparkSession, store: Store) -> None:
        again = "2026-05-01T12:05:00Z"
        store.put([1, 2, 3, 4])
        store.put([1, 2])
        times = [(HOUR + 301) * 1_000_000 + n for n in (1, 2, 4)]
        store.put([1, 2, 4], created=again, times=times)
        store.put([2], created=again, times=times[1:2])
        newer, older = store.facts(spark).incarnations
        assert (missing(newer), missing(older)) == ([(3, 3)], [])

    @pytest.mark.exhaustive
    def test_lives_are_told_apart_in_an_object_that_compaction_made_of_both(
        self, spark: SparkSession, store: Store
    ) -> None:
        again = "2026-05-01T12:05:00Z"
        store.put([1, 2, 3, 5], times=[HOUR * 1_000_000 + n for n in range(4)])
        store.put([1, 2, 4], created=again, times=[(HOUR + 301) * 1_000_000 + n for n in range(3)])
        done = compact(spark, str(store.root), STREAM, grace=0)
        assert (done.objects_before, done.objects_after) == (2, 1)
        newer, older = store.facts(spark).incarnations
        assert (newer.created, newer.first, newer.last, missing(newer)) == (again, 1, 4, [(3, 3)])
        assert (older.created, older.first, older.last, missing(older)) == (CREATED, 1, 5, [(4, 4)])

    def test_only_the_largest_holes_are_listed_and_the_others_counted(self, spark: SparkSession, store: Store) -> None:
        seqs = [seq for seq in range(1, 500) if seq % 3 and not 100 <= seq <= 120]
        store.put(seqs)
        page = store.page(spark)
        table = page.table("coverage", f"The {MAX_HOLES} largest")
        assert len(table) == MAX_HOLES
        assert ("99", "120", "22") in [(row["first missing"], row["last missing"], row["sequences"]) for row in table]
        life = store.facts(spark).incarnations[0]
        text = page.section("coverage").text
        listed = sum(int(row["sequences"]) for row in table)
        assert f"{life.holes - MAX_HOLES} more holes with {life.missing - listed} sequences together" in text


class TestQuarantine:
    def test_reasons_are_counted_alike_with_an_example(self, spark: SparkSession, store: Store) -> None:
        store.put([9], "a")
        errors = [("decode", f'"x{n}" at byte {n}') for n in (3, 14)] + [("key", "no part 2")]
        store.put([1, 2, 3], errors=errors, subject="orders.eu")
        store.put(
            [2, 3, 4],
            errors=[*errors[1:], ("key", "no part 3")],
            times=[HOUR * 1_000_000 + n for n in (1000, 2000, 3000)],
        )
        page = store.page(spark)
        table = page.table("quarantine", "Numbers are shown")
        assert [(row["stage"], row["reason"], row["messages"]) for row in table] == [
            ("decode", '"…" at byte N', "2"),
            ("key", "no part N", "2"),
        ]
        assert page.table("quarantine", "For each reason")[0] == {
            "sequence": "1",
            "stored in the stream (UTC)": "2026-05-01 12:00:00",
            "subject": "orders.eu",
            "error": '"x3" at byte 3',
        }
        assert page.tiles["In quarantine"] == "4"

    @pytest.mark.exhaustive
    def test_many_reasons_are_summed_up(self, spark: SparkSession, store: Store) -> None:
        reasons = MAX_REASONS + 10
        store.put([1], "a")
        store.put(range(2, 2 + reasons), errors=[("decode", "x" * (n + 1)) for n in range(reasons)])
        page = store.page(spark)
        assert len(page.table("quarantine", "Numbers are shown")) == MAX_REASONS
        assert "10 more messages for other reasons" in page.section("quarantine").text

    @pytest.mark.exhaustive
    def test_an_archive_of_a_quarantine_alone_has_a_report(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2], errors=[("decode", "x")] * 2)
        page = store.page(spark)
        assert page.verdict.startswith("No sequence is missing, but 2 messages")
        assert page.tiles["Messages"] == "0"


class TestLateness:
    @pytest.mark.exhaustive
    def test_the_wait_is_that_of_an_objects_oldest_message(self, spark: SparkSession, store: Store) -> None:
        store.put(range(1, 51), waited=10)
        store.put(range(51, 98), bucket=HOUR + 900, waited=1000)
        store.put(range(98, 101), bucket=HOUR + 86_400, waited=7200)
        page = store.page(spark)
        assert page.tiles["95 % stored within"] == "16 min 40 s"
        first, second = page.table("lateness", "By the day")
        assert (first["day (UTC)"], first["all within"]) == ("2 May 2026", "2 h")
        assert first["last object written after the end of its bucket"] == "1 h 45 min"
        assert (second["half of the messages within"], second["95 % within"]) == ("10 s", "16 min 40 s")

    @pytest.mark.exhaustive
    def test_objects_that_compaction_wrote_say_nothing_of_it(self, spark: SparkSession, store: Store) -> None:
        store.put([1, 2], waited=10)
        store.put([3, 4], waited=1_000_000, sealed_by="compact", bucket=HOUR + 900)
        page = store.page(spark)
        assert page.tiles["95 % stored within"] == "10 s"
        assert "1 object written by compaction" in page.section("lateness").text

    @pytest.mark.exhaustive
    def test_messages_delivered_again_are_counted_once(self, spark: SparkSession, store: Store) -> None:
        store.put(range(1, 11), delivered=[1] * 7 + [2, 5, 1])
        store.put(range(7, 11), delivered=[3, 3, 1, 1], times=[HOUR * 1_000_000 + 1000 * n for n in (6, 7, 8, 9)])
        assert "3 messages (30.0 %) were delivered more than once" in store.page(spark).section("lateness").text

    @pytest.mark.exhaustive
    def test_late_and_early_messages_are_those_outside_of_their_bucket(self, spark: SparkSession, store: Store) -> None:
        start, end = HOUR * 1_000_000, (HOUR + 900) * 1_000_000
        store.put(range(1, 7), times=[start - 1, start, end - 1, end, end + 10_000_000, end + 60_000_000])
        store.put([7, 8], bucket=HOUR + 900, times=[end, end + 1])
        delivery = store.facts(spark).delivery
        assert (delivery.early, delivery.late, delivery.median, delivery.worst) == (1, 3, 10.0, 60.0)
        text = store.page(spark).section("lateness").text
        assert "3 messages (37.5 %) reached the stream after the bucket's end: half of them within 10 s" in text


class TestChoice:
    def test_a_part_is_described_and_coverage_is_of_the_whole(self, spark: SparkSession, orders: Store) -> None:
        for file in orders.root.glob("_quarantine/**/*.parquet"):
            file.unlink()
        orders.put(range(70, 73), "us", bucket=HOUR + 1800)
        noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
        for chosen, messages in (
            ({"keys": ["us"]}, "22"),
            ({"keys": [None]}, "5"),
            ({"start": noon + timedelta(minutes=15)}, "45"),
            ({"start": noon + timedelta(minutes=20), "end": noon + timedelta(minutes=30)}, "25"),
            ({"end": noon + timedelta(minutes=15), "keys": ["eu", "us"]}, "44"),
        ):
            page = orders.page(spark, **chosen)
            assert page.tiles["Messages"] == messages
            assert page.tiles["Sequences"] == "1 to 89"
            assert "the whole stream, not just the part selected" in page.section("coverage").text

    def test_complete_buckets_are_those_that_the_watermark_covers(self, spark: SparkSession, orders: Store) -> None:
        with pytest.raises(JetcaptureError, match="no watermark for stream ORDERS, which --complete-only needs"):
            orders.page(spark, complete=True)
        for minute, second, messages, bad in ((29, 59, "44", "0"), (30, 0, "69", "0"), (45, 0, "86", "3")):
            orders.mark(64, datetime(2026, 5, 1, 12, minute, second, tzinfo=UTC))
            tiles = orders.page(spark, complete=True).tiles
            assert (tiles["Messages"], tiles["In quarantine"]) == (messages, bad)

    def test_nothing_chosen_is_said(self, spark: SparkSession, store: Store) -> None:
        store.put([1])
        assert store.page(spark, keys=["unheard of"]).verdict.startswith("The selected part of this archive is empty")


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'--></style></table></section><h1>owned</h1>",
    "http://evil.example/x.js",
    "\u202egnp.exe\x1b[31m\x00",
    "a&amp;b&lt;i&gt;",
    "x" * 400,
)


class TestPage:
    def test_what_is_stored_cannot_break_out_of_the_text(self, spark: SparkSession, tmp_path: Path) -> None:
        stream = "ORDERS <b onclick=x> $(rm -r)"
        store = Store(tmp_path / "archive")
        for number, text in enumerate(HOSTILE):
            store.put([2 * number + 1], text[:200], stream=stream, sealed_by=text, created=text)
            store.put([2 * number + 2], errors=[(text, text)], subject=text, stream=stream)
        page = Page.of(report(spark, str(store.root), stream, keys=[*HOSTILE]))
        allowed = "html head meta title style body header p h1 dl dt dd code nav a main section div h2 ul li b span i"
        allowed += " svg desc g rect line table caption thead tbody tr th td h3 pre strong footer"
        assert {each.name for each in page.elements} <= {"", *allowed.split()}
        names = {name for each in page.elements for name in each.attributes}
        assert not [name for name in names if name.startswith("on") or name in ("src", "action", "data", "xlink:href")]
        text = page.root.text
        assert page.root.one("h1").text == stream
        for shown in HOSTILE[:3]:
            assert shown in text
        assert "\ufffdgnp.exe\ufffd[31m\ufffd" in text
        assert not set("\u202e\x1b\x00") & set(text)
        assert "x" * 241 not in text
        commands = [each.text for each in page.root.all("pre")]
        assert all("'ORDERS <b onclick=x> $(rm -r)'" in command for command in commands)
        assert commands

    def test_it_needs_nothing_else(self, described: tuple[Store, str]) -> None:
        html = described[1]
        page = Page.of(html)
        assert not re.search(r"https?://|@import|url\(|<script|<link|<img|<iframe", html)
        assert all((each.attributes["href"] or "").startswith("#") for each in page.root.all("a"))
        targets = {each.attributes.get("id") for each in page.elements}
        assert all((each.attributes["href"] or "")[1:] in targets for each in page.root.all("a"))
        policy = [each.attributes.get("content") for each in page.root.all("meta")]
        assert "default-src 'none'; style-src 'unsafe-inline'" in policy
        for picture in page.root.all("svg"):
            assert picture.attributes["role"] == "img"
            assert [child.name for child in picture.children if not isinstance(child, str)][:2] == ["title", "desc"]
        for table in page.root.all("table"):
            assert table.one("caption").text

    def test_many_keys_and_objects_make_a_page_of_bounded_size(self, spark: SparkSession, store: Store) -> None:
        for number in range(300):
            store.put([number * 2 + 1], f"customer-{number:03}", bucket=HOUR + 900 * number)
        html = report(spark, str(store.root), STREAM)
        page = Page.of(html)
        assert len(html) < 300_000
        assert len(page.table("volume", "The 20 keys")) == 20
        assert "280 more keys with 280 messages" in page.section("volume").text
        assert len(page.section("volume").all("g")) <= 2 * 73


class TestCommand:
    def test_it_writes_the_page_and_tells_the_verdict(
        self, orders: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "report.html"
        arguments = ["--key", "us", "--key", "", "--from", "2026-05-01T12:15Z"]
        assert main([str(orders.root), STREAM, "--output", str(output), *arguments]) == 0
        page = Page.of(output.read_text())
        assert page.tiles["Messages"] == "22"
        assert "buckets from 2026-05-01 12:15:00 keys us, (no key)" in page.root.one("header").text
        assert capsys.readouterr().out == f"{output}: {page.verdict}\n"
        assert [each.name for each in tmp_path.iterdir() if "report" in each.name] == ["report.html"]

    @pytest.mark.parametrize(
        ("stream", "message"), [("NOTHING", "no archive of stream NOTHING"), ("ORDERS", "does not hold|cannot read")]
    )
    def test_a_failure_is_one_line_and_leaves_the_page_of_before(
        self, orders: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], stream: str, message: str
    ) -> None:
        next(orders.root.glob("ORDERS/key=us/**/*.parquet")).write_bytes(b"half an object")
        output = tmp_path / "report.html"
        output.write_text("before")
        assert main([str(orders.root), stream, "--output", str(output)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("report: ")
        assert re.search(message, error)
        assert error.count("\n") == 1
        assert output.read_text() == "before"
        assert not list(tmp_path.glob("*.partial"))

    def test_an_output_that_cannot_be_written_is_one_line(
        self, orders: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(orders.root), STREAM, "--output", str(tmp_path / "none" / "report.html")]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    def test_object_storage_is_read_with_the_captures_options_and_keeps_its_secrets(
        self, orders: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "report.html"
        with s3.serve() as endpoint:
            url = s3.upload(endpoint, orders.root)
            assert main([url, STREAM, *s3.arguments(endpoint), "--output", str(output)]) == 0
        page = Page.of(output.read_text())
        assert (page.tiles["Messages"], page.tiles["In quarantine"], page.tiles["Stored twice"]) == ("86", "3", "5")
        assert url in page.root.one("header").text
        assert s3.CREDENTIALS["secret"] not in output.read_text() + capsys.readouterr().out

    @pytest.mark.parametrize("moment", ["objects", "rows"])
    def test_an_archive_that_changes_meanwhile_is_listed_again(
        self, spark: SparkSession, orders: Store, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        listed: list[int] = []
        original = getattr(ReportSource, moment)

        def compacted_the_first_time(source: ReportSource, *arguments: Any) -> Any:
            if not listed:
                compact(spark, str(orders.root), STREAM, grace=0)
            listed.append(len(source.listed))
            return original(source, *arguments)

        monkeypatch.setattr(ReportSource, moment, compacted_the_first_time)
        page = orders.page(spark)
        assert (listed[0], listed[-1]) == (7, 6)
        assert page.tiles["Messages"] == "86"
        assert page.tiles["Stored twice"] == "0"


def test_a_real_capture_is_complete_up_to_its_watermark(
    spark: SparkSession, nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    async def captured() -> None:
        server = nats_server()
        payloads: Iterable[bytes] = (b"{" if n % 100 == 50 else b'{"n": %d}' % n for n in range(1000))
        await publish(server.url, [(f"orders.k{n % 3}", payload, None) for n, payload in enumerate(payloads)])
        await capture_all(config(server.url, tmp_path / "a", decode={"format": "json"}))

    asyncio.run(captured())
    page = Page.of(report(spark, str(tmp_path / "a"), STREAM))
    assert page.verdict == "No sequence is missing, but 10 messages could not be decoded and are in quarantine."
    assert (page.tiles["Messages"], page.tiles["Watermark"], page.tiles["Stored twice"]) == ("990", "1,000", "0")
