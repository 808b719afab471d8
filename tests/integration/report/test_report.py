"""The report says what is in an archive: figures, holes, reasons; and it is a page that needs nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from typer.testing import CliRunner

from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.archive.watermark import ConsumerWatermark, path
from jetcapture_py.cli import app
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.selection import Selection
from jetcapture_py.report.facts import MAX_HOLES, Coverage, Facts, Scope, collect
from jetcapture_py.report.figures import cells, delivery
from jetcapture_py.report.page import page
from jetcapture_py.store import LocalStore
from jetcapture_py.store.archive import ArchiveFiles
from tests.support import s3
from tests.support.archives import HOUR, Archive, lay_out
from tests.support.erasing import bury
from tests.support.examples import examples
from tests.support.report_page import Page

STREAM = "ORDERS"
CREATED = "2026-04-01T08:00:00.123456789Z"
SEQUENCES = some.sets(some.integers(1, 30), min_size=1, max_size=15)
BLOCK = some.tuples(some.sampled_from("abq"), some.integers(0, 2), SEQUENCES)


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
        waited: float = 60.0,
        **other: str,
    ) -> Path:
        """Store one object: with `errors`, stage and text, in the quarantine. Without `times`, in microseconds,
        messages come a millisecond apart from the bucket's start; the object is written `waited` seconds after the
        first one came. `other`: its stream, subject, sealed_by and created."""
        times = times or [bucket * 1_000_000 + number * 1000 for number in range(len(seqs))]
        columns: dict[str, pa.Array | list[object]] = {layout.NANOS: pa.array([0] * len(seqs), pa.int16())}
        if delivered is not None:
            columns[layout.DELIVERED] = pa.array(delivered, pa.int32())
        if errors is not None:
            columns |= {layout.STAGE: [stage for stage, _ in errors], layout.ERROR: [error for _, error in errors]}
        more: dict[str, Any] = {"stream": STREAM, "subject": "orders.new", "created": CREATED, "sealed_by": "age"}
        more |= {"bucket": bucket, "timestamps": times, "quarantine": errors is not None, "columns": columns}
        name = Archive(self.root).write(seqs, key, interval=900, **(more | other))
        target = self.root / name.path
        os.utime(target, (times[0] / 1e6 + waited,) * 2)
        return target

    def mark(self, seq: int, time: datetime, created: str = CREATED) -> None:
        target = self.root / path(STREAM, "archive")
        target.parent.mkdir(parents=True, exist_ok=True)
        known = ConsumerWatermark(stream=STREAM, consumer="archive", created=created, seq=seq, time=time)
        target.write_bytes(known.encode())

    def facts(self, scope: Scope = Scope()) -> Facts:  # noqa: B008  it is frozen
        return collect(ArchiveFiles(str(self.root), {}), STREAM, scope)

    def page(self, scope: Scope = Scope()) -> Page:  # noqa: B008
        return Page.of(page(self.facts(scope)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "archive")


def missing(life: Coverage) -> list[tuple[int, int]]:
    return [(hole.first, hole.last) for hole in life.largest]


@pytest.fixture
def orders(store: Store) -> Store:
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


def test_they_are_those_that_another_engine_counts(orders: Store) -> None:
    report, files = orders.page(), [*orders.root.glob("ORDERS/**/*.parquet")]
    query = f"""SELECT key, count(DISTINCT (_nats_seq, _nats_timestamp)), count(*)
                FROM read_parquet('{orders.root}/ORDERS/**/*.parquet', hive_partitioning=true) GROUP BY key"""
    counted = {key: (distinct, rows) for key, distinct, rows in duckdb.connect().execute(query).fetchall()}
    keys = {row["key"]: row for row in report.table("volume", "Every key")}
    messages = {name: int(row["messages"]) for name, row in keys.items()}
    assert messages == {key or "no key": distinct for key, (distinct, _) in counted.items()}
    distinct, rows = map(sum, zip(*counted.values(), strict=True))
    assert report.tiles["Messages"] == str(distinct) == "86"
    assert report.tiles["Stored twice"] == str(rows - distinct) == "5"
    assert report.tiles["Objects"] == str(len(files)) == "6"
    assert report.tiles["Stored"] == f"{sum(file.stat().st_size for file in files) / 1024:.1f} KiB"
    assert (report.tiles["Keys"], report.tiles["In quarantine"], report.tiles["Sequences"]) == ("3", "3", "1 to 89")
    assert {row["objects"] for row in keys.values()} == {"3", "2", "1"}
    bars = [each.one("title").text for each in report.section("volume").all("g")]
    assert [line for line in bars if "message" in line] == [
        "1 May 2026 12:00, 15 min: 44 messages eu: 42 messages (95.5 %) us: 2 messages (4.5 %)",
        "1 May 2026 12:15, 15 min: 25 messages eu: 20 messages (80.0 %) (no key): 5 messages (20.0 %)",
        "1 May 2026 12:30, 15 min: 17 messages us: 17 messages (100 %)",
    ]
    assert report.verdict == "No sequence is missing, but 3 messages could not be decoded and are in quarantine."
    first, second = report.findings
    assert first.startswith("Action needed 3 messages in quarantine (3")
    assert second.startswith("Note 5 messages stored twice.")


def test_a_part_is_described_and_coverage_is_of_the_whole(orders: Store) -> None:
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    for selection, messages, bad in (
        (Selection(keys=["us"]), "19", "3"),
        (Selection(keys=[None]), "5", "3"),
        (Selection(start=noon + timedelta(minutes=15)), "42", "3"),
        (Selection(start=noon + timedelta(minutes=20), end=noon + timedelta(minutes=30)), "25", "0"),
        (Selection(end=noon + timedelta(minutes=15), keys=["eu", "us"]), "44", "0"),
    ):
        report = orders.page(Scope(selection=selection))
        assert (report.tiles["Messages"], report.tiles["In quarantine"]) == (messages, bad)
        assert report.tiles["Sequences"] == "1 to 89"
        assert "the whole stream, not just the part selected" in report.section("coverage").text


def test_copies_that_readers_return_separately_are_told(store: Store) -> None:
    store.put([1, 2], "a")
    store.put([1, 2], "b")
    report = store.page()
    assert (report.tiles["Messages"], report.tiles["Stored twice"]) == ("2", "2")
    said = "2 messages with copies under different keys or time slices, which readers return separately"
    assert said in str(report.findings)


def test_holes_lives_delays_and_reasons_of_an_archive_with_every_trouble(store: Store) -> None:
    again = "2026-05-01T13:30:00Z"
    store.put(range(1, 11), delivered=[1] * 8 + [2, 5], waited=10)
    store.put([9, 10, 11], times=[(HOUR + 60) * 1_000_000 + n for n in range(3)], waited=10)  # the server lost two
    store.put([14, 15, 19], "b", bucket=HOUR + 900, sealed_by="compact", waited=1_000_000)
    errors = [("decode", f'"x{n}" at byte {n}') for n in (3, 14)] + [("key", "no part 2")]
    store.put([20, 21, 24], errors=errors, bucket=HOUR + 1800, subject="orders.eu")
    twice = {"bucket": HOUR + 1800, "times": [(HOUR + 1800) * 1_000_000 + n for n in (1000, 2000)]}
    store.put([21, 24], errors=errors[1:], **twice)
    store.put([21], "b", bucket=HOUR + 1800, times=twice["times"][:1])  # decoded at last
    second = HOUR + 7200
    micros = [(second * 1_000_000) + n for n in (-1, 0)] + [(second + 900 + n) * 1_000_000 for n in (10, 60)]
    store.put([1, 2, 4, 9], bucket=second, created=again, times=micros, waited=3600)
    store.mark(4, datetime(2026, 5, 1, 14, tzinfo=UTC), created=again)
    expired = Expired(stream=STREAM, until=datetime(2026, 5, 1, tzinfo=UTC))
    expired = expired.with_messages(CREATED, np.array([12, 26]), expired.until, expired.until)
    LocalStore(str(store.root)).write_note(expired_path(STREAM), expired.encode())
    bury(store.root, [{"_nats_seq": 17, "_nats_timestamp": datetime.fromtimestamp(HOUR, UTC)}])

    facts = store.facts()
    newer, older = facts.incarnations
    assert (newer.created, missing(newer), newer.open_missing) == (again, [(3, 3), (5, 8)], 4)
    assert (older.created, older.first, older.last, older.forked, older.removed) == (CREATED, 1, 24, 2, 2)
    assert missing(older) == [(13, 13), (16, 16), (18, 18), (22, 23)]
    assert (facts.messages(facts.objects), facts.messages(facts.quarantine)) == (21, 2)
    late = delivery(facts)
    assert (late.early, late.late, late.latest, late.redelivered, late.deliveries) == (1, 1, 60.0, 1, 5)

    report = store.page()
    assert report.verdict.startswith("6 of 33 sequences, in 5 holes, are not stored, and 2 messages")
    coverage = report.section("coverage")
    created = ["Stream created 2026-05-01 13:30:00", "Stream created 2026-04-01 08:00:00"]
    assert [each.text for each in coverage.all("h3")] == created
    for text in (
        "Lost by the server: 2 messages.",
        "2 messages expired, in time slices up to 2026-05-01T00:00:00Z: they were removed on purpose.",
        "1 message was erased.",
        "1 object written by compaction",
        "1 object has messages that were delivered more than once before being stored, up to 5 times.",
        "1 object with 4 messages (19.0 %) has some that reached the stream after the time slice's end",
    ):
        assert text in report.root.text
    reasons = [(row["stage"], row["reason"], row["messages"]) for row in report.table("quarantine", "Numbers")]
    assert reasons == [("decode", '"…" at byte N', "1"), ("key", "no part N", "1")]
    assert report.table("quarantine", "For each reason")[0]["error"] == '"x3" at byte 3'


@settings(examples(cost=2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=some.lists(BLOCK, min_size=1, max_size=8), settled=some.none() | some.integers(0, 40))
def test_any_archive_has_the_holes_that_its_sequences_leave(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, int, set[int]]], settled: int | None
) -> None:
    store = Store(tmp_path_factory.mktemp("holes"))
    for kind, step, numbers in blocks:
        seqs, bucket = sorted(numbers), HOUR + step * 900
        times = [bucket * 1_000_000 + seq for seq in seqs]
        errors = [("decode", "x")] * len(seqs) if kind == "q" else None
        store.put(seqs, kind, bucket=bucket, times=times, errors=errors)
    if settled is not None:
        store.mark(settled, datetime(2026, 5, 1, tzinfo=UTC))
    facts = store.facts()
    (life,) = facts.incarnations
    stored = set().union(*(numbers for _, _, numbers in blocks))
    absent = [seq for seq in range(min(stored), max(stored) + 1) if seq not in stored]
    beyond = [seq for seq in absent if settled is not None and seq > settled]
    found = [(seq, hole.open) for hole in life.largest for seq in range(hole.first, hole.last + 1)]
    assert found == [(seq, seq in beyond) for seq in absent]
    assert (life.first, life.last) == (min(stored), max(stored))
    assert (life.present, life.missing, life.open_missing) == (len(stored), len(absent), len(beyond))
    assert (life.holes, life.open_holes) == (len(life.largest), sum(hole.open for hole in life.largest))
    assert cells(life) == (1, [float(seq in stored) for seq in range(life.first, life.last + 1)])
    # the stream was rewound: a sequence has a message in each bucket
    messages = {(step, seq) for _, step, numbers in blocks for seq in numbers}
    assert facts.messages([*facts.objects, *facts.quarantine]) == len(messages)
    assert life.forked == sum(len({step for step, other in messages if other == seq}) > 1 for seq in stored)


def test_only_the_largest_holes_are_listed_and_the_others_counted(store: Store) -> None:
    store.put([seq for seq in range(1, 500) if seq % 3 and not 100 <= seq <= 120])
    report, (life,) = store.page(), store.facts().incarnations
    table = report.table("coverage", f"The {MAX_HOLES} largest")
    assert len(table) == MAX_HOLES
    assert ("99", "120", "22") in [(row["first missing"], row["last missing"], row["sequences"]) for row in table]
    listed = sum(int(row["sequences"]) for row in table)
    text = report.section("coverage").text
    assert f"{life.holes - MAX_HOLES} more holes with {life.missing - listed} sequences together" in text


def test_a_hole_lies_between_messages_whose_times_footers_tell(store: Store) -> None:
    store.put([1, 2, 5], "a", times=[HOUR * 1_000_000 + n for n in (10, 20, 50)])
    store.put([3], "b", times=[HOUR * 1_000_000 + 30])
    (hole,) = store.facts().incarnations[0].largest
    assert (hole.first, hole.after, hole.before) == (4, HOUR * 1_000_000 + 30, HOUR * 1_000_000 + 50)


def test_what_cannot_be_read_is_told_and_neither_counted_nor_hides_what_can(store: Store) -> None:
    store.put([1], errors=[("decode", "bad")])
    store.put([2, 3], bucket=HOUR + 900, errors=[("key", "none")] * 2).write_bytes(b"half an object")
    store.put([4, 6], "b")
    store.put([5]).write_bytes(b"half an object")
    report, facts = store.page(), store.facts()
    assert (facts.unread, [(reason.error, reason.messages) for reason in facts.reasons]) == (2, [("bad", 1)])
    assert (report.tiles["Messages"], missing(facts.incarnations[0])) == ("2", [(2, 3), (5, 5)])
    assert report.findings[0].startswith("Action needed 2 objects could not be read, and their messages count as n")


def test_an_archive_whose_objects_are_all_damaged_is_not_called_missing(store: Store) -> None:
    store.put([1], "a").write_bytes(b"half an object")
    with pytest.raises(JetcaptureError, match=r"no object of stream ORDERS under .* can be read; jetcapture verif"):
        store.facts()


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'--></style></table></section><h1>owned</h1>",
    "http://evil.example/x.js",
    "\u202egnp.exe\x1b[31m\x00",
    "a&amp;b&lt;i&gt;",
    "x" * 400,
)


def test_what_is_stored_cannot_break_out_of_the_text(tmp_path: Path) -> None:
    stream = "ORDERS <b onclick=x> $(rm -r)"
    store = Store(tmp_path / "archive")
    for number, text in enumerate(HOSTILE):
        store.put([2 * number + 1], text[:200], stream=stream, sealed_by=text)
        store.put([2 * number + 2], errors=[(text, text)], subject=text, stream=stream)
    facts = collect(ArchiveFiles(str(store.root), {}), stream, Scope(selection=Selection(keys=[*HOSTILE])))
    report = Page.of(page(facts))
    allowed = "html head meta title style body header p h1 dl dt dd code nav a main section div h2 ul li b span i"
    allowed += " svg desc g rect line table caption thead tbody tr th td h3 pre strong footer"
    assert {each.name for each in report.elements} <= {"", *allowed.split()}
    names = {name for each in report.elements for name in each.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "action", "data", "xlink:href")]
    text = report.root.text
    assert report.root.one("h1").text == stream
    for shown in HOSTILE[:3]:
        assert shown in text
    assert "\ufffdgnp.exe\ufffd[31m\ufffd" in text
    assert not set("\u202e\x1b\x00") & set(text)
    assert "x" * 241 not in text
    commands = [each.text for each in report.root.all("pre")]
    assert all("'ORDERS <b onclick=x> $(rm -r)'" in command for command in commands)
    assert commands


def test_many_keys_and_objects_make_a_page_of_bounded_size_that_needs_nothing_else(store: Store) -> None:
    for number in range(300):
        store.put([number * 2 + 1], f"customer-{number:03}", bucket=HOUR + 900 * number)
    html = page(store.facts())
    report = Page.of(html)
    assert len(html) < 300_000
    assert len(report.table("volume", "The 20 keys")) == 20
    assert "280 more keys with 280 messages" in report.section("volume").text
    assert len(report.section("volume").all("g")) <= 2 * 73
    assert not re.search(r"https?://|@import|url\(|<script|<link|<img|<iframe", html)
    targets = {f"#{each.attributes.get('id')}" for each in report.elements}
    assert all(each.attributes["href"] in targets for each in report.root.all("a"))
    policy = [each.attributes.get("content") for each in report.root.all("meta")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    for picture in report.root.all("svg"):
        assert picture.attributes["role"] == "img"
        assert [child.name for child in picture.children if not isinstance(child, str)][:2] == ["title", "desc"]
    assert all(table.one("caption").text for table in report.root.all("table"))


def test_a_failure_is_one_line_and_leaves_the_page_of_before(orders: Store, tmp_path: Path) -> None:
    lay_out(tmp_path / "bundles", {(1, HOUR * 1_000_000): "us"}, 4)
    output = tmp_path / "report.html"
    output.write_text("before")
    for name, arguments, message in (
        ("archive", ["NOTHING"], "no archive of stream NOTHING"),
        ("archive", ["ORDERS", "--complete-only"], "no watermark for stream ORDERS, which --complete-only needs"),
        ("bundles", ["ORDERS", "--key", "us"], "has bundles, whose objects hold many keys"),
        ("archive", ["ORDERS", "--output", "/none/report.html"], "/none/report.html"),
    ):
        done = CliRunner().invoke(app, ["report", str(tmp_path / name), "-o", str(output), *arguments])
        assert isinstance(done.exception, JetcaptureError)
        assert message in str(done.exception)
        assert output.read_text() == "before"


def test_object_storage_is_read_with_the_captures_options_and_keeps_its_secrets(orders: Store, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    with s3.serve() as endpoint:
        url = s3.upload(endpoint, orders.root)
        done = CliRunner().invoke(app, ["report", url, STREAM, *s3.arguments(endpoint), "-o", str(output)])
    report = Page.of(output.read_text())
    assert (done.exit_code, done.stdout) == (0, f"{output}: {report.verdict}\n")
    assert [report.tiles[name] for name in ("Messages", "In quarantine", "Stored twice")] == ["86", "3", "5"]
    assert url in report.root.one("header").text
    assert s3.CREDENTIALS["secret"] not in output.read_text() + done.output
