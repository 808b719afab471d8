"""Turn received frames into a `MessageBatch`, avoiding Python objects per message."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Bytes, Int64s
from jetcapture_py.archive.arrow_bytes import between, joined, text_of
from jetcapture_py.archive.layout import NOT_UTF8, escape_subject
from jetcapture_py.archive.schema import ENVELOPE, HEADERS_TYPE
from jetcapture_py.jetstream.acks import ack_numbers, packed
from jetcapture_py.jetstream.wire.inbox import HEADERS, PAYLOAD, SUBJECT, Received
from jetcapture_py.transform.batch import Failure, MessageBatch

_VERSION = b"NATS/1.0\r\n"
_RETURN, _NEWLINE, _COLON, _SPACE, _TAB = b"\r\n: \t"
NO_HEADERS = _VERSION + b"\r\n"
_ADDED = r"\r\nNats-Pin-Id:[^\r\n]*\r\n\r\n\z"
"""The last header of a message from a pinned consumer, which the server appends to the stored headers."""
_ADDED_ONLY = re.compile(rb"NATS/1\.0\r\nNats-Pin-Id:[^\r\n]*\r\n\r\n")
_MAYBE_ADDED = re.compile(rb"\r\nNats-Pin-Id:")
_MAX_DELIVERED = (1 << 31) - 1
_MANY = 256
"""Minimum number of header blocks to parse together; for fewer, parsing one by one is faster."""
_MAX_BLANKS = 8
"""Blanks before a value in header blocks that are parsed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A batch, and its messages with an invalid subject or invalid headers."""

    batch: MessageBatch
    failures: tuple[Failure, ...]
    raw_headers: dict[int, bytes]
    """Header blocks of messages with invalid headers, by row."""
    sizes: Int64s = field(compare=False)
    """Bytes of each message's subject, ack subject and headers, as received."""
    strays: int
    """Frames left out because they did not come from the consumer: something else published to our inbox."""


def assemble(
    stream: str, consumer: str, received: Received, *, headers: bool = True, pinned: bool = False
) -> Assembled:
    """Turn `received` into columns. Never raises for the content of a message. Headers are null if not wanted.

    `pinned`: the consumer is pinned, and the server has added the pin id to the headers. These messages are not
    acknowledged one by one, so `packed` sequences and timestamps replace their ack subjects.
    """
    if received.numbers is not None:
        subjects, blocks, payloads = received.columns(SUBJECT, HEADERS, PAYLOAD)
        delivered, seq, nanoseconds = received.numbers
        replies = packed(seq, nanoseconds)
    else:
        subjects, replies, blocks, payloads = received.columns()
        (delivered, seq, nanoseconds), keep = ack_numbers(replies, stream, consumer)
        replies = packed(seq, nanoseconds) if pinned else replies
        if keep is not None:
            real = pa.array(keep, pa.int32())
            subjects, blocks, payloads = (part.take(real) for part in (subjects, blocks, payloads))
            replies = replies if pinned else replies.take(real)
    if pinned and headers:
        blocks = without_pins(blocks)
    texts, subject_failures = _subjects(subjects)
    header_map, raw_headers, header_failures = _headers(blocks if headers else blocks[:0], len(blocks))
    microseconds = nanoseconds // 1000
    columns = [
        texts,
        pa.array(seq, pa.int64()),
        pa.array(microseconds, pa.timestamp("us", "UTC")),
        pa.array((nanoseconds - microseconds * 1000).astype(np.int16), pa.int16()),
        pa.array(np.minimum(delivered, _MAX_DELIVERED).astype(np.int32), pa.int32()),
        header_map,
        payloads,
        replies,
    ]
    batch = MessageBatch(stream=stream, rows=pa.RecordBatch.from_arrays(columns, schema=ENVELOPE))
    failures = {failure.index: failure for failure in (*header_failures, *subject_failures)}
    return Assembled(
        batch=batch,
        failures=tuple(failures.values()),
        raw_headers=raw_headers,
        sizes=sum(pc.binary_length(part).to_numpy().astype(np.int64) for part in (subjects, replies, blocks)),
        strays=len(received) - len(batch),
    )


def without_pins(blocks: pa.BinaryArray) -> pa.BinaryArray:
    """Remove the pin id that a server adds on delivery from header blocks; "" if no other header remains."""
    edges, text = text_of(blocks)
    if len(blocks) and not blocks.null_count:
        only = _ADDED_ONLY.fullmatch(blocks[0].as_py())
        if only is not None and _all_are(only[0], edges, text):
            return pa.repeat(pa.scalar(b"", pa.binary()), len(blocks))
    if _MAYBE_ADDED.search(text.data[edges[0] : edges[-1]]) is None:  # costs 1 % of reading the headers
        return blocks
    stored = pc.replace_substring_regex(blocks, _ADDED, "\r\n\r\n")
    emptied = pc.and_(pc.equal(stored, NO_HEADERS), pc.not_equal(blocks, NO_HEADERS))
    return pc.if_else(emptied, pa.scalar(b"", pa.binary()), stored)


def _all_are(block: bytes, edges: Int64s, text: Bytes) -> bool:
    """Whether all header blocks are this one."""
    size = len(block)
    if edges[-1] - edges[0] != size * (len(edges) - 1) or (np.diff(edges) != size).any():
        return False
    return bool((text[edges[0] : edges[-1]].reshape(-1, size) == np.frombuffer(block, np.uint8)).all())


def _subjects(values: pa.BinaryArray) -> tuple[pa.StringArray, list[Failure]]:
    try:
        return values.cast(pa.string()), []
    except pa.ArrowInvalid:
        failures = []
        texts = []
        for index, value in enumerate(values.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                texts.append(escape_subject(value))
                failures.append(Failure(index=index, stage=NOT_UTF8, error="the subject is not valid UTF-8"))
        return pa.array(texts, pa.string()), failures


def _headers(column: pa.BinaryArray, count: int) -> tuple[pa.MapArray, dict[int, bytes], list[Failure]]:
    """Return header blocks as a map column: null without headers, repeated headers as one key with its values in
    order."""
    if not pc.max(pc.binary_length(column)).as_py():
        return pa.nulls(count, HEADERS_TYPE), {}, []
    if count >= _MANY and (together := _headers_together(column)) is not None:
        return together, {}, []
    blocks = column.to_pylist()
    names: list[str] = []
    values: list[str] = []
    name_offsets, value_offsets = [0], [0]
    raw: dict[int, bytes] = {}
    failures: list[Failure] = []
    for index, block in enumerate(blocks):
        if block:
            try:
                for name, entries in parse_headers(block).items():
                    names.append(name)
                    values += entries
                    value_offsets.append(len(values))
            except ValueError as error:
                raw[index] = block
                failures.append(Failure(index=index, stage="headers", error=str(error)))
        name_offsets.append(len(names))
    items = pa.ListArray.from_arrays(pa.array(value_offsets, pa.int32()), pa.array(values, pa.string()))
    missing = pa.array([not block or index in raw for index, block in enumerate(blocks)], pa.bool_())
    array = pa.MapArray.from_arrays(
        pa.array(name_offsets, pa.int32()), pa.array(names, pa.string()), items, type=HEADERS_TYPE, mask=missing
    )
    return array, raw, failures


def _headers_together(column: pa.BinaryArray) -> pa.MapArray | None:
    """Parse all header blocks at once; None if any is invalid or repeats a header."""
    sizes = pc.binary_length(column).to_numpy(zero_copy_only=False)
    present = sizes > 0
    right = pc.and_(pc.starts_with(column, _VERSION), pc.ends_with(column, b"\r\n"))
    if column.null_count or not right.to_numpy(zero_copy_only=False)[present].all():
        return None
    text, block_ends = joined(column), np.cumsum(sizes, dtype=np.int64)
    line_ends = np.flatnonzero((text[:-1] == _RETURN) & (text[1:] == _NEWLINE))
    line_starts = np.concatenate(([0], line_ends[:-1] + 2))
    lines = line_starts < line_ends
    lines[np.searchsorted(line_starts, (block_ends - sizes)[present])] = False  # the version
    starts, ends = line_starts[lines], line_ends[lines]
    all_colons = np.append(np.flatnonzero(text == _COLON), len(text))
    colons = all_colons[np.searchsorted(all_colons, starts)]
    if not len(starts) or (colons == starts).any() or (colons >= ends).any():
        return None
    value_starts = colons + 1
    for _ in range(_MAX_BLANKS + 1):
        first = text[value_starts]
        blank = ((first == _SPACE) | (first == _TAB)) & (value_starts < ends)
        if not blank.any():
            break
        value_starts += blank
    else:
        return None
    try:
        names = between(text, starts, colons).cast(pa.string())
        values = between(text, value_starts, ends).cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        return None
    rows = np.searchsorted(block_ends, starts, side="right")
    encoded = names.dictionary_encode()
    if len(np.unique(rows * len(encoded.dictionary) + encoded.indices.to_numpy())) < len(rows):
        return None
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(column))))).astype(np.int32)
    items = pa.ListArray.from_arrays(pa.array(np.arange(len(rows) + 1, dtype=np.int32)), values)
    return pa.MapArray.from_arrays(pa.array(offsets), names, items, type=HEADERS_TYPE, mask=pa.array(~present))


def parse_headers(block: bytes) -> dict[str, list[str]]:
    """Parse a NATS header block (ADR-4) into names and values, in order, without white space before values.

    Raises ValueError with one line for an invalid block, or text that is not UTF-8.
    """
    if not block.startswith(_VERSION) or not block.endswith(b"\r\n"):
        raise ValueError("the header block does not start with NATS/1.0 or does not end with a line break")
    headers: dict[str, list[str]] = {}
    try:
        lines = block[len(_VERSION) : -2].decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError("the headers are not valid UTF-8") from error
    for line in lines:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or not name:
            raise ValueError("a header line has no name or no colon")
        headers.setdefault(name, []).append(value.lstrip(" \t"))
    return headers
