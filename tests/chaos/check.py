"""Whether the two promises were kept: nothing acknowledged is missing, and nothing is read twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from tests.chaos.archive import WATERMARK, Archive, objects
from tests.chaos.ledger import ID, Ledger, Removal, digest

_NEVER = 1 << 62
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ODD = np.uint64(0x9E3779B97F4A7C15)
Column = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found; `problems` are broken promises, one line each."""

    acknowledged: int
    excused: int
    objects: int
    rows: int
    messages: int
    copies: int
    """Rows that a reader drops because it has read the message already."""
    present: tuple[int, int]
    """Messages and copies of the stream that is there now: it may have been created again."""
    slowest: float
    """Seconds from a message's publication to its first copy in the archive, at most."""
    watermarks: int
    problems: list[str] = field(default_factory=list)


class Mark(NamedTuple):
    """A watermark as it was seen."""

    created: str
    """The stream's creation."""
    seq: int
    time: int
    """In microseconds since the epoch."""
    at: float
    """When it was seen first, in seconds since the epoch."""

    def __str__(self) -> str:
        return f"sequence {self.seq}, time {self.time}, of the stream created at {self.created}"


class Watermarks:
    """Looks at the watermark for as long as a run lasts."""

    def __init__(self, archive: Archive) -> None:
        self.seen: list[Mark] = []
        self.first: dict[ObjectName, int] = {}
        """The number of the first watermark beside which an object was seen."""
        self._archive = archive

    def look(self) -> None:
        """Read it once, if it can be read."""
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                content = json.loads(self._archive.read(WATERMARK))
            except Exception as error:
                if type(error).__name__ == "NoSuchKey":
                    return
                raise
            mark = Mark(content["stream_created"], content["seq"], _microseconds(content["time"]), time.time())
            if not self.seen or self.seen[-1][:3] != mark[:3]:
                self.seen.append(mark)
                for name in objects(self._archive)[0]:
                    self.first.setdefault(name, len(self.seen) - 1)


@dataclass(frozen=True)
class _Rows:
    """All rows of the archive and its quarantine: one element a row."""

    seqs: Column
    times: Column
    digests: Digests
    stored: npt.NDArray[np.float64]
    """When the object was written, in seconds since the epoch."""
    beside: Column
    """The first watermark that was seen beside the object."""
    read: npt.NDArray[np.bool_]
    """Whether a reader that goes by the names' rule returns the row."""


def check(archive: Archive, ledger: Ledger, marks: Watermarks, created: list[str]) -> Verdict:
    """Hold the archive against the ledger, when no fault is left and everything is acknowledged.

    `created` says when the stream was created, and created again, as the server writes it.
    """
    found, foreign = objects(archive)
    problems = [f"a reader cannot know what this is: {path}" for path in foreign]
    rows = _rows(archive, found, marks.first, problems)
    problems += _missing(ledger, rows)
    problems += _twice(rows)
    problems += _invented(ledger, rows)
    problems += _broken_watermarks(marks.seen, rows, created, ledger.removals)
    first = _first_copies(rows, rows.stored)
    now = rows.times >= _microseconds(created[-1])
    return Verdict(
        acknowledged=len(ledger),
        excused=int(ledger.excused.sum()),
        objects=len(found),
        rows=len(rows.seqs),
        messages=len(first),
        present=(int(now[first].sum()), int(now.sum() - now[first].sum())),
        copies=int((~rows.read).sum()),
        slowest=float((rows.stored - rows.times / 1e6)[first].max()) if len(first) else 0.0,
        watermarks=len(marks.seen),
        problems=problems,
    )


def _rows(archive: Archive, found: dict[ObjectName, float], first: dict[ObjectName, int], problems: list[str]) -> _Rows:
    parts: list[tuple[Any, ...]] = []
    with ThreadPoolExecutor(4) as threads:
        for cluster in layout.clusters(found):
            tables = list(threads.map(lambda name: _columns(archive, name, problems), cluster))
            seqs, times, digests = (np.concatenate(column) for column in zip(*tables, strict=True))
            sizes = [len(table[0]) for table in tables]
            stored = np.repeat([found[name] for name in cluster], sizes)
            beside = np.repeat([first.get(name, _NEVER) for name in cluster], sizes)
            read = np.ones(len(seqs), np.bool_)
            if len(cluster) > 1:
                read[:] = False
                read[_distinct(seqs, times)] = True
            parts.append((seqs, times, digests, stored, beside, read))
    if not parts:
        kinds: tuple[Any, ...] = (np.int64, np.int64, np.uint64, np.float64, np.int64, np.bool_)
        return _Rows(*(np.zeros(0, kind) for kind in kinds))
    return _Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _columns(archive: Archive, name: ObjectName, problems: list[str]) -> tuple[Any, ...]:
    """Sequences, times in microseconds, digests."""
    wanted = [layout.SEQ, layout.TIMESTAMP, layout.SUBJECT, layout.HEADERS, layout.PAYLOAD]
    try:
        table = pq.ParquetFile(pa.BufferReader(archive.read(name.path))).read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        problems.append(f"damaged: {name.path}: {error}")
        return tuple(np.zeros(0, kind) for kind in (np.int64, np.int64, np.uint64))
    if table.num_rows != name.rows:
        problems.append(f"{name.path} has {table.num_rows} rows")
    ids = pc.list_element(pc.map_lookup(table[layout.HEADERS], ID, "first"), 0)
    contents = zip(
        table[layout.SUBJECT].cast(pa.binary()).to_pylist(),
        ids.cast(pa.binary()).to_pylist(),
        table[layout.PAYLOAD].to_pylist(),
        strict=True,
    )
    digests = np.fromiter((digest(*content) for content in contents), np.uint64, table.num_rows)
    times = table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
    return table[layout.SEQ].to_numpy(), times, digests


def _distinct(seqs: Column, times: Column) -> Column:
    """Where each identity stands first."""
    return np.unique(np.stack((seqs, times)), axis=1, return_index=True)[1]


def _first_copies(rows: _Rows, age: npt.NDArray[Any]) -> Column:
    """For each identity, in the order of times, the row of the least `age`."""
    order = np.lexsort((age, rows.seqs, rows.times))
    seqs, times = rows.seqs[order], rows.times[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (seqs[1:] != seqs[:-1]) | (times[1:] != times[:-1])
    found: Column = order[first]
    return found


def _shown(seqs: Iterable[int]) -> str:
    listed = sorted(int(seq) for seq in seqs)
    return ", ".join(map(str, listed[:10])) + (f", … {listed[-1]}" if len(listed) > 10 else "")


def _both(seqs: Column, digests: Digests) -> Digests:
    """One number for a sequence and a digest."""
    return seqs.astype(np.uint64) * _ODD ^ digests


def _missing(ledger: Ledger, rows: _Rows) -> list[str]:
    """Acknowledged messages that the archive does not have under their sequence with their content."""
    missing = ~np.isin(_both(ledger.seqs, ledger.digests), _both(rows.seqs, rows.digests)) & ~ledger.excused
    if not missing.any():
        return []
    lost = ledger.seqs[missing]
    altered = np.isin(lost, rows.seqs)
    return [
        f"{len(part)} messages {what}: {_shown(part)}"
        for what, part in (("are lost", lost[~altered]), ("have another content", lost[altered]))
        if len(part)
    ]


def _twice(rows: _Rows) -> list[str]:
    """Messages that a reader counts more than once."""
    seqs, times = rows.seqs[rows.read], rows.times[rows.read]
    again = len(seqs) - len(_distinct(seqs, times))
    if not again:
        return []
    order = np.lexsort((times, seqs))
    same = (np.diff(seqs[order]) == 0) & (np.diff(times[order]) == 0)
    return [f"{again} messages are read twice: {_shown(seqs[order][1:][same])}"]


def _invented(ledger: Ledger, rows: _Rows) -> list[str]:
    """What the archive has although no server ever acknowledged it."""
    extra = ~np.isin(rows.digests, ledger.digests)
    return [f"{extra.sum()} rows were never published: {_shown(rows.seqs[extra])}"] if extra.any() else []


def _broken_watermarks(
    marks: Sequence[Mark], rows: _Rows, created: list[str], removals: Sequence[Removal]
) -> list[str]:
    """Watermarks that moved backward, or promised what was not there beside them.

    When a consumer selects more than before, or is created again, the time starts over, and maybe the position: at 0,
    or where the last purge ended. A watermark after a removal does not promise what was removed.
    """
    problems = []
    first = _first_copies(rows, rows.beside)
    seqs, times, beside = rows.seqs[first], rows.times[first], rows.beside[first]
    eras = np.searchsorted([_microseconds(text) for text in created], times, "right") - 1
    promised = np.ones(len(seqs), np.bool_)
    to_come = sorted(removals, key=lambda removal: removal.at, reverse=True)
    purged: dict[str, int] = {}
    by_time, by_seq = _Latest(times, beside), _by_seq(created, eras, seqs, beside)
    for index, mark in enumerate(marks):
        while to_come and to_come[-1].at <= mark.at:
            removal = to_come.pop()
            promised &= (eras != removal.era) | ~_is_among(seqs, removal.seqs)
            if isinstance(removal.seqs, range):
                purged[created[removal.era]] = removal.seqs[-1]
            by_time = _Latest(times[promised], beside[promised])
            by_seq = _by_seq(created, eras[promised], seqs[promised], beside[promised])
        before = marks[index - 1] if index else mark
        starts_over = mark.time == 0 and (mark.seq in (0, purged.get(mark.created)) or mark.seq >= before.seq)
        if mark.created == before.created and (mark.seq < before.seq or mark.time < before.time) and not starts_over:
            problems.append(f"the watermark moved backward: from {before} to {mark}")
        if max(by_seq[mark.created].up_to(mark.seq), by_time.up_to(mark.time)) > index:
            problems.append(f"the watermark promised what was not stored yet: {mark}")
    return problems


def _is_among(seqs: Column, removed: range | set[int]) -> npt.NDArray[np.bool_]:
    if isinstance(removed, range):
        return (seqs >= removed.start) & (seqs < removed.stop)
    return np.isin(seqs, list(removed))


def _by_seq(created: list[str], eras: Column, seqs: Column, values: Column) -> dict[str, _Latest]:
    """For each creation of the stream, the greatest of `values` up to a sequence."""
    return {text: _Latest(seqs[eras == era], values[eras == era]) for era, text in enumerate(created)}


class _Latest:
    """The greatest of `values` up to a place."""

    def __init__(self, places: Column, values: Column) -> None:
        order = np.argsort(places, kind="stable")
        self._places, self._values = places[order], np.maximum.accumulate(values[order])

    def up_to(self, place: int) -> int:
        """Of those whose place is not beyond `place`; -1 where there is none."""
        within = int(np.searchsorted(self._places, place, "right"))
        return int(self._values[within - 1]) if within else -1


def _microseconds(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
