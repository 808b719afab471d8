"""The backup format of nats-server 2.15, which `STREAM.RESTORE` reads (server/archive and server/stream_backup.go).

    NATSARC1 entry… end, compressed in Snappy's framing format
    entry: uvarint(length of name) varint(nanoseconds) uvarint(sequence)
           uvarint(length of header) uvarint(length of payload) name header payload

The first entry is `state.json`, then one for each consumer, then the messages by sequence, named by their subjects; the
end is an entry of zeros. Frames of Snappy can be joined, so parts of a backup can be made independently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAGIC = b"NATSARC1"
END = bytes(5)
PADDING = b"\xfe\x01\x00\x00\x00"
"""A frame that readers skip."""
BROKEN = b"\x02\x00\x00\x00"
"""A frame that no reader accepts."""

_DIGIT = 7


def head(first: int, last: int, consumers: Mapping[str, int]) -> bytes:
    """Return the beginning of a backup of sequences `first` to `last`; `consumers` gives the ack floor of each."""
    entries = [MAGIC, _named("state.json", {"first_seq": first, "last_seq": last, "consumer_count": len(consumers)})]
    for name, floor in consumers.items():
        config = {"name": name, "durable_name": name, "ack_policy": "explicit", "deliver_policy": "all"}
        at = {"consumer_seq": floor, "stream_seq": floor}
        state = {"delivered": at, "ack_floor": at}
        entries.append(_named(f"consumers/{name}", {"config": config, "state": state}))
    return b"".join(entries)


def messages(
    subjects: pa.BinaryArray,
    nanoseconds: Any,
    seqs: Any,
    headers: pa.BinaryArray | None,
    payloads: pa.BinaryArray,
) -> memoryview:
    """Return the entries of messages in this order. `headers` are header blocks, empty for none; nulls are not allowed.

    `nanoseconds` since the epoch and `seqs` are int64 arrays. Everything together must be less than 2 GiB.
    """
    times = nanoseconds.astype(np.int64)
    numbers = [
        pc.binary_length(subjects).to_numpy(),
        (times << 1) ^ (times >> 63),
        seqs,
        np.zeros(len(seqs), np.int64) if headers is None else pc.binary_length(headers).to_numpy(),
        pc.binary_length(payloads).to_numpy(),
    ]
    columns = [subjects, payloads] if headers is None else [subjects, headers, payloads]
    whole = pc.binary_join_element_wise(_joined(numbers), *columns, pa.scalar(b"", pa.binary()))
    return _bytes(whole)


def framed(data: bytes | memoryview) -> bytes:
    """Compress a piece of a backup, such that pieces can be joined."""
    import cramjam

    return bytes(cramjam.snappy.compress(data))


def _named(name: str, content: Mapping[str, Any]) -> bytes:
    data = json.dumps(content).encode()
    subject, payload = pa.array([name.encode()], pa.binary()), pa.array([data], pa.binary())
    return bytes(messages(subject, np.zeros(1, np.int64), np.zeros(1, np.int64), None, payload))


def _joined(numbers: list[Any]) -> pa.BinaryArray:
    """Return the varints of each row one after another."""
    digits, used = zip(*(_varints(each.astype(np.uint64)) for each in numbers), strict=True)
    data, mask = np.concatenate(digits, axis=1), np.concatenate(used, axis=1)
    offsets = np.zeros(len(mask) + 1, np.int32)
    np.cumsum(np.count_nonzero(mask, axis=1), out=offsets[1:])
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(mask), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data[mask]))]
    )


def _varints(values: Any) -> tuple[Any, Any]:
    """Return the bytes of unsigned varints as a matrix, and which of them are used."""
    width = max(1, -(-int(values.max(initial=0)).bit_length() // _DIGIT))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(_DIGIT)
    rest = values[:, None] >> shifts[None, :]
    used = rest > 0
    used[:, 0] = True
    digits = (rest & np.uint64(127)).astype(np.uint8)
    digits[:, :-1] |= used[:, 1:].astype(np.uint8) << np.uint8(_DIGIT)
    return digits, used


def _bytes(array: pa.BinaryArray) -> memoryview:
    if not len(array):
        return memoryview(b"")
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(array.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
