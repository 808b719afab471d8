"""A local archive in the simulation: its driver, and what the product does without a driver in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from jetcapture_py import store as stores
from jetcapture_py.store import archive
from jetcapture_py.store.local import explained
from jetcapture_py.store.object_file import ObjectFile
from jetcapture_py.store.ports import Entry
from tests.simulation.store import Answer, Operation, SimulatedDriver

Do = Callable[[Operation], Answer]


class SimulatedLocalDriver(SimulatedDriver):
    """Files are made beside their place and renamed; a lock belongs to the process."""

    conditional = False

    def __init__(self, root: str, do: Do) -> None:
        super().__init__(root, do)
        self.archive = SimpleNamespace(path=root, new=False, opened=nullcontext)
        self._known: set[str] = set()

    def _do(self, kind: str, path: str, argument: Any = None) -> Any:
        return super()._do(kind, path.removeprefix("/"), argument)

    def list(self, directory: str, *, deep: bool = True) -> Iterator[Entry]:
        return (entry._replace(path=f"/{entry.path}") for entry in super().list(directory, deep=deep))

    def stat(self, path: str) -> Entry:
        return super().stat(path)._replace(path=path)

    def write(self, path: str, data: pa.Buffer, condition: str | None) -> None:
        directory = path.rpartition("/")[0]
        with explained(directory):
            if directory not in self._known:
                self._do("sweep", directory)
                self._known.add(directory)
            hidden = self._do("create", path, (data.to_pybytes(), None))
            try:
                made = self.rename(hidden, path, condition)
            except OSError:
                with suppress(OSError):
                    self._do("remove", hidden)
                raise
        if not made:
            raise FileExistsError(path)

    def rename(self, path: str, target: str, condition: str | None = None) -> bool:
        made: bool = self._do("rename", path, (target.removeprefix("/"), condition))
        return made

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        with explained(self.root):
            self._do("lock", name)
            try:
                yield
            finally:
                self._do("unlock", name)


def patches(do: Do, is_local: Callable[[], bool]) -> Iterator[tuple[object, str, object]]:
    """Yield what has to be patched: an owner, a name, and a value. All archives are the simulated one."""

    class Local(SimulatedLocalDriver):
        def __init__(self, root: str) -> None:
            super().__init__(root, do)

    class MovedPath(PosixPath):
        def rename(self, target: str | os.PathLike[str]) -> MovedPath:
            Local("").rename(str(self), str(target))
            return MovedPath(target)

    def opened(url: str, options: object) -> SimulatedDriver:
        root = url.rpartition("://")[2].removeprefix("/")
        return Local(f"/{root}") if is_local() else SimulatedDriver(root, do)

    def content(path: str) -> pa.BufferReader:
        """A file that is open stays as it is."""
        return pa.BufferReader(Local("").read(path))

    def opened_file(source: Any, *args: Any, **options: Any) -> ObjectFile:
        return ObjectFile(content(source) if isinstance(source, str) else source, *args, **options)

    for module in (stores, archive):
        yield module, "open_driver", opened
        yield module, "LocalDriver", Local
    yield archive, "Path", MovedPath
    yield archive, "ObjectFile", opened_file
    yield pa, "OSFile", partial(_either, content, pa.OSFile)
    yield os.path, "exists", partial(_either, lambda _: True, os.path.exists)


def _either(simulated: Callable[[str], Any], real: Callable[[Any], Any], path: Any) -> Any:
    return (simulated if str(path).startswith("/archive/") else real)(path)
