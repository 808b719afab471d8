"""The objects of an archive for jobs that read and write them without Spark: listed, read, written and removed."""

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
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.store import open_store
from jetcapture_py.text import one_line
from spark_jobs.compaction.plan import Source
from spark_jobs.reading.place import Place

_THREADS = 16
_SMALL = 8 << 20
"""Bytes up to which an object in a remote store is fetched in one request."""
_CACHE = 64 << 20
"""Bytes of small objects that are held for the next time they are read."""

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
    """What an object's footer says. `weight` is bytes before compression; `own` are its entries of ours, by name."""

    schema: pa.Schema
    rows: int
    weight: int
    codec: str
    row_groups: tuple[RowGroup, ...]
    own: Mapping[str, str]


class Files:
    """One archive's objects, through fsspec. Its errors are JetcaptureErrors that name the object."""

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
        """The objects below these directories, which are relative to the archive's root."""
        found: dict[str, dict[str, Any]] = {}
        for directory in directories:
            found |= self._place.files(directory)
        named = ((layout.parse_path(path), info) for path, info in found.items())
        return [Source(name, int(info["size"])) for name, info in named if name is not None]

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        """Store an object, whole or not at all."""
        self._store.put(name, data)

    def remove(self, path: str) -> str | None:
        """Remove an object that may be gone already; the reason when that fails."""
        try:
            self._fs.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return None
        except Exception as error:
            return f"cannot remove {self.shown}/{path}: {one_line(error)}"
        return None

    def modified(self, path: str) -> float:
        """When an object was written, in seconds since the epoch; now, where the store does not say."""
        try:
            return float(self._fs.modified(f"{self._root}/{path}").timestamp())
        except Exception:  # each fsspec backend has errors of its own, and some do not know
            return time.time()

    def each(self, do: Callable[[Each], T], items: Sequence[Each]) -> list[T]:
        """`do` with every item, at the same time where that is a request to a remote store."""
        if self._local:  # threads would only wait for each other
            return [do(item) for item in items]
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(do, items))

    def footer(self, source: Source) -> Footer:
        """An object's footer."""
        with self._open(source) as file:
            metadata = file.metadata
            schema = file.schema_arrow
        seq = schema.names.index(layout.SEQ) if layout.SEQ in schema.names else None
        if seq is None or not metadata.num_row_groups:
            raise JetcaptureError(f"{self.shown}/{source.name.path} holds no messages")
        entries = {key.decode(): value.decode(errors="replace") for key, value in (metadata.metadata or {}).items()}
        prefix = layout.METADATA_PREFIX
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        plain = pa.schema([_plain(field) for field in schema])
        return Footer(
            schema=self._schemas.setdefault(plain, plain),  # objects are many, schemas are few
            rows=metadata.num_rows,
            weight=sum(group.total_byte_size for group in groups),
            codec=groups[0].column(0).compression.lower().replace("uncompressed", "none"),
            row_groups=tuple(_row_group(index, group, source.name) for index, group in enumerate(groups)),
            own={key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)},
        )

    def rows(self, source: Source, row_group: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of an object, of one row group or all, and the columns of that name that it has, or all."""
        with self._open(source) as file:
            names = file.schema_arrow.names
            wanted = None if columns is None else [name for name in columns if name in names]
            groups = range(file.metadata.num_row_groups) if row_group is None else [row_group]
            table = file.read_row_groups(list(groups), columns=wanted, use_threads=False)
        schema = pa.schema([_plain(field) for field in table.schema])
        return table if table.schema.equals(schema) else table.cast(schema)

    def forget(self) -> None:
        """Let go of what is held for the next time."""
        self._schemas = {}
        self._cache, self._cached = {}, 0

    @contextmanager
    def _open(self, source: Source) -> Iterator[pq.ParquetFile]:
        path = f"{self._root}/{source.name.path}"
        try:
            with self._file(path, source.size) as file:
                yield file
        except FileNotFoundError as error:
            raise VanishedError(f"{self.shown}/{source.name.path} is gone") from error
        except (OSError, pa.ArrowException) as error:
            raise JetcaptureError(f"cannot read {self.shown}/{source.name.path}: {one_line(error)}") from error

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
    """The field without what is not in Parquet: a dictionary is a way to write a column."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, field.nullable)


def _row_group(index: int, group: Any, name: ObjectName) -> RowGroup:
    columns = (group.column(number) for number in range(group.num_columns))
    found = next((column.statistics for column in columns if column.path_in_schema == layout.SEQ), None)
    if found is None or not found.has_min_max:
        return RowGroup(index, name.first_seq, name.last_seq)
    return RowGroup(index, int(found.min), int(found.max))
