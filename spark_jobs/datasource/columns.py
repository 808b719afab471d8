"""Turn received messages into Arrow batches with exactly the columns declared to Spark.

Envelope columns are those of the archive. With format json all other columns are decoded from the payload by the
capture's decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.errors import ConfigError, SourceError
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import Failure, MessageBatch
from jetcapture_py.transform.decode import JsonDecoder, parse_type
from jetcapture_py.transform.envelope import assemble
from spark_jobs.datasource.offsets import StreamPartition
from spark_jobs.datasource.options import ReadOptions

_SPARK_TYPES = {
    layout.STREAM: "string",
    layout.SUBJECT: "string",
    layout.SEQ: "bigint",
    layout.TIMESTAMP: "timestamp_ltz",
    layout.DELIVERED: "int",
    layout.HEADERS: "map<string, array<string>>",
    layout.PAYLOAD: "binary",
}
_SCALARS: dict[st.DataType, str] = {
    st.BooleanType(): "bool",
    st.ByteType(): "int8",
    st.ShortType(): "int16",
    st.IntegerType(): "int32",
    st.LongType(): "int64",
    st.FloatType(): "float32",
    st.DoubleType(): "float64",
    st.StringType(): "string",
    st.BinaryType(): "binary",
    st.DateType(): "date",
    st.TimestampType(): "timestamp",
}

_NOTHING_TO_DECODE = "format json: no column to decode: declare them in option columns, or in the schema"


def schema_text(options: ReadOptions) -> str:
    """Return the columns of a read without a schema, as DDL: the envelope, then `columns`. Raises ConfigError."""
    if options.format == "json" and not options.columns:
        raise ConfigError(_NOTHING_TO_DECODE)
    names = [name for name in layout.ENVELOPE if name != layout.HEADERS or options.include_headers]
    return ", ".join([*(f"{name} {_SPARK_TYPES[name]}" for name in names), *filter(None, [options.columns])])


@dataclass(frozen=True, slots=True)
class _Declared:
    """A declared column; implements `jetcapture_py.transform.decode.json_declared.JsonColumn`."""

    type: str
    path: str | None
    unit: None = None


class MessageColumns:
    """Builds Arrow batches with the columns of `schema`. Raises ConfigError for columns that cannot be read."""

    def __init__(self, options: ReadOptions, schema: st.StructType) -> None:
        self._options = options
        self._names = schema.fieldNames()
        types: dict[str, str] = {}
        for field in schema:
            if field.name in types:
                raise ConfigError(f"duplicate column {field.name}")
            if not field.nullable:
                raise ConfigError(f"column {field.name}: published data cannot be declared NOT NULL")
            types[field.name] = _type(field.name, field.dataType)
        self._schema = pa.schema([(name, _arrow_type(name, text)) for name, text in types.items()])
        # in any case, whatever the session's case sensitivity: a JSON field never becomes a column of such a name
        self._envelope = {name: name.lower() for name in types if name.lower() in layout.ENVELOPE}
        for name, column in self._envelope.items():
            expected = pa.string() if column == layout.STREAM else ENVELOPE.field(column).type
            if self._schema.field(name).type != expected:
                raise ConfigError(f"column {name}: its type is {_SPARK_TYPES[column]}")
        fields = {name: text for name, text in types.items() if name not in self._envelope}
        if not fields and options.format == "json":
            raise ConfigError(_NOTHING_TO_DECODE)
        if fields and options.format == "raw":
            raise ConfigError(f"format raw has no column {next(iter(fields))}; format json decodes it from the payload")
        self._fields = list(fields)
        try:
            self._decoder = JsonDecoder(_declared(fields)) if fields else None
        except ValueError as error:
            raise ConfigError(str(error)) from None
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
                    self._check(batch, [each for each in failures if low <= each.index < high])
                yield self._batch(batch.slice(low, high - low))

    def _batch(self, batch: MessageBatch) -> pa.RecordBatch:
        fields: dict[str, pa.Array] = {}
        if self._decoder is not None:
            decoded = self._decoder.decode(batch)
            columns = decoded.fields.columns
            if self._options.mode == "FAILFAST":
                self._check(batch, decoded.failures)
            elif decoded.messages is not None and self._options.mode == "DROPMALFORMED":
                batch = MessageBatch(stream=batch.stream, rows=batch.rows.take(decoded.messages))
            elif decoded.messages is not None:
                rows = _row_numbers(decoded.messages, len(batch))
                columns = [column.take(rows) for column in columns]
            fields = dict(zip(self._fields, columns, strict=True))
        arrays = []
        for name in self._names:
            column = self._envelope.get(name)
            if column is None:
                arrays.append(fields[name])
            elif column == layout.STREAM:
                arrays.append(pa.repeat(pa.scalar(self._options.stream, pa.string()), len(batch)))
            else:
                arrays.append(batch.column(column))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _check(self, batch: MessageBatch, failures: Sequence[Failure]) -> None:
        if failures:
            seq = batch.column(layout.SEQ)[failures[0].index].as_py()
            raise SourceError(
                f"message {seq} of stream {self._options.stream}: {failures[0].error}; "
                "mode PERMISSIVE makes its columns null, DROPMALFORMED leaves it out"
            )


def _arrow_type(name: str, text: str) -> pa.DataType:
    try:
        return parse_type(text)
    except ValueError as error:  # a struct with field names that the decoder's type syntax cannot express
        raise ConfigError(f"column {name}: {error}") from None


def _row_numbers(messages: pa.Int32Array, length: int) -> pa.Int32Array:
    """Return the row number of each of `length` messages, null for messages without a row."""
    rows = np.zeros(length, np.int32)
    missing = np.ones(length, np.bool_)
    rows[messages] = np.arange(len(messages), dtype=np.int32)
    missing[messages] = False
    return pa.array(rows, mask=missing)


def _declared(fields: Mapping[str, str]) -> dict[str, _Declared]:
    """Return the decoder's columns. A name that the archive escapes, such as `date_`, reads the field `date`."""
    found = {}
    for name, text in fields.items():
        plain = name.removesuffix("_")
        found[name] = _Declared(text, plain if name != plain and layout.field_name(plain) == name else None)
    return found


def _type(name: str, kind: st.DataType) -> str:
    """Return the column's type in the syntax of declared columns."""
    inner = "published data cannot be declared NOT NULL"
    if isinstance(kind, st.StructType):
        if not all(field.nullable for field in kind):
            raise ConfigError(f"column {name}: {inner}")
        return f"struct<{', '.join(f'{field.name}: {_type(name, field.dataType)}' for field in kind)}>"
    if isinstance(kind, st.ArrayType) and kind.containsNull:
        return f"list<{_type(name, kind.elementType)}>"
    if isinstance(kind, st.MapType) and kind.valueContainsNull and kind.keyType == st.StringType():
        return f"map<string, {_type(name, kind.valueType)}>"
    if isinstance(kind, st.DecimalType):
        return f"decimal({kind.precision}, {kind.scale})"
    if kind in _SCALARS:
        return _SCALARS[kind]
    raise ConfigError(f"column {name}: cannot be read as {kind.simpleString()}")
