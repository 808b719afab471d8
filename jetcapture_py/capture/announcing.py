"""Announce stored objects after their messages are acknowledged: publish a message, and call user code.

Announcing never delays or fails a capture. Each receiver has a bounded queue; announcements that do not fit, fail or
hang are counted, logged with a rate limit, and not retried. The archive itself is the record of what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from jetcapture_py import plugins
from jetcapture_py.archive.layout import ObjectName, bucket_text
from jetcapture_py.capture.blocks import StoredBlock
from jetcapture_py.config.model import Config, OnStoredConfig
from jetcapture_py.config.subjects import covers
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.jetstream.consumer import filters_of
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.jetstream.unreadable import Notifier, notification_loop
from jetcapture_py.jetstream.wire.client import Denial, refusal
from jetcapture_py.log import LogLimit, event
from jetcapture_py.text import age
from jetcapture_py.threads import DaemonThread

log = logging.getLogger("jetcapture.on_stored")

MAX_WAITING = 10_000
"""Maximum objects in a receiver's queue."""
TIMEOUT = 30.0
"""Maximum seconds of one announcement."""
Notifiers = Callable[[], Iterable[Notifier]]
"""Returns the captures of the process that publish notifications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """A stored object whose messages are acknowledged."""

    name: ObjectName
    location: str
    """What the store returned."""
    messages: int
    """The number of distinct messages."""
    bytes: int
    """The object's size."""
    seconds: float
    """The time from sealing the block to the acknowledgement."""

    def fields(self) -> dict[str, Any]:
        """Return the published JSON values. `path` is relative to the archive's root."""
        name = self.name
        return {
            "path": name.path,
            "stream": name.stream,
            "key": name.key,
            "bundle": name.bundle or None,
            "bucket": bucket_text(name.bucket),
            "rows": name.rows,
            "messages": self.messages,
            "bytes": self.bytes,
            "first_seq": name.first_seq,
            "last_seq": name.last_seq,
            "seconds": round(self.seconds, 3),
            "quarantine": name.quarantine,
            "location": self.location,
        }


class OnStored(Protocol):
    """Called for every stored object, including the quarantine's, after its messages are acknowledged.

    Called at most once per object: objects are skipped after a crash between storing and calling, if the queue is full,
    or if they are still queued when the process ends. Functions and coroutine functions run one at a time in their own
    thread, whose event loop runs only during calls. A call that does not return within 30 seconds counts as failed, and
    so do later ones until it returns. Exceptions are logged.
    """

    def __call__(self, stored: StoredObject, location: str, /) -> object:
        """Handle `stored`, which is at `location`; may return an awaitable."""
        ...


def configured_call(config: OnStoredConfig) -> OnStored | None:
    """Return the function that `on_stored.call` names, or an instance of the class. Raises ConfigError."""
    if not config.call:
        return None
    try:
        call = plugins.load(config.call)
        call = plugins.created(config.call, call) if isinstance(call, type) else call
    except ValueError as error:
        raise ConfigError(f"on_stored.call: {error}") from error
    if not callable(call):
        raise ConfigError(f"on_stored.call: {config.call} cannot be called")
    return cast("OnStored", call)


class Announcer:
    """Announces to the configured subject, and to `call` or the configured function."""

    def __init__(self, config: Config, source: PullSource, call: OnStored | None, others: Notifiers = tuple) -> None:
        self.subject = config.stored_subject
        self.notifier: Notifier | None = None
        """Set once the subject has been checked."""
        self.failures: Counter[str] = Counter()
        """Objects that were not announced, by receiver."""
        self._source, self._others = source, others
        self._limits: dict[str, LogLimit] = {}
        self._denied_on = -1  # the connection on which a denial was logged
        self._receivers: dict[str, _Receiver] = {}
        if self.subject:
            self._receivers["subject"] = _Receiver(self._publish, contextlib.nullcontext())
        call = configured_call(config.on_stored) if call is None else call
        if call is not None:
            thread = _CallThread(call, TIMEOUT)
            self._receivers["call"] = _Receiver(thread.run, contextlib.closing(thread))

    async def check(self) -> None:
        """Refuse a subject whose messages come back to the capture, also through others. Raises ConfigError."""
        source = self._source
        if not self.subject:
            return
        source.link.client.denial_listeners.append(self._denied)
        taken, filters = await source.consumer.stream_subjects(), filters_of(source.state.config)
        self.notifier = Notifier(stream=source.stream, subject=self.subject, taken=taken, filters=filters)
        if problem := notification_loop(self.notifier, self._others()):
            raise ConfigError(f"on_stored.subject: {problem}")
        if any(covers(subject, self.subject) for subject in taken):
            text = f"on_stored.subject: stream {source.stream} takes {self.subject} itself; it is not captured"
            event(log, logging.WARNING, "config.warning", warning=text)

    def announce(self, blocks: Iterable[StoredBlock]) -> None:
        """Queue stored and acknowledged blocks; returns immediately."""
        if not self._receivers:
            return
        for block, name, messages, size, location in blocks:
            if name is None:
                continue
            stored = StoredObject(
                name=name,
                location=location,
                messages=messages,
                bytes=size,
                seconds=time.monotonic() - block.sealed_at,
            )
            for kind, receiver in self._receivers.items():
                try:
                    receiver.waiting.put_nowait(stored)
                    receiver.undelivered += 1
                except asyncio.QueueFull:
                    self._failed(kind, f"{MAX_WAITING} objects are already waiting", stored.name.path)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return one endless task per receiver."""
        return [self._deliver(kind, receiver) for kind, receiver in self._receivers.items()]

    async def finish(self, deadline: float) -> None:
        """Work off the queues, until `deadline` by the event loop's clock."""
        try:
            async with asyncio.timeout_at(deadline):
                for receiver in self._receivers.values():
                    await receiver.waiting.join()
        except TimeoutError:
            for kind, receiver in self._receivers.items():
                if undelivered := receiver.undelivered:
                    self._failed(kind, "drain_timeout", "", undelivered)

    async def _deliver(self, kind: str, receiver: _Receiver) -> None:
        with receiver.context:
            while True:
                stored = await receiver.waiting.get()
                try:
                    async with asyncio.timeout(TIMEOUT):
                        await receiver.deliver(stored)
                except TimeoutError:
                    self._failed(kind, f"no answer for {TIMEOUT:.0f} s", stored.name.path)
                except Exception as error:
                    self._failed(kind, error, stored.name.path)
                finally:
                    receiver.undelivered -= 1
                    receiver.waiting.task_done()

    async def _publish(self, stored: StoredObject) -> None:
        await self._source.link.client.publish(self.subject, json.dumps(stored.fields()).encode())

    def _denied(self, denial: Denial) -> None:
        """Count a denial that is about the announcements' subject; log it once per connection."""
        if (subject := denial.about(self.subject)) is None:
            return
        reconnects = self._source.reconnects
        if self._denied_on != reconnects:
            self._denied_on = reconnects
            self._limits["subject"] = LogLimit()  # not rate-limited
            self._failed("subject", refusal(subject), "")
        else:
            self.failures["subject"] += 1

    def _failed(self, kind: str, error: object, path: str, count: int = 1) -> None:
        self.failures[kind] += count
        limit = self._limits.setdefault(kind, LogLimit())
        if objects := limit.due(asyncio.get_running_loop().time(), count):
            where = {"object": path} if path else {}
            event(log, logging.WARNING, "on_stored.failed", receiver=kind, objects=objects, error=error, **where)


class _Receiver:
    """A receiver and its queue; `context` is open while it delivers."""

    def __init__(
        self, deliver: Callable[[StoredObject], Awaitable[None]], context: contextlib.AbstractContextManager[Any]
    ) -> None:
        self.deliver, self.context = deliver, context
        self.waiting: asyncio.Queue[StoredObject] = asyncio.Queue(MAX_WAITING)
        self.undelivered = 0
        """Objects not announced yet, including the one in progress."""


class _CallThread:
    """Calls a user's function in a dedicated thread, and awaits an awaitable result for at most `timeout` seconds."""

    def __init__(self, call: OnStored, timeout: float) -> None:
        self._call, self._timeout = call, timeout
        self._thread, self._runner = DaemonThread("on_stored"), asyncio.Runner()

    async def run(self, stored: StoredObject) -> None:
        """Make the call and wait. Raises its exception, or JetcaptureError if an earlier call has not returned."""
        if (waited := self._thread.busy_for) is not None:
            raise JetcaptureError(f"an earlier call has not returned for {age(waited)}")
        await asyncio.wrap_future(self._thread.submit(partial(self._called, stored)))

    def close(self) -> None:
        """End the thread, once its call has returned."""
        self._thread.submit(self._runner.close)
        self._thread.close()

    def _called(self, stored: StoredObject) -> None:
        with plugins.user_code(lambda reason: JetcaptureError(f"it raised {reason}"), Exception):
            result = self._call(stored, stored.location)
            if inspect.isawaitable(result):
                self._runner.run(self._awaited(result))

    async def _awaited(self, result: Awaitable[Any]) -> None:
        async with asyncio.timeout(self._timeout):
            await result
