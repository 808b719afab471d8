"""List, read, write and remove an archive's objects without Spark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from jetcapture_py.archive import layout
from jetcapture_py.archive.footer import entries, group_bounds
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store import open_store
from jetcapture_py.text import one_line
from spark_jobs.compaction.plan import Source
from spark_jobs.reading.place import Place

_THREADS = 16
_SMALL = 8 << 20
"""Maximum bytes of an object that is fetched from a remote store in one request."""
_CACHE = 64 << 20
"""Maximum bytes of small objects in the cache."""

T = TypeVar("T")
Each = TypeVar("Each")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of an object with sequences from `first` to `last`, inclusive."""

    index: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """An object's footer. `weight` is its uncompressed size in bytes; `own` are our key-value entries."""

    schema: pa.Schema
    rows: int
    weight: int
    codec: str
    row_groups: tuple[RowGroup, ...]
    own: Mapping[str, str]


class Files:
    """One archive's objects, through fsspec. Methods raise JetcaptureErrors that name the object."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        place = self._place = Place.open(url, options)
        self.shown = place.shown
        self._store = open_store(url, options)
        self._fs = place.fs
        self._root = place.root
        self._local = isinstance(place.fs, LocalFileSystem)
        self._schemas: dict[pa.Schema, pa.Schema] = {}
        self._cache: dict[str, bytes] = {}
        self._cached = 0

    def find(self, directories: Iterable[str]) -> list[Source]:
        """List the objects below these directories (relative to the archive's root)."""
        found: dict[str, dict[str, Any]] = {}
        for directory in directories:
            found |= self._place.files(directory)
        named = ((layout.parse_path(path), info) for path, info in found.items())
        return [Source(name, int(info["size"])) for name, info in named if name is not None]

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        """Store an object atomically."""
        self._store.put(name, data)

    def remove(self, path: str) -> str | None:
        """Remove an object if it exists; return an error message on failure."""
        try:
            self._fs.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return None
        except Exception as error:
            return f"cannot remove {self.shown}/{path}: {one_line(error)}"
        return None

    def modified(self, path: str) -> float:
        """Return the modification time in seconds since the epoch; the current time if the store does not tell."""
        try:
            return float(self._fs.modified(f"{self._root}/{path}").timestamp())
        except Exception:  # fsspec backends raise different errors, and some do not support it
            return time.time()

    def each(self, do: Callable[[Each], T], items: Sequence[Each]) -> list[T]:
        """Apply `do` to every item, with threads for a remote store."""
        if self._local:  # threads do not help
            return [do(item) for item in items]
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(do, items))

    def footer(self, source: Source) -> Footer:
        """Read an object's footer."""
        with self._open(source) as file:
            metadata = file.metadata
            schema = file.schema_arrow
            own = entries(metadata.metadata)
        if layout.SEQ not in schema.names or not metadata.num_row_groups:
            raise JetcaptureError(f"{self.shown}/{source.name.path} has no messages")
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        plain = pa.schema([_plain(field) for field in schema])
        return Footer(
            schema=self._schemas.setdefault(plain, plain),  # one copy each: there are many objects, but few schemas
            rows=metadata.num_rows,
            weight=sum(group.total_byte_size for group in groups),
            codec=groups[0].column(0).compression.lower().replace("uncompressed", "none"),
            row_groups=tuple(_row_group(index, group, source.name) for index, group in enumerate(groups)),
            own=own,
        )

    def rows(self, source: Source, row_group: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read an object's rows: one row group or all, and those of `columns` that exist, or all."""
        with self._open(source) as file:
            names = file.schema_arrow.names
            wanted = None if columns is None else [name for name in columns if name in names]
            groups = range(file.metadata.num_row_groups) if row_group is None else [row_group]
            table = file.read_row_groups(list(groups), columns=wanted, use_threads=False)
        schema = pa.schema([_plain(field) for field in table.schema])
        return table if table.schema.equals(schema) else table.cast(schema)

    def forget(self) -> None:
        """Clear the caches."""
        self._schemas = {}
        self._cache, self._cached = {}, 0

    @contextmanager
    def _open(self, source: Source) -> Iterator[pq.ParquetFile]:
        path = source.name.path
        with self._place.reading(path), self._file(f"{self._root}/{path}", source.size) as file:
            yield file

    def _file(self, path: str, size: int) -> pq.ParquetFile:
        if self._local:
            return pq.ParquetFile(path, page_checksum_verification=True)
        if size > _SMALL:
            return pq.ParquetFile(path, filesystem=self._fs, page_checksum_verification=True)
        data = self._cache.get(path)
        if data is None:
            data = bytes(self._fs.cat_file(path))
            if self._cached + len(data) <= _CACHE:
                self._cache[path] = data
                self._cached += len(data)
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)


def _plain(field: pa.Field) -> pa.Field:
    """Return the field without metadata and dictionary encoding."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, field.nullable)


def _row_group(index: int, group: Any, name: ObjectName) -> RowGroup:
    first, last = group_bounds(group, layout.SEQ) or (name.first_seq, name.last_seq)
    return RowGroup(index, int(first), int(last))
