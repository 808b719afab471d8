"""What a replay publishes, where, in which order and at which pace, and what it says before it publishes.

How a row becomes a message is in `unit/spark_jobs/publishing/test_prepare.py`.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from jetcapture_py.archive import layout
from jetcapture_py.archive.watermark import ConsumerWatermark, path
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from spark_jobs import query
from spark_jobs.archive import read_archive
from spark_jobs.publishing.login import login_at
from spark_jobs.replay import main, replay, selected
from spark_jobs.replaying.origin import origin_of
from spark_jobs.replaying.preview import is_recreated
from spark_jobs.replaying.source import Source
from spark_jobs.replaying.target import Target
from spark_jobs.replaying.task import Pace, Task
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream, ask, stored
from tests.support.running import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with a stream REPLAY over `replay.>`."""
    server = nats_server()
    add_stream(server.url)
    return server


NOWHERE = "nats://me:secret@127.0.0.1:1"
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"replay_id": text}, "must be a plain word") for text in ("a b", "a\n", " ", "x" * 101, "é", "a:b")),
    ({"pace": Pace(speed=1)}, "needs the columns _nats_stream, _nats_seq, _nats_timestamp"),
    ({"replay_id": "r", "resume": True}, "only rows with the columns _nats_stream and _nats_seq can be resumed"),
    ({}, r"cannot connect to NATS at nats://127\.0\.0\.1:1: "),
)


def test_a_replay_that_cannot_be_meant_is_refused_in_one_line_without_a_password(spark: SparkSession) -> None:
    for how, expected in REFUSED:
        with pytest.raises(JetcaptureError, match=expected) as raised:
            replay(spark.range(1), NOWHERE, "a.b", **how)
        assert "secret" not in str(raised.value)


def test_the_command_replays_an_archive_and_says_so(
    spark: SparkSession, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    archive.write([1, 2, 3, 4, 5], "eu", amount=[1, 2, 3, 4, 5])
    at = datetime.fromtimestamp(HOUR, UTC)
    bury(archive.root, [{"_nats_seq": seq, "_nats_timestamp": at.replace(microsecond=seq)} for seq in (4, 5)])
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{key}", "--replay-id", "r1"]
    assert main(arguments) == 0
    assert main([*arguments, "--sql", "SELECT * FROM archive WHERE amount = 2"]) == 0
    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert first.startswith("replayed 3 messages in ")  # without what was erased
    assert first.endswith(" messages/s); replay id r1")
    assert second.startswith("replayed 1 message in ")
    assert second.endswith(" messages/s), 1 already known to the stream; replay id r1")
    assert set(output.err.splitlines()) == {"replay: replay id r1; if interrupted, continue with --resume r1"}
    assert main([*arguments, "--sql", "SELECT amuont FROM archive"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("replay: ")
    assert error.count("\n") == 1
    assert len(stored(server.url)) == 3


def test_a_row_without_a_subject_stops_a_replay_or_a_query_before_anything_is_published(
    spark: SparkSession, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    archive.write(list(range(1, 1001)), region=["eu"] * 999 + [None])
    query_all, query_one = "SELECT region, 1 AS n FROM archive", "SELECT CAST(NULL AS string) AS region, 7 AS n"
    subject, message, nothing = "replay.{region}", "message 1000 of stream ORDERS", "; nothing was published"
    for job, arguments, row, end in (
        (main, ["--subject", subject], message, nothing),
        (main, ["--subject", subject, "--no-survey"], message, nothing),  # messages are sorted before the first
        (query.main, [query_all, "--to-nats", subject], '{"region":null,"n":1}', nothing),
        (query.main, [query_one, "--to-nats", subject, "--no-survey"], '{"region":null,"n":7}', "; replay id "),
    ):
        assert job([archive.url, "ORDERS", *arguments, "--servers", server.url]) == 1
        assert f"a row has no subject: region is null in {row}{end}" in capsys.readouterr().err.splitlines()[-1]
        assert stored(server.url) == []


def test_sequences_and_original_subjects_choose_the_messages(spark: SparkSession, archive: Archive) -> None:
    archive.write([1, 2, 3], "eu")
    archive.write([4, 5], "us", subject="orders.us.new")
    frame = read_archive(spark, archive.url, "ORDERS").cache()
    for filters, first, last, expected in (
        ([], 2, 4, [2, 3, 4]),
        (["*.eu", "orders.*"], None, None, [1, 2, 3]),
        (["orders.us.>", "*.new"], 5, None, [5]),
    ):
        rows = selected(frame, filters, first, last).select(layout.SEQ).collect()
        assert sorted(row[0] for row in rows) == expected, (filters, first, last)


USAGE: tuple[tuple[str, str], ...] = (
    ("--sql SELECT --quarantine", "--sql cannot be combined with --filter-subject, --from-seq,"),
    ("--sql SELECT --from-seq 1", "--sql cannot be combined with --filter-subject, --from-seq,"),
    ("--quarantine --key a", "--quarantine cannot be combined with --key"),
    ("--speed 10", "--speed and --max-gap need --policy original"),
    ("--policy original --speed 0", '--speed: expected a number above 0, got "0"'),
    ("--policy original --max-gap soon", "--max-gap: expected"),
    ("--rate fast", '--rate: expected a number above 0, got "fast"'),
    ("--window 0", "Invalid value for '--window'"),
    ("--filter-subject a..b", "--filter-subject: "),
    ("--resume r --replay-id r", "--resume cannot be combined with --replay-id"),
    ("--missing --sql SELECT", "--missing cannot be combined with --sql"),
    ("--missing --subject a", "--missing cannot be combined with --subject"),
    ("--from -1x", "--from: expected a time such as"),
    ("--sql SELECT --fitler-subject a", "No such option: --fitler-subject"),
    ("SELECT", "unexpected argument SELECT: expected URL STREAM"),
)


def test_arguments_that_make_no_sense_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in USAGE:
        assert main(["file:///archive", "ORDERS", "--servers", "nats://127.0.0.1:1", *arguments.split()]) == 2
        assert problem in capsys.readouterr().err


def test_rows_alone_tell_whether_a_stream_was_recreated(spark: SparkSession) -> None:
    for recreated, messages in (  # stream, sequence and time in seconds of each
        (False, [("A", 1, 0), ("A", 2, 0), ("A", 3, 1), ("A", 9, 100), ("B", 1, 200), ("B", 2, 200)]),
        (True, [("A", 5, 0), ("A", 6, 0), ("A", 6, 100), ("A", 7, 100)]),  # in another slice of time
        (True, [("A", 5, 0), ("A", 6, 1), ("A", 4, 2), ("A", 7, 3)]),  # its first message is the lowest
        (True, [("A", 5, 0), ("A", 9, 1), ("A", 5, 2), ("A", 6, 3)]),  # the highest comes before
        (True, [("A", 1, 0), ("A", 2, 1), ("A", 1, 2), ("A", 9, 3)]),  # both begin at 1
    ):
        rows = [(stream, seq, datetime.fromtimestamp(HOUR + time, UTC), b"") for stream, seq, time in messages]
        frame = spark.createDataFrame(rows, [layout.STREAM, layout.SEQ, layout.TIMESTAMP, layout.PAYLOAD])
        assert is_recreated(frame, layout.IDENTITY) is recreated


START = HOUR * 1_000_000


def test_every_subject_keeps_its_order(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    for life, first in product((0, 1), (1, 2, 3)):  # the second life of the stream counts from 1 again
        seqs = range(first, 601, 3)
        archive.write(
            seqs,
            f"k{first}",
            bucket=HOUR + 3600 * life,
            timestamps=[START + life * 3_600_000_000 + seq // 2 for seq in seqs],  # two have the same time
            payloads=[b"%d %d" % (life, seq) for seq in seqs],
            columns={layout.SUBJECT: pa.array([f"orders.{seq % 5}" for seq in seqs])},
            created=f"2026-05-01T{11 + life}:59:59Z",
        )
    frame = read_archive(spark, archive.url, "ORDERS").repartition(7)
    assert replay(frame, server.url, "replay.{subject}", window=50).published == 1200
    found: dict[str, list[list[int]]] = defaultdict(list)
    for message in stored(server.url):
        found[message.subject].append([*map(int, message.payload.split())])
    everything = [[life, seq] for life in (0, 1) for seq in range(1, 601)]
    assert found == {f"replay.orders.{rest}": [each for each in everything if each[1] % 5 == rest] for rest in range(5)}


def test_a_pace_has_one_order_over_all_objects_and_waits_between_messages(
    archive: Archive, server: NatsServer, spark: SparkSession
) -> None:
    gaps = [0, 1_000_000, 3_000_000, 10_000, 2_500_000, 0, 500_000, 60_000_000, 1_500_000]  # microseconds
    moments = (START + np.cumsum(gaps)).tolist()
    for key, first in (("a", 1), ("b", 2)):
        seqs = list(range(first, len(gaps) + 1, 2))
        archive.write(seqs, key, timestamps=[moments[seq - 1] for seq in seqs], subject=f"orders.{key}")
    began = time.monotonic()
    arguments = ["--servers", server.url, "--subject", "replay.{subject}", "--policy", "original", "--speed", "10"]
    assert main([archive.url, "ORDERS", *arguments, "--max-gap", "400ms"]) == 0
    assert time.monotonic() - began > np.minimum(np.array(gaps) / 1e7, 0.4).sum()
    order = [message.header("Jetcapture-Sequence") for message in stored(server.url)]
    assert order == [str(seq) for seq in range(1, len(gaps) + 1)]
    frame = spark.range(4, numPartitions=4)  # without timestamps
    assert Source.of(frame, "replay.a").in_order(frame, tasks=1).rdd.getNumPartitions() == 1


def test_a_task_that_spark_runs_again_publishes_once(server: NatsServer) -> None:
    task = Task(login=NatsConfig(servers=(server.url,)), window=10, apart=True)

    def batches(lost: int | None = None) -> Iterator[pa.RecordBatch]:
        for seq in range(1, 100, 2):
            if seq == lost:
                raise RuntimeError("the executor is lost")
            headers = [b"NATS/1.0\r\nNats-Msg-Id: ORDERS:%d:r\r\n\r\n" % at for at in (seq, seq + 1)]
            columns = {"subject": ["replay.a"] * 2, "payload": [b"%d" % seq, b"%d" % (seq + 1)], "headers": headers}
            yield pa.RecordBatch.from_pydict(columns)

    with pytest.raises(RuntimeError, match="executor is lost"):
        next(task(batches(lost=61)))
    (published,), (duplicates,) = next(task(batches())).to_pydict().values()
    assert published == 100
    assert 0 < duplicates <= 60
    assert [int(message.payload) for message in stored(server.url)] == list(range(1, 101))


def test_a_replay_that_ended_early_is_resumed_and_knows_rows_lives_and_replays_apart(
    spark: SparkSession, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    add_stream(server.url, "SHORT", "short.>", duplicate_window=0.1)  # it forgets message ids at once
    first, second = ({"created": f"2026-05-01T12:00:0{life}Z"} for life in range(2))
    archive.write([1, 1, 2], amount=[1, 2, 3], _nats_row=[0, 1, 0], **first)
    archive.write([1], timestamps=[START + 1_000_000], amount=[4], _nats_row=pa.array([None], pa.int32()), **second)
    arguments = ["--servers", server.url, "--subject", "short.a", "--payload", "amount"]
    for condition, words, published, skipped in (
        ("amount IN (2, 3)", ["--replay-id", "one"], 2, ""),
        ("amount = 1", ["--replay-id", "two"], 1, ""),
        ("true", ["--resume", "one"], 2, "; 2 already in the target"),
        ("true", ["--resume", "one"], 0, "; 4 already in the target"),
    ):
        sql = f"SELECT * FROM archive WHERE {condition}"
        assert main([archive.url, "ORDERS", *arguments, "--sql", sql, *words]) == 0
        output = capsys.readouterr()
        assert output.out.startswith(f"replayed {published} message")
        assert output.out.endswith(f" messages/s){skipped}; replay id {words[-1]}\n")
        assert "stream SHORT remembers message ids for only 100ms" in output.err
    assert sorted(message.payload for message in stored(server.url, "SHORT")) == [b"1", b"1", b"2", b"3", b"4"]


Start = Callable[..., NatsServer]
Said = pytest.CaptureFixture[str]


def last_seq(server: NatsServer, stream: str) -> int:
    return int(ask(server.url, f"STREAM.INFO.{stream}")["state"]["last_seq"])


def add_consumer(server: NatsServer, stream: str, name: str, *filters: str) -> None:
    config = {"durable_name": name, "ack_policy": "explicit", "filter_subjects": list(filters)}
    ask(server.url, f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


def ingested(server: NatsServer, archive: Archive) -> dict[str, tuple[str, ...]]:
    """The streams that the archive's capture consumes, with the subjects from each."""
    target = Target(login_at(server.url))
    return target.ingested(target.streams(">"), origin_of(archive.url, "ORDERS", {}))


@pytest.fixture
def captured(nats_server: Start, archive: Archive) -> NatsServer:
    """A server with the stream that the archive is of, and a stream REPLAY."""
    server = nats_server()
    add_stream(server.url, "ORDERS", "orders.>", "again.>")
    add_stream(server.url)
    created = ask(server.url, "STREAM.INFO.ORDERS")["created"]
    archive.write([1, 2, 3], created=created, consumer="archive")
    return server


def test_a_replay_into_what_the_capture_ingests_is_refused(
    captured: NatsServer, archive: Archive, capsys: Said
) -> None:
    add_consumer(captured, "ORDERS", "archive")
    arguments = [archive.url, "ORDERS", "--servers", captured.url]
    for words in (["--subject", "{subject}"], ["--subject", "again.a"], ["--subject", "again.{key}", "--no-survey"]):
        assert main([*arguments, *words]) == 1
        _, error = capsys.readouterr().err.splitlines()  # after the line with the replay id
        assert error.startswith("replay: this archive's capture consumes ")
        assert "from stream ORDERS, directly or through sources and mirrors, and would archive its own " in error
    assert main([*arguments, "--subject", "nowhere.{key}"]) == 1
    nowhere = r"replay: no stream at nats://127\.0\.0\.1:\d+ listens on nowhere\.>; nothing was published"
    assert re.fullmatch(nowhere, capsys.readouterr().err.splitlines()[-1])
    assert last_seq(captured, "ORDERS") == 0
    assert main([*arguments, "--subject", "replay.{subject}"]) == 0
    assert main([*arguments, "--allow-loop"]) == 0
    assert (last_seq(captured, "REPLAY"), last_seq(captured, "ORDERS")) == (3, 3)


def test_what_the_captured_stream_sources_or_mirrors_is_ingested(captured: NatsServer, archive: Archive) -> None:
    add_consumer(captured, "ORDERS", "archive", "orders.>")
    ask(captured.url, "STREAM.CREATE.BETWEEN", {"name": "BETWEEN", "mirror": {"name": "REPLAY"}})
    ask(captured.url, "STREAM.CREATE.OTHER", {"name": "OTHER", "sources": [{"name": "REPLAY"}]})
    config = ask(captured.url, "STREAM.INFO.ORDERS")["config"]
    some = [{"src": "replay.*", "dest": "orders.again"}]
    for feed, subjects in (
        ({"name": "BETWEEN"}, (">",)),
        ({"name": "REPLAY", "subject_transforms": some}, ("replay.*",)),
        ({"name": "REPLAY", "filter_subject": "replay.of.others"}, ("replay.of.others",)),
    ):
        ask(captured.url, "STREAM.UPDATE.ORDERS", {**config, "sources": [feed]})
        assert ingested(captured, archive) == {"ORDERS": ("orders.>",), "REPLAY": subjects}


def test_a_stream_is_the_archives_own_by_its_creation_or_by_any_of_its_consumers(
    captured: NatsServer, archive: Archive, nats_server: Start
) -> None:
    assert ingested(captured, archive) == {"ORDERS": (">",)}  # no consumer any more, but the stream itself
    ask(captured.url, "STREAM.DELETE.ORDERS")
    add_stream(captured.url, "ORDERS", "orders.>", "again.>")
    assert ingested(captured, archive) == {}
    add_consumer(captured, "ORDERS", "archive", "orders.>")
    assert ingested(captured, archive) == {"ORDERS": ("orders.>",)}  # another stream, which the capture goes on with
    archive.write([4], created="2026-01-01T00:00:00Z", consumer="other")
    archive.write([5], created="2026-01-01T00:00:00Z", consumer="archive")
    archive.write([6], bucket=HOUR + 3600, created="2026-01-01T00:00:00Z", consumer="archive")
    assert origin_of(archive.url, "ORDERS", {}).consumers == ("archive",)
    time = datetime(2026, 5, 1, 14, tzinfo=UTC)
    for name in ("archive", "other"):
        mark = ConsumerWatermark(stream="ORDERS", consumer=name, created="2026-01-01T00:00:00Z", seq=6, time=time)
        file = archive.root / path("ORDERS", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(mark.encode())
    add_consumer(captured, "ORDERS", "other", "again.>")
    assert ingested(captured, archive) == {"ORDERS": ("orders.>", "again.>")}
    archive.write([7], bucket=HOUR + 7200, created="2026-01-02T00:00:00Z", consumer="archive")
    assert len(origin_of(archive.url, "ORDERS", {}).created) == 3
    elsewhere = nats_server()
    add_stream(elsewhere.url, "ORDERS", "orders.>")
    add_consumer(elsewhere, "ORDERS", "someone-else")
    assert ingested(elsewhere, archive) == {}


def test_a_dry_run_counts_warns_and_publishes_nothing(
    archive: Archive, nats_server: Start, tmp_path: Path, capsys: Said
) -> None:
    server = nats_server()
    add_stream(server.url, retention="interest")
    add_stream(server.url, "SHORT", "short.>", duplicate_window=100)
    archive.write([1, 2], payloads=[b"12345", b""], subject="orders.a")
    archive.write(range(3, 9), "b", columns={"_nats_subject": [f"orders.{number}" for number in range(3, 9)]})
    config = tmp_path / "config.yaml"  # which says where archive and servers are
    config.write_text(yaml.safe_dump(settings(server.url, archive.url)))
    arguments = ["--config", str(config), "--subject", "replay.{subject}"]
    subjects = ["replay.orders.a (2)", *(f"replay.orders.{number} (1)" for number in range(3, 7))]
    assert main([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr()
    said = "stream REPLAY would store nothing: it has interest retention and no consumer"
    assert output.out.splitlines() == [
        "would replay 8 messages with 17 B",
        f"to 7 subjects: {', '.join(subjects)}, …",
        "from 2026-05-01T12:00:00.000001Z to 2026-05-01T12:00:00.000008Z",
        "into stream REPLAY (replay.>)",
        f"warning: {said}",
    ]
    assert output.err == ""
    assert main([*arguments[:2], "--subject", "short.{key}", "--dry-run", "--from-seq", "1000"]) == 0
    nothing, stream, warning = capsys.readouterr().out.splitlines()
    assert (nothing, stream) == ("would replay 0 messages with 0 B", "into stream SHORT (short.>)")
    assert warning.startswith("warning: stream SHORT remembers message ids for only 1m40s (duplicate_window); 2m ")
    assert last_seq(server, "REPLAY") == 0
    assert main([*arguments, "--to-seq", "1"]) == 0
    assert f"replay: {said}" in capsys.readouterr().err.splitlines()
