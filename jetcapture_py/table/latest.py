"""Keep an Iceberg table of the newest row of each key, copy on write, in buckets of the key's hash.

A pass reads the objects that no earlier one has read, and rewrites the buckets in which they have a newer row. A newest
row that says that its key is deleted is in a second table, because older rows may still come. What a pass cannot
continue, it makes again from the whole archive; an erasure drops it.

Each snapshot names the list of the objects that were read. The table of deleted keys is committed first: if a pass is
killed in between, the next one reads the same objects, and finds the keys that both tables have.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask
from jetcapture_py.archive.removed import Expired
from jetcapture_py.config.maintain import LatestConfig
from jetcapture_py.config.model import Config
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.duckdb import version
from jetcapture_py.reading.latest import GONE, NEW, newest_rows
from jetcapture_py.reading.plan import Objects, ReadRequest, list_objects
from jetcapture_py.reading.selection import Latest
from jetcapture_py.retry import retried_on_conflict
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.table.catalog import CONTENT, DIRECTORY, explained, is_refused, open_catalog, refuse_other, root_url
from jetcapture_py.table.commit import SNAPSHOT_AGE
from jetcapture_py.text import plural

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

BUCKET = "_nats_bucket"
"""The column that divides the files."""
_RULE, _BUCKETS, _OBJECTS = "jetcapture.latest", "jetcapture.buckets", "jetcapture.objects"
"""Properties of a table: its rule, and its number of buckets. In a snapshot's summary: its list of objects."""
_ROWS, _MAX_ROWS = 50_000, 200_000
"""Rows of a bucket when the tables are made, and, on average, when they are made again with more buckets."""
_BYTES, _MAX_BYTES = 32 << 20, 128 << 20
"""The same for its bytes in files. A bucket is in memory: 32 MiB of payloads of 40 KB took 1 GB."""
_MAX_BUCKETS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestResult:
    """The effect of a pass or its dry run on a table of newest rows."""

    name: str
    rows: int
    files: int
    objects: int
    """Objects that the pass has read, or would read."""
    written: int
    """Files that the pass has written."""

    def line(self) -> str:
        text = f"table {self.name}: {plural(self.files, 'file')}, {self.rows:,} rows"
        return f"{text} ({plural(self.objects, 'object')} read, {plural(self.written, 'file')} written)"


def latest_config(config: Config) -> LatestConfig | None:
    """Return the section `maintain.table.latest`, if any."""
    table = config.maintain and config.maintain.table
    return table.latest if table else None


def update_latest(config: Config, archive: ArchiveFiles, given: LatestConfig, *, dry_run: bool = False) -> LatestResult:
    """Bring the tables to the state of the archive, without expired messages. Raises JetcaptureError."""

    def attempt() -> LatestResult:
        with _opened(config, archive, given, read_only=dry_run) as tables:
            return tables.planned() if dry_run else tables.update()

    return retried_on_conflict(attempt)


def drop_latest(config: Config, archive: ArchiveFiles, given: LatestConfig) -> list[str]:
    """Drop the tables with all of their files, if any; return their directories. Raises JetcaptureError."""
    with _opened(config, archive, given) as tables:
        return tables.drop()


@contextmanager
def _opened(
    config: Config, archive: ArchiveFiles, given: LatestConfig, *, read_only: bool = False
) -> Iterator[_LatestTables]:
    with open_catalog(config, read_only=read_only) as catalog, explained(f"cannot keep table {given.name}"):
        yield _LatestTables(config, archive, given, catalog)


class _AnewError(Exception):
    """The tables cannot be continued."""


class _LatestTables:
    """The table and, with `deleted`, that of deleted keys."""

    def __init__(self, config: Config, archive: ArchiveFiles, given: LatestConfig, catalog: Catalog) -> None:
        self._archive, self._given, self._catalog = archive, given, catalog
        self._stream = config.source.stream
        self._names, self._unused = [given.name], [f"{given.name}_deleted"]
        if given.deleted is not None:
            self._names, self._unused = self._names + self._unused, []
        self._content = f"newest rows of stream {self._stream}"
        self._least = 1
        """Number of buckets when the tables are made again."""
        # another version of DuckDB may have other hashes
        self._rule = json.dumps([self._stream, *given.by, given.deleted, version()])

    def _load(self, names: Sequence[str]) -> list[Table]:
        """Return those of these tables that exist. Raises JetcaptureError for one that has other rows."""
        from pyiceberg.exceptions import NoSuchTableError

        tables = []
        for name in names:
            with suppress(NoSuchTableError):
                tables.append(self._catalog.load_table(name))
                refuse_other(tables[-1], name, self._content)
                if tables[-1].location() != self._location(name):
                    raise JetcaptureError(
                        f"table {name} is of another archive than {self._archive.shown}: it is left as it is; use "
                        "another name, or drop it from its catalog if the archive was moved"
                    )
        return tables

    def _location(self, name: str) -> str:
        return f"{root_url(self._archive)}{DIRECTORY}/{name}"

    def _create(self, name: str) -> None:
        """Create an empty table, unless it exists."""
        from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
        from pyiceberg.schema import Schema
        from pyiceberg.transforms import IdentityTransform
        from pyiceberg.types import IntegerType, NestedField

        self._catalog.create_namespace_if_not_exists(self._catalog.namespace_from(name))
        self._catalog.create_table_if_not_exists(
            name,
            Schema(NestedField(1, BUCKET, IntegerType(), required=False)),
            location=self._location(name),
            partition_spec=PartitionSpec(PartitionField(1, PARTITION_FIELD_ID_START, IdentityTransform(), BUCKET)),
            properties={
                CONTENT: self._content,
                "commit.retry.num-retries": "0",  # a concurrent commit changes the rows
                "write.metadata.delete-after-commit.enabled": "true",
                "write.metadata.previous-versions-max": "20",
            },
        )

    def drop(self) -> list[str]:
        """Drop the tables with all of their files; return their directories, relative to the archive's root."""
        self._load(self._names)  # refuses those of others
        return [*map(self._drop, self._names), *self._drop_unused()]

    def _drop_unused(self) -> list[str]:
        """Drop the table of deleted keys that was made before `deleted` was left out, if any."""
        tables: list[Table] = []
        with suppress(JetcaptureError):  # of others
            tables = self._load(self._unused)
        return [self._drop(name) for name in self._unused if tables]

    def _drop(self, name: str) -> str:
        from pyiceberg.exceptions import NoSuchTableError

        with suppress(NoSuchTableError):
            self._catalog.drop_table(name)
        directory = f"{DIRECTORY}/{name}"
        for file in list(self._archive.below(directory)):
            self._archive.remove(file)
        return directory

    def planned(self) -> LatestResult:
        """Return what a pass would read."""
        tables = self._load(self._names)
        known = self._known(tables) or ()
        listed = list_objects(self._archive, self._stream).values()
        return self._result(tables, objects=sum(file.path not in known for file in listed))

    def update(self) -> LatestResult:
        """Read new objects, and rewrite the buckets in which they have newer rows, or in which rows have expired."""
        for name in self._names:
            self._create(name)
        tables = self._load(self._names)
        known = self._known(tables)
        try:
            return self._update(tables, known)
        except _AnewError:
            return self._update(tables, None)

    def _known(self, tables: Sequence[Table]) -> set[str] | None:
        """Return the paths of the objects that earlier passes have read; None if the tables cannot be continued.

        They have other rules, or, after a pass that was killed, differ in their buckets, or lack the list.
        """
        rules = [table.properties.get(_RULE) for table in tables]
        buckets = {table.properties.get(_BUCKETS) for table in tables}
        snapshot = tables[0].current_snapshot() if tables else None
        if rules != [self._rule] * len(self._names) or len(buckets) != 1 or not (snapshot and snapshot.summary):
            return None
        with suppress(FileNotFoundError), tables[0].io.new_input(snapshot.summary[_OBJECTS] or "").open() as file:
            return set(pq.read_table(pa.BufferReader(file.read()))["path"].to_pylist())
        return None

    def _update(self, tables: Sequence[Table], known: set[str] | None) -> LatestResult:
        anew, listed = known is None, list_objects(self._archive, self._stream)
        if anew:
            self._drop_unused()
        new = {name: file for name, file in listed.items() if known is None or file.path not in known}
        expired = self._archive.expired(self._stream)
        due = set() if anew or expired is None else _buckets_before(tables, expired.until)
        if not new and not due and not (anew and _total(tables, "total-records")):
            return self._result(tables)
        request = ReadRequest(files=self._archive, stream=self._stream, dedupe="none")  # copies change nothing
        latest = Latest(by=self._given.by, deleted=self._given.deleted)
        changes = [_Change(table, anew=anew) for table in tables]
        try:
            with newest_rows(request, new, latest, changes[0].columns) as rows:
                if not anew and not rows.same_hashes(changes[0].columns):
                    raise _AnewError
                count = self._bucket_count(tables, new, rows.count, anew=anew)
                schema = rows.schema(changes[0].columns)
                for change in changes:
                    change.set_columns(schema)
                for bucket in sorted(rows.buckets(count) | due):
                    kept = [change.kept(bucket) for change in changes]
                    both = pa.concat_tables(kept, promote_options="permissive")
                    _replace(changes, bucket, kept, rows.merged(bucket, count, both), expired)
            objects = changes[0].write_list([file.path for file in listed.values()])
            for change in reversed(changes):  # that of deleted keys first
                summary = {_OBJECTS: objects} if change is changes[0] else {}
                change.commit({_RULE: self._rule, _BUCKETS: str(count)}, summary)
        except BaseException:
            for change in changes:
                change.discard()
            raise
        written = sum(len(change.added) for change in changes)
        return self._result([change.table for change in changes], objects=len(new), written=written)

    def _bucket_count(self, tables: Sequence[Table], objects: Objects, found: int, *, anew: bool) -> int:
        """Return the number of buckets, for the rows found in objects if the tables are made anew.

        Raises _AnewError for more.
        """
        if anew:
            share = found / max(1, sum(name.rows for name in objects))
            size = int(share * sum(file.size for file in objects.values()))
            return min(_MAX_BUCKETS, max(self._least, found // _ROWS, size // _BYTES))
        count = int(tables[0].properties[_BUCKETS])
        limits = {"total-records": count * _MAX_ROWS, "total-files-size": count * _MAX_BYTES}
        if count < _MAX_BUCKETS and any(_total(tables, name) > limit for name, limit in limits.items()):
            self._least = 2 * count
            raise _AnewError
        return count

    def _result(self, tables: Sequence[Table], *, objects: int = 0, written: int = 0) -> LatestResult:
        return LatestResult(
            name=self._names[0],
            rows=_total(tables[:1], "total-records"),
            files=_total(tables[:1], "total-data-files"),
            objects=objects,
            written=written,
        )


def _total(tables: Iterable[Table], name: str) -> int:
    """Return a total of the current snapshots."""
    snapshots = [snapshot for table in tables if (snapshot := table.current_snapshot()) is not None]
    return sum(int(snapshot.summary[name] or 0) for snapshot in snapshots if snapshot.summary)


def _buckets_before(tables: Sequence[Table], end: datetime) -> set[int]:
    """Return the buckets with rows that may be older than this."""
    before = f"{layout.TIMESTAMP} < '{end.isoformat()}'"
    named = (table for table in tables if layout.TIMESTAMP in table.schema().column_names)
    return {task.file.partition[0] for table in named for task in table.scan(row_filter=before).plan_files()}


def _replace(
    changes: Sequence[_Change], bucket: int, kept: Sequence[pa.Table], rows: pa.Table, expired: Expired | None
) -> None:
    """Write the newest rows of a bucket to their tables, unless they are those that a table has kept."""
    is_new, gone = (rows[name].to_numpy(zero_copy_only=False) for name in (NEW, GONE))
    old: Mask = np.zeros(len(is_new), bool)
    if expired is not None:
        times = rows[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
        old = (times < expired.until.timestamp() * 1_000_000) & expired.contains(rows[layout.SEQ].to_numpy())
    rows = rows.drop_columns([NEW, GONE, *({BUCKET} & {*rows.column_names})])
    rows = rows.add_column(0, BUCKET, pa.array(np.full(len(is_new), bucket, np.int32)))
    for change, before, mask in zip(changes, kept, (~gone & ~old, gone & ~old), strict=False):
        if (is_new & mask).any() or mask.sum() != before.num_rows:
            change.replace(bucket, rows.filter(pa.array(mask)))


class _Change:
    """One commit of a table."""

    def __init__(self, table: Table, *, anew: bool) -> None:
        self.table = table
        self.added: list[DataFile] = []
        self._loaded, self._anew, self._tx = table, anew, table.transaction()
        self._removed = [task.file for task in table.scan().plan_files()] if anew else []
        self._objects: str | None = None
        self._may_be_committed = False

    @property
    def columns(self) -> pa.Schema:
        """The columns of the rows that are kept."""
        return pa.schema([]) if self._anew else self._loaded.schema().as_arrow()

    def set_columns(self, schema: pa.Schema) -> None:
        """Add columns to the bucket. Raises _AnewError for one that has another type."""
        from pyiceberg.exceptions import ValidationError

        if self._anew:
            with self._tx.update_schema(allow_incompatible_changes=True) as update:
                for field in self._loaded.schema().fields:
                    if field.name != BUCKET:
                        update.delete_column(field.name)
        try:
            with self._tx.update_schema() as update:
                update.union_by_name(schema.remove_metadata())
        except ValidationError as error:
            raise _AnewError from error

    def kept(self, bucket: int) -> pa.Table:
        """Return the rows of a bucket."""
        return (
            self.columns.empty_table()
            if self._anew
            else self._loaded.scan(row_filter=f"{BUCKET} = {bucket}").to_arrow()
        )

    def replace(self, bucket: int, rows: pa.Table) -> None:
        """Write the rows of a bucket in place of the present ones."""
        from pyiceberg.io.pyarrow import _dataframe_to_data_files

        if not self._anew:
            self._removed += [task.file for task in self._loaded.scan(row_filter=f"{BUCKET} = {bucket}").plan_files()]
        if rows.num_rows:
            self.added += _dataframe_to_data_files(self._tx.table_metadata, rows, self._loaded.io)

    def write_list(self, paths: Sequence[str]) -> str:
        """Write a list of objects; return its location."""
        data = io.BytesIO()
        pq.write_table(pa.table({"path": pa.array(sorted(paths), pa.string())}), data, compression="zstd")
        self._objects = f"{self._loaded.location()}/objects/{uuid4()}.parquet"
        with self._loaded.io.new_output(self._objects).create() as file:
            file.write(data.getvalue())
        return self._objects

    def commit(self, properties: dict[str, str], summary: dict[str, str]) -> None:
        """Commit the files, and delete those of snapshots that were replaced an hour ago.

        Raises an error of PyIceberg if the table was changed since it was loaded.
        """
        from jetcapture_py.table.writer import delete_files, forget

        self._tx.set_properties(properties)
        with self._tx.update_snapshot(snapshot_properties=summary).overwrite() as snapshot:
            for file in self.added:
                snapshot.append_data_file(file)
            for file in self._removed:
                snapshot.delete_data_file(file)
        forgotten = forget(self._tx, datetime.now(UTC) - SNAPSHOT_AGE)
        self._may_be_committed = True
        try:
            self.table = self._tx.commit_transaction()
        except Exception as error:
            self._may_be_committed = not is_refused(error)
            raise
        delete_files(self.table, forgotten, listed=_OBJECTS)

    def discard(self) -> None:
        """Delete the files that were written, unless they may be committed."""
        if self._may_be_committed:
            return
        for place in [*(file.file_path for file in self.added), *([self._objects] if self._objects else [])]:
            with suppress(Exception):  # file systems raise their own
                self._loaded.io.delete(place)
