"""Volumes that come and go: a directory mounted somewhere else, where this process may mount."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


class Volume:
    """The directory `real`, mounted at `point`. Skips the test where mounting is not allowed."""

    def __init__(self, directory: Path) -> None:
        self.real, self.point = directory / "real", directory / "mnt"
        self.real.mkdir()
        self.point.mkdir()
        self._mounts = 0
        try:
            self.mount()
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting is not allowed here")

    def mount(self) -> None:
        self._mount("--bind", str(self.real))

    def unmount(self) -> None:
        """Also while files are open in it."""
        subprocess.run(["umount", "--lazy", str(self.point)], check=True, capture_output=True)
        self._mounts -= 1

    def mount_another(self, mebibytes: int = 1) -> None:
        """An empty volume of that size."""
        self._mount("-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs")

    def _mount(self, *what: str) -> None:
        subprocess.run(["mount", *what, str(self.point)], check=True, capture_output=True)
        self._mounts += 1

    def close(self) -> None:
        while self._mounts:
            self.unmount()
