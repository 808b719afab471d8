"""Write rows to JetStream: one acknowledged message per row, stored once even if Spark retries a task.

A row's subject comes from the option `subject`, a template like a capture's key, such as `orders.{region}`;
by default it is `{subject}`, the row's column `subject` or `_nats_subject`. The payload is the first of the columns
`payload`, `value` and `_nats_payload` that exists; without any, all other columns form a JSON object, or a MessagePack
map with the same values. Headers come from `headers`, or from `_nats_headers` except those that are instructions to a
server. The message id is the column `msg_id` or the header `Nats-Msg-Id`. Column names ignore case.

A row without an id gets one from the write (the query and batch, or this `save()`), the partition, the row's position
in it, and a hash of the message. So a retried task publishes nothing twice within the stream's duplicate window if the
plan is deterministic: the same rows in the same order. Otherwise rows may be published twice, but no row is dropped as
a duplicate of another.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from jetcapture_py.errors import ConfigError
from spark_jobs.datasource.one_line import one_line_errors
from spark_jobs.datasource.options import WriteOptions
from spark_jobs.publishing.prepare import WRITTEN, Rows, Written
from spark_jobs.publishing.publish import publish_batches


@dataclass(frozen=True, slots=True)
class Published(WriterCommitMessage):
    """A task's result: numbers of acknowledged messages, and of duplicates among them."""

    published: int
    duplicates: int


def prepared(options: WriteOptions, schema: st.StructType) -> Written:
    """Return the preparation of rows for the sink. Raises JetcaptureError for columns that cannot be sent."""
    return Written(Rows(schema, options.subject or "{subject}", WRITTEN, format=options.format))


class _Writer:
    """Code shared by both writers."""

    def __init__(self, options: WriteOptions, schema: st.StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError("a stream only accepts mode append")
        prepared(options, schema)  # raises JetcaptureError for columns that cannot be sent
        self._options, self._schema = options, schema
        self._save = uuid.uuid4().hex

    def _publish(self, batches: Iterable[pa.RecordBatch], writing: str) -> Published:
        rows = prepared(self._options, self._schema)
        messages = rows.messages(batches, f"{writing}:{_task().partitionId()}")
        return Published(*publish_batches(messages, self._options.nats, self._options.window))


@one_line_errors
class BatchWriter(_Writer, DataSourceArrowWriter):
    """For `df.write` and INSERT. Spark creates one per write; all attempts of the tasks share it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        return self._publish(iterator, self._save)


@one_line_errors
class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """For `df.writeStream`. The query's id comes from its checkpoint, so a batch keeps its ids after a restart."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish one partition of one batch."""
        query, batch = (_task().getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        return self._publish(iterator, f"{query}:{batch}")


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("not in a Spark task")
    return task
