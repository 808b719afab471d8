"""Read an archive's objects for compaction, with a cache of schemas and of small remote objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import footer
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.plan import Source
from jetcapture_py.errors import VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File

_SMALL = 8 << 20
"""Maximum bytes of an object that is fetched from a remote store in one request."""
CACHE = 64 << 20
"""Maximum bytes of small objects in the cache."""


class Files:
    """The objects of `archive`. Errors are JetcaptureErrors that name the object."""

    def __init__(self, archive: ArchiveFiles) -> None:
        self.archive = archive
        self.shown = archive.shown
        self._infos = InfoReader()
        self._schemas: dict[pa.Schema, pa.Schema] = {}
        self._cache: dict[str, bytes] = {}
        self._cached = 0

    def find(self, directories: Iterable[str]) -> list[Source]:
        """List the objects below these directories (relative to the archive's root)."""
        files = self.archive.below(*directories)
        return [Source(file.name, file.size) for file in files if file.name is not None]

    def at(self, path: str) -> File | None:
        """Return the current file at `path`; None without one."""
        try:
            return self.archive.at(path)
        except VanishedError:
            return None

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        """Store an object atomically; keep an existing one of the same name."""
        self.archive.store.put(name, data)

    def info(self, source: Source) -> ObjectInfo:
        """Return an object's decoded footer; its schema has no field ids."""
        # an object that is read back may have another size than the written one
        file = self.archive.at(source.name.path, None if self.archive.local else source.size)
        data = self._whole(file)
        (end,) = self.archive.footers([file]) if data is None else (footer.find(lambda size: data[-size:]),)
        info = self._infos.read(source.name, end, size=source.size, detailed=True)
        if isinstance(info, BadObject):
            raise self.archive.refusal(info)
        plain = pa.schema([_plain(field) for field in info.schema])
        return replace(info, schema=self._schemas.setdefault(plain, plain))  # most objects have the same schema

    def info_at(self, path: str) -> ObjectInfo | None:
        """Return the current footer of the object at `path`; None without an object."""
        file = self.at(path)
        return None if file is None or file.name is None else self.info(Source(file.name, file.size))

    def rows(
        self, source: Source | ObjectInfo, row_group: int | None = None, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Read an object's rows: one row group or all, and all columns or the existing ones of `columns`."""
        with self._open(source) as file:
            names = file.schema_arrow.names
            chosen = None if columns is None else [name for name in columns if name in names]
            groups = range(file.metadata.num_row_groups) if row_group is None else [row_group]
            return plain_rows(file.read_row_groups(list(groups), columns=chosen, use_threads=False))

    def read_through(self, source: Source | ObjectInfo) -> None:
        """Read an object in full, which verifies its page checksums. Raises JetcaptureError if one is wrong."""
        with self._open(source) as file:
            for index in range(file.metadata.num_row_groups):
                file.read_row_group(index, use_threads=False)

    @contextmanager
    def _open(self, source: Source | ObjectInfo) -> Iterator[pq.ParquetFile]:
        file = self.archive.at(source.name.path, source.size)
        with self.archive.parquet(file, self._whole(file)) as parquet:
            yield parquet

    def _whole(self, file: File) -> bytes | None:
        """Return the bytes of a small remote object; None for others, which are read in parts."""
        if self.archive.local or file.size > _SMALL:
            return None
        data = self._cache.get(file.path)
        if data is None:
            data = self.archive.read(file)
            if self._cached + len(data) <= CACHE:
                self._cache[file.path] = data
                self._cached += len(data)
        return data


def plain_rows(table: pa.Table) -> pa.Table:
    """Return rows without metadata and dictionary encoding."""
    schema = pa.schema([_plain(field) for field in table.schema])
    return table if table.schema.equals(schema) else table.cast(schema)


def _plain(field: pa.Field) -> pa.Field:
    type_ = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, type_, field.nullable)
