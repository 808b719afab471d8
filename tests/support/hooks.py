"""Functions for `on_stored.call`, good ones and others; what the good ones were given is in `CALLS`."""

from __future__ import annotations

import asyncio
import os
import threading

from jetcapture_py import StoredObject

CALLS: list[StoredObject] = []
RELEASED = threading.Event()


def note(stored: StoredObject, location: str) -> None:
    """Remember the object, which must be there."""
    assert os.stat(location).st_size == stored.bytes  # noqa: PTH116  before anybody awaits anything
    CALLS.append(stored)


async def note_later(stored: StoredObject, location: str) -> None:
    """The same, as a coroutine function."""
    await asyncio.sleep(0)
    note(stored, location)


class Notes:
    """The same, as a class."""

    def __call__(self, stored: StoredObject, location: str) -> None:
        """Remember it."""
        note(stored, location)


def fail(stored: StoredObject, location: str) -> None:
    """Raise, with a secret."""
    raise ConnectionError("http://user:pw-Hn4kq9-x@host refused\nreally")


def leave(stored: StoredObject, location: str) -> None:
    """Try to end the process."""
    raise SystemExit(3)


def hang(stored: StoredObject, location: str) -> None:
    """Block until RELEASED is set."""
    RELEASED.wait()


async def hang_later(stored: StoredObject, location: str) -> None:
    """Wait for something that never comes, whoever cancels it."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if RELEASED.is_set():
                raise
