"""The newest row of each key, by DuckDB: as Arrow batches, or merged with those of earlier objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import Columns, listed, outputs, take_nulled
from jetcapture_py.reading.duckdb import LATEST, archive_views, order_of, sql_name
from jetcapture_py.reading.plan import Dedupe, Objects, ReadRequest
from jetcapture_py.reading.selection import Keys, Latest, Moment, Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import open_archive

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

log = logging.getLogger("jetcapture.reading")

_BATCH_ROWS = 1 << 16


def read_latest(
    url: str | os.PathLike[str],
    stream: str,
    *,
    by: str | Sequence[str],
    order: str = layout.SEQ,
    deleted: str | None = None,
    start: Moment | None = None,
    end: Moment | None = None,
    event_start: Moment | None = None,
    event_end: Moment | None = None,
    keys: Keys | None = None,
    columns: Columns | None = None,
    dedupe: Dedupe = "auto",
    parquet_only: bool = False,
    types: Mapping[str, pa.DataType | str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> pa.RecordBatchReader:
    """Return the newest row of each key in the archive of `stream` as Arrow batches.

    `by` are the columns that make a key, such as `order_id`; rows with equal values, nulls included, are versions of
    one row. The newest one has the greatest `order`. The default is the order of the stream, in which a message is
    newer than all those before the stream was created again. Null is the lowest value, and rows with equal values
    follow by timestamp, sequence and row. A key whose newest row meets the condition `deleted`, such as `op = 'd'`, is
    left out. Each of these is DuckDB's SQL over the archive's columns: a name, or an expression such as
    `coalesce(after.id, before.id)`.

    The other arguments are those of `read_archive`, and choose the rows among which the newest is found. DuckDB, of the
    extra `query`, takes at most half of the memory for the keys and a number for each, and spills to `TMPDIR`. Raises
    JetcaptureError, also during the read.
    """
    latest = Latest(by=by, order=order, deleted=deleted)
    request = ReadRequest(
        files=open_archive(url, options or {}),
        stream=stream,
        selection=Selection.of(start, end, keys, event_start, event_end),
        dedupe=dedupe,
        parquet_only=parquet_only,
        types=types,
    )
    plan = request.plan(for_sql=True)
    table = plan.table.schema
    named = list(filter(columns, table.names)) if callable(columns) else columns
    chosen = outputs(table.names, None if named is None else listed(named))
    schema = pa.schema([(name, table.field(source).type) for name, source in chosen])
    plans = chain([plan], iter(partial(request.plan, for_sql=True), None))

    def batches() -> Iterator[pa.RecordBatch]:
        import duckdb

        with archive_views(remote=not request.files.local) as (connection, views):

            def begun() -> Iterator[pa.RecordBatch]:
                current = next(plans)
                if current.table.schema != table:
                    raise JetcaptureError("columns changed before the first row was read: read it again")
                try:
                    views.create_latest(LATEST, current, latest)
                    rows = connection.table(LATEST).project(", ".join(sql_name(name) for _, name in chosen))
                    reader = iter(rows.to_arrow_reader(_BATCH_ROWS))
                    return chain(list(islice(reader, 1)), reader)
                except (duckdb.Error, OSError) as error:
                    raise views.explained(error) from error

            try:
                for batch in retried(begun):
                    yield batch.rename_columns(schema.names).cast(schema)
            except (duckdb.Error, OSError) as error:
                raise views.explained(error) from error
            finally:
                if nulled := take_nulled(views.nulled):
                    log.warning(nulled)

    return pa.RecordBatchReader.from_batches(schema, batches())


NEW, GONE = "_nats_new", "_nats_gone"
"""Columns of `NewestRows.merged`: whether a row is of the objects, and whether its key is deleted."""
_FOUND, _KEPT, _HASH = "_nats_found", "_nats_kept", "_nats_hash"
"""Tables of the objects' newest rows and of earlier ones, and the first one's column of the hash of the key."""


@contextmanager
def newest_rows(request: ReadRequest, objects: Objects, latest: Latest, kept: pa.Schema) -> Iterator[NewestRows]:
    """Find the newest rows of these objects, of which there may be none, with the columns of earlier rows too.

    Raises JetcaptureError, also in the block.
    """
    import duckdb

    with archive_views(remote=not request.files.local) as (connection, views):
        try:
            if objects:
                plan = request.plan(objects, besides=kept, for_sql=True)
                views.check(plan, latest)
                views.create_latest(LATEST, plan, replace(latest, deleted=None))
            yield NewestRows(connection, latest, latest.lives(request.files, request.stream), found=bool(objects))
        except duckdb.Error as error:
            raise views.explained(error) from error


class NewestRows:
    """The newest rows of some objects. Each key is in one of several buckets, by its hash."""

    def __init__(self, connection: DuckDBPyConnection, latest: Latest, lives: Sequence[int], *, found: bool) -> None:
        self._connection, self._latest, self._lives, self._found = connection, latest, lives, found
        self._by = ", ".join(f"({expression})" for expression in latest.by)
        self.count = 0
        """Their number."""
        if found:
            connection.execute(f"CREATE TEMP TABLE {_FOUND} AS SELECT *, hash({self._by}) AS {_HASH} FROM {LATEST}")
            ((self.count,),) = connection.execute(f"SELECT count(*) FROM {_FOUND}").fetchall()

    def schema(self, kept: pa.Schema) -> pa.Schema:
        """Return the columns of `merged`, without its own, for earlier rows with these ones."""
        if not self._found:
            return kept
        return self._merged("false", kept.empty_table()).drop_columns([NEW, GONE]).schema

    def same_hashes(self, kept: pa.Schema) -> bool:
        """Whether the key has the same types in `merged` and in earlier rows: others have other hashes."""
        self._connection.register(_KEPT, kept.empty_table())
        key = f"SELECT {self._by} FROM"
        return not self._found or (
            self._connection.sql(f"{key} {_KEPT}").types == self._connection.sql(f"{key} {_FOUND}").types
        )

    def buckets(self, count: int) -> set[int]:
        """Return the buckets, of `count`, that have rows."""
        buckets = f"SELECT DISTINCT ({_HASH} % {count})::INTEGER FROM {_FOUND}"
        return {bucket for (bucket,) in self._connection.execute(buckets).fetchall()} if self._found else set()

    def merged(self, bucket: int, count: int, kept: pa.Table) -> pa.Table:
        """Return the newest rows of a bucket, of `count`, among these and earlier ones, ordered by key."""
        return self._merged(f"{_HASH} % {count} = {bucket}", kept)

    def _merged(self, condition: str, kept: pa.Table) -> pa.Table:
        sources = []
        if kept.column_names:
            self._connection.register(_KEPT, kept)
            sources.append(f"SELECT *, false AS {NEW} FROM {_KEPT}")
        if self._found:
            sources.append(f"SELECT * EXCLUDE ({_HASH}), true AS {NEW} FROM {_FOUND} WHERE {condition}")
        rows = " UNION ALL BY NAME ".join(sources)
        names = self._connection.sql(f"SELECT * FROM ({rows}) LIMIT 0").columns
        order = " DESC, ".join(order_of(self._latest, self._lives, several_rows=layout.ROW in names))
        merged: Any = self._connection.sql(
            f"SELECT *, ({self._latest.deleted or 'false'}) IS TRUE AS {GONE} FROM ({rows}) "
            # of two copies of a row the earlier one, which is not new
            f"QUALIFY row_number() OVER (PARTITION BY {self._by} ORDER BY {order} DESC, {NEW}) = 1 ORDER BY {self._by}"
        )
        table: pa.Table = merged.to_arrow_table()
        return table
