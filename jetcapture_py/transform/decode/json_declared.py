"""JSON with declared columns: one object per message, decoded directly into the declared types.

Strict: no type is coerced into another. A field that is missing or null is null; undeclared fields are skipped,
but must be well-formed; the last of duplicate fields counts. Anything that does not fit is a `Failure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import parse_declared, stored
from jetcapture_py.text import is_text
from jetcapture_py.transform.batch import Decoded, MessageBatch
from jetcapture_py.transform.decode.json_common import Values, assemble, decode_each, payloads_of, show
from jetcapture_py.transform.decode.json_values import Codec, Reader, codec, reader, struct_type


class JsonColumn(Protocol):
    """A declared column."""

    @property
    def type(self) -> str:
        """A type that `types.parse_type` knows."""
        ...

    @property
    def path(self) -> str | None:
        """Where the field is: names with dots between them; null: the field called like the column."""
        ...

    @property
    def unit(self) -> str | None:
        """s, ms, us or ns for timestamps sent as numbers; null: RFC 3339 text."""
        ...


@dataclass(slots=True)
class _Object:
    """An object to be decoded: its fields by name, each a column's codec or again an object."""

    fields: dict[str, _Object | Codec] = field(default_factory=dict)

    def add(self, path: list[str], leaf: Codec) -> tuple[str, ...] | None:
        """Where `leaf` is found in the decoded object; None when another column needs `path` in another shape."""
        name, *rest = path
        known = self.fields.get(name)
        if not rest:
            if known is not None:
                return None
            self.fields[name] = leaf
            return (self._attribute(name),)
        inner = known or _Object()
        if isinstance(inner, Codec):
            return None
        below = inner.add(rest, leaf)
        if below is None:
            return None
        self.fields[name] = inner
        return (self._attribute(name), *below)

    def _attribute(self, name: str) -> str:
        return f"f{list(self.fields).index(name)}"

    def accepts(self) -> type[msgspec.Struct]:
        """The msgspec type of the object."""
        return struct_type(
            [
                (name, inner.accepts if isinstance(inner, Codec) else inner.accepts() | None)
                for name, inner in self.fields.items()
            ]
        )


@dataclass(frozen=True, slots=True)
class _Output:
    """A column: which of the passes finds it, and what reads it there, one step into the object after the other."""

    name: str
    type: pa.DataType
    codec: Codec
    turn: int
    readers: tuple[Reader, ...]


class JsonDecoder:
    """Decodes declared columns; ValueError, one line, when a declaration is wrong."""

    def __init__(self, columns: Mapping[str, JsonColumn]) -> None:
        passes: list[_Object] = []
        self._outputs = [_output(name, column, passes) for name, column in columns.items()]
        self._decode = [msgspec.json.Decoder(each.accepts()).decode for each in passes]
        taken: dict[str, str] = {}
        for declared, output in zip(columns, self._outputs, strict=True):
            if (other := taken.setdefault(output.name.lower(), declared)) != declared:
                raise ValueError(
                    f"columns {show(other)} and {show(declared)} are the same column to Spark (case-insensitive, and"
                    f" {', '.join(layout.PARTITIONS)} and _nats_... get _ appended)"
                )

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`."""
        payloads, failures = payloads_of(batch)
        passes = [decode_each(decode, payloads, failures) for decode in self._decode]
        messages = [i for i in range(len(batch)) if i not in failures] if failures else range(len(batch))
        if failures:
            passes = [[rows[i] for i in messages] for rows in passes]
        columns = [
            Values(name=out.name, type=out.type, values=_pick(passes[out.turn], out.readers), build=out.codec.build)
            for out in self._outputs
        ]
        return assemble(columns, messages, failures)


def _output(name: str, column: JsonColumn, passes: list[_Object]) -> _Output:
    """The column `name`, found a place in `passes`.

    Columns that need one field in two shapes (`customer` as json, and `customer.id`) take a second pass over the
    payloads.
    """
    try:
        if not is_text(name):
            raise ValueError("the name is not valid text: it contains a surrogate")
        declared = parse_declared(column.type)
        leaf = codec(declared, column.unit)
        path = [name] if column.path is None else column.path.split(".")
        if "" in path and column.path is not None:
            raise ValueError(f"path: {show(column.path)}: names separated by one dot, such as customer.address.city")
        struct_type([(part, None) for part in dict.fromkeys(path)])
    except ValueError as error:
        raise ValueError(f"column {show(name)}: {error}") from None
    turn = 0
    while True:
        if turn == len(passes):
            passes.append(_Object())
        if (attributes := passes[turn].add(path, leaf)) is not None:
            return _Output(layout.field_name(name), stored(declared), leaf, turn, tuple(map(reader, attributes)))
        turn += 1


def _pick(values: list[Any], readers: tuple[Reader, ...]) -> list[Any]:
    for read in readers:
        values = read(values)
    return values
