"""Load user objects named in the configuration as `package.module:object`."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from jetcapture_py.text import one_line

T = TypeVar("T")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_reference(text: str) -> bool:
    """Whether `text` names an object in a module."""
    return _REFERENCE.fullmatch(text) is not None


@contextmanager
def user_code(failed: Callable[[str], Exception], *passing: type[BaseException]) -> Iterator[None]:
    """Turn any error of user code into `failed(line)`, including sys.exit and Rust panics.

    Errors of the types `passing` pass unchanged. KeyboardInterrupt passes only in the main thread, where it is Ctrl-C.
    """
    try:
        yield
    except BaseException as error:
        elsewhere = threading.current_thread() is not threading.main_thread()
        if isinstance(error, passing) and not (elsewhere and isinstance(error, KeyboardInterrupt)):
            raise
        raise failed(one_line(error)) from error


def load(reference: str) -> object:
    """Import the object. Any failure becomes a one-line ValueError."""
    module, _, attribute = reference.partition(":")
    with user_code(lambda reason: ValueError(f"cannot import {reference}: {reason}"), KeyboardInterrupt):
        return getattr(importlib.import_module(module), attribute)


def make(reference: str, kind: str, method: str) -> object:
    """Return an object with `method`: the named one, or the result of the named class or function.

    `kind` describes it in errors. Raises ValueError with one line.
    """
    instance = load(reference)
    if callable(instance) and (isinstance(instance, type) or not hasattr(instance, method)):
        instance = created(reference, instance)
    if not callable(getattr(instance, method, None)):
        raise ValueError(f"{reference} is not a {kind}: it has no method {method}")
    return instance


def created(reference: str, factory: Callable[[], T], *passing: type[BaseException]) -> T:
    """Call the user's factory. Any failure becomes a one-line ValueError, except errors `passing`."""
    with user_code(lambda reason: ValueError(f"{reference} cannot be created: {reason}"), KeyboardInterrupt, *passing):
        return factory()
