"""Read the newest row of each key with DuckDB, as Arrow batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import Columns, listed, outputs, take_nulled
from jetcapture_py.reading.duckdb import LATEST, archive_views
from jetcapture_py.reading.plan import Dedupe, ReadRequest
from jetcapture_py.reading.selection import Keys, Latest, Moment, Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import open_archive

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
    named = [name for name in table.names if columns(name)] if callable(columns) else columns and listed(columns)
    chosen = outputs(table.names, named)
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
                    rows = connection.table(LATEST).select(*(duckdb.ColumnExpression(name) for _, name in chosen))
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
