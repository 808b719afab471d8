"""How a job ends."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from jetcapture_py.errors import ConfigError, JetcaptureError
from spark_jobs.job import _pass_on, guarded


def raising(error: BaseException) -> None:
    raise error


def interrupted_in_py4j() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise Py4JError("Gateway must be connected to send cancel cmd.")  # noqa: B904 - Py4J doesn't either


def interrupted_in_a_callback() -> None:
    released = Py4JError()  # as a reference to a Java object
    reference = weakref.ref(released, lambda _: signal.raise_signal(signal.SIGINT))
    del released
    assert reference() is None
    threading.Event().wait(60)
    raise AssertionError("not interrupted")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt even if the tests run in the background, where a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: raising(JetcaptureError("no such stream")), 1, "query: no such stream\n"),
        (lambda: raising(ConfigError("store.url: a", "stream: b")), 2, "query: store.url: a\nquery: stream: b\n"),
        (lambda: raising(KeyboardInterrupt()), 130, "query: interrupted\n"),
        (interrupted_in_py4j, 130, "query: interrupted\n"),
        (interrupted_in_a_callback, 130, "query: interrupted\n"),
    ],
)
def test_a_job_ends_with_one_line_and_an_exit_code(
    job: object, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(job)
    assert guarded("query", job) == code
    assert capsys.readouterr().err == said


def test_what_every_jvm_says_at_its_start_is_dropped_and_everything_else_passes() -> None:
    (theirs, into), (out, target) = os.pipe(), os.pipe()
    noise = (
        b"WARNING: Using incubator modules: jdk.incubator.vector",
        b"Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
        b'Setting default log level to "WARN".',
        b"To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).",
        b"26/11/25 19:51:55 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform",
        b'Setting Spark log level to "FATAL".',
    )
    told = (
        b"java.lang.OutOfMemoryError: Java heap space",
        b"26/11/25 19:51:55 ERROR Executor: lost",
        b"\r[Stage 1:> (0 + 2) / 8]",
    )
    os.write(into, b"\n".join([*noise[:3], told[0], *noise[3:], *told[1:]]))
    os.close(into)
    _pass_on(theirs, target)
    assert os.read(out, 1 << 16) == b"\n".join(told)
    os.close(out)
