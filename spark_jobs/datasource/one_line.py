"""Let Spark show an error of ours in one line: what is wrong, without the traceback of the worker that noticed it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from jetcapture_py.errors import JetcaptureError

Entry = TypeVar("Entry", bound=type)

_IN_WORKER = "PYTHON_WORKER_FACTORY_"
"""Spark gives variables with this beginning to its Python workers."""
_HIDE = "SPARK_HIDE_TRACEBACK"
"""A worker that has failed looks at it, answers with its exception, and ends."""
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
    """Have the methods that Spark calls of a data source, a reader or a writer raise JetcaptureError in one line."""
    for name in _ENTRIES:
        if callable(method := vars(entry).get(name)):
            setattr(entry, name, _in_one_line(method))
    return entry


def _in_one_line(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        with _without_traceback():
            found = method(*arguments, **named)
        return _iterated(found) if isinstance(found, Iterator) else found

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
