from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError, SourceError
from spark_jobs.archive import read_archive
from spark_jobs.publishing.login import login_at
from spark_jobs.publishing.prepare import Archived
from spark_jobs.replay import main, replay, selected
from spark_jobs.replaying.origin import origin_of
from spark_jobs.replaying.preview import is_recreated
from spark_jobs.replaying.source import Source
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.nats_server import NatsServer
from tests.support.replays import Kept, add_stream, stored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with a stream REPLAY over `replay.>`."""
    server = nats_server()
    add_stream(server.url)
    return server


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


def prepared(source: Source) -> Archived:
    return Archived(rows=source.rows, replay_id="r", recreated=True, apart=False, kept=(), targets=None, before=True)


def provenance(seq: int, replay_id: str, stream: str = "ORDERS", mark: str = "") -> bytes:
    """The lines that a replay adds to message `seq` of the archive."""
    return (
        f"Jetcapture-Stream: {stream}\r\nJetcapture-Sequence: {seq}\r\n"
        f"Jetcapture-Timestamp: 2026-05-01T12:00:00.{seq:06}Z\r\nJetcapture-Replay: {replay_id}\r\n"
        f"Nats-Msg-Id: {stream}:{seq}:{replay_id}{mark}\r\n\r\n"
    ).encode()


def test_archived_messages_are_published_as_they_were(orders: DataFrame, server: NatsServer) -> None:
    done = replay(orders, server.url, "replay.{key}.{subject}", replay_id="r1")
    assert (done.published, done.duplicates, done.skipped, done.replay_id) == (3, 0, 0, "r1")
    assert stored(server.url) == [
        Kept(
            "replay.eu.orders.new",
            b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: \r\n" + provenance(1, "r1"),
            bytes(range(256)),
        ),
        Kept("replay.eu.orders.new", b"NATS/1.0\r\n" + provenance(2, "r1"), b""),
        Kept("replay.eu.orders.new", b"NATS/1.0\r\n" + provenance(3, "r1"), b"\r\n"),
    ]


def test_the_subject_is_kept_by_default(orders: DataFrame, server: NatsServer) -> None:
    add_stream(server.url, "ORDERS", "orders.>")
    replay(orders, server.url)
    assert [message.subject for message in stored(server.url, "ORDERS")] == ["orders.new"] * 3


def test_hostile_headers_come_back_as_they_were(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    hostile: list[tuple[str, list[str]]] = [
        ("a b", ["lone\nline feed", "lone\rreturn", "nul\0", " "]),
        ("Ünïcode\t", ["値: a:b", ""]),
        ("nats-msg-id", ["out"]),
        ("Nats-Expected-Last-Sequence", ["7"]),
        ("Nats-Batch-Id", ["out"]),
        ("Nats-Schedule", ["@at 2026-01-01T00:00:00Z"]),
        ("Nats-Msg-Id-Like", ["kept"]),
        ("Jetcapture-Replay", ["earlier"]),
        ("Jetcapture-Sequence", ["99"]),
        ("Repeated", ["3", "1", "2", "1"]),
    ]
    archive.write([1, 2], headers=[hostile, []])
    replay(read_archive(spark, archive.url, "ORDERS"), server.url, "replay.a", replay_id="r")
    one, two = stored(server.url)
    expected = (
        "a b: lone\nline feed\r\na b: lone\rreturn\r\na b: nul\0\r\na b:  \r\nÜnïcode\t: 値: a:b\r\nÜnïcode\t: \r\n"
        "Nats-Msg-Id-Like: kept\r\nRepeated: 3\r\nRepeated: 1\r\nRepeated: 2\r\nRepeated: 1\r\n"
    )
    assert one.headers == b"NATS/1.0\r\n" + expected.encode() + provenance(1, "r")
    assert two.headers == b"NATS/1.0\r\n" + provenance(2, "r")


def test_a_header_that_would_forge_another_is_refused(
    spark: SparkSession, archive: Archive, server: NatsServer
) -> None:
    archive.write([1], headers=[[("A", ["x\r\nNats-Rollup: all"])]])
    with pytest.raises(SourceError, match="invalid value of header A: it contains a line break"):
        replay(read_archive(spark, archive.url, "ORDERS"), server.url, "replay.a")
    assert stored(server.url) == []


def test_a_replay_under_the_same_id_stores_nothing_twice(orders: DataFrame, server: NatsServer) -> None:
    replay(orders, server.url, "replay.a", replay_id="r1")
    again = replay(orders, server.url, "replay.a", replay_id="r1")
    other = replay(orders, server.url, "replay.a")
    assert (again.published, again.duplicates) == (3, 3)
    assert (other.published, other.duplicates) == (3, 0)
    assert len(stored(server.url)) == 6


@pytest.mark.parametrize("replay_id", ["a b", "a\n", "", "x" * 101, "é", "a:b"])
def test_a_replay_id_is_a_plain_word(orders: DataFrame, replay_id: str) -> None:
    with pytest.raises(JetcaptureError, match="must be a plain word"):
        replay(orders, "nats://127.0.0.1:1", "replay.a", replay_id=replay_id or " ")


def test_rows_of_an_aggregate_are_published_as_json(spark: SparkSession, orders: DataFrame, server: NatsServer) -> None:
    result = spark.sql("SELECT key, sum(amount) AS total, NULL AS nothing FROM {orders} GROUP BY key", orders=orders)
    assert replay(result, [server.url], "replay.totals.{key}").published == 1
    ((subject, headers, payload),) = stored(server.url)
    assert (subject, headers) == ("replay.totals.eu", b"")
    assert json.loads(payload) == {"key": "eu", "total": 6, "nothing": None}


def test_a_column_can_be_the_payload(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.sql("SELECT 'x' AS payload, named_struct('a', 1) AS s, 7 AS n")
    replay(frame, server.url, "replay.a")
    replay(frame, server.url, "replay.a", payload="s")
    replay(frame, server.url, "replay.a", payload="n")
    assert [payload for _, _, payload in stored(server.url)] == [b"x", b'{"a":1}', b"7"]
    with pytest.raises(JetcaptureError, match="no column missing"):
        replay(frame, server.url, "replay.a", payload="missing")


def test_rows_of_one_message_that_differ_are_messages_of_their_own(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.sql("SELECT 'S' AS _nats_stream, 1L AS _nats_seq, explode(array(0, 1)) AS _nats_row, 'x' AS text")
    assert replay(frame, server.url, "replay.a", replay_id="r").duplicates == 0
    assert [message.headers for message in stored(server.url)] == [
        f"NATS/1.0\r\nJetcapture-Stream: S\r\nJetcapture-Sequence: 1\r\nJetcapture-Row: {row}\r\n"
        f"Jetcapture-Replay: r\r\nNats-Msg-Id: S:1:r:{row}\r\n\r\n".encode()
        for row in (0, 1)
    ]


def test_a_message_of_several_rows_is_published_once(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    archive.write([1, 1, 2, 3, 3, 3], payloads=[b"1", b"1", b"2", b"3", b"3", b"3"], _nats_row=[0, 1, 0, 0, 1, 2])
    done = replay(read_archive(spark, archive.url, "ORDERS"), server.url, "replay.{subject}")
    assert (done.published, done.duplicates) == (3, 0)
    frame = read_archive(spark, archive.url, "ORDERS").drop("_nats_timestamp")
    assert replay(frame, server.url, "replay.{subject}").published == 3
    assert [message.payload for message in stored(server.url)] == [b"1", b"2", b"3"] * 2


def test_the_payload_of_a_message_of_several_rows_comes_from_its_first_row(
    spark: SparkSession, archive: Archive, server: NatsServer
) -> None:
    archive.write([1, 1, 2, 2], payloads=[b"1", None, b"2", None], _nats_row=[0, 1, 0, 1], line=["a", "b", "c", "d"])
    frame = read_archive(spark, archive.url, "ORDERS")
    assert replay(frame, server.url, "replay.{subject}").published == 2
    assert [message.payload for message in stored(server.url)] == [b"1", b"2"]
    with pytest.raises(JetcaptureError, match="message 2: its payload is in its first row"):
        replay(frame.where("line <> 'c'"), server.url, "replay.{subject}")


@pytest.mark.exhaustive
def test_many_rows_from_several_partitions_are_all_published(spark: SparkSession, server: NatsServer) -> None:
    frame = spark.range(50_000, numPartitions=4)
    assert replay(frame, server.url, "replay.{id}").published == 50_000
    empty = spark.range(0)
    assert replay(empty, server.url, "replay.{id}").published == 0


def test_a_template_makes_the_subject(spark: SparkSession, archive: Archive) -> None:
    headers = [[("X-Tenant", ["acme", "other"]), ("X-Home", ["replay.home"])]]
    archive.write([1], "k", subject="orders.eu.new", headers=headers, amount=[7])
    frame = read_archive(spark, archive.url, "ORDERS")
    for template, subject, pattern in (
        ("replay.a", "replay.a", "replay.a"),
        ("{subject}", "orders.eu.new", ">"),
        ("replay.{subject}", "replay.orders.eu.new", "replay.>"),
        ("re-{subject[1]}-{subject[0]}", "re-eu-orders", ">"),
        ("replay.x{key}.{amount}", "replay.xk.7", "replay.>"),
        ("replay.{header.X-Tenant}", "replay.acme", "replay.>"),
        ("{header.X-Home}", "replay.home", ">"),
    ):
        source = Source.of(frame, template)
        (row,) = source.prepared(prepared(source)).collect()
        assert (row["subject"].decode(), source.rows.pattern) == (subject, pattern)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("replay.*", "wildcard"),
        ("replay.>", "wildcard"),
        ("replay..a", "invalid subject"),
        ("replay.{id", "unbalanced braces"),
        ("replay.{}", "cannot read '{}'"),
        ("replay.{missing}", "no column missing"),
        ("replay.{subject}", "no column subject"),
    ],
)
def test_a_subject_that_cannot_be_meant_is_refused_before_anything_is_published(
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
    assert stored(server.url) == []


def test_data_cannot_name_an_api_call(spark: SparkSession, server: NatsServer) -> None:
    add_stream(server.url, "ALL", "everything.>", "$JS.API.STREAM.DELETE.*", no_ack=True)
    frame = spark.sql("SELECT '$JS.API.STREAM.DELETE.REPLAY' AS region")
    with pytest.raises(SourceError, match="reserved for the server"):
        replay(frame, server.url, "{region}")
    assert stored(server.url) == []


def test_an_unreachable_server_is_one_clear_error_without_its_password(spark: SparkSession) -> None:
    with pytest.raises(SourceError, match=r"cannot connect to NATS at nats://127\.0\.0\.1:1: ") as raised:
        replay(spark.range(1), "nats://me:secret@127.0.0.1:1", "a.b")
    assert "secret" not in str(raised.value)


def test_credentials_may_be_part_of_an_address(spark: SparkSession, nats_server: Callable[..., NatsServer]) -> None:
    server = nats_server("authorization { user: app, password: s3cret }")
    address = server.url.replace("//", "//app:s3cret@")
    add_stream(address)
    assert replay(spark.range(3), address, "replay.{id}").published == 3
    login = login_at(["nats://a%40b:c%3Ad%2F@one:1", "nats://two:2"])
    assert (login.servers, login.user) == (("nats://one:1", "nats://two:2"), "a@b")
    assert login.password is not None
    assert login.password.get_secret_value() == "c:d/"


def test_the_command_replays_an_archive_and_says_so(
    orders: DataFrame, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{key}", "--replay-id", "r1"]
    assert main(arguments) == 0
    assert main([*arguments, "--sql", "SELECT * FROM archive WHERE amount = 2"]) == 0
    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert first.startswith("replayed 3 messages in ")
    assert first.endswith(" messages/s); replay id r1")
    assert second.startswith("replayed 1 message in ")
    assert second.endswith(" messages/s), 1 already known to the stream; replay id r1")
    assert set(output.err.splitlines()) == {"replay: replay id r1; if interrupted, continue with --resume r1"}
    assert main([*arguments, "--sql", "SELECT amuont FROM archive"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("replay: ")
    assert error.count("\n") == 1


def test_sequences_and_original_subjects_choose_the_messages(spark: SparkSession, archive: Archive) -> None:
    archive.write([1, 2, 3], "eu")
    archive.write([4, 5], "us", subject="orders.us.new")
    frame = read_archive(spark, archive.url, "ORDERS").cache()
    for filters, first, last, expected in (
        ([], None, None, [1, 2, 3, 4, 5]),
        ([], 2, 4, [2, 3, 4]),
        (["orders.new"], None, None, [1, 2, 3]),
        (["orders.*"], None, None, [1, 2, 3]),
        (["orders.*.>"], None, None, [4, 5]),
        (["*.eu", "*.us.new"], None, None, [4, 5]),
        (["orders.us.>"], 5, None, [5]),
        (["orders"], None, None, []),
    ):
        rows = selected(frame, filters, first, last).select(layout.SEQ).collect()
        assert sorted(row[0] for row in rows) == expected, (filters, first, last)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sql", "SELECT 1", "--quarantine"], "--sql cannot be combined with --filter-subject, --from-seq,"),
        (["--sql", "SELECT 1", "--from-seq", "1"], "--sql cannot be combined with --filter-subject, --from-seq,"),
        (["--quarantine", "--key", "a"], "--quarantine cannot be combined with --key"),
        (["--speed", "10"], "--speed and --max-gap need --policy original"),
        (["--max-gap", "1s"], "--speed and --max-gap need --policy original"),
        (["--policy", "original", "--speed", "0"], '--speed: expected a number above 0, got "0"'),
        (["--policy", "original", "--max-gap", "soon"], "--max-gap: expected"),
        (["--rate", "fast"], '--rate: expected a number above 0, got "fast"'),
        (["--window", "0"], "Invalid value for '--window'"),
        (["--tasks", "two"], "Invalid value for '--tasks'"),
        (["--filter-subject", "a..b"], "--filter-subject: "),
        (["--filter-subject", "a.>.b"], "--filter-subject: "),
        (["--resume", "r", "--replay-id", "r"], "--resume cannot be combined with --replay-id"),
        (["--missing", "--sql", "SELECT 1"], "--missing cannot be combined with --sql"),
        (["--missing", "--quarantine"], "--missing cannot be combined with --quarantine"),
        (["--missing", "--subject", "a"], "--missing cannot be combined with --subject"),
        (["--missing", "--tasks", "2"], "--missing cannot be combined with --tasks"),
        (["--missing", "--resume", "x"], "--missing cannot be combined with --resume"),
        (["--from", "-1x"], "--from: expected a time such as"),
        (["--sql", "-- a comment\nSELECT 1", "--fitler-subject", "a"], "No such option: --fitler-subject"),
        (["SELECT 1"], "unexpected argument SELECT 1: expected URL STREAM"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_a_usage_error(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["file:///archive", "ORDERS", "--servers", "nats://127.0.0.1:1", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_the_quarantine_is_replayed_with_its_raw_bytes(
    archive: Archive, server: NatsServer, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    archive.write([9], payloads=[b"good"])
    raw = [None, b"NATS/1.0\r\nno colon\r\nNats-Msg-Id: x\r\nB: \xff\r\nJetcapture-Replay: old\r\n\r\n", None, None]
    archive.write(
        [1, 2, 3, 4],
        quarantine=True,
        payloads=[b'{"half":', b"\xff\0", b"", b"4"],
        headers=[[("A", ["1"])], None, None, None],
        stage=["decode", "headers", "decode", "subject"],
        error=["truncated", "no colon", "empty", "the subject is not valid UTF-8"],
        raw_headers=raw,
        columns={"_nats_subject": ["orders.new", "orders.new", r"orders.\xff", r"orders.\x5cxff.\xff"]},
    )
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{subject}", "--quarantine"]
    assert main([*arguments, "--replay-id", "r", "--to-seq", "2"]) == 0
    assert stored(server.url) == [
        Kept("replay.orders.new", b"NATS/1.0\r\nA: 1\r\n" + provenance(1, "r"), b'{"half":'),
        Kept("replay.orders.new", b"NATS/1.0\r\nno colon\r\nB: \xff\r\n" + provenance(2, "r"), b"\xff\0"),
    ]
    assert main([*arguments, "--resume", "r"]) == 0
    assert " 2 already in the target; replay id r" in capsys.readouterr().out
    messages = stored(server.url)
    assert [message.payload for message in messages[:2]] == [b'{"half":', b"\xff\0"]
    not_utf_8 = "replay.orders.\\xff.\ufffd"  # as the server writes it in JSON
    others = [(message.payload, message.subject) for message in messages[2:]]  # two subjects, so in any order
    assert sorted(others) == [(b"", "replay.orders.\\xff"), (b"4", not_utf_8)]


def test_ids_tell_the_lives_of_a_recreated_stream_apart(
    archive: Archive, server: NatsServer, spark: SparkSession
) -> None:
    made = ("2026-05-01T11:59:59.123456789Z", "2026-05-01T12:30:00.5Z", "2026-05-01T13:10:00Z")
    archive.write([1, 2], payloads=[b"a1", b"a2"], created=made[0])
    later = [HOUR * 1_000_000 + 3_000_000_000 + at for at in range(2)]
    archive.write([1, 2], timestamps=later, payloads=[b"b1", b"b2"], created=",".join(made[:2]))
    archive.write([2, 3], bucket=HOUR + 7200, payloads=[b"c2", b"c3"], created=made[2])
    assert origin_of(archive.url, "ORDERS", {}).created == made
    assert main([archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.a", "--replay-id", "r"]) == 0
    messages = stored(server.url)
    assert [message.payload for message in messages] == [b"a1", b"a2", b"b1", b"b2", b"c2", b"c3"]
    moments = [*((HOUR * 1_000_000) + seq for seq in (1, 2)), *later, *((HOUR + 7200) * 1_000_000 + n for n in (2, 3))]
    assert [message.header("Nats-Msg-Id") for message in messages] == [
        f"ORDERS:{seq}:r@{moment}" for seq, moment in zip((1, 2, 1, 2, 2, 3), moments, strict=True)
    ]


def test_rows_alone_tell_whether_a_stream_was_recreated(spark: SparkSession) -> None:
    def recreated(*messages: tuple[str, int, int]) -> bool:
        """Stream, sequence and time in seconds of each."""
        rows = [(stream, seq, datetime.fromtimestamp(HOUR + time, UTC), b"") for stream, seq, time in messages]
        names = [layout.STREAM, layout.SEQ, layout.TIMESTAMP, layout.PAYLOAD]
        return is_recreated(spark.createDataFrame(rows, names), layout.IDENTITY)

    assert not recreated(("A", 1, 0), ("A", 2, 0), ("A", 3, 1), ("A", 9, 100), ("B", 1, 200), ("B", 2, 200))
    assert recreated(("A", 5, 0), ("A", 6, 0), ("A", 6, 100), ("A", 7, 100))  # in another slice of time
    assert recreated(("A", 5, 0), ("A", 6, 1), ("A", 4, 2), ("A", 7, 3))  # its first message is the lowest
    assert recreated(("A", 5, 0), ("A", 9, 1), ("A", 5, 2), ("A", 6, 3))  # the highest comes before
    assert recreated(("A", 1, 0), ("A", 2, 1), ("A", 1, 2), ("A", 9, 3))  # both begin at 1


def test_a_whole_login_may_be_given(spark: SparkSession, server: NatsServer) -> None:
    assert replay(spark.range(2), NatsConfig(servers=(server.url,)), "replay.{id}").published == 2
