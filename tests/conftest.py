"""Fixtures for every tier of tests."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """Starts servers for the test, `nats_server(extra_config="")`, each with its own storage; stops them after it."""
    with ExitStack() as stack:
        count = 0

        def start(extra_config: str = "") -> NatsServer:
            nonlocal count
            count += 1
            return stack.enter_context(NatsServer(tmp_path / f"nats-{count}", extra_config))

        yield start
