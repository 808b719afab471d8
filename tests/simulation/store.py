"""A store in memory, behind the product's port: what each operation answers follows from the files and the clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from jetcapture_py.store.ports import NEW, Entry

CHANGES = {"write", "remove"}
STORES = ("conditional", "plain")
"""With conditional writes, and without."""


class Operation(NamedTuple):
    """What an actor asks for."""

    kind: str
    path: str = ""
    argument: Any = None


class Answer(NamedTuple):
    """What it gets: a value, or the name of an error."""

    value: Any = None
    error: str = ""


class StoredFile(NamedTuple):
    content: bytes
    modified: float


class UnknownHeaderError(OSError):
    """The answer of a server that knows no conditional writes."""

    status_code = 501


ERRORS: dict[str, Callable[[str], Exception]] = {
    "missing": FileNotFoundError,
    "exists": FileExistsError,
    "unknown header": UnknownHeaderError,
    "lost": ConnectionError,
}


class Files:
    """The files of a store by path. It lists what is there, as S3 does."""

    def __init__(self, files: dict[str, StoredFile], store: str = "conditional") -> None:
        self.files, self.store = files, store

    def do(self, operation: Operation, now: float) -> Answer:
        kind, path, argument = operation
        if kind == "list":
            return Answer(tuple(self._list(path, deep=bool(argument))))
        file = self.files.get(path)
        if kind == "write":
            return self._write(path, file, argument, now)
        if file is None:
            return Answer(error="missing")
        if kind == "read":
            start, end = argument
            return Answer(file.content[start:end])
        if kind == "stat":
            return Answer(_entry(path, file))
        del self.files[path]
        return Answer()

    def _write(self, path: str, file: StoredFile | None, argument: Any, now: float) -> Answer:
        content, condition = argument
        if condition is not None and self.store == "plain":
            return Answer(error="unknown header")
        if condition is not None and condition != (NEW if file is None else _tag(file.content)):
            return Answer(error="exists")
        self.files[path] = StoredFile(content, now)
        return Answer()

    def _list(self, directory: str, *, deep: bool) -> Iterator[Entry]:
        seen = set()
        for path in sorted(self.files):
            rest = path.removeprefix(f"{directory}/")
            if rest == path:
                continue
            name, divided, _ = rest.partition("/")
            if deep or not divided:
                yield _entry(path, self.files[path])
            elif name not in seen:
                seen.add(name)
                yield Entry(f"{directory}/{name}", directory=True)


@lru_cache(1 << 14)
def _tag(content: bytes) -> str:
    """S3's tags follow from the content, too."""
    return hashlib.md5(content).hexdigest()


def _entry(path: str, file: StoredFile) -> Entry:
    return Entry(path, len(file.content), file.modified, _tag(file.content))


class SimulatedDriver:
    """The port; `do` answers an operation."""

    conditional = True

    def __init__(self, root: str, do: Callable[[Operation], Answer]) -> None:
        self.root, self._answer = root.rstrip("/"), do

    def _do(self, kind: str, path: str, argument: Any = None) -> Any:
        answer = self._answer(Operation(kind, path, argument))
        if answer.error:
            raise ERRORS[answer.error](path)
        return answer.value

    def list(self, directory: str, *, deep: bool = True) -> Iterable[Entry]:
        entries: tuple[Entry, ...] = self._do("list", directory, deep)
        return entries

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        return bytes(self._do("read", path, (start, end)))

    def stat(self, path: str) -> Entry:
        entry: Entry = self._do("stat", path)
        return entry

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        self._do("write", path, (data.to_pybytes(), condition))

    def remove(self, path: str) -> None:
        self._do("remove", path)

    def locked(self, name: str) -> nullcontext[None]:
        return nullcontext()
