"""Iceberg's own REST catalog, from the tests of its Java library, with the libraries that PySpark brings.

Maven gets its jars, once for a virtual environment, and `IcebergRest.java` answers HTTP with them.
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

import pytest

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
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"


def _project() -> str:
    """A Maven project that depends on the jars."""
    names, dependencies = ("groupId", "artifactId", "version", "classifier"), ""
    for jar in _JARS:
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in zip(names, jar, strict=False))
        dependencies += f"<dependency>{fields}</dependency>"
    own = "<modelVersion>4.0.0</modelVersion><groupId>tests</groupId><artifactId>tests</artifactId><version>1</version>"
    return f"<project>{own}<dependencies>{dependencies}</dependencies></project>"


def _jars() -> Path:
    """The directory with the jars; the test is skipped where they cannot be had."""
    home = Path(sys.prefix) / f"iceberg-rest-{VERSION}"
    if not home.exists():
        if shutil.which("mvn") is None:
            pytest.skip("needs Maven")
        with tempfile.TemporaryDirectory(dir=home.parent) as directory:
            (Path(directory) / "pom.xml").write_text(_project())
            words = ["mvn", "--batch-mode", _COPY, "-DexcludeTransitive", "-DoutputDirectory=jars"]
            done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                pytest.skip(f"Maven cannot get Iceberg's catalog: {done.stdout[-500:]}")
            (Path(directory) / "jars").rename(home)
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
