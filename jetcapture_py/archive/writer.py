"""Encode the rows of a sealed block as one object, and name it: the same messages get the same name."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Micros, Seqs
from jetcapture_py.archive.block_writer import TextWriter, UserWriter
from jetcapture_py.archive.bundles import MAX_ROWS
from jetcapture_py.archive.encodings import settings
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.messages import MessageSet, first_of_each
from jetcapture_py.archive.ordering import identity, ordered
from jetcapture_py.archive.schema import (
    KEY_FIELD,
    REPLY,
    STREAM_FIELD,
    conform,
    key_position,
    shared_nulls,
    unify_batches,
    with_field_ids,
)
from jetcapture_py.archive.sparse import ColumnSet
from jetcapture_py.log import event
from jetcapture_py.text import one_line

log = logging.getLogger("jetcapture.encode")

ROW_GROUP_BYTES = 32 << 20
"""Uncompressed bytes of a row group, so that readers can skip parts of an object and read others in parallel."""

_MIN_ROWS = 1024
"""Minimum rows of a row group, if the object has as many."""

_CHECKSUMS = (layout.CHECKSUM, layout.FOOTER_CHECKSUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBlock:
    """An object ready to be stored. `messages` counts distinct messages, `duplicates` dropped rows.

    `data` is in memory, or a mapped file if `in_file`.
    """

    name: layout.ObjectName
    data: pa.Buffer
    messages: int
    duplicates: int
    in_file: bool = False

    @property
    def memory(self) -> int:
        """Memory used by `data`, in bytes."""
        return 0 if self.in_file else int(self.data.size)


class FileSink(Protocol):
    """A file to write an object to, instead of memory.

    Obligations: `write` raises OSError when there is no room, after which `failed` is true; `getvalue` returns what was
    written as a writable buffer that outlives the file's name.
    """

    failed: bool

    @property
    def closed(self) -> bool: ...

    def write(self, data: Any) -> int: ...

    def tell(self) -> int: ...

    def flush(self) -> None:
        """Do nothing: `getvalue` sees everything."""
        ...

    def getvalue(self) -> pa.Buffer:
        """Return everything written."""
        ...

    def clear(self) -> None:
        """Discard what was written. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Writes blocks of one stream; `interval` is the block interval in seconds.

    `stream_created` (RFC 3339), `consumer`, `key_rule` and `writer`, the name of this process, only go into the footer.
    `time` is the source of the buckets' time. `format` writes formats other than Parquet; the quarantine is always
    Parquet. `bundles` is the number of bundles of a bundled block. `replaces` are the digests of objects that the new
    ones replace without some of their rows.
    """

    stream: str
    interval: int
    compression: str
    compatible: bool = False
    """Whether to use only encodings that every reader knows."""
    stream_created: str = ""
    consumer: str = ""
    key_rule: str | None = None
    time: str = layout.STREAM_TIME
    format: TextWriter | UserWriter | None = None
    bundles: int = 0
    replaces: Sequence[str] = ()
    writer: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")

    @property
    def whole_blocks(self) -> bool:
        """Whether the format needs each block as one table, and returns the object in memory."""
        return isinstance(self.format, UserWriter)

    def for_stream(self, stream_created: str, consumer: str) -> Encoder:
        """Return an encoder that also knows the stream and the consumer."""
        return replace(self, stream_created=stream_created, consumer=consumer)

    def encode(
        self,
        block: BlockId,
        sealed_by: str,
        batches: Sequence[pa.RecordBatch],
        known: ColumnSet | None = None,
        sink: FileSink | None = None,
    ) -> EncodedBlock:
        """Encode the rows of one block, each message once, sorted by sequence, or in a bundle by key and sequence.

        CPU-bound; call it in a thread.

        `known` are all columns of a decoder that omits those without a value. The object is made in memory, or in
        `sink`, whose errors are raised.
        """
        if known is not None:
            batches = [known.with_values(batch) for batch in batches]
        table = pa.Table.from_batches(_conformed(batches))
        if known is not None:
            table = known.complete(table)
        pieces, duplicates = ordered(table, by_key=bool(block.bundle))
        constants = self._constants(block, table.schema)
        schema = table.schema
        for position, column, _ in constants:
            schema = schema.insert(position, column)
        whole = (_with_constants(piece, constants) for piece in pieces)
        if self.format is not None and not block.quarantine:
            return self._encode_as(self.format, block, schema, whole, duplicates, sink)
        with ObjectWriter(self, block, schema, sink) as writer:
            for piece in whole:
                writer.write(piece)
            return writer.finish(sealed_by, duplicates)

    def _constants(self, block: BlockId, schema: pa.Schema) -> list[tuple[int, pa.Field, str | None]]:
        """Return position, field and value of the constant columns: the stream's name and, under keys, the key.

        The quarantine has no keys. Other formats have them in bundles only: Spark reads CSV columns by position,
        without those in the path.
        """
        stream = (0, STREAM_FIELD, self.stream)
        if self.format is not None or block.quarantine or block.bundle:
            return [stream]
        return [(key_position(schema), KEY_FIELD, block.key or None), stream]

    def _encode_as(
        self,
        format: TextWriter | UserWriter,  # noqa: A002 - named as the setting is
        block: BlockId,
        schema: pa.Schema,
        pieces: Iterable[pa.Table],
        duplicates: int,
        sink: FileSink | None,
    ) -> EncodedBlock:
        """Encode sorted rows, each message once, in a format other than Parquet."""
        rows, parts = 0, list[tuple[Seqs, Micros]]()

        def counted() -> Iterator[pa.Table]:
            for piece in pieces:
                nonlocal rows
                rows += piece.num_rows
                parts.append(_messages(piece))
                yield piece

        out = pa.BufferOutputStream() if sink is None else sink
        format.write(counted(), schema, out)
        messages = _joined(parts)
        name = _name(self, block, schema, messages, rows, format.suffix)
        data = out.getvalue()
        return EncodedBlock(
            name=name, data=data, messages=len(messages), duplicates=duplicates, in_file=sink is not None
        )

    def encode_or_salvage(
        self,
        block: BlockId,
        sealed_by: str,
        batches: Sequence[pa.RecordBatch],
        known: ColumnSet | None = None,
        sink: FileSink | None = None,
    ) -> EncodedBlock:
        """Call `encode`; if the rows cannot be written, make a quarantine object of the messages instead."""
        try:
            return self.encode(block, sealed_by, batches, known, sink)
        except BaseException as error:  # PyO3's PanicException is no Exception
            if sink is not None and sink.failed:
                raise  # the file failed, not the rows
            event(log, logging.ERROR, "block.quarantined", key=block.key, bucket=block.bucket, error=error)
            return self.salvage(block, batches, error, sink)

    def salvage(
        self, block: BlockId, batches: Sequence[pa.RecordBatch], error: BaseException, sink: FileSink | None = None
    ) -> EncodedBlock:
        """Make a quarantine object of the block's messages, in `sink` if it is still open.

        It has their payloads or, where these are not kept, the decoded columns, unless Parquet cannot hold them either.
        """
        target, reason = BlockId(key=None, bucket=block.bucket, quarantine=True), one_line(error)
        if any(layout.PAYLOAD not in batch.schema.names for batch in batches):
            with suppress(Exception):
                rows = [_salvaged(batch, batch.schema.names, reason) for batch in batches]
                return self.encode(target, "error", rows, sink=_cleared(sink))
        rows = [_salvaged(batch, (*layout.ENVELOPE, layout.TIME, REPLY), reason) for batch in batches]
        return self.encode(target, "error", rows, sink=_cleared(sink))


class ObjectWriter:
    """Writes one Parquet object piece by piece; `finish` completes and names it.

    The first piece decides how its columns are encoded. It is made in memory, unless there is a `sink`.

    A context manager: it discards an unfinished object.
    """

    def __init__(self, encoder: Encoder, block: BlockId, schema: pa.Schema, sink: FileSink | None = None) -> None:
        self._encoder = encoder
        self._block = block
        self._schema_id, self._numbered = _described(schema, block.quarantine)
        self._in_file = sink is not None
        self._sink = pa.BufferOutputStream() if sink is None else sink
        self._file: pq.ParquetWriter | None = None
        self._messages: list[tuple[Seqs, Micros]] = []
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def size(self) -> int:
        """Bytes so far, without the footer."""
        return int(self._sink.tell())

    def write(self, table: pa.Table) -> None:
        """Add rows of further messages, sorted by identity, each once, after all rows added before.

        Of a bundle, the rows are sorted by key first, and up to `MAX_ROWS` are one row group.
        """
        if self._file is None:
            encoder = self._encoder
            by_key = bool(self._block.bundle)
            how = settings(table, encoder.compression, by_key=by_key, compatible=encoder.compatible)
            self._file = pq.ParquetWriter(self._sink, self._numbered, **how)
        self._messages.append(_messages(table))
        self._rows += table.num_rows
        rows = table.num_rows
        if self._block.bundle:
            rows = MAX_ROWS
        elif rows > _MIN_ROWS:
            groups = -(-table.nbytes // ROW_GROUP_BYTES)
            rows = max(-(-rows // max(groups, 1)), _MIN_ROWS)
        self._file.write_table(table, row_group_size=rows)

    def finish(self, sealed_by: str, duplicates: int = 0) -> EncodedBlock:
        """Return the completed object; `duplicates` is the number of dropped rows. Raises ValueError without rows."""
        if self._file is None:
            raise ValueError("an object without rows has no name")
        messages = _joined(self._messages)
        name = _name(self._encoder, self._block, self._numbered, messages, self._rows)
        # random placeholders: user data cannot contain them by chance
        unsigned = {entry: secrets.token_hex(layout.CHECKSUM_DIGITS // 2) for entry in _CHECKSUMS}
        entries = self._metadata(name, len(messages), sealed_by) | unsigned
        self._file.add_key_value_metadata({layout.METADATA_PREFIX + entry: text for entry, text in entries.items()})
        self._file.close()
        data = self._sink.getvalue()
        _sign(data, unsigned)
        return EncodedBlock(name=name, data=data, messages=len(messages), duplicates=duplicates, in_file=self._in_file)

    def _metadata(self, name: layout.ObjectName, messages: int, sealed_by: str) -> dict[str, str]:
        entries = {
            "format": layout.FORMAT,
            "stream": name.stream,
            "stream_created": self._encoder.stream_created,
            "consumer": self._encoder.consumer,
            "writer": self._encoder.writer,
            "bucket": str(name.bucket),
            "interval": str(self._encoder.interval),
            "first_seq": str(name.first_seq),
            "last_seq": str(name.last_seq),
            "messages": str(messages),
            "rows": str(name.rows),
            "sealed_by": sealed_by,
            "schema_id": self._schema_id,
            "digest": name.digest,
        }
        if name.event_time:
            entries["time"] = self._encoder.time
        if name.quarantine:
            entries["quarantine"] = "true"
        if name.key is not None:
            entries["key"] = name.key
        if self._encoder.key_rule is not None:
            entries["key_rule"] = self._encoder.key_rule
        if self._encoder.replaces:
            entries[layout.REPLACES] = " ".join(self._encoder.replaces)
        if name.bundle:
            entries[layout.BUNDLES] = str(self._encoder.bundles)  # the last entry, so that no other can be taken for it
        return entries


def _with_constants(table: pa.Table, constants: Sequence[tuple[int, pa.Field, str | None]]) -> pa.Table:
    for position, column, value in constants:
        table = table.add_column(position, column, pa.repeat(pa.scalar(value, pa.string()), table.num_rows))
    return table


def _name(
    encoder: Encoder,
    block: BlockId,
    schema: pa.Schema,
    messages: MessageSet,
    rows: int,
    suffix: str = layout.SUFFIX,
) -> layout.ObjectName:
    """Name the object by its messages."""
    seqs, timestamps = messages.seqs, messages.times
    return layout.ObjectName(
        stream=encoder.stream,
        key=block.key,
        bucket=block.bucket,
        first_seq=int(seqs[0]),
        last_seq=int(seqs[-1]),
        rows=rows,
        digest=layout.digest(seqs.tobytes(), timestamps.tobytes()),
        quarantine=block.quarantine,
        event_time=layout.TIME in schema.names,
        suffix=suffix,
        bundle=block.bundle,
    )


def _joined(parts: Sequence[tuple[Seqs, Micros]]) -> MessageSet:
    """Join the messages of pieces. Those of a bundle are not sorted."""
    return MessageSet(*map(np.concatenate, zip(*parts, strict=True)))


def _sign(data: pa.Buffer, unsigned: Mapping[str, str]) -> None:
    """Replace the placeholders with the checksums of the finished object and then of its footer."""
    view = memoryview(data).cast("B")
    start = len(view) - int.from_bytes(view[-8:-4], "little") - 8
    footer = bytes(view[start:])
    both, own = (start + layout.checksum_offsets(footer, entry, unsigned[entry])[0] for entry in _CHECKSUMS)
    view[both : both + layout.CHECKSUM_DIGITS] = layout.checksum([view], [both, own]).encode()
    view[own : own + layout.CHECKSUM_DIGITS] = layout.checksum([view[start:]], [own - start]).encode()


@lru_cache(maxsize=256)
def _described(schema: pa.Schema, quarantine: bool) -> tuple[str, pa.Schema]:
    """Return the schema's id and the schema with field ids."""
    schema_id = layout.schema_id(f"{column.name}:{column.type}" for column in schema)
    return schema_id, with_field_ids(schema, quarantine=quarantine)


def _cleared(sink: FileSink | None) -> FileSink | None:
    """Discard a failed attempt's output from the sink; return None if it is closed."""
    if sink is None or sink.closed:
        return None
    sink.clear()
    return sink


def _salvaged(batch: pa.RecordBatch, names: Sequence[str], reason: str) -> pa.RecordBatch:
    """Return the columns `names` of a batch, and the quarantine's."""
    count = len(batch)
    headers = batch.column(layout.RAW_HEADERS) if layout.RAW_HEADERS in batch.schema.names else None
    dropped = (layout.RAW_HEADERS, layout.KEY)  # the quarantine has no keys
    rows = batch.select([name for name in batch.schema.names if name in names and name not in dropped])
    reserved = (layout.STAGE, layout.ERROR)
    rows = rows.rename_columns([f"decoded_{name}" if name.lower() in reserved else name for name in rows.schema.names])
    rows = rows.append_column(layout.STAGE, pa.array(["encode"] * count, pa.string()))
    rows = rows.append_column(layout.ERROR, pa.array([reason] * count, pa.string()))
    return rows.append_column(layout.RAW_HEADERS, pa.nulls(count, pa.binary()) if headers is None else headers)


def _conformed(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """Return the batches without ack subjects, converted to a common schema."""
    rows = [batch.drop_columns([REPLY]) for batch in batches]
    schema = rows[0].schema
    if any(not batch.schema.equals(schema) for batch in rows[1:]):
        schema, nulls = unify_batches(rows), shared_nulls()
        rows = [conform(batch, schema, nulls) for batch in rows]
    return rows


def _messages(table: pa.Table) -> tuple[Seqs, Micros]:
    """Return sequences and timestamps of sorted rows, each message once."""
    seqs, timestamps = identity(table)
    if layout.ROW not in table.schema.names:
        return seqs, timestamps
    first = first_of_each(seqs, timestamps)
    return seqs[first], timestamps[first]
