"""Compare the content of every message in the stream with the archive: timestamp, subject, headers, payload.

The stream is read once, in order, a window of sequences at a time, and kept as hashes. Objects are then read for each
window that they overlap. Memory is bounded by a window's hashes and a row group of each object being read. Hashes of
values up to 64 KiB are polynomials modulo 2^64 with an odd base, so a changed bit or two exchanged bytes always change
them: they detect accidents, not attacks.
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.arrays import Hashes, Nanos, Seqs
from jetcapture_py.archive.arrow_bytes import text_of
from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.errors import StoreError
from jetcapture_py.jetstream.acks import positions
from jetcapture_py.jetstream.publish.frames import header_blocks
from jetcapture_py.jetstream.range_reader import RangeReader, StreamRange
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.threads import in_thread
from jetcapture_py.transform.envelope import NO_HEADERS, assemble, without_pins
from jetcapture_py.verify.findings import Progress
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import ArchiveScan

PARTS = ("subject", "headers", "payload")
_COLUMNS = (
    layout.SEQ,
    layout.TIMESTAMP,
    layout.NANOS,
    layout.ROW,
    layout.SUBJECT,
    layout.HEADERS,
    layout.PAYLOAD,
    layout.RAW_HEADERS,
)
_NO_NANOS = -1
_PIECE = 1 << 16
"""Bytes hashed at once; a longer value is hashed alone, with BLAKE2b."""
_BASE = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


@dataclass(slots=True, kw_only=True)
class Differences:
    """Result of a comparison."""

    compared: int = 0
    """Number of compared messages."""
    readable: Sequences = field(default_factory=Sequences)
    """Sequences delivered by the stream."""
    differing: dict[str, Sequences] = field(
        default_factory=lambda: {part: Sequences() for part in ("timestamp", *PARTS)}
    )
    """Sequences of differing messages, by part."""
    not_compared: int = 0
    """Objects that are not Parquet, gone, or unreadable."""
    no_payload: int = 0
    """Messages archived without payload."""
    filtered: bool = False
    """Whether only the consumer's subjects were read."""


class _Window:
    """Hashes of the stream's messages from `first` to `last`, and a mask of those found in the archive."""

    def __init__(self, first: int, last: int) -> None:
        count = last - first + 1
        self.first, self.last = first, last
        self.times = np.zeros(count, np.int64)  # nanoseconds; 0 without a message
        self.parts = {part: np.zeros(count, np.uint64) for part in PARTS}
        self.archived, self.matched = np.zeros(count, np.bool_), np.zeros(count, np.bool_)

    def add(self, seqs: Seqs, times: Nanos, parts: dict[str, Hashes]) -> None:
        """Add messages of the stream; ignore those outside the window."""
        inside = (seqs >= self.first) & (seqs <= self.last)
        offsets = seqs[inside] - self.first
        self.times[offsets] = times[inside]
        for part, values in parts.items():
            self.parts[part][offsets] = values[inside]


async def compare(
    session: ReadSession,
    stream: StreamRange,
    storage: ArchiveFiles,
    incarnation: Incarnation,
    scan: ArchiveScan,
    progress: Progress,
) -> Differences:
    """Compare the messages of this range of the stream with the archive.

    Raises SourceError when the stream cannot be read.
    """
    result = Differences(filtered=bool(stream.subjects))
    objects = sorted((item for item in scan.examined if item.name.parquet), key=lambda item: item.name.first_seq)
    result.not_compared = len(scan.examined) - len(objects)
    for start, end in scan.sequences.windows():
        first, last = max(start, stream.first), min(end, stream.end - 1)
        if first > last:
            continue
        window = _Window(first, last)
        async with aclosing(RangeReader(session, replace(stream, first=first, end=last + 1)).messages()) as messages:
            async for consumer, received in messages:
                await in_thread(_take, window, stream.stream, consumer, received)
        result.readable.add(np.flatnonzero(window.times) + first)
        for item in objects:
            if item.name.first_seq <= last and item.name.last_seq >= first:
                await in_thread(_compare_object, storage, item.file, incarnation, window, result)
        other = np.flatnonzero(window.archived & ~window.matched) + first
        if result.not_compared:  # the other message may be in a vanished object, or in another format
            other = other[~scan.forked.contains(other)]
        result.differing["timestamp"].add(other)
        result.compared += int(window.archived.sum())
        progress("content", last - stream.first + 1, stream.end - stream.first)
    return result


def _take(window: _Window, stream: str, consumer: str, received: Received) -> None:
    envelopes = assemble(stream, consumer, received)
    rows, (seqs, times) = envelopes.batch.rows, positions(stream, consumer, received.replies)
    raw = None
    if envelopes.raw_headers:
        raw = pa.array([envelopes.raw_headers.get(row) for row in range(len(rows))], pa.binary())
    parts = _hashed(rows.column(layout.SUBJECT), rows.column(layout.HEADERS), rows.column(layout.PAYLOAD), raw)
    window.add(seqs, times, parts)


def _hashed(
    subjects: pa.StringArray, headers: pa.MapArray, payloads: pa.BinaryArray, raw: pa.BinaryArray | None
) -> dict[str, Hashes]:
    """Return the hash of each part. `raw` has invalid header blocks, null for the others.

    A trailing pin id header is ignored, because a consumer may become pinned under a capture that shares it. So is a
    block without headers.
    """
    blocks = header_blocks(headers, {}, len(subjects), stored=True)
    if blocks is None:
        header_hashes = np.zeros(len(subjects), np.uint64)
    else:
        blocks = without_pins(blocks)
        header_hashes = np.where(pc.equal(blocks, NO_HEADERS).to_numpy(zero_copy_only=False), 0, hashes(blocks))
    if raw is not None and raw.null_count < len(raw):
        header_hashes = np.where(
            raw.is_valid().to_numpy(zero_copy_only=False), hashes(without_pins(raw)), header_hashes
        )
    distinct = subjects.dictionary_encode()
    names = hashes(distinct.dictionary.cast(pa.binary()))[distinct.indices.to_numpy()]
    return {"subject": names, "headers": header_hashes, "payload": hashes(payloads)}


def _compare_object(
    storage: ArchiveFiles, file: File, incarnation: Incarnation, window: _Window, result: Differences
) -> None:
    """Compare an object's messages that lie in the window, a row group at a time."""
    try:
        with storage.parquet(file) as parquet:
            created = footer.entries(parquet.metadata.metadata).get("stream_created", "")
            present = incarnation.holds(created, None, None)
            if present is False:
                return
            columns = [name for name in _COLUMNS if name in parquet.schema_arrow.names]
            if layout.RAW_HEADERS in columns and not (file.name and file.name.quarantine):  # a decoded field
                columns.remove(layout.RAW_HEADERS)
            for index in range(parquet.metadata.num_row_groups):
                bounds = footer.group_bounds(parquet.metadata.row_group(index), layout.SEQ)
                if bounds is None or (bounds[0] <= window.last and bounds[1] >= window.first):
                    table = parquet.read_row_group(index, columns=columns, use_threads=False)
                    _compare_rows(table, None if present else incarnation, window, result)
    except (StoreError, pa.ArrowException, OSError):
        result.not_compared += 1


def _compare_rows(table: pa.Table, incarnation: Incarnation | None, window: _Window, result: Differences) -> None:
    """Compare rows; unless None, only those of `incarnation`."""
    seqs = table[layout.SEQ].to_numpy()
    micros = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
    mask = (seqs >= window.first) & (seqs <= window.last)
    if incarnation is not None:
        mask &= incarnation.includes(seqs, micros)
    if layout.ROW in table.schema.names:  # the first row has the payload
        mask &= pc.fill_null(table[layout.ROW], 0).to_numpy() == 0
    mask[mask] = window.times[seqs[mask] - window.first] != 0
    table, seqs, micros = table.filter(pa.array(mask)), seqs[mask], micros[mask]
    if not len(seqs):
        return
    offsets = seqs - window.first
    window.archived[offsets] = True
    times = window.times[offsets]
    nanos = pc.fill_null(table[layout.NANOS], _NO_NANOS).to_numpy()
    same = (times // 1000 == micros) & ((nanos == times % 1000) | (nanos == _NO_NANOS))
    window.matched[offsets[same]] = True
    has_payloads = layout.PAYLOAD in table.schema.names
    result.no_payload += 0 if has_payloads else len(seqs)
    parts = _hashed(
        _array(table, layout.SUBJECT),
        _array(table, layout.HEADERS),
        _array(table, layout.PAYLOAD) if has_payloads else pa.nulls(len(seqs), pa.binary()),
        _array(table, layout.RAW_HEADERS) if layout.RAW_HEADERS in table.schema.names else None,
    )
    for part in PARTS:
        if part != "payload" or has_payloads:
            result.differing[part].add(np.unique(seqs[same & (parts[part] != window.parts[part][offsets])]))


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _powers(base: int) -> Hashes:
    factors = np.full(_PIECE, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


_POWERS: list[Hashes] = []


def hashes(column: pa.BinaryArray) -> Hashes:
    """Return a uint64 array with the hash of each value; null counts as empty."""
    if not _POWERS:
        _POWERS.extend((_powers(_BASE), _powers(pow(_BASE, -1, _MODULUS))))
    edges, text = text_of(column)
    lengths = np.diff(edges)
    if column.null_count:
        lengths = np.where(column.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    result: Hashes = lengths.astype(np.uint64)
    long = lengths > _PIECE
    for row in np.flatnonzero(long).tolist():
        value = text[edges[row] : edges[row + 1]]
        result[row] = int.from_bytes(hashlib.blake2b(value.data, digest_size=8).digest(), "little")
    rows = np.flatnonzero((lengths > 0) & ~long)
    begins, ends = edges[rows], edges[rows + 1]
    start = 0
    while start < len(rows):
        first = begins[start]
        end = int(np.searchsorted(ends, first + _PIECE, "right"))
        starts, borders = begins[start:end] - first, ends[start:end] - first
        weighted = text[first : ends[end - 1]].astype(np.uint64)
        weighted += np.uint64(1)
        weighted *= _POWERS[0][: len(weighted)]
        sums = np.add.reduceat(weighted, np.stack([starts, borders], 1).ravel()[:-1])[::2]
        result[rows[start:end]] += sums * _POWERS[1][starts]
        start = end
    return result
