"""Send acknowledgements in bulk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from enum import Enum, auto

import nats.errors
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.jetstream.permissions import DeniedError
from jetcapture_py.jetstream.wire.client import Connection
from jetcapture_py.jetstream.wire.inbox import contents
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.source")

CONFIRM_TIMEOUT = 5.0


class AckResult(Enum):
    """Result of acknowledging."""

    CONFIRMED = auto()
    UNCONFIRMED = auto()
    """The server did not answer in time."""
    UNREACHABLE = auto()
    """The connection broke, or the consumer has no leader at the moment."""
    REFUSED = auto()
    """The server will never accept them."""


async def acknowledge(connection: Connection, replies: pa.BinaryArray, reconnects: Callable[[], int]) -> AckResult:
    """Acknowledge messages by their ack subjects; the server confirms the last one.

    Acks on one connection are processed in order, so its confirmation covers all. `reconnects` is the connection's
    count of reconnects, to detect a change of connection.
    """
    before = reconnects()
    await publish(connection, replies[:-1], b"+ACK")
    try:
        await connection.ask(replies[-1].as_py().decode(), b"+ACK", CONFIRM_TIMEOUT)
    except DeniedError:
        return AckResult.REFUSED
    except (nats.errors.Error, OSError, TimeoutError) as error:
        event(log, logging.WARNING, "ack.unconfirmed", messages=len(replies), error=error)
        if isinstance(error, nats.errors.NoRespondersError) or not connection.is_connected or reconnects() != before:
            return AckResult.UNREACHABLE
        return AckResult.UNCONFIRMED
    return AckResult.CONFIRMED if reconnects() == before else AckResult.UNREACHABLE


async def publish(connection: Connection, replies: pa.BinaryArray, body: bytes) -> None:
    """Publish a four-byte body to every ack subject; do nothing without a connection."""
    if len(replies) and connection.is_connected:
        commands = pc.binary_join_element_wise(b"PUB ", replies, b" 4\r\n" + body + b"\r\n", b"")
        with contextlib.suppress(OSError):
            await connection.write(contents(commands))
