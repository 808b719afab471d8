"""One table of objects whose columns drifted: which type each column gets, and how each object's columns become it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from spark_jobs.reading.row_json import inner_types, text_of

Columns = Sequence[str] | Callable[[str], bool]
"""Names of columns, or what says of a name whether the column is wanted."""
Fold = Callable[[str], str]
"""Makes one of the names that Spark takes for one."""


def quoted(name: str) -> str:
    """The column's name as Spark SQL reads it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def find(name: str, names: Sequence[str], *, case_sensitive: bool) -> str | None:
    """The one of `names` that Spark means by `name`, exactly that if it is there; None if there is none.

    Raises JetcaptureError when it may be either of two.
    """
    if name in names or case_sensitive:
        return name if name in names else None
    found = [each for each in names if each.casefold() == name.casefold()]
    if len(found) > 1:
        raise JetcaptureError(f"columns {found[0]} and {found[1]} differ in case only: rename one with AS")
    return found[0] if found else None


class Table:
    """The columns that a set of objects has together, and how each object's columns become them.

    `schemas` numbers the distinct schemas, one number for each object. A column whose types go together is read as
    their common type, which Parquet allows for structs that have more or fewer fields; any other is read as it is
    stored, object by object, and then converted.
    """

    def __init__(
        self, footers: Iterable[pa.Schema], quarantine: bool, columns: Columns | None, case_sensitive: bool
    ) -> None:
        self.partitions = list(layout.PARTITIONS[1:] if quarantine else layout.PARTITIONS)
        self._fold = str if case_sensitive else str.casefold
        choose = columns if callable(columns) else None
        wanted = None
        if columns is not None:
            named = () if callable(columns) else columns
            wanted = {self._fold(name) for name in (*named, *layout.IDENTITY, layout.ROW)}
        numbers: dict[pa.Schema, int] = {}
        self.schemas = [numbers.setdefault(schema, len(numbers)) for schema in footers]
        self._stored = [self._columns(schema, wanted, choose) for schema in numbers]
        self._names: dict[str, str] = {}
        types: dict[str, dict[st.DataType, None]] = defaultdict(dict)
        for stored in self._stored:
            for folded, (name, kind) in stored.items():
                self._names.setdefault(folded, name)
                types[folded][kind] = None
        first = {name: position for position, name in enumerate((*layout.ENVELOPE, layout.ROW))}
        ordered = sorted(types, key=lambda folded: first.get(folded, len(first)))
        self._target = {folded: _target(list(types[folded]), self._fold) for folded in ordered}
        self._drifted = [
            folded
            for folded in ordered
            if any(not _readable(kind, self._target[folded], self._fold) for kind in types[folded])
        ]

    def _columns(
        self, schema: pa.Schema, wanted: set[str] | None, choose: Callable[[str], bool] | None
    ) -> dict[str, tuple[str, st.DataType]]:
        stored: dict[str, tuple[str, st.DataType]] = {}
        for field in schema:
            folded = self._fold(field.name)
            if wanted is not None and folded not in wanted and not (choose and choose(field.name)):
                continue
            if folded in stored:
                raise JetcaptureError(
                    f"columns {stored[folded][0]} and {field.name} differ in case only: "
                    "set spark.sql.caseSensitive=true"
                )
            kind = _spark_type(field.name, field.type)
            _check_fields(field.name, kind, self._fold)
            stored[folded] = field.name, kind
        return stored

    @property
    def several_rows(self) -> bool:
        """Whether a message may have several rows."""
        return layout.ROW in self._target

    def drift(self, schema: int) -> tuple[st.DataType | None, ...]:
        """Objects for which this is equal can be read at once."""
        stored = self._stored[schema]
        return tuple(stored[folded][1] if folded in stored else None for folded in self._drifted)

    def read_schema(self, schema: int) -> st.StructType:
        """What Spark is told that the objects hold."""
        stored = self._stored[schema]
        read = st.StructType()
        for folded, target in self._target.items():
            if folded not in self._drifted:
                read.add(self._names[folded], target)
            elif folded in stored and not isinstance(stored[folded][1], st.NullType):
                read.add(self._names[folded], _without_null(stored[folded][1], st.IntegerType()))
        for name in self.partitions:
            read.add(name, st.StringType())
        return read

    def select(self, schema: int) -> list[Column]:
        """The table's columns, from what was read."""
        stored = self._stored[schema]
        chosen = []
        for folded, target in self._target.items():
            name = self._names[folded]
            column = sf.col(quoted(name))
            if folded in self._drifted:
                kind = stored[folded][1] if folded in stored else st.NullType()
                column = _converted(column, kind, target, self._fold).alias(name)
            chosen.append(column)
        return [*chosen, *(sf.col(name) for name in self.partitions)]


_DIGITS: dict[type[st.DataType], int] = {st.ByteType: 3, st.ShortType: 5, st.IntegerType: 10, st.LongType: 19}
"""The integers, and how many digits they may have."""
_MOST_DIGITS = 38
"""Of a decimal in Spark."""
_TEXT_AS_IN_JSON = (st.StructType, st.ArrayType, st.MapType, st.TimestampType, st.TimestampNTZType)
"""Types whose text is that of `row_json`: Spark has none, or one that depends on the session's time zone."""


def _target(types: Sequence[st.DataType], fold: Fold) -> st.DataType:
    """The type of a column that objects store as `types`."""
    merged: st.DataType | None = types[0]
    for kind in types[1:]:
        merged = None if merged is None else _merge(merged, kind, fold)
    if merged is not None:
        return _without_null(merged, st.StringType())
    return _number([kind for kind in types if not isinstance(kind, st.NullType)]) or st.StringType()


def _number(types: Sequence[st.DataType]) -> st.DataType | None:
    """The number that holds integers, decimals or floats of these types: every one exactly, or a double where there are
    floats, except beside a decimal with a scale, which was declared for the sake of its digits. None if there is none.
    """
    if all(type(kind) in _DIGITS for kind in types):
        return st.LongType()
    if any(isinstance(kind, (st.FloatType, st.DoubleType)) for kind in types):
        fits = all(isinstance(kind, (st.FloatType, st.DoubleType)) or _is_integer(kind) for kind in types)
        return st.DoubleType() if fits else None
    if not all(type(kind) in _DIGITS or isinstance(kind, st.DecimalType) for kind in types):
        return None
    decimals = [kind if isinstance(kind, st.DecimalType) else st.DecimalType(_DIGITS[type(kind)]) for kind in types]
    scale = max(kind.scale for kind in decimals)
    precision = scale + max(kind.precision - kind.scale for kind in decimals)
    return st.DecimalType(precision, scale) if precision <= _MOST_DIGITS else None


def _is_integer(kind: st.DataType) -> bool:
    return type(kind) in _DIGITS or kind == _SIMPLE[pa.uint64()]


def _merge(left: st.DataType, right: st.DataType, fold: Fold) -> st.DataType | None:
    """The type that Parquet can read both as, null types aside; None when there is none. Fields have their names in
    `left`."""
    if left == right or isinstance(right, st.NullType):
        return left
    if isinstance(left, st.NullType):
        return right
    if isinstance(left, st.ArrayType) and isinstance(right, st.ArrayType):
        element = _merge(left.elementType, right.elementType, fold)
        return None if element is None else st.ArrayType(element)
    if isinstance(left, st.MapType) and isinstance(right, st.MapType):
        key, value = _merge(left.keyType, right.keyType, fold), _merge(left.valueType, right.valueType, fold)
        return None if key is None or value is None else st.MapType(key, value)
    if isinstance(left, st.StructType) and isinstance(right, st.StructType):
        fields = {fold(field.name): (field.name, field.dataType) for field in left}
        for field in right:
            name, known = fields.get(fold(field.name), (field.name, field.dataType))
            merged = _merge(known, field.dataType, fold)
            if merged is None:
                return None
            fields[fold(field.name)] = name, merged
        return st.StructType([st.StructField(name, kind) for name, kind in fields.values()])
    return None


def _readable(stored: st.DataType, target: st.DataType, fold: Fold) -> bool:
    """Whether Parquet reads a column that is stored as `stored` as `target`."""
    return not _has_null(stored) and _merge(target, stored, fold) == target


def _check_fields(column: str, kind: st.DataType, fold: Fold) -> None:
    """Raise JetcaptureError when a struct has two fields that Spark takes for one."""
    for inner in inner_types(kind):
        _check_fields(column, inner, fold)
    if isinstance(kind, st.StructType):
        known: dict[str, str] = {}
        for name in kind.fieldNames():
            first = known.setdefault(fold(name), name)
            if first != name:
                raise JetcaptureError(
                    f"column {column} has fields {first} and {name}, which differ in case only: "
                    "set spark.sql.caseSensitive=true"
                )


def _has_null(kind: st.DataType) -> bool:
    return _without_null(kind, st.StringType()) != kind


def _without_null(kind: st.DataType, instead: st.DataType) -> st.DataType:
    """`kind` with another type for values of which every one is null. Parquet stores those as int32."""
    if isinstance(kind, st.NullType):
        return instead
    if isinstance(kind, st.ArrayType):
        return st.ArrayType(_without_null(kind.elementType, instead))
    if isinstance(kind, st.MapType):
        return st.MapType(_without_null(kind.keyType, instead), _without_null(kind.valueType, instead))
    if isinstance(kind, st.StructType):
        return st.StructType([st.StructField(f.name, _without_null(f.dataType, instead)) for f in kind])
    return kind


def _converted(column: Column, stored: st.DataType, target: st.DataType, fold: Fold) -> Column:
    if stored == target:
        return column
    if isinstance(stored, st.NullType):
        return sf.lit(None).cast(target)
    if isinstance(target, st.StringType) and isinstance(stored, _TEXT_AS_IN_JSON):
        return text_of(column, stored)
    if isinstance(stored, st.ArrayType) and isinstance(target, st.ArrayType):
        if isinstance(stored.elementType, st.NullType):
            return _nulls(column, target.elementType)
        return sf.transform(column, lambda each: _converted(each, stored.elementType, target.elementType, fold))
    if isinstance(stored, st.MapType) and isinstance(target, st.MapType):
        if isinstance(stored.valueType, st.NullType):
            return sf.map_from_arrays(sf.map_keys(column), _nulls(column, target.valueType))
        return sf.transform_values(column, lambda _, each: _converted(each, stored.valueType, target.valueType, fold))
    if isinstance(stored, st.StructType) and isinstance(target, st.StructType):
        known = {fold(field.name): field.dataType for field in stored}
        fields = (
            _converted(column.getField(each.name), known.get(fold(each.name), st.NullType()), each.dataType, fold)
            for each in target
        )
        named = (field.alias(name) for field, name in zip(fields, target.fieldNames(), strict=True))
        return sf.when(column.isNotNull(), sf.struct(*named))
    return column.cast(target)


def _nulls(collection: Column, kind: st.DataType) -> Column:
    """As many nulls as an array or a map has. Looking at its own would fail: Parquet says that they are integers of a
    dictionary, and Spark's `transform` looks them up there before it asks whether they are null."""
    return sf.when(collection.isNotNull(), sf.array_repeat(sf.lit(None).cast(kind), sf.size(collection)))


_SIMPLE: dict[pa.DataType, st.DataType] = {
    pa.null(): st.NullType(),
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.string(): st.StringType(),
    pa.large_string(): st.StringType(),
    pa.binary(): st.BinaryType(),
    pa.large_binary(): st.BinaryType(),
    pa.date32(): st.DateType(),
    pa.date64(): st.DateType(),
}


def _spark_type(column: str, kind: pa.DataType) -> st.DataType:
    """The type that Spark reads Parquet of this Arrow type as."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple
    if pa.types.is_dictionary(kind):
        return _spark_type(column, kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return st.TimestampType() if kind.tz else st.TimestampNTZType()
    if pa.types.is_decimal(kind) and kind.precision <= _MOST_DIGITS:
        return st.DecimalType(kind.precision, kind.scale)
    if pa.types.is_fixed_size_binary(kind):
        return st.BinaryType()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return st.ArrayType(_spark_type(column, kind.value_type))
    if pa.types.is_map(kind):
        return st.MapType(_spark_type(column, kind.key_type), _spark_type(column, kind.item_type))
    if pa.types.is_struct(kind):
        return st.StructType([st.StructField(f.name, _spark_type(column, f.type)) for f in kind])
    raise JetcaptureError(f"column {column} is {kind}, which Spark cannot read: name the columns you need instead")
