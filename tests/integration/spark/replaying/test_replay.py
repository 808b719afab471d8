from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError, SourceError
from spark_jobs.archive import read_archive
from spark_jobs.publishing.login import login_at
from spark_jobs.publishing.prepare import Archived
from spark_jobs.replay import main, replay, selected
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


def test_a_replay_under_the_same_id_stores_nothing_twice(orders: DataFrame, server: NatsServer) -> None:
    replay(orders, server.url, "replay.a", replay_id="r1")
    again = replay(orders, server.url, "replay.a", replay_id="r1")
    other = replay(orders, server.url, "replay.a")
    assert (again.published, again.duplicates) == (3, 3)
    assert (other.published, other.duplicates) == (3, 0)
    assert len(stored(server.url)) == 6


def test_a_replay_id_is_a_plain_word(orders: DataFrame) -> None:
    for replay_id in ("a b", "a\n", " ", "x" * 101, "é", "a:b"):
        with pytest.raises(JetcaptureError, match="must be a plain word"):
            replay(orders, "nats://127.0.0.1:1", "replay.a", replay_id=replay_id)


def test_the_payload_of_a_message_of_several_rows_comes_from_its_first_row(
    spark: SparkSession, archive: Archive, server: NatsServer
) -> None:
    archive.write([1, 1, 2, 2], payloads=[b"1", None, b"2", None], _nats_row=[0, 1, 0, 1], line=["a", "b", "c", "d"])
    frame = read_archive(spark, archive.url, "ORDERS")
    assert replay(frame, server.url, "replay.{subject}").published == 2
    assert [message.payload for message in stored(server.url)] == [b"1", b"2"]
    with pytest.raises(JetcaptureError, match="message 2: its payload is in its first row"):
        replay(frame.where("line <> 'c'"), server.url, "replay.{subject}")


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


def test_a_subject_or_header_that_cannot_be_meant_is_refused_before_anything_is_published(
    spark: SparkSession, server: NatsServer
) -> None:
    add_stream(server.url, "ALL", "everything.>", "$JS.API.STREAM.DELETE.*", no_ack=True)
    forged = "SELECT map('A', array('x\r\nNats-Rollup: all')) AS _nats_headers, 'x' AS _nats_payload"
    region = "SELECT CAST({} AS string) AS region"
    for sql, subject, message in (
        ("SELECT 1 AS id", "replay.>", "wildcard"),
        ("SELECT 1 AS id", "replay.{missing}", "no column missing"),
        ("SELECT 1 AS id", "replay.{subject}", "no column subject"),
        (region.format("'a b'"), "replay.{region}", r"invalid subject 'replay\.a b'"),
        (region.format("'*'"), "replay.{region}", "wildcard"),
        (region.format("''"), "replay.{region}", "invalid subject"),
        (region.format("NULL"), "replay.{region}", "has no subject"),
        (region.format("'$JS.API.STREAM.DELETE.REPLAY'"), "{region}", "reserved for the server"),
        (forged, "replay.a", "invalid value of header A: it contains a line break"),
    ):
        with pytest.raises(JetcaptureError, match=message):
            replay(spark.sql(sql), server.url, subject)
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


USAGE: tuple[tuple[str, str], ...] = (
    ("--sql SELECT --quarantine", "--sql cannot be combined with --filter-subject, --from-seq,"),
    ("--sql SELECT --from-seq 1", "--sql cannot be combined with --filter-subject, --from-seq,"),
    ("--quarantine --key a", "--quarantine cannot be combined with --key"),
    ("--speed 10", "--speed and --max-gap need --policy original"),
    ("--max-gap 1s", "--speed and --max-gap need --policy original"),
    ("--policy original --speed 0", '--speed: expected a number above 0, got "0"'),
    ("--policy original --max-gap soon", "--max-gap: expected"),
    ("--rate fast", '--rate: expected a number above 0, got "fast"'),
    ("--window 0", "Invalid value for '--window'"),
    ("--tasks two", "Invalid value for '--tasks'"),
    ("--filter-subject a..b", "--filter-subject: "),
    ("--filter-subject a.>.b", "--filter-subject: "),
    ("--resume r --replay-id r", "--resume cannot be combined with --replay-id"),
    ("--missing --sql SELECT", "--missing cannot be combined with --sql"),
    ("--missing --quarantine", "--missing cannot be combined with --quarantine"),
    ("--missing --subject a", "--missing cannot be combined with --subject"),
    ("--missing --tasks 2", "--missing cannot be combined with --tasks"),
    ("--missing --resume x", "--missing cannot be combined with --resume"),
    ("--from -1x", "--from: expected a time such as"),
    ("--sql SELECT --fitler-subject a", "No such option: --fitler-subject"),
    ("SELECT", "unexpected argument SELECT: expected URL STREAM"),
)


def test_arguments_that_make_no_sense_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in USAGE:
        assert main(["file:///archive", "ORDERS", "--servers", "nats://127.0.0.1:1", *arguments.split()]) == 2
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
