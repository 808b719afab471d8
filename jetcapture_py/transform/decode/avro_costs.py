"""Estimate the cost of reading values of an Avro schema, and refuse schemas that would cost too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jetcapture_py.transform.decode.avro_schema import PRIMITIVES, Named
from jetcapture_py.transform.decode.bounds import RECORD
from jetcapture_py.transform.decode.common import show

MAX_PARTS = 20_000
"""Most JSON values, such as names and types, in a schema that comes with messages: about 4,000 fields."""
_MOST_LEVELS = 300
"""Of records, arrays and maps: the library's compiled reader has one call on the stack for each."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of reading values of a schema."""

    recursive: bool
    """Whether values can nest without bound."""
    empty: int
    """Most values without bytes that one value holds, or a part of it that has bytes."""
    nested: int
    """Records, arrays and maps in the schema."""
    named: int
    """Its named types."""
    leaves: int
    """Values in one datum, without those in arrays and maps."""
    dense: float
    """Most values in arrays and maps for each byte."""
    heaviest: int
    """Most values that an item of an array or map takes."""


def check_size(schema: Any) -> None:
    """Raise ValueError for a schema, as from JSON, that is too large to come with messages."""
    count, left = 0, [schema]
    while left:
        of = left.pop()
        count += 1
        if isinstance(of, dict):
            left.extend(of.values())
        elif isinstance(of, list):
            left.extend(of)
        if count > MAX_PARTS:
            raise ValueError(f"the schema has more than {MAX_PARTS} names, types and other values")


def survey(schema: Any, named: Named, extra: int = 0) -> Costs:
    """Check a parsed schema; return what its values can cost, with `extra` for each item of an array or map.

    Raises ValueError for a schema of which a value without bytes can be endless: hostile data would take all memory.
    """
    _refuse_endless(schema, named)
    visit = _Visit(named, extra)
    cost = visit.type(schema)
    if cost.depth > _MOST_LEVELS:
        raise ValueError(f"the schema nests deeper than {_MOST_LEVELS} levels")
    return Costs(bool(visit.recursive), cost.empty, visit.nested, len(named), cost.leaves, visit.dense, visit.heaviest)


class _TypeCost(NamedTuple):
    """The cost of values of a type."""

    least: int
    """Bytes of the shortest one; numbers count as one."""
    depth: int
    """Levels of records, arrays and maps."""
    empty: int
    """Most values without bytes in one."""
    leaves: int
    """Values in one, without those in arrays and maps."""
    nested: bool
    """Whether it takes more than its leaves."""


class _Visit:
    """Visits every type of a schema once: named types can refer to each other in exponentially many ways."""

    def __init__(self, named: Named, extra: int) -> None:
        self._named, self._extra = named, extra
        self._known: dict[str, _TypeCost | None] = {}
        self.recursive = set[str]()
        self.nested = self.heaviest = 0
        self.dense = 1.0

    def type(self, of: Any) -> _TypeCost:
        """The cost of a type's values."""
        if isinstance(of, list):
            branches = [self.type(branch) for branch in of]
            return _TypeCost(
                least=1 + min((branch.least for branch in branches), default=0),
                depth=max((branch.depth for branch in branches), default=0),
                empty=max((branch.empty - (not branch.least) for branch in branches), default=0),  # it has a byte
                leaves=max((branch.leaves for branch in branches), default=1),
                nested=any(branch.nested for branch in branches),
            )
        if isinstance(of, str) and of not in PRIMITIVES and of != "null":
            if of not in self._known:
                return self.type(self._named[of])
            if (known := self._known[of]) is None:  # it is being visited
                self.recursive.add(of)
                return _TypeCost(least=1, depth=0, empty=0, leaves=1, nested=True)
            return known
        kind = of["type"] if isinstance(of, dict) else of
        if isinstance(kind, list | dict):
            return self.type(kind)
        if kind in ("record", "error"):
            return self._record(of)
        if kind in ("array", "map"):
            return self._items(of)
        bare = kind == "null" or (kind == "fixed" and not of["size"])
        return _TypeCost(least=1 - bare, depth=0, empty=int(bare), leaves=1, nested=False)

    def _items(self, of: dict[str, Any]) -> _TypeCost:
        self.nested += 1
        item = self.type(of["items" if of["type"] == "array" else "values"])
        if not item.least and of["type"] == "array":
            raise ValueError("an array of items without bytes")
        self._weigh(item, item.least + (of["type"] == "map"))  # a map's value has the bytes of its name
        return _TypeCost(least=1, depth=item.depth + 1, empty=item.empty - (not item.least), leaves=1, nested=True)

    def _record(self, of: dict[str, Any]) -> _TypeCost:
        name = of["name"]
        self._known[name] = None
        self.nested += 1
        fields = [self.type(field["type"]) for field in of["fields"]]
        least = sum(field.least for field in fields)
        cost = self._known[name] = _TypeCost(
            least=least,
            depth=1 + max((field.depth for field in fields), default=0),
            empty=sum(field.empty for field in fields) + (not least),
            leaves=sum(field.leaves for field in fields) or 1,
            nested=True,
        )
        if name in self.recursive:
            self._weigh(cost, least)
        return cost

    def _weigh(self, item: _TypeCost, least: int) -> None:
        weight = RECORD + 3 * item.leaves + self._extra if item.nested else 1  # the library's records are dictionaries
        self.heaviest = max(self.heaviest, weight)
        self.dense = max(self.dense, weight / least)


def _refuse_endless(schema: Any, named: Named) -> None:
    """Raise ValueError if a record contains itself with nothing in between that can end it."""
    done = set[str]()

    def visit(of: Any, path: tuple[str, ...]) -> None:
        if isinstance(of, str):
            if of in path:
                raise ValueError(f"the record {show(of)} always contains itself")
            if of in named and of not in done and named[of]["type"] in ("record", "error"):
                visit(named[of], path)
        elif isinstance(of, dict):
            if of["type"] in ("record", "error"):
                for field in of["fields"]:
                    visit(field["type"], (*path, of["name"]))
                done.add(of["name"])
            elif isinstance(of["type"], dict):
                visit(of["type"], path)

    for start in (schema, *(name for name in named if name not in done)):
        visit(start, ())
