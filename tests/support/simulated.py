"""A store of a few lines: what implements the port, `jetcapture_py.store.ports.Driver`, passes all tests of stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pyarrow as pa

from jetcapture_py.store.ports import NEW, Entry


class SimulatedDriver:
    """Files in memory, shared by all drivers with the same `files`: content and version by path."""

    conditional = True
    lock = threading.Lock()

    def __init__(self, root: str, files: dict[str, tuple[bytes, int]]) -> None:
        self.root, self.files = root.rstrip("/"), files

    def list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        seen = set()
        for path in sorted(self.files):
            rest = path.removeprefix(f"{directory}/")
            if rest == path:
                continue
            name, divided, _ = rest.partition("/")
            if deep or not divided:
                yield self.stat(path)
            elif name not in seen:
                seen.add(name)
                yield Entry(f"{directory}/{name}", directory=True)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        return self._file(path)[0][start:end]

    def stat(self, path: str) -> Entry:
        content, version = self._file(path)
        return Entry(path, len(content), float(version), str(version))

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        with self.lock:
            _, version = self.files.get(path, (b"", 0))
            if condition is not None and condition != (str(version) if version else NEW):
                raise FileExistsError(path)
            self.files[path] = data.to_pybytes(), version + 1

    def remove(self, path: str) -> None:
        with self.lock:
            self._file(path)
            del self.files[path]

    def locked(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def _file(self, path: str) -> tuple[bytes, int]:
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None
