"""Turn archived rows back into received frames."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s
from jetcapture_py.archive.arrow_bytes import text_of
from jetcapture_py.jetstream.publish.frames import header_blocks
from jetcapture_py.jetstream.wire.inbox import Received


def unescaped(subjects: pa.Array, escaped: pa.BooleanArray) -> pa.Array:
    """Return the subjects; as bytes if some are `escaped`, because their bytes are not UTF-8."""
    if not pc.any(escaped).as_py():
        return subjects
    data = subjects.cast(pa.binary())
    texts = [None if text is None else layout.unescape_subject(text) for text in data.filter(escaped).to_pylist()]
    return pc.replace_with_mask(data, escaped, pa.array(texts, pa.binary()))


def subjects_of(rows: pa.RecordBatch) -> pa.BinaryArray:
    """Return the original subjects, including those in the quarantine that are not UTF-8."""
    subjects = rows.column(layout.SUBJECT).cast(pa.binary())
    if layout.STAGE not in rows.schema.names:
        return subjects
    odd = pc.fill_null(pc.equal(rows.column(layout.STAGE), layout.NOT_UTF8), False)  # noqa: FBT003
    return unescaped(subjects, odd)


def header_blocks_of(rows: pa.RecordBatch) -> pa.BinaryArray | None:
    """Return the original header blocks, including invalid ones in the quarantine; "" without headers, None if no row
    has any."""
    blocks = header_blocks(rows.column(layout.HEADERS), {}, len(rows), stored=True)
    if layout.STAGE in rows.schema.names and layout.RAW_HEADERS in rows.schema.names:
        raw = rows.column(layout.RAW_HEADERS)
        if raw.null_count < len(rows):
            blocks = pc.coalesce(raw, pa.scalar(b"", pa.binary()) if blocks is None else blocks)
    return blocks


def received_of(rows: pa.RecordBatch, consumer: str) -> Received:
    """Return archived messages as delivered by `consumer`, each of one row with its payload."""
    received = Received()
    if not len(rows):
        return received
    micros = rows.column(layout.TIMESTAMP).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    times = pc.add(pc.multiply(micros, 1000), pc.fill_null(rows.column(layout.NANOS).cast(pa.int64()), 0))
    seqs, delivered, times = (
        column.cast(pa.string()).cast(pa.binary())
        for column in (rows.column(layout.SEQ), rows.column(layout.DELIVERED), times)
    )
    streams = rows.column(layout.STREAM).cast(pa.binary())
    texts = [b"$JS.ACK", streams, consumer.encode(), delivered, seqs, seqs, times, b"0"]
    blocks = header_blocks_of(rows)
    blocks = pa.array([b""] * len(rows), pa.binary()) if blocks is None else blocks
    parts = [subjects_of(rows), pc.binary_join_element_wise(*texts, b"."), blocks, rows.column(layout.PAYLOAD)]
    edges, memory = text_of(pc.binary_join_element_wise(*parts, b""))
    lengths: list[Int64s] = [pc.binary_length(part).to_numpy().astype(np.int64) for part in parts]
    subject, reply, headers = np.cumsum(lengths[:3], axis=0) + edges[:-1]
    offsets = np.stack([edges[:-1], subject, subject, reply, reply, headers, edges[1:]], axis=1).astype(np.int32)
    received.add(memory, offsets, int((lengths[2] + lengths[3]).sum()))
    return received
