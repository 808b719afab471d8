"""Make Spark show our errors in one line, without the traceback of the Python worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from jetcapture_py.errors import JetcaptureError

Entry = TypeVar("Entry", bound=type)

_IN_WORKER = "PYTHON_WORKER_FACTORY_"
"""Spark sets variables with this prefix for its Python workers."""
_HIDE = "SPARK_HIDE_TRACEBACK"
"""A worker that fails reports its exception without a traceback if this is set, and ends."""
_ENTRIES = (
    "schema",
    "reader",
    "writer",
    "streamWriter",
    "initialOffset",
    "latestOffset",
    "reportLatestOffset",
    "partitions",
    "read",
    "write",
)
"""Methods that Spark calls in a worker. An error of `streamReader` needs its traceback: Spark raises another one."""


def one_line_errors(entry: Entry) -> Entry:
    """Make a data source, reader or writer raise JetcaptureError in one line from the methods that Spark calls."""
    for name in _ENTRIES:
        if callable(method := vars(entry).get(name)):
            setattr(entry, name, _one_line(method))
    return entry


def _one_line(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        with _without_traceback():
            answer = method(*arguments, **named)
        return _iterated(answer) if isinstance(answer, Iterator) else answer

    return called


def _iterated(items: Iterator[Any]) -> Iterator[Any]:
    with _without_traceback():
        yield from items


@contextmanager
def _without_traceback() -> Iterator[None]:
    try:
        yield
    except JetcaptureError:
        if any(name.startswith(_IN_WORKER) for name in os.environ):
            os.environ[_HIDE] = "1"
        raise
