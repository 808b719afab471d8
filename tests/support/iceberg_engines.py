"""Engines that read Iceberg tables, each in a process of its own: they need other versions than ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import java
from tests.support.maven import jars

DUCKDB = "1.5.5"
"""The newest with an extension for Iceberg on PyPI."""
SPARK, ICEBERG = "4.1.4", "1.12.0"
"""The newest Spark that Iceberg has a runtime for."""
_JARS = [("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", ICEBERG), ("org.xerial", "sqlite-jdbc", "3.46.1.3")]
_DUCKDB_PROGRAM = """
import json, sys
import duckdb
from duckdb_extensions import import_extension
connection = duckdb.connect()
connection.execute("SET TimeZone = 'UTC'")
connection.execute("SET enable_progress_bar = false")  # it writes to the output of a slow query
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
_SPARK_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
session = SparkSession.builder.master("local[2]")
for name, value in json.loads(sys.argv[1]).items():
    session = session.config(name, value)
spark = session.getOrCreate()
for line in sys.stdin:
    try:
        rows = [list(row) for row in spark.sql(json.loads(line)).collect()]
        print(json.dumps(rows, default=str), flush=True)
    except Exception as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


def _installed(name: str, *packages: str) -> Path:
    """The directory `name` of the virtual environment with packages; skips where they cannot be had."""
    home = Path(sys.prefix) / name
    if not home.exists():
        fresh = Path(tempfile.mkdtemp(dir=home.parent))
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(fresh), *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(fresh)
            pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr[-200:]}")
        if not home.exists():
            fresh.rename(home)
    return home


class _SqlProcess:
    """A process that answers each line of SQL with a line of rows."""

    def __init__(self, program: str, *arguments: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, sql: str) -> list[list[Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(sql) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, list), answer
        return answer

    def close(self) -> None:
        self._process.communicate()


class DuckdbIceberg(_SqlProcess):
    """DuckDB with its extension for Iceberg, which reads a table by its metadata file."""

    def __init__(self) -> None:
        packages = ("duckdb", "duckdb-extensions", "duckdb-extension-iceberg", "duckdb-extension-avro")
        path = _installed(f"duckdb-iceberg-{DUCKDB}", *(f"{name}=={DUCKDB}" for name in packages))
        super().__init__(_DUCKDB_PROGRAM, environment={**os.environ, "PYTHONPATH": str(path)})

    def rows(self, sql: str, metadata: str) -> list[list[Any]]:
        return self.ask(sql.replace("{table}", f"iceberg_scan('{metadata.removeprefix('file://')}')"))


class SparkIceberg(_SqlProcess):
    """Spark with Iceberg's runtime, which reads the tables of a catalog in SQLite, as PyIceberg makes it."""

    def __init__(self, database: Path) -> None:
        home = jars(f"iceberg-spark-{ICEBERG}", _JARS)
        path = _installed(f"spark-{SPARK}", f"pyspark=={SPARK}")
        catalog = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": f"jdbc:sqlite:{database}?busy_timeout=60000",
            ".warehouse": f"file://{database.parent}",
            ".jdbc.init-catalog-tables": "false",
            ".cache-enabled": "false",
        }
        settings = {
            "spark.jars": ",".join(map(str, sorted(home.glob("*.jar")))),
            "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
            "spark.sql.session.timeZone": "UTC",
            **{f"spark.sql.catalog.jetcapture{name}": value for name, value in catalog.items()},
        }
        environment = {
            **java.only(),
            java.VARIABLE: f"{java.SHORT_LIVED} {java.FEW_ROWS} {java.PATIENT}",
            "PYTHONPATH": str(path),
        }
        super().__init__(_SPARK_PROGRAM, json.dumps(settings), environment=environment)
