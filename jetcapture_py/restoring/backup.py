"""The backup format of nats-server 2.15, which `STREAM.RESTORE` reads (server/archive and server/stream_backup.go).

    NATSARC1 entry… end, in Snappy's framing format
    entry: uvarint(length of name) varint(nanoseconds) uvarint(sequence)
           uvarint(length of header) uvarint(length of payload) name header payload

The first entry is `state.json`, then one for each consumer, then the messages by sequence, named by their subjects; the
end is an entry of zeros. Data in Snappy's framing format can be joined, so parts of a backup can be made independently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import cramjam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Int64s, Nanos, Seqs
from jetcapture_py.archive.arrow_bytes import joined
from jetcapture_py.jetstream.restore import CHUNK

MAGIC = b"NATSARC1"
END = bytes(5)

_FRAMED = CHUNK - 1024
"""Bytes to frame at once: even incompressible ones, with their frames, fit a chunk."""
_DIGIT = 7
_LARGEST = (1 << 64) - 1


def head(first: int, last: int, consumers: Sequence[tuple[Mapping[str, Any], int]]) -> bytes:
    """Return the beginning of a backup of sequences `first` to `last`, and of these consumers with their ack floors."""
    entries = [MAGIC, _named("state.json", {"first_seq": first, "last_seq": last, "consumer_count": len(consumers)})]
    for config, floor in consumers:
        at = {"consumer_seq": floor, "stream_seq": floor}
        state = {"delivered": at, "ack_floor": at}
        entries.append(_named(f"consumers/{config['name']}", {"config": config, "state": state}))
    return b"".join(entries)


def messages(
    subjects: pa.BinaryArray,
    nanoseconds: Nanos,
    seqs: Seqs,
    headers: pa.BinaryArray | None,
    payloads: pa.BinaryArray,
) -> memoryview:
    """Return the entries of messages in this order. `headers` are header blocks, empty for none; nulls are not allowed.

    `nanoseconds` are since the epoch. Everything together must be less than 2 GiB.
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
    entries = pc.binary_join_element_wise(_joined(numbers), *columns, pa.scalar(b"", pa.binary()))
    return joined(entries).data


def framed(data: bytes | memoryview) -> list[bytes]:
    """Return a piece of a backup in Snappy's frames, as chunks to send; pieces can be concatenated."""
    view = memoryview(data)
    return [bytes(cramjam.snappy.compress(view[at : at + _FRAMED])) for at in range(0, len(view), _FRAMED)]


def _named(name: str, content: Mapping[str, Any]) -> bytes:
    data = json.dumps(content).encode()
    subject, payload = pa.array([name.encode()], pa.binary()), pa.array([data], pa.binary())
    return bytes(messages(subject, np.zeros(1, np.int64), np.zeros(1, np.int64), None, payload))


def _joined(numbers: list[Int64s]) -> pa.BinaryArray:
    """Return the unsigned varints of each row one after another."""
    columns = [column.astype(np.uint64, copy=False) for column in numbers]
    widths = [(_width(column.min(initial=_LARGEST)), _width(column.max(initial=0))) for column in columns]
    shape = len(columns[0]), sum(longest for _, longest in widths)
    digits, used = np.empty(shape, np.uint8), np.ones(shape, bool)
    at = 0
    for values, (shortest, longest) in zip(columns, widths, strict=True):
        for digit in range(longest):
            rest = values >> np.uint64(_DIGIT * digit)
            digits[:, at] = rest & np.uint64(127)
            if digit + 1 < longest:
                more = np.uint8(128) if digit + 1 < shortest else (rest > 127).view(np.uint8) << np.uint8(_DIGIT)
                digits[:, at] |= more
            if digit >= shortest:
                used[:, at] = rest > 0
            at += 1
    offsets = np.zeros(shape[0] + 1, np.int32)
    np.cumsum(np.count_nonzero(used, axis=1), out=offsets[1:])
    data = digits if all(shortest == longest for shortest, longest in widths) else digits[used]
    return pa.BinaryArray.from_buffers(pa.binary(), shape[0], [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _width(value: Any) -> int:
    """Return the number of bytes of a varint."""
    return max(1, -(-int(value).bit_length() // _DIGIT))
