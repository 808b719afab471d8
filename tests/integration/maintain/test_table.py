"""The Iceberg table of an archive, as engines that know nothing of jetcapture read it."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError
from pyiceberg.table import Table
from pyiceberg.table.update import snapshot

from jetcapture_py import read_archive, retry
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.config.captures import CaptureFiles
from jetcapture_py.config.maintain import TableConfig
from jetcapture_py.config.model import Config, StoreConfig, parse
from jetcapture_py.config.section import validated
from jetcapture_py.errors import ConfigError
from jetcapture_py.maintain import command, passes, schedule
from jetcapture_py.maintain.compact import Compaction
from jetcapture_py.maintain.passes import Pass
from jetcapture_py.monitoring.facts import MaintenanceState
from jetcapture_py.monitoring.http import MaintenanceSite
from jetcapture_py.table import commit as table_commit
from jetcapture_py.table import writer
from jetcapture_py.table.catalog import file_properties
from jetcapture_py.table.commit import TableResult
from jetcapture_py.verify.findings import Severity
from tests.support import iceberg_rest
from tests.support.archives import HOUR, Archive, write_parquet
from tests.support.commands import jetcapture
from tests.support.documents import blocks
from tests.support.erasing import bury
from tests.support.iceberg_engines import DuckdbIceberg, SparkIceberg
from tests.support.maintaining import Maintenance, compare_tables
from tests.support.s3 import CREDENTIALS, names, serve, upload

pytestmark = pytest.mark.usefixtures("without_plugin")
KEYS = ("eu", "007", "a/b ü%", None)
COMPACT = {"after": "0s", "grace": "0s", "target": "1MiB"}
Counts = dict[tuple[str | None, int], tuple[int, int]]
"""Messages, and the sum of their sequences, by key and hour."""


class World:
    """An archive that a test fills, and its table in a catalog."""

    def __init__(self, root: Path, compact: dict[str, str] | None = COMPACT) -> None:
        self.root = root / "archive"
        self.root.mkdir(exist_ok=True)
        self.catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db"}
        self.store: dict[str, Any] = {"url": str(self.root)}
        self.stream, self.time, self.compact, self.keep, self.tabulated = "ORDERS", "timestamp", compact, "", True
        self.passes = Maintenance(self.config)

    @property
    def config(self) -> Config:
        table = {"name": "nats.orders", "catalog": self.catalog, "quarantine": "nats.dead"}
        maintain = {"compact": self.compact, "keep": self.keep or None, "table": table if self.tabulated else None}
        source = {"stream": self.stream, "consumer": "archive"}
        return parse({"source": source, "store": self.store, "block": {"time": self.time}, "maintain": maintain})

    def change(self, **settings: Any) -> None:
        """Change settings for the passes that follow, which know nothing of those before."""
        vars(self).update(settings)
        self.passes = Maintenance(self.config)

    def write(
        self, seqs: list[int], key: str | None = "eu", *, hour: int = 0, bundles: int = 0, **more: Any
    ) -> ObjectName:
        """Store an object; what is no argument of `Archive.write` is a column."""
        if (times := more.pop("times", None)) is not None:
            more[layout.TIME] = pa.array(times, pa.timestamp("us", "UTC"))
        options = {name: more.pop(name) for name in ("interval", "quarantine") if name in more}
        options = {"interval": 900, "consumer": "archive", "columns": more, **options}
        return Archive(self.root, bundles).write(seqs, key, bucket=HOUR + 3600 * hour, **options)

    def maintain(self) -> Pass:
        return self.passes.run()

    def write_config(self, path: Path, catalog: dict[str, str]) -> Path:
        """Write a configuration with a table, as the command reads it; its path."""
        sections = {"store": {"url": str(self.root)}, "source": {"stream": "ORDERS", "consumer": path.stem}}
        table = {"name": "nats.orders", "catalog": catalog, "quarantine": "nats.dead"}
        path.write_text(json.dumps({**sections, "maintain": {"compact": COMPACT, "table": table}}))
        return path

    def commit(self, *, stuck: bool = False) -> TableResult:
        """Make a pass without an error, or with that of objects which cannot join; what it did to the table."""
        result = self.maintain()
        table = result.tables["messages"]
        assert result.errors == ([table.error] if stuck else [])
        return table

    def load(self, name: str = "nats.orders") -> Table:
        with load_catalog("jetcapture", **self.catalog) as catalog:
            return catalog.load_table(name)


def counted(rows: pa.Table) -> Counts:
    hours = pc.divide(rows[layout.TIMESTAMP].cast(pa.timestamp("us", "UTC")).cast(pa.int64()), 3_600_000_000)
    table = pa.table({"key": rows[layout.KEY].cast(pa.string()), "hour": hours, "seq": rows[layout.SEQ]})
    groups = table.group_by(["key", "hour"]).aggregate([("seq", "count"), ("seq", "sum")]).to_pylist()
    return {(row["key"], row["hour"]): (row["seq_count"], row["seq_sum"]) for row in groups}


COLUMNS = (layout.KEY, layout.TIMESTAMP, layout.SEQ)


def truth(world: World) -> Counts:
    return counted(read_archive(str(world.root), "ORDERS", columns=list(COLUMNS)).read_all())


def by_pyiceberg(table: Table) -> Counts:
    return counted(table.scan(selected_fields=COLUMNS).to_arrow())


def by_polars(table: Table) -> Counts:
    return counted(pl.scan_iceberg(table).select(COLUMNS).collect().to_arrow())


@pytest.fixture
def without_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Polars plan with PyIceberg and not warn about it."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")


@pytest.mark.exhaustive
def test_every_engine_reads_each_message_once_in_every_layout_and_every_type(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number, key in enumerate((*KEYS, "bundled", "too")):
        for hour in (0, 1) if key in KEYS else ():
            first = 1000 * number + 100 * hour
            world.write([first + 1, first + 3], key, hour=hour)
            world.write([first + 2, first + 3, first + 4], key, hour=hour)  # a copy
        world.write([6000 + number], key, hour=2, bundles=16)
        world.write([6500 + number], key, hour=24, bundles=4, interval=86400)
    world.write([7000], "long", hour=48, interval=2700)
    world.write([8001], hour=3, amount=[1], at=[{"x": 1}])
    world.write([8002], hour=4, amount=["two"], at=[{"x": 2.5, "y": "new"}])
    expected, result, table = truth(world), world.commit(), world.load()
    assert (result.unsettled, result.rows) == (0, sum(count for count, _ in expected.values()))
    hour = "_nats_timestamp >= '2026-05-01T13:00:00+00:00' and _nats_timestamp < '2026-05-01T14:00:00+00:00'"
    (task,) = table.scan(row_filter=f"key = 'eu' and {hour}").plan_files()  # nothing else is opened
    assert "key=eu" in task.file.file_path
    assert {task.file.partition[0] for task in table.scan().plan_files()} == {20574, 20575, 20576}
    sums = f"count(*), CAST(sum({layout.SEQ}) AS BIGINT)"
    select = f"SELECT key, {{hour}}, {sums} FROM {{table}} WHERE {{where}} GROUP BY 1, 2"
    version = f"jetcapture.nats.orders VERSION AS OF {table.metadata.current_snapshot_id}"
    spark_hour = f"unix_micros({layout.TIMESTAMP}) div 3600000000"
    with closing(DuckdbIceberg()) as duckdb, closing(SparkIceberg(tmp_path / "catalog.db")) as spark:
        for key in ("*", *KEYS, "bundled", "too", "long"):
            own = {group: value for group, value in expected.items() if key in (group[0], "*")}
            where = "true" if key == "*" else "key IS NULL" if key is None else f"key = '{key}'"
            scan, lazy = table.scan(), pl.scan_iceberg(table)
            if key != "*":
                scan = table.scan(row_filter=where)
                lazy = lazy.filter(pl.col("key").is_null() if key is None else pl.col("key") == key)
            by_name = select.format(hour=f"epoch({layout.TIMESTAMP})::BIGINT // 3600", table="{table}", where=where)
            answers = {
                "pyiceberg": counted(scan.to_arrow().select(COLUMNS)),
                "polars": counted(lazy.select(COLUMNS).collect().to_arrow()),
                "duckdb": grouped(duckdb.rows(by_name, table.metadata_location)),
                "spark": grouped(spark.ask(select.format(hour=spark_hour, table=version, where=where))),
            }
            assert answers == dict.fromkeys(answers, own), key
        names = "amount, amount_string, at.x, at.x_double, at.y"
        sql = f"SELECT {names} FROM jetcapture.nats.orders WHERE {layout.SEQ} > 8000 ORDER BY {layout.SEQ}"
        assert spark.ask(sql) == [[1, None, 1, None, None], [None, "two", None, 2.5, "new"]]


def grouped(rows: list[list[Any]]) -> Counts:
    return {(key, int(hour)): (count, int(total)) for key, hour, count, total in rows}


def values(table: Table, *names: str) -> list[tuple[Any, ...]]:
    rows = table.scan(selected_fields=(layout.SEQ, *names)).to_arrow().sort_by(layout.SEQ)
    return list(zip(*(rows[name].to_pylist() for name in names), strict=True))


def test_a_type_that_differs_is_another_column_and_no_value_is_lost_or_null(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1], hour=0, amount=[1], at=[{"x": 1}], tags=[["a"]], small=pa.array([7], pa.int8()))
    world.write([2], hour=1, amount=["two"], at=[{"x": 2.5, "y": "new"}], tags=[[2]], price=[Decimal("12345.25")])
    world.write([3], hour=2, Amount=[3.5], at=["text"], tags=[["c"]], price=[Decimal("1.5")], small=[2**40])
    world.write([4], hour=3, big=pa.array([2**63], pa.uint64()), at=[{"x": 4}], half=pa.array([2**32 - 1], pa.uint32()))
    result = world.commit()
    assert result.left_out == {"big": "uint64"}
    assert result.renamed == [
        "Amount_double", "amount_string", "at.x_double", "at_string", "price_decimal_1", "tags_list_long"
    ]  # fmt: skip
    table = world.load()
    amounts = [(1, None, None), (None, "two", None), (None, None, 3.5), (None, None, None)]
    assert values(table, "amount", "amount_string", "Amount_double") == amounts
    assert values(table, "tags", "tags_list_long") == [(["a"], None), (None, [2]), (["c"], None), (None, None)]
    assert values(table, "small", "half") == [(7, None), (None, None), (2**40, None), (None, 2**32 - 1)]
    prices = [(None, None), (Decimal("12345.25"), None), (None, Decimal("1.5")), (None, None)]
    assert values(table, "price", "price_decimal_1") == prices
    assert values(table, "at_string") == [(None,), (None,), ("text",), (None,)]
    assert [row[0] and {k: v for k, v in row[0].items() if v is not None} for row in values(table, "at")] == [
        {"x": 1}, {"x_double": 2.5, "y": "new"}, None, {"x": 4}
    ]  # fmt: skip
    assert world.commit().snapshot == result.snapshot, "nothing is new"
    untyped = world.write([9], hour=9, amount=pa.nulls(1), tags=pa.array([[]], pa.list_(pa.null())))
    world.commit()
    names = ["amount", "amount_string", "tags", "tags_list_long"]
    rows = pl.scan_iceberg(world.load()).filter(pl.col(layout.SEQ) == 9).select(names)  # PyIceberg cannot read it
    assert rows.collect().rows() == [(None,) * 4]
    (world.root / untyped.path).unlink()
    world.write([5], hour=4, amount=["five"])
    world.commit()
    assert values(world.load(), "amount", "amount_string")[4] == (None, "five")
    assert world.load().schema().fields == table.schema().fields


def test_a_name_with_dots_and_the_path_of_another_column_are_two_columns(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1], hour=0, **{"log": [{"level": "info", "at": 1}], "log.level": ["warn"]})
    world.write([2], hour=1, **{"tags.element": [1], "m.value": [2]})
    world.write([3], hour=2, tags=[["x"]], m=pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())))
    world.write([4], hour=3, **{"Log.At": [5], "_file": ["of Iceberg"]})
    result = world.commit()
    assert result.renamed == [
        "Log.At_long", "_file_string", "log.level_string", "m_map_string_long", "tags_list_string"
    ]  # fmt: skip
    names = ["log", "log.level_string", "tags.element", "tags_list_string", "m.value", "Log.At_long"]
    assert pl.scan_iceberg(world.load()).sort(layout.SEQ).select(names).collect().rows() == [
        ({"level": "info", "at": 1}, "warn", None, None, None, None),
        (None, None, 1, None, 2, None),
        (None, None, None, ["x"], None, None),
        (None, None, None, None, None, 5),
    ]


def test_the_page_on_tables_reads_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    world.write([1, 2], "eu", hour=0)
    world.write([3], "us", hour=0)
    world.commit()
    (block,) = blocks("docs/table.md", "python")
    exec(block.text.replace("sqlite:////var/lib/jetcapture/catalog.db", world.catalog["uri"]), {})
    printed = capsys.readouterr().out
    assert "_nats_seq: [[1,2]]" in printed
    assert re.search(r"eu +┆ 2 ", printed)


def test_only_complete_buckets_are_in_the_table_and_a_late_copy_never_counts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1, 2], hour=0)
    world.write([3], hour=1)
    mark(world, HOUR + 3600 + 600)
    assert world.commit().rows == 2
    mark(world, HOUR + 3600 + 900)
    first = world.commit()
    assert (first.rows, first.complete_to) == (3, datetime.fromtimestamp(HOUR + 3600 + 900, UTC))
    world.write([2, 4], hour=0)  # message 2 was delivered again, with one that came late
    assert world.load().scan().count() == 3
    after = world.commit()
    assert (after.rows, after.added, after.removed) == (4, 1, 1)
    assert by_pyiceberg(world.load()) == truth(world)
    summary = world.load().current_snapshot().summary
    assert summary["jetcapture.watermark-seq"] == "99"
    assert summary["total-records"] == "4"


def test_an_object_that_no_pass_can_add_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1, 2])
    world.write([11, 12], hour=2, amount=[1, 2])
    world.write([12, 13], hour=2, amount=["1", "2"])
    drift = "it may share messages with 1 other object whose column types differ, which compaction cannot merge"
    drifted = world.commit(stuck=True)
    assert drifted.error.startswith("table nats.orders cannot have 2 objects, such as ORDERS/key=eu/")
    assert drifted.error.endswith(drift)
    assert drifted.complete_to == datetime.fromtimestamp(HOUR + 2 * 3600, UTC)
    world.write([21, 23], hour=3)
    world.write([22, 23], hour=3, bundles=4)
    layouts = "it may share messages with 1 other object, not all in the same number of bundles"
    bare = world.root / world.write([31], hour=4).path
    table = pq.ParquetFile(bare).read()
    without_ids = pa.schema([pa.field(field.name, field.type) for field in table.schema], table.schema.metadata)
    write_parquet(pa.Table.from_arrays(table.columns, schema=without_ids), bare)
    damaged = world.root / world.write([41], "us", hour=1).path
    damaged.write_bytes(damaged.read_bytes()[:100])
    world.write([42], hour=1)
    text = world.root / world.write([51, 52], hour=5).path
    text.rename(text.with_suffix(".ndjson.gz"))
    result = world.commit(stuck=True)
    reasons = sorted(problem.partition(": ")[2] for problem in result.problems)
    starts = ("cannot read", "it is not Parquet", *[drift] * 2, *[layouts] * 2, "its columns have no field ids")
    assert [reason.startswith(start) for reason, start in zip(reasons, starts, strict=True)] == [True] * 7, reasons
    assert (result.rows, result.unsettled) == (3, 7)
    assert result.complete_to == datetime.fromtimestamp(HOUR + 3600, UTC)


def test_an_object_that_was_stored_again_is_read_with_its_new_columns_also_without_a_single_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FILES", 1)  # a manifest for each file
    world = World(tmp_path, compact=None)  # overlapping objects wait
    world.change(time="header.At")
    day = HOUR * 1_000_000

    def first(**columns: Any) -> ObjectName:
        return world.write([1, 2], hour=0, times=[day, None], **columns)

    def second(**columns: Any) -> ObjectName:
        return world.write([5, 6], hour=1, times=[day, day], **columns)

    names = first(), second()
    world.write([3, 4], hour=2, times=[day, day])
    world.commit()
    for condition, seqs in ((f"{layout.TIME} IS NULL", [2]), (f"{layout.TIME} IS NOT NULL", [1, 3, 4, 5, 6])):
        assert sorted(world.load().scan(row_filter=condition).to_arrow()[layout.SEQ].to_pylist()) == seqs
    world.write([6, 7], hour=1, times=[day, day])
    assert world.commit().unsettled == 1
    assert (first(note=["a" * 300, "b" * 200]), second(note=["c" * 300, "d" * 200])) == names
    result = world.commit()
    assert (result.rows, result.added, result.removed, result.unsettled) == (6, 2, 2, 1)
    assert by_pyiceberg(world.load()) == by_polars(world.load())
    assert [note and note[0] for (note,) in values(world.load(), "note")] == ["a", "b", None, None, "c", "d"]
    assert world.commit().snapshot == result.snapshot


def mark(world: World, time: int) -> None:
    moment = datetime.fromtimestamp(time, UTC)
    written = ConsumerWatermark(
        stream="ORDERS", consumer="archive", created="2024-01-01T00:00:00Z", seq=99, time=moment
    )
    path = world.root / "_watermark" / "ORDERS" / "archive.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written.encode())


def test_without_compaction_overlapping_objects_are_in_the_table_only_if_they_share_no_message(tmp_path: Path) -> None:
    world = World(tmp_path, compact=None)
    world.write([1, 3, 5], hour=0)
    world.write([2, 4, 6], hour=0)  # two replicas
    world.write([11, 12, 13], hour=1)
    world.write([12], hour=1)  # a copy of a part
    world.write([21, 22], hour=2)
    result = world.commit()
    assert (result.rows, result.unsettled) == (11, 0)
    world.write([22, 23], hour=2)
    result = world.commit()
    assert (result.rows, result.unsettled, result.added) == (11, 1, 0), "the table keeps what it had"
    assert "may share messages" in result.problems[0]
    assert result.complete_to == datetime.fromtimestamp(HOUR + 2 * 3600, UTC)
    world.change(compact=COMPACT)
    assert world.commit().rows == 12


class KilledError(BaseException):
    """Ends a pass as a kill does: nothing is cleaned up."""


def test_a_pass_that_is_killed_anywhere_leaves_a_table_that_is_right_and_another_goes_on(tmp_path: Path) -> None:
    steps = [
        (writer._Snapshot, "new_manifest_writer"),
        (snapshot, "write_manifest_list"),
        (Table, "_do_commit"),
        (writer, "delete_manifests"),
        (Compaction, "remove"),
    ]
    for number, (owner, name) in enumerate(steps):
        for after in (False, True):
            directory = tmp_path / f"{name} {after}"
            directory.mkdir()
            check_kill(directory, owner, name, after=after, committed=number > 2 or (number == 2 and after))


def check_kill(directory: Path, owner: Any, name: str, *, after: bool, committed: bool) -> None:
    """Kill a pass before or after it calls a function, and let another one follow."""
    world = World(directory)
    world.write([1, 2], hour=0)
    world.commit()
    before = by_pyiceberg(world.load())
    world.write([2, 3], hour=0)
    world.write([4], hour=1)
    full, original = truth(world), getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> Any:
        if after:
            original(*arguments, **options)
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KilledError):
            world.maintain()
    assert by_pyiceberg(world.load()) == (full if committed else before), (name, after)
    assert truth(world) == full
    world.change()
    world.commit()
    assert by_pyiceberg(world.load()) == truth(world) == full
    present = {f"file://{path}" for path in world.root.glob("ORDERS/**/*.parquet")}
    assert {task.file.file_path for task in world.load().scan().plan_files()} == present


def test_of_two_that_commit_at_once_the_second_plans_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.write([1], hour=0)
    world.commit()
    world.write([2], hour=0)
    swap, others = Table._do_commit, [World.commit]

    def beaten(table: Table, **arguments: Any) -> None:
        if others:
            others.pop()
            world.write([3], hour=0)
            other = World(tmp_path)
            other.commit()
            assert by_pyiceberg(world.load()) == truth(world)
        swap(table, **arguments)

    monkeypatch.setattr(Table, "_do_commit", beaten)
    world.commit()
    assert by_pyiceberg(world.load()) == truth(world) == {("eu", HOUR // 3600): (3, 6)}
    written = {f"file://{path}" for path in (world.root / "_table").glob("**/*.avro")}
    table = world.load()
    named = {each.manifest_list for each in table.snapshots()}
    named |= {part.manifest_path for each in table.snapshots() for part in each.manifests(table.io)}
    assert written == named, "what was written for a commit that was refused is deleted"


def test_without_its_catalog_a_pass_removes_no_object(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1, 2], hour=0)
    world.commit()
    before = by_pyiceberg(world.load())
    world.write([2, 3], hour=0)
    catalog = tmp_path / "catalog.db"
    catalog.rename(tmp_path / "away")
    catalog.mkdir()
    assert "catalog" in world.maintain().errors[0]
    catalog.rmdir()
    (tmp_path / "away").rename(catalog)
    assert by_pyiceberg(world.load()) == before
    world.commit()
    assert by_pyiceberg(world.load()) == truth(world) == {("eu", HOUR // 3600): (3, 6)}


def test_what_a_table_dropped_stays_for_queries_for_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_commit, "SNAPSHOT_AGE", timedelta())  # a grace period can be longer
    world = World(tmp_path, compact=None)
    for seq in (1, 2, 3):
        world.write([seq], hour=0)
    assert world.commit().files == 3
    world.change(compact={**COMPACT, "grace": "1h"}, tabulated=False)
    assert world.maintain().waiting == 3
    for path in world.root.glob("ORDERS/**/*.parquet"):
        os.utime(path, (HOUR, HOUR))  # the compaction was hours ago, but the table did not know of it
    world.change(tabulated=True)
    for number in range(3):  # only the first one committed it
        world.write([number + 4], hour=number + 1)
        world.change()
        result = world.maintain()
        assert (result.waiting, result.removed) == (3, 0), number
    assert by_pyiceberg(world.load()) == truth(world)


def compacted(world: World, *, incomplete: bool = False) -> Pass:
    """A pass of `jetcapture compact` with the world's settings."""
    request = command.CompactRequest(incomplete=incomplete).of(world.config)
    return Maintenance(world.config, compact=request).run()


def test_a_commit_that_names_what_was_removed_meanwhile_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    for seq in (1, 2):
        world.write([seq], hour=0)
    mark(world, HOUR + 900)
    commit, others = writer.TableWriter.commit, [compacted]

    def beaten(table: Any, *arguments: Any, **options: Any) -> Any:
        for other in [others.pop()] if others else ():
            mark(world, HOUR + 600)  # the other one read it before it moved: it has nothing to commit
            assert other(world, incomplete=True).removed == 2
            mark(world, HOUR + 900)
        return commit(table, *arguments, **options)

    monkeypatch.setattr(writer.TableWriter, "commit", beaten)
    plain = World(tmp_path, compact=None)
    assert plain.commit().rows == 2
    assert by_pyiceberg(world.load()) == truth(world) == {("eu", HOUR // 3600): (2, 3)}


def test_what_another_pass_has_put_back_into_the_table_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    for seq in (1, 2):
        world.write([seq], hour=0)
    World(tmp_path, compact=None).commit()
    before = (tmp_path / "catalog.db").read_bytes()

    def named(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "catalog.db").write_bytes(before)
        return table_commit.named_paths(*arguments, **options)

    monkeypatch.setattr(passes, "named_paths", named)
    result = compacted(world)
    assert (result.waiting, result.removed) == (2, 0)
    assert by_pyiceberg(world.load()) == truth(world)


def test_what_is_decoded_again_leaves_the_quarantines_table_before_the_archive(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1], hour=0)
    reasons = {"stage": ["decode"] * 2, "error": ["not JSON", "late"], "raw_headers": pa.nulls(2, pa.binary())}
    world.write([2, 3], None, hour=0, quarantine=True, **reasons)
    assert {part: table.rows for part, table in world.maintain().tables.items()} == {"messages": 1, "quarantine": 2}
    config = world.write_config(tmp_path / "archive.yaml", world.catalog)
    for reason, remaining in (("late", [("not JSON",)]), ("not JSON", [])):
        done = jetcapture("quarantine", "redecode", config, "--reason", f"decode: {reason}")
        assert done.returncode == 0, done.stderr
        assert values(world.load("nats.dead"), "error") == remaining


GOOGLE = {"url": "gs://box", "driver": "obstore", "options": {"bearer_token": "t"}}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "orders"}, {}, "a namespace and a name, such as nats.orders"),
    ({"name": "nats.dead", "quarantine": "nats.dead"}, {}, "must differ from name"),
    ({"name": "nats.Snapshots"}, {}, "that of a metadata table of Iceberg"),
    ({}, {"source": {"stream": "refs", "consumer": "c"}}, "another name than that of a metadata table of Iceberg"),
    ({}, {"store": {"url": "/archive/{key}"}}, r"maintain\.table: not with \{key\} in store\.url"),
    ({}, {"block": {"format": "csv"}}, r"maintain\.table: not with block\.format csv: a table requires Parquet"),
    ({}, {"store": GOOGLE}, r"maintain\.table\.catalog: PyIceberg does not know store\.options of gs://"),
]


def test_a_table_that_cannot_be_kept_is_refused_with_the_configuration() -> None:
    for table, sections, reason in REFUSED:
        base = {"source": {"stream": "S", "consumer": "c"}, "store": {"url": "/archive"}, "decode": {"format": "json"}}
        with pytest.raises(ConfigError, match=reason):
            parse({**base, "maintain": {"table": {"name": "nats.{stream}", "catalog": {}, **table}}, **sections})
    parse({**base, "store": GOOGLE, "maintain": {"table": {"name": "a.b", "catalog": {"gcs.oauth2.token": "t"}}}})
    assert "hunter2" not in repr(validated(TableConfig, {"name": "a.b", "catalog": {"token": "hunter2"}}))


def test_a_table_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1, 2], hour=0)
    world.commit()
    other = World(tmp_path)
    (other.root / "ORDERS").rename(other.root / "EVENTS")
    other.change(stream="EVENTS")
    assert other.maintain().errors == ["table nats.orders is of stream ORDERS: it is left as it is; use another name"]
    other.change(stream="ORDERS")
    mark(other, HOUR + 900)  # a capture has begun, and its objects are away
    (error,) = other.maintain().errors
    assert "has no objects of stream ORDERS, but table nats.orders does" in error
    bury(other.root, [{layout.SEQ: 1, layout.TIMESTAMP: datetime.fromtimestamp(HOUR, UTC)}])  # the object had two
    assert other.maintain().errors == [error]
    (other.root / "EVENTS").rename(other.root / "ORDERS")
    other.root = tmp_path / "other"
    other.root.mkdir()
    other.change(store={"url": str(other.root)})
    other.write([7], hour=1)
    (error,) = other.maintain().errors
    assert f"table nats.orders is of another archive than file://{other.root}" in error
    assert by_pyiceberg(world.load()) == truth(world)
    with world.load().update_spec() as spec:
        spec.add_identity(layout.KEY)
    (error,) = world.maintain().errors
    assert error.startswith("table nats.orders is partitioned by _nats_timestamp_day, key, and not by day: ")


def test_a_dry_run_makes_no_catalog_and_tells_what_would_join_as_the_archive_is(tmp_path: Path) -> None:
    world, catalog = World(tmp_path), tmp_path / "catalog.db"

    def planned() -> TableResult:
        result = Maintenance(world.config, dry_run=True).run()
        assert result.errors == []
        return result.tables["messages"]

    for seq in (1, 2):
        world.write([seq], hour=0)
    assert planned().rows == 2
    assert (len(compare_tables(world.config)), catalog.exists()) == (1, False)
    catalog.touch()
    assert (planned().rows, catalog.read_bytes()) == (2, b"")
    world.commit()
    for seq in (7, 8):
        world.write([seq], hour=1)
    told = planned()
    assert (told.files, told.rows, told.added, told.removed) == (3, 4, 2, 0)


def test_a_catalog_that_another_process_has_locked_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.write([1], hour=0)
    world.commit()
    world.write([2], hour=1)
    world.change(catalog={**world.catalog, "uri": f"{world.catalog['uri']}?timeout=0.01"})
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        waits: list[float] = []
        monkeypatch.setattr(retry, "CONFLICT_ATTEMPTS", 2)
        monkeypatch.setattr(retry.time, "sleep", waits.append)
        assert world.maintain().errors == ["cannot commit to table nats.orders: OperationalError: database is locked"]
        monkeypatch.setattr(retry.time, "sleep", lambda _: other.rollback())
        assert world.commit().rows == 2
    assert waits


def test_old_snapshots_and_their_manifests_go_and_no_object_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_commit, "SNAPSHOT_AGE", timedelta())
    monkeypatch.setitem(writer._PROPERTIES, "commit.manifest.min-count-to-merge", "3")
    world, tables = World(tmp_path), []
    for hour in range(6):
        world.write([hour + 1], hour=hour)
        world.commit()
        tables.append(world.load())
    *_, replaced, table = tables
    assert len(by_pyiceberg(replaced)) == 5, "a query may have been planned right before the last commit"
    assert len(table.snapshots()) <= 2
    assert len(table.current_snapshot().manifests(table.io)) <= 4
    assert len(list((world.root / "_table").glob("**/*.avro"))) <= 8
    assert by_pyiceberg(table) == truth(world)
    assert len(truth(world)) == 6


def test_the_command_prints_what_it_did_to_tables_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.write([1, 2], hour=0, big=pa.array([1, 2], pa.uint64()))

    def maintain(catalog: dict[str, str], *, as_json: bool = False) -> tuple[int, str]:
        files = CaptureFiles([world.write_config(tmp_path / "orders.yaml", catalog)])
        code = command.maintain(files, as_json=as_json)
        return code, "".join(capsys.readouterr())

    code, text = maintain(world.catalog)
    assert code == 0
    assert "table nats.orders: 1 file, 2 rows (+1 -0), complete to 20" in text
    assert "types that Iceberg does not have are left out: big (uint64)" in text
    table = json.loads(maintain(world.catalog, as_json=True)[1])["tables"]["messages"]
    assert (table["files"], table["rows"], table["added"]) == (1, 2, 0)
    code, text = maintain({"type": "sql", "uri": "postgresql+nothing://user:hunter2@host/db"})
    assert (code, "cannot open the table's catalog" in text, "hunter2" in text) == (1, True, False)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    code, text = maintain(world.catalog)
    assert (code, "pip install 'jetcapture[table]'" in text) == (1, True)


def test_a_service_tells_how_its_tables_are(tmp_path: Path) -> None:
    world = World(tmp_path, compact=None)
    world.write([1], hour=0, v=[1])
    world.write([2, 3], hour=1, v=["x", "y"])
    state = schedule._noted(world.maintain(), MaintenanceState(stream="ORDERS"))
    world.write([3, 4], hour=1, v=["x", "y"])
    site = MaintenanceSite({"orders": schedule._noted(world.maintain(), state)})
    page, metrics, status = (site.answer(path).body.decode() for path in ("/", "/metrics", "/status.json"))
    assert "Iceberg table nats.orders: 2 files, complete to 2026-05-01 13:00, snapshot" in page
    assert "1 objects cannot be in it yet" in page
    labels = '{capture="orders",stream="ORDERS"}'
    for name, value in (("files", "2.0"), ("waiting_objects", "1.0"), ("renamed_columns", "1.0")):
        assert f"jetcapture_maintain_table_{name}{labels} {value}" in metrics
    assert f"jetcapture_maintain_table_complete_to_timestamp_seconds{labels} " in metrics
    (table, _) = json.loads(status)["archives"][0]["tables"]
    assert (table["files"], table["complete_to"]) == (2, HOUR + 3600)


def test_verify_compares_the_table_with_the_archive(tmp_path: Path) -> None:
    world = World(tmp_path, compact=None)
    gone, changed, once = (world.write([seq], hour=hour) for hour, seq in enumerate((1, 2, 3)))
    world.commit()
    assert compare_tables(world.config) == []
    (world.root / gone.path).unlink()
    with (world.root / changed.path).open("ab") as file:
        file.write(b"more")
    merged = world.write([3, 4], hour=2)
    with load_catalog("jetcapture", **world.catalog) as catalog:
        catalog.load_table("nats.orders").add_files([f"file://{world.root / merged.path}"])
    merged_later, new = world.write([5, 6], hour=4), world.write([7], hour=5)
    found = {finding.summary: finding for finding in compare_tables(world.config)}
    assert {summary: [file.path for file in finding.paths] for summary, finding in found.items()} == {
        "table nats.orders has objects that are gone: queries of it fail": [gone.path],
        "table nats.orders has objects whose size has changed": [changed.path],
        "table nats.orders has objects that share messages: queries count them twice": [once.path, merged.path],
        "table nats.orders does not have these objects of complete time slices yet": [merged_later.path, new.path],
        "table nats.orders cannot have these objects": [changed.path],
    }
    assert [finding.severity for finding in found.values()] == [Severity.FAILURE] * 3 + [Severity.WARNING] * 2
    with load_catalog("jetcapture", **world.catalog) as catalog:
        catalog.drop_table("nats.orders")
    world.change(compact=COMPACT)
    world.commit(stuck=True)
    (damaged,) = compare_tables(world.config)
    assert damaged.summary == "table nats.orders cannot have these objects"
    assert [file.path for file in damaged.paths] == [changed.path]


def test_a_table_in_s3_is_kept_with_the_stores_own_options(tmp_path: Path) -> None:
    where = {"endpoint": "http://minio:9000", "region": "here"}
    expected = {"access-key-id": "k", "secret-access-key": "s", **where}
    for given in (
        {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": where["endpoint"], "region_name": "here"}},
        {"AWS_ACCESS_KEY_ID": "k", "secret_access_key": "s", **{f"aws_{name}": text for name, text in where.items()}},
    ):
        properties = file_properties(StoreConfig(url="s3://bucket", options=given))
        assert properties == {f"s3.{name}": text for name, text in expected.items()}
    world = World(tmp_path)
    for key in KEYS:
        world.write([1, 2], key, hour=0)
        world.write([2, 3], key, hour=0)
    with serve() as endpoint:
        url = upload(endpoint, world.root)
        options = {**CREDENTIALS, "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}
        world.change(store={"url": url, "options": options})
        assert world.commit().rows == 3 * len(KEYS)
        read = counted(read_archive(url, "ORDERS", columns=list(COLUMNS), options=options).read_all())
        world.catalog |= file_properties(StoreConfig(url=url, options=options))
        assert by_pyiceberg(world.load()) == read
        kept = [name for name in names(endpoint, url) if "_table" not in name]
        assert len(kept) == len(KEYS), "sources are removed"
        assert all(name.startswith("nats/_table/nats.orders/metadata/") for name in names(endpoint, f"{url}/_table"))


def test_where_a_catalog_refuses_a_location_the_error_names_what_to_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.write([1])

    def refused(*_: object, **__: object) -> Table:
        raise ForbiddenError("Invalid locations '[…]' for identifier 'nats.orders': not in the list of allowed ones")

    monkeypatch.setattr(SqlCatalog, "create_table_transaction", refused)
    (error,) = world.maintain().table_errors
    root = f"file://{world.root}/"
    assert "not in the list of allowed ones" in error
    assert error.endswith(f"; the catalog must allow {root} for the files and {root}_table/ for the metadata")


@pytest.mark.exhaustive
def test_a_rest_catalog_takes_the_same_commits_also_after_a_clock_that_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    (tmp_path / "classes").mkdir()
    with iceberg_rest.serve(tmp_path / "classes") as address:
        world.change(catalog={"type": "rest", "uri": address})
        for key in KEYS:
            world.write([1, 2], key, hour=0, v=[1, 2])
            world.write([2, 3], key, hour=0, v=[2, 3])
            world.write([4], key, hour=1, v=["x"], bundles=16)
        clock = time.time
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: clock() + 600)
            world.commit()
        world.write([5, 6], "eu", hour=0, v=[1.5, 2.5])
        world.write([3, 9], "eu", hour=0, v=[3, 9])
        assert world.commit().removed == 1
        assert by_pyiceberg(world.load()) == by_polars(world.load()) == truth(world)
        assert compare_tables(world.config) == []
