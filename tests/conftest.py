"""Fixtures for every tier of tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import sys
import tempfile
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from nats.aio.client import Client
from nats.js.client import JetStreamContext

from jetcapture_py import log
from tests.support import examples as examples  # the profiles of Hypothesis
from tests.support import java
from tests.support.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.scheduling import Scheduler


def pytest_configure() -> None:
    """Have every Spark start sooner: this process's, its workers' and those of the commands that they run.

    Under nohup or in the background, commands would inherit that SIGHUP or SIGINT is ignored; a handler is not
    inherited.
    """
    java.use()
    _be_patient()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _be_patient() -> None:
    """Have clients of nats-py wait a minute for an answer, where nobody says how long: a machine may be busy."""
    for function, default in ((Client.request, 0.5), (JetStreamContext.__init__, 5)):
        values = function.__defaults__ or ()
        assert default in values
        function.__defaults__ = tuple(60.0 if value == default else value for value in values)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """Divide the tests among workers, where pytest runs with `-n`."""
    from tests.support.scheduling import Scheduler

    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first on workers."""
    if hasattr(config, "workerinput"):
        from tests.support.scheduling import turn

        items.sort(key=turn)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that was run in this process has set up logging for all of it."""
    loggers = [logging.getLogger(name) for name in ("", *log.ROOTS)]
    levels = [logger.level for logger in loggers]
    yield
    logging.captureWarnings(capture=False)
    for handler in [each for each in loggers[0].handlers if isinstance(each, log._Handler)]:
        loggers[0].removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that was run in this process has set handlers for the rest of it, which may exit."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """Start servers for the test, with `NatsServer`'s arguments but the storage; stop them after it."""
    with ExitStack() as stack:
        count = 0

        def start(extra_config: str = "", *, command: str | None = None) -> NatsServer:
            nonlocal count
            count += 1
            return stack.enter_context(NatsServer(tmp_path / f"nats-{count}", extra_config, command=command))

        yield start


@pytest.fixture
def server(nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server of the test's own."""
    return nats_server()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where a capture stores."""
    return tmp_path / "archive"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests that read with Spark; it needs Java 17."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder: Any = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.warehouse.dir", tempfile.gettempdir())
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
    )
    session = builder.getOrCreate()
    yield session
    session.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # py4j leaves closed sockets to the garbage collector
        gc.collect()
