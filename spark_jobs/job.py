"""Shared by the jobs: their commands, the Spark session, one-line errors and exit codes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from importlib import util
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from typer import Argument, Option, Typer
from typer.core import TyperCommand
from typer.main import get_command

import jetcapture_py
from jetcapture_py import errors, threads
from jetcapture_py.archive import layout
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.store.archive import AGAIN, IF_DAMAGED, SHARE
from jetcapture_py.text import MAX_LOGGED, one_line
from spark_jobs.datasource import NatsDataSource
from spark_jobs.datasource.combined import JetcaptureDataSource
from spark_jobs.java import require_java
from spark_jobs.reading.latest import ERROR_LOGGERS
from spark_jobs.reading.location import spark_settings

_TIME_ZONE = "spark.sql.session.timeZone"
_WORKER_PATH = "spark.executorEnv.PYTHONPATH"
_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after SIGINT, by shell convention."""
_CALL = re.compile(r"^An error occurred while calling \S+\n: (?:[\w.]+: (?=\[))?")
"""Py4J's prefix of a JVM error, including the Java class of errors with an error class in brackets."""
_PY4J_LOGS = (None, "py4j.java_gateway", "py4j.clientserver")
"""Loggers that Py4J writes tracebacks to; None is the root logger."""
_NOT_INSTALLED = (
    "install jetcapture where Spark runs, or pass it to spark-submit with --py-files and call "
    "spark.dataSource.register(NatsDataSource), from spark_jobs.datasource"
)
_NOISE = re.compile(
    rb"WARNING: |OpenJDK 64-Bit Server VM warning: Sharing is only|Using Spark's default log4j"
    rb"|Setting default log level to |To adjust logging level use |Setting Spark log level to "
    rb"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?:INFO|WARN) "
)
"""Lines printed by a JVM and Spark at every start."""
_OURS = re.compile(r"jetcapture_py\.errors\.\w+: (.*)")
"""A JetcaptureError as raised by the data sources, without a traceback."""
_RAISED_BY_QUERY = re.compile(r"\[USER_RAISED_EXCEPTION\] (.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
_FILE_IS_GONE = re.compile(
    r"\[FAILED_READ_FILE\.FILE_NOT_EXIST\] .*? file (\S+?)\.? |\[PATH_NOT_FOUND\] Path does not exist: (\S+\.parquet)"
)


_HELP = {"help_option_names": ["-h", "--help"]}

JobArchive = Annotated[
    list[str] | None, Argument(metavar="URL STREAM", help="The archive's store.url and the stream, or --config.")
]
EngineOption = Annotated[
    Literal["spark", "arrow"],
    Option("--engine", help="arrow: read with the store's driver and Arrow if Spark has no file system for the URL."),
]
NoSurvey = Annotated[
    bool, Option("--no-survey", help="Do not read the rows of a query once before; fail at the first invalid subject.")
]


def command(name: str, work: Callable[..., None], **settings: Any) -> TyperCommand:
    """Return the command of a job, for `jetcapture spark` and for `main`.

    Its options are the parameters of `work`, its help is the docstring, and its exit codes are those of `guarded`.
    """

    @wraps(work)
    def run(**given: Any) -> NoReturn:
        leave(guarded(name, partial(work, **given)))

    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, context_settings=_HELP | settings)(run)
    return cast("TyperCommand", get_command(app))


def main(job: TyperCommand, arguments: Sequence[str] | None = None) -> int:
    """Run a job with the arguments of a command line, by default this process's; return the exit code."""
    try:
        job.main(None if arguments is None else list(arguments), prog_name=job.name)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def session(app_name: str, *urls: str | None) -> SparkSession:
    """Return the active Spark session, or a new one that can read and write at `urls`.

    A new session logs nothing, and is local unless spark-submit sets a master; with SPARK_REMOTE it uses Spark
    Connect. Its time zone is UTC unless `spark.sql.session.timeZone` is configured. This package's directory is
    appended to `spark.executorEnv.PYTHONPATH`. If this starts Spark, packages for the URLs are added, and downloaded if
    needed. The formats `nats` and `jetcapture` are registered if Spark does not discover them.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        spark = _new_session(app_name, urls)
    # Spark discovers the formats in installed packages, not in --py-files
    for module, source in (("pyspark_nats", NatsDataSource), ("pyspark_jetcapture", JetcaptureDataSource)):
        if util.find_spec(module) is None or not Path(layout.__file__).is_file():
            spark.dataSource.register(source)
    return spark


def _new_session(app_name: str, urls: Sequence[str | None]) -> SparkSession:
    builder = SparkSession.builder.appName(app_name)
    with _without_noise(), warnings.catch_warnings():
        for name, value in _settings(urls).items():
            builder = builder.config(name, value)
        # Connect sets all of them again on the session and warns about static ones
        warnings.filterwarnings("ignore", "Failed to set ", module="pyspark.sql.connect.conf")
        spark = builder.getOrCreate()
    if _TIME_ZONE not in spark.conf.getAll:  # not set by spark-submit, a file or the server
        spark.conf.set(_TIME_ZONE, "UTC")
    return spark


@contextmanager
def _without_noise() -> Iterator[None]:
    """Drop `_NOISE` from the standard error of a JVM started in the block, as long as it runs."""
    reading, writing = os.pipe()
    sys.stderr.flush()
    target = os.dup(2)
    passing = threading.Thread(target=_pass_on, args=(reading, target), name="stderr of the JVM", daemon=True)
    passing.start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    except BaseException:
        os.dup2(target, 2)
        passing.join(1)  # its text about the failure comes first
        raise
    os.dup2(target, 2)


def _pass_on(reading: int, target: int) -> None:
    rest = b""
    while chunk := os.read(reading, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if not _NOISE.match(line))
        if rest.startswith(b"\r"):  # a progress bar, which has no end of a line
            kept, rest = kept + rest, b""
        with suppress(OSError):
            os.write(target, kept)
    with suppress(OSError):
        os.write(target, rest)
    os.close(reading)
    os.close(target)


def _settings(urls: Sequence[str | None]) -> dict[str, str]:
    remote = os.environ.get("SPARK_REMOTE")
    if remote is not None and not remote.startswith("local"):
        return {}
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings: dict[str, str] = {}
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # otherwise spark-submit started the JVM and chose the rest
        require_java()
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        terminal = sys.stderr.isatty()
        if terminal:
            os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))  # the width of Spark's bar
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": str(terminal).lower(),
            "spark.log.level": "FATAL",  # the job prints errors in one line
            "spark.sql.warehouse.dir": tempfile.gettempdir(),  # otherwise Spark creates one in the working directory
        }
        if remote is None:
            settings["spark.master"] = "local[*]"
        settings |= spark_settings(*urls)
    return settings | {_WORKER_PATH: _worker_path(settings, remote)}


def _worker_path(settings: Mapping[str, str], remote: str | None) -> str:
    """Return the workers' import path: the user's, and the location of this package on the driver."""
    path = str(Path(jetcapture_py.__file__).resolve().parents[1])
    if remote is not None:
        return path
    # Spark's launcher reads the configuration, so it is unknown before the JVM runs
    SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())))
    given = SparkConf().get(_WORKER_PATH)
    return path if given is None else os.pathsep.join((given, path))


def guarded(name: str, job: Callable[[], object]) -> int:
    """Run `job`; print a failure in one line. Return 0, 1 on failure, 2 for an invalid setting, 130 if interrupted."""
    for logger in ERROR_LOGGERS:
        PySparkLogger.getLogger(logger).disabled = True
    for source in _PY4J_LOGS:
        logging.getLogger(source).addFilter(_not_of_py4j)
    try:
        with _ignored_interrupts_repeated():
            job()
    except ConfigError as error:
        sys.stderr.writelines(f"{name}: {problem}\n" for problem in error.problems)
        return 2
    except (KeyboardInterrupt, JetcaptureError, PySparkException, Py4JError, OSError) as error:
        if _was_interrupted(error):
            sys.stderr.write(f"{name}: interrupted\n")
            return _INTERRUPTED
        sys.stderr.write(f"{name}: {spark_error(error)}\n")
        return 1
    finally:
        for source in _PY4J_LOGS:
            logging.getLogger(source).removeFilter(_not_of_py4j)
    return 0


def leave(code: int) -> NoReturn:
    """Exit with the result of `guarded`; after an interrupt, without Python's cleanup.

    The server has already been told to cancel the query, but gRPC's threads may still run, and can abort the process
    during the cleanup.
    """
    if code == _INTERRUPTED:
        threads.leave(code)
    sys.exit(code)


@contextmanager
def _ignored_interrupts_repeated() -> Iterator[None]:
    """Repeat SIGINT when Python ignores its KeyboardInterrupt, as in the callbacks that release Py4J's objects."""
    default, repeats = sys.unraisablehook, list[threading.Timer]()

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            default(ignored)
        elif (main := threading.main_thread().ident) is not None:  # once the callback has returned
            repeats.append(threading.Timer(1, signal.pthread_kill, (main, signal.SIGINT)))
            repeats[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = default
        for repeat in repeats:
            repeat.cancel()


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether this is KeyboardInterrupt, or an error while PySpark or Py4J handled one."""
    while error is not None and not isinstance(error, KeyboardInterrupt | JetcaptureError):
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Drop the tracebacks that Py4J logs, also with the root logger, even for interrupts."""
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def spark_error(error: BaseException) -> str:
    """Describe a Spark error in one line; for an error of a Python worker, the exception raised there."""
    text = error.getMessage() if isinstance(error, PySparkException) else _CALL.sub("", str(error))
    text = (text or type(error).__name__).strip()
    failed = _RAISED_BY_QUERY.search(text)  # Spark wraps errors of subqueries in "Exception thrown in awaitResult"
    if failed is not None:
        return one_line(failed.group(1), MAX_LOGGED)
    gone = _FILE_IS_GONE.search(text)
    if gone is not None:
        url = gone.group(1) or gone.group(2)
        if url.startswith("file:") and Path(unquote(urlsplit(url).path)).exists():
            return one_line(f"{url} exists here, but not on a worker of Spark: {SHARE}", MAX_LOGGED)
        return one_line(f"{url} is gone, removed by maintenance: {AGAIN}", MAX_LOGGED)
    _, traceback, frames = text.rpartition("Traceback (most recent call last):\n")
    raised = re.search(r"^(?:\w+\.)*(\w+)(?:: (.*))?$", frames, re.MULTILINE) if traceback else None
    if raised is not None:
        name, message = raised.groups()
        reason = message if message and hasattr(errors, name) else f"{name}: {message}" if message else name
    elif ours := _OURS.findall(text):
        reason = ours[-1].split(" SQLSTATE:", 1)[0]
    else:
        reason = text.split("\n", 1)[0].split(" SQLSTATE:", 1)[0]
    if "[FAILED_READ_FILE" in reason:
        reason = f"{reason.rstrip('.')}; {IF_DAMAGED}"
    if "Failed to find the data source: nats." in reason or "No module named 'spark_jobs'" in reason:
        reason = f"{reason.rstrip('.')}: {_NOT_INSTALLED}"
    return one_line(reason, MAX_LOGGED)
