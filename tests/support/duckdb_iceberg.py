"""DuckDB's reader of Iceberg, in a process of its own: its extension is on PyPI for an older DuckDB than ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "1.5.5"
_PACKAGES = [
    f"{name}=={VERSION}"
    for name in ("duckdb", "duckdb-extensions", "duckdb-extension-iceberg", "duckdb-extension-avro")
]
_PROGRAM = """
import json, sys
import duckdb
from duckdb_extensions import import_extension
connection = duckdb.connect()
connection.execute("SET TimeZone = 'UTC'")
for name in ("avro", "iceberg"):
    import_extension(name)
    connection.execute(f"LOAD {name}")
for line in sys.stdin:
    try:
        rows = connection.execute(json.loads(line)).fetchall()
        print(json.dumps(rows, default=str), flush=True)
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


def _installed() -> Path:
    """The directory with the packages; the test is skipped where they cannot be had."""
    home = Path(sys.prefix) / f"duckdb-iceberg-{VERSION}"
    if not home.exists():
        fresh = Path(tempfile.mkdtemp(dir=home.parent))
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(fresh), *_PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(fresh)
            pytest.skip(f"DuckDB {VERSION} with its extension for Iceberg cannot be installed: {done.stderr[-200:]}")
        if not home.exists():
            fresh.rename(home)
    return home


class DuckdbIceberg:
    """Answers SQL in which `{table}` stands for a table."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(_installed())])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def rows(self, sql: str, metadata: str) -> list[list[Any]]:
        """Return the rows of a query of the table with this metadata."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        source = f"iceberg_scan('{metadata.removeprefix('file://')}')"
        self._process.stdin.write(json.dumps(sql.replace("{table}", source)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, list), answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
