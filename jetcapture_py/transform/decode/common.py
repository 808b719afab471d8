"""Shared parts of the decoders. Guarantee: a refused message does not affect its neighbors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int32s
from jetcapture_py.archive.arrow_bytes import text_of
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch

REFUSALS = (ArithmeticError, TypeError, ValueError, RecursionError, msgspec.MsgspecError, pa.ArrowException)
"""Errors of msgspec, Arrow and our checks for bad data; anything else is a bug or a dying process."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u[^dD])")
_ENDED = ("Input data was truncated", "JSON is malformed: unexpected end of")
"""Messages that msgspec also uses for a lone surrogate."""
_LARGE = 512
"""Payload size in bytes from which a view is cheaper than a copy."""
_CONFLUENT_BYTES = 5
"""A zero byte and the id of a schema."""

Row = TypeVar("Row")
Read = Callable[[list[Any]], list[Any]]
"""Maps records to the values of one field; None stays None."""
Build = Callable[[Any], pa.Array]
"""Builds a column from Python values, or from an array of texts; null for None.

Raises `MisfitError` if values do not fit, or another of `REFUSALS`."""


class MisfitError(ValueError):
    """Values that do not fit their column; `rows` has the reasons by position."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(next(iter(rows.values())))
        self.rows = rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(MessageBatch):
    """The rows of messages as a separate batch."""

    owners: Int32s
    """The message of each row, ascending."""


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """A column, and how to build it from decoded messages."""

    name: str
    type: pa.DataType
    build: Build
    reads: tuple[Read, ...] = ()
    """Readers of fields, applied in turn from the message to the value."""

    def of(self, rows: list[Any]) -> Filled:
        """Return the column with the values of `rows`."""
        for read in self.reads:
            rows = read(rows)
        return self, rows


Filled = tuple[ReadColumn, Any]
"""A column with one value per decoded message: a list, or an array of texts."""


def failure(index: int, error: object, stage: str = "decode") -> Failure:
    """Return a failure with the text of `error`; the exception's type only if it has no text."""
    return Failure(index=index, stage=stage, error=one_line(str(error) or type(error).__name__))


def show(value: object) -> str:
    """Return `value` for an error text: escaped and shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def payloads_of(batch: MessageBatch) -> list[bytes]:
    """Return every payload of `batch`; empty for null."""
    payloads: list[bytes] = batch.column(layout.PAYLOAD).fill_null(b"").to_pylist()
    return payloads


def texts_of(batch: MessageBatch) -> tuple[pa.BinaryArray, dict[int, Failure]]:
    """Return every payload of `batch` (empty for null), and failures for those that are not UTF-8.

    msgspec does not check the bytes of skipped strings, so they are checked here, all at once.
    """
    column = batch.column(layout.PAYLOAD).fill_null(b"")
    failures: dict[int, Failure] = {}
    try:
        column.cast(pa.string())
    except pa.ArrowInvalid:
        for index, payload in enumerate(column.to_pylist()):
            try:
                payload.decode()
            except UnicodeDecodeError as error:
                failures[index] = failure(index, _reason(f"invalid UTF-8 (byte {error.start})", payload))
    return without_mark(column), failures


def views_of(column: pa.BinaryArray) -> list[Any]:
    """Return every value of a column without nulls; large ones are not copied."""
    edges, text = text_of(column)
    if edges[-1] - edges[0] < _LARGE * len(column):
        return column.to_pylist()  # type: ignore[no-any-return]
    view = text.data
    return [view[start:end] for start, end in pairwise(edges.tolist())]


def without_mark(payloads: pa.BinaryArray) -> pa.BinaryArray:
    """Remove the byte order mark that some programs write before JSON."""
    if not pc.any(pc.starts_with(payloads, BYTE_ORDER_MARK)).as_py():
        return payloads
    return pa.array(
        [payload and payload.removeprefix(BYTE_ORDER_MARK) for payload in payloads.to_pylist()], pa.binary()
    )


def _reason(error: object, payload: bytes, hint: str | None = "") -> str:
    """Return why a payload cannot be decoded. `hint` ends the note on Confluent's wire format; None: no note."""
    if not payload:
        return "the payload is empty"
    text = str(error) or type(error).__name__
    if text.startswith(_ENDED) and _LONE_SURROGATE.search(payload):
        text = "a string has a lone surrogate, which is not text"
    if hint is not None and payload.startswith(b"\0") and len(payload) > _CONFLUENT_BYTES:
        number = int.from_bytes(payload[1:_CONFLUENT_BYTES], "big")
        text += f"; it begins like Confluent's wire format, with schema {number}{hint}"
    return text


def decode_each(
    decode: Callable[[Any], Row], payloads: list[Any], failures: dict[int, Failure], hint: str | None = ""
) -> list[Row | None]:
    """Decode each payload. If `decode` raises, the row is None and `failures` has an entry; `hint` as in `_reason`.

    All payloads go through one iterator, which continues after an error, so nothing is decoded twice.
    """
    rows: list[Row | None] = []
    decoded = map(decode, payloads)
    while True:
        try:
            rows.extend(decoded)  # keeps the results before an exception
        except REFUSALS as error:
            index = len(rows)
            failures.setdefault(index, failure(index, _reason(error, bytes(payloads[index]), hint)))
            rows.append(None)
        else:
            return rows


def decode_rows(
    decode: Callable[[Any], Row], payloads: list[Any], failures: dict[int, Failure], hint: str | None = ""
) -> tuple[Sequence[int], list[Any]]:
    """Return the decodable messages and their rows; otherwise like `decode_each`."""
    rows = decode_each(decode, payloads, failures, hint)
    if not failures:
        return range(len(rows)), rows
    messages = [index for index in range(len(rows)) if index not in failures]
    return messages, [rows[index] for index in messages]


def require(conditions: pa.Array, values: Any, expected: str) -> None:
    """Raise MisfitError for values (a list, or an array of texts) that do not meet a condition."""
    if pc.all(conditions).as_py() is not False:
        return
    reasons = {}
    for row in np.flatnonzero(~conditions.fill_null(fill_value=True).to_numpy(zero_copy_only=False)).tolist():
        value = values[row].as_py() if isinstance(values, pa.Array) else values[row]
        reasons[row] = f"expected {expected}, got {show(value)}"
    raise MisfitError(reasons)


def owners_of(batch: MessageBatch) -> Int32s | None:
    """Return the message of each row if messages may have several rows; else None."""
    return batch.owners if isinstance(batch, RowBatch) else None


def assemble(
    columns: Sequence[Filled], messages: Sequence[int], failures: dict[int, Failure], owners: Int32s | None = None
) -> Decoded:
    """Build `columns` from the values of `messages` in order. A value that does not fit fails its message.

    With `owners`, `messages` are rows of messages; only the first failing row of a message is searched.
    """
    arrays: list[pa.Array] = []
    late: dict[int, Failure] = {}
    if owners is not None and len(messages) < len(owners):
        owners = owners[np.asarray(messages, np.int64)]
    for column, values in columns:
        array, bad = _build(column.build, values, owners)
        arrays.append(array)
        for row, reason in bad.items():
            late.setdefault(row, failure(messages[row], f"column {show(column.name)}: {reason}"))
    schema = pa.schema([(column.name, column.type) for column, _ in columns])
    fields = pa.RecordBatch.from_arrays(arrays, schema=schema)
    if late:
        rows = [row for row in range(len(messages)) if row not in late]
        fields = fields.take(pa.array(rows, pa.int32()))
        messages = [messages[row] for row in rows]
        failures = failures | {misfit.index: misfit for misfit in late.values()}
    return Decoded(
        fields=fields,
        messages=pa.array(messages, pa.int32()) if failures else None,
        failures=tuple(failures[index] for index in sorted(failures)),
    )


def _build(build: Build, values: Any, owners: Int32s | None) -> tuple[pa.Array, dict[int, str]]:
    """Return the column, with nulls for misfits, and the reasons by position."""
    bad: dict[int, str] = {}
    while True:
        try:
            return build(values), bad
        except REFUSALS as error:
            bad |= _misfits(build, values, error, owners)
        failed = np.zeros(len(values), np.bool_)
        failed[list(bad)] = True
        if owners is not None:  # the whole message fails
            failed = np.isin(owners, owners[failed])
        if isinstance(values, pa.Array):
            values = pc.if_else(pa.array(failed), pa.scalar(None, values.type), values)
        else:
            values = [None if gone else value for gone, value in zip(failed, values, strict=True)]


def _misfits(build: Build, values: Any, error: Exception, owners: Int32s | None) -> dict[int, str]:
    """Return the misfits among `values`, for which `build` raised `error`, with reasons; per message the first row."""
    if not isinstance(error, MisfitError):
        reasons = _search(build, values, owners)
        if not reasons:
            raise error
        return reasons
    if owners is None:
        return error.rows
    rows = np.sort(np.fromiter(error.rows, np.int64, len(error.rows)))
    _, first = np.unique(owners[rows], return_index=True)
    return {row: error.rows[row] for row in rows[first].tolist()}


def _search(build: Build, values: Any, owners: Int32s | None) -> dict[int, str]:
    """Search `values` (a sequence that slices) for those that `build` refuses, with reasons; per message the first row.

    Bisection: one bad value among n costs as much as building 2 n values, not n builds.
    """
    reasons: dict[int, str] = {}
    checked = 0

    def look(start: int, end: int) -> None:
        nonlocal checked
        start = max(start, checked)
        if start >= end:
            return
        try:
            build(values[start:end])
        except REFUSALS as error:
            if end - start == 1:
                reasons[start] = str(error) or type(error).__name__
                checked = end if owners is None else int(np.searchsorted(owners, owners[start], "right"))
                return
            half = (start + end) // 2
            look(start, half)
            look(half, end)

    look(0, len(values))
    return reasons


# ------------------------------------------------------------------ nested columns


def list_builder(of: pa.ListType, item: Build) -> Build:
    """Return the builder of a column of lists."""

    def build(values: list[Any]) -> pa.Array:
        return pa.ListArray.from_arrays(offsets_of(values), _build_items(item, values, flatten(values)), type=of)

    return build


def map_builder(of: pa.MapType, key: Build, item: Build) -> Build:
    """Return the builder of a column of maps; values are mappings."""

    def build(values: list[Any]) -> pa.Array:
        names = [name for value in values if value for name in value]
        items = [value[name] for value in values if value for name in value]
        keys = _build_items(key, values, names)
        return pa.MapArray.from_arrays(offsets_of(values), keys, _build_items(item, values, items), type=of)

    return build


def struct_builder(of: pa.StructType, fields: Sequence[tuple[Read, Build]]) -> Build:
    """Return the builder of a column of structs, given each field's reader and builder."""

    def build(values: list[Any]) -> pa.Array:
        children = [build(read(values)) for read, build in fields]
        return struct_array(children, of, pa.array([value is None for value in values], pa.bool_()))

    return build


def _build_items(build: Build, values: list[Any], items: list[Any]) -> pa.Array:
    """Build the `items` of lists or maps; report errors by the position of the list or map in `values`."""
    try:
        return build(items)
    except MisfitError as error:
        owners = [row for row, value in enumerate(values) if value for _ in value]
        raise MisfitError({owners[at]: reason for at, reason in error.rows.items()}) from None


def json_texts(values: list[Any]) -> pa.StringArray:
    """Build a column of the JSON texts of values."""
    return pa.array([None if value is None else json_text(value) for value in values], pa.string())


def json_text(value: object) -> str:
    """Return `value` as compact JSON: bytes as base64, MessagePack extensions as an object. Raises ValueError."""
    try:
        return msgspec.json.encode(value, enc_hook=_extension).decode()
    except TypeError as error:
        raise ValueError(f"not possible in JSON: {error}") from None


def _extension(value: object) -> dict[str, Any]:
    if isinstance(value, msgspec.msgpack.Ext):
        return {"code": value.code, "data": value.data}
    raise TypeError(f"a value of type {type(value).__name__}")


def offsets_of(values: Sequence[Sized | None]) -> pa.Array:
    """Return Arrow list offsets of `values` (int32), with the end appended; None becomes null."""
    offsets: list[int | None] = []
    end = 0
    for value in values:
        if value is None:
            offsets.append(None)
        else:
            offsets.append(end)
            end += len(value)
    offsets.append(end)
    return pa.array(offsets, pa.int32())


def flatten(values: Sequence[Sequence[Any] | None]) -> list[Any]:
    """Return the items of all lists among `values`, in order."""
    return list(chain.from_iterable(value for value in values if value is not None))


def struct_array(children: Sequence[pa.Array], of: pa.StructType, nulls: pa.Array) -> pa.Array:
    """Return structs of the type `of` with the columns `children`; null where `nulls` is true."""
    return pa.StructArray.from_arrays(list(children), fields=list(of), mask=nulls)
