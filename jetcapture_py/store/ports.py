"""What a store must do: one of the user's own (`Store`, and `NoteStore` if it keeps small files as well)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import pyarrow as pa

from jetcapture_py.archive.layout import ObjectName

NoteChange = Callable[[bytes | None], bytes | None]
"""Maps a note's content (None without one) to its new content; None leaves it unchanged."""


class Store(Protocol):
    """Stores objects.

    Obligations of `put`: when it returns, the object is durable and visible under its name, whole; when it raises, no
    part of it is visible. Putting an object again is not an error. It is called from several threads. Whatever it
    raises, the object is held and put again, until `store.retry_for` has passed; `PermanentStoreError` is logged as an
    error at once. It must eventually return or raise: a call that hangs blocks one of `store.concurrency` threads.

    `store.type` names a class or function that is called with `store.url` and `store.options`, and returns a store. One
    that also has the methods of `NoteStore` keeps the watermark.
    """

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` as `name` and return its location. Raises `StoreError`, `PermanentStoreError`."""
        ...

    def probe(self) -> None:
        """Check that objects can be stored by storing and removing a small one. Raises the errors of `put`."""
        ...


@runtime_checkable
class NoteStore(Protocol):
    """A store that also keeps small files that are rewritten, such as the watermark. Methods raise `StoreError`.

    Paths are relative to the archive's root.
    """

    def read_note(self, path: str) -> bytes | None:
        """Read a file; return None if it does not exist."""
        ...

    def list_notes(self, directory: str) -> list[str]:
        """List the files directly in a directory, by their paths; none if it does not exist."""
        ...

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a file atomically with the result of `change` for its content, unless that is None.

        Obligation: a concurrent write by another process is not lost; the change is reapplied to it. `change` may be
        called several times; the last result is used.
        """
        ...
