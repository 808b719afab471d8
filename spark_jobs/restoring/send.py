"""Compute the ranges of a restore, in threads or as Spark jobs, and send them to the server in order."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.restore import KEEP_ALIVE, StreamRestore
from spark_jobs.restoring import backup
from spark_jobs.restoring.part import PartSpec

T = TypeVar("T")

Work = Callable[[PartSpec], T]
Made = Iterator[Future[tuple[int, list[bytes]]]]

_NAME = "jetcapture restore"
_TIMEOUT = 20.0
_AHEAD = 1
"""Ranges that wait, computed, beside those being computed."""
_MAX_JOBS = 8
_MAX_THREADS = 4
"""More do not help: what is not in Arrow or NumPy runs in one thread at a time."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Computes ranges, `parallel` at a time: in this process, or as one job each of `spark`."""

    parallel: int
    spark: SparkSession | None = None

    @classmethod
    def here(cls) -> Maker:
        """Compute in threads of this process."""
        return cls(min(_MAX_THREADS, os.cpu_count() or 1))

    @classmethod
    def on(cls, spark: SparkSession) -> Maker:
        known = _MAX_JOBS if is_remote() else spark.sparkContext.defaultParallelism
        return cls(min(_MAX_JOBS, known), spark)

    def futures(self, work: Work[T], specs: Sequence[PartSpec]) -> Generator[Future[T]]:
        """Yield the futures of all results, in order. No more than a few results are computed ahead."""
        do: Work[T] = work if self.spark is None else partial(_on_spark, self.spark, work)
        waiting: deque[Future[T]] = deque()
        threads = ThreadPoolExecutor(self.parallel, "restore")
        try:
            for spec in specs:
                waiting.append(threads.submit(do, spec))
                if len(waiting) > self.parallel + _AHEAD:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def results(self, work: Work[T], specs: Sequence[PartSpec]) -> Iterator[T]:
        for future in self.futures(work, specs):
            yield future.result()


def _on_spark(spark: SparkSession, work: Work[Any], spec: PartSpec) -> Any:
    """Compute a range in a Spark job of one task."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for pickled in batch.column(0):
                result = pickle.dumps(work(pickle.loads(pickled.as_buffer())), protocol=5)  # noqa: S301
                yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})

    frame = spark.createDataFrame(pa.table({"spec": [pickle.dumps(spec)]})).coalesce(1)
    found = frame.mapInArrow(run, "result binary").toArrow()
    return pickle.loads(found.column(0)[0].as_buffer())  # noqa: S301  what our own worker made


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """A stream to create."""

    login: NatsConfig
    stream: str
    """Its name."""
    config: Mapping[str, Any]
    """Its configuration, as the JetStream API has it."""
    first: int
    """First sequence."""
    last: int
    """Last sequence."""
    consumers: Sequence[tuple[Mapping[str, Any], int]]
    """Configurations of consumers to create, as the JetStream API has them, and their ack floors."""


async def check_target(login: NatsConfig, stream: str) -> None:
    """Check that the server can restore and that the stream does not exist. Raises SourceError."""
    async with ReadSession(login, _NAME, timeout=_TIMEOUT) as session:
        await _restore(session, stream).check()


async def send(order: RestoreOrder, made: Made, sent: Callable[[int], None]) -> dict[str, Any]:
    """Restore the stream from the numbers of messages and pieces in `made`; return the server's STREAM.INFO.

    `sent` is called with the number of messages sent so far. If anything fails, the incomplete stream is deleted.
    """
    total = 0
    async with ReadSession(order.login, _NAME, timeout=_TIMEOUT) as session:
        restore = _restore(session, order.stream)
        await restore.check()
        state = {"first_seq": order.first, "last_seq": order.last}
        with _terminated() as ignore_termination:
            try:
                await restore.begin(order.config, state)
                await restore.create(b"".join(backup.framed(backup.head(order.first, order.last, order.consumers))))
                for future in made:
                    count, chunks = await _patiently(future, restore)
                    for chunk in chunks:
                        await restore.send(chunk)
                        if (task := asyncio.current_task()) is not None and task.cancelling():
                            raise asyncio.CancelledError  # nats-py swallows a cancellation during a flush
                    total += count
                    sent(total)
                await restore.send(b"".join(backup.framed(backup.END)))
                return await restore.finish()
            except BaseException as error:
                ignore_termination()
                reason = await restore.abort()
                if reason is None:
                    raise
                raise SourceError(
                    f"{str(error) or 'interrupted'}; the incomplete stream {order.stream} could not be removed "
                    f"({reason}); if this restore created it, delete it: nats stream rm {order.stream}"
                ) from error


def _restore(session: ReadSession, stream: str) -> StreamRestore:
    return StreamRestore(session, stream, padding=backup.PADDING, broken=backup.BROKEN)


async def _patiently(future: Future[tuple[int, list[bytes]]], restore: StreamRestore) -> tuple[int, list[bytes]]:
    """Wait for a piece; meanwhile keep the restore alive."""
    waiting = asyncio.wrap_future(future)
    while not (await asyncio.wait((waiting,), timeout=KEEP_ALIVE))[0]:
        await restore.keep_alive()
    return waiting.result()


@contextmanager
def _terminated() -> Iterator[Callable[[], None]]:
    """Cancel the task on SIGTERM, so that it can clean up. Yields what makes SIGTERM have no effect, until the end."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_termination(act: Callable[[], object]) -> None:
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread, or no such signals
            loop.add_signal_handler(signal.SIGTERM, act)

    if task is not None:
        on_termination(task.cancel)
    try:
        yield lambda: on_termination(lambda: None)
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)
