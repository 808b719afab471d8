"""Turn received messages into Arrow batches with exactly the columns declared to Spark.

Envelope columns are those of the archive. All other columns are decoded from the payload by the capture's decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.config.column_types import parse_type, rebuilt
from jetcapture_py.config.decoding import FORMATS
from jetcapture_py.errors import ConfigError, SourceError
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import BatchTooWideError, Decoder, Failure, MessageBatch, decode_checked
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.envelope import assemble
from jetcapture_py.transform.prepare import first_rows, rows_of
from spark_jobs.datasource.offsets import StreamPartition
from spark_jobs.datasource.options import ReadOptions

_ENVELOPE = {layout.STREAM: pa.string(), **{field.name: field.type for field in ENVELOPE}, layout.ROW: pa.int32()}
_SPARK_TYPES = {name: from_arrow_type(dtype).simpleString() for name, dtype in _ENVELOPE.items()}
_SPARK_TYPES[layout.TIMESTAMP] = "timestamp_ltz"  # regardless of spark.sql.timestampType
_DECLARED = {"tinyint": "int8", "smallint": "int16", "int": "int32", "float": "float32"}
"""Declared types for Spark's type names, where they differ."""
_DECLARED_NAME = re.compile(rf"\b({'|'.join(_DECLARED)})(?=[,>]|$)")

_SIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
"""Types read in place of unsigned integers, which Spark lacks."""
_OF_SCHEMA = [name for name, format_ in FORMATS.items() if "schema" in format_.needs]
"""Formats with a schema of columns."""
_BY_POSITION = [name for name, format_ in FORMATS.items() if "header" in format_.takes]
"""Formats whose columns may be fields by position, without names."""


def schema_text(options: ReadOptions) -> str:
    """Return the columns of a read without a schema, as DDL: the envelope, then `columns`. Raises ConfigError."""
    if options.format not in ("raw", *_OF_SCHEMA) and not options.columns:
        raise ConfigError(_nothing_to_decode(options))
    names = [name for name in layout.ENVELOPE if name != layout.HEADERS or options.include_headers]
    names += [layout.ROW] if _several_rows(options) else []
    columns = [f"{name} {_SPARK_TYPES[name]}" for name in names]
    if options.format in _OF_SCHEMA and not options.columns:
        fields = _spark_types(_stored(_decoder(options, {})))
        columns += [f"`{name}` {kind.simpleString()}" for name, kind in fields.items()]
    return ", ".join([*columns, *filter(None, [options.columns])])


def _nothing_to_decode(options: ReadOptions) -> str:
    return f"format {options.format}: no column to decode: declare them in option columns, or in the schema"


def _several_rows(options: ReadOptions) -> bool:
    return options.rows not in (None, "one")


def _decoder(options: ReadOptions, columns: Mapping[str, Mapping[str, str]]) -> Decoder:
    try:
        return make_decoder(options.decoding(columns))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _stored(decoder: Decoder) -> pa.Schema:
    """Return the columns of a decoder."""
    nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in ENVELOPE], schema=ENVELOPE)
    return decoder.decode(MessageBatch(stream="", rows=nothing)).fields.schema


def _spark_types(schema: pa.Schema) -> dict[str, st.DataType]:
    """Return Spark's types of a decoder's columns. Raises ConfigError for a type unknown to Spark."""
    try:
        return {field.name: from_arrow_type(rebuilt(field.type, lambda of: _SIGNED.get(of, of))) for field in schema}
    except PySparkTypeError as error:
        raise ConfigError(f"Spark does not have a type of the schema: {error}") from None


class MessageColumns:
    """Builds Arrow batches with the columns of `schema`. Raises ConfigError for columns that cannot be read."""

    def __init__(self, options: ReadOptions, schema: st.StructType) -> None:
        self._options = options
        self._names = schema.fieldNames()
        types: dict[str, st.DataType] = {}
        for field in schema:
            if field.name in types:
                raise ConfigError(f"duplicate column {field.name}")
            if not field.nullable:
                raise ConfigError(f"column {field.name}: published data cannot be declared NOT NULL")
            types[field.name] = field.dataType
        # regardless of the session's case sensitivity: no decoded field gets such a name
        own = (*layout.ENVELOPE, *([layout.ROW] if _several_rows(options) else []))
        self._envelope = {name: name.lower() for name in types if name.lower() in own}
        fields = {name: kind for name, kind in types.items() if name not in self._envelope}
        arrow: dict[str, pa.DataType] = {}
        for name, column in self._envelope.items():
            _, arrow[name] = _type(name, types[name])
            if arrow[name] != _ENVELOPE[column]:
                raise ConfigError(f"column {name}: its type is {_SPARK_TYPES[column]}")
        if not fields and options.format != "raw":
            raise ConfigError(_nothing_to_decode(options))
        if fields and options.format == "raw":
            raise ConfigError(f"format raw has no column {next(iter(fields))}; format json decodes it from the payload")
        self._fields = list(fields)
        self._decoder, decoded = _choose_decoder(options, fields)
        self._schema = pa.schema([(name, (arrow | decoded)[name]) for name in types])
        wanted = set(self._envelope.values())
        self._headers = layout.HEADERS in wanted
        self.bare = not fields and wanted.isdisjoint((layout.HEADERS, layout.PAYLOAD))
        """Whether only subjects and positions are needed."""

    def batches(self, chunks: Iterable[tuple[str, Received]], part: StreamPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of `part` as Arrow batches, each message once; `chunks` are pairs of consumer name and
        messages."""
        at = part.first
        for consumer, received in chunks:
            assembled = assemble(self._options.stream, consumer, received, headers=self._headers)
            batch, failures = assembled.batch, assembled.failures
            seqs = batch.column(layout.SEQ).to_numpy()
            low, high = np.searchsorted(seqs, (at, part.end)).tolist()
            if high > low:
                at = int(seqs[high - 1]) + 1
                if self._options.mode == "FAILFAST":
                    self._check(batch, [failure for failure in failures if low <= failure.index < high])
                yield from self._batches(batch.slice(low, high - low))

    def _batches(self, batch: MessageBatch) -> Iterator[pa.RecordBatch]:
        """Yield the batch, in parts if it decodes to too much at once."""
        try:
            yield self._batch(batch)
        except BatchTooWideError:
            half = len(batch) // 2
            yield from self._batches(batch.slice(0, half))
            yield from self._batches(batch.slice(half, len(batch) - half))

    def _batch(self, batch: MessageBatch) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {layout.ROW: pa.array(np.zeros(len(batch)), pa.int32())}
        if self._decoder is not None:
            decoded = decode_checked(self._decoder, batch)
            places: pa.Int32Array | None = None
            if self._options.mode == "FAILFAST":
                self._check(batch, decoded.failures)
            if (messages := decoded.messages) is not None:
                if self._options.mode == "PERMISSIVE":
                    messages, places = _with_failures(messages, decoded.failures)
                first = first_rows(messages)
                batch = rows_of(batch, messages, first)
                numbers = np.arange(len(batch)) - first if first is not None else np.zeros(len(batch))
                columns[layout.ROW] = pa.array(numbers, pa.int32())
            columns |= {name: self._column(decoded.fields, name, len(batch), places) for name in self._fields}
        arrays = []
        for name in self._names:
            column = self._envelope.get(name, name)
            if column == layout.STREAM:
                arrays.append(pa.repeat(pa.scalar(self._options.stream, pa.string()), len(batch)))
            else:
                arrays.append(columns[column] if column in columns else batch.column(column))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, fields: pa.RecordBatch, name: str, rows: int, places: pa.Int32Array | None) -> pa.Array:
        """Return a decoded column with `rows` rows, taken from the indexes `places`, with the type that Spark
        expects."""
        of = self._schema.field(name).type
        stored = layout.field_name(name)
        if stored not in fields.schema.names:  # every message failed
            return pa.nulls(rows, of)
        column = fields.column(stored) if places is None else fields.column(stored).take(places)
        return column if column.type == of else column.cast(of)

    def _check(self, batch: MessageBatch, failures: Sequence[Failure]) -> None:
        if failures:
            seq = batch.column(layout.SEQ)[failures[0].index].as_py()
            raise SourceError(
                f"message {seq} of stream {self._options.stream}: {failures[0].error}; "
                "mode PERMISSIVE makes its columns null, DROPMALFORMED leaves it out"
            )


def _with_failures(messages: pa.Int32Array, failures: Sequence[Failure]) -> tuple[pa.Int32Array, pa.Int32Array]:
    """Return the message of each row, with a row for each failure, and the decoded row's index: null for a failure."""
    origins = np.concatenate([messages.to_numpy(), np.array([failure.index for failure in failures], np.int32)])
    order = np.argsort(origins, kind="stable")
    places = pa.array(np.arange(len(origins), dtype=np.int32), mask=np.arange(len(origins)) >= len(messages))
    return pa.array(origins[order], pa.int32()), places.take(pa.array(order))


def _choose_decoder(
    options: ReadOptions, fields: Mapping[str, st.DataType]
) -> tuple[Decoder | None, dict[str, pa.DataType]]:
    """Return the decoder of `fields`, and the Arrow types that Spark expects. Raises ConfigError.

    Fields with the types in the format's schema need no declaration.
    """
    if not fields:
        return None, {}
    if options.format in _OF_SCHEMA and not options.columns:
        whole = _decoder(options, {})
        if fields.items() <= _spark_types(_stored(whole)).items():
            return whole, {name: to_arrow_type(kind, timezone="UTC") for name, kind in fields.items()}
    types = {name: _type(name, kind) for name, kind in fields.items()}
    texts = {name: text for name, (text, _) in types.items()}
    decoder = _decoder(options, _declared(texts, paths=options.format not in _BY_POSITION))
    return decoder, {name: type_ for name, (_, type_) in types.items()}


def _declared(fields: Mapping[str, str], *, paths: bool) -> dict[str, dict[str, str]]:
    """Return the decoder's columns. A name escaped by the archive, such as `date_`, is the field `date`."""
    declared = {}
    for name, text in fields.items():
        plain = name.removesuffix("_")
        escaped = name != plain and layout.field_name(plain) == name
        declared[name] = {"type": text} | ({"path": plain} if escaped and paths else {})
    return declared


def _type(name: str, kind: st.DataType) -> tuple[str, pa.DataType]:
    """Return a column's type, in the syntax of declared columns and as Spark expects it. Raises ConfigError."""
    text = _DECLARED_NAME.sub(lambda match: _DECLARED[match[1]], kind.simpleString())
    with suppress(ValueError):  # a type or a field's name that cannot be declared
        if (type_ := parse_type(text)) == to_arrow_type(kind, timezone="UTC"):  # not with inner NOT NULL
            return text, type_
    raise ConfigError(f"column {name}: cannot be read as {kind.simpleString()}")
