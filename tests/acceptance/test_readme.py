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

from jetcapture_py.config import loads, schema
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, publish, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = (Path(__file__).parents[2] / "README.md").read_text()
ARCHIVE = "/var/lib/jetcapture"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def archive(nats_server: Callable[..., NatsServer], tmp_path: Path) -> Path:
    """An archive with 30 messages, 10 of them with the key eu."""
    server = nats_server()
    messages = [(f"orders.{('eu', 'us', 'asia')[index % 3]}", b"%d" % index, None) for index in range(30)]
    asyncio.run(publish(server.url, messages))
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
    monkeypatch.setattr("spark_jobs.archive.session", lambda _: spark)
    names: dict[str, Any] = {}
    exec(blocks("python")[0].replace(ARCHIVE, str(archive)), names)
    assert names["orders"].count() == 10
    assert re.search(r"\|\s*asia\|\s*10\|", capsys.readouterr().out)


def test_the_commands_exist() -> None:
    table = README.split("## Commands", 1)[1].split("## ", 1)[0]
    jetcapture = set(re.findall(r"`jetcapture (\w+)", table))
    helped = subprocess.run(
        [sys.executable, "-m", "jetcapture_py", "--help"], capture_output=True, text=True, check=True
    )
    assert jetcapture == set(re.findall(r"^  (\w+)  ", helped.stdout.split("Commands:")[1], re.MULTILINE))
    for module in re.findall(r"`python -m ([\w.]+)", README):
        arguments = [sys.executable, "-m", module, "--help"]
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
