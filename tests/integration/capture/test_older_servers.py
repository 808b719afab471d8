"""Captures from servers of older releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nats_server import NatsServer, older_servers
from tests.support.running import capture_all, config, publish, rows


@pytest.mark.parametrize(
    "command", [pytest.param(command, id=version) for version, command in older_servers()] or [None]
)
def test_every_supported_server_is_captured_whole(
    nats_server: Callable[..., NatsServer], tmp_path: Path, command: str | None
) -> None:
    if command is None:
        pytest.skip("no older servers are installed")
    server = nats_server(command=command)
    count = asyncio.run(publish(server.url, ((f"orders.k{n % 3}", b"%d" % n, None) for n in range(1000))))
    asyncio.run(capture_all(config(server.url, tmp_path / "archive")))
    assert len(rows(tmp_path / "archive")) == count
