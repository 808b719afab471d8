"""Java options with which Spark starts in a fraction of the time: the tests start dozens of JVMs, and few live long.

    python -m tests.support.java

keeps Spark's loaded classes in a file of the virtual environment, from which later JVMs map them. Without that file,
or with another Java, a JVM loads its classes as usual.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jetcapture_py.errors import JetcaptureError
from spark_jobs.java import require_java

VARIABLE = "SPARK_SUBMIT_OPTS"
"""Read by every script of Spark that starts a JVM."""
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.ui.enabled=false"
FEW_ROWS = " ".join(
    f"-Dspark.sql.{setting}"
    for setting in ("shuffle.partitions=2", "codegen.wholeStage=false", "codegen.factoryMode=NO_CODEGEN")
)
"""Compiling a query takes longer than running it on a few rows."""
COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
"""Settings of a session that compiles its queries, as Spark does by default."""
PATIENT = "-Dspark.python.authenticate.socketTimeout=300s"
"""Spark waits 15 seconds for a connection from Python, which a busy machine may not make in that time."""


def classes() -> Path:
    return Path(sys.prefix) / f"spark-{version('pyspark')}.jsa"


def use() -> None:
    """Have every Spark that this process and its children start use these options, unless others are set."""
    with suppress(JetcaptureError):  # whoever needs Java says so
        require_java()
    options = f"{SHORT_LIVED} {FEW_ROWS} {PATIENT}"
    with suppress(PackageNotFoundError):
        if classes().exists():
            options += f" -XX:SharedArchiveFile={classes()} -Xshare:auto -Xlog:disable"
    os.environ.setdefault(VARIABLE, options)


def only() -> dict[str, str]:
    """This process's environment, with nothing else about Spark in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == VARIABLE or not name.startswith(("SPARK_", "PYSPARK_"))
    }


def write() -> None:
    """Run the core cases in a session of Spark that writes its classes to the file when it ends."""
    from tests.integration.spark import core
    from tests.integration.spark.conftest import Archive
    from tests.support.nats_server import NatsServer
    from tests.support.replays import add_stream

    with tempfile.TemporaryDirectory(dir=classes().parent) as place:
        home, written = Path(place), Path(place) / "classes.jsa"
        options = f"{SHORT_LIVED} {PATIENT} -XX:ArchiveClassesAtExit={written} -Xlog:disable"
        archive = Archive(home / "archive")
        core.fill(archive)
        with NatsServer(home / "nats") as server:
            add_stream(server.url, "CLASSES", "classes.>")
            try:
                done = subprocess.run(
                    [sys.executable, "-m", core.__name__, archive.url, server.url, "CLASSES", "remote"],
                    capture_output=True,  # which ends when the JVM has ended
                    text=True,
                    check=False,
                    timeout=900,
                    env={**os.environ, VARIABLE: options},
                )
            except subprocess.TimeoutExpired:
                print("Spark's classes cannot be kept, so each Spark starts slowly: it does not end")
                return
        if done.returncode == 0 and written.exists():
            written.replace(classes())
        else:
            print(f"Spark's classes cannot be kept, so each Spark starts slowly: {done.stderr[-1000:]}")


if __name__ == "__main__":
    require_java()
    if not classes().exists():
        print("Keeping Spark's classes for the tests …")
        write()
