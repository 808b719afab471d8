"""Read objects with different columns as one table: find each column's type, and convert each object's columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from spark_jobs.reading.row_json import inner_types, text_of

Columns = Sequence[str] | Callable[[str], bool]
"""Names of columns, or a function that returns True for wanted names."""
Fold = Callable[[str], str]
"""Maps names that Spark treats as equal to the same name."""
Reads = Mapping[str, st.DataType]
"""The types with which drifted columns are read, before conversion. A missing column is null."""


@dataclass(frozen=True, slots=True)
class Field:
    """The column `source` of objects that store it in a way that is read as `kind` for a column of type `target`, under
    the name `name`; null for other objects."""

    name: str
    source: str
    kind: st.DataType
    target: st.DataType

    @property
    def type(self) -> st.DataType:
        """The type of its values; null if there are none."""
        return _without_null(self.kind, st.IntegerType())

    def takes(self, stored: pa.DataType, fold: Fold) -> bool:
        """Return True if this column has the values of objects that store `source` with this type."""
        return read_as(_spark_type(self.source, stored), self.target, fold) == self.kind


def quoted(name: str) -> str:
    """Quote a column's name for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def find(name: str, names: Sequence[str], *, case_sensitive: bool) -> str | None:
    """Return the name in `names` that Spark resolves `name` to, an exact match first; None if there is none.

    Raises JetcaptureError when it may be either of two.
    """
    if name in names or case_sensitive:
        return name if name in names else None
    found = [each for each in names if each.casefold() == name.casefold()]
    if len(found) > 1:
        raise JetcaptureError(f"columns {found[0]} and {found[1]} differ in case only: rename one with AS")
    return found[0] if found else None


class Table:
    """The columns of a set of objects, and how to convert each object's columns.

    `schemas` are the objects' distinct schemas; the methods are about objects of the schema with that index. A column
    whose types go together is read as their common type, which Parquet allows for structs that have more or fewer
    fields, for wider numbers, and for columns that are null throughout if they become numbers. Any other has drifted:
    it is read as it is stored, and then converted.
    """

    def __init__(
        self, schemas: Iterable[pa.Schema], quarantine: bool, columns: Columns | None, case_sensitive: bool
    ) -> None:
        self.partitions = list(layout.PARTITIONS[1:] if quarantine else layout.PARTITIONS)
        self._fold = str if case_sensitive else str.casefold
        choose = columns if callable(columns) else None
        wanted = None
        if columns is not None:
            named = () if callable(columns) else columns
            wanted = {self._fold(name) for name in (*named, *layout.IDENTITY, layout.ROW)}
        self._stored = [self._columns(schema, wanted, choose) for schema in schemas]
        self._names: dict[str, str] = {}
        types: dict[str, dict[st.DataType, None]] = defaultdict(dict)
        for stored in self._stored:
            for folded, (name, kind) in stored.items():
                self._names.setdefault(folded, name)
                types[folded][kind] = None
        self.times = [name for each in self._stored for name, kind in each.values() if _has_time(kind)]
        """Columns of times of day, which Spark reads only with `spark.sql.timeType.enabled`."""
        first = {name: position for position, name in enumerate((*layout.ENVELOPE, *layout.OPTIONAL))}
        ordered = sorted(types, key=lambda folded: first.get(folded, len(first)))
        self._target = {folded: _target(list(types[folded]), self._fold) for folded in ordered}
        self._drifted = [
            folded
            for folded in ordered
            if any(read_as(kind, self._target[folded], self._fold) != self._target[folded] for kind in types[folded])
        ]

    def _columns(
        self, schema: pa.Schema, wanted: set[str] | None, choose: Callable[[str], bool] | None
    ) -> dict[str, tuple[str, st.DataType]]:
        stored: dict[str, tuple[str, st.DataType]] = {}
        for field in schema:
            folded = self._fold(field.name)
            if field.name == layout.KEY:
                continue  # of objects in bundles: in others it is in the path
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

    def reads(self, schema: int) -> Reads:
        """Return how the drifted columns of an object are read.

        Objects can be read together unless they read the same column differently.
        """
        stored = self._stored[schema]
        return {
            folded: read_as(stored[folded][1], self._target[folded], self._fold)
            for folded in self._drifted
            if folded in stored
        }

    def read_schema(self, reads: Reads, *, bundles: bool = False) -> st.StructType:
        """Return the schema passed to Spark's Parquet reader for objects that are read as `reads`.

        Objects in bundles have their keys as a column, and the bundle in their paths.
        """
        read = st.StructType()
        for folded, target in self._target.items():
            kind = reads.get(folded, st.NullType()) if folded in self._drifted else target
            if bundles and folded == layout.BUNDLE:
                continue  # a column of objects under keys that were stored before the name was the archive's
            if not isinstance(kind, st.NullType):
                read.add(self._names[folded], _without_null(kind, st.IntegerType()))
        for name in (*((layout.BUNDLE,) if bundles else ()), *self.partitions):
            read.add(name, st.StringType())
        return read

    def select(self, reads: Reads, *, bundles: bool = False) -> list[Column]:
        """The table's columns, from what was read so. None if that is what they are."""
        if not (self._drifted or bundles):
            return []
        chosen = []
        for folded, target in self._target.items():
            column = sf.col(quoted(self._names[folded]))
            if bundles and folded == layout.BUNDLE:
                column = sf.lit(None).cast(target).alias(self._names[folded])
            elif folded in self._drifted:
                kind = reads.get(folded, st.NullType())
                column = _converted(column, kind, target, self._fold).alias(self._names[folded])
            chosen.append(column)
        return [*chosen, *(sf.col(name) for name in self.partitions)]

    def fields(self, schemas: Iterable[int]) -> tuple[list[Field], list[Column]]:
        """What has to be read of objects of several schemas at once, with a field for each way in which a column is
        stored, and the table's columns from that."""
        kinds: dict[str, dict[st.DataType, None]] = defaultdict(dict)
        for schema in schemas:
            for folded, kind in self.reads(schema).items():
                if not isinstance(kind, st.NullType):
                    kinds[folded][kind] = None
        fields: list[Field] = []
        chosen = []
        for folded, target in self._target.items():
            ways = []
            for kind in kinds[folded] if folded in self._drifted else [target]:
                field = Field(f"c{len(fields)}", folded, kind, target)
                fields.append(field)
                ways.append(_converted(sf.col(field.name), kind, target, self._fold))
            value = sf.coalesce(*ways) if ways else sf.lit(None).cast(target)
            chosen.append(value.alias(self._names[folded]))
        return fields, [*chosen, *(sf.col(name) for name in self.partitions)]


_DIGITS: dict[type[st.DataType], int] = {st.ByteType: 3, st.ShortType: 5, st.IntegerType: 10, st.LongType: 19}
"""Integer types and their maximum number of digits."""
_MAX_DIGITS = 38
"""Maximum digits of a decimal in Spark."""
_TEXT_AS_IN_JSON = (st.StructType, st.ArrayType, st.MapType, st.TimestampType, st.TimestampNTZType)
"""Types whose text is that of `row_json`: Spark has none, or one that depends on the session's time zone."""
_WIDER: dict[type[st.DataType], tuple[type[st.DataType], ...]] = {
    st.NullType: (*_DIGITS, st.DoubleType, st.DateType),  # Parquet stores nulls as an int32
    st.ByteType: (st.LongType, st.DoubleType),
    st.ShortType: (st.LongType, st.DoubleType),
    st.IntegerType: (st.LongType, st.DoubleType),
    st.FloatType: (st.DoubleType,),
}
"""As what Spark's Parquet reader reads a type besides that type itself, without a change to any value."""


def _target(types: Sequence[st.DataType], fold: Fold) -> st.DataType:
    """Return the type of a column that objects store as `types`."""
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
    return st.DecimalType(precision, scale) if precision <= _MAX_DIGITS else None


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


def read_as(stored: st.DataType, target: st.DataType, fold: Fold) -> st.DataType:
    """Return the type with which Parquet reads a column stored as `stored` for `target`: that type, if possible."""
    readable = not _has_null(stored) and _merge(target, stored, fold) == target
    return target if readable or isinstance(target, _WIDER.get(type(stored), ())) else stored


def _check_fields(column: str, kind: st.DataType, fold: Fold) -> None:
    """Raise JetcaptureError if a struct has two fields that Spark treats as equal."""
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


def _has_time(kind: st.DataType) -> bool:
    return isinstance(kind, st.TimeType) or any(map(_has_time, inner_types(kind)))


def _has_null(kind: st.DataType) -> bool:
    return _without_null(kind, st.StringType()) != kind


def _without_null(kind: st.DataType, instead: st.DataType) -> st.DataType:
    """Replace the null type in `kind`, because Parquet stores it as int32."""
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
    """Return the type with which Spark reads Parquet of this Arrow type."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple
    if pa.types.is_dictionary(kind):
        return _spark_type(column, kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return st.TimestampType() if kind.tz else st.TimestampNTZType()
    if kind == pa.time64("us"):
        return st.TimeType(6)
    if pa.types.is_decimal(kind) and kind.precision <= _MAX_DIGITS:
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
