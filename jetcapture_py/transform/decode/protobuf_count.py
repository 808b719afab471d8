"""Count the messages within protobuf messages from their bytes, before the library builds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jetcapture_py.transform.decode.weights import RECORD


class MessageCounter:
    """Counts what messages within those of the type `descriptor` take, in values: each has room for all its fields.

    `heaviest` is the most that one takes; 0 if there are none. Each has at least two bytes.
    """

    def __init__(self, descriptor: Any) -> None:
        types = list(all_types(descriptor))
        fields = [field for found in types for field in found.fields if field.message_type is not None]
        self._weights = {found.full_name: RECORD + 2 * len(found.fields) for found in types}
        self._types: dict[str, Mapping[int, str]] = {
            found.full_name: {
                field.number: field.message_type.full_name for field in found.fields if field.message_type is not None
            }
            for found in types
        }
        self._root = descriptor.full_name
        self._firsts = {
            (field.number << 3 | (3 if field.type == _GROUP else 2)) & 0x7F | 0x80 * (field.number > 15)
            for field in fields
        }
        self.heaviest = max((self._weights[field.message_type.full_name] for field in fields), default=0)

    def at_most(self, data: Any) -> int:
        """Return an upper bound for all payloads, `data` as an array of bytes, by the first bytes of fields."""
        return self.heaviest * sum(int(np.count_nonzero(data == first)) for first in self._firsts)

    def count(self, payloads: Sequence[bytes], most: int) -> int:
        """Count; stop beyond `most`. Of a damaged payload, count what comes before the damage."""
        total = 0
        for payload in payloads:
            total += self._count(payload, most - total)
        return total

    def _count(self, payload: bytes, most: int) -> int:
        at, end, types = 0, len(payload), self._types[self._root]
        outside: list[tuple[int, Mapping[int, str], bool]] = []  # with whether a group is open
        total = 0
        while total <= most and len(outside) <= _MOST_LEVELS:
            if at >= end:
                if not outside or outside[-1][2]:
                    break
                end, types, _ = outside.pop()
                continue
            tag, at = _varint(payload, at, end)
            wire, inner = tag & 7, types.get(tag >> 3, "")
            if wire == 2:
                size, at = _varint(payload, at, end)
                if at + size > end:
                    break
                if inner:
                    total += self._weights[inner]
                    outside.append((end, types, False))
                    end, types = at + size, self._types[inner]
                else:
                    at += size
            elif wire == 3:
                total += self._weights.get(inner, 0)
                outside.append((end, types, True))
                types = self._types.get(inner, {})
            elif wire == 4 and outside and outside[-1][2]:
                _, types, _ = outside.pop()
            elif wire == 0:
                _, at = _varint(payload, at, end)
            elif wire in _FIXED:
                at += _FIXED[wire]
            else:
                break
        return total


_MOST_LEVELS = 100
"""Levels of messages that the library reads."""
_GROUP = 10
"""`FieldDescriptor.TYPE_GROUP`."""
_FIXED: Mapping[int, int] = {1: 8, 5: 4}


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends; `end` if it is truncated."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7
    return value, end


def all_types(descriptor: Any) -> Iterator[Any]:
    """Yield the type and all types below it."""
    seen, left = {descriptor.full_name}, [descriptor]
    while left:
        found = left.pop()
        yield found
        for field in found.fields:
            if field.message_type is not None and field.message_type.full_name not in seen:
                seen.add(field.message_type.full_name)
                left.append(field.message_type)
