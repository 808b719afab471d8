"""The memory that this process had resident at most.

`ru_maxrss` is no measure of it: a process that Python starts begins with the peak of the process that started it.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_resident() -> int:
    """Return the peak of resident bytes since the start, or since `forget_peak`."""
    if sys.platform == "linux":
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Let the peak begin again with what is resident now, where the system can."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
