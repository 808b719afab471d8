"""The harness's own hand on stream and consumer, past every proxy."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import nats.errors
from nats.aio.client import Client

from tests.chaos.replica import ChaosError
from tests.support.running import CONSUMER, STREAM

_UNAVAILABLE, _NOT_FOUND = 503, 404


class JetStream:
    """Requests to the JetStream API. `created` says when the stream was created, and created again."""

    def __init__(self, client: Client, replicas: int, *, ordered: bool = False) -> None:
        self.created: list[str] = []
        self._client, self._replicas = client, replicas
        self._settings = {"deny_delete": True, "deny_purge": True} if ordered else {}

    async def ask(self, subject: str, body: dict[str, Any] | None = None, timeout: float = 2.0) -> dict[str, Any]:
        """A JetStream API request; the answer, with `error` in it also when nobody answers."""
        try:
            message = await self._client.request(f"$JS.API.{subject}", json.dumps(body or {}).encode(), timeout=timeout)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            return {"error": {"code": _UNAVAILABLE, "description": type(error).__name__}}
        found: dict[str, Any] = json.loads(message.data)
        return found

    async def insist(self, subject: str, body: dict[str, Any] | None = None, patience: float = 60.0) -> dict[str, Any]:
        """The same, asked until somebody is responsible."""
        deadline = time.monotonic() + patience
        while True:
            answer = await self.ask(subject, body)
            if answer.get("error", {}).get("code") != _UNAVAILABLE:
                return answer
            if time.monotonic() > deadline:
                raise ChaosError(f"{subject} is not answered: {answer['error']}")
            await asyncio.sleep(0.2)

    async def create_stream(self) -> None:
        """The stream, with a window in which ids count that is longer than any outage here."""
        window = 3600 * 1_000_000_000
        config = {"name": STREAM, "subjects": ["orders.>"], "num_replicas": self._replicas, "duplicate_window": window}
        config |= self._settings
        answer = await self.insist(f"STREAM.CREATE.{STREAM}", config)
        if "error" in answer:
            raise ChaosError(f"the stream could not be created: {answer['error']}")
        self.created.append(answer["created"])

    async def consumer(self) -> dict[str, Any]:
        """What the server says of the consumer; with `error` where there is none just now."""
        return await self.ask(f"CONSUMER.INFO.{STREAM}.{CONSUMER}")

    async def pause_consumer(self, until: str | None) -> None:
        """Have it deliver nothing until a time, or again."""
        body = {} if until is None else {"pause_until": until}
        answer = await self.insist(f"CONSUMER.PAUSE.{STREAM}.{CONSUMER}", body)
        if answer.get("error", {}).get("code") not in (None, _NOT_FOUND):
            raise ChaosError(f"the consumer could not be paused: {answer['error']}")
        if "error" not in answer and bool(answer.get("paused")) != (until is not None):
            raise ChaosError(f"the consumer's pause is not as asked: {answer}")

    async def change_consumer(self, **changes: Any) -> None:
        """Change its settings in place."""
        info = await self.insist(f"CONSUMER.INFO.{STREAM}.{CONSUMER}")
        if "error" in info:
            return
        config = {**info["config"], **changes}
        body = {"stream_name": STREAM, "config": {k: v for k, v in config.items() if v is not None}, "action": "update"}
        answer = await self.insist(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", body)
        if answer.get("error", {}).get("err_code") not in (None, 10149):  # it is gone
            raise ChaosError(f"the consumer could not be changed to {changes}: {answer['error']}")
