"""Decode and route live messages as the capture does, into the rows that the archive will have.

The rows have the columns of a plan of the archive, with the same types and conversions as an object's rows. Messages of
the quarantine have no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.capture.inferred import learn_archived
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.model import Config, NatsConfig
from jetcapture_py.config.section import validated
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.acks import sequences
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.prepare import Preparer
from spark_jobs.datasource.boundary import Boundary
from spark_jobs.datasource.offsets import StreamPartition, split
from spark_jobs.datasource.options import ReadOptions
from spark_jobs.datasource.read import fetch
from spark_jobs.datasource.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRows:
    """Turns messages into rows. It can be pickled, for workers."""

    config: Config
    """The capture's configuration."""
    reader: PlanReader
    """Converts rows like those of an object."""

    def batches(self, chunks: Iterable[tuple[str, Received]], first: int, end: int) -> Iterator[tuple[int, Any]]:
        """Yield batches of rows, each with the sequence after its messages.

        `chunks` are pairs of consumer name and messages, in the stream's order; those from `first` to `end` (exclusive)
        are used, each once. Raises JetcaptureError if a column does not fit the archive's.
        """
        # keys are then a column, as in the result
        block = self.config.block.model_copy(update={"bundles": 1})
        prepare = preparer(self.config.model_copy(update={"block": block}), None, None)
        learn_archived(prepare.decoder, self.config)
        for consumer, received in chunks:
            seqs = sequences(prepare.stream, consumer, received.replies)
            own = (seqs >= first) & (seqs < end)
            if own.any():
                first = int(seqs[own].max()) + 1
                some = received if own.all() else received.where(own)
                yield first, list(self._rows(replace(prepare, consumer=consumer), some))

    def _rows(self, prepare: Preparer, received: Received) -> Iterator[pa.RecordBatch]:
        """Yield the rows of messages, in parts if they decode to too much at once."""
        try:
            prepared = prepare(received)
        except BatchTooWideError:
            for part in received.split(len(received) // 2):
                yield from self._rows(prepare, part)
            return
        streams = pa.repeat(pa.scalar(prepare.stream, pa.string()), prepared.rows.num_rows)
        rows = prepared.rows.append_column(layout.STREAM, streams)
        for run in prepared.runs:
            own = rows.slice(run.start, run.length)
            seqs = own.column(layout.SEQ).to_numpy()
            name = ObjectName(
                stream=prepare.stream,
                key=None,
                bundle=run.bundle,
                bucket=run.bucket,
                first_seq=int(seqs.min()),
                last_seq=int(seqs.max()),
                rows=run.length,
                digest="",
            )
            try:
                batch = self.reader.rows(own, name)
            except JetcaptureError as error:
                column = str(error).partition(" in ")[0]
                raise JetcaptureError(
                    f"{column} in messages {name.first_seq} to {name.last_seq} of stream {prepare.stream}, which are "
                    f"not archived yet, and another type in its archive: read it again once they are, or without it"
                ) from error
            if batch.num_rows:
                yield batch


def reading_options(login: NatsConfig, stream: str, *, watched: bool, timeout: str) -> ReadOptions:
    """Return options of the source `nats` for reading a stream. Raises ConfigError."""
    return validated(ReadOptions, {"nats": login, "stream": stream, "failOnDataLoss": watched, "timeout": timeout})


def live_parts(boundary: Boundary, first: int, end: int, parts: int | None) -> list[StreamPartition]:
    """Divide the capture's messages from `first` to `end` (exclusive) among tasks."""
    return [
        replace(part, subjects=subjects)
        for low, high, subjects in boundary.segments(first, end)
        for part in split(low, high, boundary.origin, parts)
    ]


def live_rows(
    rows: StreamRows, options: ReadOptions, part: StreamPartition
) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """Read a part of the stream, as `StreamRows.batches` yields it. Raises JetcaptureError."""
    own = options.model_copy(update={"subjects": part.subjects})
    with Session(own, f"jetcapture spark {own.stream}") as session:
        messages = fetch(session, own, part, bare=False)
        yield from rows.batches(messages, part.first, part.end)
