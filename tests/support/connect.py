"""A Spark Connect server of its own, as the script in PySpark's package starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark

from tests.support import java
from tests.support.ports import await_listening, free_port

STARTS = 600.0


def environment(remote: str) -> dict[str, str]:
    """Variables for a process whose session is at `remote`, and for nothing else of Spark."""
    return {**java.only(), "SPARK_REMOTE": remote, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}


@contextlib.contextmanager
def connect_server(home: Path) -> Iterator[str]:
    """Start a server that keeps its files in `home`; where to connect to."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(home),
    }
    words = [f"{pyspark.__path__[0]}/sbin/start-connect-server.sh", "--master", "local[2]"]
    for name, value in settings.items():
        words += ["--conf", f"{name}={value}"]
    variables = environment("") | {"SPARK_NO_DAEMONIZE": "1", "SPARK_LOG_DIR": str(home), "SPARK_PID_DIR": str(home)}
    del variables["SPARK_REMOTE"]
    log = home / "server.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(words, stdout=output, stderr=output, env=variables, start_new_session=True) as process,
    ):
        try:
            await_listening(process, port, log, STARTS)
            yield f"sc://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
