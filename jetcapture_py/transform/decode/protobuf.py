"""Protocol Buffers: messages of a type in a descriptor set, parsed by Google's library.

A message of another type is refused if its bytes show it: damage, invalid UTF-8, a field of another wire type, a
missing required field. Unknown fields are skipped, as is usual in this format.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.varint import varint
from jetcapture_py.config.column_types import MAX_DEPTH, TIMESTAMP
from jetcapture_py.text import one_line
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch
from jetcapture_py.transform.decode.bounds import MAX_ROWS, check_values, width
from jetcapture_py.transform.decode.common import Read, assemble, decode_rows, json_text, owners_of, payloads_of
from jetcapture_py.transform.decode.json_declared import YEAR_1, YEAR_10000, reader
from jetcapture_py.transform.decode.shapes import (
    Shape,
    columns_of,
    list_shape,
    map_shape,
    scalar,
    struct_shape,
)

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import Column, DecodeConfig

try:
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        json_format,
        message_factory,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )
    from google.protobuf.descriptor import FieldDescriptor as Field
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet
except ImportError:
    descriptor_pb2 = None

_NANOS = 1_000_000_000


class ProtobufDecoder:
    """Decodes messages of the type `message` in the descriptor set `descriptors`, to `columns` of it, or to all fields.

    Raises ValueError with one line for a wrong declaration.
    """

    def __init__(self, descriptors: bytes, message: str, columns: Mapping[str, Column]) -> None:
        pool = _pool(descriptors)
        try:
            descriptor = pool.FindMessageTypeByName(message)
        except KeyError:
            raise ValueError(f"message: the descriptor set has no type {message}") from None
        shapes = _Shapes(pool)
        shape = shapes.message(descriptor, (), 0)
        if shape.fields is None:
            raise ValueError(f"message: the type {message} has no fields")
        self._columns = columns_of(shape, columns, shapes.texts)
        self._parse = message_factory.GetMessageClass(descriptor).FromString
        self._check = _check(descriptor)
        self._width = sum(width(column.type) for column in self._columns)
        self._required = any(field.is_required for type_ in _types(descriptor) for field in type_.fields)

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if rows times columns are too many."""
        check_values(self._width * len(batch), batch.column(layout.PAYLOAD).nbytes)
        payloads, failures = payloads_of(batch), dict[int, Failure]()
        messages, rows = decode_rows(self._message, payloads, failures)
        return assemble([column.of(rows) for column in self._columns], messages, failures, owners_of(batch))

    def _message(self, payload: bytes) -> Any:
        try:
            message = self._parse(payload)
        except DecodeError as error:
            raise ValueError(one_line(str(error))) from None
        if self._required and not message.IsInitialized():
            raise ValueError(f"required fields are missing: {', '.join(message.FindInitializationErrors())}")
        self._check(message)
        return message


def _delimited(payload: bytes) -> Sequence[bytes]:
    """Split length-prefixed protobuf messages; the length is a varint."""
    messages: list[bytes] = []
    offset = 0
    while offset < len(payload):
        try:
            length, offset = varint(payload, offset)
        except ValueError as error:
            raise ValueError(f"not delimited: {error}") from None
        if length > len(payload) - offset:
            raise ValueError(f"not delimited: {length} bytes are announced, {len(payload) - offset} follow")
        messages.append(payload[offset : offset + length])
        offset += length
        if len(messages) > MAX_ROWS:
            raise ValueError(f"more than {MAX_ROWS} rows")
    return messages


SPLITS = {"delimited": _delimited}


def make(config: DecodeConfig) -> ProtobufDecoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if descriptor_pb2 is None:
        raise ValueError("protobuf needs the package protobuf: pip install 'jetcapture[protobuf]'")
    assert config.schema_file is not None  # noqa: S101  the configuration requires both
    assert config.message is not None  # noqa: S101
    try:
        descriptors = Path(config.schema_file).read_bytes()
    except OSError as error:
        raise ValueError(f"schema: {one_line(str(error))}") from None
    return ProtobufDecoder(descriptors, config.message, config.columns)


def _pool(descriptors: bytes) -> Any:
    """Return the types of a descriptor set, which may omit Google's own files. Raises ValueError."""
    modules = (any_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
    files = {
        module.DESCRIPTOR.name: descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for module in modules
    }
    try:
        given = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    except DecodeError as error:
        raise ValueError(f"schema: not a descriptor set: {one_line(str(error))}") from None
    if not given:
        raise ValueError("schema: the descriptor set is empty")
    files |= {file.name: file for file in given}
    pool, added = descriptor_pool.DescriptorPool(), set[str]()

    def add(name: str) -> None:
        if name in added:
            return
        if name not in files:
            raise ValueError(f"schema: the descriptor set lacks {name}: write it with protoc --include_imports")
        added.add(name)
        for needed in files[name].dependency:
            add(needed)
        pool.Add(files[name])

    try:
        for name in files:
            add(name)
    except TypeError as error:
        raise ValueError(f"schema: {one_line(str(error))}") from None
    return pool


def _check(descriptor: Any) -> Callable[[Any], None]:
    """Return a check that raises ValueError for messages with a known field of another wire type.

    The library keeps such fields as unknown, as well as unknown enum numbers: alone, or in entries of maps.
    """
    wires = {field.number: _enum_wire(field) for field in descriptor.fields}
    inner = [
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    ]
    checks: dict[str, Callable[[Any], None]] = {}

    def check(message: Any) -> None:
        for field in UnknownFieldSet(message):
            if wires.get(field.field_number, field.wire_type) != field.wire_type:
                raise ValueError(f"field {field.field_number} has the wire type {field.wire_type}")
        for name, repeated in inner:
            for value in getattr(message, name) if repeated else (getattr(message, name),):
                if not repeated and not message.HasField(name):
                    break
                type_ = value.DESCRIPTOR
                if (check_value := checks.get(type_.full_name)) is None:
                    check_value = checks[type_.full_name] = _check(type_)
                check_value(value)

    return check


def _enum_wire(field: Any) -> int | None:
    """Return the wire type in which the library keeps a field's unknown enum numbers; None if it has no enum."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return 2 if field.message_type.fields_by_name["value"].enum_type is not None else None
    return 0 if field.enum_type is not None else None


def _types(descriptor: Any) -> Iterator[Any]:
    """Yield the type and all types below it."""
    seen, left = {descriptor.full_name}, [descriptor]
    while left:
        type_ = left.pop()
        yield type_
        for field in type_.fields:
            if field.message_type is not None and field.message_type.full_name not in seen:
                seen.add(field.message_type.full_name)
                left.append(field.message_type)


# ------------------------------------------------------------------ columns


def _duration(value: Any) -> int:
    """Convert to microseconds, rounded down."""
    if abs(value.nanos) >= _NANOS or abs(value.seconds) > 315_576_000_000 or value.seconds * value.nanos < 0:
        raise ValueError(f"expected a duration, got {value.seconds} s and {value.nanos} ns")
    return int(value.seconds * 1_000_000 + value.nanos // 1_000)


def _timestamp(value: Any) -> int:
    """Convert to microseconds, rounded down."""
    micros = value.seconds * 1_000_000 + value.nanos // 1_000
    if not 0 <= value.nanos < _NANOS or not YEAR_1 <= micros < YEAR_10000:
        raise ValueError(
            f"expected a timestamp between the years 1 and 9999, got {value.seconds} s and {value.nanos} ns"
        )
    return int(micros)


def _field_reader(field: Any, *, presence: bool) -> Read:
    """Return a reader of a field; it returns null for a field with presence that is not set."""
    name = field.name
    if presence:
        return lambda values: [
            getattr(value, name) if value is not None and value.HasField(name) else None for value in values
        ]
    if keyword.iskeyword(name):
        return lambda values: [None if value is None else getattr(value, name) for value in values]
    return reader(name)


class _Shapes:
    """Shapes of types; `pool` has the types that an `Any` may hold."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        scalars = {
            pa.bool_(): (Field.TYPE_BOOL,),
            pa.int32(): (Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32),
            pa.int64(): (Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64),
            pa.uint32(): (Field.TYPE_UINT32, Field.TYPE_FIXED32),
            pa.uint64(): (Field.TYPE_UINT64, Field.TYPE_FIXED64),
            pa.float32(): (Field.TYPE_FLOAT,),
            pa.float64(): (Field.TYPE_DOUBLE,),
            pa.string(): (Field.TYPE_STRING,),
            pa.binary(): (Field.TYPE_BYTES,),
        }
        self._scalars = {type_: scalar(of) for of, types in scalars.items() for type_ in types}
        self._json = Shape(type=pa.string(), build=self.texts)

    def message(self, descriptor: Any, path: tuple[str, ...], depth: int) -> Shape:
        """Return the shape of a message type below those of `path`; JSON text if it is recursive or has no fields."""
        name = descriptor.full_name
        if (shape := self._well_known(descriptor)) is not None:
            return shape
        if name in path or depth >= MAX_DEPTH or not descriptor.fields:
            return self._json
        below = (*path, name)
        fields = {field.name: self._field(field, below, depth + 1) for field in descriptor.fields}
        return struct_shape(fields)

    def _field(self, field: Any, path: tuple[str, ...], depth: int) -> tuple[Read, Shape]:
        type_ = field.message_type
        if type_ is not None and type_.GetOptions().map_entry:
            key, value = (self._value(type_.fields_by_name[name], path, depth) for name in ("key", "value"))
            return _field_reader(field, presence=False), map_shape(key, value)
        if field.is_repeated:
            return _field_reader(field, presence=False), list_shape(self._value(field, path, depth))
        return _field_reader(field, presence=field.has_presence), self._value(field, path, depth)

    def _value(self, field: Any, path: tuple[str, ...], depth: int) -> Shape:
        if field.message_type is not None:
            return self.message(field.message_type, path, depth)
        if field.enum_type is not None:
            names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
            return scalar(pa.string(), lambda number: names.get(number) or str(number))
        return self._scalars[field.type]

    def _well_known(self, descriptor: Any) -> Shape | None:
        """Return the shape of a well-known type of google.protobuf; None for all other types."""
        package, _, name = descriptor.full_name.rpartition(".")
        if package != "google.protobuf":
            return None
        if name in ("Timestamp", "Duration"):
            of, convert = (TIMESTAMP, _timestamp) if name == "Timestamp" else (pa.duration("us"), _duration)
            numbers = scalar(pa.int64(), convert).build
            return Shape(type=of, build=lambda values: numbers(values).cast(of))
        if name.endswith("Value") and name not in ("Value", "ListValue") and "value" in descriptor.fields_by_name:
            inner, read = self._scalars[descriptor.fields_by_name["value"].type], reader("value")
            return Shape(type=inner.type, build=lambda values: inner.build(read(values)))
        return self._json if name in ("Any", "Struct", "Value", "ListValue", "FieldMask", "Empty") else None

    def texts(self, values: list[Any]) -> pa.Array:
        """Build a column of JSON texts."""
        return pa.array([None if value is None else json_text(self._document(value)) for value in values], pa.string())

    def _document(self, value: Any) -> Any:
        """Convert a message, or a list or map of messages, to plain objects by protobuf's JSON mapping."""
        if not hasattr(value, "DESCRIPTOR"):
            if hasattr(value, "keys"):
                return {str(name): self._document(value[name]) for name in value}
            return value if isinstance(value, str | bytes | int | float) else [self._document(item) for item in value]
        try:
            return json_format.MessageToDict(value, preserving_proto_field_name=True, descriptor_pool=self._pool)
        except (TypeError, json_format.SerializeToJsonError) as error:
            if value.DESCRIPTOR.full_name == "google.protobuf.Any":
                return {"@type": value.type_url, "value": value.value}
            raise ValueError(f"not possible in JSON: {one_line(str(error))}") from None
