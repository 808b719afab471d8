"""The Go programs of `benchmarks/peers`, built once; the binaries stay in `benchmarks/.peers`, which git ignores."""

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
MODULES = {"jet-capture": "github.com/Intelecy/jet-capture", "connect": "github.com/redpanda-data/connect/v4"}
BUILD_TIMEOUT = 1800


class UnavailableError(Exception):
    """This program cannot be had here; the message is the reason, one line."""


def binary(name: str, checkout: Path | None = None) -> Path:
    """The program `name`, built if it is not there yet; its library is taken from `checkout`, else from Go's proxy."""
    go = shutil.which("go")
    sources = sorted(path for path in (SOURCES / name).iterdir() if path.is_file())
    found = CACHE / f"{name}-{_digest(sources + (sorted(checkout.rglob('*.go')) if checkout else []))}"
    if found.exists():
        return found
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
        shutil.move(Path(directory, "program"), found)
    return found


def version(name: str) -> str:
    """The version of its library."""
    text = (SOURCES / name / "go.mod").read_text()
    found = re.search(rf"{re.escape(MODULES[name])} (v\S+)", text)
    assert found is not None, f"go.mod of {name} does not name {MODULES[name]}"
    return found[1]


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
