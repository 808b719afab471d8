"""An archive's objects as a compaction reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import footer
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.plan import Source
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store import NoteStore, change_note
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.store.removal import Removal, remove

_SMALL = 8 << 20
"""Maximum bytes of an object that is fetched from a remote store in one request."""
CACHE = 64 << 20
"""Maximum bytes of small objects in the cache."""

T = TypeVar("T")
Item = TypeVar("Item")


class Files:
    """The objects of an archive, as one unit's compaction uses them: it keeps schemas, and bytes of small objects.

    Methods raise JetcaptureErrors that name the object.
    """

    def __init__(self, archive: ArchiveFiles) -> None:
        self._archive = archive
        self.shown = self._archive.shown
        self._schemas: dict[pa.Schema, pa.Schema] = {}
        self._cache: dict[str, bytes] = {}
        self._cached = 0

    def find(self, directories: Iterable[str]) -> list[Source]:
        """List the objects below these directories (relative to the archive's root)."""
        files = self._archive.below(*directories)
        return [Source(file.name, file.size) for file in files if file.name is not None]

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        """Store an object atomically."""
        self._archive.store.put(name, data)

    def has(self, source: Source, data: pa.Buffer) -> bool:
        """Return whether the stored object has exactly these bytes. Raises VanishedError, StoreError."""
        file, size, start = self._archive.at(source.name.path), int(data.size), 0
        if file.size != size:
            return False
        for piece in self._archive.pieces(file):
            if not pa.py_buffer(piece).equals(data.slice(start, len(piece))):
                return False
            start += len(piece)
        return start == size

    def overwrite(self, name: ObjectName, data: pa.Buffer) -> None:
        """Store an object atomically in place of one of the same name."""
        store = self._archive.store
        if isinstance(store, NoteStore):
            content = data.to_pybytes()
            change_note(store, name.path, lambda _: content)
        else:
            store.put(name, data)

    def lookup(self, path: str) -> Source | None:
        """Return the object at `path`; None if there is none."""
        file = self.at(path)
        return None if file is None or file.name is None else Source(file.name, file.size)

    def at(self, path: str) -> File | None:
        """Return the file at `path` as it is now; None if there is none."""
        try:
            return self._archive.at(path)
        except VanishedError:
            return None

    def remove(self, removals: Sequence[Removal]) -> list[bool | StoreError]:
        """Remove objects as `store.removal.remove` does."""
        return remove(self._archive, removals)

    def map(self, do: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
        """Apply `do` to every item, with threads for a remote store."""
        return list(self._archive.map(do, items))

    def footer(self, source: Source) -> ObjectInfo:
        """Return what an object's footer says, in detail; its schema has no field ids."""
        # what is read back may have another size than what was written
        file = self._archive.at(source.name.path, None if self._archive.local else source.size)
        data = self._whole(file)
        (end,) = self._archive.footers([file]) if data is None else (footer.find(lambda size: data[-size:]),)
        info = InfoReader().read(source.name, end, size=source.size, detailed=True)
        if isinstance(info, BadObject):
            raise self._archive.refusal(info)
        plain = pa.schema([_plain(field) for field in info.schema])
        return replace(info, schema=self._schemas.setdefault(plain, plain))  # of many objects, few differ

    def rows(self, source: Source, row_group: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Read an object's rows: one row group or all, and those of `columns` that exist, or all."""
        with self._open(source) as file:
            names = file.schema_arrow.names
            wanted = None if columns is None else [name for name in columns if name in names]
            groups = range(file.metadata.num_row_groups) if row_group is None else [row_group]
            return _plain_rows(file.read_row_groups(list(groups), columns=wanted, use_threads=False))

    def read_through(self, source: Source) -> None:
        """Read an object in full, which verifies its page checksums. Raises JetcaptureError if one is wrong."""
        with self._open(source) as file:
            for index in range(file.metadata.num_row_groups):
                file.read_row_group(index, use_threads=False)

    def rows_of(self, name: ObjectName, data: pa.Buffer) -> Iterator[pa.Table]:
        """Yield the rows of an object that is not stored yet."""
        with self._archive.parquet(self._archive.at(name.path, data.size), data.to_pybytes()) as file:
            for index in range(file.metadata.num_row_groups):
                yield _plain_rows(file.read_row_group(index, use_threads=False))

    @contextmanager
    def _open(self, source: Source) -> Iterator[pq.ParquetFile]:
        file = self._archive.at(source.name.path, source.size)
        with self._archive.parquet(file, self._whole(file)) as parquet:
            yield parquet

    def _whole(self, file: File) -> bytes | None:
        """Return the bytes of a small remote object; None for others, of which parts are read."""
        if self._archive.local or file.size > _SMALL:
            return None
        data = self._cache.get(file.path)
        if data is None:
            data = self._archive.read(file)
            if self._cached + len(data) <= CACHE:
                self._cache[file.path] = data
                self._cached += len(data)
        return data


def _plain_rows(table: pa.Table) -> pa.Table:
    schema = pa.schema([_plain(field) for field in table.schema])
    return table if table.schema.equals(schema) else table.cast(schema)


def _plain(field: pa.Field) -> pa.Field:
    """Return the field without metadata and dictionary encoding."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind, field.nullable)
