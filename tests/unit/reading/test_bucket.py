"""`read_bucket`: which entries of a KV bucket are there at a moment; Spark gives the same of a random bucket."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading import bucket as reading
from tests.support.archives import HOUR, Archive
from tests.support.kv import DELETE, PURGE, STREAM, TTLS, Change, Entry, expiring, held, note, second, store

MARKER = {"Nats-Marker-Reason": "Remove"}
QUARANTINED: dict[str, Any] = {layout.STAGE: ["decode"], layout.ERROR: ["bad"]}


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def rows(archive: Archive, *columns: str, **how: Any) -> list[tuple[Any, ...]]:
    """The rows of the bucket, in order."""
    table = reading.read_bucket(archive.url, "s", columns=columns or None, **how).read_all()
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=str)


def values(archive: Archive, **how: Any) -> dict[str, str]:
    found = rows(archive, "key_name", "_nats_payload", **how)
    assert len(dict(found)) == len(found)
    return {key: value.decode() for key, value in found}


class TestLifetimes:
    def test_a_ttl_is_read_as_the_server_reads_it(self, archive: Archive) -> None:
        store(archive, [(f"k{number}", expiring(ttl)) for number, ttl in enumerate(TTLS)])
        found = sorted(rows(archive, "revision", "_nats_timestamp", "_nats_expires", history=True))
        seconds = [None if ends is None else (ends - time).total_seconds() for _, time, ends in found]
        assert dict(zip(TTLS, seconds, strict=True)) == TTLS

    def test_max_age_ends_all_but_entries_that_never_expire(self, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", expiring("never")), ("c", expiring("1h")), ("d", expiring("10s"))])
        note(archive, "2026-05-01T00:00:00.123456789Z", max_age=60 * 10**9, max_msgs_per_subject=1)
        assert values(archive, as_of=second(13)).keys() == {"a", "b", "c", "d"}
        assert values(archive, as_of=second(14)).keys() == {"a", "b", "c"}
        assert values(archive, as_of=second(61)).keys() == {"b", "c"}
        assert values(archive, as_of=second(63)).keys() == {"b"}
        later = second(3000)
        assert values(archive, as_of=later, max_age=0).keys() == {"a", "b", "c"}
        assert values(archive, as_of=later, max_age=timedelta(hours=1)).keys() == {"a", "b", "c"}
        assert values(archive, as_of=later, max_age="40m").keys() == {"b"}

    def test_ttls_are_ignored_where_the_bucket_has_never_allowed_any(self, archive: Archive) -> None:
        store(archive, [("a", {}), ("a", expiring("5")), ("b", {}, 40)])
        limits = {"max_msgs_per_subject": 2, "max_age": 60 * 10**9}
        note(archive, "2026-05-01T00:00:00Z", allow_msg_ttl=False, **limits)
        assert values(archive, as_of=second(50)) == {"a": "v2", "b": "v3"}
        assert values(archive, as_of=second(62)) == {"b": "v3"}
        note(archive, "2026-05-01T00:00:00Z", continues=True, allow_msg_ttl=False, **limits)
        assert values(archive, as_of=second(50)) == {"a": "v1", "b": "v3"}

    @pytest.mark.parametrize("per_key", [1, 3])
    def test_any_history_gives_what_the_rules_of_the_server_give(self, archive: Archive, per_key: int) -> None:
        choose = random.Random(per_key)
        entries: list[Entry] = []
        changes: list[Change] = []
        for seq in range(1, 301):
            key = f"k{choose.randrange(12)}"
            headers: dict[str, str] = choose.choices([{}, DELETE, PURGE, MARKER], [8, 1, 1, 1])[0]
            ttl = choose.choice([None, choose.randrange(1, 60)])
            headers = headers if ttl is None else headers | expiring(str(ttl))
            changes.append((key, headers))
            put, clears = not {*DELETE, *MARKER} & {*headers}, bool({"Nats-Rollup", "Nats-Marker-Reason"} & {*headers})
            micros, value = None if ttl is None else ttl * 1_000_000, b"v%d" % seq
            time = (HOUR + seq) * 1_000_000
            entries.append(Entry(seq=seq, time=time, key=key, put=put, value=value, ttl=micros, clears=clears))
        store(archive, changes[:200])
        store(archive, changes[200:], first=201)
        note(archive, "2026-05-01T00:00:00Z", max_msgs_per_subject=per_key)
        for moment in range(20, 340, 10):
            left = held(entries, second(moment).timestamp() * 1_000_000, per_key)
            expected = {key: value.decode() for key, (_, value) in left.items()}
            assert values(archive, as_of=second(moment)) == expected


class TestArchives:
    def test_values_in_the_quarantine_belong_to_the_bucket(self, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})], n=[1, 2])
        store(archive, [("b", {})], first=3, quarantine=True, columns=QUARANTINED)
        store(archive, [("c", {})], first=4, quarantine=True, columns=QUARANTINED)
        assert rows(archive, "key_name", "n", "revision") == [("a", 1, 1), ("b", None, 3), ("c", None, 4)]

    def test_a_value_with_several_rows_keeps_them_all(self, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})], n=[1, 2])
        several = {layout.ROW: pa.array([0, 1], pa.int32()), "n": [5, 6]}
        times = [second(3).timestamp() * 1_000_000] * 2
        archive.write([3, 3], None, stream=STREAM, subject="$KV.s.a", timestamps=times, columns=several)
        assert rows(archive, "key_name", "n", max_msgs_per_subject=3) == [("a", 5), ("a", 6), ("b", 2)]

    def test_history_has_every_operation(self, archive: Archive) -> None:
        reasons = [{"Nats-Marker-Reason": reason} for reason in ("MaxAge", "Purge", "Remove")]
        changes = [{}, DELETE, PURGE, *reasons, {"KV-Operation": "PUT"}]
        store(archive, [("a", headers) for headers in changes])
        found = [operation for _, operation in rows(archive, "revision", "operation", history=True)]
        assert found == ["put", "delete", "purge", "expire", "purge", "delete", "put"]
        assert len(rows(archive, history=True, as_of=3)) == 3

    def test_columns_of_the_capture_and_of_the_layout_do_not_repeat(self, archive: Archive) -> None:
        captured = {"key_name": ["a"], "operation": ["put"], "revision": pa.array([1])}
        store(archive, [("a", {})], columns=captured, revision_=["v1"], key_=["x"])
        found = reading.read_bucket(archive.url, "s").schema.names
        assert found[:4] == ["key_name", "operation", "revision", "_nats_expires"]
        assert {"revision_", "key_"} < set(found)
        assert len(set(found)) == len(found)
        assert not {"key", "date", "hour"} & set(found)

    def test_fields_of_a_bucket_that_was_captured_as_a_stream_are_kept(self, archive: Archive) -> None:
        store(archive, [("a", {})], columns={"operation": ["sum"], "a.b": ["x"], "c`d": ["y"]})
        assert rows(archive, "operation", "operation_", "a.b", "c`d") == [("put", "sum", "x", "y")]

    def test_other_subjects_are_no_entries_and_mirrors_have_their_origins_keys(self, archive: Archive) -> None:
        store(archive, [("$KV.origin.a.b", {}), ("$KV.s", {}), ("$OTHER.s.a", {})])
        assert values(archive) == {"a.b": "v1"}
        assert len(rows(archive, history=True)) == 1


class TestIncarnations:
    def test_a_bucket_that_was_created_again_has_none_of_the_old_keys(self, archive: Archive) -> None:
        store(archive, [("old", {}), ("both", {}), ("old", {})])
        store(archive, [("both", {}, 100), ("new", {}, 101)])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), max_msgs_per_subject=1)
        assert values(archive) == {"both": "v1", "new": "v2"}
        assert values(archive, as_of=1) == {"both": "v1"}
        assert values(archive, as_of=second(100)) == {"both": "v1"}
        assert values(archive, as_of=second(3)) == {"old": "v3", "both": "v2"}

    def test_a_bucket_that_was_created_again_starts_anew_with_any_revision(self, archive: Archive) -> None:
        store(archive, [("old", {}), ("both", {})])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), max_msgs_per_subject=1)
        assert values(archive) == {}
        store(archive, [("both", {}, 100)], first=40)
        assert values(archive) == {"both": "v40"}
        note(archive, second(200).isoformat(), continues=True, max_msgs_per_subject=1)
        store(archive, [("restored", {}, 300)], first=41)
        assert values(archive) == {"both": "v40", "restored": "v41"}

    def test_a_restored_or_mirrored_bucket_keeps_its_older_entries(self, archive: Archive) -> None:
        store(archive, [("a", {}), ("b", {})])
        note(archive, second(0).isoformat(), max_msgs_per_subject=1)
        note(archive, second(50).isoformat(), continues=True, max_msgs_per_subject=1)
        assert values(archive).keys() == {"a", "b"}
        store(archive, [("c", {}, 60)], first=3)
        assert values(archive).keys() == {"a", "b", "c"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("s", {"as_of": "soon"}, "as_of: "),
    ("s", {"as_of": True}, "as_of: "),
    ("s", {"as_of": datetime(2026, 5, 1)}, "as_of: "),
    ("s", {"max_age": "long"}, "max_age: "),
    ("s", {"max_msgs_per_subject": 0}, "max_msgs_per_subject=0: expected at least 1"),
    ("s", {"columns": ["nothing"]}, "the archive has no column nothing; it has "),
    ("../s", {}, 'bucket="../s": expected ASCII letters'),
    ("other", {}, "no archive of stream KV_other"),
]


def test_wrong_arguments_are_refused_in_one_line(archive: Archive) -> None:
    for bucket, arguments, problem in REFUSED:
        store(archive, [("a", {})])
        with pytest.raises(JetcaptureError) as caught:
            reading.read_bucket(archive.url, bucket, **arguments)
        assert str(caught.value).startswith(problem)
        assert "\n" not in str(caught.value)


def test_an_entry_that_is_decoded_meanwhile_is_not_left_out(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pass that chooses the entries and the one that reads them."""
    store(archive, [("a", {}), ("b", {})])
    bad = archive.root / store(archive, [("c", {})], first=3, quarantine=True, columns=QUARANTINED).path
    start_of = reading.start_of

    def decoded(*arguments: Any) -> Any:
        bad.unlink()
        store(archive, [("c", {})], first=3)
        return start_of(*arguments)

    monkeypatch.setattr(reading, "start_of", decoded)
    with pytest.raises(VanishedError, match="read it again"):
        reading.read_bucket(archive.url, "s").read_all()
    monkeypatch.undo()
    assert sorted(reading.read_bucket(archive.url, "s").read_all()["key_name"].to_pylist()) == ["a", "b", "c"]
