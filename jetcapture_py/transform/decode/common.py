"""Shared parts of the decoders. Guarantee: a refused message does not affect its neighbors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch

REFUSALS = (ArithmeticError, TypeError, ValueError, RecursionError, msgspec.MsgspecError, pa.ArrowException)
"""Errors that msgspec, Arrow and our checks raise for bad data; anything else is a bug or a dying process."""

Row = TypeVar("Row")
Build = Callable[[list[Any]], pa.Array]
"""Makes a column of Python values, null for None; raises one of `REFUSALS` when a value does not fit."""


class MisfitError(ValueError):
    """Values that do not fit their column: `rows` has the reason for each of them, by its position."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(next(iter(rows.values())))
        self.rows = rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch(MessageBatch):
    """The rows of messages as a batch of their own: `owners` has the message of each (NumPy int32, ascending)."""

    owners: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A column to be built: its name and type, one value for each message that was decoded, and how to build it."""

    name: str
    type: pa.DataType
    values: list[Any]
    build: Build


def failure(index: int, error: object, stage: str = "decode") -> Failure:
    """A failure with the text of `error`, without the type of an exception where it has a text."""
    return Failure(index=index, stage=stage, error=one_line(str(error) or type(error).__name__))


def show(value: object) -> str:
    """Return `value` for an error text: escaped and shortened."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def payloads_of(batch: MessageBatch) -> list[bytes]:
    """Every payload of `batch`; empty for null."""
    payloads: list[bytes] = batch.column(layout.PAYLOAD).fill_null(b"").to_pylist()
    return payloads


def texts_of(batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
    """Every payload of `batch` (empty for null), and the failures of those that are not UTF-8.

    msgspec does not look at the bytes of strings it skips, so they are checked here, all at once.
    """
    column = batch.column(layout.PAYLOAD).fill_null(b"")
    payloads: list[bytes] = column.to_pylist()
    failures: dict[int, Failure] = {}
    try:
        column.cast(pa.string())
    except pa.ArrowInvalid:
        for index, payload in enumerate(payloads):
            try:
                payload.decode()
            except UnicodeDecodeError as error:
                failures[index] = failure(index, f"invalid UTF-8 (byte {error.start})")
    return payloads, failures


def decode_each(
    decode: Callable[[bytes], Row], payloads: list[bytes], failures: dict[int, Failure]
) -> list[Row | None]:
    """Decode each payload; where `decode` raises, the row is None and `failures` has an entry.

    All payloads go through one iterator, which continues after an error, so nothing is decoded twice.
    """
    rows: list[Row | None] = []
    decoded = map(decode, payloads)
    while True:
        try:
            rows.extend(decoded)  # keeps what came before an exception
        except REFUSALS as error:
            index = len(rows)
            failures.setdefault(index, failure(index, error if payloads[index] else "the payload is empty"))
            rows.append(None)
        else:
            return rows


def unique_names(columns: Mapping[str, str]) -> None:
    """Raise ValueError when two of the `columns`, by the names they were declared with, get the same name in Spark."""
    taken: dict[str, str] = {}
    for declared, name in columns.items():
        if (other := taken.setdefault(name.lower(), declared)) != declared:
            raise ValueError(
                f"columns {show(other)} and {show(declared)} are the same column to Spark (case-insensitive, and"
                f" {', '.join(layout.RESERVED)} and _nats_... get _ appended)"
            )


def owners_of(batch: MessageBatch) -> Any:
    """Return the message of each row, if messages may have several; else None."""
    return batch.owners if isinstance(batch, RowBatch) else None


def assemble(
    columns: Sequence[Values], messages: Sequence[int], failures: dict[int, Failure], owners: Any = None
) -> Decoded:
    """Build `columns`, whose values are those of `messages` in order; a value that does not fit fails its message.

    With `owners`, `messages` are rows of messages, of which only the first that fails is looked for.
    """
    arrays: list[pa.Array] = []
    late: dict[int, Failure] = {}
    owners = None if owners is None else owners[np.asarray(messages, np.int64)]
    for column in columns:
        array, bad = _build(column, owners)
        arrays.append(array)
        for row, reason in bad.items():
            late.setdefault(row, failure(messages[row], f"column {show(column.name)}: {reason}"))
    fields = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))
    if late:
        rows = [row for row in range(len(messages)) if row not in late]
        fields = fields.take(pa.array(rows, pa.int32()))
        messages = [messages[row] for row in rows]
        failures = failures | {found.index: found for found in late.values()}
    return Decoded(
        fields=fields,
        messages=pa.array(messages, pa.int32()) if failures else None,
        failures=tuple(failures[index] for index in sorted(failures)),
    )


def _build(column: Values, owners: Any) -> tuple[pa.Array, dict[int, str]]:
    """The column, null where a value does not fit, and the reasons by position."""
    values, bad = column.values, dict[int, str]()
    while True:
        try:
            return column.build(values), bad
        except REFUSALS as error:
            bad |= misfits(column.build, values, error, owners)
        values = [
            None if gone else value for gone, value in zip(of_failed(bad, len(values), owners), values, strict=True)
        ]


def misfits(build: Callable[[Any], object], values: Any, error: Exception, owners: Any) -> dict[int, str]:
    """Return which of `values`, for which `build` raised `error`, do not fit, and why; of a message, the first row."""
    if not isinstance(error, MisfitError):
        found = search(build, values, owners)
        if not found:
            raise error
        return found
    if owners is None:
        return error.rows
    rows = np.sort(np.fromiter(error.rows, np.int64, len(error.rows)))
    _, first = np.unique(owners[rows], return_index=True)
    return {row: error.rows[row] for row in rows[first].tolist()}


def of_failed(bad: Collection[int], count: int, owners: Any) -> Any:
    """Mark which of `count` rows are of messages with a row in `bad`."""
    mask = np.zeros(count, np.bool_)
    mask[list(bad)] = True
    return mask if owners is None else np.isin(owners, owners[mask])


def search(build: Callable[[Any], object], values: Any, owners: Any = None) -> dict[int, str]:
    """Return which of `values` (a sequence that slices) `build` refuses, and why; of a message, the first row.

    By bisection: one bad value among n costs as much as building 2 n values, not n builds.
    """
    found: dict[int, str] = {}
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
                found[start] = str(error) or type(error).__name__
                checked = end if owners is None else int(np.searchsorted(owners, owners[start], "right"))
                return
            half = (start + end) // 2
            look(start, half)
            look(half, end)

    look(0, len(values))
    return found
