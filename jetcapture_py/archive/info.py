"""Metadata of an object, parsed from its name, listing and footer.

A plan needs the columns, bucket and bundles of many objects, so these are read from the footer's bytes. The rest is
decoded on request, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.footer import SchemaReader
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.text import one_line

_MESSAGE = frozenset((layout.SUBJECT, layout.HEADERS, layout.PAYLOAD, layout.RAW_HEADERS))
_CHECKED = frozenset((layout.SEQ, layout.TIMESTAMP, layout.DELIVERED, layout.RESCUED))
"""The columns whose statistics are used."""


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object whose footer cannot be used."""

    name: ObjectName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of an object with sequences from `first` to `last`, inclusive."""

    index: int
    rows: int
    first: int
    last: int
    size: int
    """Uncompressed bytes."""
    message_bytes: int
    """Uncompressed bytes of the messages themselves, without their decoded fields."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """Metadata that needs a decoded footer."""

    messages: int
    created: tuple[str, ...]
    """Creation times (RFC 3339) of the stream's incarnations in the object, if all are known."""
    consumers: tuple[str, ...]
    sealed_by: str
    key_rule: str | None
    event_time: str
    """Source of the bucket's time; "" for the stream's timestamps."""
    replaces: tuple[str, ...]
    """Digests of the objects that it replaces despite having fewer rows."""
    times: tuple[int, int] | None
    """First and last `_nats_timestamp` in microseconds; None without statistics."""
    rescued: int
    """Rows with values that did not fit their columns."""
    delivered: int | None
    """The most deliveries of a message; None without statistics."""
    codec: str
    compatible: bool
    """Whether no column is delta-encoded."""
    groups: tuple[RowGroup, ...]

    @cached_property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    @cached_property
    def size(self) -> int:
        """Uncompressed bytes."""
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Metadata from an object's name, listing and footer."""

    name: ObjectName
    size: int
    """Bytes."""
    modified: float | None
    """Modification time in seconds since the epoch; None if the store does not tell."""
    schema: pa.Schema
    """Its columns with their field ids; objects with the same ones share it."""
    schema_number: int
    """Index of `schema` in the reader's `schemas`."""
    interval: int
    """Length of its bucket in seconds."""
    bundles: int
    """Number of bundles; 0 for an object that is not in a bundle."""
    known: Details | None = field(repr=False)

    @property
    def details(self) -> Details:
        """The decoded footer's metadata."""
        assert self.known is not None, "read without details"  # noqa: S101  # a mistake of the caller
        return self.known

    @property
    def end(self) -> int:
        """The end of its bucket in seconds since the epoch."""
        return self.name.bucket + self.interval


class InfoReader:
    """Parses footers; keeps each distinct schema once."""

    def __init__(self) -> None:
        self._reader = SchemaReader()
        self.schemas: list[pa.Schema] = self._reader.schemas
        """The distinct schemas so far, which also differ where only their field ids do."""

    def read(
        self, name: ObjectName, data: bytes, *, size: int, modified: float | None = None, detailed: bool = False
    ) -> ObjectInfo | BadObject:
        """Parse the footer of an object, with its length and magic bytes; b"" stands for none."""
        if not data:
            return BadObject(name, "not a Parquet file: no footer at its end")
        if not footer.is_proven(data):  # Arrow must not parse it: a damaged one may abort the process
            return BadObject(name, footer.UNPROVEN)
        try:
            number = self._reader.number(data)
            return ObjectInfo(
                name=name,
                size=size,
                modified=modified,
                schema=self.schemas[number],
                schema_number=number,
                interval=footer.number_in(data, layout.INTERVAL),
                bundles=footer.number_in(data, layout.BUNDLES) if name.bundle else 0,
                known=details_of(name, footer.decoded(data)) if detailed else None,
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            return BadObject(name, one_line(error))


def details_of(name: ObjectName, metadata: pq.FileMetaData) -> Details:
    """Return a decoded footer's metadata."""
    entries = footer.entries(metadata.metadata)
    groups, columns, compression, encodings = [], [], "", set[str]()
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunks = [group.column(number) for number in range(group.num_columns)]
        if index == 0:  # the others are written alike
            compression, encodings = chunks[0].compression, {name for chunk in chunks for name in chunk.encodings}
        paths = [chunk.path_in_schema for chunk in chunks]
        columns.append({path: chunk.statistics for path, chunk in zip(paths, chunks, strict=True) if path in _CHECKED})
        first, last = _bounds(columns[-1:], layout.SEQ) or (name.first_seq, name.last_seq)
        sizes = (
            chunk.total_uncompressed_size
            for path, chunk in zip(paths, chunks, strict=True)
            if path.partition(".")[0] in _MESSAGE
        )
        groups.append(
            RowGroup(
                index=index,
                rows=group.num_rows,
                first=first,
                last=last,
                size=group.total_byte_size,
                message_bytes=sum(sizes),
            )
        )
    if not groups:
        raise ValueError("it has no messages")
    times, delivered = _bounds(columns, layout.TIMESTAMP), _bounds(columns, layout.DELIVERED)
    return Details(
        messages=int(entries.get("messages", name.rows)),
        created=_texts(entries, "stream_created"),
        consumers=_texts(entries, "consumer"),
        sealed_by=intern(entries.get("sealed_by", "")),
        key_rule=entries.get("key_rule"),
        event_time=intern(entries.get("time", "")),
        replaces=tuple(entries.get(layout.REPLACES, "").split()),
        times=None if times is None else (microseconds_of(times[0]), microseconds_of(times[1])),
        rescued=sum(
            group.rows - chunks[layout.RESCUED].null_count
            for group, chunks in zip(groups, columns, strict=True)
            if chunks.get(layout.RESCUED) is not None and chunks[layout.RESCUED].has_null_count
        ),
        delivered=None if delivered is None else delivered[1],
        codec=intern(compression.lower().replace("uncompressed", "none")),
        compatible="DELTA_BINARY_PACKED" not in encodings,
        groups=tuple(groups),
    )


def _texts(entries: Mapping[str, str], entry: str) -> tuple[str, ...]:
    """Split an entry that compaction joined with commas."""
    text = entries.get(entry, "")
    return tuple(map(intern, text.split(","))) if text else ()


def _bounds(columns: Iterable[Mapping[str, Any]], column: str) -> tuple[Any, Any] | None:
    """Return minimum and maximum of a column in row groups' statistics; None without them."""
    statistics = [chunks.get(column) for chunks in columns]
    if not all(chunk is not None and chunk.has_min_max for chunk in statistics):
        return None
    return min(chunk.min for chunk in statistics if chunk), max(chunk.max for chunk in statistics if chunk)
