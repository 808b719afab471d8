"""Unite objects with different columns into one table: its columns, names and types.

Every engine renders this table. `archive/common_type.py` unites types; for readers, every integer becomes an int64, and
nested types that differ in more than fields and numbers become text (`_target`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.common_type import EXACT, common
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.schema import fields_in
from jetcapture_py.config.column_types import parse_type, rebuilt
from jetcapture_py.config.units import got, quoted
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File

Columns = Sequence[str] | Callable[[str], bool]
"""Names of columns, or a function that returns True for names of columns to read."""

Types = Mapping[str, pa.DataType]
"""Types of columns by folded name."""

Nulled = tuple[pa.Field, int]
"""A column of the result, and how many values became null because they do not convert to its type."""

TIME_OF_DAY = pa.time64("us")
INSTANT = pa.timestamp("us", "UTC")
"""The type of timestamps with a time zone."""


class Table:
    """The columns of a set of objects.

    `schemas` are the objects' distinct schemas; some methods take a schema's index. A column with compatible types is
    read as their common type, which Parquet allows for structs with more or fewer fields, for wider numbers, and for
    null columns that become numbers. Any other column is read as stored, and then converted.
    """

    def __init__(
        self,
        schemas: Iterable[pa.Schema],
        quarantine: bool,
        columns: Columns | None,
        inexact: Collection[str] = (),
        *,
        types: Types | None = None,
        for_sql: bool = False,
    ) -> None:
        """`columns` are those to read besides a message's identity and time, None for all; `inexact` ones, in lower
        case, have integers that are not exact as a double. `types` are of `read_types`.

        Raises JetcaptureError for unreadable types, and for names that differ only in case. With `for_sql`, such
        columns are left out, as are those that SQL cannot name.
        """
        schemas = list(schemas)
        self.given: Types = types or {}
        """The types that some columns have whatever is stored, by folded name; what does not convert is null."""
        stored_names = list(dict.fromkeys(name for schema in schemas for name in schema.names if name != layout.KEY))
        if unknown := next((name for name in self.given if name not in map(str.lower, stored_names)), None):
            raise ConfigError(f"the archive has no column {unknown}; it has {', '.join(stored_names)}")
        self.nulled: list[Nulled] = []
        """What was read and did not convert to the types in `given`; threads append."""
        self.unread: dict[str, str] = {}
        """Left-out columns in lower case, with the reason."""
        self.partitions = list(layout.PARTITIONS[1:] if quarantine else layout.PARTITIONS)
        """Text columns derived from an object's path, after the others."""
        named = () if columns is None or callable(columns) else columns
        always = {name.lower() for name in (*named, *layout.IDENTITY, layout.ROW, layout.TIME)}

        def chosen(name: str) -> bool:
            return columns is None or name.lower() in always or (callable(columns) and columns(name))

        self._stored = [self._columns(schema, chosen, for_sql=for_sql) for schema in schemas]
        for stored in self._stored:
            for folded in self.unread:
                stored.pop(folded, None)
        names: dict[str, str] = {}
        found: dict[str, dict[pa.DataType, None]] = defaultdict(dict)
        for stored in self._stored:
            for folded, (name, type_) in stored.items():
                names.setdefault(folded, name)
                found[folded][type_] = None
        first = {name: position for position, name in enumerate((*layout.ENVELOPE, *layout.OPTIONAL))}
        self.columns: dict[str, pa.Field] = {
            folded: pa.field(
                names[folded], self.given.get(folded) or _target(list(found[folded]), exact=folded not in inexact)
            )
            for folded in sorted(found, key=lambda folded: first.get(folded, len(first)))
        }
        """The columns by folded name, without the partitions, in the result's order."""

    def _columns(
        self, schema: pa.Schema, chosen: Callable[[str], bool], *, for_sql: bool
    ) -> dict[str, tuple[str, pa.DataType]]:
        stored: dict[str, tuple[str, pa.DataType]] = {}
        for field in schema:
            folded = field.name.lower()
            if field.name == layout.KEY or folded in self.partitions or not chosen(field.name):
                continue  # derived from the path, or not needed
            try:
                if folded in stored:
                    raise JetcaptureError(f"columns {stored[folded][0]} and {field.name} {_SAME_BUT_FOR_CASE}")
                type_ = as_read(field.name, field.type)
                _check_fields(field.name, type_, named=for_sql)
            except JetcaptureError as error:
                if not for_sql:
                    raise
                self.unread[folded] = str(error).rpartition(": ")[0]  # without the remedy
                continue
            stored[folded] = field.name, type_
        return stored

    @property
    def schema(self) -> pa.Schema:
        """The schema of the result: the columns, and then the partitions."""
        return pa.schema([*self.columns.values(), *((name, pa.string()) for name in self.partitions)])

    @property
    def several_rows(self) -> bool:
        """Whether a message may have several rows."""
        return layout.ROW in self.columns

    @property
    def times(self) -> list[str]:
        """The names of the columns with times of day."""
        return [name for stored in self._stored for name, type_ in stored.values() if _has_time(type_)]

    def stored(self, schema: int) -> Mapping[str, tuple[str, pa.DataType]]:
        """Return the columns of an object by folded name: their names and types, normalized by `as_read`."""
        return self._stored[schema]

    def drifts(self, schema: int) -> bool:
        """Whether an object stores a column in a type that a Parquet reader cannot convert to the result's."""
        return any(
            read_as(type_, self.columns[folded].type) != self.columns[folded].type
            for folded, (_, type_) in self._stored[schema].items()
        )


def listed(columns: object) -> list[str]:
    """Return one or several column names as a list. Raises JetcaptureError for anything else."""
    one = isinstance(columns, str) or not isinstance(columns, Iterable)
    names: list[Any] = [columns] if one else list(cast("Iterable[Any]", columns))
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise JetcaptureError(f"columns: expected names, got {quoted(wrong[0])}")
    if not names:
        raise JetcaptureError("columns: expected at least one name")
    return names


def read_types(types: Mapping[str, pa.DataType | str]) -> Types:
    """Return the types of `read_archive` by folded name, as engines read them. Raises ConfigError."""
    result = {}
    for name, given in types.items():
        try:
            type_ = parse_type(_SQL_TYPES.get(given.lower(), given)) if isinstance(given, str) else given
            if not isinstance(type_, pa.DataType) or type_ == pa.null() or pa.types.is_nested(type_):
                raise ValueError(f"{got('expected the type of a single value, such as int64', given)}")
            if name.startswith("_nats_") or name.lower() in layout.PARTITIONS:
                raise ValueError("this column has the same type in every archive")
            result[name.lower()] = as_read(name, type_)
        except (ValueError, JetcaptureError) as error:
            raise ConfigError(f"type of column {name}: {error}") from error
    return result


def take_nulled(nulled: list[Nulled]) -> str:
    """Return and forget how many values became null, as text; "" for none."""
    counts: Counter[pa.Field] = Counter()
    while nulled:
        field, count = nulled.pop()
        counts[field] += count
    texts = sorted(f"{field.name} ({count} not {field.type})" for field, count in counts.items())
    return f"values that do not convert are null: {', '.join(texts)}" if texts else ""


def outputs(names: Sequence[str], columns: Columns | None, known: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return the columns of a result: names as in `columns`, and the matching ones of `names`.

    Raises JetcaptureError, which lists the `known` columns, if there is no such column.
    """
    if columns is None or callable(columns):
        return [(name, name) for name in names]
    folded = {name.lower(): name for name in names} | {name: name for name in names}
    unknown = next((name for name in columns if name.lower() not in folded), None)
    if unknown is not None:
        raise JetcaptureError(
            f"the archive has no column {unknown}; it has {', '.join(names if known is None else known)}"
        )
    return [(name, folded.get(name) or folded[name.lower()]) for name in columns]


_SQL_TYPES = {
    "tinyint": "int8",
    "smallint": "int16",
    "integer": "int32",
    "real": "float32",
    "varchar": "string",
    "text": "string",
    "timestamptz": "timestamp",
    "timestamp with time zone": "timestamp",
    "blob": "binary",
}
"""Names of types in SQL that the configuration does not have."""
_SAME_BUT_FOR_CASE = "differ in case only: name the columns you need, without these"
_NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
_MAX_DIGITS = 38
"""Maximum digits of a decimal."""
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.null(): (*_NUMBERS[:4], pa.float64(), pa.date32()),  # Parquet stores nulls as an int32
    pa.int8(): (pa.int64(), pa.float64()),
    pa.int16(): (pa.int64(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float64()),
    pa.float32(): (pa.float64(),),
}
"""Types that a Parquet reader, Spark's included, can read a type as without changing any value, besides the type
itself."""


def _target(types: Sequence[pa.DataType], *, exact: bool) -> pa.DataType:
    """Return the result type of a column stored as `types`; `exact`: its integers are exact as a double."""
    if (merged := common(types, lossless=True)) is not None:
        return _without_null(merged)
    merged = common(types, lossless=False)
    if any(type_.num_fields for type_ in types):
        return _without_null(merged) if all(_widens(type_, merged, exact=exact) for type_ in types) else pa.string()
    if pa.types.is_floating(merged) and not exact and pa.int64() in types:
        return pa.string()
    return pa.int64() if pa.types.is_integer(merged) else merged


def _widens(type_: pa.DataType, to: pa.DataType, *, exact: bool = True) -> bool:
    """Whether the types differ only in more fields and wider numbers; `exact`: integers are exact as a double."""
    types = pa.types
    if types.is_struct(type_) and types.is_struct(to):
        fields = {field.name.lower(): field.type for field in to}
        return all(
            field.name.lower() in fields and _widens(field.type, fields[field.name.lower()], exact=exact)
            for field in type_
        )
    if (types.is_list(type_) and types.is_list(to)) or (types.is_map(type_) and types.is_map(to)):
        pairs = zip(inner_types(type_), inner_types(to), strict=True)
        return all(_widens(inner, other, exact=exact) for inner, other in pairs)
    wider = (pa.float64(),) if exact and type_ == pa.int64() else _WIDER.get(type_, ())
    return type_ in (to, pa.null()) or to in wider


def inexact_columns(
    files: ArchiveFiles, infos: Sequence[ObjectInfo], objects: Mapping[ObjectName, File]
) -> Collection[str]:
    """Return columns, in lower case, that are floats in some objects and integers beyond a double's precision in
    others, themselves or in a field or element."""
    types = pa.types
    leaves = {
        number: [
            (field.name.lower(), path.lower(), inner.type)
            for field in schema
            for path, inner in fields_in(pa.schema([field]))
            if not inner.type.num_fields
        ]
        for number, schema in {info.schema_number: info.schema for info in infos}.items()
    }
    floats = {path for some in leaves.values() for _, path, type_ in some if types.is_floating(type_)}
    mixed = {
        number: [
            (at, column) for at, (column, path, type_) in enumerate(some) if types.is_integer(type_) and path in floats
        ]
        for number, some in leaves.items()
    }
    infos = [info for info in infos if mixed[info.schema_number]]
    inexact: set[str] = set()
    for info, data in zip(infos, files.footers([objects[info.name] for info in infos]), strict=True):
        metadata = footer.decoded(data)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for at, column in mixed[info.schema_number]:
            limits = (abs(limit) for group in groups for limit in footer.bounds(group.column(at).statistics) or ())
            if max(limits, default=0) > EXACT:
                inexact.add(column)
    return inexact


def read_as(stored: pa.DataType, target: pa.DataType) -> pa.DataType:
    """Return the type with which Parquet reads a column stored as `stored` for `target`: that type, if possible."""
    readable = _without_null(stored) == stored and common([target, stored], lossless=True) == target
    return target if readable or target in _WIDER.get(stored, ()) else stored


def is_cast(stored: pa.DataType, target: pa.DataType) -> bool:
    """Whether an engine's own cast, which finds fields of structs by name, gives the values that `convert` gives."""
    targets, names = ({path for path, _ in fields_in(pa.schema([("", type_)]))} for type_ in (target, stored))
    # nulls may become anything, also in lists; `common` matches fields in any case
    same = common([target, stored], lossless=True) == target or _widens(stored, target)
    return same and names <= targets


def _check_fields(column: str, type_: pa.DataType, *, named: bool) -> None:
    """Raise JetcaptureError if a struct has two fields with equal names or, if `named`, one without a name."""
    for inner in inner_types(type_):
        _check_fields(column, inner, named=named)
    if pa.types.is_struct(type_):
        first: dict[str, str] = {}
        for field in type_:
            other = first.setdefault(field.name.lower(), field.name)
            if other != field.name:
                raise JetcaptureError(
                    f"column {column} has fields {other} and {field.name}, which {_SAME_BUT_FOR_CASE}"
                )
            if named and not field.name:
                raise JetcaptureError(f"column {column} has a field without a name: SQL needs one")


def inner_types(type_: pa.DataType) -> list[pa.DataType]:
    """Return the types directly inside a struct, list or map."""
    if pa.types.is_map(type_):
        return [type_.key_type, type_.item_type]
    return [type_.field(number).type for number in range(type_.num_fields)]


def _has_time(type_: pa.DataType) -> bool:
    return type_ == TIME_OF_DAY or any(map(_has_time, inner_types(type_)))


def _without_null(type_: pa.DataType) -> pa.DataType:
    """Replace the null type in a type by text, because Parquet stores it as int32."""
    return rebuilt(type_, lambda inner: pa.string() if inner == pa.null() else inner)


_SIMPLE: dict[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
} | {type_: type_ for type_ in (pa.null(), pa.bool_(), *_NUMBERS, pa.string(), pa.binary(), pa.date32(), TIME_OF_DAY)}


def as_read(column: str, type_: pa.DataType) -> pa.DataType:
    """Return the type to read a stored type as: one of few, shared by types with the same values.

    Raises JetcaptureError for types that Parquet has, but not every engine.
    """
    if (simple := _SIMPLE.get(type_)) is not None:
        return simple
    if pa.types.is_dictionary(type_):
        return as_read(column, type_.value_type)
    if pa.types.is_timestamp(type_) and type_.unit != "ns":
        return INSTANT if type_.tz else pa.timestamp("us")
    if pa.types.is_decimal(type_) and type_.precision <= _MAX_DIGITS:
        return pa.decimal128(type_.precision, type_.scale)
    if pa.types.is_fixed_size_binary(type_):
        return pa.binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        return pa.list_(as_read(column, type_.value_type))
    if pa.types.is_map(type_):
        return pa.map_(as_read(column, type_.key_type), as_read(column, type_.item_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, as_read(column, field.type)) for field in type_])
    raise JetcaptureError(f"column {column} is {type_}, which cannot be read: name the columns you need instead")
