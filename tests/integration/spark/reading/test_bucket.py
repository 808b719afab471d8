"""`read_bucket`: which entries of a KV bucket are there at a moment."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.stream_config import StreamConfig, path
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading import bucket as without_spark
from spark_jobs import archive as with_spark
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import merge
from tests.support.kv import Entry, held

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

STREAM = "KV_s"
DELETE, PURGE = {"KV-Operation": "DEL"}, {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


def expiring(ttl: str) -> dict[str, str]:
    return {"Nats-TTL": ttl}


TTLS = {
    "30": 30,
    "30s": 30,
    "1m": 60,
    "1m30s": 90,
    "1h0m0s": 3600,
    "1.5m": 90,
    "1.1h": 3960,
    "1.9s": 1,
    ".5h1s": 1801,
    "1500ms": 1,
    "2s999999999ns": 2,
    "1m60000000us": 120,
    "9223372036": 9_223_372_036,
    "never": None,
    "Never": None,
    "99999999999999999999": None,
    "nonsense": None,
}
Change = tuple[str, Mapping[str, str]] | tuple[str, Mapping[str, str], int]
"""The key, the headers and, unless it follows from the sequence, the second at which it was stored."""


def store(archive: Archive, changes: Sequence[Change], *, first: int = 1, **more: Any) -> layout.ObjectName:
    """Store changes as an object; the value of sequence n is `vn`, stored n seconds after the hour."""
    seqs = range(first, first + len(changes))
    seconds = [change[2] if len(change) == 3 else seq for seq, change in zip(seqs, changes, strict=True)]
    names = [change[0] if change[0].startswith("$") else f"$KV.s.{change[0]}" for change in changes]
    return archive.write(
        list(seqs),
        None,
        stream=STREAM,
        timestamps=[(HOUR + second) * 1_000_000 for second in seconds],
        headers=[[(name, [text]) for name, text in change[1].items()] or None for change in changes],
        payloads=[b"v%d" % seq for seq in seqs],
        columns={layout.SUBJECT: pa.array(names), **more.pop("columns", {})},
        metadata={"stream_created": ""},
        **more,
    )


def read_bucket(spark: SparkSession, url: str, bucket: str, **arguments: Any) -> DataFrame:
    """The entries that Spark reads, which are those that are read without it."""
    table = with_spark.read_bucket(spark, url, bucket, **arguments).toArrow()
    arguments.pop("engine", None)
    own = without_spark.read_bucket(url, bucket, **arguments).read_all()
    assert [(field.name, field.type) for field in own.schema] == [(field.name, field.type) for field in table.schema]
    assert sorted(map(str, own.to_pylist())) == sorted(map(str, table.to_pylist()))
    return spark.createDataFrame(table)


def second(number: float) -> datetime:
    return datetime.fromtimestamp(HOUR, UTC) + timedelta(seconds=number)


def note(archive: Archive, created: str, *, continues: bool = False, **config: Any) -> None:
    """Record the bucket's settings, as a capture does."""
    file = archive.root / path(STREAM, created)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = StreamConfig(stream=STREAM, created=created, config={"name": STREAM, **config}, continues=continues)
    file.write_bytes(found.encode())


def values(frame: DataFrame) -> dict[str, str]:
    rows = frame.select("key_name", "_nats_payload").collect()
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: bytes(row[1]).decode() for row in rows}


class TestLifetimes:
    @pytest.mark.exhaustive
    def test_deletions_and_purges_end_a_key_until_it_is_put_again(self, spark: SparkSession, archive: Archive) -> None:
        marker = {"Nats-Marker-Reason": "Remove"}
        store(archive, [("a", {}), ("b", {}), ("a", DELETE), ("b", PURGE), ("c.d", {}), ("a", {}), ("c.d", marker)])
        expected: list[dict[str, str]] = [
            {"a": "v1"},
            {"a": "v1", "b": "v2"},
            {"b": "v2"},
            {},
            {"c.d": "v5"},
            {"c.d": "v5", "a": "v6"},
            {"a": "v6"},
        ]
        for revision, there in enumerate(expected, 1):
            moment = revision if revision % 2 else second(revision)
            assert values(read_bucket(spark, archive.url, "s", as_of=moment)) == there
        assert values(read_bucket(spark, archive.url, "s", as_of=0)) == {}
        assert values(read_bucket(spark, archive.url, "s", as_of=99)) == expected[-1]
        assert values(read_bucket(spark, archive.url, "s")) == expected[-1]

    def test_a_ttl_is_read_as_the_server_reads_it(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [(f"k{number}", expiring(ttl)) for number, ttl in enumerate(TTLS)])
        frame = read_bucket(spark, archive.url, "s", history=True).orderBy("revision")
        found = frame.selectExpr("unix_micros(_nats_expires) - unix_micros(_nats_timestamp)").collect()
        seconds = [None if row[0] is None else row[0] / 1_000_000 for row in found]
        assert dict(zip(TTLS, seconds, strict=True)) == TTLS

    @pytest.mark.exhaustive
    def test_an_entry_is_gone_when_its_ttl_has_run_out_whatever_the_marker_says(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(
            archive,
            [("a", expiring("10")), ("b", expiring("20s")), ("c", {}), ("a", {"Nats-Marker-Reason": "MaxAge"}, 15)],
        )
        assert values(read_bucket(spark, archive.url, "s", as_of=second(10.999))).keys() == {"a", "b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(11))).keys() == {"b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=4)).keys() == {"b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(22))).keys() == {"c"}
        assert values(read_bucket(spark, archive.url, "s")).keys() == {"c"}

    @pytest.mark.exhaustive
    def test_max_age_ends_all_but_entries_that_never_expire(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", expiring("never")), ("c", expiring("1h")), ("d", expiring("10s"))])
        note(archive, "2026-05-01T00:00:00.123456789Z", max_age=60 * 10**9, max_msgs_per_subject=1)
        assert values(read_bucket(spark, archive.url, "s", as_of=second(13))).keys() == {"a", "b", "c", "d"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(14))).keys() == {"a", "b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(61))).keys() == {"b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(63))).keys() == {"b"}
        later = second(3000)
        assert values(read_bucket(spark, archive.url, "s", as_of=later, max_age=0)).keys() == {"a", "b", "c"}
        assert values(read_bucket(spark, archive.url, "s", as_of=later, max_age=timedelta(hours=1))).keys() == {
            "a",
            "b",
            "c",
        }
        assert values(read_bucket(spark, archive.url, "s", as_of=later, max_age="40m")).keys() == {"b"}

    @pytest.mark.exhaustive
    def test_ttls_are_ignored_where_the_bucket_has_never_allowed_any(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(archive, [("a", {}), ("a", expiring("5")), ("b", {}, 40)])
        limits = {"max_msgs_per_subject": 2, "max_age": 60 * 10**9}
        note(archive, "2026-05-01T00:00:00Z", allow_msg_ttl=False, **limits)
        assert values(read_bucket(spark, archive.url, "s", as_of=second(50))) == {"a": "v2", "b": "v3"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(62))) == {"b": "v3"}
        note(archive, "2026-05-01T00:00:00Z", continues=True, allow_msg_ttl=False, **limits)
        assert values(read_bucket(spark, archive.url, "s", as_of=second(50))) == {"a": "v1", "b": "v3"}

    @pytest.mark.exhaustive
    def test_older_entries_return_as_in_the_bucket_when_a_newer_one_expires(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(
            archive,
            [
                ("a", {}),
                ("a", expiring("5")),
                ("b", {}),
                ("b", PURGE | expiring("3")),
                ("c", DELETE),
                ("c", expiring("1")),
            ],
        )
        at = second(60)
        assert values(read_bucket(spark, archive.url, "s", as_of=at)) == {}
        assert values(read_bucket(spark, archive.url, "s", as_of=at, max_msgs_per_subject=2)) == {"a": "v1"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(6), max_msgs_per_subject=2)) == {
            "a": "v2",
            "c": "v6",
        }

    @pytest.mark.parametrize("per_key", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
    def test_any_history_gives_what_the_rules_of_the_server_give(
        self, spark: SparkSession, archive: Archive, per_key: int
    ) -> None:
        choose = random.Random(per_key)
        entries: list[Entry] = []
        changes: list[Change] = []
        for seq in range(1, 301):
            key = f"k{choose.randrange(12)}"
            headers: dict[str, str] = choose.choices([{}, DELETE, PURGE], [8, 1, 1])[0]
            ttl = choose.choice([None, None, choose.randrange(1, 60)])
            headers = headers if ttl is None else headers | expiring(str(ttl))
            changes.append((key, headers))
            entries.append(
                Entry(
                    seq=seq,
                    time=(HOUR + seq) * 1_000_000,
                    key=key,
                    put="KV-Operation" not in headers,
                    value=b"v%d" % seq,
                    ttl=None if ttl is None else ttl * 1_000_000,
                    clears="Nats-Rollup" in headers,
                )
            )
        store(archive, changes[:200])
        store(archive, changes[200:], first=201)
        note(archive, "2026-05-01T00:00:00Z", max_msgs_per_subject=per_key)
        for moment in (40, 250, 320):
            expected = {
                key: value.decode() for key, (_, value) in held(entries, (HOUR + moment) * 1_000_000, per_key).items()
            }
            assert values(read_bucket(spark, archive.url, "s", as_of=second(moment))) == expected


class TestArchives:
    def test_values_in_the_quarantine_belong_to_the_bucket(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})], n=[1, 2])
        failed = {"stage": ["decode"] * 2, "error": ["bad"] * 2, "raw_headers": pa.nulls(2, pa.binary())}
        store(archive, [("b", {}), ("c", {})], first=3, quarantine=True, columns=failed)
        found = read_bucket(spark, archive.url, "s", columns=["key_name", "n", "revision"]).collect()
        assert sorted(map(tuple, found)) == [("a", 1, 1), ("b", None, 3), ("c", None, 4)]

    def test_an_entry_that_is_in_both_is_there_once_and_decoded(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {})], n=[1])
        failed = {"stage": ["decode"], "error": ["bad"], "raw_headers": pa.nulls(1, pa.binary())}
        store(archive, [("a", {})], quarantine=True, columns=failed)
        ways: list[dict[str, Any]] = [{}, {"history": True}, {"max_msgs_per_subject": 3}]
        for way in ways:
            found = read_bucket(spark, archive.url, "s", columns=["key_name", "n"], **way).collect()
            assert [tuple(row) for row in found] == [("a", 1)]

    def test_copies_count_once_and_both_engines_agree(self, spark: SparkSession, archive: Archive) -> None:
        one = store(archive, [("a", {}), ("b", {}), ("a", DELETE)])
        two = store(archive, [("a", DELETE), ("c", {})], first=3)
        merge(archive.root, [one, two], keep=True)
        for engine in ("spark", "arrow"):
            found = read_bucket(spark, archive.url, "s", engine=engine, columns=["key_name", "revision"])  # type: ignore[arg-type]
            assert sorted(map(tuple, found.collect())) == [("b", 2), ("c", 4)]
            assert read_bucket(spark, archive.url, "s", engine=engine, history=True).count() == 4  # type: ignore[arg-type]

    def test_a_value_with_several_rows_keeps_them_all(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})], n=[1, 2])
        archive.write(
            [3, 3],
            None,
            stream=STREAM,
            subject="$KV.s.a",
            timestamps=[(HOUR + 3) * 1_000_000] * 2,
            columns={layout.ROW: pa.array([0, 1], pa.int32()), "n": [5, 6]},
        )
        found = read_bucket(spark, archive.url, "s", columns=["key_name", "n"], max_msgs_per_subject=3).collect()
        assert sorted(map(tuple, found)) == [("a", 5), ("a", 6), ("b", 2)]

    def test_history_has_every_operation(self, spark: SparkSession, archive: Archive) -> None:
        reasons = [{"Nats-Marker-Reason": reason} for reason in ("MaxAge", "Purge", "Remove")]
        changes = [{}, DELETE, PURGE, *reasons, {"KV-Operation": "PUT"}]
        store(archive, [("a", headers) for headers in changes])
        rows = read_bucket(spark, archive.url, "s", history=True).orderBy("revision").select("operation").collect()
        assert [row[0] for row in rows] == ["put", "delete", "purge", "expire", "purge", "delete", "put"]
        assert read_bucket(spark, archive.url, "s", history=True, as_of=3).count() == 3

    def test_columns_of_the_capture_and_of_the_layout_do_not_repeat(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        captured = {"key_name": ["a"], "operation": ["put"], "revision": pa.array([1])}
        store(archive, [("a", {})], columns=captured, revision_=["v1"], key_=["x"])
        found = read_bucket(spark, archive.url, "s")
        assert found.columns[:4] == ["key_name", "operation", "revision", "_nats_expires"]
        assert {"revision_", "key_"} < set(found.columns)
        assert len(set(found.columns)) == len(found.columns)
        assert not {"key", "date", "hour"} & set(found.columns)

    def test_fields_of_a_bucket_that_was_captured_as_a_stream_are_kept(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(archive, [("a", {})], columns={"operation": ["sum"], "a.b": ["x"], "c`d": ["y"]})
        (row,) = read_bucket(spark, archive.url, "s").collect()
        assert (row["operation"], row["operation_"], row["a.b"], row["c`d"]) == ("put", "sum", "x", "y")

    def test_other_subjects_are_no_entries_and_mirrors_have_their_origins_keys(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(archive, [("$KV.origin.a.b", {}), ("$KV.s", {}), ("$OTHER.s.a", {})])
        assert values(read_bucket(spark, archive.url, "s")) == {"a.b": "v1"}
        assert read_bucket(spark, archive.url, "s", history=True).count() == 1


class TestIncarnations:
    def test_a_bucket_that_was_created_again_has_none_of_the_old_keys(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(archive, [("old", {}), ("both", {}), ("old", {})])
        store(archive, [("both", {}, 100), ("new", {}, 101)])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), max_msgs_per_subject=1)
        assert values(read_bucket(spark, archive.url, "s")) == {"both": "v1", "new": "v2"}
        assert values(read_bucket(spark, archive.url, "s", as_of=1)) == {"both": "v1"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(100))) == {"both": "v1"}
        assert values(read_bucket(spark, archive.url, "s", as_of=second(3))) == {"old": "v3", "both": "v2"}

    def test_a_bucket_that_was_created_again_starts_anew_without_entries_and_with_any_revision(
        self, spark: SparkSession, archive: Archive
    ) -> None:
        store(archive, [("old", {}), ("both", {})])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), max_msgs_per_subject=1)
        assert values(read_bucket(spark, archive.url, "s")) == {}
        store(archive, [("both", {}, 100)], first=40)
        assert values(read_bucket(spark, archive.url, "s")) == {"both": "v40"}
        note(archive, second(200).isoformat(), continues=True, max_msgs_per_subject=1)
        store(archive, [("restored", {}, 300)], first=41)
        assert values(read_bucket(spark, archive.url, "s")) == {"both": "v40", "restored": "v41"}

    def test_a_restored_or_mirrored_bucket_keeps_its_older_entries(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), continues=True, max_msgs_per_subject=1)
        assert values(read_bucket(spark, archive.url, "s")).keys() == {"a", "b"}
        store(archive, [("c", {}, 60)], first=3)
        assert values(read_bucket(spark, archive.url, "s")).keys() == {"a", "b", "c"}


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"as_of": "soon"}, "as_of: "),
            ({"as_of": True}, "as_of: "),
            ({"as_of": datetime(2026, 5, 1)}, "as_of: "),
            ({"max_age": "long"}, "max_age: "),
            ({"max_msgs_per_subject": 0}, "max_msgs_per_subject=0: expected at least 1"),
            ({"columns": ["nothing"]}, "the archive has no column nothing; it has "),
        ],
    )
    def test_wrong_ones_are_refused_in_one_line(
        self, spark: SparkSession, archive: Archive, arguments: dict[str, Any], problem: str
    ) -> None:
        store(archive, [("a", {})])
        with pytest.raises(JetcaptureError) as caught:
            read_bucket(spark, archive.url, "s", **arguments)
        assert str(caught.value).startswith(problem)
        assert "\n" not in str(caught.value)

    def test_a_name_that_is_no_buckets_is_refused(self, spark: SparkSession, archive: Archive) -> None:
        with pytest.raises(JetcaptureError, match=r'bucket="../s": expected ASCII letters'):
            read_bucket(spark, archive.url, "../s")

    def test_an_unknown_bucket_is_named(self, spark: SparkSession, archive: Archive) -> None:
        store(archive, [("a", {})])
        with pytest.raises(JetcaptureError, match="no archive of stream KV_other"):
            read_bucket(spark, archive.url, "other")


def test_an_entry_that_is_decoded_while_the_bucket_is_read_is_not_left_out(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pass that chooses the entries and the one that reads them."""
    store(archive, [("a", {}), ("b", {})])
    failed: dict[str, Any] = {layout.STAGE: ["decode"], layout.ERROR: ["not JSON"]}
    bad = archive.root / store(archive, [("c", {})], first=3, quarantine=True, columns=failed).path
    start_of = without_spark.start_of

    def decoded(*arguments: Any) -> Any:
        bad.unlink()
        store(archive, [("c", {})], first=3)
        return start_of(*arguments)

    monkeypatch.setattr(without_spark, "start_of", decoded)
    with pytest.raises(VanishedError, match="read it again"):
        without_spark.read_bucket(archive.url, "s").read_all()
    monkeypatch.undo()
    assert sorted(without_spark.read_bucket(archive.url, "s").read_all()["key_name"].to_pylist()) == ["a", "b", "c"]
