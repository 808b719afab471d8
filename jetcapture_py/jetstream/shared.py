"""Acknowledge messages: the interface of the modes, and `source.mode: shared`, which acknowledges each message."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from typing import Literal, Protocol

import pyarrow as pa

from jetcapture_py.errors import DrainError
from jetcapture_py.jetstream import acks
from jetcapture_py.jetstream.acks import AckResult
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.retry import delays

ACK_ATTEMPTS = 5
"""Maximum unanswered attempts to acknowledge at a reachable consumer, each of `acks.CONFIRM_TIMEOUT_S`.

A drain waits for them, at most `drain_timeout`.
"""
FIRST_ACK_RETRY_S, MAX_ACK_RETRY_S = 0.2, 2.0


Role = Literal["shared", "active", "standby"]


class Counts(Protocol):
    """Acknowledgements since the start."""

    acked: int
    """Messages whose ack the server has confirmed."""
    unconfirmed_acks: int
    """Attempts that the server has not confirmed."""


class Acks(ABC):
    """Opens and closes `source`, says which of its messages to capture, and acknowledges them once they are stored.

    Methods with a default matter only if one replica receives while the others wait.
    """

    def __init__(self, source: PullSource, counts: Counts) -> None:
        self.source, self.counts = source, counts

    @property
    def role(self) -> Role:
        """This replica's role."""
        return "shared"

    @property
    def active(self) -> bool:
        """Whether messages are delivered to this replica."""
        return self.role != "standby"

    @property
    @abstractmethod
    def unacked_limit(self) -> int:
        """Maximum messages that this replica may hold."""

    async def open(self) -> None:
        """Connect, and find or create the consumer. Raises SourceError."""
        await self.source.open()

    def admit(self, received: Received) -> Received:
        """Return the messages to capture."""
        return received

    async def run(self) -> None:  # noqa: B027
        """Run the background work of the mode, until canceled."""

    @abstractmethod
    async def ack(self, replies: pa.BinaryArray) -> None:
        """Acknowledge stored messages as soon as allowed."""

    @abstractmethod
    async def keep_alive(self, replies: pa.BinaryArray) -> None:
        """Keep held messages from being redelivered."""

    def seal_before(self, *, all_in_blocks: bool) -> float | None:  # noqa: ARG002
        """Return the time up to which opened blocks must be sealed, because acks wait for them; None for none.

        `all_in_blocks`: every admitted message is in a block.
        """
        return None

    def released(self) -> bool:
        """Whether another replica has taken over for good, so that held messages can be dropped."""
        return False

    def forget(self) -> None:  # noqa: B027
        """Record that open blocks were dropped, so that their messages are captured if they are redelivered here."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop receiving; a second call does not wait."""

    @abstractmethod
    async def check_drained(self) -> None:
        """Raise DrainError if messages that were delivered here may be unacknowledged at the server."""

    @abstractmethod
    async def close(self, replies: pa.BinaryArray) -> None:
        """Hand back messages that were not acknowledged, and close the connection."""


class Shared(Acks):
    """All replicas receive; the server waits for an ack of each message, and redelivers it after `ack_wait`."""

    def __init__(self, source: PullSource, counts: Counts) -> None:
        super().__init__(source, counts)
        self._all_arrived = True  # whether no message was in flight when receiving ended
        self.unconfirmed_at = -math.inf

    @property
    def unacked_limit(self) -> int:
        """The consumer's limit minus what other replicas hold."""
        return max(1, self.source.state.max_ack_pending - self.source.looked.unacked)

    async def ack(self, replies: pa.BinaryArray) -> None:
        """Acknowledge stored messages until the server confirms it, or retrying is pointless."""
        unanswered = 0
        for delay in delays(FIRST_ACK_RETRY_S, MAX_ACK_RETRY_S):
            result = await self._ack(replies)
            if result is AckResult.CONFIRMED:
                self.counts.acked += len(replies)
                return
            self.counts.unconfirmed_acks += 1
            unanswered += result is AckResult.UNCONFIRMED
            if result is AckResult.REFUSED or unanswered == ACK_ATTEMPTS:
                break
            await asyncio.sleep(delay)
        self.unconfirmed_at = time.monotonic()

    async def _ack(self, replies: pa.BinaryArray) -> AckResult:
        """Acknowledge in bulk; the server confirms the last one.

        First wait until the consumer responds, because otherwise nobody would receive the acks. Check that it is the
        same consumer: in a recreated stream, the same sequences are different messages.
        """
        source = self.source
        if not source.is_fresh() and not await source.look_again():
            return AckResult.REFUSED
        result = await acks.acknowledge(source.link.client, replies, lambda: source.reconnects)
        if result is not AckResult.CONFIRMED:
            source.doubt()
        return result

    async def keep_alive(self, replies: pa.BinaryArray) -> None:
        """Reset the messages' ack wait (+WPI)."""
        await acks.publish(self.source.link.client, replies, b"+WPI")

    async def stop(self) -> None:
        """Stop receiving once open pulls have ended."""
        self._all_arrived = await self.source.stop()

    async def check_drained(self) -> None:
        """Ask the server, unless everything has arrived and unconfirmed messages were redelivered."""
        source, since = self.source, time.monotonic() - self.unconfirmed_at
        if source.failure is not None or (self._all_arrived and since >= source.state.ack_wait):
            return
        if not (source.connected and await source.refresh() and source.state.unacked == 0):
            unconfirmed = "the server did not confirm the acknowledgements"
            reason = unconfirmed if self._all_arrived else "the connection to NATS was lost"
            raise DrainError(f"drain: {reason}; unconfirmed messages are redelivered after ack_wait")

    async def close(self, replies: pa.BinaryArray) -> None:
        """Have messages redelivered immediately (-NAK)."""
        await acks.publish(self.source.link.client, replies, b"-NAK")
        await self.source.link.close()
