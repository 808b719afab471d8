"""Bound the memory of decoding by the bytes of payloads, before anything is built from them.

A value takes about 16 bytes. A record in a list or a map takes as much as `RECORD` values, besides its fields. Missing
fields also take space in columns, so a few bytes of a payload may become thousands. Several messages above the bound
are decoded in smaller batches; a single one is quarantined.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Bytes
from jetcapture_py.archive.arrow_bytes import joined
from jetcapture_py.transform.batch import BatchTooWideError, Failure, MessageBatch
from jetcapture_py.transform.decode.common import owners_of, payloads_of, texts_of, views_of

MAX_VALUES = 1 << 23
"""Maximum values of a batch, or two per byte of its payloads if that is more."""
RECORD = 16
MAX_ROWS = 250_000
"""Maximum rows of one message, and of a batch of several messages."""
BYTES_AT_ONCE = 64 << 20
"""Maximum decompressed bytes of a batch of several messages."""
TOO_MANY = f"the payload expands to more than {MAX_VALUES:,} values"


def max_values(size: int) -> int:
    """Return the maximum values of payloads of `size` bytes."""
    return max(MAX_VALUES, 2 * size)


def check_values(count: int, size: int) -> None:
    """Raise BatchTooWideError if `count` values are too many for payloads of `size` bytes."""
    if count > max_values(size):
        raise BatchTooWideError(TOO_MANY)


def check_count(count: int) -> None:
    """Raise ValueError if `count` exceeds the maximum rows of a message."""
    if not count:
        raise ValueError("the payload has no rows")
    if count > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFormat:
    """JSON or MessagePack."""

    decoder: Callable[[Any], Any]
    """Returns msgspec's decoder for a type."""
    payloads: Callable[[MessageBatch], tuple[list[Any], dict[int, Failure]]]
    """Returns all payloads, and failures for those that cannot be decoded at all."""
    containers: Callable[[Bytes], tuple[int, int]]
    """Returns the maximum numbers of objects (or maps) and of lists in an array of bytes."""
    skeleton: Callable[[bytes], bytes | bytearray]
    """Returns a payload reduced to the parts that matter for counting containers."""
    text: Callable[[bytes, bool], str | None]
    """Returns the text of a value, with times also of a timestamp; None without a text."""

    def check(self, batch: MessageBatch, limit: int, *, objects: int, lists: int, reason: str = TOO_MANY) -> None:
        """Raise BatchTooWideError if payloads may have more than `limit` values, given the values per container.

        Containers are counted more closely in a single message, which cannot be split.
        """

        def at_most(data: Bytes) -> int:
            counts = self.containers(data)
            return objects * counts[0] + lists * counts[1]

        if at_most(joined(batch.column(layout.PAYLOAD))) <= limit:
            return
        owners = owners_of(batch)
        several = len(batch) > 1 if owners is None else owners[0] != owners[-1]
        skeletons = (np.frombuffer(self.skeleton(payload), np.uint8) for payload in payloads_of(batch))
        if several or sum(map(at_most, skeletons)) > limit:
            raise BatchTooWideError(reason)


def _json_containers(data: Bytes) -> tuple[int, int]:
    """Return the maximum numbers of objects and lists in JSON bytes."""
    return int(np.count_nonzero(data == ord("{"))), int(np.count_nonzero(data == ord("[")))


def _json_skeleton(payload: bytes) -> bytes | bytearray:
    """Return a payload without its strings."""
    return _STRINGS.sub(b"", payload)


_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_string = msgspec.json.Decoder(str).decode


def _json_text(value: bytes, _times: bool) -> str | None:
    if value.startswith(b'"'):
        return _string(value)
    return None if value.startswith((b"{", b"[", b"null")) else value.decode()


def _json_payloads(batch: MessageBatch) -> tuple[list[Any], dict[int, Failure]]:
    texts, failures = texts_of(batch)
    return views_of(texts), failures


JSON_FORMAT = ObjectFormat(
    decoder=msgspec.json.Decoder,
    payloads=_json_payloads,
    containers=_json_containers,
    skeleton=_json_skeleton,
    text=_json_text,
)


# ------------------------------------------------------------------ declared types


def width(of: pa.DataType) -> int:
    """Return the values per row of a column of the type; a list or a map counts as one."""
    return sum(width(field.type) for field in of) if pa.types.is_struct(of) else 1


def heaviest(of: pa.DataType) -> int:
    """Return the maximum weight of a record, list or map nested in lists and maps of the type; 0 without any."""
    if pa.types.is_struct(of):
        return max((heaviest(field.type) for field in of), default=0)
    if not pa.types.is_list(of) and not pa.types.is_map(of):
        return 0
    item = of.item_type if pa.types.is_map(of) else of.value_type
    return max(RECORD + width(item) if pa.types.is_nested(item) else 0, heaviest(item))
