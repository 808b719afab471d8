"""The Iceberg table in the simulation: PyIceberg's files and its catalog on the simulated store."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyiceberg import manifest
from pyiceberg.avro import file as avro
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, Table, metadata, update
from pyiceberg.utils.concurrent import ExecutorFactory

from jetcapture_py.table import commit
from tests.simulation.loop import AtOnce
from tests.simulation.scheduler import TABLE, ask
from tests.simulation.store import SimulatedDriver

NAME = "nats.orders"
CATALOG = {
    "py-catalog-impl": f"{__name__}.SimulatedCatalog",
    "py-io-impl": f"{__name__}.SimulatedIO",
}
POINTER = f"catalog/{NAME}"
"""Where the catalog keeps the location of the table's metadata."""
_SCHEME = "memory://"


class _Input(InputFile):
    def __len__(self) -> int:
        return DRIVER.stat(self.location.removeprefix(_SCHEME)).size

    def exists(self) -> bool:
        raise NotImplementedError

    def open(self, seekable: bool = True) -> Any:
        return BytesIO(DRIVER.read(self.location.removeprefix(_SCHEME)))


class _Stream(BytesIO):
    """Written when it is closed, as to S3."""

    def __init__(self, file: _Output) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            self._file.size = len(self.getbuffer())
            data = self.getvalue()
            super().close()
            DRIVER.write(self._file.location.removeprefix(_SCHEME), pa.py_buffer(data), None)


class _Output(OutputFile):
    size = 0

    def __len__(self) -> int:
        return self.size

    def exists(self) -> bool:
        raise NotImplementedError

    def to_input_file(self) -> InputFile:
        return _Input(self.location)

    def create(self, overwrite: bool = False) -> Any:
        return _Stream(self)


class SimulatedIO(FileIO):
    def new_input(self, location: str) -> InputFile:
        return _Input(location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        DRIVER.remove((location if isinstance(location, str) else location.location).removeprefix(_SCHEME))


class SimulatedCatalog(MetastoreCatalog, NoopCatalog):
    """Commits as PyIceberg's catalogs do: it replaces the location only of the metadata that the commit is based on."""

    def load_table(self, identifier: Any) -> Table:
        try:
            location = DRIVER.read(POINTER).decode()
        except FileNotFoundError:
            raise NoSuchTableError(NAME) from None
        files = self._load_file_io(location=location)
        found = FromInputFile.table_metadata(files.new_input(location))
        return Table(self.identifier_to_tuple(identifier), found, location, files, self)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        try:
            current = self.load_table(table.name())
        except NoSuchTableError:
            current = None
        staged = self._update_and_stage_table(current, table.name(), requirements, updates)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        before = current and current.metadata_location.encode()
        try:
            DRIVER._do("swap", POINTER, (before, staged.metadata_location.encode()))
        except FileExistsError:
            raise (CommitFailedException if current else TableAlreadyExistsError)(NAME) from None
        return CommitTableResponse(metadata=staged.metadata, metadata_location=staged.metadata_location)

    def create_namespace_if_not_exists(self, namespace: Any, properties: Any = None) -> None:
        pass


DRIVER = SimulatedDriver("", ask)
_DRAWN = threading.local()


def patches(is_actor: Callable[[], bool], moment: type[datetime]) -> Iterator[tuple[object, str, object]]:
    """Yield what has to be patched, so that what PyIceberg does follows from the answers."""
    real = uuid.uuid4

    def drawn() -> uuid.UUID:
        """Names that no other actor draws."""
        if not is_actor():
            return real()
        _DRAWN.count = getattr(_DRAWN, "count", 0) + 1
        return uuid.UUID(bytes=hashlib.md5(f"{ask(TABLE).value} {_DRAWN.count}".encode()).digest(), version=4)

    yield uuid, "uuid4", drawn
    yield avro, "os", SimpleNamespace(urandom=bytes)
    yield manifest._manifest_cache, "_cache", None
    yield update, "datetime", moment
    yield commit, "datetime", moment
    yield metadata, "datetime", SimpleNamespace(datetime=moment)
    yield ExecutorFactory, "get_or_create", AtOnce
