"""A capture loads what it needs, and no more."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.startup import modules
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.running import Command, publish, rows, settings

ELSEWHERE = {"adlfs", "aiobotocore", "azure", "boto3", "botocore", "fsspec", "pyspark", "s3fs"}
"""What Spark, S3 and Azure need."""
WORKING = {"fsspec", "nats", "numpy", "prometheus_client", "pyarrow", "rich", "yaml"}
"""What commands need to work, and not to tell what they are; pydantic may be typer's."""


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with 100 messages."""
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.new", b'{"n":%d}' % number, None) for number in range(100)]))
    return server


@pytest.mark.parametrize(
    "decode", [{"format": "raw"}, {"format": "json"}, {"format": "json", "columns": {"n": "int64"}}]
)
def test_a_local_run_loads_nothing_of_spark_or_of_object_storage(
    decode: dict[str, Any], server: NatsServer, tmp_path: Path
) -> None:
    assert all(importlib.util.find_spec(name) for name in ELSEWHERE), "only what is installed can be loaded in vain"
    with Command(tmp_path, settings(server.url, tmp_path / "archive", decode=decode)) as command:
        loaded = modules("run", str(command.path), "--until-caught-up")
        assert len(rows(tmp_path / "archive")) == 100
        proven = modules("verify", str(command.path))
    assert "pyarrow" in loaded & proven
    assert (loaded | proven) & ELSEWHERE == set()


def test_help_loads_nothing_of_what_it_tells_about() -> None:
    for command in ([], ["run"], ["verify"], ["spark"]):
        assert modules(*command, "--help") & (WORKING | ELSEWHERE) == set()


def test_a_websocket_is_still_one(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    port = free_port()
    server = nats_server(f"websocket {{ host: 127.0.0.1, port: {port}, no_tls: true }}")
    asyncio.run(publish(server.url, [("orders.new", b"{}", None) for _ in range(100)]))
    with Command(tmp_path, settings(f"ws://127.0.0.1:{port}", tmp_path / "archive")) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    assert len(rows(tmp_path / "archive")) == 100


def test_a_websocket_without_its_extra_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'aiohttp' else find(name, *rest)\n"
    )
    configuration = settings("ws://127.0.0.1:1", tmp_path / "archive")
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start().wait() == 2
        assert "ws:// and wss:// need aiohttp: pip install 'jetcapture[websocket]'" in command.log


def test_another_nats_py_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "nats_py-2.17.0.dist-info").mkdir()
    (tmp_path / "nats_py-2.17.0.dist-info" / "METADATA").write_text("Name: nats-py\nVersion: 2.17.0\n")
    configuration = settings("nats://127.0.0.1:1", tmp_path / "archive")
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start().wait() == 2
        assert "nats-py 2.17.0 is not supported: pip install 'nats-py[nkeys]>=2.15,<2.17'" in command.log
