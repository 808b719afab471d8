"""What is imported is looked at once, and threads for linear algebra are for code of the user's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from jetcapture_py import startup
from tests.support.running import config

THREADS = "OPENBLAS_NUM_THREADS"


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_inside_is_never_collected() -> None:
    gc.unfreeze()
    with startup.imports(config("nats://h", "/a"), env={}):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize(
    ("sections", "given", "threads"),
    [
        ({}, {}, "1"),
        ({}, {THREADS: "8"}, "8"),
        ({"key": "module:function"}, {}, None),
        ({"decode": {"format": "module:Decoder"}}, {}, None),
    ],
)
def test_threads_for_linear_algebra(sections: dict[str, Any], given: dict[str, str], threads: str | None) -> None:
    with startup.imports(config("nats://h", "/a", **sections), env=given):
        pass
    assert given.get(THREADS) == threads
