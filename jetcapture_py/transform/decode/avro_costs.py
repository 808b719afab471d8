"""Estimate the cost of reading values of an Avro schema, and refuse schemas that would cost too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jetcapture_py.transform.decode.avro_schema import PRIMITIVES, Named
from jetcapture_py.transform.decode.common import show
from jetcapture_py.transform.decode.weights import RECORD

_LEAST = {"null": 0, "float": 4, "double": 8}
"""Bytes of the shortest value; 1 for other types without a size."""
MAX_PARTS = 20_000
"""Most JSON values, such as names and types, in a schema that comes with messages: about 4,000 fields."""
_MOST_LEVELS = 300
"""Of records, arrays and maps: the library's compiled reader has one call on the stack for each."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of reading values of a schema.

    `recursive`: values can nest without bound. `empty`: the most values without bytes that one value holds, or a part
    of it that has bytes. `nested`: records, arrays and maps in the schema. `named`: its named types. `leaves`: values
    in one datum, without those in arrays and maps, of which each byte can be `dense`, and an item `heaviest`. `least`:
    bytes of the shortest datum.
    """

    recursive: bool
    empty: int
    nested: int
    named: int
    leaves: int
    least: int
    dense: float
    heaviest: int


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
    visit = Visit(named, extra)
    found = visit.type(schema)
    if found.depth > _MOST_LEVELS:
        raise ValueError(f"the schema nests deeper than {_MOST_LEVELS} levels")
    return Costs(
        bool(visit.recursive),
        found.empty,
        visit.nested,
        len(named),
        found.leaves,
        found.least,
        visit.dense,
        visit.heaviest,
    )


class TypeCost(NamedTuple):
    """The cost of values of a type.

    `bare`: they may have no bytes. `depth`: levels of records, arrays and maps. `empty`: the most values without bytes
    in one. `least`: bytes of the shortest one. `leaves`: values in one, without those in arrays and maps.
    `record`: it takes more than its leaves: a record, an array or a map.
    """

    bare: bool
    depth: int
    empty: int
    least: int
    leaves: int
    record: bool


def item_weight(item: TypeCost, extra: int) -> int:
    """Return how many values an item of an array or a map takes: a field of the library's records is three."""
    return RECORD + 3 * item.leaves + extra if item.record else 1


class Visit:
    """Visits every type of a schema once: named types can refer to each other in exponentially many ways."""

    def __init__(self, named: Named, extra: int) -> None:
        self._named, self._extra = named, extra
        self._known: dict[str, TypeCost | None] = {}
        self.recursive = set[str]()
        self.nested = 0
        self.heaviest = 0
        self.dense = 1.0

    def type(self, of: Any) -> TypeCost:
        """The cost of a type's values."""
        if isinstance(of, list):
            branches = [self.type(branch) for branch in of]
            return TypeCost(
                bare=False,
                depth=max((each.depth for each in branches), default=0),
                empty=max((each.empty - each.bare for each in branches), default=0),  # it has a byte itself
                least=1 + min((each.least for each in branches), default=0),
                leaves=max((each.leaves for each in branches), default=1),
                record=any(each.record for each in branches),
            )
        if isinstance(of, str) and of not in PRIMITIVES and of != "null":
            if of not in self._known:
                return self.type(self._named[of])
            if (known := self._known[of]) is None:  # it is being visited
                self.recursive.add(of)
                return TypeCost(bare=False, depth=0, empty=0, least=0, leaves=1, record=True)
            return known
        kind = of["type"] if isinstance(of, dict) else of
        if isinstance(kind, list | dict):
            return self.type(kind)
        if kind in ("record", "error"):
            return self._record(of)
        if kind in ("array", "map"):
            return self._items(of)
        size = of["size"] if kind == "fixed" else _LEAST.get(kind, 1)
        return TypeCost(bare=not size, depth=0, empty=int(not size), least=size, leaves=1, record=False)

    def _items(self, of: dict[str, Any]) -> TypeCost:
        self.nested += 1
        item = self.type(of["items" if of["type"] == "array" else "values"])
        if item.bare and of["type"] == "array":
            raise ValueError("an array of items without bytes")
        self._weigh(item, item.least if of["type"] == "array" else 1 + item.least)
        # a map's value has the bytes of its name
        return TypeCost(bare=False, depth=item.depth + 1, empty=item.empty - item.bare, least=1, leaves=1, record=True)

    def _record(self, of: dict[str, Any]) -> TypeCost:
        name = of["name"]
        self._known[name] = None
        self.nested += 1
        fields = [self.type(field["type"]) for field in of["fields"]]
        bare = all(each.bare for each in fields)
        found = self._known[name] = TypeCost(
            bare=bare,
            depth=1 + max((each.depth for each in fields), default=0),
            empty=sum(each.empty for each in fields) + bare,
            least=sum(each.least for each in fields),
            leaves=sum(each.leaves for each in fields) or 1,
            record=True,
        )
        if name in self.recursive:
            self._weigh(found, found.least)
        return found

    def _weigh(self, item: TypeCost, least: int) -> None:
        weight = item_weight(item, self._extra)
        self.heaviest = max(self.heaviest, weight)
        self.dense = max(self.dense, weight / max(least, 1))


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
