"""A store in memory, behind the product's port: what each operation answers follows from the files and the clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import pyarrow as pa

from jetcapture_py.store.ports import NEW, Entry

CHANGES = {"write", "create", "rename", "remove", "swap"}
STORES = ("conditional", "plain", "local")
"""With conditional writes, without, and a directory."""
ABANDONED = 3600.0
"""Age in seconds after which a local archive loses a file that was not renamed."""


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


Content = Mapping[str, StoredFile]


class UnknownHeaderError(OSError):
    """The answer of a server that knows no conditional writes."""

    status_code = 501


ERRORS: dict[str, Callable[[str], Exception]] = {
    "missing": FileNotFoundError,
    "exists": FileExistsError,
    "unknown header": UnknownHeaderError,
    "lost": ConnectionError,
    "locked": BlockingIOError,
}


class Files:
    """The files of a store by path. It lists what is there, as S3 does; a directory in any order."""

    def __init__(self, files: dict[str, StoredFile], store: str = "conditional") -> None:
        self.files, self.store = files, store

    def do(self, operation: Operation, now: float) -> Answer:
        kind, path, argument = operation
        if kind == "list":
            return Answer(tuple(self._list(path, deep=bool(argument))))
        if kind in ("lock", "unlock"):
            return Answer()
        if kind == "create":
            return self._create(path, argument[0], now)
        if kind == "sweep":
            self._sweep(path, now)
            return Answer()
        file = self.files.get(path)
        if kind == "write":
            return self._write(path, file, argument, now)
        if kind == "swap":
            return self._swap(path, file, argument, now)
        if kind == "remove" and argument is not None and self.store == "plain":
            return Answer(error="unknown header")
        if file is None:
            return Answer(error="exists" if kind == "remove" and argument is not None else "missing")
        if kind == "read":
            start, end = argument
            return Answer(file.content[start:end])
        if kind == "stat":
            return Answer(self._entry(path, file))
        if kind == "remove" and self.store == "conditional" and argument not in (None, _tag(file.content)):
            return Answer(error="exists")
        del self.files[path]
        return Answer(self._renamed(file, *argument)) if kind == "rename" else Answer()

    def _write(self, path: str, file: StoredFile | None, argument: Any, now: float) -> Answer:
        content, condition = argument
        if condition is not None and self.store == "plain":
            return Answer(error="unknown header")
        if condition is not None and condition != (NEW if file is None else _tag(file.content)):
            return Answer(error="exists")
        self.files[path] = StoredFile(content, now)
        return Answer()

    def _swap(self, path: str, file: StoredFile | None, argument: Any, now: float) -> Answer:
        """What a database does, beside any store."""
        before, after = argument
        if before != (file and file.content):
            return Answer(error="exists")
        self.files[path] = StoredFile(after, now)
        return Answer()

    def _create(self, path: str, content: bytes, now: float) -> Answer:
        directory, _, name = path.rpartition("/")
        hidden = next(path for n in count() if (path := f"{directory}/.{name}.{n}.tmp") not in self.files)
        self.files[hidden] = StoredFile(content, now)
        return Answer(hidden)

    def _renamed(self, file: StoredFile, path: str, condition: str | None) -> bool:
        made = condition != NEW or path not in self.files
        if made:
            self.files[path] = file
        return made

    def _sweep(self, directory: str, now: float) -> None:
        for path in [*self.files]:
            if path.rpartition("/")[0] == directory and is_hidden(path) and now - self.files[path].modified > ABANDONED:
                del self.files[path]

    def _list(self, directory: str, *, deep: bool) -> Iterator[Entry]:
        seen = set()
        for path in sorted(self.files, reverse=self.store == "local"):
            rest = path.removeprefix(f"{directory}/")
            if rest == path:
                continue
            name, divided, _ = rest.partition("/")
            if deep or not divided:
                yield self._entry(path, self.files[path])
            elif name not in seen:
                seen.add(name)
                yield Entry(f"{directory}/{name}", directory=True)

    def _entry(self, path: str, file: StoredFile) -> Entry:
        return Entry(path, len(file.content), file.modified, None if self.store == "local" else _tag(file.content))


def is_hidden(path: str) -> bool:
    return path.endswith(".tmp")


@lru_cache(1 << 14)
def _tag(content: bytes) -> str:
    """S3's tags follow from the content, too."""
    return hashlib.md5(content).hexdigest()


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

    def remove(self, path: str, condition: str | None = None) -> None:
        self._do("remove", path, condition)

    def locked(self, name: str) -> nullcontext[None]:
        return nullcontext()
