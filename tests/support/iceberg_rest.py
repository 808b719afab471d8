"""Iceberg's own REST catalog, from the tests of its Java library, with the libraries that PySpark brings.

Its jars come from Maven, once for a virtual environment, and `IcebergRest.java` answers HTTP with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

MAVEN = "https://repo1.maven.org/maven2"
VERSION = "1.10.0"
_JARS = [
    f"org/apache/iceberg/iceberg-core/{VERSION}/iceberg-core-{VERSION}-tests.jar",
    *(
        f"org/apache/iceberg/{name}/{VERSION}/{name}-{VERSION}.jar"
        for name in ("iceberg-api", "iceberg-bundled-guava", "iceberg-common", "iceberg-core")
    ),
    "com/github/ben-manes/caffeine/caffeine/2.9.3/caffeine-2.9.3.jar",
    "org/apache/httpcomponents/client5/httpclient5/5.5/httpclient5-5.5.jar",
    "org/apache/httpcomponents/core5/httpcore5/5.3.4/httpcore5-5.3.4.jar",
]


def _jars() -> Path:
    """The directory with the jars; the test is skipped where they cannot be had."""
    home = Path(sys.prefix) / f"iceberg-rest-{VERSION}"
    if not home.exists():
        fresh = Path(tempfile.mkdtemp(dir=home.parent))
        try:
            for jar in _JARS:
                with urlopen(f"{MAVEN}/{jar}", timeout=60) as answer:
                    (fresh / Path(jar).name).write_bytes(answer.read())
        except (URLError, OSError) as error:
            shutil.rmtree(fresh)
            pytest.skip(f"{MAVEN} cannot be reached: {error}")
        fresh.rename(home)
    return home


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """A catalog that forgets its tables at the end; its address. Skips without a Java compiler or PySpark."""
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None or shutil.which("javac") is None:
        pytest.skip("needs PySpark and a JDK")
    classes = os.pathsep.join([f"{_jars()}/*", f"{Path(spark.origin).parent}/jars/*", str(directory)])
    source = Path(__file__).with_name("IcebergRest.java")
    subprocess.run(["javac", "-nowarn", "-cp", classes, "-d", directory, source], check=True, capture_output=True)
    command = ["java", "-cp", classes, "org.apache.iceberg.rest.IcebergRest"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
