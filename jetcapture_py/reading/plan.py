"""Plan how to read an archive, as a value that Spark, Arrow and DuckDB render: every message once, as one table.

Object names say which objects may share messages (see `layout`). Others are read as they are; those that may share
messages are compared by sequence (see `overlaps`), or row by row. Objects whose column types differ still form one
table (see `columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import floor
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import MAX_INTERVAL, Bundles, ObjectName
from jetcapture_py.archive.overlaps import Identities, Range, resolve
from jetcapture_py.archive.schema import EXACT
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import Columns, Table, listed
from jetcapture_py.reading.selection import Selection, check_stream
from jetcapture_py.store.archive import IF_DAMAGED, ArchiveFiles, File, retried
from jetcapture_py.text import one_line, plural

Dedupe = Literal["auto", "full", "none"]
Keep = Callable[[Any, Any], Any]
"""Returns a mask of messages: sequences, and timestamps in microseconds, as int64 arrays. It can be pickled."""
Times = tuple[datetime, datetime] | None
"""The first and last `_nats_timestamp` of an object; None without statistics."""

_BUCKET_DIGITS = len("20260501T120000")
_YEAR_1000, _YEAR_9999 = -30_610_224_000, 253_370_764_800
_EVERYTHING = Selection()
_AFTER_ALL = "~"
"""Sorts after every object's name."""
_TAIL = 1 << 14
"""Bytes that are read first from the end of an object; almost every footer is shorter."""
_QUARANTINE = pa.schema(
    [
        (layout.STREAM, pa.string()),
        (layout.SUBJECT, pa.string()),
        (layout.SEQ, pa.int64()),
        (layout.TIMESTAMP, pa.timestamp("us", "UTC")),
        (layout.NANOS, pa.int16()),
        (layout.DELIVERED, pa.int32()),
        (layout.HEADERS, pa.map_(pa.string(), pa.list_(pa.string()))),
        (layout.PAYLOAD, pa.binary()),
        (layout.STAGE, pa.string()),
        (layout.ERROR, pa.string()),
        (layout.RAW_HEADERS, pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects of a stream or its quarantine."""

    objects: list[ObjectName]
    others: list[ObjectName]
    """Objects in other formats than Parquet."""
    files: Mapping[ObjectName, File]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """What footers say."""

    schemas: Sequence[pa.Schema]
    """The distinct schemas."""
    schema_of: Mapping[ObjectName, int]
    """The index of each object's schema."""
    bundles: Bundles
    intervals: Mapping[ObjectName, int]
    """The lengths of the buckets, in seconds."""
    times: Mapping[ObjectName, Times]
    """The times of objects in buckets of another time, if they were asked for."""


class Bound(NamedTuple):
    """A condition on rows: the first of `columns` that is not null is from `start` (inclusive) to `end` (exclusive)."""

    columns: tuple[str, ...]
    start: datetime | None
    end: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read of an archive. Without matching objects, none are read, and the table has the columns of the last
    object, or of a quarantine.

    Of objects in bundles, only rows with one of the keys of `selection` belong to the result; of all, only rows within
    `bounds` and the sequences of `selection`, and those for which `keep` is true.
    """

    files: ArchiveFiles
    directory: str
    """The objects' directory, relative to the archive's root."""
    quarantine: bool
    selection: Selection
    listing: Listing
    table: Table
    schema_of: Mapping[ObjectName, int]
    """The index of each object's schema in `table`."""
    bundles: Bundles
    whole: Sequence[ObjectName]
    """Objects to read completely."""
    parts: Mapping[ObjectName, Sequence[Range]]
    """Objects to read only in ranges of sequences (inclusive)."""
    shared: Sequence[ObjectName]
    """Objects whose rows are compared: of those that are equal in `identity`, one belongs to the result."""
    identity: Sequence[str]
    """Columns; `_nats_row`, if the table has it, is one that counts as 0 where it is null."""
    outputs: Sequence[tuple[str, str]]
    """The columns of the result: names as they were asked for, and the table's."""
    keep: Keep | None = None
    """Chooses messages; None for all. Spark's own reader does not call it."""

    @property
    def names(self) -> list[ObjectName]:
        return [*self.whole, *self.parts, *self.shared]

    @property
    def bounds(self) -> list[Bound]:
        """The conditions on the rows' times."""
        selection = self.selection
        bounds = []
        if selection.start is not None or selection.end is not None:
            bounds.append(Bound((layout.TIMESTAMP,), selection.start, selection.end))
        if selection.by_event:
            names = tuple(name for name in (layout.TIME, layout.TIMESTAMP) if name in self.table.columns)
            bounds.append(Bound(names, selection.event_start, selection.event_end))
        return bounds


def plan(
    files: ArchiveFiles,
    stream: str,
    selection: Selection | None = None,
    *,
    columns: Columns | None = None,
    dedupe: Dedupe = "auto",
    quarantine: bool = False,
    parquet_only: bool = False,
    unread: dict[str, str] | None = None,
    table: Table | None = None,
    listed_before: Listing | None = None,
    before: pa.Schema | None = None,
) -> ReadPlan:
    """Plan how to read the archive of `stream`, or its quarantine, as of now: list it, and read footers.

    The other arguments are those of `read_archive`. Objects are read as a given `table`, or as that of their own
    columns. An earlier list is used at first; objects that are gone from it are looked for in a new one. `before` are
    the columns of an archive without objects, which is an error otherwise. Raises JetcaptureError, unless `unread`
    takes the columns that cannot be read, with the reason.
    """
    if dedupe not in ("auto", "full", "none"):
        raise JetcaptureError(f"dedupe={dedupe!r}: expected auto, full or none")
    check_stream(stream)
    columns = columns if columns is None or callable(columns) else listed(columns)
    archive = _Archive(
        files=files,
        stream=stream,
        quarantine=quarantine,
        selection=selection or Selection(),
        columns=columns,
        dedupe=dedupe,
    )
    listings = [] if listed_before is None else [listed_before]

    def planned() -> ReadPlan:
        listing = listings.pop() if listings else list_objects(files, archive.directory, archive.selection)
        if not parquet_only:
            archive.refuse_others(listing, archive.selection)
        if table is not None:
            return archive.plan_as(table, listing)
        return archive.plan(listing, unread, before)

    return retried(planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """What is to be read of a stream's archive or quarantine."""

    files: ArchiveFiles
    stream: str
    quarantine: bool
    selection: Selection
    columns: Columns | None
    dedupe: Dedupe

    @property
    def directory(self) -> str:
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    def plan(self, listing: Listing, unread: dict[str, str] | None, before: pa.Schema | None) -> ReadPlan:
        """Plan as of a listing. Raises VanishedError when objects have just changed."""
        names, facts = self._chosen(listing)
        last: list[ObjectName] = []
        if not names:  # no rows, with the columns that the last object has
            if not listing.objects or self.selection != _EVERYTHING:
                listing = list_objects(self.files, self.directory)
            last = sorted(listing.objects, key=lambda name: name.bucket)[-1:]
            if not last:
                self.refuse_others(listing, Selection())
                if before is None:
                    self._refuse_nothing()
            facts = read_facts(self.files, last, listing)
        used = {schema: at for at, schema in enumerate(dict.fromkeys(facts.schema_of[name] for name in names or last))}
        schemas = [facts.schemas[schema] for schema in used] or [before or _QUARANTINE]
        stored = [name for schema in schemas for name in schema.names if name != layout.KEY]
        needed = _with_time(self.columns) if self.selection.by_event else self.columns
        inexact = inexact_columns(self.files, names, listing, facts)
        table = Table(schemas, self.quarantine, needed, unread, inexact)
        schema_of = {name: used[facts.schema_of[name]] for name in names}
        known = dict.fromkeys([*stored, *table.partitions])
        return self._planned(listing, facts, table, schema_of, outputs(table.schema.names, self.columns, known))

    def plan_as(self, table: Table, listing: Listing) -> ReadPlan:
        """Plan to read objects as a table that was planned before. Raises VanishedError."""
        names, facts = self._chosen(listing)
        narrow = Listing(objects=names, others=[], files={name: listing.files[name] for name in names})
        return self._planned(narrow, facts, table, dict.fromkeys(names, 0), outputs(table.schema.names, self.columns))

    def _planned(
        self,
        listing: Listing,
        facts: ObjectFacts,
        table: Table,
        schema_of: Mapping[ObjectName, int],
        columns: Sequence[tuple[str, str]],
    ) -> ReadPlan:
        whole, parts, shared = self._divided(list(schema_of), listing, facts, table)
        return ReadPlan(
            files=self.files,
            directory=self.directory,
            quarantine=self.quarantine,
            selection=self.selection,
            listing=listing,
            table=table,
            schema_of=schema_of,
            bundles=facts.bundles,
            whole=whole,
            parts=parts,
            shared=shared,
            # copies share key and bucket, and a filter on these can then pass the comparison
            identity=[*layout.IDENTITY, *(table.partitions if self.dedupe == "auto" else ())],
            outputs=columns,
        )

    def _divided(
        self, names: list[ObjectName], listing: Listing, facts: ObjectFacts, table: Table
    ) -> tuple[list[ObjectName], Mapping[ObjectName, Sequence[Range]], list[ObjectName]]:
        """Divide objects into those to read completely, in parts, and those to compare row by row."""
        if self.dedupe == "none":
            return names, {}, []
        if self.dedupe == "full":
            return [], {}, names
        whole, shared = layout.split_overlapping(names, facts.bundles)
        if not shared or table.several_rows:
            return whole, {}, shared
        resolved = resolve(shared, lambda names: read_identities(self.files, names, listing), facts.bundles)
        if len({name.path.rpartition("/")[2] for name in resolved.parts}) < len(resolved.parts):
            return whole, {}, shared  # Spark knows the parts by their objects' file names
        return whole + resolved.whole, resolved.parts, resolved.unresolved

    def refuse_others(self, listing: Listing, selection: Selection) -> None:
        """Raise JetcaptureError if objects in other formats may hold messages of the selection."""
        others = within_buckets(listing.others, selection)
        if others:
            formats = ", ".join(sorted({name.suffix.removeprefix(".") for name in others}))
            many = f"{plural(len(others), 'object')} of stream {self.stream} in {formats}"
            hint = "; --parquet-only or parquet_only=True leaves them out" if listing.objects else ""
            raise JetcaptureError(f"{self.files.shown} has {many}, and only Parquet can be read{hint}")

    def _refuse_nothing(self) -> None:
        """Raise JetcaptureError for a stream without objects, unless it is the quarantine of one that is archived."""
        entries, url = self.files.names(), self.files.shown
        if self.quarantine and self.stream in entries:
            return
        quarantined = self.files.below(f"{layout.QUARANTINE}/{self.stream}")
        if not self.quarantine and any(file.name is not None for file in quarantined):
            raise JetcaptureError(
                f"the archive of stream {self.stream} under {url} has only a quarantine, of messages that could "
                "not be decoded: select FROM quarantine, or read it with quarantine=True"
            )
        if self.stream in entries:
            raise JetcaptureError(f"the archive of stream {self.stream} under {url} has no objects")
        raise no_archive(self.files, self.stream)

    def _chosen(self, listing: Listing) -> tuple[list[ObjectName], ObjectFacts]:
        """Return the objects that may hold messages of the selection, and what their footers say: by their names, and
        by their footers where the names do not say it: the time of event-time buckets, and the number of bundles."""
        start, end, keys = self.selection[:3]
        names = within_buckets(listing.objects, self.selection)
        timed = start is not None or end is not None
        facts = read_facts(self.files, names, listing, timed=timed)
        if timed:
            names = [name for name in names if _overlaps(facts.times.get(name), start, end)]
        if keys is not None:
            bundles = {number: {bundle_of(key, number) for key in keys} for number in set(facts.bundles.values())}
            names = [name for name in names if name not in facts.bundles or name.bundle in bundles[facts.bundles[name]]]
        return names, facts


def no_archive(files: ArchiveFiles, stream: str) -> JetcaptureError:
    """Return the error for a stream that is not archived."""
    return JetcaptureError(f"no archive of stream {stream} under {files.shown}{files.known_streams()}")


def _with_time(columns: Columns | None) -> Columns | None:
    """Return the columns to read for a condition on the messages' time."""
    if callable(columns):
        return lambda name: name == layout.TIME or columns(name)
    return None if columns is None else [*columns, layout.TIME]


def outputs(names: Sequence[str], columns: Columns | None, known: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return the columns of a result: their names as in `columns`, and those of `names` that they stand for.

    Raises JetcaptureError, which lists the `known` columns, if there is no such column.
    """
    if columns is None or callable(columns):
        return [(name, name) for name in names]
    folded = {name.lower(): name for name in names} | {name: name for name in names}
    unknown = next((name for name in columns if name.lower() not in folded), None)
    if unknown is not None:
        raise JetcaptureError(
            f"the archive has no column {unknown}; it has {', '.join(names if known is None else known)}"
        )
    return [(name, folded.get(name) or folded[name.lower()]) for name in columns]


def within_buckets(names: Iterable[ObjectName], selection: Selection) -> list[ObjectName]:
    """Return the objects whose buckets may reach into the selection's times, and their sequences into its own."""
    names = [name for name in names if _reaches(name, selection.event_start, selection.event_end)]
    if selection.seqs is not None:
        first, last = selection.seqs
        names = [name for name in names if name.first_seq <= last and name.last_seq >= first]
    return [name for name in names if name.event_time or _reaches(name, selection.start, selection.end)]


def _reaches(name: ObjectName, start: datetime | None, end: datetime | None) -> bool:
    if start is not None and name.bucket + MAX_INTERVAL <= start.timestamp():
        return False
    return end is None or name.bucket < end.timestamp()


def _overlaps(times: Times, start: datetime | None, end: datetime | None) -> bool:
    """Whether an object with messages of these times, None if unknown, may hold some from `start` to `end`."""
    return times is None or ((start is None or times[1] >= start) and (end is None or times[0] < end))


def list_objects(files: ArchiveFiles, directory: str, selection: Selection = _EVERYTHING) -> Listing:
    """List a stream's objects that may hold messages of a selection, by keys and buckets. Raises JetcaptureError."""
    tops = [directory]
    if selection.keys is not None:
        if directory.startswith(f"{layout.QUARANTINE}/"):
            raise JetcaptureError("the quarantine is not divided by key")
        tops = files.directories(directory, selection.keys)
    first, last = _bucket_texts(selection.start, selection.end)
    first_event, last_event = _bucket_texts(selection.event_start, selection.event_end)

    def wanted(path: str) -> bool:
        """As `within_buckets`, but without parsing the path: most objects of a large archive are of other days."""
        name = path.rpartition("/")[2]
        if name[0] in "._":
            return False
        bucket = name[:_BUCKET_DIGITS]
        if not first_event <= bucket < last_event:
            return False
        return first <= bucket < last or name[_BUCKET_DIGITS : _BUCKET_DIGITS + 1] == "E"

    visible = sorted(files.below(*tops, wanted=wanted), key=lambda file: file.path)
    named = {file.name: file for file in visible if file.name is not None}
    return Listing(
        objects=[name for name in named if name.parquet],
        others=[name for name in named if not name.parquet],
        files=named,
    )


def _bucket_texts(start: datetime | None, end: datetime | None) -> tuple[str, str]:
    """Return the first text with which names of objects from `start` to `end` can begin, and one after the last."""

    def text(seconds: float, otherwise: str) -> str:
        four_digits = _YEAR_1000 <= seconds < _YEAR_9999
        return layout.bucket_text(floor(seconds))[:_BUCKET_DIGITS] if four_digits else otherwise

    first = "" if start is None else text(start.timestamp() - MAX_INTERVAL, "")
    last = _AFTER_ALL if end is None else text(end.timestamp() + 1, _AFTER_ALL)
    return first, last


def read_facts(
    files: ArchiveFiles,
    names: Sequence[ObjectName],
    listing: Listing,
    *,
    timed: bool = False,
    broken: dict[ObjectName, str] | None = None,
    untimed: set[ObjectName] | None = None,
    reader: footer.SchemaReader | None = None,
) -> ObjectFacts:
    """Read objects' footers, once; with `timed`, also the timestamps of objects with event time.

    `untimed` takes the objects with event time in which it may be null: some were stored without it, and merged later.
    `reader` has the schemas of objects that were read before.

    Raises JetcaptureError, unless `broken` takes the objects that cannot be read, with the reason; and VanishedError if
    an object was removed or rewritten.
    """
    reader = reader or footer.SchemaReader()
    schema_of: dict[ObjectName, int] = {}
    bundles: dict[ObjectName, int] = {}
    intervals: dict[ObjectName, int] = {}
    times: dict[ObjectName, Times] = {}
    for name, data in zip(names, _footers(files, names, listing), strict=True):
        try:
            if not data:
                raise _unreadable(files, name, "not a Parquet file: no footer at its end")
            try:
                schema_of[name] = index = reader.number(data)
                schema = reader.schemas[index]
                if lacking := [column for column in _required(name) if schema.get_field_index(column) < 0]:
                    raise _unreadable(files, name, f"no column {lacking[0]}: it was not written by jetcapture")
                if timed and name.event_time:
                    times[name] = footer.bounds(footer.decoded(data), layout.TIMESTAMP)
                if untimed is not None and name.event_time and footer.may_have_nulls(footer.decoded(data), layout.TIME):
                    untimed.add(name)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(files, name, one_line(error)) from error
        except JetcaptureError as error:
            if broken is None:
                raise
            broken[name] = str(error)
            continue
        if name.bundle and (number := footer.number_in(data, layout.BUNDLES)) is not None:
            bundles[name] = number
        if (interval := footer.number_in(data, layout.INTERVAL)) is not None:
            intervals[name] = interval
    return ObjectFacts(schemas=reader.schemas, schema_of=schema_of, bundles=bundles, intervals=intervals, times=times)


def _required(name: ObjectName) -> tuple[str, ...]:
    """Return the columns without which an object is none."""
    return (layout.SEQ, layout.TIMESTAMP, layout.KEY) if name.bundle else (layout.SEQ, layout.TIMESTAMP)


def inexact_columns(
    files: ArchiveFiles, names: Sequence[ObjectName], listing: Listing, facts: ObjectFacts
) -> Collection[str]:
    """Return columns, in lower case, that are floats in some objects and in others integers that no double holds."""
    types = pa.types
    used = {number: facts.schemas[number] for number in dict.fromkeys(facts.schema_of[name] for name in names)}
    floats = {field.name.lower() for schema in used.values() for field in schema if types.is_floating(field.type)}
    mixed = {
        number: [field.name for field in schema if types.is_integer(field.type) and field.name.lower() in floats]
        for number, schema in used.items()
    }
    names = [name for name in names if mixed[facts.schema_of[name]]]
    inexact: set[str] = set()
    for name, data in zip(names, _footers(files, names, listing), strict=True):
        metadata = footer.decoded(data)
        for column in mixed[facts.schema_of[name]]:
            groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
            limits = (abs(limit) for group in groups for limit in footer.group_bounds(group, column) or ())
            if max(limits, default=0) > EXACT:
                inexact.add(column.lower())
    return inexact


def _footers(files: ArchiveFiles, names: Sequence[ObjectName], listing: Listing) -> Iterator[bytes]:
    """Yield the footer of each object; b"" for one that has none. Raises VanishedError, StoreError."""

    def read(name: ObjectName) -> bytes:
        file = listing.files[name]
        data = footer.find(lambda size: files.read(file, max(0, file.size - size)), _TAIL)
        if not data:
            files.refuse_changed(file)  # with the old size, its footer would not be found
        return data

    return files.map(read, names)


def _unreadable(files: ArchiveFiles, name: ObjectName, reason: str) -> JetcaptureError:
    return JetcaptureError(f"cannot read {files.shown}/{name.path}: {reason}; {IF_DAMAGED}")


def read_identities(files: ArchiveFiles, names: Sequence[ObjectName], listing: Listing) -> list[Identities]:
    """Read each object's sequences and timestamps. Raises StoreError."""

    def read(name: ObjectName) -> Identities:
        with files.parquet(listing.files[name]) as parquet:
            table = parquet.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
        return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

    return list(files.map(read, names))
