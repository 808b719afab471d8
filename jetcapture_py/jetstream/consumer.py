"""The consumer on the server: found or created, looked up again, and followed as long as it is the same one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.admin import (
    ConsumerState,
    check_acks,
    differences,
    ensure_consumer,
    get_consumer,
    stream_created,
    unusable,
)
from jetcapture_py.jetstream.connection import FORBIDDEN, NOT_FOUND, Api, ApiError, UnavailableError
from jetcapture_py.jetstream.consumer_watch import ConsumerWatch
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.source")


class Consumer:
    """One consumer and its last known `state`. `fail` is called when it can never be captured from again."""

    def __init__(self, api: Api, config: SourceConfig, fail: Callable[[SourceError], None]) -> None:
        self._api, self._config, self._fail = api, config, fail
        self.stream_created = ""
        self._may_get = True  # False once STREAM.MSG.GET was denied

    async def attach(self) -> None:
        """Find the consumer, or create it. Raises SourceError."""
        try:
            self.state: ConsumerState = await ensure_consumer(self._api, self._config)
            self.stream_created = await stream_created(self._api, self._config.stream)
            await check_acks(self._api, self._config.stream, self._config.consumer)
        except UnavailableError as error:
            raise SourceError(str(error)) from error
        self._watch = ConsumerWatch(self.state, asyncio.get_running_loop().time())
        for difference in differences(self._config, self.state.config):
            event(
                log,
                logging.WARNING,
                "consumer.differs",
                setting=difference.name,
                configured=difference.wanted,
                actual=difference.actual,
            )
        self._warn_of_max_deliver(self.state)
        self._warn_of_pause(self.state)

    async def refresh(self) -> bool:
        """Look it up again; False when nobody answers just now, or it cannot be captured from any more."""
        stream, name = self._config.stream, self._config.consumer
        try:
            state = await get_consumer(self._api, stream, name)
        except UnavailableError as error:
            event(log, logging.DEBUG, "consumer.unavailable", error=error)
            return False
        except SourceError as error:
            if self._watch.is_gone(asyncio.get_running_loop().time()):
                self._fail(error)
            return False
        if not self._watch.is_same(state, asyncio.get_running_loop().time()):
            remedy = "restart to capture from the new one, then run jetcapture verify"
            self._fail(SourceError(f"consumer {name} of stream {stream} was deleted and created again; {remedy}"))
            return False
        if problem := unusable(stream, name, state.config):
            self._fail(SourceError(problem))
            return False
        self._report_changes(state)
        self.state = state
        return True

    async def is_empty(self, seq: int) -> bool | None:
        """Return whether the stored message is empty; None without permission or answer.

        False for a message that is gone: its content is unknown, and it is not delivered again.
        """
        if not self._may_get:
            return None
        try:
            answer = await self._api.request(f"STREAM.MSG.GET.{self._config.stream}", {"seq": seq})
        except UnavailableError:
            return None
        except ApiError as error:
            self._may_get = error.code != FORBIDDEN
            return False if error.code == NOT_FOUND else None
        return not answer["message"].get("data")

    async def is_other(self, seq: int, timestamp: int) -> bool:
        """Whether the stream has another message than that stored at `timestamp` (microseconds); False if unknown."""
        try:
            answer = await self._api.request(f"STREAM.MSG.GET.{self._config.stream}", {"seq": seq})
        except (ApiError, UnavailableError):
            return False
        return microseconds_of(datetime.fromisoformat(answer["message"]["time"])) != timestamp

    def _report_changes(self, state: ConsumerState) -> None:
        """Log the settings that somebody has changed."""
        old, new = self.state.config, state.config
        if changed := {name: new.get(name) for name in {*old, *new} if old.get(name) != new.get(name)}:
            event(log, logging.WARNING, "consumer.changed", settings=changed)
            if "max_deliver" in changed:
                self._warn_of_max_deliver(state)
            self._warn_of_pause(state)

    def _warn_of_max_deliver(self, state: ConsumerState) -> None:
        if (limit := state.config.get("max_deliver", -1)) > 0:
            event(log, logging.WARNING, "consumer.max_deliver", max_deliver=limit)

    def _warn_of_pause(self, state: ConsumerState) -> None:
        if state.paused:
            event(log, logging.WARNING, "consumer.paused", until=state.config.get("pause_until"))
