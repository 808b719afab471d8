"""Arrow and DuckDB return of random archives exactly the rows that a model without our code expects.

Spark does so on a sample, in `integration/spark/reading/test_random_archives.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.reading.duckdb import ArchiveViews
from jetcapture_py.reading.plan import Dedupe, ReadRequest
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.engines import EVERYTHING, check_reads, identities
from tests.support.examples import examples
from tests.support.random_archives import STREAM, Message, RandomArchive, archives


class Arrow:
    """`read_archive` without Spark."""

    def read(self, archive: RandomArchive, *, selection: Selection = EVERYTHING, **how: Any) -> pa.Table:
        return read_archive(archive.url, STREAM, **selection.arguments(), **how).read_all()


class InDuckDB:
    """Views of `jetcapture query`."""

    def read(self, archive: RandomArchive, *, columns: Sequence[str] | None = None, **how: Any) -> pa.Table:
        with tempfile.TemporaryDirectory() as links, duckdb.connect(config={"threads": 1}) as connection:
            create_view(connection, archive, links, **how)
            names = "*" if columns is None else ", ".join(f'"{name}"' for name in columns)
            return connection.sql(f"SELECT {names} FROM archive").to_arrow_table()


def create_view(connection: duckdb.DuckDBPyConnection, archive: RandomArchive, links: str, **how: Any) -> None:
    connection.execute("SET TimeZone = 'UTC'")
    files = ArchiveFiles(archive.url, {})
    request = ReadRequest(files=files, stream=STREAM, **{"selection": EVERYTHING, **how})
    ArchiveViews(connection, Path(links)).create("archive", request.plan(for_sql=True))


@examples(cost=2)
@given(some.data())
def test_every_message_is_read_once_with_its_values(drawn: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        check_reads(drawn, drawn.draw(archives(Path(directory))), [Arrow(), InDuckDB()])


PARTITIONS = layout.PARTITIONS
DEDUPES: tuple[Dedupe, ...] = ("auto", "full")
FORMS = (
    "SELECT * FROM archive WHERE {}",
    "SELECT archive.* FROM archive JOIN (SELECT DISTINCT {names} FROM archive WHERE {}) AS chosen ON {same}",
    "SELECT * FROM archive WHERE ({names}) IN (SELECT DISTINCT ({names}) FROM archive WHERE {})",
    "SELECT * FROM archive WHERE NOT coalesce(NOT ({}), true)",
)
"""Statements that return exactly the rows for which a condition on these columns is true."""


def partitions(message: Message) -> tuple[str | None, str, str]:
    at = datetime.fromtimestamp(message.bucket, UTC)
    return message.key, f"{at:%Y-%m-%d}", f"{at:%H}"


@some.composite
def filters(draw: some.DrawFn, archive: RandomArchive) -> tuple[str, Callable[[Message], bool]]:
    """A condition on key, date and hour in SQL, and whether a message fulfills it."""
    number = draw(some.integers(0, 2))
    name, values = PARTITIONS[number], {partitions(message)[number] for message in archive.messages}
    value = draw(some.sampled_from(sorted(values, key=str)))
    if value is None:
        return f"{name} IS NULL", lambda message: message.key is None
    text = "'" + value + "'"
    conditions: dict[str, Callable[[str], bool]] = {
        f"{name} = {text}": lambda other: other == value,
        f"{name} <> {text}": lambda other: other != value,
        f"{name} >= {text}": lambda other: other >= value,
        f"{name} IN ({text}, 'eu', '00')": lambda other: other in (value, "eu", "00"),
    }
    sql = draw(some.sampled_from(sorted(conditions)))

    def fulfilled(message: Message) -> bool:
        other = partitions(message)[number]
        return other is not None and conditions[sql](other)

    return sql, fulfilled


@examples(cost=2)
@given(some.data())
def test_filters_in_sql_on_key_date_and_hour_neither_lose_nor_double_a_row(drawn: Any) -> None:
    with ExitStack() as stack:
        archive = drawn.draw(archives(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        if all(message.bad for message in archive.messages):
            return
        for dedupe in DEDUPES:
            links = stack.enter_context(tempfile.TemporaryDirectory())
            connection = stack.enter_context(duckdb.connect(config={"threads": 1}))
            create_view(connection, archive, links, dedupe=dedupe)
            for form in FORMS:
                condition, fulfilled = drawn.draw(filters(archive))
                same = " AND ".join(f"archive.{name} IS NOT DISTINCT FROM chosen.{name}" for name in PARTITIONS)
                sql = form.format(condition, names=", ".join(PARTITIONS), same=same)
                rows = connection.sql(sql).to_arrow_table().to_pylist()
                expected = [row for message, row in archive.pairs() if fulfilled(message)]
                assert identities(rows) == identities(expected), (dedupe, sql)
