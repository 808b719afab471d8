"""Bound the memory that decoding takes: count the values of a batch before anything is built from its payloads.

A value takes about 16 bytes. A record in a list or a map takes as much as `RECORD` values, besides its fields, of which
those that are missing take a place in columns as well: a few bytes of a payload may become thousands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import BatchTooWideError, Failure, MessageBatch
from jetcapture_py.transform.decode.common import failure
from jetcapture_py.transform.decode.json_values import Counter, reader, struct_type

MAX_VALUES = 1 << 23
"""Values that a batch may have; payloads of more than half as many bytes may have two for each byte."""
RECORD = 16
TOO_MANY = f"more than {MAX_VALUES} values in rows and lists, and more than two for each byte"

_OBJECT = msgspec.defstruct("Object", [], gc=False)
_ARRAY = msgspec.defstruct("Array", [], array_like=True, gc=False)
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def most_values(size: int) -> int:
    """Return how many values payloads of `size` bytes may have."""
    return max(MAX_VALUES, 2 * size)


def refuse_excess(count: int, size: int, payloads: list[bytes], failures: dict[int, Failure]) -> None:
    """Raise BatchTooWideError if `payloads` may not have `count` values; a single one fails, and becomes empty."""
    if len(payloads) > 1:
        check_values(count, size)
    elif count > most_values(size):
        failures.setdefault(0, failure(0, TOO_MANY))
        payloads[0] = b""


def check_values(count: int, size: int) -> None:
    """Raise BatchTooWideError if payloads of `size` bytes may not have `count` values."""
    if count > most_values(size):
        raise BatchTooWideError(TOO_MANY)


def bytes_of(batch: MessageBatch) -> Any:
    """All payloads of a batch as one array of bytes."""
    column = batch.column(layout.PAYLOAD)
    _, offsets, data = column.buffers()
    if data is None:
        return np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def json_containers(data: Any) -> int:
    """Return how many objects and lists an array of bytes begins at most, if it is JSON."""
    return int(np.count_nonzero((data | 0x20) == ord("{")))


def msgpack_containers(data: Any) -> int:
    """Return how many maps and lists an array of bytes begins at most, if it is MessagePack."""
    return int(np.count_nonzero((data & 0xE0 == 0x80) | (data & 0xFC == 0xDC)))


def json_containers_of(payload: bytes) -> int:
    """Return how many objects and lists a payload begins, not counting what is in strings."""
    return json_containers(np.frombuffer(_STRINGS.sub(b"", payload), np.uint8))


def msgpack_containers_of(payload: bytes, most: int) -> int:
    """Return how many maps and lists a payload begins; it may be damaged. Stop beyond `most`."""
    at = count = 0
    while at < len(payload) and count <= most:
        first = payload[at]
        if (run := _RUNS.match(payload, at)) is not None:
            count += (run.end() - at) * _CONTAINERS[first]
            at = run.end()
            continue
        count += _CONTAINERS[first]
        at += _SIZES[first]
        if digits := _LENGTHS[first]:
            at += int.from_bytes(payload[at - digits - _CODES[first] : at - _CODES[first]], "big")
    return count


_RUNS = re.compile(rb"[\x80-\x9f]+|[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]+")
_CONTAINERS = [first >> 4 in (8, 9) or 0xDC <= first <= 0xDF for first in range(256)]
_SIZES = [1] * 0xA0 + list(range(1, 33)) + [1] * 4
_SIZES += [2, 3, 5, 3, 4, 6]  # bin and ext
_SIZES += [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # numbers
_SIZES += [3, 4, 6, 10, 18]  # fixext
_SIZES += [2, 3, 5, 3, 5, 3, 5] + [1] * 32  # str, array, map
"""Bytes of a value by its first byte, without those that a length announces; of a container, its header."""
_LENGTHS = [
    {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.get(b, 0) for b in range(256)
]
_CODES = [0xC7 <= first <= 0xC9 for first in range(256)]
"""Whether the code of an extension follows its length."""


# ------------------------------------------------------------------ declared types


def width(of: pa.DataType) -> int:
    """Return how many values a column of the type has for each row; a list or a map is one."""
    return sum(width(field.type) for field in of) if pa.types.is_struct(of) else 1


def heaviest(of: pa.DataType) -> int:
    """Return the most that a record, list or map in lists and maps of the type takes; 0 if it has none."""
    if pa.types.is_struct(of):
        return max((heaviest(field.type) for field in of), default=0)
    item = _item(of)
    return 0 if item is None else max(_weight(item), heaviest(item))


def _item(of: pa.DataType) -> pa.DataType | None:
    if pa.types.is_map(of):
        return of.item_type
    return of.value_type if pa.types.is_list(of) else None


def _weight(item: pa.DataType) -> int:
    return RECORD + width(item) if pa.types.is_nested(item) else 0


def counter(of: pa.DataType) -> Counter | None:
    """Return the counter of a declared type; None if it has no records, lists or maps in lists or maps."""
    if pa.types.is_struct(of):
        return object_counter({field.name: counter(field.type) for field in of})
    item = _item(of)
    if item is None or not (weight := _weight(item)):
        return None
    inner = counter(item)
    accepts = inner.accepts if inner is not None else (_ARRAY if pa.types.is_list(item) else _OBJECT)
    below = inner.count if inner is not None else None

    def count(values: Any) -> int:
        found = weight * len(values)
        if below is not None:
            found += sum(below(value) for value in values if value is not None)
        return found

    if pa.types.is_list(of):
        return Counter(list[accepts | None], count)  # type: ignore[valid-type]
    return Counter(dict[str, accepts | None], lambda values: count(values.values()))  # type: ignore[valid-type]


def object_counter(fields: Mapping[str, Counter | None]) -> Counter | None:
    """Return the counter of an object with `fields`; None if none of them has one."""
    counters = [(name, found) for name, found in fields.items() if found is not None]
    if not counters:
        return None
    accepts = struct_type([(name, found.accepts | None) for name, found in counters])
    parts = [(reader(f"f{number}"), found.count) for number, (_, found) in enumerate(counters)]

    def count(value: Any) -> int:
        return sum(part(found) for read, part in parts if (found := read([value])[0]) is not None)

    return Counter(accepts, count)
