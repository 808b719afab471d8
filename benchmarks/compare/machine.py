"""The machine and the versions that results belong to."""

from __future__ import annotations

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
    """Processor, cores, memory, system."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / (1 << 30)
    return f"{cores} cores ({processor}), {memory:.0f} GiB, {platform.system()} {platform.release()}"


def versions(runners: Iterable[str]) -> str:
    """Of everything that takes part."""
    server = _said(binary(), "--version").split(":")[-1].strip()
    found = [f"jetcapture {version('jetcapture')}", f"nats-server {server}", f"Python {platform.python_version()}"]
    found += [f"{name} {version(name)}" for name in ("nats-py", "pyarrow", "msgspec")]
    names = set(runners)
    if any(name.startswith("jet-capture") for name in names):
        found.append(f"jet-capture {peers.version('jet-capture')}")
    if "connect" in names:
        found.append(f"Redpanda Connect {peers.version('connect')}")
    if names & {"connect", "jet-capture-csv", "jet-capture-ndjson"}:
        found.append(_said("go", "version").removeprefix("go version ").split(" ")[0])
    return ", ".join(found)


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return "?"
