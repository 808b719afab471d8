"""The code in the documents does what they say, as it stands there."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3  # type: ignore[import-untyped]
import duckdb
import pyarrow.parquet as pq
import pytest
import yaml
from moto.core.authorization import enable_iam_authentication
from moto.server import ThreadedMotoServer

from jetcapture_py.archive import layout
from jetcapture_py.cli import JOBS
from jetcapture_py.config.model import load
from jetcapture_py.manage.cases import load_cases
from jetcapture_py.manage.cases import run as run_cases
from jetcapture_py.reading.duckdb import VIEWS
from spark_jobs.datasource import NatsDataSource
from spark_jobs.datasource.combined import JetcaptureDataSource
from tests.support.archives import Archive, write_parquet
from tests.support.commands import check_jetcapture, jetcapture
from tests.support.documents import ARCHIVE, PAGES, REPOSITORY, SERVER, Block, blocks, commands, every, read, section
from tests.support.nats_server import NatsServer
from tests.support.running import (
    Command,
    capture_all,
    config,
    connection,
    objects,
    publish,
    publish_and_capture,
    rows,
    settings,
)
from tests.support.streams import Stored, read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Start = Callable[..., NatsServer]
PYTHON = {"docs/buckets.md": 2, "docs/first-capture.md": 1, "docs/query.md": 5, "docs/spark.md": 5, "docs/table.md": 1}
"""Blocks of Python by page; a test here or in test_table.py runs each."""
OTHERS = {".", "docker", "echo", "git", "helm", "kubectl", "nats-server", "python", "python3", "venv-pack"}
"""Programs of others that commands may call."""


@pytest.fixture
def server(nats_server: Start) -> NatsServer:
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


@pytest.mark.spark
def test_every_block_of_sql_counts_the_messages(
    server: NatsServer, archive: Path, spark: SparkSession, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(server.url, archive, key="{subject[1]}")))
    spark.dataSource.register(JetcaptureDataSource)
    for block in every("sql"):
        text = block.text.replace(SERVER, server.url).replace("/etc/jetcapture/config.yaml", str(config))
        text = text.replace(ARCHIVE, str(archive))
        if text.startswith("-- DuckDB\n"):
            assert sorted(duckdb.sql(text).fetchall()) == [("asia", 10), ("eu", 10), ("us", 10)], block
            continue
        assert text.startswith("-- Spark\n"), block
        try:
            *_, last = (spark.sql(statement).collect() for statement in text.split(";") if statement.strip())
            assert last == [(30,)], block
        finally:
            for view in ("live", "orders"):
                spark.catalog.dropTempView(view)


@pytest.mark.spark
def test_spark_reads_the_archive_alone_and_with_the_stream_as_one(
    server: NatsServer,
    archive: Path,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.safe_dump(settings(server.url, archive, key="{subject[1]}")))
    names: dict[str, Any] = {"spark": spark}
    exec(python("docs/spark.md", 0, archive), names)
    assert names["orders"].count() == 10
    assert re.search(r"\|\s*asia\|\s*10\|", capsys.readouterr().out)
    exec(python("docs/spark.md", 1, archive), names)
    assert names["last"].count() == 3
    exec(python("docs/spark.md", 2, archive).replace(SERVER, server.url), names)
    assert names["orders"].count() == 30
    spark.dataSource.register(JetcaptureDataSource)
    text = python("docs/spark.md", 3).replace("/etc/jetcapture/config.yaml", f"{tmp_path}/config.yaml")
    text = text.replace("/var/lib/spark/orders", f"{tmp_path}/checkpoint").replace('"orders"', '"of_page"')
    exec(text.replace("2024-05-01", "2020-05-01"), names)
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
    async def copied() -> list[Stored]:
        async with connection(server.url) as client:
            await client.jetstream().add_stream(name="COPY", subjects=["copy.>"])
        return await read_stream(server.url, "COPY")

    assert asyncio.run(copied()) == []
    snippet = python("docs/spark.md", 4).replace(SERVER, server.url)
    names: dict[str, Any] = {"spark": spark}
    spark.dataSource.register(NatsDataSource)
    exec(snippet.replace("/var/lib/spark/copy", str(tmp_path / "checkpoint")), names)
    try:
        assert names["live"].count() == 30
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    found = [(message.subject, message.payload) for message in asyncio.run(copied())]
    assert sorted(found) == sorted(("copy.orders.eu.new", b"%d" % index) for index in range(0, 30, 3))


@pytest.mark.spark
def test_the_page_on_buckets_reads_a_bucket_and_gives_files_back(
    nats_server: Start,
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
            await (await client.jetstream().create_object_store("files")).put("reports/2026.pdf", b"%PDF")

    asyncio.run(use())
    for setting in ("bucket", "object_store"):
        (chosen,) = [block for block in blocks("docs/buckets.md", "yaml") if f"{setting}:" in block.text]
        found = settings(server.url, archive) | yaml.safe_load(chosen.text.replace(ARCHIVE, str(archive)))
        with Command(tmp_path, found, setting).start("--until-caught-up") as command:
            assert command.wait() == 0, command.log
    monkeypatch.setattr("spark_jobs.job.session", lambda _: spark)
    exec(python("docs/buckets.md", 0, archive).replace("2026-05-01T12:00:00Z", "2200-01-01T00:00:00Z"), {})
    assert re.search(r"\|\s*1\|\s*put\|.*\n\|\s*2\|\s*delete\|", capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python("docs/buckets.md", 1, archive).replace("2026-05-01", "2200-01-01"), names)
    assert names["contents"] == (tmp_path / "old.pdf").read_bytes() == b"%PDF"
    assert capsys.readouterr().out.startswith("reports/2026.pdf 4 2")


def test_other_engines_read_each_message_once(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_page_of_queries_joins_two_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path)
    archive.write([1, 2, 3], order_id=[1, 2, 3], amount=[100, 200, 300])
    archive.write([1], stream="PAYMENTS", order_id=[2], paid_at=["2026-05-01"])
    exec(python("docs/query.md", 2, tmp_path), {})
    assert re.findall(r"\d+", capsys.readouterr().out.rsplit("─┤")[-1]) == ["1", "100", "3", "300"]
    (joined,) = [block for block in blocks("docs/query.md", "sh") if "SHOW TABLES" in block.text]
    words = [shlex.split(line.replace(ARCHIVE, str(tmp_path)))[1:] for line in commands(joined)]
    assert [jetcapture(*some, "--format", "csv").stdout.split() for some in words[:2]] == [
        ["schema,name", *(f"{name},{view}" for name in ("ORDERS", "PAYMENTS") for view in sorted(VIEWS))],
        ["order_id,amount", "1,100", "3,300"],
    ]


def test_the_page_of_queries_reads_the_newest_row_of_each_key(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Archive(tmp_path).write([1, 2, 3, 4], order_id=[1, 2, 1, 2], amount=[5, 6, 7, 0])
    exec(python("docs/query.md", 3, tmp_path), {})
    assert re.findall(r"\d+", capsys.readouterr().out) == ["0", "1", "7"]
    (recipes,) = [block for block in blocks("docs/query.md", "sh") if "Debezium" in block.text]
    envelope, flat, bucket, subject = [line for line in commands(recipes) if line.startswith("jetcapture")]
    deletion = [("KV-Operation", "DEL")]
    for name, recipe, messages, left in (
        (
            *("envelope", envelope),
            [
                ("db", b'{"op": "c", "before": null, "after": {"id": 1, "status": "new"}}', None),
                ("db", b'{"op": "c", "before": null, "after": {"id": 2, "status": "new"}}', None),
                (
                    "db",
                    b'{"op": "u", "before": {"id": 1, "status": "new"}, "after": {"id": 1, "status": "paid"}}',
                    None,
                ),
                ("db", b'{"op": "d", "before": {"id": 2, "status": "new"}, "after": null}', None),
                ("db", b"", None),
            ],
            {"id": "1", "status": "paid"},
        ),
        (
            *("flat", flat),
            [
                ("db", b'{"id": 1, "status": "new", "__deleted": "false"}', None),
                ("db", b'{"id": 2, "status": "new", "__deleted": "false"}', None),
                ("db", b'{"id": 1, "status": "new", "__deleted": "true"}', None),
            ],
            {"id": "2", "status": "new"},
        ),
        (
            *("bucket", bucket),
            [("a", b'{"n": 1}', None), ("b", b'{"n": 2}', None), ("a", b"", deletion), ("b", b'{"n": 3}', None)],
            {"n": "3"},
        ),
        ("subject", subject, [("a", b'{"n": 1}', None), ("b", b'{"n": 2}', None), ("a", b"", None)], {"n": "2"}),
    ):
        some = [(f"orders.{subject}", payload, headers) for subject, payload, headers in messages]
        config = nats_server()
        publish_and_capture(config.url, tmp_path / name, some, decode={"format": "json"})
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings(config.url, tmp_path / name)))
        done = jetcapture(*shlex.split(recipe.replace("config.yaml", str(file)))[1:], "--format", "csv")
        (row,) = csv.DictReader(done.stdout.splitlines())
        assert left.items() <= row.items(), name


def test_the_page_of_queries_reads_a_column_as_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Archive(tmp_path).write([1, 2], order_id=["42", "n/a"], amount=[1, 2])
    exec(python("docs/query.md", 4, tmp_path), {})
    assert capsys.readouterr().out == "int64 1\n"


def test_the_recipe_of_a_decoder_decodes_and_quarantines(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    sent = [("readings.hall.1", b"21.5;68", None), ("readings.roof.1", b"-3;90", None), ("readings.hall.1", b"?", None)]
    asyncio.run(publish(server.url, sent, subjects=("readings.>",)))
    (chosen,) = [block for block in blocks("docs/recipes.md", "yaml") if "readings:" in block.text]
    found = settings(server.url, archive, **yaml.safe_load(chosen.text))
    path = {"PYTHONPATH": str(REPOSITORY / "examples")}
    with Command(tmp_path, found, environment=path).start("--until-caught-up") as command:
        assert command.wait() == 0, command.log
    decoded = [(row["key"], row["temperature"], row["humidity"]) for row in rows(archive)]
    assert decoded == [("hall", 21.5, 68.0), ("roof", -3.0, 90.0)]
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


def lines_of(block: Block) -> list[str]:
    lines = commands(block)
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert lines, block
    return lines


def test_every_command_has_arguments_that_it_understands(tmp_path: Path) -> None:
    configuration = tmp_path / "config.yaml"
    (written,) = [line for line in commands(blocks("README.md", "sh")[0]) if line.startswith("echo ")]
    configuration.write_text(shlex.split(written)[1])
    load(configuration)
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
    there = re.findall(r"^  (\w+)  ", jetcapture("--help").stdout.split("Set up:")[1], re.MULTILINE)
    assert set(re.findall(r"`jetcapture (\w+)", table)) == set(there)
    for page in ("docs/operation.md", "docs/spark.md"):
        assert all(job in read(page) for job in JOBS)


def test_the_environment_of_the_documents_is_not_this_machines() -> None:
    home = os.environ.get("HOME", "/root")
    assert not [page for page in PAGES if re.search(rf"{re.escape(home)}/|/work/", read(page))]


PAGE = "docs/first-capture.md"
INSTALLED = ("python3 -m venv", ". .venv", "pip install", "nats-server")
"""Beginnings of commands for what a test has already: packages, and a server."""


def shape(text: str) -> str:
    return re.sub(r"[0-9][0-9,.:TZ-]*", "N", re.sub(r"-[0-9a-f]{16}\.", "-0.", text))


def shell(command: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PWD": str(home), **environment}
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def save_files(home: Path, url: str, store: str | None = None) -> None:
    """Save the page's files, with this server; `store` replaces the S3 bucket."""
    for block in blocks(PAGE):
        if block.file is not None:
            text = block.text.replace(SERVER, url)
            (home / block.file).write_text(text if store is None else text.replace("s3://example-archive/nats", store))


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The environment of a user of an S3 server, who may do what the page's policy allows, and nothing else."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    root = {"endpoint_url": endpoint, "aws_access_key_id": "root", "aws_secret_access_key": "root"}
    (policy,) = blocks(PAGE, "json")
    try:
        with contextlib.closing(boto3.client("s3", region_name="us-east-1", **root)) as client:
            client.create_bucket(Bucket="example-archive")
        with contextlib.closing(boto3.client("iam", region_name="us-east-1", **root)) as client:
            client.create_user(UserName="archive")
            client.put_user_policy(UserName="archive", PolicyName="archive", PolicyDocument=policy.text)
            key = client.create_access_key(UserName="archive")["AccessKey"]
        with enable_iam_authentication():
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                "AWS_DEFAULT_REGION": "us-east-1",
            }
    finally:
        server.stop()


def test_a_new_user_captures_queries_and_proves_a_stream(
    nats_server: Start, s3: dict[str, str], tmp_path: Path
) -> None:
    server = nats_server()
    save_files(tmp_path, server.url)
    printed: dict[str, str] = {}
    for block in blocks(PAGE):
        if block.language == "console":
            command, expected = block.text.removeprefix("$ ").split("\n", 1)
            done = shell(command, tmp_path, **s3)
            assert (done.returncode, shape(done.stdout)) == (0, shape(expected)), done.stderr
        elif block.language == "sh":
            for command in commands(block):
                if not command.startswith(INSTALLED):
                    done = shell(command, tmp_path, **s3)
                    assert done.returncode == 0, (done.stdout, done.stderr)
                    printed[command] = done.stdout
    checked = re.findall(r"^(\w+) +(\S+)", printed["jetcapture check config.yaml"], re.MULTILINE)
    notable = {(state, about) for state, about in checked if state != "ok"}
    assert notable == {("warning", "decode"), ("skipped", "versions")}  # moto lets everybody read the other settings
    assert "key=eu/" in printed["jetcapture objects config.yaml"]
    orders, quarantine = (text for command, text in printed.items() if " query " in command)
    assert re.search(r"us +334 +41791\.75", orders)
    assert "this is not JSON" in quarantine
    assert "<title>" in (tmp_path / "report.html").read_text()
    assert "1,001" in printed["jetcapture status config.yaml"]


def test_what_is_removed_is_repaired_as_the_readme_shows(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    save_files(tmp_path, server.url, str(tmp_path / "archive"))
    steps = ("python publish.py", "jetcapture run config.yaml --until-caught-up", "rm -r archive/ORDERS/key=us")
    assert [shell(command, tmp_path).returncode for command in steps] == [0, 0, 0]
    (screen,) = blocks("README.md", "console")
    for part in screen.text.removeprefix("$ ").split("\n$ "):
        command, printed = part.rstrip("\n").split("\n", 1)
        done = shell(command, tmp_path)
        assert done.returncode == (1 if printed.startswith("NOT complete") else 0), done.stderr
        assert shape(done.stdout).strip() == shape(printed)
