from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import nats
import pytest

from jetcapture_py.errors import JetcaptureError, SourceError
from spark_jobs.archive import read_archive
from spark_jobs.replay import main, replay, replayed_headers
from tests.spark.conftest import Archive
from tests.support.nats_server import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with a stream REPLAY over `replay.>`."""
    server = nats_server()

    async def create() -> None:
        nc = await nats.connect(server.url)
        await nc.jetstream().add_stream(name="REPLAY", subjects=["replay.>"])
        await nc.close()

    asyncio.run(create())
    return server


def stored(server: NatsServer) -> list[tuple[str, bytes, bytes]]:
    """Subject, header block and payload of every message in REPLAY."""

    async def read() -> list[tuple[str, bytes, bytes]]:
        nc = await nats.connect(server.url)
        last = (await nc.jetstream().stream_info("REPLAY")).state.last_seq
        found = []
        for seq in range(1, last + 1):
            answer: dict[str, Any] = json.loads(
                (await nc.request("$JS.API.STREAM.MSG.GET.REPLAY", json.dumps({"seq": seq}).encode())).data
            )
            message = answer["message"]
            parts = (base64.b64decode(message.get(part, "")) for part in ("hdrs", "data"))
            found.append((message["subject"], *parts))
        await nc.close()
        return found

    return asyncio.run(read())


@pytest.fixture
def orders(spark: SparkSession, archive: Archive) -> DataFrame:
    archive.write(
        [1, 2, 3],
        "eu",
        headers=[[("A", ["1", "2"]), ("Nats-Msg-Id", ["old"]), ("B", [""])], None, [("Nats-TTL", ["1s"])]],
        payloads=[bytes(range(256)), b"", b"\r\n"],
        amount=[1, 2, 3],
    )
    return read_archive(spark, archive.url, "ORDERS")


def test_archived_messages_are_published_as_they_were(orders: DataFrame, server: NatsServer) -> None:
    done = replay(orders, server.url, "replay.{key}.{subject}", replay_id="r1")
    assert (done.published, done.duplicates, done.replay_id) == (3, 0, "r1")
    assert stored(server) == [
        (
            "replay.eu.orders.new",
            b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: \r\nNats-Msg-Id: ORDERS:1:r1\r\n\r\n",
            bytes(range(256)),
        ),
        ("replay.eu.orders.new", b"NATS/1.0\r\nNats-Msg-Id: ORDERS:2:r1\r\n\r\n", b""),
        ("replay.eu.orders.new", b"NATS/1.0\r\nNats-Msg-Id: ORDERS:3:r1\r\n\r\n", b"\r\n"),
    ]


def test_a_replay_under_the_same_id_stores_nothing_twice(orders: DataFrame, server: NatsServer) -> None:
    replay(orders, server.url, "replay.a", replay_id="r1")
    again = replay(orders, server.url, "replay.a", replay_id="r1")
    other = replay(orders, server.url, "replay.a")
    assert (again.published, again.duplicates) == (3, 3)
    assert (other.published, other.duplicates) == (3, 0)
    assert len(stored(server)) == 6


def test_rows_of_an_aggregate_are_published_as_json(spark: SparkSession, orders: DataFrame, server: NatsServer) -> None:
    result = spark.sql("SELECT key, sum(amount) AS total, NULL AS nothing FROM {orders} GROUP BY key", orders=orders)
    assert replay(result, [server.url], "replay.totals.{key}").published == 1
    ((subject, headers, payload),) = stored(server)
    assert (subject, headers) == ("replay.totals.eu", b"")
    assert json.loads(payload) == {"key": "eu", "total": 6, "nothing": None}


def test_a_column_can_be_the_payload(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.sql("SELECT 'x' AS payload, named_struct('a', 1) AS s, 7 AS n")
    replay(frame, server.url, "replay.a")
    replay(frame, server.url, "replay.a", payload="s")
    replay(frame, server.url, "replay.a", payload="n")
    assert [payload for _, _, payload in stored(server)] == [b"x", b'{"a":1}', b"7"]
    with pytest.raises(JetcaptureError, match="no column missing"):
        replay(frame, server.url, "replay.a", payload="missing")


def test_rows_of_one_message_have_ids_of_their_own(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.sql("SELECT 'S' AS _nats_stream, 1L AS _nats_seq, explode(array(0, 1)) AS _nats_row, 'x' AS text")
    assert replay(frame, server.url, "replay.a", replay_id="r").duplicates == 0
    assert [headers for _, headers, _ in stored(server)] == [
        b"NATS/1.0\r\nNats-Msg-Id: S:1:r:0\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Id: S:1:r:1\r\n\r\n",
    ]


def test_many_rows_from_several_partitions_are_all_published(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.range(50_000, numPartitions=4)
    assert replay(frame, server.url, "replay.{id}").published == 50_000
    empty = spark.range(0)
    assert replay(empty, server.url, "replay.{id}").published == 0


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("replay.*", "wildcard"),
        ("replay.>", "wildcard"),
        ("replay..a", "invalid subject"),
        ("replay a", "invalid subject"),
        ("", "invalid subject"),
        ("$JS.API.STREAM.DELETE.REPLAY", "belongs to the server"),
        ("replay.{missing}", "there is no column missing"),
    ],
)
def test_a_wrong_subject_is_refused_before_anything_is_published(
    spark: SparkSession, subject: str, message: str
) -> None:
    with pytest.raises(JetcaptureError, match=message):
        replay(spark.range(1), "nats://127.0.0.1:1", subject)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("'a b'", r"invalid subject 'replay\.a b'"),
        ("'*'", "wildcard"),
        ("''", "invalid subject"),
        ("NULL", "has no subject"),
    ],
)
def test_data_cannot_make_a_wrong_subject(spark: SparkSession, server: NatsServer, value: str, message: str) -> None:
    frame = spark.sql(f"SELECT CAST({value} AS string) AS region")
    with pytest.raises(SourceError, match=message):
        replay(frame, server.url, "replay.{region}")
    assert stored(server) == []


def test_data_cannot_name_an_api_call(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.sql("SELECT '$JS.API.STREAM.DELETE.REPLAY' AS region")
    with pytest.raises(SourceError, match="belongs to the server"):
        replay(frame, server.url, "{region}")
    assert stored(server) == []


def test_a_subject_that_no_stream_listens_on_is_one_clear_error(spark: SparkSession, server: NatsServer) -> None:
    with pytest.raises(SourceError, match=r"message for nowhere\.0 was refused: no stream listens on it; replay id r9"):
        replay(spark.range(1), server.url, "nowhere.{id}", replay_id="r9")


def test_an_unreachable_server_is_one_clear_error_without_its_password(spark: SparkSession) -> None:
    with pytest.raises(SourceError, match=r"cannot connect to 127\.0\.0\.1:1: ") as raised:
        replay(spark.range(1), "nats://me:secret@127.0.0.1:1", "a.b", connect={"max_reconnect_attempts": 1})
    assert "secret" not in str(raised.value)


def test_headers_that_instruct_a_server_are_dropped() -> None:
    dropped = ["Nats-Msg-Id", "Nats-TTL", "nats-ttl", "Nats-Expected-Stream", "Nats-Expected-Last-Subject-Sequence"]
    dropped += ["Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"]
    kept = ["Nats-Msg-Id-Original", "Nats-Rollup", "Traceparent"]
    assert replayed_headers([(name, ["x"]) for name in dropped + kept]) == [(name, "x") for name in kept]


def test_the_command_replays_an_archive_and_says_so(
    orders: DataFrame, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{key}", "--replay-id", "r1"]
    assert main(arguments) == 0
    assert main([*arguments, "--sql", "SELECT * FROM archive WHERE amount = 2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "replayed 3 messages; replay id r1",
        "replayed 1 messages, 1 of them known to the stream already; replay id r1",
    ]
    assert main([*arguments, "--sql", "SELECT amuont FROM archive"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("replay: ")
    assert error.count("\n") == 1
