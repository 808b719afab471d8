"""JSON without declared columns: the columns are learned from the messages, and survive drift.

What a decoder has learned only ever widens, for as long as it lives: int64 to double, and to a string column that
holds the JSON text of every value that is not itself a string when nothing else fits. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from jetcapture_py import layout
from jetcapture_py.batch import Decoded, Failure, MessageBatch
from jetcapture_py.decode.common import Values, assemble, decode_each, failure, payloads_of, show
from jetcapture_py.decode.nested import flatten, offsets_of, struct_array
from jetcapture_py.decode.types import MAX_DEPTH

MAX_FIELDS = 1000
"""Most columns, and most fields of one nested object: a larger one is stored as JSON text."""
MAX_NESTED = 10_000
"""Most fields of all nested objects together: objects that would need more are stored as JSON text."""

_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int64",
    float: "double",
    str: "string",
    list: "list",
    dict: "struct",
}
_SCALARS = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64(), "string": pa.string()}


class InferringJsonDecoder:
    """Decodes whatever fields there are; a process's later batches have the columns of its earlier ones, and more."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
        self._root = Fields(Room(MAX_NESTED), layout.field_name)

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        payloads, failures = payloads_of(batch)
        found = decode_each(self._decode, payloads, failures)
        decoded = {i: document for i, document in enumerate(found) if document is not None and i not in failures}
        self._refuse_excess(decoded, failures)
        documents = list(decoded.values())
        values = self._root.learn(documents, 1)
        columns = [
            Values(name=name, type=of, values=values.get(key) or [None] * len(documents), build=shape.build)
            for key, name, shape, of in self._root.stored()
        ]
        return assemble(columns, list(decoded), failures)

    def _refuse_excess(self, decoded: dict[int, dict[str, Any]], failures: dict[int, Failure]) -> None:
        """Move documents whose new fields exceed `MAX_FIELDS` from `decoded` to `failures`."""
        known = set(self._root.shapes)
        if len(known.union(*decoded.values())) <= MAX_FIELDS:
            return
        for index, document in list(decoded.items()):
            new = document.keys() - known
            if len(known) + len(new) <= MAX_FIELDS:
                known |= new
                continue
            del decoded[index]
            error = f"more than {MAX_FIELDS} different columns: no room for {show(min(new))}; declare decode.columns"
            failures[index] = failure(index, error, stage="schema")


@dataclass(slots=True)
class Room:
    """How many more fields nested objects may have, so that no message can make the schema grow without end."""

    left: int


class Fields:
    """The fields of an object seen so far, by their names in JSON.

    Columns whose names differ in case only are one column to Spark: the first one seen (of one batch, the one that
    sorts first) keeps its name, and later ones get `_` appended until the name is free.
    """

    def __init__(self, room: Room, rename: Callable[[str], str] = lambda name: name or "_") -> None:
        self._room = room
        self.shapes: dict[str, Shape] = {}
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._rename = rename

    def learn(self, objects: Sequence[dict[str, Any]], depth: int) -> dict[str, list[Any]]:
        """Widen to what `objects`, `depth` levels down, hold; their values by field."""
        seen = dict.fromkeys(chain.from_iterable(objects))
        for key in sorted(seen.keys() - self.shapes.keys()):
            name = self._rename(key)
            while name.lower() in self._taken:
                name += "_"
            self._taken.add(name.lower())
            self._names[key] = name
            self.shapes[key] = Shape(self._room)
        values = _by_field(objects, seen)
        for key, found in values.items():
            self.shapes[key].learn(found, depth)
        return values

    def stored(self) -> list[tuple[str, str, Shape, pa.DataType]]:
        """Name in JSON, name of the column, shape and type of each field that is more than null."""
        found = ((key, self._names[key], shape, shape.type()) for key, shape in self.shapes.items())
        return [(key, name, shape, of) for key, name, shape, of in found if of is not None]


class Shape:
    """What one field's values have been so far: null, bool, int64, double, string, list or struct."""

    __slots__ = ("_room", "fields", "item", "kind")

    def __init__(self, room: Room) -> None:
        self._room = room
        self.kind = "null"
        self.item: Shape | None = None
        self.fields: Fields | None = None

    def learn(self, values: Sequence[Any], depth: int) -> None:
        """Widen to `values`, which are `depth` levels down."""
        present = [value for value in values if value is not None]
        for kind in sorted(_kinds(present)):
            self.kind = _wider(self.kind, kind)
        if self.kind in ("list", "struct") and depth >= MAX_DEPTH:
            self.kind = "string"
        if self.kind == "list":
            self.item = self.item or Shape(self._room)
            self.item.learn(flatten(present), depth + 1)
        elif self.kind == "struct":
            self.fields = self.fields or Fields(self._room)
            fields = len(set(self.fields.shapes).union(*present))
            new = fields - len(self.fields.shapes)
            if fields > MAX_FIELDS or new > self._room.left:
                self.kind, self.fields = "string", None
            else:
                self._room.left -= new
                self.fields.learn(present, depth + 1)

    def type(self) -> pa.DataType | None:
        """The column's type; None while there is nothing to store: nulls, empty objects, lists of such."""
        if self.kind == "list" and self.item is not None:
            of = self.item.type()
            return None if of is None else pa.list_(of)
        if self.kind == "struct" and self.fields is not None:
            inner = self.fields.stored()
            return pa.struct([(name, of) for _, name, _, of in inner]) if inner else None
        return _SCALARS.get(self.kind)

    def build(self, values: list[Any]) -> pa.Array:
        """The column of `values`, all of which were learned."""
        of = self.type()
        if self.kind == "list" and self.item is not None:
            return pa.ListArray.from_arrays(offsets_of(values), self.item.build(flatten(values)), type=of)
        if self.kind == "struct" and self.fields is not None:
            children = [
                shape.build([None if value is None else value.get(key) for value in values])
                for key, _, shape, _ in self.fields.stored()
            ]
            return struct_array(children, of, pa.array([value is None for value in values], pa.bool_()))
        try:
            return pa.array(values, of)
        except (TypeError, ValueError):  # integers no double holds exactly, or what is to become JSON text
            as_is, convert = (float, float) if self.kind == "double" else (str, json_text)
            return pa.array([v if v is None or isinstance(v, as_is) else convert(v) for v in values], of)


def _by_field(objects: Sequence[dict[str, Any]], names: Collection[str]) -> dict[str, list[Any]]:
    """The values of each field of `objects`, null where one lacks it."""
    if len(objects) * len(names) <= 4 * sum(map(len, objects)):
        return {name: [each.get(name) for each in objects] for name in names}
    values: dict[str, list[Any]] = {name: [None] * len(objects) for name in names}
    for row, each in enumerate(objects):  # many kinds of objects: look at what is there, not at all that is not
        for name, value in each.items():
            values[name][row] = value
    return values


def json_text(value: object) -> str:
    """`value` as compact JSON."""
    return msgspec.json.encode(value).decode()


def _kinds(values: Sequence[Any]) -> set[str]:
    kinds = {_KINDS[kind] for kind in set(map(type, values))}
    if "int64" in kinds:
        whole = values if len(kinds) == 1 else [value for value in values if isinstance(value, int)]
        if min(whole) < -(2**63) or max(whole) >= 2**63:
            kinds.add("double")
    return kinds


def _wider(known: str, kind: str) -> str:
    """The narrowest kind that holds both."""
    if known in ("null", kind):
        return kind
    return "double" if {known, kind} == {"int64", "double"} else "string"
