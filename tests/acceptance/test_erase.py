"""One customer of a thousand is erased while everything else is at work, and nothing finds them or brings them back.

`JETCAPTURE_ERASE_MESSAGES` is the number of messages of all layouts together. With millions of them, the file needs
`-o faulthandler_timeout=0` as well, because a test of them takes longer than others may.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
import yaml

from jetcapture_py.archive import layout
from jetcapture_py.errors import VanishedError
from jetcapture_py.reading.arrow import read_archive
from tests.support.erasing import plain, traces
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream
from tests.support.running import STREAM, Command, Message, connection, publish, settings

pytestmark = [pytest.mark.exhaustive, pytest.mark.spark, pytest.mark.timeout(0)]
Start = Callable[..., NatsServer]

COUNT = int(os.environ.get("JETCAPTURE_ERASE_MESSAGES", "15000")) // 3
CUSTOMERS, CUSTOMER = 1000, 77
WHO = f"customer-{CUSTOMER:04}"
LAYOUTS: dict[str, dict[str, Any]] = {
    "keys": {"max_messages": max(5, COUNT // CUSTOMERS // 6), "max_age": "10m"},
    "bundles": {"max_messages": max(500, COUNT // 100), "bundles": 8, "max_age": "10m"},
    "ndjson": {"max_messages": max(500, COUNT // 100), "bundles": 4, "format": "ndjson", "max_age": "10m"},
}
KILLS = (0.4, 0.8, 1.2, 2.0)
"""When a run is killed, as a part of the time that a dry run takes."""


def message(number: int) -> Message:
    """Every customer has one message in a thousand, and one in twenty of those cannot be decoded."""
    who = f"customer-{number % CUSTOMERS:04}"
    at = f"2026-05-01T{12 + number % 2}:{number % 60:02}:00Z"
    body = f'{{"id": {number}, "customer": "{who}", "at": "{at}", "text": "order {number} of {who}"'
    broken = number // CUSTOMERS % 20 == 3
    return f"orders.{who}", f"{body}{'' if broken else '}'}".encode(), [("Customer", who), ("N", str(number))]


def sections(root: Path, block: dict[str, Any]) -> dict[str, Any]:
    columns = {"id": "int64", "customer": "string", "at": "timestamp", "text": "string"}
    found: dict[str, Any] = {
        "key": "{subject[1]}",
        "source": {"max_ack_pending": 100_000},
        "decode": {"format": "json", "columns": columns, "keep_payload": True},
        "block": {"time": "at", "interval": "1h", **block},
        "maintain": {"compact": {"after": "0s", "grace": "0s", "target": "16MiB"}},
    }
    if "format" not in block:
        catalog = {"type": "sql", "uri": f"sqlite:///{root.parent}/catalog.db"}
        found["maintain"]["table"] = {"name": "nats.orders", "quarantine": "nats.bad", "catalog": catalog}
    return found


def command(*words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "jetcapture_py", *words)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def succeeded(*words: str) -> str:
    done = command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def capture(directory: Path, configuration: dict[str, Any], name: str) -> None:
    """Capture all that a consumer has not acknowledged, with a real process."""
    named = {**configuration, "source": {**configuration["source"], "consumer": name}}
    with Command(directory, named, name) as process:
        assert process.start("--until-caught-up").wait(7200) == 0, process.log[-2000:]


def erase(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = command("erase", str(path), "--key", WHO, "--reason", "request 4711", "--json", *options)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def parquet(root: Path, top: str) -> pa.Table:
    """Every distinct row of all objects, as pyarrow alone reads them, in order."""
    files = sorted(path.as_posix() for path in (root / top).rglob("*.parquet"))
    schema = pa.unify_schemas([ds.dataset(path).schema for path in files])
    table = ds.dataset(files, schema=schema).to_table()
    order = pc.sort_indices(table, [(layout.SEQ, "ascending"), (layout.TIMESTAMP, "ascending")])
    table = table.take(order)
    seqs = table[layout.SEQ].to_numpy()
    return table.filter(pa.array(np.diff(seqs, prepend=-1) != 0)).drop_columns([layout.DELIVERED])


def lines(root: Path) -> dict[int, bytes]:
    """The digest of every line, by its sequence."""
    found = {}
    for path in (root / STREAM).rglob("*.ndjson*"):
        *_, text = plain(path.name, path.read_bytes())
        for line in text.splitlines():
            row = json.loads(line)
            del row[layout.DELIVERED]
            found[int(row[layout.SEQ])] = hashlib.blake2b(repr(row).encode(), digest_size=8).digest()
    return found


def contents(root: Path, *, text: bool) -> tuple[Any, pa.Table]:
    """All rows of the archive, and of its quarantine, as somebody reads them who does not know jetcapture."""
    return (lines(root) if text else parquet(root, STREAM)), parquet(root, f"_quarantine/{STREAM}")


def others(found: tuple[Any, pa.Table]) -> tuple[Any, pa.Table]:
    """The same without the customer; sequence 1 is message 0."""
    rows, quarantine = found

    def kept(table: pa.Table) -> pa.Table:
        return table.filter(pa.array((table[layout.SEQ].to_numpy() - 1) % CUSTOMERS != CUSTOMER))

    if isinstance(rows, dict):
        return {seq: line for seq, line in rows.items() if (seq - 1) % CUSTOMERS != CUSTOMER}, kept(quarantine)
    return kept(rows), kept(quarantine)


def same(one: tuple[Any, pa.Table], other: tuple[Any, pa.Table]) -> bool:
    def equal(left: Any, right: Any) -> bool:
        return bool(left == right if isinstance(left, dict) else left.equals(right))

    return all(equal(*pair) for pair in zip(one, other, strict=True))


def found_by_anybody(root: Path) -> list[str]:
    """What finds the customer: our reader, DuckDB over all files, and grep over names, bytes and decompressed pages."""
    found, text = [], any(root.rglob("*.ndjson*"))
    for aside in (True,) if text else (False, True):
        for batch in read_archive(str(root), STREAM, quarantine=aside):
            subjects = batch.column(layout.SUBJECT).cast(pa.string())
            if pc.any(pc.match_substring(subjects, WHO)).as_py():
                found.append(f"read_archive, quarantine={aside}")
    for kind, read in (("parquet", "read_parquet"), ("ndjson*", "read_ndjson_objects")):
        if any(root.rglob(f"*.{kind}")):
            column = layout.SUBJECT if kind == "parquet" else "json"
            options = ", union_by_name = true" if kind == "parquet" else ""
            with duckdb.connect() as connection:
                query = f"SELECT count(*) FROM {read}('{root}/**/*.{kind}'{options}) WHERE {column} LIKE '%{WHO}%'"
                if connection.sql(query).fetchall() != [(0,)]:
                    found.append(f"DuckDB, {kind}")
    return found + traces(root, WHO.encode())


class AtWork:
    """A second capture of everything, maintenance as a service, and a reader, until the end of the block."""

    def __init__(self, directory: Path, configuration: dict[str, Any], path: Path, *, text: bool) -> None:
        self._path, self._root, self._text = path, Path(configuration["store"]["url"]), text
        source = {**configuration["source"], "consumer": "second"}
        self._capture = Command(directory, {**configuration, "source": source}, "second")
        self._stop, self._reader = threading.Event(), threading.Thread(target=self._read)
        self.reads = 0
        self.failures: list[BaseException] = []

    def __enter__(self) -> Self:
        self._capture.start()
        words = [sys.executable, "-m", "jetcapture_py", "maintain", str(self._path), "--every", "1s"]
        self._maintain = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._reader.start()
        return self

    def _read(self) -> None:
        while not self._stop.is_set():
            try:
                seqs = [
                    batch.column(layout.SEQ) for batch in read_archive(str(self._root), STREAM, quarantine=self._text)
                ]
                every = np.concatenate([each.to_numpy() for each in seqs])
                assert len(np.unique(every)) == len(every)
                self.reads += 1
            except VanishedError:
                continue  # "read it again"
            except BaseException as error:
                self.failures.append(error)
                return

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._reader.join()
        self._maintain.terminate()
        assert self._maintain.wait(600) == 0
        self._capture.drain()


def timed(what: str, since: float) -> float:
    now = time.monotonic()
    print(f"  {what}: {now - since:.1f} s", flush=True)
    return now


async def reset(url: str, name: str) -> None:
    async with connection(url) as client:
        await client.jetstream().delete_consumer(STREAM, name)


async def subjects(url: str, stream: str) -> dict[str, int]:
    """The number of messages of each subject of a stream."""
    async with connection(url) as client:
        info = await client.jetstream().stream_info(stream, subjects_filter=">")
        return dict(info.state.subjects or {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_customer_of_a_thousand_is_erased_and_stays_away(nats_server: Start, tmp_path: Path, name: str) -> None:
    root, text = tmp_path / "archive", name == "ndjson"
    server, now = nats_server(), time.monotonic()
    configuration = settings(server.url, root, **sections(root, LAYOUTS[name]))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(configuration))
    for part in (range(COUNT // 2), range(COUNT // 2, COUNT)):
        asyncio.run(publish(server.url, map(message, part)))
        capture(tmp_path, configuration, "archive")
        now = timed(f"{name}: {len(part):,} messages captured", now)
        if not part.start:  # half of the archive is compacted
            succeeded("maintain", str(path))
            now = timed("maintenance", now)
    size = sum(each.stat().st_size for each in root.rglob("*") if each.is_file())
    print(f"  {len([*root.rglob('*.parquet'), *root.rglob('*.ndjson*')]):,} objects, {size / 1e6:,.0f} MB", flush=True)
    assert found_by_anybody(root)
    before = contents(root, text=text)
    expected = others(before)
    gone = len([seq for seq in range(COUNT) if seq % CUSTOMERS == CUSTOMER])
    now = timed("read", now)

    code, dry = erase(path, "--dry-run")
    duration = time.monotonic() - now
    now = timed("dry run", now)
    assert (code, dry["messages"]) == (0, gone)
    with AtWork(tmp_path, configuration, path, text=text) as others_at_work:
        for part_of in KILLS:
            words = [
                sys.executable,
                "-m",
                "jetcapture_py",
                "erase",
                str(path),
                "--key",
                WHO,
                "--reason",
                "request 4711",
            ]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(part_of * duration)  # where it is then does not matter: it may be killed anywhere
            process.kill()
            process.wait()
        now = timed(f"{len(KILLS)} runs that were killed", now)
        erase(path)  # others may be writing, and what they had read before is named
        now = timed("erased, with others at work", now)
        assert others_at_work.failures == []
    print(f"  {others_at_work.reads} reads meanwhile")
    for leftover in root.rglob(".*.tmp"):  # of the runs that were killed
        os.utime(leftover, (1, 1))
    for leftover in (root / "_table").rglob("*.avro"):
        os.utime(leftover, (1, 1))
    code, last = erase(path)
    now = timed("what others had stored again", now)
    assert (code, last["remains"]) == (0, [])
    tombstones = [json.loads(each.read_text()) for each in (root / "_erased" / STREAM).iterdir()]
    assert sum(each["messages"] for each in tombstones) == gone == dry["messages"]
    assert found_by_anybody(root) == []
    assert same(contents(root, text=text), expected)
    now = timed("nothing finds them, and all else is unchanged", now)

    asyncio.run(reset(server.url, "archive"))
    for consumer in ("archive", "third"):
        capture(tmp_path, configuration, consumer)
    now = timed("consumer reset, another capture", now)
    repaired = succeeded("verify", str(path), "--repair")
    assert f"{gone:,} were erased" in repaired or f"{gone} were erased" in repaired
    now = timed("verify --repair", now)
    succeeded("quarantine", "redecode", str(path))
    succeeded("maintain", str(path))
    succeeded("compact", str(path))
    now = timed("redecode, maintain, compact", now)
    assert found_by_anybody(root) == []
    assert same(contents(root, text=text), expected)
    if not text:  # neither is possible from text
        add_stream(server.url, "REPLAY", "replay.>")
        succeeded("spark", "replay", "--config", str(path), "--subject", "replay.{subject}")
        succeeded("restore", str(path), "--as", "RESTORED", "--subject-prefix", "restored")
        for stream, prefix, customers in (("REPLAY", "replay", CUSTOMERS - 1), ("RESTORED", "restored", CUSTOMERS - 1)):
            counts = asyncio.run(subjects(server.url, stream))
            assert f"{prefix}.orders.{WHO}" not in counts
            assert len(counts) == customers
        timed("replay, restore", now)
