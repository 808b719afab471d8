"""JSON without declared columns: infer the columns from the messages.

A column keeps its type: that of the archive, else of most values in the first batch that has the field. It only widens
where no value changes: int64 becomes double while a double holds every integer exactly, and a struct gets fields. A
value that does not fit, in type or within the limits below, is removed from its column and returned in the column
`_nats_rescued`: a JSON object of such values by path (`customer.zip`, `items[2].price`).

With `conflict="quarantine"`, the message fails instead. With `conflict="widen"`, columns follow the messages:
incompatible types, integers beyond int64 and nested fields beyond the limits become a string column with the JSON text
of every value that is not a string.

Messages with too many columns are refused in every case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import KnownTypes, merged
from jetcapture_py.archive.schema import fields_in
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
    json_texts,
    offsets_of,
    owners_of,
    show,
    struct_array,
)
from jetcapture_py.transform.decode.kinds import NESTED, family_of, is_empty, kinds_of, wider_kind

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
MISFIT_CELLS = 16
"""A value that does not fit costs as much as this many values, and its path as much as its bytes."""

Conflict = Literal["rescue", "quarantine", "widen"]
Misfit = tuple[int, str, Any]
"""The row of a value that does not fit its column, the path below the column, and the value."""

_SCALARS = {
    "bool": pa.bool_(),
    "int53": pa.int64(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),  # this and the next only in MessagePack
    "timestamp": TIMESTAMP,
}


class InferringDecoder:
    """Decodes all fields of messages; in MessagePack, `bin` and timestamps have their own column types.

    A batch has the columns with a value in it, with the types inferred so far.
    """

    def __init__(self, reading: ObjectFormat = JSON_FORMAT, conflict: Conflict = "rescue") -> None:
        self._format = reading
        self._decode = reading.decoder(dict[str, Any]).decode
        self.conflict = conflict
        self.types: KnownTypes = {}
        """The types of all fields so far; replaced, never changed."""
        self._have(self.types)

    def learn(self, types: KnownTypes) -> bool:
        """Keep these types, such as the archive's, and their order; call it between two batches.

        Return whether a column now has another name or type than in earlier batches.
        """
        before = _columns_in(self._columns)
        self._have(merged(types, self.types))
        return not before <= _columns_in(self._columns)

    def _have(self, types: KnownTypes) -> None:
        """Have these types and no others."""
        self._budget = SchemaBudget(widens=self.conflict == "widen")
        self._root = Fields(self._budget, layout.field_name)
        self._root.learn(types, 1)
        self._describe()

    def _describe(self) -> None:
        self._columns = pa.schema(self._root.types(known=True))
        self.types = self._root.known()
        self._budget.changed = False

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if its columns would be too large."""
        size = batch.column(layout.PAYLOAD).nbytes
        if size > _LARGE:
            self._format.check(batch, MAX_CONTAINERS, objects=1, lists=1, reason=_TOO_MANY)
        payloads, failures = self._format.payloads(batch)
        rows = decode_each(self._decode, payloads, failures)
        documents = {i: document for i, document in enumerate(rows) if document is not None and i not in failures}
        self._refuse_excess(documents, failures)
        before = self.types
        try:
            while True:
                self._budget.cells = max(MAX_CELLS, size)
                values, misfits = self._root.widen(list(documents.values()), 1, len(documents))
                if not misfits or self.conflict != "quarantine":
                    break
                for index, fields in zip(list(documents), _by_row(misfits, len(documents)), strict=True):
                    if fields:
                        del documents[index]
                        failures[index] = failure(index, _misfit(fields), stage="schema")
                self._have(before)
        except BatchTooWideError:
            self._have(before)
            if len(documents) > 1:
                raise
            failures |= {index: failure(index, _TOO_WIDE, stage="schema") for index in documents}
            return assemble([], [], failures)
        stored = self._root.stored()
        if self._budget.changed:
            self._describe()
        columns = [(ReadColumn(name, of, shape.build), values[key]) for key, name, shape, of in stored]
        if self.conflict == "rescue":
            columns.append((_RESCUED, _by_row(misfits, len(documents)) if misfits else [None] * len(documents)))
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


def _columns_in(schema: pa.Schema) -> set[tuple[str, int]]:
    """Return the path and kind of all columns and fields inside them."""
    return {(path, field.type.id) for path, field in fields_in(schema)}


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
    widens: bool = False
    """Whether columns become text rather than that values are removed."""

    def spend(self, columns: int, rows: int) -> None:
        """Reserve the values of `columns` with `rows` rows. Raises BatchTooWideError if too few remain."""
        self.cells -= columns * (rows + ARRAY_CELLS)
        if self.cells < 0:
            raise BatchTooWideError

    def spend_paths(self, misfits: Sequence[Misfit], name: int) -> None:
        """Reserve the values that these misfits are worth below a name of this size. Raises BatchTooWideError."""
        self.cells -= sum(MISFIT_CELLS + (len(path) + name) // 8 for _, path, _ in misfits)
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

    def widen(
        self, objects: Sequence[dict[str, Any]], depth: int, rows: int
    ) -> tuple[dict[str, list[Any]], list[Misfit]]:
        """Widen the types to fit `objects`, at nesting level `depth` in columns of `rows` rows.

        Returns the values of each field, and the values that do not fit, which become null in `objects`.
        """
        seen = dict.fromkeys(chain.from_iterable(objects))
        self._budget.spend(len(seen), rows)
        for key in sorted(seen.keys() - self.shapes.keys()):
            self._add(key, depth)
        values = _by_field(objects, seen)
        misfits: list[Misfit] = []
        for key, column in values.items():
            removed = self.shapes[key].widen(column, depth, rows)
            self._budget.spend_paths(removed, len(key))
            for row, path, value in removed:
                if not path:
                    objects[row][key] = None
                misfits.append((row, f"{key}{path}", value))
        self._seen = seen
        return values, misfits

    def _add(self, key: str, depth: int) -> None:
        name = self._rename(key)
        while name.lower() in self._taken:
            name += "_"
        self._taken.add(name.lower())
        self._names[key] = name
        self.shapes[key] = FieldShape(self._budget)
        self._budget.names -= len(name.encode())
        self._budget.fields -= depth > 1
        self._budget.changed = True

    def learn(self, types: KnownTypes, depth: int) -> None:
        """Have these types, before any object."""
        for key, type_ in types.items():
            self._add(key, depth)
            self.shapes[key].learn(type_, depth)

    def known(self) -> KnownTypes:
        """Return the types of all fields that have one."""
        types = {key: shape.known() for key, shape in self.shapes.items()}
        return {key: type_ for key, type_ in types.items() if type_ is not None}

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
    """The inferred type of one field: null, bool, int53, int64, double, string, list or struct.

    `present` is true if the last batch has a value.
    """

    __slots__ = ("_budget", "fields", "item", "kind", "present")

    def __init__(self, budget: SchemaBudget) -> None:
        self._budget = budget
        self.kind = "null"
        self.present = False
        self.item: FieldShape | None = None
        self.fields: Fields | None = None

    def widen(self, values: list[Any], depth: int, rows: int) -> list[Misfit]:
        """Widen the type to fit `values`, at nesting level `depth` in a column of `rows` rows.

        Returns the values that do not fit. They become null in `values`, or in the objects and lists there.
        """
        present = [value for value in values if value is not None]
        kind = self._widened(present, depth)
        misfits: list[Misfit] = []
        if kind is None and self.kind in NESTED and self.type(known=True) is None:
            self.become("string")  # only empty lists or objects so far, which have no column: any type is possible
            self.become("null")
            kind = self._widened(present, depth)
        if kind is None:
            misfits = self._remove_misfits(values, depth)
            present = [value for value in values if value is not None]
            kind = self._widened(present, depth) or self.kind
        self.present = bool(present)
        if kind != self.kind:
            self.become(kind)
        if self.kind == "list":
            misfits += self._widen_items(values, depth)
        elif self.kind == "struct":
            misfits += self._widen_fields(values, present, depth, rows)
        return misfits

    def _widened(self, values: Sequence[Any], depth: int) -> str | None:
        """Return the narrowest type for `values` and the earlier ones; None if no such type is allowed."""
        kinds = kinds_of(values)
        kind = self.kind
        for new in sorted(kinds):
            kind = wider_kind(kind, new)
        if self._budget.widens:
            return "string" if kind == "integer" or (kind in ("list", "struct") and depth >= MAX_DEPTH) else kind
        fits = kind != "string" or (kinds == {"string"} and self.kind in ("null", "string")) or not kinds
        return kind if fits and (kinds.isdisjoint(NESTED) or depth < MAX_DEPTH) and "integer" not in kinds else None

    def _remove_misfits(self, values: list[Any], depth: int) -> list[Misfit]:
        """Set values to None that do not fit the type, or that of most values if there is none yet; return them."""
        kind = self.kind
        family = _most(values) if kind == "null" else None
        misfits: list[Misfit] = []
        for row, value in enumerate(values):
            if value is None:
                continue
            (new,) = kinds_of((value,))
            wider = wider_kind(kind, new)
            fits = new != "integer" and (new not in NESTED or depth < MAX_DEPTH)
            if kind == "null":
                fits = fits and family_of(value) == family
            elif wider == "string":
                fits = kind == new
            if not fits:
                values[row] = None
                misfits.append((row, "", value))
                if len(misfits) * MISFIT_CELLS > self._budget.cells:
                    raise BatchTooWideError  # at once: a million of them take seconds
            else:
                kind = wider
        return misfits

    def _widen_items(self, values: list[Any], depth: int) -> list[Misfit]:
        items = flatten(values)
        if self.item is None:
            if self._budget.fields <= 0:  # below 0 with what several replicas have learned
                return self._refuse(values)
            self._budget.fields -= 1
            self.item = FieldShape(self._budget)
        self._budget.spend(1, len(items))
        misfits = self.item.widen(items, depth + 1, len(items))
        if not misfits:
            return misfits
        self._budget.spend_paths(misfits, 0)
        owners = [(row, at) for row, value in enumerate(values) if value is not None for at in range(len(value))]
        moved: list[Misfit] = []
        for item, path, value in misfits:
            row, at = owners[item]
            if not path:
                values[row][at] = None
            moved.append((row, f"[{at}]{path}", value))
        return moved

    def _widen_fields(
        self, values: list[Any], present: Sequence[dict[str, Any]], depth: int, rows: int
    ) -> list[Misfit]:
        self.fields = self.fields or Fields(self._budget)
        new = set().union(*present) - self.fields.shapes.keys()
        foreign = not all(isinstance(name, str) for name in new)  # possible in MessagePack
        misfits: list[Misfit] = []
        if foreign or len(new) > self._budget.fields or _excess(new, len(self.fields.shapes), self._budget.names):
            if self._budget.widens:
                return self._refuse(values)
            misfits = self._remove_excess(values, new)
        _, inner = self.fields.widen(present, depth + 1, rows)
        if inner:
            at = [row for row, value in enumerate(values) if value is not None]
            misfits += [(at[row], f".{path}", value) for row, path, value in inner]
        return misfits

    def _remove_excess(self, values: list[Any], new: AbstractSet[Any]) -> list[Misfit]:
        """Remove the fields of objects that exceed the limits, and return them."""
        assert self.fields is not None  # noqa: S101  the caller's
        count, names = len(self.fields.shapes), self._budget.names
        kept: set[str] = set()
        for name in dict.fromkeys(chain.from_iterable(value for value in values if value is not None)):
            if (
                name in new
                and isinstance(name, str)
                and len(kept) < self._budget.fields
                and _excess({name}, count + len(kept), names) is None
            ):
                kept.add(name)
                names -= len(name.encode())
        return [
            (row, f".{name}", value.pop(name))
            for row, value in enumerate(values)
            if value is not None
            for name in [name for name in value if name in new and name not in kept]
        ]

    def _refuse(self, values: list[Any]) -> list[Misfit]:
        """Become text; or keep the type, and remove and return all values."""
        if self._budget.widens:
            self.become("string")
            return []
        misfits = [(row, "", value) for row, value in enumerate(values) if value is not None]
        for row, _, _ in misfits:
            values[row] = None
        return misfits

    def known(self) -> Any:
        """Return the type as in `KnownTypes`; None while there is none."""
        if self.kind == "list":
            return None if self.item is None else [self.item.known()]
        if self.kind == "struct":
            return {} if self.fields is None else self.fields.known()
        return None if self.kind == "null" else self.kind

    def learn(self, type_: Any, depth: int) -> None:
        """Have a type of `KnownTypes`, before any value."""
        self.kind = "list" if isinstance(type_, list) else "struct" if isinstance(type_, dict) else type_ or "null"
        if isinstance(type_, list):
            self._budget.fields -= 1
            self.item = FieldShape(self._budget)
            self.item.learn(type_[0], depth + 1)
        if isinstance(type_, dict):
            self.fields = Fields(self._budget)
            self.fields.learn(type_, depth + 1)

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


def _most(values: Iterable[Any]) -> str:
    """Return the family of most values, without empty ones if there are others."""
    present = [value for value in values if value is not None]
    families = Counter(family_of(value) for value in present if not is_empty(value)) or Counter(map(family_of, present))
    return max(families, key=families.__getitem__)


def _by_row(misfits: Sequence[Misfit], rows: int) -> list[dict[str, Any] | None]:
    """Return the misfits of each row by path; `_` is appended to an equal path, because names may contain dots."""
    by_row: list[dict[str, Any] | None] = [None] * rows
    for row, path, value in misfits:
        fields = by_row[row]
        if fields is None:
            fields = by_row[row] = {}
        while path in fields:
            path += "_"
        fields[path] = _finite(value)
    return by_row


def _finite(value: Any) -> Any:
    """Return a value with the text of NaN and infinities, which JSON does not have, at any depth."""
    holder = [value]
    containers: list[Any] = [holder]
    while containers:
        container = containers.pop()
        for key, inner in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(inner, float) and not math.isfinite(inner):
                container[key] = str(inner)
            elif isinstance(inner, dict | list):
                containers.append(inner)
    return holder[0]


def _misfit(fields: Mapping[str, Any]) -> str:
    path, value = next(iter(fields.items()))
    return f"field {show(path)}: earlier values have another type than {show(value)}; see decode.on_conflict"


_RESCUED = ReadColumn(layout.RESCUED, pa.string(), json_texts)
