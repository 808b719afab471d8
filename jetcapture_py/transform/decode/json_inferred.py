"""JSON without declared columns: infer the columns from the messages, and follow their drift.

Inferred types only ever become wider: int64 becomes double while a double holds every integer exactly. Incompatible
types, and integers beyond int64, become a string column with the JSON text of every value that is not a string. Nothing
is dropped, and no value changes. Fields that would make the columns grow without bound are stored as JSON text if they
are nested; otherwise their messages are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.common_type import EXACT
from jetcapture_py.config.column_types import MAX_DEPTH, TIMESTAMP
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode.bounds import JSON_FORMAT, ObjectFormat
from jetcapture_py.transform.decode.common import (
    ReadColumn,
    assemble,
    decode_each,
    failure,
    flatten,
    json_text,
    offsets_of,
    owners_of,
    show,
    struct_array,
)

MAX_FIELDS = 1000
"""Maximum columns, and maximum fields of a nested object; a larger object is stored as JSON text."""
MAX_NESTED = 10_000
"""Maximum fields and list levels in all columns together; values that need more are stored as JSON text."""
MAX_NAME = 1000
"""Maximum bytes of a field's name. Hive allows 767, Glue 255; a longer name is probably a value in the wrong place."""
MAX_NAMES = 256 << 10
"""Maximum bytes of all names together: a Parquet footer contains each name at least twice."""
MAX_CELLS = 1 << 22
"""Maximum values, nulls included, in the columns of a batch: each takes eight bytes, and as much while it is built.
A batch whose payloads have more bytes than this may have one value per byte."""
MAX_CONTAINERS = 1 << 21
"""Maximum objects and lists in the payloads of a batch: three bytes of JSON become two hundred in Python."""
_LARGE = 4 << 20
"""Objects and lists are counted in batches with larger payloads than this."""
ARRAY_CELLS = 128
"""A column costs as much as this many values, even if it is shorter."""

_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int64",
    float: "double",
    str: "string",
    list: "list",
    dict: "struct",
    bytes: "binary",
    datetime: "timestamp",
}
_SCALARS = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),  # this and the next only in MessagePack
    "timestamp": TIMESTAMP,
}


class InferringDecoder:
    """Decodes all fields of messages; in MessagePack, `bin` and timestamps have their own column types.

    A batch has the columns with a value in it, with the types inferred so far in this process.
    """

    def __init__(self, reading: ObjectFormat = JSON_FORMAT) -> None:
        self._format = reading
        self._decode = reading.decoder(dict[str, Any]).decode
        self._budget = SchemaBudget()
        self._root = Fields(self._budget, layout.field_name)
        self._columns = pa.schema([])

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if its columns would be too large."""
        size = batch.column(layout.PAYLOAD).nbytes
        if size > _LARGE:
            self._format.check(batch, MAX_CONTAINERS, objects=1, lists=1, reason=_TOO_MANY)
        payloads, failures = self._format.payloads(batch)
        rows = decode_each(self._decode, payloads, failures)
        documents = {i: document for i, document in enumerate(rows) if document is not None and i not in failures}
        self._refuse_excess(documents, failures)
        self._budget.cells = max(MAX_CELLS, size)
        try:
            values = self._root.widen(list(documents.values()), 1, len(documents))
        except BatchTooWideError:
            if len(documents) > 1:
                raise
            failures |= {index: failure(index, _TOO_WIDE, stage="schema") for index in documents}
            return assemble([], [], failures)
        columns = [(ReadColumn(name, of, shape.build), values[key]) for key, name, shape, of in self._root.stored()]
        if self._budget.changed:
            self._columns = pa.schema(self._root.types(known=True))
            self._budget.changed = False
        return replace(assemble(columns, list(documents), failures, owners_of(batch)), columns=self._columns)

    def _refuse_excess(self, decoded: dict[int, dict[str, Any]], failures: dict[int, Failure]) -> None:
        """Move documents with too many new fields from `decoded` to `failures`."""
        names = set(self._root.shapes)
        room = self._budget.names
        if _excess(set().union(*decoded.values()) - names, len(names), room) is None:
            return
        for index, document in list(decoded.items()):
            new = document.keys() - names
            problem = _excess(new, len(names), room)
            if problem is None:
                names |= new
                room -= _size(new)
                continue
            del decoded[index]
            failures[index] = failure(index, f"{problem}; declare decode.columns", stage="schema")


_TOO_MANY = f"more than {MAX_CONTAINERS:,} objects and lists; declare decode.columns"
_TOO_WIDE = f"more than {MAX_CELLS} values, including nulls; declare decode.columns"


def _size(names: Iterable[str]) -> int:
    return sum(len(name.encode()) for name in names)


def _excess(new: AbstractSet[str], known: int, room: int) -> str | None:
    """Return why an object with `known` fields cannot also have the `new` ones; names may take `room` bytes."""
    if not new:
        return None
    size, longest = max((len(name.encode()), name) for name in new)
    if size > MAX_NAME:
        return f"the field name {show(longest)} has {size} bytes, more than {MAX_NAME}"
    if known + len(new) > MAX_FIELDS:
        return f"more than {MAX_FIELDS} different columns: no room for {show(min(new))}"
    if _size(new) > room:
        return f"more than {MAX_NAMES} bytes of field names: no room for {show(min(new))}"
    return None


@dataclass(slots=True)
class SchemaBudget:
    """Limits on new columns, so that the schema cannot grow without bound."""

    fields: int = MAX_NESTED
    """Remaining nested fields."""
    names: int = MAX_NAMES
    """Remaining bytes of field names."""
    cells: int = MAX_CELLS
    """Remaining values of a batch."""
    changed: bool = False
    """Whether the known columns have changed."""

    def spend(self, columns: int, rows: int) -> None:
        """Reserve the values of `columns` with `rows` rows. Raises BatchTooWideError if too few remain."""
        self.cells -= columns * (rows + ARRAY_CELLS)
        if self.cells < 0:
            raise BatchTooWideError


class Fields:
    """The fields of an object seen so far, by their names in JSON.

    Spark ignores case in column names. Of names that differ only in case, the first one seen (within a batch, the one
    that sorts first) is kept, and `_` is appended to later ones until the name is free.
    """

    def __init__(self, budget: SchemaBudget, rename: Callable[[str], str] = lambda name: name or "_") -> None:
        self._budget = budget
        self.shapes: dict[str, FieldShape] = {}
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._rename = rename
        self._seen: Collection[str] = ()

    def widen(self, objects: Sequence[dict[str, Any]], depth: int, rows: int) -> dict[str, list[Any]]:
        """Widen the types to fit `objects`, at nesting level `depth` in columns of `rows` rows."""
        seen = dict.fromkeys(chain.from_iterable(objects))
        self._budget.spend(len(seen), rows)
        for key in sorted(seen.keys() - self.shapes.keys()):
            name = self._rename(key)
            while name.lower() in self._taken:
                name += "_"
            self._taken.add(name.lower())
            self._names[key] = name
            self.shapes[key] = FieldShape(self._budget)
            self._budget.names -= len(name.encode())
            self._budget.fields -= depth > 1
        values = _by_field(objects, seen)
        for key, column in values.items():
            self.shapes[key].widen(column, depth, rows)
        self._seen = seen
        return values

    def stored(self) -> list[tuple[str, str, FieldShape, pa.DataType]]:
        """Return the name in JSON, column name, shape and type of each field with a value in this batch."""
        keys = self.shapes if len(self._seen) == len(self.shapes) else (k for k in self.shapes if k in self._seen)
        fields = ((key, self._names[key], shape, shape.type()) for key in keys if (shape := self.shapes[key]).present)
        return [(key, name, shape, of) for key, name, shape, of in fields if of is not None]

    def nested(self) -> list[tuple[str, str, FieldShape, pa.DataType]]:
        """Like `stored`, or the first known field if none has a value, because a struct needs at least one."""
        if stored := self.stored():
            return stored
        known = ((key, self._names[key], shape, shape.type()) for key, shape in self.shapes.items())
        return next(([(key, name, shape, of)] for key, name, shape, of in known if of is not None), [])

    def types(self, *, known: bool) -> list[tuple[str, pa.DataType]]:
        """Return name and type of each field that is not always null: all `known` ones, or those in this batch."""
        if not known:
            return [(name, of) for _, name, _, of in self.nested()]
        fields = ((self._names[key], shape.type(known=True)) for key, shape in self.shapes.items())
        return [(name, of) for name, of in fields if of is not None]

    def release(self) -> None:
        """Release these fields' budget."""
        self._budget.fields += len(self.shapes)
        self._budget.names += _size(self._names.values())
        for shape in self.shapes.values():
            shape.become("string")


class FieldShape:
    """The inferred type of one field: null, bool, int64, double, string, list or struct.

    `present` is true if the last batch has a value, `exact` if a double holds every integer seen so far.
    """

    __slots__ = ("_budget", "exact", "fields", "item", "kind", "present")

    def __init__(self, budget: SchemaBudget) -> None:
        self._budget = budget
        self.kind = "null"
        self.present = False
        self.exact = True
        self.item: FieldShape | None = None
        self.fields: Fields | None = None

    def widen(self, values: Sequence[Any], depth: int, rows: int) -> None:
        """Widen the type to fit `values`, at nesting level `depth` in a column of `rows` rows."""
        present = [value for value in values if value is not None]
        self.present = bool(present)
        kind = self.kind
        for new in sorted(self._kinds(present)):
            kind = _wider(kind, new)
        if kind == "double" and not self.exact:
            kind = "string"
        if kind in ("list", "struct") and depth >= MAX_DEPTH:
            kind = "string"
        if kind != self.kind:
            self.become(kind)
        if self.kind == "list":
            self._widen_items(flatten(present), depth)
        elif self.kind == "struct":
            self._widen_fields(present, depth, rows)

    def _kinds(self, values: Sequence[Any]) -> set[str]:
        kinds = {_KINDS.get(kind, "string") for kind in set(map(type, values))}
        if "int64" in kinds:
            integers = values if len(kinds) == 1 else [value for value in values if isinstance(value, int)]
            low, high = min(integers), max(integers)
            self.exact = self.exact and max(-low, high) <= EXACT
            if low < -(2**63) or high >= 2**63:
                kinds.add("string")
        return kinds

    def _widen_items(self, items: list[Any], depth: int) -> None:
        if self.item is None:
            if not self._budget.fields:
                self.become("string")
                return
            self._budget.fields -= 1
            self.item = FieldShape(self._budget)
        self._budget.spend(1, len(items))
        self.item.widen(items, depth + 1, len(items))

    def _widen_fields(self, present: list[dict[str, Any]], depth: int, rows: int) -> None:
        self.fields = self.fields or Fields(self._budget)
        new = set().union(*present) - self.fields.shapes.keys()
        foreign = not all(isinstance(name, str) for name in new)  # possible in MessagePack
        if foreign or len(new) > self._budget.fields or _excess(new, len(self.fields.shapes), self._budget.names):
            self.become("string")
        else:
            self.fields.widen(present, depth + 1, rows)

    def become(self, kind: str) -> None:
        self.kind = kind
        self._budget.changed = True
        if kind == "string" and self.item is not None:
            self._budget.fields += 1
            self.item.become("string")
            self.item = None
        if kind == "string" and self.fields is not None:
            self.fields.release()
            self.fields = None

    def type(self, *, known: bool = False) -> pa.DataType | None:
        """Return the column's type, with all fields `known` so far, or those with a value in the last batch.

        None while there is nothing to store: only nulls, empty objects, or lists of them.
        """
        if self.kind == "list" and self.item is not None:
            of = self.item.type(known=known)
            return None if of is None else pa.list_(of)
        if self.kind == "struct" and self.fields is not None:
            inner = self.fields.types(known=known)
            return pa.struct(inner) if inner else None
        return _SCALARS.get(self.kind)

    def build(self, values: list[Any]) -> pa.Array:
        """Build the column of `values`; its type must have been widened to them."""
        of = self.type()
        if self.kind == "list" and self.item is not None:
            return pa.ListArray.from_arrays(offsets_of(values), self.item.build(flatten(values)), type=of)
        if self.kind == "struct" and self.fields is not None:
            children = [
                shape.build([None if value is None else value.get(key) for value in values])
                for key, _, shape, _ in self.fields.nested()
            ]
            return struct_array(children, of, pa.array([value is None for value in values], pa.bool_()))
        try:
            return pa.array(values, of)
        except (TypeError, ValueError):  # values that become JSON text
            return pa.array([v if v is None or isinstance(v, str) else json_text(v) for v in values], of)


def _by_field(objects: Sequence[dict[str, Any]], names: Collection[str]) -> dict[str, list[Any]]:
    """Return the values of each field of `objects`; null if missing."""
    if len(objects) * len(names) <= 4 * sum(map(len, objects)):
        return {name: [object_.get(name) for object_ in objects] for name in names}
    values: dict[str, list[Any]] = {name: [None] * len(objects) for name in names}
    for row, object_ in enumerate(objects):  # many kinds of objects: iterate over existing fields only
        for name, value in object_.items():
            values[name][row] = value
    return values


def _wider(known: str, kind: str) -> str:
    """Return the narrowest type that holds both."""
    if known in ("null", kind):
        return kind
    return "double" if {known, kind} == {"int64", "double"} else "string"
