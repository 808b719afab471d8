"""Captures in this process, with a real server."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jetcapture_py import log


@pytest.fixture
def logged() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Returns what was logged as an event, or as any (`""`)."""
    text = io.StringIO()
    log.setup("json", "debug", text)
    yield lambda name: [
        entry for entry in map(json.loads, text.getvalue().splitlines()) if name in ("", entry["event"])
    ]
    log.setup("json", "info")
