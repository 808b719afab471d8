"""`verify --repair` in an actor's thread, and the server that it asks, which says what the model does."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from jetcapture_py import threads
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time, moment_of
from jetcapture_py.jetstream.range_reader import NOBODY, StreamRange, received_of
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.verify import proof, scope
from jetcapture_py.verify import repair as repairing
from tests.simulation.catalogue import STREAM, Stream
from tests.simulation.loop import AtOnce, run
from tests.simulation.scheduler import ask
from tests.simulation.store import Operation


def repaired(config: Config) -> tuple[Any, ...]:
    """Says whether everything is stored, up to which sequence, and what failed."""
    report, done = run(repairing.verify_and_repair(config, deep=True))
    return ("repaired", report.complete, report.up_to, done.errors)


class _Thread(AtOnce):
    def close(self) -> None:
        pass


class _Session(ReadSession):
    """A connection to the server."""

    async def open(self) -> None:
        self.connection: Any = SimpleNamespace(is_connected=True, is_closed=False)
        self.api: Any = SimpleNamespace(subjects=(), request=self._answer)

    async def close(self) -> None:
        pass

    async def _answer(self, subject: str, _body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        stream = _stream()
        if subject.startswith("CONSUMER."):
            return {"config": {}, "ack_floor": {"stream_seq": stream.floor}, "created": stream.created}
        assert subject == f"STREAM.INFO.{STREAM}"
        (first, begin), *_, (last, end) = stream.messages
        times = {"first_ts": format_time(moment_of(begin)), "last_ts": format_time(moment_of(end))}
        state = {"first_seq": first, "last_seq": last, "messages": len(stream.messages), "bytes": 1, **times}
        return {"created": stream.created, "config": {"name": STREAM}, "state": state}


class _Reader:
    def __init__(self, _session: ReadSession, part: StreamRange) -> None:
        self._part = part

    async def messages(self) -> AsyncIterator[tuple[str, Received]]:
        messages = [
            {
                "subject": "orders",
                "seq": seq,
                "time": format_time(moment_of(time)),
                "data": base64.b64encode(b"%d" % seq).decode(),
            }
            for seq, time in _stream().messages
            if self._part.first <= seq < self._part.end
        ]
        if messages:
            yield NOBODY, received_of(STREAM, messages)


def _stream() -> Stream:
    stream: Stream = ask(Operation("stream")).value
    return stream


PATCHES: tuple[tuple[object, str, Any], ...] = (
    (threads, "DaemonThread", _Thread),
    *((module, "ReadSession", _Session) for module in (proof, repairing)),
    *((module, "RangeReader", _Reader) for module in (scope, repairing)),
)
