"""Count the values of Avro datums from their bytes, before the library builds them.

Slower than the library: only for datums whose size does not say already that they cannot take too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetcapture_py.transform.decode.avro_costs import Visit, item_weight
from jetcapture_py.transform.decode.avro_schema import Named
from jetcapture_py.transform.decode.weights import TOO_MANY

Skip = Callable[[bytes, int], int]
"""Returns where the value that begins at an offset ends. Raises IndexError or ValueError for damaged data."""

_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}


class ValueCounter:
    """Counts what datums of a parsed schema hold in arrays and maps, and in records that contain themselves.

    `extra` is what each item takes besides its own values. `left` is what remains of `most`. Raises ValueError beyond.
    """

    def __init__(self, schema: Any, named: Named, extra: int, most: int) -> None:
        self._visit = Visit(named, extra)
        self._visit.type(schema)
        self._extra, self.left = extra, most
        self._skips: dict[str, Skip] = {}
        self._skip = self._of(schema)

    def count(self, data: bytes, rows: int, at: int = 0) -> None:
        """Count `rows` datums, which begin at an offset. Raises ValueError if there are too many values."""
        try:
            for _ in range(rows):
                at = self._skip(data, at)
        except IndexError:
            at = len(data) + 1
        if at > len(data):
            raise ValueError("not a datum of its schema: it is truncated")

    def _spend(self, values: int) -> None:
        self.left -= values
        if self.left < 0:
            raise ValueError(TOO_MANY)

    def _of(self, of: Any) -> Skip:
        if isinstance(of, list):
            return _union([self._of(branch) for branch in of])
        kind = of["type"] if isinstance(of, dict) else of
        if isinstance(kind, list | dict):
            return self._of(kind)
        if kind in ("record", "error"):
            return self._record(of)
        if kind in ("array", "map"):
            return self._items(of)
        if kind in ("string", "bytes"):
            return _skip_bytes
        if kind in ("int", "long", "enum"):
            skip: Skip = _skip_long
        elif kind == "fixed" or kind in _SIZES:
            skip = _fixed(of["size"] if kind == "fixed" else _SIZES[kind])
        else:
            return lambda data, at: self._skips[kind](data, at)  # a named type, perhaps not complete yet
        if isinstance(of, dict) and "name" in of:
            self._skips[of["name"]] = skip
        return skip

    def _record(self, of: dict[str, Any]) -> Skip:
        fields = [self._of(field["type"]) for field in of["fields"]]
        name = of["name"]
        weight = item_weight(self._visit.type(name), self._extra) if name in self._visit.recursive else 0

        def skip(data: bytes, at: int) -> int:
            if weight:
                self._spend(weight)
            for field in fields:
                at = field(data, at)
            return at

        self._skips[name] = skip
        return skip

    def _items(self, of: dict[str, Any]) -> Skip:
        named = of["type"] == "map"
        items = of["values" if named else "items"]
        item, weight = self._of(items), item_weight(self._visit.type(items), self._extra)
        name = items.get("name") if isinstance(items, dict) else items
        if isinstance(name, str) and name in self._visit.recursive:
            weight = 0  # it is counted as a record that contains itself

        def skip(data: bytes, at: int) -> int:
            while True:
                count, at = _long(data, at)
                if not count:
                    return at
                if count < 0:
                    count, (_, at) = -count, _long(data, at)
                self._spend(count * weight)
                for _ in range(count):
                    at = item(data, _skip_bytes(data, at) if named else at)

        return skip


def _long(data: bytes, at: int) -> tuple[int, int]:
    if (byte := data[at]) < 0x80:
        return byte >> 1 ^ -(byte & 1), at + 1
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at
        shift += 7
        if shift > 63:
            raise ValueError("not a datum of its schema: a number of more than 64 bits")


def _skip_long(data: bytes, at: int) -> int:
    while data[at] >= 0x80:
        at += 1
    return at + 1


def _skip_bytes(data: bytes, at: int) -> int:
    size, at = _long(data, at)
    if size < 0:
        raise ValueError("not a datum of its schema: a negative length")
    return at + size


def _fixed(size: int) -> Skip:
    return lambda _, at: at + size


def _union(branches: Sequence[Skip]) -> Skip:
    def skip(data: bytes, at: int) -> int:
        index, at = _long(data, at)
        return branches[index](data, at)

    return skip
