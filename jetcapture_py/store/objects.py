"""Implement a store on a driver's few requests: publish an object under its name, and keep metadata files."""

from __future__ import annotations

import contextlib
import uuid

import pyarrow as pa

from jetcapture_py.archive.layout import PROBE, ObjectName, escape_key
from jetcapture_py.errors import ConflictError, PermanentStoreError, StoreError
from jetcapture_py.retry import retried_on_conflict
from jetcapture_py.store.ports import (
    NEW,
    Driver,
    NoteChange,
    described,
    is_permanent,
    is_there,
    is_unknown_header,
    is_unmet,
    may_be_there,
)


def root_of(template: str, key: str | None) -> str:
    """Return the archive's root for `key`; a key of dots only is escaped, because it would be a parent directory."""
    name = escape_key(key)
    return template.replace("{key}", "%2E" * len(name) if not name.strip(".") else name).rstrip("/")


class ObjectStore:
    """A store on a driver. An existing object is not replaced, because one of the same name has the same messages."""

    def __init__(self, driver: Driver, url: str) -> None:
        """`url` is the prefix of objects' locations."""
        self.driver = driver
        self._url = url
        self._once = True  # use conditional writes, until the store turns out not to support them

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        """Store `data` under its name, unless the object exists."""
        path = f"{root_of(self.driver.root, name.key)}/{name.path}"
        self._write(path, data, once=self._once)
        return f"{root_of(self._url, name.key)}/{name.path}"

    def probe(self) -> None:
        """Store a small object, and remove it if permitted; do nothing with a root per key."""
        if "{key}" in self.driver.root:
            return
        path = self._rooted(f"{PROBE}/{uuid.uuid4().hex}")
        self._write(path, pa.py_buffer(b"jetcapture"))
        with contextlib.suppress(Exception):
            self.driver.remove(path)

    def _rooted(self, path: str) -> str:
        return f"{root_of(self.driver.root, None)}/{path}"

    # ------------------------------------------------------------------ small files

    def read_note(self, path: str) -> bytes | None:
        """Read a metadata file; None if it does not exist."""
        try:
            return self.driver.read(self._rooted(path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {described(error)}") from error

    def list_notes(self, directory: str) -> list[str]:
        """List the metadata files in a directory; none if it does not exist."""
        try:
            entries = [entry for entry in self.driver.list(self._rooted(directory), deep=False) if not entry.directory]
        except Exception as error:
            raise StoreError(f"cannot list {directory}: {described(error)}") from error
        return sorted(f"{directory}/{entry.path.rpartition('/')[2]}" for entry in entries)

    def write_note(self, path: str, data: bytes) -> None:
        self._write(self._rooted(path), pa.py_buffer(data))

    def change_note(self, path: str, change: NoteChange) -> None:
        """Replace a metadata file by the result of `change` for its content, unless it has changed meanwhile.

        Without conditional writes and locks, a concurrent change by another process may be lost.
        """

        def attempt() -> None:
            with self.driver.locked(path):
                data = change(self.read_note(path))
                if data is None:  # the usual case, with a single request
                    return
                if not self.driver.conditional:
                    self.write_note(path, data)
                elif not self._changed(path, change):
                    raise ConflictError(f"cannot write {path}: it was changed concurrently each time")

        retried_on_conflict(attempt)

    def _changed(self, path: str, change: NoteChange) -> bool:
        """Change a metadata file on the condition of its tag; return False if it was changed meanwhile."""
        rooted = self._rooted(path)
        tag = self._tag(rooted)  # read before the content, which then has this tag or a later one
        content = self.read_note(path)
        data = change(content)
        if data is None:
            return True
        if self._once and tag is None and content is not None:  # created meanwhile: its write would have no condition
            return False
        return self._write_if(rooted, data, NEW if content is None else tag)

    def _tag(self, path: str) -> str | None:
        """Return the file's tag; None without one."""
        try:
            return self.driver.stat(path).tag
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"cannot read {path}: {described(error)}") from error

    # ------------------------------------------------------------------ writing

    def _write_if(self, path: str, data: bytes, condition: str | None) -> bool:
        """Write a file on a condition; return False if it is not met."""
        condition = condition if self._once else None
        try:
            self._upload(path, pa.py_buffer(data), condition)
        except Exception as error:
            gone = condition not in (None, NEW) and isinstance(error, FileNotFoundError)
            if condition and (gone or is_unmet(error)):
                return False
            raise self._refused(path, error) from error
        return True

    def _write(self, path: str, data: pa.Buffer, *, once: bool = False) -> None:
        try:
            try:
                self._upload(path, data, NEW if once else None)
            except Exception as error:
                if not once or isinstance(error, StoreError) or not (is_there(error) or may_be_there(error)):
                    raise
                if not self._exists(path):
                    if not is_there(error):
                        raise
                    # refused because of something invisible, such as an unfinished upload
                    self._upload(path, data, None)
        except StoreError:  # the driver's own
            raise
        except Exception as error:
            raise self._refused(path, error) from error

    def _upload(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        """Write a file on a condition, or without one if the server does not support it."""
        try:
            self.driver.write(path, data, condition)
        except Exception as error:
            if condition is None or not is_unknown_header(error):
                raise
            self.driver.write(path, data, None)
            self._once = False

    def _exists(self, path: str) -> bool:
        try:
            self.driver.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _refused(self, path: str, error: Exception) -> StoreError:
        kind = PermanentStoreError if is_permanent(error) else StoreError
        scheme = self._url.partition("://")[0]
        return kind(f"cannot write {scheme}://{path.rpartition('/')[0]}: {described(error)}")
