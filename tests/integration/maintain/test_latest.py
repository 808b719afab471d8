"""The Iceberg table of the newest row of each key, after passes over archives that change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

from jetcapture_py.archive import layout
from jetcapture_py.config.model import Config, StoreConfig, parse
from jetcapture_py.maintain.passes import Pass
from jetcapture_py.rewriting.erase import erase
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.table import latest
from tests.support.archives import HOUR, Archive
from tests.support.iceberg_engines import DuckdbIceberg, SparkIceberg
from tests.support.maintaining import Maintenance

Row = tuple[int, int, str, str | None]
"""Sequence, id, operation, note."""


class World:
    """An archive, its table of newest rows, and a model of both."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.chance = root, random.Random(seed)
        self.rows: dict[int, Row] = {}
        self.keep: str | None = None
        self.deleted: str | None = "op = 'd'"
        self.next = 1
        self.missing: list[int] = []
        """Sequences that come late."""
        (root / "archive").mkdir()

    @property
    def config(self) -> Config:
        catalog = {"type": "sql", "uri": f"sqlite:///{self.root}/catalog.db"}
        table = {
            "name": "n.all",
            "catalog": catalog,
            "latest": {"name": "n.now", "by": ["id"], "deleted": self.deleted},
        }
        maintain = {"compact": {"after": "0s", "grace": "0s", "target": "1MiB"}, "table": table, "keep": self.keep}
        source = {"stream": "ORDERS", "consumer": "archive"}
        return parse({"source": source, "store": {"url": str(self.root / "archive")}, "maintain": maintain})

    def write(self, seqs: Iterable[int], *, key: str = "a", text: bool = False) -> None:
        """Store rows, of which every second is late, in one object; their hour is that of their sequence."""
        by_hour: dict[int, list[int]] = {}
        for seq in sorted(seqs):
            by_hour.setdefault(seq // 40, []).append(seq)
        for hour, some in by_hour.items():
            for seq in some:
                operation = self.chance.choice("uuud")
                self.rows.setdefault(seq, (seq, self.chance.randrange(60), operation, self.chance.choice([None, "x"])))
            rows = [self.rows[seq] for seq in some]
            bucket = HOUR + 3600 * hour
            ids = [row[1] for row in rows]
            Archive(self.root / "archive").write(
                some,
                key,
                bucket=bucket,
                interval=3600,
                consumer="archive",
                columns={
                    "id": pa.array(map(str, ids), pa.string()) if text else pa.array(ids, pa.int64()),
                    "op": pa.array([row[2] for row in rows], pa.string()),
                    **({"note": pa.array([row[3] for row in rows], pa.string())} if hour % 2 else {}),
                },
            )

    def publish(self, count: int) -> None:
        """Store new rows, keep some of them for later, and store some that are late."""
        fresh = list(range(self.next, self.next + count))
        self.next += count
        late = set(self.chance.sample(fresh, count // 5))
        self.write(set(fresh) - late)
        some = self.chance.sample(self.missing, len(self.missing) // 2)
        self.missing = [seq for seq in self.missing if seq not in some] + sorted(late)
        for seq in some:
            self.write([seq])
        if self.chance.random() < 0.3:
            self.write(self.chance.sample(sorted(self.rows), 5))  # copies

    def expected(self, *, first: int = 0) -> list[tuple[int, int]]:
        """Each key with the sequence of its newest row."""
        newest = {row[1]: row for _, row in sorted(self.rows.items()) if row[0] >= first}
        return sorted((id_, row[0]) for id_, row in newest.items() if row[2] != "d" or self.deleted is None)

    def maintain(self) -> Pass:
        done = Maintenance(self.config).run()
        assert not done.errors
        return done

    def load(self, name: str = "n.now") -> Any:
        catalog = (self.config.maintain.table.catalog) if self.config.maintain and self.config.maintain.table else {}
        with load_catalog("jetcapture", **catalog) as opened:
            return opened.load_table(name)

    def table(self) -> list[tuple[int, int]]:
        rows = self.load().scan(selected_fields=("id", layout.SEQ)).to_arrow()
        return sorted(zip(rows["id"].to_pylist(), rows[layout.SEQ].to_pylist(), strict=True))


def test_the_table_follows_the_archive(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(8):
        world.publish(20)
        done = world.maintain()
        assert world.table() == world.expected()
        assert done.latest is not None
        assert (done.latest.rows, done.latest.objects > 0) == (len(world.expected()), True)
    done = world.maintain()
    assert done.latest is not None
    assert (done.latest.objects, done.latest.written) == (0, 0)
    assert world.table() == world.expected()


def test_a_changed_rule_or_type_makes_the_table_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(range(1, 30))
    world.maintain()
    world.deleted = None
    world.maintain()
    assert world.table() == world.expected()
    assert not list((tmp_path / "archive" / "_table" / "n.now_deleted").rglob("*.*"))
    for path in (tmp_path / "archive" / "_table" / "n.now" / "objects").iterdir():
        path.unlink()  # as engines that remove files without a snapshot
    world.maintain()
    assert world.table() == world.expected()
    world.write(range(100, 130), text=True)
    world.maintain()
    assert world.table() == sorted((str(id_), seq) for id_, seq in world.expected())


def test_new_objects_may_lack_the_key_or_have_it_in_wider_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latest, "_ROWS", 1)
    world = World(tmp_path)
    for number, id_ in enumerate((pa.array([-1, -2], pa.int32()), None, pa.nulls(2), pa.array([-1, -2]))):
        columns = {"op": pa.array(["u", "u"]), "a.b": pa.array([number, 0] if number < 3 else ["x", "y"])}
        columns |= {} if id_ is None else {"id": id_}
        Archive(tmp_path / "archive").write([2 * number + 1, 2 * number + 2], interval=3600, columns=columns)
        world.maintain()
        rows = world.load().scan().to_arrow()
        assert sorted(rows[layout.SEQ].to_pylist()) == [[1, 2], [1, 2, 4], [1, 2, 6], [6, 7, 8]][number]


def test_a_pass_rewrites_only_buckets_with_newer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "_ROWS", 4)
    world = World(tmp_path)
    world.write(range(1, 200))
    world.maintain()
    files = world.load().scan().plan_files()
    assert len(files) > 8
    world.rows[300] = (300, world.expected()[0][0], "u", "new")
    world.write([300])
    done = world.maintain()
    assert done.latest is not None
    assert done.latest.objects == 1
    stayed = {task.file.file_path for task in world.load().scan().plan_files()}
    assert len({task.file.file_path for task in files} - stayed) == 1
    for number, limit in enumerate(("_MAX_ROWS", "_MAX_BYTES"), 301):
        with monkeypatch.context() as patch:
            patch.setattr(latest, limit, 1)
            world.write([number])
            done = world.maintain()
            assert done.latest is not None
            assert done.latest.objects > 1  # all of them, for more buckets
    assert world.table() == world.expected()


def test_expired_rows_leave_the_table(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(range(1, 200))
    world.maintain()
    end = HOUR + 3600 * 3
    world.keep = f"{int(datetime.now(UTC).timestamp() - end)}s"
    world.maintain()
    assert world.table() == world.expected(first=120)


def test_a_pass_that_is_killed_between_the_tables_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    commit = latest._Change.commit

    def killed(change: Any, *given: Any) -> None:
        if change.table.name() == ("n", "now"):
            raise KeyboardInterrupt
        commit(change, *given)

    for _ in range(4):
        world.publish(30)
        monkeypatch.setattr(latest._Change, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            world.maintain()
        monkeypatch.setattr(latest._Change, "commit", commit)
        world.maintain()
        assert world.table() == world.expected()


def test_what_was_replaced_an_hour_ago_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "SNAPSHOT_AGE", timedelta())
    monkeypatch.setattr(latest, "_ROWS", 4)
    world = World(tmp_path)
    for _ in range(4):
        world.publish(30)
        world.maintain()
        assert world.table() == world.expected()
    for name in ("n.now", "n.now_deleted"):
        files = {task.file.file_path for task in world.load(name).scan().plan_files()}
        directory = tmp_path / "archive" / "_table" / name
        assert {f"file://{path}" for path in (directory / "data").rglob("*.parquet")} == files
        assert len(list((directory / "objects").glob("*"))) == (name == "n.now")


def test_an_erasure_drops_the_table_with_its_files(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write(range(1, 30))
    world.maintain()
    seq = world.expected()[0][1]
    done = asyncio.run(erase(world.config, Condition(seqs=(seq, seq)), "asked"))
    assert (done.messages, done.remaining, done.dropped) == (1, [], ["n.now", "n.now_deleted"])
    assert not list((tmp_path / "archive" / "_table" / "n.now").rglob("*.*"))
    with pytest.raises(NoSuchTableError):
        world.load()
    del world.rows[seq]
    world.maintain()
    assert world.table() == world.expected()


def test_a_table_of_others_and_a_wrong_expression_are_errors(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write([1])
    world.deleted = "operation = 'd'"
    (error,) = Maintenance(world.config).run().errors
    assert error.startswith("deleted: operation = 'd': Binder Error: Referenced column")
    (tmp_path / "archive").rename(tmp_path / "moved")
    (tmp_path / "archive").symlink_to(tmp_path / "moved")
    moved = world.config.model_copy(update={"store": StoreConfig(url=str(tmp_path / "moved"))})
    assert "table n.now is of another archive than" in " ".join(Maintenance(moved).run().errors)
    with load_catalog("jetcapture", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db") as catalog:
        catalog.drop_table("n.now")
        catalog.create_table("n.now", pa.schema([("id", pa.int64())]), location=f"file://{tmp_path}/other")
    (error,) = Maintenance(world.config).run().errors
    assert error == "table n.now is not made by jetcapture: it is left as it is; use another name"


@pytest.mark.exhaustive
def test_every_engine_reads_the_rows_of_the_model_after_fifty_passes(tmp_path: Path) -> None:
    world = World(tmp_path)
    with closing(DuckdbIceberg()) as duckdb, closing(SparkIceberg(tmp_path / "catalog.db")) as spark:
        for number in range(50):
            world.publish(20)
            world.maintain()
            assert world.table() == world.expected()
            if number % 10 == 9:
                sql = f"SELECT id, {layout.SEQ} FROM {{table}} ORDER BY ALL"
                expected = list(map(list, world.expected()))
                assert duckdb.rows(sql, world.load().metadata_location) == expected
                assert sorted(spark.ask(f"SELECT id, {layout.SEQ} FROM jetcapture.n.now")) == expected
