"""A server that miscounts a consumer's pending messages, as several versions did, holds nobody up at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.jetstream.connection import Api
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, config, publish, rows


@pytest.mark.parametrize("instead_of_0", [3, (1 << 64) - 1])
async def test_a_run_until_caught_up_ends_where_the_stream_ends(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch, instead_of_0: int
) -> None:
    ask = Api.request

    async def answered(api: Api, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = await ask(api, subject, body)
        return {**answer, "num_pending": instead_of_0} if answer.get("num_pending") == 0 else answer

    monkeypatch.setattr(Api, "request", answered)
    await publish(server.url, [("orders.a", b"x", None)] * 50)
    await asyncio.wait_for(capture_all(config(server.url, archive)), 120)
    assert len(rows(archive)) == 50
