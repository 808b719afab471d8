"""`jetcapture demo`: orders from a NATS server to Parquet, SQL and back, step by step.

It needs the extra `demo`, with `--spark` also `spark` and Java 17, and touches nothing outside its directory.
Everything runs in its own process group, on ports that the system chose; the group is killed when the demo ends,
however it ends.
"""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import nats
import pyarrow as pa
import yaml
from nats.js.errors import NotFoundError
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from jetcapture_py.archive import layout
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.connection import connect
from jetcapture_py.jetstream.publish.publisher import Publisher

STREAM, CONSUMER, RESULTS = "ORDERS", "archive", "RESULTS"
REPLICAS = 2
CURRENCIES = {"eu": "EUR", "us": "USD", "apac": "JPY", "latam": "BRL"}
ONE_BROKEN_IN = 1000
COLUMNS = {
    **dict.fromkeys(("order_id", "region", "customer", "currency"), "string"),
    "amount": "double",
    "created_at": "timestamp",
    "items": "list<struct<sku: string, quantity: int64>>",
}
SQL = """SELECT region, currency, count(*) AS orders, count(DISTINCT customer) AS customers,
       sum(size(items)) AS items, round(sum(amount), 2) AS revenue
FROM archive GROUP BY region, currency ORDER BY orders DESC"""
REASONS = """SELECT stage, left(regexp_replace(error, '[0-9]+', 'N'), 60) AS reason, count(*) AS messages,
       left(decode(first(_nats_payload), 'ISO-8859-1'), 48) AS example
FROM quarantine GROUP BY stage, reason ORDER BY messages DESC, reason LIMIT 8"""
DUCKDB_SQL = SQL.replace("size(items)", "len(items)")
DUCKDB_REASONS = """SELECT stage, left(regexp_replace(error, '[0-9]+', 'N', 'g'), 60) AS reason, count(*) AS messages,
       left(replace(CAST(first(_nats_payload) AS VARCHAR), '\\x22', '"'), 48) AS example
FROM quarantine GROUP BY ALL ORDER BY messages DESC, reason LIMIT 8"""
COUNTS = """SELECT (SELECT count(DISTINCT _nats_seq) FROM archive) AS messages,
       (SELECT count(*) FROM archive) AS stored_rows,
       (SELECT count(DISTINCT _nats_seq) FROM quarantine) AS quarantined"""
_SERVER_START, _STALLED = 15.0, 120.0


def run(directory: Path | None, messages: int, *, spark: bool | None = None) -> int:
    """Run the demo in its own process group; return 0 if every order is accounted for.

    Queries run in Spark or in DuckDB; None means in Spark if PySpark and Java are installed.
    """
    try:
        spark = _check_prerequisites(spark)
        home = _new_home(directory)
    except JetcaptureError as error:
        return _failed(error)
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in numbers}
    command = [sys.executable, "-m", "spark_jobs.demo", str(home), str(messages), *(["spark"] if spark else [])]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as group:
            while group.poll() is None and not signals:
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        shutil.rmtree(home / "nats", ignore_errors=True)  # only the server needed it
    if signals:
        console = Console(highlight=False)
        console.show_cursor()
        console.print("\nInterrupted; all processes are stopped.")
        return 130
    return group.returncode


def main(home: str, messages: str, engine: str = "duckdb") -> int:
    """Run the demo in this process group; kill the group when standard input closes because the parent is gone."""

    def end_with_parent() -> None:
        os.read(0, 1)  # blocks until the parent is gone
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    width = None if sys.stdout.isatty() else 140
    try:
        console = Console(highlight=False, soft_wrap=True, emoji=False, width=width)
        _Demo(console, Path(home), int(messages), spark=engine == "spark").run()
    except JetcaptureError as error:
        return _failed(error)
    return 0


def _failed(error: JetcaptureError) -> int:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"jetcapture demo: {error}")
    return 1


def _check_prerequisites(spark: bool | None) -> bool:
    """Return whether to use Spark. Raises JetcaptureError if something is missing."""
    _server_binary()
    if importlib.util.find_spec("duckdb") is None:
        raise JetcaptureError("duckdb is missing: pip install 'jetcapture[demo]'")
    if spark is False:
        return False
    try:
        if importlib.util.find_spec("pyspark") is None:
            raise JetcaptureError("PySpark is missing: pip install 'jetcapture[demo,spark]'")
        from spark_jobs.java import require_java

        require_java()
    except JetcaptureError:
        if spark:
            raise
        return False
    return True


def _server_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise JetcaptureError("nats-server is missing: pip install 'jetcapture[demo]'")
    return found


def _new_home(directory: Path | None) -> Path:
    """Return the demo's directory, new or empty."""
    names = (Path("demo-archive" if number == 1 else f"demo-archive-{number}") for number in count(1))
    home = directory or next(path for path in names if not path.exists())
    try:
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise JetcaptureError(f"{home} is not empty: name a new directory with --dir")
        home = home.resolve()
        (home / "logs").mkdir()
    except OSError as error:
        raise JetcaptureError(f"cannot write to {home}: {error.strerror}; name a directory with --dir") from error
    return home


def orders(number_of: int) -> Iterator[tuple[str, bytes]]:
    """Yield subjects and payloads of deterministic orders; one in `ONE_BROKEN_IN` cannot be decoded."""
    dice = random.Random(7)  # noqa: S311  # sample data, not secrets
    start = datetime.now(UTC) - timedelta(hours=6)
    for number, region in enumerate(dice.choices(list(CURRENCIES), weights=(4, 3, 2, 1), k=number_of)):
        order: dict[str, Any] = {
            "order_id": f"o-{number:08}",
            "region": region,
            "customer": f"c-{int(dice.expovariate(1 / 4000)):05}",
            "amount": round(5 + dice.expovariate(1 / 80), 2),
            "currency": CURRENCIES[region],
            "created_at": start + timedelta(milliseconds=100 * number),
            "items": [{"sku": f"sku-{int(dice.random() * 500):03}", "quantity": 1 + number % 3}] * (1 + number % 4),
        }
        payload = msgspec.json.encode(order)
        if number % ONE_BROKEN_IN == ONE_BROKEN_IN // 2:
            wrong_type = msgspec.json.encode({**order, "amount": "a lot"})
            payload = (payload[:-20], wrong_type, b"\x00\x01\xfe\xff")[number // ONE_BROKEN_IN % 3]
        yield f"orders.{region}", payload


class _Demo:
    """The steps, in order."""

    def __init__(self, console: Console, home: Path, messages: int, *, spark: bool) -> None:
        self.console, self.home, self.messages, self.spark = console, home, messages, spark
        self.archive, self.logs = home / "archive", home / "logs"
        self.began = time.monotonic()

    def run(self) -> None:
        self.console.print(f"All files are in {self.home}.", markup=False)
        url = self._server()
        self._step(f"1. Start a NATS server at {url} and publish {self.messages:,} orders to its stream {STREAM}")
        self._timed("orders acknowledged", lambda: asyncio.run(self._publish(url)))
        self._step(f"2. Store them as Parquet with {REPLICAS} replicas of `jetcapture run` on the consumer {CONSUMER}")
        self._timed("messages stored and acknowledged", lambda: asyncio.run(self._capture(url)))
        self._step("3. The archive")
        self._show_archive()
        if self.spark:
            with self._spark_errors():
                self._query_with_spark(url)
        else:
            self._query_with_duckdb(url)

    def _query_with_duckdb(self, url: str) -> None:
        self._step("4. The quarantine: messages that could not be decoded, with the reason and the raw bytes")
        self._table(*_columns_and_rows(self._queried(DUCKDB_REASONS)))
        self._step("5. `jetcapture query`: SQL over the archive, each message once")
        self.console.print(DUCKDB_SQL, style="dim", markup=False)
        result = self._queried(DUCKDB_SQL)
        self._table(*_columns_and_rows(result))
        self._step(f"6. Publish the result to the subjects results.* and read it back from the stream {RESULTS}")
        asyncio.run(_publish_rows(url, result))
        self._read_back(url, len(result))
        (counts,) = self._queried(COUNTS)
        self._finish(*counts.values())

    def _queried(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows that `jetcapture query` prints."""
        words = [sys.executable, "-m", "jetcapture_py", "query", str(self.archive), STREAM, sql, "--format", "json"]
        with self.console.status("Querying …"):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JetcaptureError(f"the query failed: {done.stderr.strip()}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def _read_back(self, url: str, published: int) -> None:
        read = asyncio.run(_read_back(url, published))
        for subject, payload in read:
            self.console.print(Text.assemble("  ", (f"{subject:<15}", "green"), payload))
        if len(read) != published:
            raise JetcaptureError(f"{published} results were published, but {len(read)} were read back")

    def _query_with_spark(self, url: str) -> None:
        from spark_jobs.archive import archive_view
        from spark_jobs.job import session
        from spark_jobs.replay import replay

        with self.console.status("Starting Spark …"):
            spark = session("jetcapture demo")
            spark.conf.set("spark.sql.shuffle.partitions", "4")
            for view in ("archive", "quarantine"):
                archive_view(spark, str(self.archive), STREAM, view, quarantine=view == "quarantine")
        self._step("4. The quarantine: messages that could not be decoded, with the reason and the raw bytes")
        reasons = spark.sql(REASONS)
        self._table(reasons.columns, reasons.collect())
        counts = spark.sql(COUNTS).collect()[0]
        self._step("5. Spark SQL over the archive")
        self.console.print(SQL, style="dim")
        result = spark.sql(SQL)
        self._table(result.columns, result.collect())
        self._step(f"6. Publish the result to the subjects results.* and read it back from the stream {RESULTS}")
        self._read_back(url, replay(result, url, "results.{region}").published)
        spark.stop()
        self._finish(*counts)

    def _step(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def _timed(self, what: str, step: Callable[[], object]) -> None:
        began = time.monotonic()
        step()
        rate = self.messages / (time.monotonic() - began)
        self.console.print(f"  {self.messages:,} {what}, {rate:,.0f} per second")

    def _start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.logs / log).open("wb") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _server(self) -> str:
        """Start a nats-server on a free port; return its address."""
        storage, log = self.home / "nats", self.logs / "nats-server.log"
        storage.mkdir()
        command = [_server_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(storage)]
        process = self._start([*command, "-js", "-sd", str(storage), "-l", str(log)], "nats-server.err")
        ports = storage / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + _SERVER_START
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError, ValueError):  # not written completely yet
                return str(json.loads(ports.read_text())["nats"][0])
            time.sleep(0.02)
        raise JetcaptureError(f"nats-server did not start: see {log}")

    async def _publish(self, url: str) -> None:
        client = await connect(NatsConfig(servers=(url,)), "jetcapture demo", timeout=5)
        for stream, subjects in ((STREAM, "orders.>"), (RESULTS, "results.>")):
            await client.jetstream().add_stream(name=stream, subjects=[subjects])
        messages = orders(self.messages)
        with self.console.status("") as status:
            async with Publisher(client, window=2000, ack_timeout=30) as publisher:
                while batch := list(islice(messages, 2000)):
                    await publisher.publish_batch(*map(pa.array, zip(*batch, strict=True)))
                    status.update(f"{publisher.published:,} published")
        await client.close()

    async def _capture(self, url: str) -> None:
        """Run the replicas until they have caught up and exited; show progress."""
        config = {
            "nats": {"servers": [url]},
            "source": {"stream": STREAM, "consumer": CONSUMER},
            "decode": {"format": "json", "columns": COLUMNS},
            "key": "{region}",
            "block": {"interval": "5m"},
            "store": {"url": str(self.archive).replace("$", "$$")},
            "http": None,
            "log": {"format": "json"},
        }
        path = self.home / "jetcapture.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        command = [sys.executable, "-m", "jetcapture_py", "run", str(path), "--until-caught-up"]
        replicas = {log: self._start(command, log) for log in (f"replica-{each + 1}.log" for each in range(REPLICAS))}
        done, moved = 0, time.monotonic()
        nc = await nats.connect(url, error_cb=_quiet)
        with self.console.status("") as status:
            while any([self._is_running(process, log) for log, process in replicas.items()]):  # noqa: C419  all
                with suppress(NotFoundError):  # until a replica has created it
                    info = await nc.jetstream().consumer_info(STREAM, CONSUMER)
                    now = self.messages - (info.num_pending or 0) - (info.num_ack_pending or 0)
                    done, moved = (now, time.monotonic()) if now != done else (done, moved)
                    status.update(f"{done:,} stored")
                if time.monotonic() - moved > _STALLED:
                    raise JetcaptureError(f"the replicas make no progress: see {self.logs}")
                await asyncio.sleep(0.1)
        await nc.close()

    def _is_running(self, replica: subprocess.Popen[bytes], log: str) -> bool:
        if replica.poll():
            last = (self.logs / log).read_text(errors="replace").strip().rpartition("\n")[2]
            raise JetcaptureError(
                f"a replica failed with exit code {replica.returncode}: see {self.logs / log}\n{last}"
            )
        return replica.returncode is None

    def _show_archive(self) -> None:
        """Show the directories with one object each, and the volume per key."""
        tree, keys = Tree(Text(str(self.archive))), defaultdict[str, list[int]](lambda: [0, 0, 0])
        directories: dict[Path, list[Path]] = defaultdict(list)
        for path in sorted(self.archive.rglob("*.parquet")):
            directories[path.parent].append(path)
            name = layout.parse_path(path.relative_to(self.archive).as_posix())
            if name is not None and not name.quarantine:
                of_key = keys[str(name.key)]
                of_key[:] = of_key[0] + 1, of_key[1] + name.rows, of_key[2] + path.stat().st_size
        for directory, files in directories.items():
            branch = tree.add(directory.relative_to(self.archive).as_posix(), highlight=False)
            branch.add(Text(files[0].name, no_wrap=True, overflow="ellipsis"))
            if len(files) > 1:
                branch.add(f"… and {len(files) - 1} more")
        self.console.print(tree)
        rows = ((key, *of_key, round(of_key[2] / of_key[1])) for key, of_key in sorted(keys.items()))
        self._table(["key", "objects", "rows", "bytes", "bytes per row"], rows)

    def _table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        from jetcapture_py.reading.output import table

        for line in table(columns, ([str(value) for value in row] for row in rows)):
            self.console.print(line, markup=False, style="bold" if line.startswith(columns[0]) else None)

    @contextmanager
    def _spark_errors(self) -> Iterator[None]:
        """Redirect output of Spark, its JVM and workers to a file; turn Spark's errors into one line."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        from spark_jobs.job import spark_error

        path = self.logs / "spark.log"
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            with path.open("ab") as file:
                os.dup2(file.fileno(), 2)
            yield
        except (PySparkException, Py4JError) as error:
            raise JetcaptureError(f"Spark failed: {spark_error(error)}; see {path}") from error
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)

    def _finish(self, messages: int, rows: int, quarantined: int) -> None:
        objects = f"{glob.escape(str(self.archive / STREAM))}/**/*.parquet".replace("'", "''")
        query = "SELECT key, count(*) FROM {} GROUP BY key"
        self.console.print("\n[bold]The archive is kept. Query it with[/]")
        ours = ("python", "-m", "spark_jobs.query") if self.spark else ("jetcapture", "query")
        for words in (
            (*ours, str(self.archive), STREAM, query.format("archive")),
            ("duckdb", "-c", query.format(f"read_parquet('{objects}', hive_partitioning=true)")),
        ):
            self.console.print("  " + " ".join(map(_shell_quoted, words)), markup=False)
        self.console.print(f"  Logs and the replicas' configuration are in {self.home}.", markup=False)
        if messages + quarantined != self.messages or rows != messages:
            raise JetcaptureError(
                f"of {self.messages:,} orders {messages:,} are in the archive (in {rows:,} rows) and {quarantined:,} "
                f"in the quarantine, which does not add up: see {self.logs}"
            )
        self.console.print(
            f"\n[bold green]Done in {time.monotonic() - self.began:.0f} s: {self.messages:,} orders published, "
            f"{messages:,} in the archive, {quarantined:,} in the quarantine; none missing, none twice.[/]"
        )


async def _quiet(_: Exception) -> None:
    """Ignore asynchronous errors: an interruption may stop the server first."""


def _columns_and_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    return list(rows[0]) if rows else ["nothing"], [list(row.values()) for row in rows]


async def _publish_rows(url: str, rows: Sequence[dict[str, Any]]) -> None:
    client = await connect(NatsConfig(servers=(url,)), "jetcapture demo", timeout=5)
    async with Publisher(client, window=100, ack_timeout=30) as publisher:
        subjects = pa.array([f"results.{row['region']}" for row in rows])
        await publisher.publish_batch(subjects, pa.array([msgspec.json.encode(row) for row in rows]))
    await client.close()


async def _read_back(url: str, expected: int) -> list[tuple[str, str]]:
    nc = await nats.connect(url, error_cb=_quiet)
    subscription = await nc.jetstream().pull_subscribe("results.>", stream=RESULTS)
    read = await subscription.fetch(expected, timeout=10)
    await nc.close()
    return [(message.subject, message.data.decode()) for message in read]


def _shell_quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
