"""Compute something for every range of the archive, in order and several at a time: in threads, or as Spark jobs."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from spark_jobs.restoring.part import PartSpec

T = TypeVar("T")

Work = Callable[[PartSpec], T]

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
        """Compute on Spark's executors."""
        known = _MAX_JOBS if is_remote() else spark.sparkContext.defaultParallelism
        return cls(min(_MAX_JOBS, known), spark)

    def futures(self, work: Work[T], specs: Sequence[PartSpec]) -> Generator[Future[T]]:
        """Yield the futures of all results, in order. No more than a few results are computed ahead."""
        do: Work[T] = work if self.spark is None else _OnSpark(self.spark, work)
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
        """Yield all results, in order."""
        for future in self.futures(work, specs):
            yield future.result()


@dataclass(frozen=True, slots=True)
class _OnSpark:
    """Computes a range in a Spark job of one task."""

    spark: SparkSession
    work: Work[Any]

    def __call__(self, spec: PartSpec) -> Any:
        frame = self.spark.createDataFrame(pa.table({"spec": [pickle.dumps(spec)]})).coalesce(1)
        found = frame.mapInArrow(_in_worker(self.work), "result binary").toArrow()
        return pickle.loads(found.column(0)[0].as_buffer())  # noqa: S301  what our own worker made


def _in_worker(work: Work[Any]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for spec in batch.column(0):
                result = pickle.dumps(work(pickle.loads(spec.as_buffer())), protocol=5)  # noqa: S301
                yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})

    return run
