"""The `query` command: SQL over an archive with DuckDB, one statement or a shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from jetcapture_py.config.several import only
from jetcapture_py.config.values import parse_option
from jetcapture_py.errors import ConfigError, JetcaptureError, StoreError, VanishedError
from jetcapture_py.reading.duckdb import VIEWS, ArchiveViews, connect, named_views
from jetcapture_py.reading.output import Format, discard, write
from jetcapture_py.reading.plan import Dedupe
from jetcapture_py.reading.selection import Selection, complete_end
from jetcapture_py.store.archive import AGAIN, open_archive
from jetcapture_py.text import MAX_LOGGED, one_line

if TYPE_CHECKING:
    import pyarrow as pa

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after SIGINT, by shell convention."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (signal.SIGINT, *_ENDING)
_ATTEMPTS = 10
"""How often a statement is run before an archive that changes all the time is an error."""
_PATIENCE = 0.5
"""Seconds that an interrupted statement gets to end."""
_MAX_WAIT = 2.0
"""Seconds that the next statement waits for one that was interrupted."""
_BAR_AFTER, _BAR_WIDTH = 1.0, 40
_BATCH_ROWS = 2048
"""As many as DuckDB makes at a time."""
_LITERALS = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*(?:\n|$)|/\*.*?\*/|(\$\w*\$).*?\1",
    re.DOTALL,
)
_MISSING = "SQL is missing: give a statement, or write it to standard input"
_OPTION = re.compile(r"--?[\w-]+(=.*)?")
_HELP = """A statement ends with a semicolon, and may have several lines.
archive     the stream's messages, each once
quarantine  messages that could not be decoded
objects     the archive's objects
DESCRIBE archive;  lists its columns
.tables  .help  .quit (or Ctrl-D); Ctrl-C ends a running statement"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest:
    """What to run on which archive."""

    url: str
    stream: str
    options: Mapping[str, Any]
    """The `store.options`."""
    statement: str | None
    """None: read it from standard input, or start a shell on a terminal."""
    selection: Selection
    complete_only: bool
    dedupe: Dedupe
    parquet_only: bool
    form: Format
    output: str | None


def request_of(
    words: Sequence[str], options: Iterable[str], *, stream: str | None = None, **others: Any
) -> QueryRequest:
    """Return the request of `CONFIG [SQL]` or `URL STREAM [SQL]`, with `NAME=VALUE` options.

    `stream` chooses one of a configuration for many.

    What is neither a directory nor has a scheme is a configuration. Raises ConfigError.
    """
    first, *rest = words
    try:
        given = dict(map(parse_option, options))
    except ValueError as error:
        raise ConfigError(f"--option: {error}") from error
    if "://" in first or Path(first).is_dir():
        if not rest or any(map(str.isspace, rest[0])):  # a statement in its place
            raise ConfigError("STREAM is missing: expected URL STREAM [SQL]")
        url, stream = first, rest.pop(0)
    else:
        settings = only(Path(first), stream)
        url, stream = settings.store.url, settings.source.stream
        given = dict(settings.store.options) | given
    unexpected = [word for word in rest if _OPTION.fullmatch(word)] or rest[1:]
    if unexpected:
        usage = "URL STREAM [SQL]" if url == first else "CONFIG [SQL]"
        raise ConfigError(f"unexpected argument {unexpected[0]}: expected {usage}")
    return QueryRequest(url=url, stream=stream, options=given, statement=rest[0] if rest else None, **others)


def run(request: QueryRequest) -> int:
    """Run the statement, or a shell; return the exit code. Raises JetcaptureError."""
    if util.find_spec("duckdb") is None:
        raise JetcaptureError("duckdb is missing: pip install 'jetcapture[query]'")
    statement = request.statement
    if statement is None and not sys.stdin.isatty():
        statement = sys.stdin.read()
        if not statement.strip():
            raise JetcaptureError(_MISSING)
    with _terminable(), _session(request) as session:
        try:
            if statement is None:
                _shell(session)
                session.close(0)
            elif not session.run(statement):
                raise JetcaptureError(_MISSING)
        except KeyboardInterrupt as interrupt:
            code = 128 + interrupt.number if isinstance(interrupt, _Terminated) else INTERRUPTED
            with suppress(OSError):  # the terminal may be gone
                sys.stderr.write("jetcapture: interrupted\n")
            session.close(code)
            return code
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP as when the terminal is closed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise _Terminated in the main thread on SIGTERM and SIGHUP, so that temporary files are removed."""

    def terminate(number: int, _frame: FrameType | None) -> NoReturn:
        raise _Terminated(number)

    previous = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _session(request: QueryRequest) -> Iterator[_Session]:
    directory = Path(tempfile.mkdtemp(prefix="jetcapture-query-"))
    try:
        session = _Session(request, directory)
        try:
            yield session
        finally:
            session.close(1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Session:
    """A DuckDB in memory with the archive's views. Statements run in a thread, so that signals can end them."""

    def __init__(self, request: QueryRequest, directory: Path) -> None:
        self.request = request
        self._directory = directory
        self._progress = sys.stderr.isatty()
        self.connection = connect(directory / "spilled", progress=self._progress)
        self._done = threading.Event()  # after a signal, Python 3.11 may call a thread that it joins dead
        self._done.set()
        self._interrupted = False
        self._writing = False
        self._views: ArchiveViews | None = None

    def run(self, text: str) -> int:
        """Run statements, and write the rows of the last one; return how many there are.

        Raises JetcaptureError, KeyboardInterrupt.
        """
        import duckdb

        if not self._done.wait(_MAX_WAIT):
            raise JetcaptureError(
                "the statement that was interrupted has not ended yet: try again, or leave with Ctrl-D"
            )
        try:
            statements = self.connection.extract_statements(text)
        except duckdb.Error as error:
            raise self._explained(error) from error
        for number, statement in enumerate(statements, 1):
            returns = duckdb.ExpectedResultType.QUERY_RESULT in statement.expected_result_type
            last = number == len(statements)
            self._guarded(partial(self._execute, statement.query, returns=returns, last=last))
        return len(statements)

    def close(self, code: int) -> None:
        """Close the connection; while a statement is running, which that would wait for, exit with `code` instead."""
        if self._done.is_set():
            self.connection.close()
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        discard()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, with a progress bar; end it on a signal."""
        errors: list[BaseException] = []
        done = threading.Event()

        def caught() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self._interrupted = self._writing = False
        started = time.monotonic()
        worker = threading.Thread(target=caught, name="query", daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a signal now would leave `_done` clear for ever
        try:
            self._done = done
            worker.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            while not done.wait(0.1):
                if self._progress and not self._writing and time.monotonic() - started > _BAR_AFTER:
                    self._draw(self.connection.query_progress())
        except KeyboardInterrupt:
            self._interrupted = True
            threading.Thread(target=self._interrupt, args=(done,), name="interrupt", daemon=True).start()
            done.wait(_PATIENCE)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # another thread may have taken a signal before
            self._begin()
        if errors:
            raise errors[0]

    def _interrupt(self, done: threading.Event) -> None:
        """Interrupt a statement until it has ended: DuckDB forgets an interrupt when it begins to execute."""
        import duckdb

        with suppress(duckdb.ConnectionException):  # it has just ended, and the connection is closed
            while not done.wait(0.05):
                self.connection.interrupt()

    def _execute(self, query: str, *, returns: bool, last: bool) -> None:
        """Run one statement; again, if objects that it reads were removed or rewritten meanwhile."""
        import duckdb

        if self._views is not None:
            self._views.failure()  # that of an earlier statement
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._create(query, again=attempt > 1)
                if self._interrupted:
                    return
                if returns:
                    self._read(query, last=last)
                else:
                    self.connection.execute(query)
                return
            except (duckdb.Error, OSError, StoreError) as error:
                if self._interrupted:
                    return
                failure = (self._views.failure() if self._views else None) or error
                if self._views is None or not (isinstance(failure, VanishedError) or self._views.outdated()):
                    raise self._explained(failure) from error
                if self._writing or attempt == _ATTEMPTS:
                    raise JetcaptureError(
                        f"objects are gone, removed by maintenance while the statement ran: {AGAIN}"
                    ) from error

    def _create(self, query: str, *, again: bool) -> None:
        """Create the views that a statement names, of the objects as of now; with `again`, also those that its own
        views or tables may read."""
        names = sorted({*named_views(query), *(self._views.planned if again and self._views else ())})
        if not names:
            return
        if self._views is None:
            request = self.request
            files, selection = open_archive(request.url, request.options), request.selection
            if request.complete_only:
                selection = selection._replace(end=complete_end(files, request.stream, selection.end))
            links = self._directory / "objects"
            links.mkdir(exist_ok=True)
            self._views = ArchiveViews(
                self.connection,
                files,
                request.stream,
                selection,
                directory=links,
                dedupe=request.dedupe,
                parquet_only=request.parquet_only,
            )
        known = dict(self._views.unread)
        self._views.create(names)
        sys.stderr.writelines(f"{notice}\n" for notice in self._views.unread if notice not in known)

    def _read(self, query: str, *, last: bool) -> None:
        """Run a statement that may return rows; write those of the last one, and leave no result open."""
        relation: Any = self.connection.sql(query)
        if relation is None:  # DuckDB 1 has run it, and it returned none
            return
        reader = relation.to_arrow_reader(_BATCH_ROWS)
        try:
            if last:
                self._write(reader)
            else:
                deque(reader, maxlen=0)
        finally:
            reader.close()

    def _write(self, rows: pa.RecordBatchReader) -> None:
        request = self.request
        if request.form == "table" and rows.schema.names == ["explain_key", "explain_value"]:
            texts = rows.read_all().column(1).to_pylist()
            self._begin()
            sys.stdout.writelines(f"{text}\n" for text in texts)
            return
        write(rows, request.form, request.output, request.options, begin=self._begin)

    def _begin(self) -> None:
        """Remove the progress bar, before rows are written."""
        if self._progress and not self._writing:
            self._writing = True
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._writing = True

    def _draw(self, percent: float) -> None:
        filled = int(max(0.0, min(percent, 100.0)) / 100 * _BAR_WIDTH)
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {max(0.0, percent):3.0f} %")
        sys.stderr.flush()

    def _explained(self, error: Exception) -> JetcaptureError:
        """Return an error of DuckDB or of the system in one line."""
        if isinstance(error, JetcaptureError):
            return error
        text = str(error).partition("\n\nLINE ")[0]
        if "TProtocolException" in text or "Failed to read file" in text:
            text = f"{text}; jetcapture verify --deep names damaged objects"
        return JetcaptureError(one_line(self._views.shown(text) if self._views else text, MAX_LOGGED))


# ---------------------------------------------------------------------- shell


def _shell(session: _Session) -> None:
    """Read statements from the terminal until it ends. Raises _Terminated."""
    sys.stdout.write(f"SQL over {', '.join(VIEWS)} of stream {session.request.stream}; .help explains, Ctrl-D ends\n")
    with _history():
        lines: list[str] = []
        while True:
            try:
                line = input("        -> " if lines else "jetcapture> ")
            except (EOFError, OSError):  # OSError: the terminal is gone
                with suppress(OSError):
                    sys.stdout.write("\n")
                return
            except KeyboardInterrupt as interrupt:
                if isinstance(interrupt, _Terminated):
                    raise
                sys.stdout.write("\n")
                lines.clear()
                continue
            word = line.strip()
            if not lines and word.removesuffix(";") in (".quit", ".exit", "quit", "exit"):
                return
            if not lines and word.startswith("."):
                sys.stdout.write("\n".join(VIEWS) + "\n" if word == ".tables" else f"{_HELP}\n")
                continue
            lines.append(line)
            text = "\n".join(lines)
            if is_complete(text):
                lines.clear()
                _answer(session, text)
            elif not text.strip():
                lines.clear()


def _answer(session: _Session, text: str) -> None:
    try:
        session.run(text)
    except JetcaptureError as error:
        sys.stderr.write(f"{one_line(error.args[0], MAX_LOGGED)}\n")
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, _Terminated):
            raise
        sys.stderr.write("interrupted\n")


def is_complete(text: str) -> bool:
    """Whether SQL ends with a semicolon that is not part of a text, a name or a comment."""
    rest = _LITERALS.sub(" ", text)
    return rest.rstrip().endswith(";") and not any(mark in rest for mark in ("'", '"', "/*"))


@contextmanager
def _history() -> Iterator[None]:
    """Keep the lines that are typed in a file of the user's."""
    try:
        import readline

        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state, "jetcapture", "query_history")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except (ImportError, OSError, RuntimeError):  # no such library, or no home
        yield
        return
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(path)
