"""What is imported at the start is exempt from garbage collection, and libraries that few need can come later."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jetcapture_py import startup


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_inside_is_never_collected_and_late_libraries_are_missing_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.unfreeze()
    monkeypatch.delitem(sys.modules, "aiohttp", raising=False)
    with startup.imports():
        assert not gc.isenabled()
        with pytest.raises(ModuleNotFoundError, match="No module named 'aiohttp'"):
            import aiohttp
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    import aiohttp  # noqa: F401


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")  # noqa: PTH112
def test_importing_numpy_starts_no_thread_per_core() -> None:
    code = (
        "import os\nfrom jetcapture_py import startup\nwith startup.imports(): import numpy\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"1\n"
