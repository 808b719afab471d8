"""The types of a capture's inferred columns, which every replica keeps.

    {store.url}/_columns/{stream}/{consumer}.json

Only the replicas of one capture write a file. A column that no recent object has keeps its type too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jetcapture_py.archive.metadata import SmallFile

DIRECTORY = "_columns"
KnownTypes = Mapping[str, Any]
"""The types of fields by their names in messages: `bool`, `int53` (an integer that a double holds exactly), `int64`,
`double`, `string`, `binary`, `timestamp`, a list with the type of its elements (null: unknown), or an object with the
types of its fields."""
_SCALARS = ("bool", "int53", "int64", "double", "string", "binary", "timestamp")
_WIDER = {frozenset(("int53", "int64")): "int64", frozenset(("int53", "double")): "double"}


class InferredColumns(SmallFile, frozen=True, kw_only=True):
    """The file's content."""

    consumer: str
    types: dict[str, Any]
    """In the order in which fields were seen, which decides the columns of names that differ only in case."""

    def __post_init__(self) -> None:
        _check(self.types)

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def path(stream: str, consumer: str) -> str:
    """Return the file's path, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}/{consumer}.json"


def wider(one: str, other: str) -> str | None:
    """Return the narrowest scalar type that holds the values of both unchanged; None without one."""
    return one if one == other else _WIDER.get(frozenset((one, other)))


def merged(kept: Any, other: Any) -> Any:
    """Return the type `kept`, widened to `other` where no value changes; of objects, with the fields of both."""
    if kept is None or other is None:
        return other if kept is None else kept
    if isinstance(kept, Mapping) and isinstance(other, Mapping):
        return {name: merged(kept.get(name), other.get(name)) for name in {**kept, **other}}
    if isinstance(kept, list) and isinstance(other, list):
        return [merged(kept[0], other[0])]
    if isinstance(kept, str) and isinstance(other, str):
        return wider(kept, other) or kept
    return other if _is_empty(kept) else kept


def _is_empty(type_: Any) -> bool:
    """Whether a type is that of empty lists and objects only, which have no column."""
    inner = type_.values() if isinstance(type_, Mapping) else type_
    return type_ is None or (not isinstance(type_, str) and all(map(_is_empty, inner)))


def _check(type_: Any) -> None:
    """Raise ValueError unless it is a type of `KnownTypes`."""
    if isinstance(type_, dict):
        for inner in type_.values():
            _check(inner)
    elif isinstance(type_, list) and len(type_) == 1:
        _check(type_[0])
    elif type_ is not None and type_ not in _SCALARS:
        raise ValueError(f"expected a type, got {type_!r}")


def column_of(rescued: str) -> str:
    """Return the column, by its name in messages, of a path in `_nats_rescued`."""
    return re.split(r"[.\[]", rescued, maxsplit=1)[0]


def text(type_: Any) -> str:
    """Return a type as `decode.columns` has it."""
    if isinstance(type_, Mapping):
        return f"struct<{', '.join(f'{name}: {text(inner)}' for name, inner in type_.items())}>"
    if isinstance(type_, list):
        return f"list<{text(type_[0])}>"
    return {"int53": "int64", None: "null"}.get(type_, str(type_))
