"""Engines that read an archive, and the one check of what they read: exactly the rows that the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import pyarrow as pa
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from jetcapture_py.reading.plan import Dedupe
from jetcapture_py.reading.selection import Selection
from tests.support.random_archives import KEYS, Message, RandomArchive, comparable

MICROSECOND = timedelta(microseconds=1)
EVERYTHING = Selection()


class Engine(Protocol):
    """Reads an archive or its quarantine."""

    def read(
        self,
        archive: RandomArchive,
        *,
        selection: Selection = EVERYTHING,
        quarantine: bool = False,
        columns: Sequence[str] | None = None,
        dedupe: Dedupe = "auto",
    ) -> pa.Table:
        """Return the selected rows, with all columns or these."""


def check_reads(drawn: Any, archive: RandomArchive, engines: Sequence[Engine]) -> None:
    """Check that every engine returns every message once, with its values, whatever is selected."""
    for bad in sorted({message.bad for message in archive.messages}):
        expected = comparable(archive.rows(bad=bad))
        tables = [engine.read(archive, quarantine=bad) for engine in engines]
        for engine, table in zip(engines, tables, strict=True):
            assert comparable(table.to_pylist()) == expected, (engine, archive.log)
            assert table.schema == tables[0].schema, engine
            assert {name.casefold() for name in table.schema.names} == {layout.DELIVERED, *expected[0]}, engine
        names = [name for name in tables[0].schema.names if name != layout.DELIVERED]  # which copies differ in
        columns = drawn.draw(some.lists(some.sampled_from(names), min_size=1, unique=True))
        for engine, table in zip(engines, tables, strict=True):
            narrow = engine.read(archive, quarantine=bad, columns=columns)
            assert narrow.schema.names == columns, engine
            assert sorted(map(str, narrow.to_pylist())) == sorted(map(str, table.select(columns).to_pylist())), engine
    if all(message.bad for message in archive.messages):
        return
    selection = drawn.draw(selections(archive))
    rows = [row for message, row in archive.pairs() if selected(message, selection)]
    chosen = [engine.read(archive, selection=selection).to_pylist() for engine in engines]
    for engine, table in zip(engines, chosen, strict=True):
        assert identities(table) == identities(rows), (engine, selection, archive.log)
        assert comparable(table) == comparable(chosen[0]), (engine, selection)
        compared = engine.read(archive, dedupe="full").to_pylist()
        assert identities(compared) == identities(archive.rows()), (engine, archive.log)


def identities(rows: list[dict[str, Any]]) -> list[tuple[int, datetime, int]]:
    """Sequence, time and position of each row, in order."""
    return [(row[layout.SEQ], row[layout.TIMESTAMP], row.get(layout.ROW) or 0) for row in comparable(rows)]


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
    times = {moment for message in archive.messages for moment in (message.timestamp, message.time) if moment}
    bounds: some.SearchStrategy[datetime | None] = some.none() | some.sampled_from(
        sorted(moment + step for moment in times for step in (-MICROSECOND, timedelta(), MICROSECOND))
    )
    keys = draw(some.none() | some.lists(some.sampled_from(KEYS), min_size=1, unique=True))
    names = ("start", "end", "event_start", "event_end")
    return Selection(keys=keys, **{name: draw(bounds) for name in names})
