"""Libraries of Java that only tests need: Maven gets their jars, once for a virtual environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_NAMES = ("groupId", "artifactId", "version", "classifier")


def jars(name: str, coordinates: Sequence[Sequence[str]]) -> Path:
    """The directory `name` of the virtual environment with these jars, without what they depend on.

    Each has a group, a name, a version and maybe a classifier. The test is skipped where they cannot be had.
    """
    home = Path(sys.prefix) / name
    if not home.exists():
        if shutil.which("mvn") is None:
            pytest.skip("needs Maven")
        with tempfile.TemporaryDirectory(dir=home.parent) as directory:
            (Path(directory) / "pom.xml").write_text(_project(coordinates))
            words = ["mvn", "--batch-mode", _COPY, "-DexcludeTransitive", "-DoutputDirectory=jars"]
            done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                pytest.skip(f"Maven cannot get {name}: {done.stdout[-500:]}")
            if not home.exists():
                (Path(directory) / "jars").rename(home)
    return home


def _project(coordinates: Sequence[Sequence[str]]) -> str:
    dependencies = ""
    for jar in coordinates:
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in zip(_NAMES, jar, strict=False))
        dependencies += f"<dependency>{fields}</dependency>"
    own = "<modelVersion>4.0.0</modelVersion><groupId>tests</groupId><artifactId>tests</artifactId><version>1</version>"
    return f"<project>{own}<dependencies>{dependencies}</dependencies></project>"
