"""Select the messages to erase: by key, subject or sequence, or by SQL over the columns.

Each object is asked by itself, and says what it cannot tell: nothing is left out silently. Only `Condition` needs
DuckDB. No error here has the text of a condition, because it may have a person's data in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.compaction.merge import Identities
from jetcapture_py.compaction.rewrite import MessageSet
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.template import parse_template
from jetcapture_py.errors import ConfigError, JetcaptureError, VanishedError
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.transform.keys import TemplateKey
from jetcapture_py.verify.examine import IDENTITY_TYPES, ObjectExaminer, text_rows

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from jetcapture_py.transform.batch import MessageBatch

NO_MESSAGES = MessageSet(np.zeros(0, np.int64), np.zeros(0, np.int64))
_HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))
_NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])


class UntoldError(Exception):
    """An object does not say which of its messages are selected; the text says why."""


class Selector(Protocol):
    """Which messages to erase."""

    def may_match(self, name: ObjectName) -> bool:
        """Whether an object may have some, by its name."""
        ...

    def types(self, name: ObjectName) -> Mapping[str, pa.DataType]:
        """Return the columns that the object is asked for, and their types; none if its messages are enough.

        Raises UntoldError if none would tell.
        """
        ...

    def mask(self, rows: pa.Table) -> Any:
        """Return a mask of the rows that are selected."""
        ...


@dataclass(frozen=True, slots=True)
class KeySelector:
    """Messages with a key. In the quarantine, the key is the one that `template` gives."""

    key: str
    template: str
    """The configuration's `key`."""

    def may_match(self, name: ObjectName) -> bool:
        """Whether it is under the key, in a bundle, or in the quarantine."""
        return name.quarantine or bool(name.bundle) or name.key == self.key

    def types(self, name: ObjectName) -> Mapping[str, pa.DataType]:
        """The key is the path's, or a column; for the quarantine, it follows from subject and headers, or is unknown.

        Raises UntoldError if it is.
        """
        if not name.quarantine:
            return {layout.KEY: pa.string()} if name.bundle else {}
        if plugins.is_reference(self.template) or any(part.kind == "field" for part in parse_template(self.template)):
            raise UntoldError("messages that could not be decoded have no key: select them by --subject or --where")
        return {layout.SUBJECT: pa.string(), layout.HEADERS: _HEADERS}

    def mask(self, rows: pa.Table) -> Any:
        """Compare the keys."""
        if layout.KEY in rows.schema.names:
            keys = rows[layout.KEY]
        elif layout.SUBJECT in rows.schema.names:
            (batch,) = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
            keys = TemplateKey(self.template)(cast("MessageBatch", batch), _NO_FIELDS)
        else:
            return np.ones(rows.num_rows, np.bool_)
        return _mask(pc.equal(keys, self.key))


@dataclass(frozen=True, slots=True)
class SubjectSelector:
    """Messages on a subject, or on those that a pattern matches."""

    subject: str

    def may_match(self, _: ObjectName) -> bool:
        """Names have no subjects."""
        return True

    def types(self, _: ObjectName) -> Mapping[str, pa.DataType]:
        """Only the subject."""
        return {layout.SUBJECT: pa.string()}

    def mask(self, rows: pa.Table) -> Any:
        """Compare each distinct subject once."""
        subjects = pc.unique(rows[layout.SUBJECT])
        chosen = [text for text in subjects.to_pylist() if text is not None and matches(text, (self.subject,))]
        return _mask(pc.is_in(rows[layout.SUBJECT], pa.array(chosen, pa.string())))


@dataclass(frozen=True, slots=True)
class SequenceSelector:
    """Messages with sequences from `first` to `last`, inclusive."""

    first: int
    last: int

    def may_match(self, name: ObjectName) -> bool:
        """Whether the ranges overlap."""
        return name.first_seq <= self.last and name.last_seq >= self.first

    def types(self, _: ObjectName) -> Mapping[str, pa.DataType]:
        """Nothing but the sequence, which is always there."""
        return {}

    def mask(self, rows: pa.Table) -> Any:
        """Compare the sequences."""
        seqs = rows[layout.SEQ].to_numpy()
        return (seqs >= self.first) & (seqs <= self.last)


def selected(archive: ArchiveFiles, examiner: ObjectExaminer, file: File, selector: Selector) -> MessageSet:
    """Return the selected messages of an object.

    Raises UntoldError, DamagedError, VanishedError, StoreError.
    """
    name = file.name
    assert name is not None  # noqa: S101  # every caller has an object
    types = {**IDENTITY_TYPES, **selector.types(name)}
    if len(types) == len(IDENTITY_TYPES):
        _, seqs, times = examiner.identities(file, name)
        rows = pa.table({layout.SEQ: seqs, layout.TIMESTAMP: pa.array(times, pa.timestamp("us", "UTC"))})
        return _messages(rows, selector)
    if name.parquet:
        parts = []
        with archive.parquet(file) as parquet:
            if lacking := [column for column in types if column not in parquet.schema_arrow.names]:
                raise UntoldError(f"it has no column {lacking[0]}")
            for index in range(parquet.metadata.num_row_groups):
                rows = parquet.read_row_group(index, columns=list(types), use_threads=False)
                columns = {
                    each: rows[each].cast(type_) if type_ == pa.string() else rows[each]
                    for each, type_ in types.items()
                }
                parts.append(_messages(pa.table(columns), selector))
        return MessageSet.union(parts)
    if name.suffix not in layout.TEXT_SUFFIXES:
        raise UntoldError("it is in a format of your own, of which only sequences and timestamps are known")
    try:
        return MessageSet.union(_messages(rows, selector) for rows in text_rows(archive, file, name.suffix, types))
    except (pa.ArrowException, KeyError) as error:
        raise UntoldError("its lines cannot be read") from error


def _messages(rows: pa.Table, selector: Selector) -> MessageSet:
    return _of(rows.filter(pa.array(selector.mask(rows))))


def _of(rows: pa.Table) -> MessageSet:
    own = Identities.of(rows)
    return MessageSet(own.seqs, own.times)


def _mask(values: Any) -> Any:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)  # noqa: FBT003


# ---------------------------------------------------------------------- SQL


class Condition:
    """A condition in SQL over the columns of the views that `jetcapture query` has; a context manager."""

    def __init__(self, archive: ArchiveFiles, stream: str, where: str) -> None:
        """Raises JetcaptureError without DuckDB."""
        try:
            import duckdb
        except ImportError as error:
            raise JetcaptureError("duckdb is missing, for --where: pip install 'jetcapture[query]'") from error
        from jetcapture_py.reading.duckdb import ArchiveViews, connect

        self._error = duckdb.Error
        self._where = where
        self._directory = tempfile.TemporaryDirectory(prefix="jetcapture-erase-")
        top = Path(self._directory.name)
        self._connection: DuckDBPyConnection = connect(top / "spilled")
        links = top / "objects"
        links.mkdir()
        self._views = ArchiveViews(self._connection, archive, stream, Selection(), directory=links, parquet_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._directory.cleanup()

    def check(self) -> None:
        """Raise ConfigError if it is not one condition."""
        try:
            statements = self._connection.extract_statements(self._select("archive"))
        except self._error as error:
            raise ConfigError("--where: not a condition in SQL, as after WHERE") from error
        if len(statements) != 1:
            raise ConfigError("--where: expected one condition, as after WHERE")

    def in_view(self, view: str) -> MessageSet:
        """Return the messages of the view `archive` or `quarantine`: all objects in Parquet.

        Raises UntoldError if the condition is not about its columns, VanishedError, JetcaptureError.
        """
        self._views.create([view])
        try:
            return self._messages(view)
        except UntoldError as error:
            if (failure := self._views.failure()) is not None:
                raise failure from error
            if self._views.outdated():
                raise VanishedError("objects were compacted or removed while the condition was evaluated") from error
            raise

    def in_text(self, archive: ArchiveFiles, file: File, suffix: str) -> MessageSet:
        """Return the messages of an object in NDJSON or CSV. Raises UntoldError, VanishedError, StoreError."""
        try:
            tables = text_rows(archive, file, suffix, None)
            rows = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise UntoldError("its lines cannot be read") from error
        self._connection.register("_nats_rows", rows)
        try:
            return self._messages("_nats_rows")
        finally:
            self._connection.unregister("_nats_rows")

    def _select(self, view: str) -> str:
        columns = f"{layout.SEQ}, {layout.TIMESTAMP}"
        return f"SELECT {columns} FROM {view} WHERE (\n{self._where}\n)"  # noqa: S608  # the user's own SQL

    def _messages(self, view: str) -> MessageSet:
        try:
            rows = self._connection.sql(self._select(view)).to_arrow_table()
        except self._error as error:
            if type(error).__name__ == "BinderException":
                raise UntoldError("the condition does not fit its columns: try it with jetcapture query") from error
            raise UntoldError(f"the condition failed ({type(error).__name__}): try it with jetcapture query") from error
        return _of(rows)


def selector_of(key: str | None, subject: str | None, seqs: str | None, template: str) -> Selector | None:
    """Return the selector of `--key`, `--subject` or `--seq`; None without one. Raises ConfigError."""
    if key is not None:
        if not key:
            raise ConfigError("--key: expected a key; messages without one can be selected by --where 'key IS NULL'")
        return KeySelector(key, template)
    if subject is not None:
        tokens: Sequence[str] = subject.split(".")
        if "" in tokens or ">" in tokens[:-1]:
            raise ConfigError("--subject: expected a subject or a pattern such as orders.*.new or orders.eu.>")
        return SubjectSelector(subject)
    if seqs is None:
        return None
    first, dash, last = seqs.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
        raise ConfigError(f"--seq: {seqs}: expected a sequence, or two such as 100-199")
    low, high = int(first), int(last or first)
    if not 0 < low <= high < 1 << 63:
        raise ConfigError(f"--seq: {seqs}: expected a sequence, or two such as 100-199")
    return SequenceSelector(low, high)
