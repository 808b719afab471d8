"""The machine and the versions that results belong to."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.compare import peers
from tests.support.nats_server import binary


def machine() -> str:
    """Return processor, cores, memory and system."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    processor = match[1] if match else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / (1 << 30)
    return f"{cores} cores ({processor}), {memory:.0f} GiB, {platform.system()} {platform.release()}"


def versions(runners: Iterable[str]) -> str:
    """Return the versions of everything that takes part."""
    server = _said(binary(), "--version").split(":")[-1].strip()
    parts = [f"jetcapture {version('jetcapture')}", f"nats-server {server}", f"Python {platform.python_version()}"]
    parts += [f"{name} {version(name)}" for name in ("nats-py", "pyarrow", "msgspec")]
    names = set(runners)
    if "jet-capture" in names:
        parts.append(f"jet-capture {peers.version('jet-capture')}")
    if "bento" in names:
        parts.append(f"Bento {peers.version('bento')}")
    if "tenzir" in names:
        parts.append(f"Tenzir {json.loads(_said('tenzir', 'version | select version | write_ndjson'))['version']}")
    if names & {"bento", "jet-capture"}:
        parts.append(_said("go", "version").removeprefix("go version ").split(" ")[0])
    return ", ".join(parts)


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return "?"
