"""Requests to the JetStream API as it is, for tests."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.client import Client

from tests.support.running import connection


async def ask(url: str, subject: str, body: Any = None) -> dict[str, Any]:
    """The answer to a request; an assertion fails for an error."""
    async with connection(url) as client:
        return await ask_with(client, subject, body)


async def ask_with(client: Client, subject: str, body: Any = None) -> dict[str, Any]:
    """The same, through a connection."""
    payload = b"" if body is None else json.dumps(body).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{subject}", payload, timeout=10)).data)
    assert "error" not in answer, answer["error"]
    return answer


async def create(
    url: str, stream: dict[str, Any], consumer: dict[str, Any] | None = None, messages: int = 0
) -> dict[str, Any]:
    """Create a stream with these settings, a consumer `archive`, and messages; the stream's answer."""
    name = stream["name"]
    await ask(url, f"STREAM.CREATE.{name}", stream)
    if consumer is not None:
        config = {"name": "archive", "durable_name": "archive", "ack_policy": "explicit", **consumer}
        await ask(url, f"CONSUMER.CREATE.{name}.archive", {"stream_name": name, "config": config, "action": "create"})
    async with connection(url) as client:
        for number in range(messages):
            subject = stream["subjects"][0].split(".")[0]
            await client.jetstream().publish(f"{subject}.{number % 5}", b"x" * 100)
    return await ask(url, f"STREAM.INFO.{name}")
