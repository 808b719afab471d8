"""What a table's metadata says, read with fastavro; it shares no code with the product or PyIceberg."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from io import BytesIO
from typing import Any

import fastavro

from tests.simulation.store import Content
from tests.simulation.table import POINTER

DELETED = 2
"""The status of a file that a snapshot removed."""


def belongs(path: str) -> bool:
    """Whether a path is one of the table's metadata or of the catalog."""
    return path.startswith(("archive/_table/", "catalog/"))


def current(files: Content) -> list[tuple[str, int]]:
    """The paths and sizes of the files in the table. Raises KeyError for metadata that is gone."""
    metadata = _metadata(files)
    snapshots = {each["snapshot-id"]: each["manifest-list"] for each in metadata.get("snapshots", ())}
    place = snapshots.get(metadata.get("current-snapshot-id"))
    if place is None:
        return []
    manifests = _rows(files[_path(place)].content)
    return [file for part in manifests for file in _files(files[_path(part["manifest_path"])].content)]


def updated(files: Content) -> float:
    """When the table was changed, as it says: a commit that stands still gives queries less time to end."""
    return float(_metadata(files).get("last-updated-ms", 0)) / 1000


def named(files: Content) -> Iterator[str]:
    """The paths of all files in any manifest, of whatever snapshot or of none."""
    for path, file in files.items():
        if belongs(path) and path.endswith(".avro"):
            for row in _rows(file.content):
                if "data_file" in row:
                    yield _path(row["data_file"]["file_path"])


def _files(content: bytes) -> list[tuple[str, int]]:
    rows = [row for row in _rows(content) if row["status"] != DELETED]
    return [(_path(row["data_file"]["file_path"]), row["data_file"]["file_size_in_bytes"]) for row in rows]


def _metadata(files: Content) -> dict[str, Any]:
    """The table's metadata; none without a table."""
    if POINTER not in files:
        return {}
    metadata: dict[str, Any] = json.loads(files[_path(files[POINTER].content.decode())].content)
    return metadata


@lru_cache(1 << 12)
def _rows(content: bytes) -> tuple[dict[str, Any], ...]:
    return tuple(fastavro.reader(BytesIO(content)))


def _path(location: str) -> str:
    return location.removeprefix("memory://")
