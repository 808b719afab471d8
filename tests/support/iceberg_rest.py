"""Iceberg's own REST catalog, from the tests of its Java library, with the libraries that PySpark brings.

`IcebergRest.java` answers HTTP with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.maven import jars

VERSION = "1.10.0"
_JARS = [
    ("org.apache.iceberg", "iceberg-core", VERSION, "tests"),
    *(
        ("org.apache.iceberg", name, VERSION)
        for name in ("iceberg-api", "iceberg-bundled-guava", "iceberg-common", "iceberg-core")
    ),
    ("com.github.ben-manes.caffeine", "caffeine", "2.9.3"),
    ("org.apache.httpcomponents.client5", "httpclient5", "5.5"),
    ("org.apache.httpcomponents.core5", "httpcore5", "5.3.4"),
]


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """A catalog that forgets its tables at the end; its address. Skips without a Java compiler or PySpark."""
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None or shutil.which("javac") is None:
        pytest.skip("needs PySpark and a JDK")
    classes = os.pathsep.join(
        [f"{jars(f'iceberg-rest-{VERSION}', _JARS)}/*", f"{Path(spark.origin).parent}/jars/*", str(directory)]
    )
    source = Path(__file__).with_name("IcebergRest.java")
    subprocess.run(["javac", "-nowarn", "-cp", classes, "-d", directory, source], check=True, capture_output=True)
    command = ["java", "-cp", classes, "org.apache.iceberg.rest.IcebergRest"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
