"""What the command line does before it imports anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")  # noqa: PTH112
def test_importing_numpy_starts_no_thread_per_core() -> None:
    code = (
        "import contextlib, os\nfrom jetcapture_py.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "import numpy\nprint(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    output = subprocess.check_output([sys.executable, "-c", code, "--version"], env=environment)
    assert output.splitlines()[-1] == b"1"
