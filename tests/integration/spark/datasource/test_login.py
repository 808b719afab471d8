"""The data source logs in by every way that NATS knows, in the driver and in its tasks, to read and to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.jetstream.connection import connect
from spark_jobs.publishing.login import nats_config
from tests.integration.spark.live import message
from tests.support.credentials import certificate
from tests.support.nats_server import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Start = Callable[..., NatsServer]


def round_trip(spark: SparkSession, login: dict[str, str]) -> None:
    """Create a stream, write to it and read it, by the same login."""

    async def create() -> None:
        client = await connect(nats_config(login), "test", timeout=20)
        await client.jetstream().add_stream(name="ORDERS", subjects=["orders.>"])
        await client.close()

    asyncio.run(create())
    written = spark.sql("SELECT 'orders.a' AS subject, 'hello' AS payload")
    written.write.format("nats").options(**login).mode("append").save()
    read = spark.read.format("nats").options(**login, stream="ORDERS").load()
    assert [(row["_nats_subject"], bytes(row["_nats_payload"])) for row in read.collect()] == [("orders.a", b"hello")]


def refused(spark: SparkSession, login: dict[str, str]) -> str:
    """What is said when it is the wrong login."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  Spark has several kinds
        spark.read.format("nats").options(**login, stream="ORDERS", timeout="1s").load().collect()
    for secret in ("password", "token", "nkey_seed"):
        assert login.get(secret, "hidden") not in str(raised.value)
    return message(raised.value)


def test_a_client_certificate_over_tls(spark: SparkSession, nats_server: Start, tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "client"):
        certificate(tmp_path, name, authority)
    server = nats_server(
        f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem", '
        f'ca_file: "{tmp_path}/ca.pem", verify_and_map: true }}\nauthorization {{ users: [ {{ user: "CN=client" }} ] }}'
    )
    anonymous = {"servers": server.url.replace("nats://", "tls://"), "tls_ca": str(tmp_path / "ca.pem")}
    pair = {"tls_cert": str(tmp_path / "client.pem"), "tls_key": str(tmp_path / "client-key.pem")}
    round_trip(spark, {**anonymous, **pair})
    assert "NATS" in refused(spark, anonymous)
