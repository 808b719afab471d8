"""Make messages from rows, in Arrow: subject, payload, header lines and id; for `replay` and for the sink.

The id of an archived message is `<stream>:<seq>:<replay id>`, with `@` and the timestamp if sequences have started
again, and with the row if every row is published. The id of a row without its own one is the write, the partition, the
position in it, and a hash of the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrow_bytes import byte_strings
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.config.subjects import regex_of
from jetcapture_py.config.template import part_name
from jetcapture_py.errors import JetcaptureError, SourceError
from jetcapture_py.jetstream.publish.frames import MESSAGE_ID, check_subject, header_blocks, unusual_subjects
from jetcapture_py.reading.convert import encode_json, rfc3339, text_of
from jetcapture_py.reading.output import check_names
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.frames import unescaped
from jetcapture_py.transform.keys import TemplateKey, without_empty
from spark_jobs.publishing.instructions import instructs, without_instructions
from spark_jobs.reading.columns import find
from spark_jobs.reading.row_json import encode_rows, encode_values, is_nested

SUBJECT, PAYLOAD, HEADERS, ID = "subject", "payload", "headers", "id"
"""Columns of a message; `HEADERS` are complete blocks, with the id; null without any."""
TIME, SEQ, ROW, INSTRUCTED = "time", "seq", "row", "instructed"
"""Columns of an archived message: its timestamp in microseconds, its sequence, the row's number in the message, and
whether instructions to a server were removed from its headers."""
SCHEMA = (
    f"{SUBJECT} binary, {PAYLOAD} binary, {HEADERS} binary, {ID} string, "
    f"{TIME} long, {SEQ} long, {ROW} int, {INSTRUCTED} boolean"
)
"""Columns of a prepared replay, for Spark."""
FROM_STREAM, FROM_SEQ, FROM_TIME = "Jetcapture-Stream", "Jetcapture-Sequence", "Jetcapture-Timestamp"
FROM_ROW, REPLAY = "Jetcapture-Row", "Jetcapture-Replay"
NOTHING = "; nothing was published"

_PROVENANCE = (FROM_STREAM, FROM_SEQ, FROM_TIME, FROM_ROW, REPLAY)
_SUBJECTS = ("subject", layout.SUBJECT)
_MSG_ID = "msg_id"
_VERSION = b"NATS/1.0"
_MAX_SHOWN = 300
"""Characters of a row in an error."""
_TEXT = (st.StringType, st.VarcharType, st.CharType)
_IN_SUBJECTS = (*_TEXT, st.IntegralType, st.BooleanType, st.DateType, st.DecimalType)
_ENCODE = {"json": encode_json, "msgpack": msgspec.msgpack.Encoder().encode}
_ID_IN_HEADERS = TemplateKey(f"{{header.{MESSAGE_ID}}}")


class Columns(NamedTuple):
    """Names of a message's columns, in order of preference; `own` are not part of a row's JSON."""

    payloads: Sequence[str]
    headers: Sequence[str]
    own: Sequence[str]


ARCHIVED = Columns((layout.PAYLOAD, "payload"), (layout.HEADERS,), (*layout.ENVELOPE, *layout.OPTIONAL))
WRITTEN = Columns(
    ("payload", "value", layout.PAYLOAD),
    ("headers", layout.HEADERS),
    (*_SUBJECTS, "headers", _MSG_ID, *layout.ENVELOPE, *layout.OPTIONAL),
)


class Rows:
    """Finds subjects, payloads and headers in rows with the columns of `schema`, whose names ignore case.

    `payload` names the column of payloads. Raises JetcaptureError if the rows cannot be messages.
    """

    def __init__(
        self,
        schema: st.StructType,
        template: str,
        columns: Columns,
        payload: str | None = None,
        format: str = "json",  # noqa: A002  as the option
    ) -> None:
        self.schema, self.names, self._format = schema, schema.fieldNames(), format
        check_names(self.names, "columns")
        self._types = {field.name: field.dataType for field in schema}
        self._subject = self.find(*_SUBJECTS)
        self.headers = self.find(*columns.headers)
        self.payload = self._payload(columns, payload)
        self._aliases = list(self.names)  # as the template spells them
        self._in_subjects: list[str] = []
        self.template = self._template(template)
        no_fields = {self.find(name) for name in columns.own}
        self._fields = [number for number, name in enumerate(self.names) if name not in no_fields]
        if self.payload is None:
            self._check_fields()

    @property
    def needed(self) -> list[str]:
        """The columns needed for subjects, payloads and headers."""
        fields = () if self.payload is not None else (self.names[number] for number in self._fields)
        return [*filter(None, {self._subject, self.headers, self.payload}), *self._in_subjects, *fields]

    @property
    def pattern(self) -> str:
        """A pattern that matches all subjects: `>` from the first column on, which may have several tokens."""
        parts = self.template.parts
        text = str(parts[0].value) if parts[0].kind == "text" else ""
        if len(parts) == 1 and text:
            return text
        head, dot, _ = text.rpartition(".")
        return f"{head}{dot}>"

    def find(self, *names: str) -> str | None:
        """Return the first of these columns that exists; None without one."""
        return next(filter(None, (find(name, self.names) for name in names)), None)

    def _payload(self, columns: Columns, asked: str | None) -> str | None:
        name = self.find(*(columns.payloads if asked is None else (asked,)))
        if asked is not None and name is None:
            raise JetcaptureError(f"there is no column {asked}; there are {', '.join(self.names)}")
        if asked is None and name is not None and not isinstance(self._types[name], (*_TEXT, st.BinaryType)):
            raise JetcaptureError(f"column {name}: a payload must be binary or string; to_json({name}) makes it one")
        if self.headers is not None and not _is_headers(self._types[self.headers]):
            raise JetcaptureError(
                f"column {self.headers}: headers: expected map<string, string> or map<string, array<string>>"
            )
        return name

    def _check_fields(self) -> None:
        if not self._fields:
            raise JetcaptureError("the rows have nothing to publish: no payload, and no other columns")
        for field in (self.schema[number] for number in self._fields):
            if isinstance(field.dataType, (st.YearMonthIntervalType, st.CalendarIntervalType)):
                kind = field.dataType.simpleString()
                raise JetcaptureError(f"column {field.name}: {kind} cannot be published: cast it to string")

    def _template(self, text: str) -> TemplateKey:
        try:
            template = TemplateKey(text)
            check_subject("".join(str(part.value) if part.kind == "text" else "x" for part in template.parts))
        except (ValueError, SourceError) as error:
            raise JetcaptureError(f"subject: {error}") from None
        for part in template.parts:
            if part.kind in ("subject", "token") and self._subject is None:
                raise JetcaptureError(f"no subject: the rows have no column subject, and the template is {text}")
            if part.kind == "header" and self.headers is None:
                raise JetcaptureError(f"subject: the rows have no headers for {text}")
            if part.kind == "field":
                self._check_field(str(part.value))
        return template

    def _check_field(self, path: str) -> None:
        whole = self.find(path)
        name = whole or self.find(path.split(".")[0])
        if name is None:
            raise JetcaptureError(f"subject: there is no column {path}; there are {', '.join(self.names)}")
        self._aliases[self.names.index(name)] = path if whole else path.split(".")[0]
        self._in_subjects.append(name)
        if whole and not isinstance(self._types[name], _IN_SUBJECTS):
            raise JetcaptureError(f"subject: column {path} must be string or integer: cast it")

    def header_maps(self, rows: pa.RecordBatch) -> pa.MapArray | None:
        """Return the headers as map<string, list<string>>; None without a column of them."""
        if self.headers is None:
            return None
        headers = rows.column(self.headers)
        if not pa.types.is_list(headers.type.item_type):
            items = pa.ListArray.from_arrays(pa.array(np.arange(len(headers.items) + 1), pa.int32()), headers.items)
            headers = pa.MapArray.from_arrays(headers.offsets, headers.keys, items, mask=headers.is_null())
        return headers.cast(HEADERS_TYPE)

    def message(self, rows: pa.RecordBatch, headers: pa.MapArray | None) -> MessageBatch:
        """Return the columns that a template reads besides fields."""
        subjects = (
            pa.nulls(len(rows), pa.string()) if self._subject is None else rows.column(self._subject).cast(pa.string())
        )
        headers = pa.nulls(len(rows), HEADERS_TYPE) if headers is None else headers
        columns = {layout.SUBJECT: subjects, layout.HEADERS: headers}
        return MessageBatch(stream="", rows=pa.RecordBatch.from_pydict(columns))

    def subjects(self, rows: pa.RecordBatch, headers: pa.MapArray | None) -> pa.StringArray:
        """Return valid subjects. Raises SourceError with the invalid row."""
        fields, message = rows.rename_columns(self._aliases), self.message(rows, headers)
        subjects = self.template(message, fields)
        if subjects.null_count:
            row = pc.index(subjects.is_null(), True).as_py()
            null = (
                name
                for name in map(part_name, self.template.parts)
                if name and not TemplateKey(f"{{{name}}}")(message, fields)[row].is_valid
            )
            raise SourceError(f"a row has no subject: {next(null)} is null in {self._shown(rows, row)}")
        for subject in unusual_subjects(subjects):
            try:
                check_subject(subject)
            except SourceError as error:
                raise SourceError(f"{error} in {self._shown(rows, pc.index(subjects, subject).as_py())}") from None
        return subjects

    def _shown(self, rows: pa.RecordBatch, row: int) -> str:
        stream, seq = self.find(layout.STREAM), self.find(layout.SEQ)
        if stream is not None and seq is not None:
            return f"message {rows.column(seq)[row]} of stream {rows.column(stream)[row]}"
        (text,) = encode_rows([column.slice(row, 1) for column in rows.columns], self.schema)
        return one_line(text.as_py().decode(), _MAX_SHOWN)

    def payloads(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """Return payloads; null if the column is null."""
        if self.payload is None:
            fields = st.StructType([self.schema[number] for number in self._fields])
            return encode_rows([rows.column(number) for number in self._fields], fields, _ENCODE[self._format])
        column, kind = rows.column(self.payload), self._types[self.payload]
        if is_nested(kind):
            return encode_values(column, kind)
        return (
            column.cast(pa.binary()) if isinstance(kind, (*_TEXT, st.BinaryType)) else text_of(column).cast(pa.binary())
        )


def _is_headers(kind: st.DataType) -> bool:
    if not isinstance(kind, st.MapType) or not isinstance(kind.keyType, _TEXT):
        return False
    value = kind.valueType
    return isinstance(value, _TEXT) or (isinstance(value, st.ArrayType) and isinstance(value.elementType, _TEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The subjects that the target's streams accept, and those that the archive's capture would capture again."""

    streams: Mapping[str, Sequence[str]]
    ingested: Mapping[str, Sequence[str]]

    def check(self, subjects: pa.Array) -> None:
        """Raise JetcaptureError for a subject that no stream accepts, or that would be captured again."""
        taken = self._matching(subjects, [pattern for patterns in self.streams.values() for pattern in patterns])
        if (row := pc.index(taken, False).as_py()) >= 0:
            raise JetcaptureError(f"no stream listens on {subjects[row]}")
        for stream, filters in self.ingested.items():
            back = pc.and_(self._matching(subjects, self.streams[stream]), self._matching(subjects, filters))
            if (row := pc.index(back, True).as_py()) >= 0:
                raise JetcaptureError(
                    f"this archive's capture consumes {subjects[row]} from stream {', '.join(self.ingested)}, directly "
                    "or through sources and mirrors, and would archive its own messages again; choose another "
                    "--subject, or allow it with --allow-loop"
                )

    def _matching(self, subjects: pa.Array, patterns: Iterable[str]) -> pa.BooleanArray:
        return pc.match_substring_regex(subjects, regex_of(patterns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """Prepares rows for a replay, with the columns of `SCHEMA`.

    `recreated`: sequences have started again. `apart`: every row of a message is published, with its number in the id.
    `kept` are instructions to a server that are published again. `targets` is None if all subjects are known to be
    accepted. `before`: a row is refused before anything is published.
    """

    rows: Rows
    replay_id: str
    recreated: bool
    apart: bool
    kept: Sequence[str]
    targets: Targets | None
    before: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Prepare a partition's batches, for `mapInArrow`."""
        for batch in batches:
            try:
                yield self._prepared(batch.rename_columns(self.rows.names))
            except JetcaptureError as error:
                raise SourceError(f"{error}{NOTHING if self.before else ''}") from None

    def _prepared(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        count, find = len(rows), self.rows.find
        stream, seq, time, number = (
            None if (name := find(column)) is None else rows.column(name) for column in (*layout.IDENTITY, layout.ROW)
        )
        archived = stream is not None and seq is not None

        headers = self.rows.header_maps(rows)
        subjects = self.rows.subjects(rows, headers)
        if self.targets is not None:
            self.targets.check(subjects)
        removed = pa.repeat(pa.scalar(False), count)  # noqa: FBT003
        if headers is not None:
            headers, removed = without_instructions(subjects, headers, self.kept)
        lines = None
        raw = find(layout.RAW_HEADERS) if archived and find(layout.STAGE) else None
        if raw is not None and pa.types.is_binary(rows.column(raw).type) and rows.column(raw).null_count < count:
            lines, in_raw = _raw_lines(rows.column(raw), self.kept)
            removed = pc.or_(removed, in_raw)
        extra: dict[str, pa.Array] = {}
        ids = pa.nulls(count, pa.string())
        if archived:
            micros = None if time is None else time.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
            extra, ids = self._identity(stream, seq, micros, number)
            time = micros
        blocks = header_blocks(headers, extra | {MESSAGE_ID: ids}, count, lines=lines, stored=archived)
        columns = [
            self._escaped(rows, subjects).cast(pa.binary()),
            self.rows.payloads(rows),
            pa.nulls(count, pa.binary()) if blocks is None else blocks,
            ids,
            *((pa.nulls(count, pa.int64()) if column is None or not archived else column) for column in (time, seq)),
            pa.nulls(count, pa.int32()) if number is None or not archived else number,
            removed,
        ]
        names = [SUBJECT, PAYLOAD, HEADERS, ID, TIME, SEQ, ROW, INSTRUCTED]
        return pa.RecordBatch.from_arrays(columns, names)

    def _escaped(self, rows: pa.RecordBatch, subjects: pa.StringArray) -> pa.Array:
        """Return the subjects, with the original bytes of quarantined ones that are not UTF-8."""
        stage = self.rows.find(layout.STAGE)
        if stage is None or all(part.kind not in ("subject", "token") for part in self.rows.template.parts):
            return subjects
        odd = pc.fill_null(pc.equal(rows.column(stage), layout.NOT_UTF8), False)  # noqa: FBT003
        return unescaped(subjects, odd)

    def _identity(
        self, streams: pa.Array, seqs: pa.Array, micros: pa.Array | None, numbers: pa.Array | None
    ) -> tuple[dict[str, pa.Array], pa.StringArray]:
        """Return provenance headers and message ids."""
        texts = seqs.cast(pa.string())
        replay = pa.repeat(pa.scalar(self.replay_id), len(seqs))
        extra = {FROM_STREAM: streams, FROM_SEQ: texts}
        parts = [streams, texts, replay]
        if micros is not None:
            extra[FROM_TIME] = rfc3339(micros)
            if self.recreated:
                parts[2] = pc.binary_join_element_wise(replay, micros.cast(pa.string()), "@")
        if self.apart and numbers is not None:
            extra[FROM_ROW] = numbers.cast(pa.string())
            parts.append(extra[FROM_ROW])
        extra[REPLAY] = replay
        return extra, pc.binary_join_element_wise(*parts, ":", null_handling="skip")


def _raw_lines(blocks: pa.BinaryArray, kept: Sequence[str]) -> tuple[pa.BinaryArray, pa.BooleanArray]:
    """Return the lines of invalid header blocks without instructions and provenance, and a mask of those that had
    any."""
    lines: list[bytes | None] = []
    removed = []
    for raw in blocks.to_pylist():
        first, *others = (raw or b"").split(b"\r\n")
        given = [line for line in (*(() if first.startswith(_VERSION) else (first,)), *others) if line]
        names = [line.partition(b":")[0].decode("utf-8", "replace") for line in given]
        refused = [instructs(name, kept) for name in names]
        lines_kept = [
            line + b"\r\n"
            for line, name, instruction in zip(given, names, refused, strict=True)
            if not instruction and name not in _PROVENANCE
        ]
        lines.append(None if raw is None else b"".join(lines_kept))
        removed.append(any(refused))
    return pa.array(lines, pa.binary()), pa.array(removed, pa.bool_())


class Written:
    """Prepares rows for the sink. Raises JetcaptureError if the rows cannot be messages."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._id = rows, rows.find(_MSG_ID)
        self._from_archive = rows.headers is not None and rows.headers != rows.find("headers")
        if self._id is not None and not isinstance(rows.schema[self._id].dataType, _TEXT):
            raise JetcaptureError(f"column {self._id}: a message id must be a string")

    def messages(self, batches: Iterable[pa.RecordBatch], writing: str) -> Iterator[pa.RecordBatch]:
        """Yield the messages; `writing` identifies the write and the partition."""
        first = 0
        for batch in batches:
            rows = batch.rename_columns(self._rows.names)
            payloads, headers = pc.fill_null(self._rows.payloads(rows), b""), self._rows.header_maps(rows)
            subjects = self._rows.subjects(rows, headers)
            if headers is not None and self._from_archive:
                headers, _ = without_instructions(subjects, headers)
            generated = pa.array(_ids(writing, first, subjects, payloads, headers), pa.string())
            ids = pc.coalesce(self._own_ids(rows, headers), generated)
            first += len(rows)
            blocks = header_blocks(headers, {MESSAGE_ID: ids}, len(rows))
            yield pa.RecordBatch.from_pydict({SUBJECT: subjects, PAYLOAD: payloads, HEADERS: blocks})

    def _own_ids(self, rows: pa.RecordBatch, headers: pa.MapArray | None) -> pa.StringArray:
        """Return the rows' own message ids, null without one."""
        in_headers = without_empty(_ID_IN_HEADERS(self._rows.message(rows, headers), rows))
        if self._id is None:
            return in_headers
        ids = without_empty(rows.column(self._id).cast(pa.string()))
        row = pc.index(pc.not_equal(ids, in_headers), True).as_py()
        if row >= 0:
            raise SourceError(
                f"a row has two message ids: {self._id} is {str(ids[row])!r}, "
                f"and {MESSAGE_ID} in its headers is {str(in_headers[row])!r}"
            )
        return pc.coalesce(ids, in_headers)


def _ids(
    writing: str, first: int, subjects: pa.StringArray, payloads: pa.BinaryArray, headers: pa.MapArray | None
) -> Iterator[str]:
    """Yield generated ids for rows; the first of them is row `first` of the partition."""
    blocks = header_blocks(headers, {}, len(subjects), stored=True)
    parts: list[Any] = [subjects.cast(pa.binary()), *(() if blocks is None else (blocks,)), payloads]
    for row, content in enumerate(byte_strings(pc.binary_join_element_wise(*parts, b"\0")), first):
        yield f"{writing}:{row}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"
