"""Where the other programs come from: the Go programs of `benchmarks/peers` are built once, others must be on the PATH.

The binaries stay in `benchmarks/.peers`, which git ignores.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "peers"
CACHE = Path(__file__).parents[1] / ".peers"
MODULES = {"jet-capture": "github.com/Intelecy/jet-capture", "bento": "github.com/warpstreamlabs/bento"}
BUILD_TIMEOUT = 1800


class UnavailableError(Exception):
    """This program is not available; the message is the reason, in one line."""


def installed(name: str) -> str:
    """Return the path of a program on the PATH."""
    path = shutil.which(name)
    if path is None:
        raise UnavailableError(f"{name} is not on the PATH")
    return path


def binary(name: str, checkout: Path | None = None) -> Path:
    """Return the program `name`, built if needed, with its library from `checkout` or else from Go's proxy."""
    go = shutil.which("go")
    sources = sorted(path for path in (SOURCES / name).iterdir() if path.is_file())
    program = CACHE / f"{name}-{_digest(sources + (sorted(checkout.rglob('*.go')) if checkout else []))}"
    if program.exists():
        return program
    if go is None:
        raise UnavailableError("Go is not on the PATH")
    CACHE.mkdir(exist_ok=True)
    print(f"Building {name} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="jetcapture-bench-") as directory:
        for path in sources:
            shutil.copy(path, directory)
        if checkout is not None:
            _go(go, directory, "mod", "edit", "-replace", f"{MODULES[name]}={checkout.resolve()}")
        _go(go, directory, "build", "-mod=mod", "-trimpath", "-o", "program", ".")
        shutil.move(Path(directory, "program"), program)
    return program


def version(name: str) -> str:
    """Return the version of its library."""
    text = (SOURCES / name / "go.mod").read_text()
    match = re.search(rf"{re.escape(MODULES[name])} (v\S+)", text)
    assert match is not None, f"go.mod of {name} does not name {MODULES[name]}"
    return match[1]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _go(go: str, directory: str, *arguments: str) -> None:
    try:
        done = subprocess.run(
            [go, *arguments], cwd=directory, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"go {arguments[0]} took more than {BUILD_TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("go: downloading")]
        raise UnavailableError(f"go {arguments[0]}: {' '.join((lines or ['failed'])[-1].split())[:300]}")
