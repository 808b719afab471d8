"""Engines that know nothing of jetcapture read a table right at any moment, while it is kept, killed and kept again.

JETCAPTURE_TEST_MOMENTS is at how many moments they read, one in six seconds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow.compute as pc
import pytest
from pyiceberg.table import Table

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.maintain.maintenance import Maintenance
from jetcapture_py.maintain.table import compare_tables
from jetcapture_py.verify.findings import Severity
from tests.integration.maintain.test_table import (
    COLUMNS,
    KEYS,
    Counts,
    World,
    by_duckdb,
    by_polars,
    by_pyiceberg,
    counted,
    truth,
    values,
    write_every_layout,
)
from tests.integration.maintain.test_table import duckdb as duckdb  # fixtures
from tests.integration.maintain.test_table import without_plugin as without_plugin
from tests.support.iceberg_engines import DuckdbIceberg, SparkIceberg

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("without_plugin")]
MOMENTS = int(os.environ.get("JETCAPTURE_TEST_MOMENTS", "15"))
SPACING = 6.0
"""Seconds between two moments, on average."""
MAINTAIN = """
import os, random, select, signal, sys
from pathlib import Path
from pyiceberg.table import Table
from jetcapture_py.compaction.files import Files
from jetcapture_py.config.model import load
from jetcapture_py.maintain import iceberg, manifests, table_columns
from jetcapture_py.maintain.maintenance import Maintenance
from jetcapture_py.store.archive import ArchiveFiles

def die(how):
    with open(sys.argv[2], "a") as kills:
        kills.write(how + "\\n")
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(owner, name, after):
    original, left = getattr(owner, name), random.randint(1, 3)
    def killed(*arguments, **options):
        nonlocal left
        left -= 1
        if left > 0:
            return original(*arguments, **options)
        if after:
            original(*arguments, **options)
        die(f"{'after' if after else 'before'} {name}")
    setattr(owner, name, killed)

steps = [
    (Files, "put"), (ArchiveFiles, "remove"), (manifests, "write_manifest"), (manifests, "write_manifest_list"),
    (Table, "_do_commit"), (iceberg, "_clean"),
]
kills = [(*step, after) for step in steps for after in (False, True)]
random.shuffle(kills)
number, longest = 0, 1.0
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    if child := os.fork():
        os.waitpid(child, 0)
        longest += 1  # so that in the end a pass ends on any machine
        continue
    random.seed()
    signal.signal(signal.SIGALRM, lambda *_: die("at any time"))
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.2, longest) if number % 3 == 0 else 20 + longest)
    if number % 3:
        kill_at(*kills[(number - number // 3) % len(kills)])
    maintenance = Maintenance(load(Path(sys.argv[1])))
    while True:
        maintenance.run()
"""


def by_spark(spark: SparkIceberg, table: Table, condition: str = "true") -> Counts:
    rows = spark.ask(
        f"SELECT key, unix_micros({layout.TIMESTAMP}) div 3600000000 AS hour, count(*), sum({layout.SEQ})"
        f" FROM jetcapture.nats.orders VERSION AS OF {table.metadata.current_snapshot_id}"
        f" WHERE {condition} GROUP BY key, hour"
    )
    return {(key, hour): (count, total) for key, hour, count, total in rows}


@contextmanager
def spark_reading(world: World) -> Iterator[SparkIceberg]:
    process = SparkIceberg(Path(world.catalog["uri"].removeprefix("sqlite:///")))
    try:
        yield process
    finally:
        process.close()


def test_spark_reads_each_message_once_in_every_layout_and_every_type(tmp_path: Path) -> None:
    world = World(tmp_path)
    write_every_layout(world)
    world.write([8001], hour=3, amount=[1], at=[{"x": 1}])
    world.write([8002], hour=4, amount=["two"], at=[{"x": 2.5, "y": "new"}])
    world.commit()
    table, expected = world.load(), truth(world)
    amounts = [(1, None, 1, None, None), (None, "two", None, 2.5, "new")]
    assert values(table, "amount", "amount_string")[-2:] == [row[:2] for row in amounts]
    with spark_reading(world) as spark:
        assert by_spark(spark, table) == expected
        for key in (*KEYS, "bundled", "too", "long"):
            condition = "key IS NULL" if key is None else f"key = '{key}'"
            assert by_spark(spark, table, condition) == {group: v for group, v in expected.items() if group[0] == key}
        names = "amount, amount_string, at.x, at.x_double, at.y"
        sql = f"SELECT {names} FROM jetcapture.nats.orders WHERE {layout.SEQ} > 8000 ORDER BY {layout.SEQ}"
        assert [tuple(row) for row in spark.ask(sql)] == amounts


def test_every_engine_reads_what_we_read_while_two_keep_the_table_and_are_killed_at_every_step(
    tmp_path: Path, duckdb: DuckdbIceberg
) -> None:
    world = World(tmp_path, compact={"after": "0s", "grace": "60s", "target": "1MiB"})
    config, kills = tmp_path / "orders.yaml", tmp_path / "kills"
    maintain = {"compact": world.compact, "table": {"name": "nats.orders", "catalog": world.catalog}}
    source = {"stream": "ORDERS", "consumer": "archive"}
    config.write_text(json.dumps({"store": world.store, "source": source, "maintain": maintain}))
    log = tmp_path / "log"
    chance, stored, stop = random.Random(7), {1, 2}, Event()
    world.write([1, 2], hour=0)
    world.commit()

    def capture() -> None:
        seq = 10
        while not stop.wait(0.5):
            seqs = list(range(seq, seq + chance.randint(2, 5)))
            seq = seqs[-1] + 2
            key, hour, value = chance.choice(KEYS), chance.randint(0, 5), chance.choice(([1], ["x"], [1.5]))
            stored.update(seqs)
            world.write(seqs, key, hour=hour, v=value * len(seqs))
            if chance.random() < 0.3:  # some of them come again, with another
                again = [*seqs[-2:], seq - 1]
                stored.update(again)
                world.write(again, key, hour=hour, v=value * len(again))

    def keep() -> None:
        command = [sys.executable, "-c", MAINTAIN, str(config), str(kills)]
        with log.open("ab") as errors, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors) as process:
            stop.wait()
            process.communicate()

    with spark_reading(world) as spark:
        engines: dict[str, Callable[[Table], Counts]] = {
            "DuckDB": partial(by_duckdb, duckdb),  # first: it reads a metadata file, of which only some are kept
            "PyIceberg": by_pyiceberg,
            "Polars": by_polars,
            "Spark": partial(by_spark, spark),
        }
        by_spark(spark, world.load())
        threads = [Thread(target=target) for target in (capture, keep, keep)]
        for thread in threads:
            thread.start()
        seen: set[int] = set()
        snapshots: set[int | None] = set()
        read = 0
        try:
            start, moments = time.monotonic(), sorted(chance.uniform(0, SPACING * MOMENTS) for _ in range(MOMENTS))
            while moments or len(snapshots) < 5:
                if moments:
                    time.sleep(max(0, start + moments.pop(0) - time.monotonic()))
                table = world.load()
                counts = {name: engine(table) for name, engine in engines.items()}
                found = table.scan(selected_fields=(layout.SEQ,)).to_arrow()[layout.SEQ]
                rows: Any = read_archive(str(world.root), "ORDERS", columns=list(COLUMNS)).read_all()
                expected = counted(rows.filter(pc.is_in(rows[layout.SEQ], found.combine_chunks())))
                assert counts == dict.fromkeys(engines, expected)
                now = set(found.to_pylist())
                assert len(found) == len(now)
                assert seen <= now <= stored
                seen = now
                snapshots.add(table.metadata.current_snapshot_id)
                read += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        injected = Counter(kills.read_text().splitlines())
        print(f"{read} moments, {len(snapshots)} snapshots, {len(seen)} messages, kills: {dict(injected)}")
        world.passes = Maintenance(world.config)
        assert world.passes.run().tables["messages"].unsettled == 0
        table = world.load()
        settled = truth(world)
        assert {name: engine(table) for name, engine in engines.items()} == dict.fromkeys(engines, settled)
        assert sum(count for count, _ in settled.values()) == len(stored), log.read_text()
        assert not [finding for finding in compare_tables(world.config) if finding.severity is Severity.FAILURE]
