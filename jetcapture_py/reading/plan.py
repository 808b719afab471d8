"""Plan a read of an archive as one table, each message once. Spark, Arrow and DuckDB render the plan.

Object names show which objects may share messages (see `layout`); these are compared by sequence (see `overlaps`), or
row by row. All others are read without comparing. `Table` in `columns` decides the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.archive.info import BadObject, ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Identities, Range, resolve
from jetcapture_py.archive.schema import ENVELOPE, REPLY, STREAM_FIELD
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.columns import Columns, Table, inexact_columns, listed, outputs, read_types
from jetcapture_py.reading.selection import Selection, check_stream
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import plural

Dedupe = Literal["auto", "full", "none"]
Keep = Callable[[Seqs, Micros], Mask]
"""A predicate on messages that can be pickled."""

_EVERYTHING = Selection()
_QUARANTINE = pa.schema(
    [
        STREAM_FIELD,
        *(field for field in ENVELOPE if field.name != REPLY),
        (layout.STAGE, pa.string()),
        (layout.ERROR, pa.string()),
        (layout.RAW_HEADERS, pa.binary()),
    ]
)

Objects = Mapping[ObjectName, File]
"""Objects of a stream or its quarantine."""


class Bound(NamedTuple):
    """A condition on rows: the first non-null one of `columns` is from `start` (inclusive) to `end` (exclusive).

    The columns of a plan's bounds are times.
    """

    columns: tuple[str, ...]
    start: Any
    end: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """A read of an archive. Without matching objects, the table has the columns of the last object, or of a quarantine.

    Row filters: the keys of `selection` (bundled objects only), its sequences, `bounds`, and `keep`.
    """

    files: ArchiveFiles
    directory: str
    """The objects' directory, relative to the archive's root."""
    selection: Selection
    objects: Objects
    """The objects to read or to compare, and some that have only copies."""
    table: Table
    schema_of: Mapping[ObjectName, int]
    """The index of each object's schema in `table`."""
    whole: Sequence[ObjectName]
    """Objects to read completely."""
    parts: Mapping[ObjectName, Sequence[Range]]
    """Objects to read only in ranges of sequences (inclusive)."""
    shared: Sequence[ObjectName]
    """Objects whose rows are compared: of rows with equal `identity`, the result has one."""
    identity: Sequence[str]
    """Columns that identify a row, including `_nats_row` if the table has it (null counts as 0)."""
    outputs: Sequence[tuple[str, str]]
    """The columns of the result: requested names, and the table's names."""
    keep: Keep | None = None
    """A predicate on messages; None for all. Spark's own reader does not call it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request to read the archive of `stream`, or its quarantine; the fields are arguments of `read_archive`."""

    files: ArchiveFiles
    stream: str
    selection: Selection = _EVERYTHING
    columns: Columns | None = None
    dedupe: Dedupe = "auto"
    quarantine: bool = False
    parquet_only: bool = False
    types: Mapping[str, pa.DataType | str] | None = None
    needed: Callable[[str], bool] | None = None
    """Columns that are read besides `columns`, and are not in `outputs`."""

    def __post_init__(self) -> None:
        """Raises JetcaptureError."""
        if self.dedupe not in ("auto", "full", "none"):
            raise JetcaptureError(f"dedupe={self.dedupe!r}: expected auto, full or none")
        check_stream(self.stream)
        if self.columns is not None and not callable(self.columns):
            object.__setattr__(self, "columns", listed(self.columns))
        object.__setattr__(self, "types", read_types(self.types or {}))

    @property
    def directory(self) -> str:
        return f"{layout.QUARANTINE}/{self.stream}" if self.quarantine else self.stream

    @property
    def _read(self) -> Columns | None:
        """The columns to read."""
        columns, needed = self.columns, self.needed
        if columns is None or needed is None:
            return columns
        if callable(columns):
            return lambda name: columns(name) or needed(name)
        named = {name.lower() for name in columns}
        return lambda name: name.lower() in named or needed(name)

    def plan(
        self,
        objects: Objects | None = None,
        *,
        before: pa.Schema | None = None,
        besides: pa.Schema | None = None,
        table: Table | None = None,
        for_sql: bool = False,
    ) -> ReadPlan:
        """Plan a read of the archive's current objects: list it, and read footers. Raises JetcaptureError.

        An earlier listing `objects` is used first; if some have vanished, the archive is listed again. `before` are the
        columns of an archive without objects, which is an error otherwise. `table` has the result's columns; by
        default, they are the union of the objects' columns and those of `besides`, with `for_sql` without those that
        SQL cannot name.
        """
        lists = [] if objects is None else [objects]

        def planned() -> ReadPlan:
            listed = lists.pop() if lists else list_objects(self.files, self.directory, self.selection)
            if not self.parquet_only:
                self._refuse_others(listed, self.selection)
            infos = self._chosen(listed)
            if table is not None:
                columns = outputs(table.schema.names, self.columns)
                return self._divided(listed, infos, table, dict.fromkeys(listed, 0), columns)
            schemas = {info.schema_number: info.schema for info in infos} or {0: self._schema_of_none(listed, before)}
            inexact = inexact_columns(self.files, infos, listed)
            every = [*schemas.values(), *([] if besides is None else [besides])]
            combined = Table(every, self.quarantine, self._read, inexact, types=self.types, for_sql=for_sql)
            stored = (name for schema in every for name in schema.names if name != layout.KEY)
            columns = outputs(combined.schema.names, self.columns, dict.fromkeys([*stored, *combined.partitions]))
            index = {number: at for at, number in enumerate(schemas)}
            schema_of = {info.name: index[info.schema_number] for info in infos}
            return self._divided(listed, infos, combined, schema_of, columns)

        return retried(planned)

    def _chosen(self, objects: Objects) -> list[ObjectInfo]:
        """Return the objects that may have messages of the selection. Raises VanishedError, JetcaptureError."""
        selection = self.selection
        files = [file for name, file in objects.items() if name.parquet and selection.may_hold_name(name)]
        infos = self.files.infos(files, detailed=selection.needs_times)
        chosen = []
        for info in infos:
            if isinstance(info, BadObject):
                raise self.files.refusal(info)
            if selection.may_hold(info):
                chosen.append(info if info.known is None else replace(info, known=None))  # there may be many
        return chosen

    def _schema_of_none(self, objects: Objects, before: pa.Schema | None) -> pa.Schema:
        """Return the columns of a result without rows: those of the last object."""
        if self.selection != _EVERYTHING or not any(name.parquet for name in objects):
            objects = list_objects(self.files, self.directory)
        last = sorted((name for name in objects if name.parquet), key=lambda name: name.bucket)[-1:]
        for info in self.files.infos([objects[name] for name in last]):
            if isinstance(info, BadObject):
                raise self.files.refusal(info)
            return info.schema
        self._refuse_others(objects, _EVERYTHING)
        if before is None:
            self._refuse_nothing()
        return before or _QUARANTINE

    def _divided(
        self,
        objects: Objects,
        infos: Sequence[ObjectInfo],
        table: Table,
        schema_of: Mapping[ObjectName, int],
        columns: Sequence[tuple[str, str]],
    ) -> ReadPlan:
        """Divide objects into those to read completely, to read in parts, and to compare row by row."""
        names = [info.name for info in infos]
        bundles = {info.name: info.bundles for info in infos if info.bundles}
        whole: list[ObjectName] = []
        parts: Mapping[ObjectName, Sequence[Range]] = {}
        shared: list[ObjectName] = []
        if self.dedupe == "none":
            whole = names
        elif self.dedupe == "full":
            shared = names
        else:
            whole, shared = layout.split_overlapping(names, bundles)
        if self.dedupe == "auto" and shared and not table.several_rows:
            resolved = resolve(shared, partial(read_identities, self.files, objects), bundles)
            # Spark knows the parts by their objects' file names
            if len({name.path.rpartition("/")[2] for name in resolved.parts}) == len(resolved.parts):
                whole, parts, shared = whole + resolved.whole, resolved.parts, resolved.unresolved
        return ReadPlan(
            files=self.files,
            directory=self.directory,
            selection=self.selection,
            objects={name: objects[name] for name in names},
            table=table,
            schema_of=schema_of,
            whole=whole,
            parts=parts,
            shared=shared,
            # copies share key and bucket, and a filter on these can then pass the comparison
            identity=[*layout.IDENTITY, *(table.partitions if self.dedupe == "auto" else ())],
            outputs=columns,
        )

    def _refuse_others(self, objects: Objects, selection: Selection) -> None:
        """Raise JetcaptureError if objects in other formats may hold messages of the selection."""
        others = [name for name in objects if not name.parquet and selection.may_hold_name(name)]
        if others:
            formats = ", ".join(sorted({name.suffix.removeprefix(".") for name in others}))
            many = f"{plural(len(others), 'object')} of stream {self.stream} in {formats}"
            mixed = any(name.parquet for name in objects)
            hint = "; --parquet-only or parquet_only=True leaves them out" if mixed else ""
            raise JetcaptureError(f"{self.files.shown} has {many}, and only Parquet can be read{hint}")

    def _refuse_nothing(self) -> None:
        """Raise JetcaptureError for a stream without objects, unless this is the quarantine of an archived stream."""
        entries, url = self.files.names(), self.files.shown
        if self.quarantine and self.stream in entries:
            return
        quarantined = self.files.below(f"{layout.QUARANTINE}/{self.stream}")
        if not self.quarantine and any(file.name is not None for file in quarantined):
            raise JetcaptureError(
                f"the archive of stream {self.stream} under {url} has only a quarantine, of messages that could "
                "not be decoded: select FROM quarantine, or read it with quarantine=True"
            )
        raise no_archive(self.files, self.stream)


def no_archive(files: ArchiveFiles, stream: str) -> JetcaptureError:
    """Return the error for a stream without readable objects: not archived, or all damaged."""
    if any(file.name is not None for file in files.files(stream)):
        text = f"no object of stream {stream} under {files.shown} can be read; jetcapture verify says why"
    elif stream in files.names():
        text = f"the archive of stream {stream} under {files.shown} has no objects"
    else:
        text = f"no archive of stream {stream} under {files.shown}{files.known_streams()}"
    return JetcaptureError(text)


def list_objects(files: ArchiveFiles, directory: str, selection: Selection = _EVERYTHING) -> Objects:
    """List a stream's objects that may have messages of a selection, by keys and buckets, ordered by path.

    Raises JetcaptureError.
    """
    tops = [directory]
    if selection.keys is not None:
        if directory.startswith(f"{layout.QUARANTINE}/"):
            raise JetcaptureError("the quarantine is not divided by key")
        tops = files.directories(directory, selection.keys)
    listed = sorted(files.below(*tops, wanted=selection.may_hold_path), key=lambda file: file.path)
    return {file.name: file for file in listed if file.name is not None}


def read_identities(files: ArchiveFiles, objects: Objects, names: Iterable[ObjectName]) -> list[Identities]:
    """Read the sequences and timestamps of these objects. Raises StoreError."""

    def read(name: ObjectName) -> Identities:
        with files.parquet(objects[name]) as parquet:
            table = parquet.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
        return table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()

    return list(files.map(read, names))
