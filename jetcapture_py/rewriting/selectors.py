"""Select the messages to erase: by key, subject or sequence, or by SQL over the columns.

Each object is asked by itself, and says what it cannot tell: nothing is left out silently. Only `Condition` needs
DuckDB. No error here has the text of a condition, because it may have a person's data in it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet, RowIds
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.config.model import Config
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.template import STREAM, parse_template
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.reading.arrow import PlanReader, partition_of
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Listing, ObjectFacts, inexact_columns, read_facts
from jetcapture_py.rewriting.text_values import TextError, typed_rows
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.keys import TemplateKey
from jetcapture_py.verify.examine import IDENTITY_TYPES, ObjectExaminer, text_rows

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NO_MESSAGES = MessageSet()
_OPTIONAL = (layout.RAW_HEADERS,)
"""Columns that an object lacks if no message has a value for them."""
_HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))
_NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])


class UndecidedError(Exception):
    """An object does not say which of its messages are selected; the text says why."""

    def __init__(self, text: str, messages: MessageSet = NO_MESSAGES) -> None:
        """`messages` are selected in any case."""
        super().__init__(text)
        self.messages = messages


class Selector(Protocol):
    """Which messages to erase."""

    def may_match(self, name: ObjectName) -> bool:
        """Whether an object may have some, by its name."""
        ...

    def types(self, name: ObjectName) -> Mapping[str, pa.DataType]:
        """Return the columns that the object is asked for, and their types; none if its messages are enough.

        Raises UndecidedError if none would tell.
        """
        ...

    def mask(self, rows: pa.Table) -> Any:
        """Return a mask of the rows that are selected."""
        ...

    def undecided(self, rows: pa.Table) -> str:
        """Return why some rows cannot be decided; "" if all can."""
        ...


@dataclass(frozen=True, slots=True)
class KeySelector:
    """Messages with a key. In the quarantine, the key is the one that `template` gives."""

    key: str
    template: str
    """The configuration's `key`."""
    stream: str = ""

    def may_match(self, name: ObjectName) -> bool:
        """Whether it is under the key, in a bundle, or in the quarantine."""
        return name.quarantine or bool(name.bundle) or name.key == self.key

    def types(self, name: ObjectName) -> Mapping[str, pa.DataType]:
        """The key is the path's, or a column; for the quarantine, it follows from subject and headers, or is unknown.

        Raises UndecidedError if it is.
        """
        if not name.quarantine:
            return {layout.KEY: pa.string()} if name.bundle else {}
        of_users = plugins.is_reference(self.template)
        kinds = {"field"} if of_users else {part.kind for part in parse_template(self.template) if part != STREAM}
        if "field" in kinds:
            raise UndecidedError("messages that could not be decoded have no key: select them by --subject or --where")
        of_header = {layout.HEADERS: _HEADERS, layout.RAW_HEADERS: pa.binary()} if "header" in kinds else {}
        return {layout.SUBJECT: pa.string(), **of_header}

    def mask(self, rows: pa.Table) -> Any:
        if layout.KEY in rows.schema.names:
            keys = rows[layout.KEY]
        elif layout.SUBJECT in rows.schema.names:
            (batch,) = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
            keys = TemplateKey(self.template)(MessageBatch(stream=self.stream, rows=batch), _NO_FIELDS)
        else:
            return np.ones(rows.num_rows, np.bool_)
        return _mask(pc.equal(keys, self.key))

    def undecided(self, rows: pa.Table) -> str:
        """Messages whose headers cannot be read have no key from a header."""
        if layout.RAW_HEADERS in rows.schema.names and rows[layout.RAW_HEADERS].null_count < rows.num_rows:
            return "messages whose headers cannot be read have no key: select them by --subject or --where"
        return ""


@dataclass(frozen=True, slots=True)
class SubjectSelector:
    """Messages on a subject, or on those that a pattern matches."""

    subject: str

    def may_match(self, _: ObjectName) -> bool:
        """Names have no subjects."""
        return True

    def types(self, _: ObjectName) -> Mapping[str, pa.DataType]:
        return {layout.SUBJECT: pa.string()}

    def mask(self, rows: pa.Table) -> Any:
        """Compare each distinct subject once."""
        subjects = pc.unique(rows[layout.SUBJECT])
        chosen = [text for text in subjects.to_pylist() if text is not None and matches(text, (self.subject,))]
        return _mask(pc.is_in(rows[layout.SUBJECT], pa.array(chosen, pa.string())))

    def undecided(self, _: pa.Table) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class SequenceSelector:
    """Messages with sequences from `first` to `last`, inclusive."""

    first: int
    last: int

    def may_match(self, name: ObjectName) -> bool:
        return name.first_seq <= self.last and name.last_seq >= self.first

    def types(self, _: ObjectName) -> Mapping[str, pa.DataType]:
        """Nothing but the sequence, which is always there."""
        return {}

    def mask(self, rows: pa.Table) -> Any:
        seqs = rows[layout.SEQ].to_numpy()
        return (seqs >= self.first) & (seqs <= self.last)

    def undecided(self, _: pa.Table) -> str:
        return ""


def selected(archive: ArchiveFiles, examiner: ObjectExaminer, file: File, selector: Selector) -> MessageSet:
    """Return the selected messages of an object.

    Raises UndecidedError, DamagedError, VanishedError, StoreError.
    """
    name = file.name
    assert name is not None  # noqa: S101  # every caller has an object
    types = {**IDENTITY_TYPES, **selector.types(name)}
    if len(types) == len(IDENTITY_TYPES):
        _, seqs, times = examiner.identities(file, name)
        rows = pa.table({layout.SEQ: seqs, layout.TIMESTAMP: pa.array(times, pa.timestamp("us", "UTC"))})
        return _messages(rows, selector)
    if name.parquet:
        parts, undecided = [], ""
        with archive.parquet(file) as parquet:
            lacking = [column for column in types if column not in parquet.schema_arrow.names]
            if missing := [column for column in lacking if column not in _OPTIONAL]:
                raise UndecidedError(f"it has no column {missing[0]}")
            types = {column: type_ for column, type_ in types.items() if column not in lacking}
            for index in range(parquet.metadata.num_row_groups):
                rows = parquet.read_row_group(index, columns=list(types), use_threads=False)
                columns = {
                    each: rows[each].cast(type_) if type_ == pa.string() else rows[each]
                    for each, type_ in types.items()
                }
                parts.append(_messages(pa.table(columns), selector))
                undecided = undecided or selector.undecided(rows)
        if undecided:
            raise UndecidedError(undecided, MessageSet.union(parts))
        return MessageSet.union(parts)
    if not name.text:
        raise UndecidedError("it is in a format of your own")
    try:
        return MessageSet.union(_messages(rows, selector) for rows in text_rows(archive, file, name.suffix, types))
    except (pa.ArrowException, KeyError) as error:
        raise UndecidedError("its lines cannot be read") from error


def _messages(rows: pa.Table, selector: Selector) -> MessageSet:
    return _of(rows.filter(pa.array(selector.mask(rows))))


def _of(rows: pa.Table) -> MessageSet:
    return RowIds.of(rows).messages


def _mask(values: Any) -> Any:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)  # noqa: FBT003


# ---------------------------------------------------------------------- SQL


class Condition:
    """A condition in SQL over the columns that `jetcapture query` has; a context manager.

    Each object is asked by itself, with the types that its columns have in the whole archive.
    """

    def __init__(self, archive: ArchiveFiles, config: Config, where: str) -> None:
        """Raises JetcaptureError without DuckDB."""
        try:
            import duckdb
        except ImportError as error:
            raise JetcaptureError("duckdb is missing, for --where: pip install 'jetcapture[query]'") from error
        from jetcapture_py.reading.duckdb import connect

        self._archive, self._error = archive, duckdb.Error
        self._statement = f"SELECT {_POSITION} FROM {_ROWS} WHERE (\n{where}\n)"  # noqa: S608  # the user's own SQL
        self._declared = {
            **_TEXT_ENVELOPE,
            **{name: parse_type(column.type) for name, column in config.decode.columns.items()},
        }
        self._tables: dict[bool, Table] = {}
        self._facts: dict[bool, ObjectFacts] = {}
        self._lock = threading.Lock()
        self._connection: DuckDBPyConnection = connect(None)  # no temporary file gets rows to be erased
        self._connection.execute("SET enable_external_access = false")
        self._names: frozenset[str] = frozenset()
        """The names in the condition, folded: columns, and fields within."""
        self._columns: frozenset[str] = frozenset()
        """The first names in references to columns, folded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def prepare(self, files: Sequence[File]) -> dict[str, str]:
        """Find the types of the columns in these objects; return why some cannot be read, by their paths.

        Raises ConfigError if it is not one condition, VanishedError, JetcaptureError.
        """
        self._parse()
        broken: dict[ObjectName, str] = {}
        by_name = {file.name: file for file in files if file.name is not None and file.name.parquet}
        listing = Listing(objects=list(by_name), others=[], files=by_name)
        for quarantine in (False, True):
            names = [name for name in by_name if name.quarantine is quarantine]
            facts = self._facts[quarantine] = read_facts(self._archive, names, listing, broken=broken)
            self._tables[quarantine] = Table(
                facts.schemas,
                quarantine,
                lambda name: name.casefold() in self._names,
                inexact=inexact_columns(self._archive, list(facts.schema_of), listing, facts),
            )
        if len(by_name) == len(files):  # text objects do not tell their columns
            folded = (name.casefold() for table in self._tables.values() for name in table.columns)
            known = {*layout.PARTITIONS, *folded}
            self._columns -= _TIMES_NOW - known
            if not self._columns <= known:
                raise ConfigError("--where: it names a column that no object has; text is in single quotes")
        return {by_name[name].path: reason for name, reason in broken.items()}

    def selected(self, file: File) -> MessageSet:
        """Return the messages of an object that the condition is true of. Raises UndecidedError, VanishedError,
        StoreError."""
        name = file.name
        assert name is not None  # noqa: S101  # every caller has an object
        if name.parquet:
            batches: Iterator[pa.Table] = (
                pa.Table.from_batches([batch]) for batch in self._reader(name).batches(file, name)
            )
        elif name.text:
            batches = self._text(file, name)
        else:
            raise UndecidedError("it is in a format of your own")
        return MessageSet.union(map(self._messages, batches))

    def _reader(self, name: ObjectName) -> PlanReader:
        """Return what reads the columns that are named, and that the object has."""
        table = self._tables[name.quarantine]
        stored = table.stored(self._facts[name.quarantine].schema_of[name])
        columns = [column.name for folded, column in table.columns.items() if folded in stored]
        columns += [column for column in table.partitions if column in self._names]
        return PlanReader(files=self._archive, table=table, columns=columns, bounds=(), keys=None)

    def _text(self, file: File, name: ObjectName) -> Iterator[pa.Table]:
        """Yield the rows of an object in NDJSON or CSV, with the types that are declared."""
        paths = {
            column: partition_of(name, column)
            for column in layout.PARTITIONS
            if column in self._names and not (name.bundle and column == layout.KEY)
        }
        types = {each: type_ for each, type_ in self._declared.items() if each.casefold() in self._names}
        types = {each: type_ for each, type_ in types.items() if each not in paths}
        unknown = self._columns - {each.casefold() for each in (*types, *paths)}
        if unknown:
            raise UndecidedError("decode.columns does not have the type of each column of it that the condition names")
        try:
            for rows in typed_rows(self._archive, file, name.suffix, {**IDENTITY_TYPES, **types}):
                for column, value in paths.items():
                    rows = rows.append_column(column, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
                yield rows
        except TextError as error:
            raise UndecidedError(str(error)) from error

    def _parse(self) -> None:
        """Find the names in the condition. Raises ConfigError if it is more than one condition about columns."""
        tree = self._tree(self._statement)
        where = tree.pop("where_clause", None)
        template = self._tree(f"SELECT {_POSITION} FROM {_ROWS} WHERE (\ntrue\n)")  # noqa: S608  # nobody's input
        del template["where_clause"]
        if tree != template:
            raise ConfigError("--where: expected one condition, as after WHERE")
        references = list(_references(where))
        self._columns = frozenset(names[0] for names, free in references if free)
        self._names = frozenset(name for names, _ in references for name in names)

    def _tree(self, statement: str) -> dict[str, Any]:
        """Return DuckDB's parse tree of a SELECT. Raises ConfigError."""
        ((text,),) = self._connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()
        answer = json.loads(text)
        if answer["error"] or len(answer["statements"]) != 1:
            raise ConfigError("--where: not a condition in SQL, as after WHERE")
        node: dict[str, Any] = answer["statements"][0]["node"]
        return node

    def _messages(self, rows: pa.Table) -> MessageSet:
        if not self._columns <= set(map(str.casefold, rows.schema.names)):  # user, if missing, is a function
            raise UndecidedError(_UNFIT)
        positions = rows.append_column(_POSITION, pa.array(range(rows.num_rows), pa.int64()))
        try:
            with self._lock:
                self._connection.register(_ROWS, positions)
                found = self._connection.sql(self._statement).to_arrow_table()
        except self._error as error:
            if type(error).__name__ == "BinderException":
                raise UndecidedError(_UNFIT) from error
            raise UndecidedError(
                f"the condition failed ({type(error).__name__}): try it with jetcapture query"
            ) from error
        return _of(rows.take(found[_POSITION]))


_POSITION, _ROWS = "_nats_position", "_nats_rows"
_TIMES_NOW = frozenset({"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"})
"""What SQL takes for the time now where no column has that name."""
_UNFIT = "the condition does not fit its columns: try it with jetcapture query"
_TEXT_ENVELOPE: dict[str, pa.DataType] = {
    **{field.name: field.type for field in ENVELOPE if field.name != REPLY},
    layout.STREAM: pa.string(),
    layout.KEY: pa.string(),
    layout.ROW: pa.int32(),
    layout.TIME: pa.timestamp("us", "UTC"),
}


def _references(node: Any, bound: frozenset[str] = frozenset()) -> Iterator[tuple[list[str], bool]]:
    """Yield the folded names of each column in a part of a parse tree, and whether it is certain to be one.

    What is `bound` are parameters of lambdas, or what they may be: `a -> 'b'` may also be a field of the JSON in column
    a. Raises ConfigError for what is about other tables.
    """
    if isinstance(node, list):
        for each in node:
            yield from _references(each, bound)
    elif isinstance(node, dict):
        if node.get("class") in ("SUBQUERY", "STAR"):
            raise ConfigError("--where: expected a condition on columns by their names, without SELECT or COLUMNS")
        if node.get("class") == "COLUMN_REF":
            names = [name.casefold() for name in node["column_names"]]
            yield names, names[0] not in bound
        if node.get("class") == "LAMBDA":
            bound |= {names[0] for names, _ in _references(node["lhs"]) if len(names) == 1}
        for each in node.values():
            yield from _references(each, bound)


def selector_of(config: Config, key: str | None, subject: str | None, seqs: str | None) -> Selector | None:
    """Return the selector of `--key`, `--subject` or `--seq`; None without one. Raises ConfigError."""
    if key is not None:
        if not key:
            raise ConfigError("--key: expected a key; messages without one can be selected by --where 'key IS NULL'")
        return KeySelector(key, config.key, config.source.stream)
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
