"""Select the messages to erase: by key, subject or sequence, or by SQL over the columns that `jetcapture query` has.

Each object is searched separately, and an undecidable one is an error: nothing is skipped silently. Errors never
contain the text of a condition, because it may have personal data.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.info import BadObject, InfoReader
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet, RowIds
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.compaction.memory import MemoryBudget, searching
from jetcapture_py.compaction.plan import Source
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.config.model import Config
from jetcapture_py.config.subjects import check_pattern, matches
from jetcapture_py.config.template import STREAM, parse_template
from jetcapture_py.config.units import got
from jetcapture_py.errors import ConfigError, JetcaptureError, VanishedError
from jetcapture_py.reading.arrow import PlanReader, partition_of
from jetcapture_py.reading.columns import Table, as_read, inexact_columns
from jetcapture_py.reading.duckdb import connect, sql_type
from jetcapture_py.rewriting.text_values import TextError, column_names, typed_rows
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.keys import TemplateKey
from jetcapture_py.verify.examine import IDENTITY_TYPES, DamagedError, text_rows
from jetcapture_py.verify.findings import Progress, ignore

THREADS = 2
"""Local objects read at once; remote ones use the archive's default."""
_NOT_SEARCHED = "not searched: "
_FUNCTIONS = frozenset(("user", "current_user", "session_user", "current_role", "current_catalog", "current_schema"))
"""Names that SQL takes for functions if no column has the name, besides the current time."""
_UNFIT = "the condition does not fit its columns: try it with jetcapture query"
_NO_KEY = "messages whose headers cannot be read have no key: select them by --subject or --where"
_TYPES: dict[str, pa.DataType] = {
    **{field.name: field.type for field in ENVELOPE if field.name != REPLY},
    layout.STREAM: pa.string(),
    layout.KEY: pa.string(),
    layout.ROW: pa.int32(),
    layout.TIME: pa.timestamp("us", "UTC"),
    layout.RESCUED: pa.string(),
    layout.RAW_HEADERS: pa.binary(),
}
_NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])
_WORD = re.compile(r'"(?:[^"]|"")*"|[\w$]+')
"""A name in SQL, or a keyword."""


class UndecidedError(Exception):
    """A condition cannot be evaluated on an object; the text says why."""

    def __init__(self, text: str, messages: MessageSet | None = None) -> None:
        """`messages` are selected in any case."""
        super().__init__(text)
        self.messages = messages or MessageSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition for messages to erase: exactly one field is set."""

    key: str | None = None
    """Messages with this key. In the quarantine, the configuration's `key` computes it."""
    subject: str | None = None
    """Messages on this subject or pattern."""
    seqs: tuple[int, int] | None = None
    """Messages in this range of sequences, inclusive."""
    where: str | None = None
    """Messages for which this SQL is true."""

    @classmethod
    def parse(cls, key: str | None, subject: str | None, seqs: str | None, where: str | None) -> Self:
        """Return the condition of the command's options. Raises ConfigError."""
        if sum(given is not None for given in (key, subject, seqs, where)) != 1:
            raise ConfigError("expected one of --key, --subject, --seq and --where")
        if key == "":
            raise ConfigError("--key: expected a key; messages without one can be selected by --where 'key IS NULL'")
        try:
            check_pattern(subject or "x")
        except ValueError as error:
            raise ConfigError(f"--subject: {got(str(error), subject)}") from None
        return cls(key=key, subject=subject, where=where, seqs=None if seqs is None else _range(seqs))

    def may_match(self, name: ObjectName) -> bool:
        """Whether an object may have matching messages, by its name."""
        if self.seqs is not None and (name.first_seq > self.seqs[1] or name.last_seq < self.seqs[0]):
            return False
        return self.key is None or name.quarantine or bool(name.bundle) or name.key == self.key


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else not last):
        low, high = int(first), int(last or first)
        if 0 < low <= high < 1 << 63:
            return low, high
    raise ConfigError(f"--seq: {text}: expected a sequence, or two such as 100-199")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The result of a search."""

    messages: MessageSet
    undecided: Mapping[str, str]
    """Reasons why objects were not searched completely, by path."""


def source_of(file: File) -> Source:
    """Return an object as compaction names it."""
    assert file.name is not None  # noqa: S101  # only objects are asked for it
    return Source(file.name, file.size)


class Search:
    """Finds the messages of a condition; a context manager. Only `where` needs DuckDB."""

    def __init__(
        self, archive: ArchiveFiles, config: Config, condition: Condition, progress: Progress = ignore
    ) -> None:
        """Raises ConfigError for invalid SQL, JetcaptureError without DuckDB."""
        self._archive, self._config, self._condition = archive, config, condition
        self._budget, self._progress = MemoryBudget(config.limits.memory), progress
        self._answers: dict[tuple[str, int], MessageSet] = {}
        """The selected messages of objects, by path and size."""
        self._sql = None if condition.where is None else _Sql(condition.where)
        self._tables = {quarantine: Table([pa.schema(_TYPES)], quarantine, None) for quarantine in (False, True)}
        self._schema_of: dict[ObjectName, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sql is not None:
            self._sql.close()

    def run(self, files: Sequence[File]) -> Selected:
        """Search these objects; a retry after VanishedError skips those already searched.

        Raises ConfigError, VanishedError, JetcaptureError.
        """
        condition = self._condition
        files = [file for file in files if file.name is not None and condition.may_match(file.name)]
        undecided = {path: f"{_NOT_SEARCHED}{reason}" for path, reason in self._prepare(files).items()}

        def ask(file: File) -> MessageSet:
            at = file.path, file.size
            if at not in self._answers:
                try:
                    with self._budget.taken(searching(source_of(file), local=self._archive.local)):
                        self._answers[at] = self.selected(file)
                except VanishedError:
                    raise
                except (UndecidedError, DamagedError, JetcaptureError) as error:
                    undecided[file.path] = f"{_NOT_SEARCHED}{error}"
                    return error.messages if isinstance(error, UndecidedError) else MessageSet()
            return self._answers[at]

        readable = [file for file in files if file.path not in undecided]
        parts: list[MessageSet] = []
        for part in self._archive.map(ask, readable, threads=THREADS if self._archive.local else 0):
            parts.append(part)
            self._progress("searched", len(parts), len(readable))
        messages = MessageSet.union(parts)
        if condition.where is not None and undecided and len(undecided) == len(files):
            raise ConfigError(f"--where: {next(iter(undecided.values())).removeprefix(_NOT_SEARCHED)}")
        if condition.seqs is not None and (np.diff(messages.seqs) == 0).any():
            raise ConfigError(
                "--seq: several messages have the same sequence, because the stream was created again: select them by "
                "--where, with _nats_seq and _nats_timestamp"
            )
        return Selected(messages=messages, undecided=undecided)

    def _prepare(self, files: Sequence[File]) -> dict[str, str]:
        """Find the common types of the SQL's columns; return reasons for unreadable objects, by path.

        Raises VanishedError, JetcaptureError.
        """
        if (sql := self._sql) is None:
            return {}
        broken: dict[str, str] = {}
        by_name = {file.name: file for file in files if file.name is not None and file.name.parquet}
        self._schema_of = {}
        for quarantine in (False, True):
            reader, infos = InfoReader(), []
            files = [file for name, file in by_name.items() if name.quarantine is quarantine]
            for info in self._archive.infos(files, reader=reader):
                if isinstance(info, BadObject):
                    broken[by_name[info.name].path] = str(self._archive.refusal(info))
                else:
                    infos.append(info)
                    self._schema_of[info.name] = info.schema_number
            self._tables[quarantine] = Table(
                reader.schemas,
                quarantine,
                lambda name: name.casefold() in sql.names,
                inexact_columns(self._archive, infos, by_name),
            )
        return broken

    def selected(self, file: File) -> MessageSet:
        """Return the selected messages of an object. Raises UndecidedError, VanishedError, StoreError."""
        name = file.name
        assert name is not None  # noqa: S101  # every caller has an object
        if not (name.parquet or name.text):
            raise UndecidedError("it is in a format of your own")
        parts, undecided = [], False
        for rows in self._parquet(file, name) if name.parquet else self._text(file, name):
            parts.append(RowIds.of(self._chosen(rows, name)).messages)
            if self._condition.key is not None and layout.RAW_HEADERS in rows.schema.names:
                undecided = undecided or rows[layout.RAW_HEADERS].null_count < rows.num_rows
        if undecided:
            raise UndecidedError(_NO_KEY, MessageSet.union(parts))
        return MessageSet.union(parts)

    def _parquet(self, file: File, name: ObjectName) -> Iterator[pa.Table]:
        """Yield the columns to search, with their common types."""
        condition, table = self._condition, self._tables[name.quarantine]
        columns = self._columns(name)
        if self._sql is not None:
            stored = table.stored(self._schema_of[name])
            columns = [column.name for folded, column in table.columns.items() if folded in stored]
            columns += [column for column in table.partitions if column in self._sql.names]
        reader = PlanReader(
            files=self._archive,
            table=table,
            columns=columns,
            bounds=(),
            keys=None if condition.key is None else (condition.key,),
            seqs=condition.seqs,
        )
        return (pa.Table.from_batches([batch]) for batch in reader.batches(file, name))

    def _text(self, file: File, name: ObjectName) -> Iterator[pa.Table]:
        """Yield the columns to search of an object in NDJSON or CSV, with their declared types."""
        partitions = layout.PARTITIONS[1:] if name.quarantine or name.bundle else layout.PARTITIONS
        try:
            if self._sql is None:
                types = {column: _TYPES[column] for column in self._columns(name) if column not in partitions}
                tables: Iterable[pa.Table] = text_rows(self._archive, file, name.suffix, types)
            else:
                tables = typed_rows(
                    self._archive, file, name.suffix, self._declared(file, name, partitions), self._sql.nested
                )
            for rows in tables:
                for column in partitions:
                    value = pa.scalar(partition_of(name, column), pa.string())
                    rows = rows.append_column(column, pa.repeat(value, rows.num_rows))
                yield rows
        except TextError as error:
            raise UndecidedError(str(error)) from error
        except (pa.ArrowException, KeyError) as error:
            raise UndecidedError("its lines cannot be read") from error

    def _declared(self, file: File, name: ObjectName, partitions: Iterable[str]) -> dict[str, pa.DataType]:
        """Return the declared types of the columns that SQL names. Raises UndecidedError, TextError."""
        names = self._sql.names if self._sql else frozenset()
        columns = {name: parse_type(column.type) for name, column in self._config.decode.columns.items()}
        stored = [column for column in column_names(self._archive, file, name.suffix) if column.casefold() in names]
        declared = {**_TYPES, **columns}
        if not declared.keys() >= set(stored):
            raise UndecidedError("decode.columns does not have the type of each column of it that the condition names")
        return {**IDENTITY_TYPES, **{column: declared[column] for column in stored if column not in partitions}}

    def _columns(self, name: ObjectName) -> list[str]:
        """Return the columns to search without SQL. Raises UndecidedError if none has a message's key."""
        columns = list(IDENTITY_TYPES)
        if self._condition.subject is not None:
            columns.append(layout.SUBJECT)
        elif self._condition.key is not None and not name.quarantine:
            columns.append(layout.KEY)
        elif self._condition.key is not None:
            template = self._config.key
            kinds = (
                {"field"}
                if plugins.is_reference(template)
                else {part.kind for part in parse_template(template) if part != STREAM}
            )
            if "field" in kinds:
                raise UndecidedError(
                    "messages that could not be decoded have no key: select them by --subject or --where"
                )
            columns += [layout.SUBJECT, *([layout.HEADERS, layout.RAW_HEADERS] if "header" in kinds else [])]
        return columns

    def _chosen(self, rows: pa.Table, name: ObjectName) -> pa.Table:
        """Return an object's selected rows."""
        condition = self._condition
        if self._sql is not None:
            return self._sql.chosen(rows)
        if condition.seqs is not None:
            first, last = condition.seqs
            mask = pc.and_(pc.greater_equal(rows[layout.SEQ], first), pc.less_equal(rows[layout.SEQ], last))
        elif condition.subject is not None:
            subjects = pc.unique(rows[layout.SUBJECT]).to_pylist()
            matching = [text for text in subjects if text is not None and matches(text, (condition.subject,))]
            mask = pc.is_in(rows[layout.SUBJECT], pa.array(matching, pa.string()))
        elif name.quarantine:
            (batch,) = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
            messages = MessageBatch(stream=self._config.source.stream, rows=batch)
            mask = pc.equal(TemplateKey(self._config.key)(messages, _NO_FIELDS), condition.key)
        else:
            mask = pc.equal(rows[layout.KEY], condition.key)
        return rows.filter(mask)


class _Sql:
    """A condition in SQL, evaluated by DuckDB."""

    def __init__(self, where: str) -> None:
        """Raises ConfigError, JetcaptureError without DuckDB."""
        try:
            import duckdb
        except ImportError as error:
            raise JetcaptureError("duckdb is missing, for --where: pip install 'jetcapture[query]'") from error
        self._duckdb = duckdb
        try:
            duckdb.SQLExpression(where)  # so that no parenthesis in it closes the outer one
            self._expression = duckdb.SQLExpression(f"(\n{where}\n)")
        except duckdb.Error:
            raise ConfigError("--where: not a condition in SQL, as after WHERE") from None
        text = where.encode()
        edges = pairwise([*(start for start, _ in duckdb.tokenize(where)), len(text)])
        words = [match[0] for start, end in edges if (match := _WORD.match(text[start:end].decode()))]
        if any(word.lower() in ("select", "columns") for word in words):
            raise ConfigError("--where: expected a condition on columns by their names, without SELECT or COLUMNS")
        self.names = frozenset(word.strip('"').replace('""', '"').casefold() for word in words)
        """The folded words of the condition: columns and others."""
        self._connection = connect(None)  # no temporary file gets rows to be erased
        self._connection.execute("SET enable_external_access = false")
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def chosen(self, rows: pa.Table) -> pa.Table:
        """Return the identities of the matching rows. Raises UndecidedError."""
        if not self.names.isdisjoint(_FUNCTIONS - {name.casefold() for name in rows.schema.names}):
            raise UndecidedError(_UNFIT)
        try:
            with self._lock:
                return (
                    self._connection.from_arrow(rows).filter(self._expression).select(*IDENTITY_TYPES).to_arrow_table()
                )
        except self._duckdb.BinderException:
            raise UndecidedError(_UNFIT) from None
        except self._duckdb.Error as error:
            kind = type(error).__name__
            raise UndecidedError(f"the condition failed ({kind}): try it with jetcapture query") from None

    def nested(self, texts: pa.StringArray, type_: pa.DataType) -> pa.Array:
        """Return the values of JSON texts. Raises ArrowException for other texts."""
        value = f"CAST(CAST(text AS JSON) AS {sql_type(as_read('', type_))}) AS value"
        try:
            with self._lock:
                table = self._connection.from_arrow(pa.table({"text": texts})).select(value).to_arrow_table()
        except self._duckdb.Error as error:
            raise pa.ArrowInvalid("no JSON of this type") from error
        return table["value"].combine_chunks().cast(type_)
