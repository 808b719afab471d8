"""Tombstones as an erasure writes them, and what anybody with an archive's bytes can find in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.archive.removed import Tombstone
from jetcapture_py.archive.varint import varint
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.store import LocalStore, change_note
from jetcapture_py.transform.decode.avro_schema import Header
from tests.support.running import STREAM


def bury(root: Path, messages: Iterable[Mapping[str, Any]]) -> Tombstone:
    """Write a tombstone of these rows of an archive."""
    pairs = [(row[layout.SEQ], microseconds_of(row[layout.TIMESTAMP])) for row in messages]
    seqs, times = np.array(pairs, np.int64).reshape(-1, 2).T
    tombstone = Tombstone(
        stream=STREAM,
        time=datetime.now(UTC),
        by="ops@host",
        reason="a customer asked for it",
        messages=MessageSet(seqs, times),
    )
    change_note(LocalStore(str(root)), tombstone.path, lambda _: tombstone.encode())
    return tombstone


def traces(root: Path, text: bytes) -> list[str]:
    """The files and directories that have a text: in their name, their bytes, or what these are decompressed."""
    found = []
    for path in sorted(root.rglob("*")):
        parts = plain(path.name, path.read_bytes()) if path.is_file() else ()
        if text in path.name.encode() or any(text in part for part in parts):
            found.append(path.relative_to(root).as_posix())
    return found


def plain(name: str, data: bytes) -> Iterator[bytes]:
    """The bytes of a file, and what they are decompressed: the pages of Parquet, the blocks of Avro, text."""
    yield data
    if name.endswith(".avro") and data:
        yield from (block for _, block in Header(data).blocks(1 << 30))
    elif name.endswith((".gz", ".zst")):
        codec = "gzip" if name.endswith(".gz") else "zstd"
        yield pa.CompressedInputStream(pa.BufferReader(data), codec).read()
    elif name.endswith(".parquet") and data:
        yield from _pages(data)


def _pages(data: bytes) -> Iterator[bytes]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            at = min(each for each in (chunk.dictionary_page_offset, chunk.data_page_offset) if each)
            end = at + chunk.total_compressed_size
            codec = None if chunk.compression == "UNCOMPRESSED" else pa.Codec(chunk.compression.lower())
            while at < end:
                (_, size, stored, *_), at = _thrift(data, at)
                page = data[at : at + stored]
                yield page if codec is None or not stored else codec.decompress(page, size, asbytes=True)
                at += stored


def _thrift(data: bytes, at: int) -> tuple[list[int], int]:
    """The numbers of a struct in Thrift's compact protocol, without those of structs within, and where it ends."""
    found: list[int] = []
    while header := data[at]:
        at += 1
        if not header >> 4:  # a long field number
            _, at = varint(data, at)
        kind = header & 15
        if kind in (5, 6, 4):
            value, at = varint(data, at)
            found.append(value >> 1 ^ -(value & 1))
        elif kind == 8:
            size, at = varint(data, at)
            at += size
        elif kind == 12:
            _, at = _thrift(data, at)
        elif kind not in (1, 2):
            raise AssertionError(f"a page header has no fields of type {kind}")
    return found, at + 1
