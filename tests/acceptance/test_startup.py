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

ELSEWHERE = {"adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore", "fsspec", "pandas", "pyspark", "s3fs"}
"""What Spark, S3 and Azure need."""
WORKING = {"fsspec", "nats", "numpy", "prometheus_client", "pyarrow", "rich", "yaml"}
"""What commands need to work, and not to tell what they are; pydantic may be typer's."""
DECODER = """
import pandas as pd
import pyarrow as pa
from jetcapture_py import layout
from jetcapture_py.transform.batch import Decoded

class Numbers:
    def decode(self, batch):
        texts = pd.Series(batch.column(layout.PAYLOAD).to_pylist())
        numbers = pa.array(pd.to_numeric(texts.str.decode("utf-8"), errors="coerce"))
        return Decoded(fields=pa.RecordBatch.from_pydict({"n": numbers}))
"""
KEY = """
import aiohttp, fsspec
import pyarrow as pa

def key(batch, fields):
    return pa.array([aiohttp.ClientSession.__name__] * len(batch))
"""


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
    assert loaded & ELSEWHERE == set()
    assert proven & ELSEWHERE == {"fsspec"}


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


def test_code_of_the_users_own_may_use_what_was_left_out(server: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "key_of.py").write_text(KEY)
    configuration = settings(server.url, tmp_path / "archive", key="key_of:key")
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    assert {row["key"] for row in rows(tmp_path / "archive")} == {"ClientSession"}


def test_a_decoder_of_the_users_own_may_use_pandas(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    url = nats_server().url
    asyncio.run(publish(url, [("orders.new", payload, None) for payload in (b"1", b"none", b"3")]))
    (tmp_path / "numbers_of.py").write_text(DECODER)
    configuration = settings(url, tmp_path / "archive", decode={"format": "numbers_of:Numbers"})
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    # what pandas calls missing is null to pyarrow, if it knows the series for one
    assert [row["n"] for row in rows(tmp_path / "archive")] == [1.0, None, 3.0]
