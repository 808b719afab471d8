"""What the jobs have in common: the Spark session, their arguments, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from jetcapture_py import layout
from jetcapture_py.errors import JetcaptureError


def session(app_name: str) -> SparkSession:
    """The active Spark session, or a quiet new one: local unless spark-submit chose a master; UTC."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(app_name)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        # workers import this package from where the driver did, installed or not
        "spark.executorEnv.PYTHONPATH": str(Path(layout.__file__).resolve().parents[1]),
    }
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started the JVM, and decided on these
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {
            "spark.master": "local[*]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.warehouse.dir": tempfile.gettempdir(),  # else one is made wherever this is run
        }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def archive_arguments(parser: argparse.ArgumentParser) -> None:
    """What every job over an archive is told: which one, and which part of it."""
    parser.add_argument("url", metavar="URL", help="the archive's store.url")
    parser.add_argument("stream", metavar="STREAM")
    parser.add_argument("--from", dest="start", metavar="TIME", type=_time, help="RFC 3339, inclusive; UTC by default")
    parser.add_argument("--to", dest="end", metavar="TIME", type=_time, help="RFC 3339, exclusive; UTC by default")
    parser.add_argument("--key", dest="keys", action="append", help='may be repeated; "" for messages without a key')
    parser.add_argument("--dedupe", choices=("auto", "full", "none"), default="auto")


def guarded(name: str, job: Callable[[], object]) -> int:
    """Run `job` and turn its failure into one line and exit code 1."""
    for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(logger).disabled = True  # PySpark prints the error that it raises as JSON, too
    try:
        job()
    except (JetcaptureError, PySparkException, Py4JError, OSError) as error:
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        return 1
    return 0


def one_line(error: Exception) -> str:
    """A Spark error as one clear line for a terminal."""
    text = error.getMessage() if isinstance(error, PySparkException) else str(error)
    return (text or type(error).__name__).strip().split("\n", 1)[0].split(" SQLSTATE:", 1)[0]


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
