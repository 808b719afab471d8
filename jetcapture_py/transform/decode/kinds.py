"""The kinds of values in messages, by which columns without a declared type are inferred."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jetcapture_py.archive.common_type import EXACT
from jetcapture_py.archive.inferred import wider

_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int53",
    float: "double",
    str: "string",
    list: "list",
    dict: "struct",
    bytes: "binary",
    datetime: "timestamp",
}
NESTED = frozenset(("list", "struct"))
_FAMILIES: dict[type, str] = {**_KINDS, int: "number", float: "number", type(None): "null"}


def family_of(value: Any) -> str:
    """Return the kind of a value, with one kind for all numbers."""
    return _FAMILIES.get(type(value), "string")


def is_empty(value: Any) -> bool:
    """Whether a list or object has nothing but nulls, lists and objects in it, and so decides no type."""
    containers = [value]
    for container in containers:
        if isinstance(container, dict):
            containers.extend(container.values())
        elif isinstance(container, list):
            containers.extend(container)
        elif container is not None:
            return False
    return True


def kinds_of(values: Sequence[Any]) -> set[str]:
    """Return the kinds of values, none of them null. Integers are one kind: int53, int64, or `integer` beyond it."""
    kinds = {_KINDS.get(kind, "string") for kind in set(map(type, values))}
    if "int53" in kinds:
        integers = values if len(kinds) == 1 else [value for value in values if isinstance(value, int)]
        low, high = min(integers), max(integers)
        if max(-low, high) > EXACT:
            kinds.remove("int53")
            kinds.add("int64" if low >= -(2**63) and high < 2**63 else "integer")
    return kinds


def wider_kind(known: str, kind: str) -> str:
    """Return the narrowest kind that holds both."""
    return kind if known == "null" else wider(known, kind) or "string"
