"""JSON with declared columns: decode one object per message directly into the declared types.

Types are never coerced. A missing field is null; undeclared fields are skipped, but must be well-formed; the last of
duplicate fields wins. A message that does not match is a `Failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.config.column_types import parse_declared, stored
from jetcapture_py.text import is_text
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode import bounds
from jetcapture_py.transform.decode.common import (
    DeclaredColumn,
    Values,
    assemble,
    decode_each,
    owners_of,
    show,
    texts_of,
    unique_names,
)
from jetcapture_py.transform.decode.json_values import Codec, Reader, codec, reader, struct_type

MakeCodec = Callable[[pa.DataType, str | None], Codec]
"""Returns the codec of a declared type and its unit; see `json_values.codec`."""


@dataclass(slots=True)
class _Object:
    """An object to decode: its fields by name, each the codec of a column or another object."""

    fields: dict[str, _Object | Codec] = field(default_factory=dict)

    def add(self, path: list[str], leaf: Codec) -> tuple[str, ...] | None:
        """Add a column's codec at `path`; return its attributes in the object, None if `path` has another shape."""
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
    """A column: the pass that decodes it, and the readers that follow its path into the object."""

    name: str
    type: pa.DataType
    codec: Codec
    turn: int
    readers: tuple[Reader, ...]


class ObjectDecoder:
    """Decodes declared columns of messages that are one object each. Raises ValueError for a wrong declaration.

    `make` returns the function that decodes a payload as a msgspec type, `make_codec` the codec of a declared type.
    """

    _containers = staticmethod(bounds.json_containers)
    _skeleton = staticmethod(bounds.json_skeleton)

    def __init__(
        self,
        columns: Mapping[str, DeclaredColumn],
        make: Callable[[Any], Callable[[bytes], Any]],
        make_codec: MakeCodec,
    ) -> None:
        passes: list[_Object] = []
        self._outputs = [_output(name, column, passes, make_codec) for name, column in columns.items()]
        self._decode = [make(each.accepts()) for each in passes]
        self._width = sum(bounds.width(output.type) for output in self._outputs)
        self._heaviest = max((bounds.heaviest(output.type) for output in self._outputs), default=0)
        unique_names({declared: output.name for declared, output in zip(columns, self._outputs, strict=True)})

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError when that would take too much memory."""
        self._check_values(batch)
        payloads, failures = self._payloads(batch)
        passes = [decode_each(decode, payloads, failures) for decode in self._decode]
        messages = [i for i in range(len(batch)) if i not in failures] if failures else range(len(batch))
        if failures:
            passes = [[rows[i] for i in messages] for rows in passes]
        columns = [
            Values(name=out.name, type=out.type, values=_pick(passes[out.turn], out.readers), build=out.codec.build)
            for out in self._outputs
        ]
        return assemble(columns, messages, failures, owners_of(batch))

    def _check_values(self, batch: MessageBatch) -> None:
        """Raise BatchTooWideError if the payloads may have too many values."""
        size = batch.column(layout.PAYLOAD).nbytes
        limit = bounds.max_values(size) - self._width * len(batch)
        if self._heaviest * size > limit:
            bounds.check_bytes(batch, limit, self._values, self._values_of)

    def _values(self, data: Any) -> int:
        """Return how many values in lists and maps an array of bytes has at most."""
        objects, lists = self._containers(data)
        return self._heaviest * objects + min(self._heaviest, bounds.RECORD + 1) * lists

    def _values_of(self, payload: bytes) -> Iterable[int]:
        yield self._values(np.frombuffer(self._skeleton(payload), np.uint8))

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        """Return all payloads, and failures for those that cannot be decoded at all."""
        raise NotImplementedError


class JsonDecoder(ObjectDecoder):
    """Decodes declared columns of JSON objects. Raises ValueError for a wrong declaration."""

    def __init__(self, columns: Mapping[str, DeclaredColumn]) -> None:
        super().__init__(columns, lambda accepts: msgspec.json.Decoder(accepts).decode, codec)

    def _payloads(self, batch: MessageBatch) -> tuple[list[bytes], dict[int, Failure]]:
        return texts_of(batch)


def declaration(name: str, column: DeclaredColumn) -> tuple[pa.DataType, list[str]]:
    """Return the declared type of a column, and the names on the path to its value. Raises ValueError."""
    if not is_text(name):
        raise ValueError("the name is not valid text: it contains a surrogate")
    declared = parse_declared(column.type)
    path = [name] if column.path is None else column.path.split(".")
    if "" in path and column.path is not None:
        raise ValueError(f"path: {show(column.path)}: names separated by one dot, such as customer.address.city")
    return declared, path


def _output(name: str, column: DeclaredColumn, passes: list[_Object], make_codec: MakeCodec) -> _Output:
    """Add the column `name` to `passes`.

    Columns that need one field in two shapes (`customer` as json, and `customer.id`) need a second pass over the
    payloads.
    """
    try:
        declared, path = declaration(name, column)
        leaf = make_codec(declared, column.unit)
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
