"""What the README shows works as it stands there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
import yaml

from jetcapture_py.config.model import loads, schema
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, connection, publish, settings
from tests.support.streams import read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = (Path(__file__).parents[2] / "README.md").read_text()
ARCHIVE = "/var/lib/jetcapture"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with a stream of 30 messages, 10 of them under orders.eu.new."""
    server = nats_server()
    messages = [(f"orders.{('eu', 'us', 'asia')[index % 3]}.new", b"%d" % index, None) for index in range(30)]
    asyncio.run(publish(server.url, messages))
    return server


@pytest.fixture
def archive(server: NatsServer, tmp_path: Path) -> Path:
    """Its archive, with the keys eu, us and asia."""
    asyncio.run(capture_all(config(server.url, tmp_path / "archive", key="{subject[1]}")))
    return tmp_path / "archive"


def test_the_configurations_are_accepted() -> None:
    quick_start, columns = blocks("yaml")
    assert loads(quick_start).source.stream == "ORDERS"
    merged = settings("nats://127.0.0.1:4222", "/archive", **yaml.safe_load(columns))
    assert len(loads(yaml.safe_dump(merged)).decode.columns) == 6


def test_the_sql_counts_every_message_once(archive: Path) -> None:
    (query,) = blocks("sql")
    assert ARCHIVE in query
    assert sorted(duckdb.sql(query.replace(ARCHIVE, str(archive))).fetchall()) == [("asia", 10), ("eu", 10), ("us", 10)]


@pytest.mark.spark
def test_the_python_reads_the_archive(
    archive: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    names: dict[str, Any] = {}
    exec(blocks("python")[0].replace(ARCHIVE, str(archive)), names)
    assert names["orders"].count() == 10
    assert re.search(r"\|\s*asia\|\s*10\|", capsys.readouterr().out)


@pytest.mark.spark
def test_the_python_reads_and_writes_a_stream_live(server: NatsServer, spark: SparkSession, tmp_path: Path) -> None:
    async def create() -> None:
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name="COPY", subjects=["copy.>"])

    asyncio.run(create())
    snippet = blocks("python")[1].replace("nats://127.0.0.1:4222", server.url)
    names: dict[str, Any] = {"spark": spark}
    exec(snippet.replace("/var/lib/spark/copy", str(tmp_path / "checkpoint")), names)
    try:
        assert names["live"].count() == 30
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    copied = asyncio.run(read_stream(server.url, "COPY"))
    assert sorted(message.payload for message in copied) == sorted(b"%d" % index for index in range(0, 30, 3))
    assert {message.subject for message in copied} == {"copy.orders.eu.new"}


def test_the_commands_exist() -> None:
    table = README.split("## Commands", 1)[1].split("## ", 1)[0]
    jetcapture = set(re.findall(r"`jetcapture (\w+)", table))
    helped = subprocess.run(
        [sys.executable, "-m", "jetcapture_py", "--help"], capture_output=True, text=True, check=True
    )
    assert jetcapture == set(re.findall(r"^  (\w+)  ", helped.stdout.split("Commands:")[1], re.MULTILINE))
    jobs = set(re.findall(r"`jetcapture spark (\w+)", table)) - {"JOB"}
    assert jobs == {"query", "compact", "replay", "report"}
    commands = [["jetcapture_py", "spark", job] for job in jobs]
    commands += [[module] for module in re.findall(r"`python -m (benchmarks[\w.]+)", README)]
    for command in commands:
        arguments = [sys.executable, "-m", *command, "--help"]
        assert (
            subprocess.run(arguments, capture_output=True, check=False, cwd=Path(__file__).parents[2]).returncode == 0
        )


def leaves(node: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    """The dotted paths of all settings in a JSON Schema."""
    for option in [node, *node.get("anyOf", []), *node.get("oneOf", [])]:
        target = definitions[option["$ref"].rsplit("/", 1)[1]] if "$ref" in option else option
        for name, value in target.get("properties", {}).items():
            below = list(leaves(value, definitions, f"{path}{name}."))
            yield from below or [f"{path}{name}"]


def test_every_setting_is_described() -> None:
    found = schema()
    table = README.split("## Configuration", 1)[1].split("### JSON", 1)[0]
    paths = set(leaves(found, found.get("$defs", {})))
    assert "store.concurrency" in paths
    missing = [path for path in paths if not re.search(rf"\b{path.rsplit('.', 1)[-1]}\b", table)]
    assert missing == []
