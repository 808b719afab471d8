"""What is imported at the start is exempt from garbage collection, and libraries that few need can come later."""

from __future__ import annotations

import gc
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
