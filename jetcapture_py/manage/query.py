"""The `query` command: SQL over an archive with DuckDB, one statement or a shell."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from jetcapture_py.errors import ConfigError, JetcaptureError, StoreError, VanishedError
from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading.columns import take_nulled
from jetcapture_py.reading.duckdb import LATEST, VIEWS, ArchiveViews, archive_views, list_views, named_views
from jetcapture_py.reading.output import Format, visible, write
from jetcapture_py.reading.plan import Dedupe, ReadRequest, no_archive
from jetcapture_py.reading.selection import Latest, Selection, complete_end
from jetcapture_py.store.archive import ArchiveFiles, File, open_archive
from jetcapture_py.text import MAX_LOGGED, one_line

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

_ATTEMPTS = 10
"""Attempts to run a statement on an archive that keeps changing."""
_SHOWN_ROWS = 40
"""Rows of a table on a terminal: the first and the last 20."""
_EXPLAIN = ["explain_key", "explain_value"]
"""The columns of EXPLAIN, whose text is shown as it is."""
_SHOW_TABLES = re.compile(r"\s*SHOW\s+(ALL\s+)?TABLES\s*;?\s*", re.IGNORECASE)
_UNKNOWN = re.compile(rf"Catalog Error: Table with name ({'|'.join((*VIEWS, LATEST))}) does not exist", re.IGNORECASE)
_BATCH_ROWS = 2048
"""DuckDB's own batch size."""
_MISSING = "SQL is missing: give a statement, or write it to standard input"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """A statement or shell, and its archives."""

    archives: Sequence[ChosenArchive]
    schemas: bool = False
    """Whether each stream is a schema; otherwise there is one archive."""
    statement: str | None = None
    """Without it, SQL is read from standard input, or a shell starts on a terminal."""
    selection: Selection
    complete_only: bool
    dedupe: Dedupe
    parquet_only: bool
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Types of columns of `archive`; where each stream is a schema, of `orders.column`."""
    latest: Latest | None = None
    """What the view `latest` is; None without one."""
    form: Format
    output: str | None
    everything: bool = False
    """Whether a table on a terminal has all rows and columns."""

    @property
    def views(self) -> Sequence[str]:
        """The views of a stream."""
        return VIEWS if self.latest is None else (*VIEWS, LATEST)


def run(request: QueryRequest) -> int:
    """Run the statement, or a shell; return the exit code. Raises JetcaptureError."""
    statement = request.statement
    if statement is None and not sys.stdin.isatty():
        statement = sys.stdin.read()
        if not statement.strip():
            raise JetcaptureError(_MISSING)
    try:
        with _ended_by_signals(), _session(request) as session:
            if statement is None:
                _shell(session)
            elif not session.run(statement):
                raise JetcaptureError(_MISSING)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("jetcapture: interrupted\n")
        return 128 + int(next(iter(interrupt.args), signal.SIGINT))  # by shell convention
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt with the signal's number on SIGTERM and SIGHUP, so that temporary files are removed."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # ignored, as under nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _session(request: QueryRequest) -> Iterator[_Session]:
    opened: list[tuple[ChosenArchive, ArchiveFiles]] = []
    views: dict[str, ReadRequest] = {}
    types: dict[str, dict[str, pa.DataType]] = defaultdict(dict)
    for name, type_ in request.types.items():
        stream, _, column = name.partition(".")
        types[stream.lower()][column] = type_
    for archive in request.archives:
        same = (files for one, files in opened if (one.url, one.options) == (archive.url, archive.options))
        files = next(same, None) or open_archive(archive.url, archive.options)
        opened.append((archive, files))
        rows = ReadRequest(
            files=files,
            stream=archive.stream,
            selection=request.selection,
            dedupe=request.dedupe,
            parquet_only=request.parquet_only,
            types=types.pop(archive.stream.lower(), {}) if request.schemas else request.types,
        )
        views |= {f"{archive.stream}.{name}" if request.schemas else name: rows for name in request.views}
    if request.schemas and types:
        raise ConfigError(
            f"--type: expected STREAM.COLUMN=TYPE with the name of a stream, got {next(iter(request.types))}"
        )
    remote = not all(files.local for _, files in opened)
    with archive_views(remote=remote) as (connection, created), ThreadPoolExecutor(1, "query") as worker:
        for archive in request.archives if request.schemas else ():
            created.create_schema(archive.stream)
        yield _Session(request, views, connection, worker, created)


class _Session:
    """An in-memory DuckDB with views of archives, by name."""

    def __init__(
        self,
        request: QueryRequest,
        known: Mapping[str, ReadRequest],
        connection: DuckDBPyConnection,
        worker: ThreadPoolExecutor,
        views: ArchiveViews,
    ) -> None:
        self.request, self.connection = request, connection
        self._known, self._worker, self._views = known, worker, views
        self._ends: dict[str, datetime] = {}
        """Ends of the complete range of streams."""
        self._notices: set[str] = set()
        self._writing = False

    def run(self, text: str) -> int:
        """Run statements and write the rows of the last one; return their number.

        They run in a thread, because DuckDB does not handle signals while rows are read. Ctrl-C ends the statement, a
        second one the process. Raises JetcaptureError, KeyboardInterrupt.
        """
        done = self._worker.submit(self._run, text)
        try:
            return done.result()
        except KeyboardInterrupt:
            handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
            while not wait([done], 0.05).done:
                self.connection.interrupt()  # again: DuckDB forgets it when it begins to execute
            signal.signal(signal.SIGINT, handler)
            raise

    def _run(self, text: str) -> int:
        import duckdb

        try:
            statements = self.connection.extract_statements(text)
        except duckdb.Error as error:
            raise self._explained(error) from error
        for number, statement in enumerate(statements, 1):
            returns = duckdb.ExpectedResultType.QUERY_RESULT in statement.expected_result_type
            self._execute(statement.query, returns=returns, last=number == len(statements))
        return len(statements)

    def _execute(self, query: str, *, returns: bool, last: bool) -> None:
        """Run one statement; retry if objects that it reads were removed or rewritten meanwhile."""
        import duckdb

        self._writing = False
        if self.request.schemas and _SHOW_TABLES.fullmatch(query):
            query = list_views(self._known)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._views.nulled.clear()
                self._create(query, again=attempt > 1)
                if returns:
                    self._read(query, last=last)
                else:
                    self.connection.execute(query)
                if nulled := take_nulled(self._views.nulled):
                    sys.stderr.write(f"{nulled}\n")
                return
            except (duckdb.Error, OSError, StoreError) as error:
                explained = self._explained(error)
                if not isinstance(explained, VanishedError) or self._writing or attempt == _ATTEMPTS:
                    raise explained from error

    def _create(self, query: str, *, again: bool) -> None:
        """Create the views that a statement names, with the current objects; with `again`, also views that its own
        views or tables may read."""
        import duckdb

        schema = ""
        with suppress(duckdb.Error):  # in a failed transaction
            schema = self.connection.execute("SELECT current_schema()").fetchall()[0][0]
        for name in sorted({*named_views(query, self._known, schema), *(self._views.plans if again else ())}):
            rows = self._rows(name)
            if name.endswith("objects"):
                self._views.create_objects(name, self._objects(rows))
                continue
            if name.endswith("quarantine"):
                rows = replace(rows, quarantine=True, types=None, selection=replace(rows.selection, keys=None))
            plan = rows.plan(for_sql=True)
            if name.endswith(LATEST) and self.request.latest is not None:
                self._views.create_latest(name, plan, self.request.latest)
            else:
                self._views.create(name, plan)
            for reason in plan.table.unread.values():
                if (notice := f"{reason}: left out of {name}") not in self._notices:
                    self._notices.add(notice)
                    sys.stderr.write(f"{notice}\n")

    def _rows(self, view: str) -> ReadRequest:
        """Return what a view reads: with --complete-only, up to the watermark when its stream was first read."""
        rows = self._known[view]
        if not self.request.complete_only:
            return rows
        if rows.stream not in self._ends:
            self._ends[rows.stream] = complete_end(rows.files, rows.stream, rows.selection.end)
        return replace(rows, selection=replace(rows.selection, end=self._ends[rows.stream]))

    def _objects(self, rows: ReadRequest) -> Iterator[File]:
        """Yield the objects that may hold messages of the selection, by their names."""
        files, stream = rows.files, rows.stream
        listed = sorted(files.files(stream), key=lambda file: file.path)
        if not listed:
            raise no_archive(files, stream)
        for file in listed:
            if file.name is not None and rows.selection.may_hold_name(file.name):
                yield file

    def _read(self, query: str, *, last: bool) -> None:
        """Run a statement; write its rows if it is the `last` one, and leave no result open."""
        relation: Any = self.connection.sql(query)
        if relation is None:  # DuckDB 1 has run it, and it returned none
            return
        if last and self._is_shown and relation.columns != _EXPLAIN:
            self._show(relation)
            return
        reader = relation.to_arrow_reader(_BATCH_ROWS)
        try:
            if last:
                self._write(reader)
            else:
                deque(reader, maxlen=0)
        finally:
            reader.close()

    @property
    def _is_shown(self) -> bool:
        request = self.request
        return request.form == "table" and request.output is None and not request.everything and sys.stdout.isatty()

    def _show(self, relation: Any) -> None:
        """Write a table as DuckDB's shell does: some rows, and the columns that fit."""
        shown = io.StringIO()
        with redirect_stdout(shown):  # DuckDB only prints it
            relation.show(max_rows=_SHOWN_ROWS, max_width=shutil.get_terminal_size().columns)
        self._begin()
        sys.stdout.writelines(f"{visible(line)}\n" for line in shown.getvalue().rstrip("\n").split("\n"))

    def _write(self, rows: pa.RecordBatchReader) -> None:
        request = self.request
        if request.form == "table" and rows.schema.names == _EXPLAIN:
            texts = rows.read_all().column(1).to_pylist()
            self._begin()
            sys.stdout.writelines(f"{text}\n" for text in texts)
            return
        write(rows, request.form, request.output, request.archives[0].options, begin=self._begin)

    def _begin(self) -> None:
        self._writing = True

    def _explained(self, error: Exception) -> JetcaptureError:
        """Return an error of DuckDB or of the system in one line, with what to do."""
        explained = self._views.explained(error)
        missing = str(explained).partition("!")[0]
        if (unknown := _UNKNOWN.match(missing)) is None:
            return explained
        if self.request.latest is None and unknown[1].lower() == LATEST:
            return JetcaptureError(f"{missing}: it needs --by")
        if self.request.schemas:
            stream = self.request.archives[0].stream
            return JetcaptureError(f'{missing}! Name its stream, as in "{stream}".archive; SHOW TABLES lists all')
        return explained


def _shell(session: _Session) -> None:
    """Read statements from the terminal until it ends."""
    with suppress(ImportError):
        import readline  # noqa: F401  it edits lines
    request = session.request
    of = "each stream; SHOW TABLES lists them" if request.schemas else f"stream {request.archives[0].stream}"
    about = f"SQL over {', '.join(request.views)} of {of}"
    sys.stdout.write(f"{about}; a semicolon at the end of a line runs it, Ctrl-D ends\n")
    lines: list[str] = []
    while True:
        try:
            line = input("        -> " if lines else "jetcapture> ")
            if not lines and line.strip().removesuffix(";") in ("quit", "exit", ".quit", ".exit"):
                return
            lines += [line] if lines or line.strip() else []
            if line.rstrip().endswith(";"):
                text = "\n".join(lines)
                lines.clear()
                session.run(text)
        except JetcaptureError as error:
            sys.stderr.write(f"{one_line(error.args[0], MAX_LOGGED)}\n")
        except (EOFError, OSError):  # OSError: the terminal is gone
            with suppress(OSError):
                sys.stdout.write("\n")
            return
        except KeyboardInterrupt as interrupt:
            if interrupt.args:  # another signal
                raise
            lines.clear()
            sys.stderr.write("interrupted\n")
