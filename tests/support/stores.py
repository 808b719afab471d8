"""Stores of a user's own, for tests: a directory, and something that happens once an object is in it."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.store import LocalStore


class ThenStore(LocalStore):
    """Calls `then` in the thread that has stored an object; what that raises, `put` raises."""

    def __init__(self, config: Config, then: Callable[[], object]) -> None:
        super().__init__(config.store.url)
        self._then = then

    def put(self, name: ObjectName, data: pa.Buffer) -> str:
        location = super().put(name, data)
        self._then()
        return location


class CrashError(Exception):
    """Ends a capture after its objects are stored and before their messages are acknowledged, with `retry_for: 0s`."""


def crash() -> None:
    raise CrashError
