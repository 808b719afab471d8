"""Notes of what a capture stored: what the footers of its objects say, so that a table of many needs to open none.

    {store.url}/_objects/{stream}/{begun}-{id}.json

Each replica writes its own, a new one from time to time. A note only saves work: for an object that no note names,
that has another size, or that was stored later than the note says, the footer is read. Objects are named by hashes of
their paths, which tell no key.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError

DIRECTORY = "_objects"
FORMAT = 1
MAX_OBJECTS = 4096
"""Objects of a note, at most."""
MAX_AGE = 86_400
"""Seconds after which a capture begins another note."""
MARGIN = 60
"""Seconds by which clocks of a store and of a capture may differ."""
_MAX_KINDS = 256
_MAX_SCHEMA = 256 << 10
"""Bytes of a schema from which on objects are not noted."""
_MAX_SCHEMAS = 4 << 20
"""Approximate maximum bytes of all schemas of a note."""
_MAX_UNWRITTEN = 16
"""Maximum full notes that are kept for a store that takes objects but no notes; the oldest are dropped."""
_HASH_BYTES = 8
_NAME = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """What the footers of several objects say."""

    schema: bytes
    """The columns as read from the footer, without metadata of their own, in Arrow's IPC format."""
    interval: int
    """Length of the bucket in seconds; 0 if the footer does not say it."""
    bundles: int
    """The number of bundles; 0 without them."""
    untimed: bool
    """Whether some messages may have no event time, in a bucket of event time."""


def directory(stream: str) -> str:
    """Return the directory of a stream's notes, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}"


def begun(path: str) -> float | None:
    """Return when a note was begun, in seconds since the epoch; None for a file that is none."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    if match is None:
        return None
    try:
        return datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def hash_of(path: str) -> int:
    """Return the hash of a path, of 64 bits."""
    data = path.encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest(), "big")


class NoteWriter:
    """The notes of one replica: `record` what it stored; write what is `due`, and say so with `wrote`. Thread-safe.

    `record` and `due` take too long for an event loop.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begin another note, and write nothing more of what was recorded."""
        with self._lock:
            self._reader = footer.SchemaReader()
            self._full: dict[str, tuple[bytes, int]] = {}
            self._begin()

    def _begin(self) -> None:
        self._begun = time.time()
        at = f"{datetime.fromtimestamp(self._begun, UTC):%Y%m%dT%H%M%SZ}"
        self._path = f"{directory(self._stream)}/{at}-{secrets.token_hex(8)}.json"
        self._kinds: dict[ObjectKind, int] = {}
        self._indexes: dict[tuple[int, int, int, bool], int | None] = {}
        self._objects: list[tuple[str, int, int, int]] = []
        self._written = 0

    def _end(self) -> None:
        """Keep the note until it is written, and begin another one."""
        if self._objects:
            self._full[self._path] = self._content(), len(self._objects)
        while len(self._full) > _MAX_UNWRITTEN:
            del self._full[next(iter(self._full))]
        self._begin()

    def record(self, name: ObjectName, data: pa.Buffer) -> None:
        """Add an object that was stored just now. One that cannot be described is left out."""
        if not name.parquet:
            return
        view = memoryview(data).cast("B")
        with self._lock:
            if time.time() - self._begun > MAX_AGE:  # readers tell from its name which objects it may have
                self._end()
            try:
                index = self._kind_index(name, footer.find(lambda size: bytes(view[-size:])))
            except (pa.ArrowException, ValueError):
                return
            if index is None:
                return
            self._objects.append((f"{hash_of(name.path):016x}", len(view), index, int(time.time())))
            full = len(self._objects) >= MAX_OBJECTS or len(self._kinds) >= _MAX_KINDS
            if full or sum(len(kind.schema) for kind in self._kinds) > _MAX_SCHEMAS:
                self._end()

    def _kind_index(self, name: ObjectName, data: bytes) -> int | None:
        """Return the index of the kind of the object with the footer `data`; None if its schema is too large to note.

        Raises pa.ArrowInvalid.
        """
        if len(self._reader.schemas) >= _MAX_KINDS:  # those of blocks that will not come again
            self._reader = footer.SchemaReader()
            self._indexes.clear()
        number = self._reader.number(data)
        interval = footer.number_in(data, layout.INTERVAL) or 0
        bundles = (footer.number_in(data, layout.BUNDLES) or 0) if name.bundle else 0
        untimed = name.event_time and footer.may_have_nulls(footer.decoded(data), layout.TIME)
        told = number, interval, bundles, untimed
        if told not in self._indexes:
            schema = self._reader.schemas[number].serialize().to_pybytes()
            kind = ObjectKind(schema=schema, interval=interval, bundles=bundles, untimed=untimed)
            fits = len(schema) <= _MAX_SCHEMA
            self._indexes[told] = self._kinds.setdefault(kind, len(self._kinds)) if fits else None
        return self._indexes[told]

    def due(self) -> list[tuple[str, bytes, int]]:
        """Return the notes to write: where, what, and for how many objects."""
        with self._lock:
            notes = [(path, content, objects) for path, (content, objects) in self._full.items()]
            if len(self._objects) > self._written:
                notes.append((self._path, self._content(), len(self._objects)))
            return notes

    def wrote(self, path: str, objects: int) -> None:
        """Note that a note was written, for so many objects."""
        with self._lock:
            if path in self._full and self._full[path][1] == objects:  # not of before it was full
                del self._full[path]
            elif path == self._path:
                self._written = objects

    def _content(self) -> bytes:
        kinds = [
            {
                "schema": base64.b64encode(kind.schema).decode(),
                "interval": kind.interval,
                "bundles": kind.bundles,
                "untimed": kind.untimed,
            }
            for kind in self._kinds
        ]
        fields = {"format": FORMAT, "stream": self._stream, "kinds": kinds, "objects": self._objects}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectNote:
    """The content of a note: arrays with an entry for each object, ordered by `hashes`."""

    kinds: Sequence[ObjectKind]
    hashes: Any
    """uint64."""
    sizes: Any = field(repr=False)
    """Bytes."""
    numbers: Any = field(repr=False)
    """Indexes in `kinds`."""
    stored: Any = field(repr=False)
    """When the object was stored, in seconds since the epoch."""

    def kinds_of(self, hashes_: Any, sizes: Any, modified: Any) -> dict[int, ObjectKind]:
        """Return the kind of each object that the note describes, by the object's index.

        Objects are given by hash, size in bytes and time of modification (seconds since the epoch; 0: unknown).
        """
        if not len(self.hashes):
            return {}
        places = np.minimum(np.searchsorted(self.hashes, hashes_), len(self.hashes) - 1)
        same = (self.hashes[places] == hashes_) & (self.sizes[places] == sizes)
        same &= (modified > 0) & (modified <= self.stored[places] + MARGIN)
        told = np.flatnonzero(same).tolist()
        return {index: self.kinds[number] for index, number in zip(told, self.numbers[places[told]], strict=True)}


def decode(data: bytes, stream: str, path: str) -> ObjectNote:
    """Read a note. Raises JetcaptureError if it is damaged, of another stream, or of a later format."""
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT or fields["stream"] != stream:
            raise ValueError(f"format {fields['format']} of stream {fields['stream']}")
        kinds = [
            ObjectKind(
                schema=base64.b64decode(kind["schema"], validate=True),
                interval=int(kind["interval"]),
                bundles=int(kind["bundles"]),
                untimed=bool(kind["untimed"]),
            )
            for kind in fields["kinds"]
        ]
        found = np.array([int(entry[0], 16) for entry in fields["objects"]], np.uint64)
        rest = np.array([entry[1:4] for entry in fields["objects"]], np.int64).reshape(-1, 3)
        order = np.argsort(found, kind="stable")
        found, rest = found[order], rest[order]
        if len(rest) and not 0 <= rest[:, 1].min() <= rest[:, 1].max() < len(kinds):
            raise ValueError("an object of no kind")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise JetcaptureError(f"{path}: not a note of objects: {error}") from error
    last = np.ones(len(found), bool)  # of an object that was stored again, the last entry counts
    last[:-1] = found[1:] != found[:-1]
    return ObjectNote(kinds=kinds, hashes=found[last], sizes=rest[last, 0], numbers=rest[last, 1], stored=rest[last, 2])
