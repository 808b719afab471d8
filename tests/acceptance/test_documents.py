"""The code in the documents does what they say, as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow.parquet as pq
import pytest
import yaml

from jetcapture_py.archive import layout
from jetcapture_py.cli import JOBS
from jetcapture_py.config.model import load
from jetcapture_py.manage.cases import load_cases
from jetcapture_py.manage.cases import run as run_cases
from spark_jobs.datasource import NatsDataSource
from spark_jobs.datasource.combined import JetcaptureDataSource
from tests.support.archives import write_parquet
from tests.support.commands import check_jetcapture
from tests.support.documents import ARCHIVE, PAGES, REPOSITORY, SERVER, Block, blocks, commands, every, read, section
from tests.support.nats_server import NatsServer
from tests.support.running import Command, capture_all, config, connection, objects, publish, rows, settings
from tests.support.streams import read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYTHON = {
    "docs/buckets.md": 2,
    "docs/first-capture.md": 1,
    "docs/query.md": 3,
    "docs/spark.md": 4,
    "docs/table.md": 1,
}
"""Blocks of Python by page; a test here, in test_first_capture.py or in test_table.py runs each."""
OTHERS = {
    ".",
    "docker",
    "echo",
    "git",
    "helm",
    "kubectl",
    "nats-server",
    "python",
    "python3",
    "venv-pack",
}
"""Programs of others that commands may call."""


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


def run(path: Path, *arguments: object, cwd: Path) -> str:
    """Run a program; what it prints."""
    words = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(page: str, index: int, archive: Path | None = None) -> str:
    """A block of Python, with the archive where it is here."""
    text = blocks(page, "python")[index].text
    return text if archive is None else text.replace(ARCHIVE, str(archive))


def test_every_block_of_python_is_run_by_a_test() -> None:
    assert {page: count for page in PAGES if (count := len(blocks(page, "python")))} == PYTHON


@pytest.mark.parametrize("block", [block for block in every("sql") if block.text.startswith("-- DuckDB\n")], ids=str)
def test_duckdb_counts_the_messages_of_each_key(block: Block, archive: Path) -> None:
    assert ARCHIVE in block.text
    found = duckdb.sql(block.text.replace(ARCHIVE, str(archive))).fetchall()
    assert sorted(found) == [("asia", 10), ("eu", 10), ("us", 10)]


@pytest.mark.spark
@pytest.mark.parametrize(
    "block",
    [block for block in every("sql") if not block.text.startswith("-- DuckDB\n")],
    ids=str,
)
def test_spark_understands_its_sql(
    block: Block, server: NatsServer, archive: Path, spark: SparkSession, tmp_path: Path
) -> None:
    assert block.text.startswith("-- Spark\n")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(server.url, archive, key="{subject[1]}")))
    spark.dataSource.register(JetcaptureDataSource)
    try:
        text = block.text.replace(SERVER, server.url).replace(ARCHIVE, str(archive))
        text = text.replace("/etc/jetcapture/config.yaml", str(config))
        statements = [statement for statement in text.split(";") if statement.strip()]
        results = [spark.sql(statement).collect() for statement in statements]
        assert results[-1] == [(30,)]
    finally:
        for view in ("live", "orders"):
            spark.catalog.dropTempView(view)


@pytest.mark.spark
def test_the_page_on_spark_reads_the_archive(
    archive: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    names: dict[str, Any] = {}
    exec(python("docs/spark.md", 0, archive), names)
    assert names["orders"].count() == 10
    assert re.search(r"\|\s*asia\|\s*10\|", capsys.readouterr().out)


@pytest.mark.spark
def test_the_page_on_spark_reads_archive_and_stream_as_one(
    server: NatsServer, archive: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.safe_dump(settings(server.url, archive, key="{subject[1]}")))
    names: dict[str, Any] = {}
    for line in python("docs/spark.md", 1, archive).replace(SERVER, server.url).splitlines():
        exec(line, names)
        if line.startswith("orders ="):
            assert names["orders"].count() == 30
    spark.dataSource.register(JetcaptureDataSource)
    text = python("docs/spark.md", 2)
    for shown, here in (
        ("/etc/jetcapture/config.yaml", str(tmp_path / "config.yaml")),
        ("2024-05-01", "2020-05-01"),
        ("/var/lib/spark/orders", str(tmp_path / "checkpoint")),
        ('"orders"', '"of_page"'),
    ):
        assert shown in text
        text = text.replace(shown, here)
    exec(text, names)
    try:
        names["query"].processAllAvailable()
        assert spark.table("of_page").count() == 30
    finally:
        names["query"].stop()
        spark.sql("DROP TABLE IF EXISTS of_page")


@pytest.mark.spark
@pytest.mark.exhaustive
def test_the_page_on_spark_reads_and_writes_a_stream_live(
    server: NatsServer, spark: SparkSession, tmp_path: Path
) -> None:
    async def create() -> None:
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name="COPY", subjects=["copy.>"])

    asyncio.run(create())
    snippet = python("docs/spark.md", 3).replace(SERVER, server.url)
    names: dict[str, Any] = {"spark": spark}
    spark.dataSource.register(NatsDataSource)
    exec(snippet.replace("/var/lib/spark/copy", str(tmp_path / "checkpoint")), names)
    try:
        assert names["live"].count() == 30
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    copied = asyncio.run(read_stream(server.url, "COPY"))
    assert sorted(message.payload for message in copied) == sorted(b"%d" % index for index in range(0, 30, 3))
    assert {message.subject for message in copied} == {"copy.orders.eu.new"}


@pytest.mark.spark
def test_the_page_on_buckets_reads_a_bucket(
    nats_server: Callable[..., NatsServer],
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, archive = nats_server(), tmp_path / "archive"

    async def use() -> None:
        async with connection(server.url) as client:
            bucket = await client.jetstream().create_key_value(bucket="settings", history=5)
            await bucket.put("auth.user", b"ada")
            await bucket.delete("auth.user")

    asyncio.run(use())
    capture_bucket("bucket", server, archive, tmp_path)
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    exec(python("docs/buckets.md", 0, archive).replace("2026-05-01T12:00:00Z", "2200-01-01T00:00:00Z"), {})
    printed = capsys.readouterr().out
    assert re.search(r"\|\s*1\|\s*put\|.*\n\|\s*2\|\s*delete\|", printed)


def test_the_page_on_buckets_gives_files_back(
    nats_server: Callable[..., NatsServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, archive = nats_server(), tmp_path / "archive"

    async def use() -> None:
        async with connection(server.url) as client:
            await (await client.jetstream().create_object_store("files")).put("reports/2026.pdf", b"%PDF")

    asyncio.run(use())
    capture_bucket("object_store", server, archive, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python("docs/buckets.md", 1, archive).replace("2026-05-01", "2200-01-01"), names)
    assert names["contents"] == (tmp_path / "old.pdf").read_bytes() == b"%PDF"
    assert capsys.readouterr().out.startswith("reports/2026.pdf 4 2")


def capture_bucket(setting: str, server: NatsServer, archive: Path, tmp_path: Path) -> None:
    """Capture with the page's configuration for a bucket or an object store."""
    (chosen,) = [block for block in blocks("docs/buckets.md", "yaml") if f"{setting}:" in block.text]
    found = settings(server.url, archive) | yaml.safe_load(chosen.text.replace(ARCHIVE, str(archive)))
    with Command(tmp_path, found).start("--until-caught-up") as command:
        assert command.wait() == 0, command.log


def test_the_page_of_queries_reads_each_message_once_with_other_engines(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = next(name for name in objects(archive) if name.key == "eu")
    half = pq.ParquetFile(archive / whole.path).read().slice(0, 5)
    last = half.column(layout.SEQ)[-1].as_py()
    write_parquet(half, archive / replace(whole, rows=5, last_seq=last, digest="0" * 16).path)
    for index, expected in (
        (0, r"asia\W+10\W+eu\W+10\W+us\W+10\b"),
        (1, r"eu\W+10\W+us\W+10\b"),
    ):
        exec(python("docs/query.md", index, archive).replace("2026-05-01", "2000-01-01"), {})
        assert re.search(expected, capsys.readouterr().out), index


def test_the_page_of_queries_joins_two_streams(
    nats_server: Callable[..., NatsServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    sent = {
        "ORDERS": [b'{"order_id": %d, "amount": %d}' % (order, order * 100) for order in (1, 2, 3)],
        "PAYMENTS": [b'{"order_id": 2, "paid_at": "2026-05-01"}'],
    }

    async def capture_both() -> None:
        async with connection(server.url) as client:
            for stream, payloads in sent.items():
                await client.jetstream().add_stream(name=stream, subjects=[stream.lower()])
                for payload in payloads:
                    await client.jetstream().publish(stream.lower(), payload)
        for stream in sent:
            source = {"stream": stream, "consumer": "archive"}
            await capture_all(config(server.url, tmp_path, source=source, decode={"format": "json"}))

    asyncio.run(capture_both())
    exec(python("docs/query.md", 2, tmp_path), {})
    assert re.findall(r"\d+", capsys.readouterr().out.rsplit("─┤")[-1]) == ["1", "100", "3", "300"]


def test_the_recipe_of_a_decoder_decodes_and_quarantines(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    sent = [("readings.hall.1", b"21.5;68", None), ("readings.roof.1", b"-3;90", None), ("readings.hall.1", b"?", None)]
    asyncio.run(publish(server.url, sent, subjects=("readings.>",)))
    (chosen,) = [block for block in blocks("docs/recipes.md", "yaml") if "readings:" in block.text]
    found = settings(server.url, archive, **yaml.safe_load(chosen.text))
    path = {"PYTHONPATH": str(REPOSITORY / "examples")}
    with Command(tmp_path, found, environment=path).start("--until-caught-up") as command:
        assert command.wait() == 0, command.log
    assert [(row["key"], row["temperature"], row["humidity"]) for row in rows(archive)] == [
        ("hall", 21.5, 68.0),
        ("roof", -3.0, 90.0),
    ]
    assert len(rows(archive, quarantine=True)) == 1


def test_the_reader_of_the_archives_format_counts_messages_once_and_finds_damage(archive: Path, tmp_path: Path) -> None:
    reader = REPOSITORY / "examples" / "reader.py"
    assert run(reader, archive, "ORDERS", cwd=tmp_path) == "30\n"
    first, *_ = sorted(archive.glob("ORDERS/**/*.parquet"))
    data = bytearray(first.read_bytes())
    data[10] ^= 1
    first.write_bytes(data)
    words = [sys.executable, str(reader), str(archive), "ORDERS"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert "the object is damaged" in done.stderr


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A configuration for commands that only read it."""
    path = tmp_path / "config.yaml"
    (written,) = [line for line in commands(blocks("README.md", "sh")[0]) if line.startswith("echo ")]
    path.write_text(shlex.split(written)[1])
    load(path)
    return path


def lines_of(block: Block) -> list[str]:
    """The commands of a block, as for a shell."""
    lines = commands(block)
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert lines, block
    return lines


def test_every_command_has_arguments_that_it_understands(configuration: Path) -> None:
    asked = [*every("sh"), *every("console")]
    assert len(asked) > 30
    for line in {line: None for block in asked for line in lines_of(block)}:
        words = shlex.split(line, comments=True)
        words = [str(configuration) if word.endswith("config.yaml") else word for word in words]
        words = words[: words.index("|")] if "|" in words else words
        program = words[0].rpartition("/")[2]
        if program == "jetcapture":
            check_jetcapture(words[1:])
        elif program == "make":
            assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        elif program == "pip":
            extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\w+", words[2])) - {"jetcapture"} <= extras.keys()
        else:
            assert program in OTHERS, line
            assert all((REPOSITORY / word).exists() for word in words if word.startswith("examples/"))


def test_the_cases_of_the_page_pass_for_its_configuration(tmp_path: Path) -> None:
    _, configuration, cases = blocks("docs/jetstream.md", "yaml")
    (tmp_path / "config.yaml").write_text(configuration.text)
    assert cases.file == "cases.yaml"
    (tmp_path / "cases.yaml").write_text(cases.text)
    assert load_cases(tmp_path / "cases.yaml")
    assert run_cases(load(tmp_path / "config.yaml"), tmp_path / "cases.yaml").code == 0


def test_the_commands_of_the_table_are_those_there_are() -> None:
    table = section("docs/operation.md", "Commands")
    helped = subprocess.run(
        [sys.executable, "-m", "jetcapture_py", "--help"], capture_output=True, text=True, check=True
    )
    there = set(re.findall(r"^  (\w+)  ", helped.stdout.split("Set up:")[1], re.MULTILINE))
    assert set(re.findall(r"`jetcapture (\w+)", table)) == there
    for page in ("docs/operation.md", "docs/spark.md"):
        assert all(job in read(page) for job in JOBS)


@pytest.mark.exhaustive
def test_every_benchmark_and_every_fault_has_the_options_that_the_documents_name() -> None:
    text = "\n".join(map(read, PAGES))
    asked: dict[str, set[str]] = {"benchmarks.compare": set(), "tests.chaos": set()}
    for module in re.findall(r"`python -m (benchmarks[\w.]+)", text):
        asked.setdefault(module, set())
    for target, arguments in re.findall(r'make (bench|chaos)[^"`\n]*ARGS="([^"]+)"', text):
        asked["benchmarks.compare" if target == "bench" else "tests.chaos"] |= set(re.findall(r"--[\w-]+", arguments))
    for module, options in asked.items():
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False, cwd=REPOSITORY
        )
        assert done.returncode == 0, module
        assert options <= set(re.findall(r"--[\w-]+", done.stdout)), module


def test_the_environment_of_the_documents_is_not_this_machines() -> None:
    home = os.environ.get("HOME", "/root")
    assert not [page for page in PAGES if re.search(rf"{re.escape(home)}/|/work/", read(page))]
