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

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.config.template import part_name
from jetcapture_py.errors import ConfigError, JetcaptureError, SourceError
from jetcapture_py.jetstream.publish.frames import MESSAGE_ID, byte_strings, check_subject, header_blocks
from jetcapture_py.reading.convert import encode_json
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.keys import TemplateKey
from spark_jobs.datasource.one_line import one_line_errors
from spark_jobs.datasource.options import WriteOptions
from spark_jobs.publishing.instructions import without_instructions
from spark_jobs.publishing.publish import publish_batches
from spark_jobs.reading.columns import find
from spark_jobs.reading.row_json import encode_rows, shorten

SUBJECTS = ("subject", layout.SUBJECT)
PAYLOADS = ("payload", "value", layout.PAYLOAD)
HEADERS = ("headers", layout.HEADERS)
MSG_ID = "msg_id"

_TEXT = (st.StringType, st.VarcharType, st.CharType)
_ID_IN_HEADERS = TemplateKey(f"{{header.{MESSAGE_ID}}}")


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """A task's result: acknowledged messages, and how many of them were duplicates."""

    published: int
    duplicates: int


class Messages:
    """Turns rows with the columns of `schema` into messages. Raises ConfigError for columns that cannot be sent."""

    def __init__(self, options: WriteOptions, schema: st.StructType) -> None:
        self._schema = schema
        self._encode = encode_json if options.format == "json" else msgspec.msgpack.Encoder().encode
        self._names = schema.fieldNames()
        if doubled := [name for name, count in Counter(self._names).items() if count > 1]:
            raise ConfigError(f"duplicate column {doubled[0]}: rename one with AS")
        self._types = {field.name: field.dataType for field in schema}
        self._payload = self._first(PAYLOADS)
        self._own = self._first(SUBJECTS)
        self._headers = self._first(HEADERS)
        self._id = self._first((MSG_ID,))
        self._template_names = list(self._names)
        """The columns' names, spelled as in the template."""
        self._subject = self._template(options.subject or "{subject}")
        if self._payload is not None and not isinstance(self._types[self._payload], (*_TEXT, st.BinaryType)):
            raise ConfigError(
                f"column {self._payload}: a payload must be binary or string; to_json({self._payload}) makes it one"
            )
        if self._headers is not None and not _is_headers(self._types[self._headers]):
            raise ConfigError(
                f"column {self._headers}: headers: expected map<string, string> or map<string, array<string>>"
            )
        if self._id is not None and not isinstance(self._types[self._id], _TEXT):
            raise ConfigError(f"column {self._id}: a message id must be a string")
        taken = {self._first((name,)) for name in (*SUBJECTS, *HEADERS, MSG_ID, *layout.ENVELOPE, *layout.OPTIONAL)}
        self._fields = [number for number, name in enumerate(self._names) if name not in taken]
        if self._payload is None:
            self._check_fields()

    def _first(self, names: Iterable[str]) -> str | None:
        """Return the first of these columns that exists; None without one."""
        try:
            columns = (find(name, self._names) for name in names)
            return next(filter(None, columns), None)
        except JetcaptureError as error:
            raise ConfigError(str(error)) from None

    def _check_fields(self) -> None:
        if not self._fields:
            raise ConfigError("the rows have nothing to publish: no payload, and no other columns")
        for field in (self._schema[number] for number in self._fields):
            if isinstance(field.dataType, (st.YearMonthIntervalType, st.CalendarIntervalType)):
                kind = field.dataType.simpleString()
                raise ConfigError(f"column {field.name}: {kind} cannot be published: cast it to string")

    def _template(self, text: str) -> TemplateKey:
        """Parse the subject template. Raises ConfigError if a column in it is missing."""
        try:
            template = TemplateKey(text)
            check_subject("".join(str(part.value) if part.kind == "text" else "x" for part in template.parts))
        except (ValueError, SourceError) as error:
            raise ConfigError(f"subject: {error}") from None
        for part in template.parts:
            if part.kind in ("subject", "token") and self._own is None:
                raise ConfigError(f"no subject: the rows have no column subject, and the option is {text}")
            if part.kind == "header" and self._headers is None:
                raise ConfigError(f"subject: the rows have no headers for {text}")
            if part.kind == "field":
                self._check_field(str(part.value))
        return template

    def _check_field(self, path: str) -> None:
        whole = self._first((path,))
        name = whole or self._first((path.split(".")[0],))
        if name is None:
            raise ConfigError(f"subject: there is no column {path}; there are {', '.join(self._names)}")
        kind = self._types[name]
        self._template_names[self._names.index(name)] = path if whole else path.split(".")[0]
        if whole and not isinstance(kind, (*_TEXT, st.IntegralType)):
            raise ConfigError(f"subject: column {path} must be string or integer: cast it")

    def of(self, batches: Iterable[pa.RecordBatch], writing: str) -> Iterator[pa.RecordBatch]:
        """Yield batches for `publish_batches`; `writing` identifies the write and the partition."""
        first = 0
        for rows in batches:
            rows = rows.rename_columns(self._names)
            payloads, headers = self._payloads(rows), self._header_maps(rows)
            subjects = self._subjects(self._message(rows, headers), rows)
            if headers is not None and self._headers != self._first(HEADERS[:1]):
                headers = without_instructions(subjects, headers)
            generated = pa.array(_ids(writing, first, subjects, payloads, headers), pa.string())
            ids = pc.coalesce(self._own_ids(self._message(rows, headers), rows), generated)
            first += rows.num_rows
            given = {"subject": subjects, "payload": payloads, "id": ids}
            yield pa.RecordBatch.from_pydict(given if headers is None else given | {"headers": headers})

    def _message(self, rows: pa.RecordBatch, headers: pa.MapArray | None) -> MessageBatch:
        """Return the columns that the subject template reads."""
        own = pa.nulls(rows.num_rows, pa.string()) if self._own is None else rows.column(self._own).cast(pa.string())
        envelope = {layout.SUBJECT: own, layout.HEADERS: pa.nulls(rows.num_rows, HEADERS_TYPE)}
        if headers is not None:
            envelope[layout.HEADERS] = headers
        return MessageBatch(stream="", rows=pa.RecordBatch.from_pydict(envelope))

    def _subjects(self, message: MessageBatch, rows: pa.RecordBatch) -> pa.StringArray:
        fields = rows.rename_columns(self._template_names)
        subjects = self._subject(message, fields)
        if subjects.null_count:
            row = pc.index(subjects.is_null(), True).as_py()
            null = (
                name
                for name in map(part_name, self._subject.parts)
                if name and not TemplateKey(f"{{{name}}}")(message, fields)[row].is_valid
            )
            (shown,) = encode_rows([column.slice(row, 1) for column in rows.columns], self._schema)
            raise SourceError(f"a row has no subject: {next(null)} is null in {shorten(shown.as_py())}")
        return subjects

    def _own_ids(self, message: MessageBatch, rows: pa.RecordBatch) -> pa.StringArray:
        """Return the rows' own message ids, null without one."""
        in_headers = _not_empty(_ID_IN_HEADERS(message, rows))
        if self._id is None:
            return in_headers
        ids = _not_empty(rows.column(self._id).cast(pa.string()))
        row = pc.index(pc.not_equal(ids, in_headers), True).as_py()
        if row >= 0:
            raise SourceError(
                f"a row has two message ids: {self._id} is {str(ids[row])!r}, "
                f"and {MESSAGE_ID} in its headers is {str(in_headers[row])!r}"
            )
        return pc.coalesce(ids, in_headers)

    def _payloads(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        if self._payload is not None:
            return pc.fill_null(rows.column(self._payload).cast(pa.binary()), b"")
        fields = st.StructType([self._schema[number] for number in self._fields])
        return encode_rows([rows.column(number) for number in self._fields], fields, self._encode)

    def _header_maps(self, rows: pa.RecordBatch) -> pa.MapArray | None:
        if self._headers is None:
            return None
        headers = rows.column(self._headers)
        if not pa.types.is_list(headers.type.item_type):
            items = pa.ListArray.from_arrays(pa.array(np.arange(len(headers.items) + 1), pa.int32()), headers.items)
            headers = pa.MapArray.from_arrays(headers.offsets, headers.keys, items, mask=headers.is_null())
        return headers.cast(HEADERS_TYPE)


def _not_empty(texts: pa.StringArray) -> pa.StringArray:
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _ids(
    writing: str, first: int, subjects: pa.StringArray, payloads: pa.BinaryArray, headers: pa.MapArray | None
) -> Iterator[str]:
    """Yield generated ids for rows; the first of them is row `first` of the partition."""
    blocks = header_blocks(headers, {}, len(subjects), stored=True)
    parts: list[Any] = [subjects.cast(pa.binary()), *(() if blocks is None else (blocks,)), payloads]
    for row, content in enumerate(byte_strings(pc.binary_join_element_wise(*parts, b"\0")), first):
        yield f"{writing}:{row}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _is_headers(kind: st.DataType) -> bool:
    if not isinstance(kind, st.MapType) or not isinstance(kind.keyType, _TEXT):
        return False
    value = kind.valueType
    return isinstance(value, _TEXT) or (isinstance(value, st.ArrayType) and isinstance(value.elementType, _TEXT))


class _Writer:
    """Code shared by both writers."""

    def __init__(self, options: WriteOptions, schema: st.StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError("a stream only accepts mode append")
        Messages(options, schema)  # raises ConfigError for columns that cannot be sent
        self._options, self._schema = options, schema
        self._save = uuid.uuid4().hex

    def _publish(self, batches: Iterable[pa.RecordBatch], writing: str) -> Written:
        rows = Messages(self._options, self._schema)
        messages = rows.of(batches, f"{writing}:{_task().partitionId()}")
        return Written(*publish_batches(messages, self._options.nats, self._options.window))


@one_line_errors
class BatchWriter(_Writer, DataSourceArrowWriter):
    """For `df.write` and INSERT. Spark creates one per write; all attempts of the tasks share it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return self._publish(iterator, self._save)


@one_line_errors
class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """For `df.writeStream`. The query's id comes from its checkpoint, so a batch keeps its ids after a restart."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish one partition of one batch."""
        query, batch = (_task().getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        return self._publish(iterator, f"{query}:{batch}")


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("not in a Spark task")
    return task
