"""Shared parts of the decoders. Guarantee: a refused message does not affect its neighbors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch

REFUSALS = (ArithmeticError, TypeError, ValueError, RecursionError, msgspec.MsgspecError, pa.ArrowException)
"""Errors that msgspec, Arrow and our checks raise for bad data; anything else is a bug or a dying process."""

Row = TypeVar("Row")
Build = Callable[[list[Any]], pa.Array]
"""Makes a column of Python values, null for None; raises one of `REFUSALS` when a value does not fit."""


class DeclaredColumn(Protocol):
    """A declared column."""

    @property
    def type(self) -> str:
        """A type that `column_types.parse_type` knows."""
        ...

    @property
    def path(self) -> str | None:
        """Where the field is: names with dots between them; null: the field called like the column."""
        ...

    @property
    def unit(self) -> str | None:
        """s, ms, us or ns for timestamps sent as numbers; null: RFC 3339 text."""
        ...


class MisfitError(ValueError):
    """Values that do not fit their column: `rows` has the reason for each of them, by its position."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(next(iter(rows.values())))
        self.rows = rows


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
    """What `decode` made of each payload; None, and an entry in `failures`, where it refused.

    All payloads go through one iterator: after a refusal it continues with the next, so nothing is decoded twice.
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
                f" {', '.join(layout.PARTITIONS)} and _nats_... get _ appended)"
            )


def assemble(columns: Sequence[Values], messages: Sequence[int], failures: dict[int, Failure]) -> Decoded:
    """Build `columns`, whose values are those of `messages` in order; a value that does not fit fails its message."""
    arrays: list[pa.Array] = []
    late: dict[int, Failure] = {}
    for column in columns:
        array, bad = _build(column)
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


def _build(column: Values) -> tuple[pa.Array, dict[int, str]]:
    """The column, null where a value does not fit, and the reasons by position."""
    values, bad = column.values, dict[int, str]()
    while True:
        try:
            return column.build(values), bad
        except MisfitError as error:
            found = error.rows
        except REFUSALS:
            found = search(column.build, values)
            if not found:
                raise
        bad |= found
        values = [None if row in bad else value for row, value in enumerate(values)]


def search(build: Callable[[Any], object], values: Any) -> dict[int, str]:
    """Return which of `values` (a sequence that slices) `build` refuses, and why.

    By bisection: one bad value among n costs as much as building 2 n values, not n builds.
    """
    try:
        build(values)
    except REFUSALS as error:
        if len(values) == 1:
            return {0: str(error) or type(error).__name__}
        half = len(values) // 2
        later = search(build, values[half:])
        return search(build, values[:half]) | {half + row: reason for row, reason in later.items()}
    return {}
