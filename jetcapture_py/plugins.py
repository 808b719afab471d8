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
    """Raise what `failed` makes of one line in place of whatever the code raises, also sys.exit and panics of Rust.

    Errors `passing` stay as they are; KeyboardInterrupt only in the main thread, where it is Ctrl-C and not the code's.
    """
    try:
        yield
    except BaseException as error:
        elsewhere = threading.current_thread() is not threading.main_thread()
        if isinstance(error, passing) and not (elsewhere and isinstance(error, KeyboardInterrupt)):
            raise
        raise failed(one_line(error)) from error


def load(reference: str) -> object:
    """Return the object. Raises ValueError with one line when it cannot be imported, whatever its module does."""
    module, _, attribute = reference.partition(":")
    with user_code(lambda reason: ValueError(f"cannot import {reference}: {reason}"), KeyboardInterrupt):
        return getattr(importlib.import_module(module), attribute)


def make(reference: str, kind: str, method: str) -> object:
    """Return an object with `method`: the named one, or what the named class or function returns.

    `kind` is what it should be, for the error. Raises ValueError with one line.
    """
    instance = load(reference)
    if callable(instance) and (isinstance(instance, type) or not hasattr(instance, method)):
        instance = created(reference, instance)
    if not callable(getattr(instance, method, None)):
        raise ValueError(f"{reference} is not a {kind}: it has no method {method}")
    return instance


def created(reference: str, factory: Callable[[], T], *passing: type[BaseException]) -> T:
    """Call the named class or function. Raises ValueError with one line, whatever it does, or errors `passing`."""
    with user_code(lambda reason: ValueError(f"{reference} cannot be created: {reason}"), KeyboardInterrupt, *passing):
        return factory()
