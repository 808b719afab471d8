"""Arrow and DuckDB return of random archives exactly the rows that a model without our code expects.

Spark does so on a sample, in `integration/spark/reading/test_random_archives.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
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
from tests.support.examples import examples
from tests.support.random_archives import KEYS, STREAM, Message, RandomArchive, archives, comparable

MICROSECOND = timedelta(microseconds=1)


Read = Callable[[str, Sequence[str] | None], pa.Table]
"""Reads the view `archive` or `quarantine`, and all of its columns or these."""


@contextmanager
def arrow(archive: RandomArchive, selection: Selection) -> Iterator[Read]:
    def read(view: str, columns: Sequence[str] | None) -> pa.Table:
        quarantine = view == "quarantine"
        return read_archive(
            archive.url, STREAM, quarantine=quarantine, columns=columns, **selection.arguments()
        ).read_all()

    yield read


@contextmanager
def in_duckdb(archive: RandomArchive, selection: Selection) -> Iterator[Read]:
    with tempfile.TemporaryDirectory() as links, duckdb.connect(config={"threads": 1}) as connection:
        views = views_of(connection, archive, links)

        def read(view: str, columns: Sequence[str] | None) -> pa.Table:
            create(views, selection, view)
            names = "*" if columns is None else ", ".join(f'"{name}"' for name in columns)
            return connection.sql(f"SELECT {names} FROM {view}").to_arrow_table()

        yield read


def views_of(connection: duckdb.DuckDBPyConnection, archive: RandomArchive, links: str) -> ArchiveViews:
    connection.execute("SET TimeZone = 'UTC'")
    return ArchiveViews(connection, ArchiveFiles(archive.url, {}), Path(links))


def create(views: ArchiveViews, selection: Selection, view: str = "archive", dedupe: Dedupe = "auto") -> None:
    quarantine = view == "quarantine"
    request = ReadRequest(files=views.files, stream=STREAM, selection=selection, dedupe=dedupe, quarantine=quarantine)
    views.create(view, request.plan(for_sql=True))


def selected(message: Message, selection: Selection) -> bool:
    time = message.timestamp if message.time is None or message.bad else message.time
    return (
        (selection.start is None or message.timestamp >= selection.start)
        and (selection.end is None or message.timestamp < selection.end)
        and (selection.event_start is None or time >= selection.event_start)
        and (selection.event_end is None or time < selection.event_end)
        and (selection.keys is None or message.key in selection.keys)
    )


@some.composite
def selections(draw: some.DrawFn, archive: RandomArchive) -> Selection:
    """Bounds at or beside messages, and keys."""
    times = {moment for message in archive.messages for moment in (message.timestamp, message.time) if moment}
    bounds: some.SearchStrategy[datetime | None] = some.none() | some.sampled_from(
        sorted(moment + step for moment in times for step in (-MICROSECOND, timedelta(), MICROSECOND))
    )
    keys = draw(some.none() | some.lists(some.sampled_from(KEYS), min_size=1, unique=True))
    names = ("start", "end", "event_start", "event_end")
    return Selection(keys=keys, **{name: draw(bounds) for name in names})


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


def identities(rows: list[dict[str, Any]]) -> list[tuple[int, datetime, int]]:
    return [(row[layout.SEQ], row[layout.TIMESTAMP], row.get(layout.ROW) or 0) for row in comparable(rows)]


@examples(cost=2)
@given(some.data())
def test_every_message_is_read_once_with_its_values(drawn: Any) -> None:
    with ExitStack() as stack:
        archive = drawn.draw(archives(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        engines = [stack.enter_context(engine(archive, Selection())) for engine in (arrow, in_duckdb)]
        for bad in sorted({message.bad for message in archive.messages}):
            view, expected = "quarantine" if bad else "archive", comparable(archive.rows(bad=bad))
            tables = [read(view, None) for read in engines]
            assert [comparable(table.to_pylist()) for table in tables] == [expected, expected]
            assert {name.casefold() for name in tables[0].schema.names} == {layout.DELIVERED, *expected[0]}
            assert tables[0].schema == tables[1].schema
            columns = drawn.draw(some.lists(some.sampled_from(tables[0].schema.names), min_size=1, unique=True))
            for table, read in zip(tables, engines, strict=True):
                narrow = read(view, columns)
                assert narrow.schema.names == columns
                assert sorted(map(str, narrow.to_pylist())) == sorted(map(str, table.select(columns).to_pylist()))
        if all(message.bad for message in archive.messages):
            return
        selection = drawn.draw(selections(archive))
        rows = [row for message, row in archive.pairs() if selected(message, selection)]
        engines = [stack.enter_context(engine(archive, selection)) for engine in (arrow, in_duckdb)]
        tables = [read("archive", None) for read in engines]
        assert [identities(table.to_pylist()) for table in tables] == [identities(rows)] * 2
        assert comparable(tables[0].to_pylist()) == comparable(tables[1].to_pylist())
        compared = read_archive(archive.url, STREAM, dedupe="full").read_all()
        assert identities(compared.to_pylist()) == identities(archive.rows())


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
            create(views_of(connection, archive, links), Selection(), dedupe=dedupe)
            for form in FORMS:
                condition, fulfilled = drawn.draw(filters(archive))
                same = " AND ".join(f"archive.{name} IS NOT DISTINCT FROM chosen.{name}" for name in PARTITIONS)
                sql = form.format(condition, names=", ".join(PARTITIONS), same=same)
                rows = connection.sql(sql).to_arrow_table().to_pylist()
                expected = [row for message, row in archive.pairs() if fulfilled(message)]
                assert identities(rows) == identities(expected), (dedupe, sql)
