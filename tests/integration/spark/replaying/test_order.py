"""In which order, at which pace, and how often a replay publishes, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from spark_jobs.archive import read_archive
from spark_jobs.replay import main, replay
from spark_jobs.replaying.source import Source
from spark_jobs.replaying.task import Pace, Task
from tests.integration.spark.conftest import HOUR, Archive
from tests.integration.spark.replaying.test_replay import prepared
from tests.support.nats_server import NatsServer
from tests.support.replays import Kept, add_stream, ask, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START = HOUR * 1_000_000


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    server = nats_server()
    add_stream(server.url)
    return server


def write_many(archive: Archive, count: int, size: int = 20) -> None:
    """Messages on five subjects in six objects, of two lives of the stream: the second one counts from 1 again."""
    half = count // 2
    for life, objects in ((0, range(3)), (1, range(3, 6))):
        for number in objects:
            seqs = list(range(1 + number % 3, half + 1, 3))
            archive.write(
                seqs,
                f"k{number % 3}",
                bucket=HOUR + 3600 * life,
                timestamps=[START + life * 3_600_000_000 + seq // 2 for seq in seqs],  # two have the same time
                payloads=[b"%d %d " % (life, seq) + b"x" * size for seq in seqs],
                columns={layout.SUBJECT: pa.array([f"orders.{seq % 5}" for seq in seqs])},
                created=f"2026-05-01T{11 + life}:59:59Z",
            )


def positions(messages: list[Kept]) -> dict[str, list[tuple[int, int]]]:
    """Life and sequence of the messages of each subject, in the stream's order."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for message in messages:
        life, seq, _ = message.payload.split(b" ", 2)
        found[message.subject].append((int(life), int(seq)))
    return found


def expected(count: int) -> dict[str, list[tuple[int, int]]]:
    half = count // 2
    return {
        f"replay.orders.{subject}": [(life, seq) for life in (0, 1) for seq in range(1, half + 1) if seq % 5 == subject]
        for subject in range(5)
    }


def last_seq(url: str) -> int:
    return int(ask(url, "STREAM.INFO.REPLAY")["state"]["last_seq"])


def wait_for(url: str, seq: int) -> None:
    deadline = time.monotonic() + 600
    while last_seq(url) < seq:
        assert time.monotonic() < deadline, f"the stream never got {seq} messages"
        time.sleep(0.01)


def test_every_subject_keeps_its_order(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    write_many(archive, 1200)
    frame = read_archive(spark, archive.url, "ORDERS").repartition(7)
    source = Source.of(frame, "replay.{subject}")
    parts = source.in_order(source.prepared(prepared(source)), None)
    homes = parts.mapInArrow(homes_of, "subject string").groupBy("subject").count().collect()
    assert [row["count"] for row in homes] == [1] * 5
    assert replay(frame, server.url, "replay.{subject}", window=50).published == 1200
    assert positions(stored(server.url)) == expected(1200)


def homes_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The subjects of a partition."""
    subjects = {subject.decode() for batch in batches for subject in batch.column("subject").to_pylist()}
    yield pa.RecordBatch.from_pydict({"subject": pa.array(sorted(subjects), pa.string())})


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


def test_the_original_pace_needs_timestamps(spark: SparkSession, server: NatsServer) -> None:
    with pytest.raises(JetcaptureError, match="needs the columns _nats_stream, _nats_seq, _nats_timestamp"):
        replay(spark.range(1), server.url, "replay.a", pace=Pace(speed=1))


def batches(count: int) -> Iterator[pa.RecordBatch]:
    """What a task gets: two messages to a batch."""
    for seq in range(1, count, 2):
        yield pa.RecordBatch.from_pydict(
            {
                "subject": pa.array(["replay.a"] * 2),
                "payload": pa.array([b"%d" % seq, b"%d" % (seq + 1)]),
                "headers": pa.array([b"NATS/1.0\r\nNats-Msg-Id: ORDERS:%d:r\r\n\r\n" % at for at in (seq, seq + 1)]),
            }
        )


def test_a_task_that_spark_runs_again_publishes_once(server: NatsServer) -> None:
    task = Task(login=NatsConfig(servers=(server.url,)), window=10, apart=True)

    def failing() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(100)):
            if number == 30:
                raise RuntimeError("the executor is lost")
            yield batch

    with pytest.raises(RuntimeError, match="executor is lost"):
        next(task(failing()))
    (published,), (duplicates,) = next(task(batches(100))).to_pydict().values()
    assert published == 100
    assert 0 < duplicates <= 60
    assert [int(message.payload) for message in stored(server.url)] == list(range(1, 101))


def test_a_server_that_restarts_in_the_middle_costs_neither_messages_nor_order(
    spark: SparkSession, archive: Archive, server: NatsServer
) -> None:
    write_many(archive, 6000)
    frame = read_archive(spark, archive.url, "ORDERS")
    done: list[object] = []

    def run() -> None:
        try:
            done.append(replay(frame, server.url, "replay.{subject}", pace=Pace(rate=4000)))
        except JetcaptureError as error:
            done.append(error)

    running = threading.Thread(target=run)
    running.start()
    for at in (1000, 3000):
        wait_for(server.url, at)
        server.stop()
        server.start()
    running.join(300)
    assert getattr(done[0], "published", done[0]) == 6000
    assert positions(stored(server.url)) == expected(6000)


@pytest.mark.exhaustive
def test_a_replay_that_was_killed_is_resumed_however_short_the_duplicate_window_is(
    spark: SparkSession, archive: Archive, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server.url, "STREAM.DELETE.REPLAY")
    add_stream(server.url, duplicate_window=0.1)
    write_many(archive, 3000)
    arguments = [archive.url, "ORDERS", "--servers", server.url, "--subject", "replay.{subject}"]
    job = subprocess.Popen(
        [sys.executable, "-m", "spark_jobs.replay", *arguments, "--replay-id", "mine", "--rate", "1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(server.url, 500)
        everybody = psutil.Process(job.pid).children(recursive=True)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    psutil.wait_procs(everybody, 30)
    before = last_seq(server.url)
    assert 500 <= before < 3000
    assert main([*arguments, "--resume", "mine"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"replayed {3000 - before} messages in ")
    assert output.out.endswith(f"; {before} already in the target; replay id mine\n")
    assert "stream REPLAY remembers message ids for only 100ms" in output.err
    assert positions(stored(server.url)) == expected(3000)
    assert main([*arguments, "--resume", "mine"]) == 0
    assert capsys.readouterr().out.startswith("replayed 0 messages in ")


def test_resuming_knows_rows_lives_and_replays_apart(spark: SparkSession, archive: Archive, server: NatsServer) -> None:
    archive.write([1, 1, 2], amount=[1, 2, 3], _nats_row=[0, 1, 0])
    archive.write([1], timestamps=[START + 1_000_000], amount=[4], _nats_row=pa.array([None], pa.int32()))
    frame = read_archive(spark, archive.url, "ORDERS")

    def some(condition: str, **how: object) -> tuple[int, int]:
        done = replay(frame.where(condition), server.url, "replay.a", payload="amount", **how)  # type: ignore[arg-type]
        return done.published, done.skipped

    assert some("amount IN (2, 3)", replay_id="one") == (2, 0)
    assert some("amount = 1", replay_id="two") == (1, 0)
    assert some("true", replay_id="one", resume=True) == (2, 2)
    assert some("true", replay_id="one", resume=True) == (0, 4)
    assert sorted(message.payload for message in stored(server.url)) == [b"1", b"1", b"2", b"3", b"4"]
    with pytest.raises(JetcaptureError, match="only rows with the columns _nats_stream and _nats_seq can be resumed"):
        replay(spark.range(1), server.url, "replay.a", replay_id="one", resume=True)
