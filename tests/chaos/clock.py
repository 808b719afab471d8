"""A wall clock that jumps, for daemons only."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """`environment` is what processes need that are to have this clock; it needs a C compiler."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self._file.write_bytes(struct.pack("q", 0))
        library = directory / "clock.so"
        compiler = shutil.which("cc")
        self.can_jump = compiler is not None
        self.environment: dict[str, str] = {}
        if compiler:
            subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
            self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def shift(self, seconds: float) -> None:
        """From now on it goes so many seconds ahead of the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", int(seconds)))
