"""The user's code may raise anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jetcapture_py import plugins


def test_an_interrupt_that_code_raises_is_an_error_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupting.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(plugins.load, "interrupting:key")
        with pytest.raises(ValueError, match=r"^cannot import interrupting:key: KeyboardInterrupt$"):
            loading.result()
    with pytest.raises(KeyboardInterrupt):  # in the main thread it is Ctrl-C
        plugins.load("interrupting:key")
