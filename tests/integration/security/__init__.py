"""What others may send, and what they may learn: names, secrets, permissions, TLS, files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def leaves() -> Iterator[None]:
    """Raise the first error of a group, instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
