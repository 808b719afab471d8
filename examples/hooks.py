"""Your own store and a function for stored objects, named in the configuration:

    store: {type: "examples.hooks:SqliteStore", url: "sqlite:///var/lib/jetcapture/archive.db"}
    on_stored: {call: "examples.hooks:note_in_file"}

The directory above `examples` must be on the PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py import PermanentStoreError, StoredObject, StoreError, layout


class SqliteStore:
    """Stores objects as rows of an SQLite database; a transaction is atomic and durable."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.path = url.removeprefix("sqlite://")
        self.timeout = float(options.get("timeout", 30))

    def put(self, name: layout.ObjectName, data: pa.Buffer) -> str:
        """Store an object. The messages determine its name, so an existing one is kept."""
        self._run("INSERT OR IGNORE INTO objects VALUES (?, ?)", name.path, memoryview(data))
        return f"{self.path}#{name.path}"

    def probe(self) -> None:
        """Store and remove a small object, so that problems show at the start."""
        self._run("INSERT OR REPLACE INTO objects VALUES ('_probe', x'')")
        self._run("DELETE FROM objects WHERE path = '_probe'")

    def _run(self, statement: str, *values: object) -> None:
        """Run one statement, durably; called from several threads, so each call has its own connection."""
        try:
            with closing(sqlite3.connect(self.path, self.timeout)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                database.execute("CREATE TABLE IF NOT EXISTS objects (path TEXT PRIMARY KEY, data BLOB NOT NULL)")
                database.execute(statement, values)
        except sqlite3.OperationalError as error:  # locked, or a full disk: jetcapture retries
            raise StoreError(f"cannot write {self.path}: {error}") from error
        except sqlite3.Error as error:  # not a database: retrying alone will not help
            raise PermanentStoreError(f"cannot write {self.path}: {error}") from error


def note_in_file(stored: StoredObject, location: str) -> None:
    """Append a line of JSON for every object to the file that STORED_OBJECTS names."""
    path = Path(os.environ.get("STORED_OBJECTS", "stored.jsonl"))
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps({**stored.fields(), "location": location}), file=file)
