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
from tests.support.running import Command, publish, rows, settings

ELSEWHERE = {"adlfs", "aiobotocore", "azure", "boto3", "botocore", "pandas", "pyspark", "s3fs"}
"""What Spark, S3 and Azure need."""
DECODER = """
import pandas as pd
import pyarrow as pa
from jetcapture_py import layout
from jetcapture_py.batch import Decoded

class Numbers:
    def decode(self, batch):
        texts = pd.Series(batch.column(layout.PAYLOAD).to_pylist())
        numbers = pa.array(pd.to_numeric(texts.str.decode("utf-8"), errors="coerce"))
        return Decoded(fields=pa.RecordBatch.from_pydict({"n": numbers}))
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
        loaded = modules(command)
    assert len(rows(tmp_path / "archive")) == 100
    assert "pyarrow" in loaded
    assert loaded & ELSEWHERE == set()


def test_a_decoder_of_the_users_own_may_use_pandas(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    url = nats_server().url
    asyncio.run(publish(url, [("orders.new", payload, None) for payload in (b"1", b"none", b"3")]))
    (tmp_path / "numbers_of.py").write_text(DECODER)
    configuration = settings(url, tmp_path / "archive", decode={"format": "numbers_of:Numbers"})
    with Command(tmp_path, configuration, environment={"PYTHONPATH": str(tmp_path)}) as command:
        assert command.start("--until-caught-up").wait() == 0, command.log
    # what pandas calls missing is null to pyarrow, if it knows the series for one
    assert [row["n"] for row in rows(tmp_path / "archive")] == [1.0, None, 3.0]
