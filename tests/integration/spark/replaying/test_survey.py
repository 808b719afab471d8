"""What a replay looks at before it publishes, as `query --to-nats` does."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.errors import SourceError
from spark_jobs import query
from spark_jobs.archive import read_archive
from spark_jobs.replay import main, replay
from tests.integration.spark.conftest import Archive
from tests.support.archives import HOUR
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, ask, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

Start = Callable[..., NatsServer]
Said = pytest.CaptureFixture[str]


@pytest.fixture
def server(nats_server: Start) -> NatsServer:
    """A server with a stream REPLAY over `replay.>`."""
    server = nats_server()
    add_stream(server.url)
    return server


def last_seq(server: NatsServer, stream: str = "REPLAY") -> int:
    return int(ask(server.url, f"STREAM.INFO.{stream}")["state"]["last_seq"])


@pytest.fixture
def without_region(archive: Archive) -> Archive:
    """A thousand messages, the last of which has no region."""
    archive.write(list(range(1, 1001)), region=["eu"] * 999 + [None])
    return archive


def test_erased_messages_that_are_still_in_an_object_are_not_published(
    archive: Archive, server: NatsServer, capsys: Said
) -> None:
    archive.write([*range(1, 11)], region=["eu"] * 10)
    at = datetime.fromtimestamp(HOUR, UTC)
    bury(archive.root, [{"_nats_seq": seq, "_nats_timestamp": at.replace(microsecond=seq)} for seq in (3, 4, 9)])
    assert main([archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{region}"]) == 0
    assert capsys.readouterr().out.startswith("replayed 7 messages in ")
    assert last_seq(server) == 7


def test_a_message_without_a_subject_stops_a_replay_before_anything_is_published(
    without_region: Archive, server: NatsServer, capsys: Said
) -> None:
    arguments = [without_region.url, "ORDERS", "--servers", server.url, "--subject", "replay.{region}"]
    assert main(arguments) == 1
    expected = "replay: a row has no subject: region is null in message 1000 of stream ORDERS; nothing was published"
    assert capsys.readouterr().err.splitlines()[-1] == expected
    assert last_seq(server) == 0


def test_rows_of_a_query_are_looked_at_alike(without_region: Archive, server: NatsServer, capsys: Said) -> None:
    sql = "SELECT region, count(*) AS n FROM archive GROUP BY region ORDER BY region DESC"
    arguments = [without_region.url, "ORDERS", sql, "--servers", server.url, "--to-nats", "replay.{region}"]
    assert query.main(arguments) == 1
    assert capsys.readouterr().err == (
        'query: a row has no subject: region is null in {"region":null,"n":1}; nothing was published\n'
    )
    assert last_seq(server) == 0
    for wrong, why in (
        ("a b", "expected tokens without white space"),
        ("*", "a message cannot be published to a wildcard"),
    ):
        sql = f"SELECT explode(array('eu', '{wrong}')) AS region"
        assert query.main([without_region.url, "ORDERS", sql, *arguments[3:]]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"query: invalid subject 'replay.{wrong}': {why}")
        assert error.endswith(f' in {{"region":"{wrong}"}}; nothing was published\n')
        assert last_seq(server) == 0


def test_without_the_survey_the_task_names_row_and_column(
    without_region: Archive, server: NatsServer, capsys: Said
) -> None:
    arguments = [without_region.url, "ORDERS", "--servers", server.url, "--no-survey"]
    assert main([*arguments, "--subject", "replay.{region}"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    text = "replay: a row has no subject: region is null in message 1000 of stream ORDERS; nothing was published"
    assert error == text  # messages are sorted before the first is published
    sql = "SELECT CAST(NULL AS string) AS a, 7 AS n"
    where = ["--servers", server.url, "--to-nats", "replay.{a}", "--no-survey"]
    assert query.main([without_region.url, "ORDERS", sql, *where]) == 1
    assert capsys.readouterr().err.startswith('query: a row has no subject: a is null in {"a":null,"n":7}')


def test_every_part_of_a_subject_that_is_null_is_named(spark: SparkSession, server: NatsServer) -> None:
    sql = "SELECT map('A', array('x')) AS _nats_headers, 'orders.new' AS _nats_subject, CAST(NULL AS int) AS n, 1 AS b"
    for template, part in (
        ("replay.{header.B}", "header.B"),
        ("replay.{subject[2]}", "subject[2]"),
        ("replay.{subject}.{n}", "n"),
    ):
        with pytest.raises(SourceError, match=re.escape(f"a row has no subject: {part} is null in ")):
            replay(spark.sql(sql), server.url, template)
    assert last_seq(server) == 0


def test_no_survey_does_not_allow_a_loop(archive: Archive, server: NatsServer, capsys: Said) -> None:
    created = ask(server.url, "STREAM.INFO.REPLAY")["created"]
    archive.write([1], created=created)
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{key}", "--no-survey"]
    assert main(arguments) == 1
    assert "would archive its own messages again" in capsys.readouterr().err
    assert last_seq(server) == 0


def test_a_stream_that_would_store_nothing_is_warned_of(archive: Archive, nats_server: Start, capsys: Said) -> None:
    server = nats_server()
    add_stream(server.url, retention="interest")
    archive.write([1])
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{key}"]
    said = "stream REPLAY would store nothing: it has interest retention and no consumer"
    assert main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"warning: {said}"
    assert main(arguments) == 0
    assert f"replay: {said}" in capsys.readouterr().err.splitlines()


def test_the_archives_columns_are_found_in_any_case(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    archive.write([1], payloads=[b"\xff"], Region=["eu"])
    columns = "_NATS_STREAM, _NATS_SEQ, _NATS_TIMESTAMP, _NATS_SUBJECT, _NATS_PAYLOAD"
    frame = read_archive(spark, archive.url, "ORDERS").selectExpr(*columns.split(", "), "Region")
    replay(frame, server.url, "replay.{subject}.{region}", replay_id="r")
    replay(frame.selectExpr("Region AS PAYLOAD", "1 AS n"), server.url, "replay.a")
    replay(frame.select("Region"), server.url, "replay.a", payload="REGION")
    first, *others = stored(server.url)
    assert (first.subject, first.payload) == ("replay.orders.new.eu", b"\xff")
    assert first.header("Nats-Msg-Id") == "ORDERS:1:r"
    assert [message.payload for message in others] == [b"eu", b"eu"]
