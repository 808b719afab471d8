"""What a capture acknowledges, and when: the seam of the modes, and `source.mode: shared`, each message by itself."""

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
"""Attempts to acknowledge that a reachable consumer may leave unanswered, each for `acks.CONFIRM_TIMEOUT_S`.

A drain waits for them, at most `drain_timeout`.
"""
FIRST_ACK_RETRY_S, MAX_ACK_RETRY_S = 0.2, 2.0


Role = Literal["shared", "active", "standby"]


class Counts(Protocol):
    """What was acknowledged since the start."""

    acked: int
    """Messages that the server has confirmed."""
    unconfirmed_acks: int
    """Attempts that it has not."""


class Acks(ABC):
    """Opens and closes `source`, says which of its messages to capture, and acknowledges them once they are stored.

    What has a default here is only of use where one replica receives, and others wait until it is their turn.
    """

    def __init__(self, source: PullSource, counts: Counts) -> None:
        self.source, self.counts = source, counts

    @property
    def role(self) -> Role:
        """What this replica is among those of the consumer."""
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
        """Return those of the messages that are to be captured."""
        return received

    async def run(self) -> None:  # noqa: B027
        """Do what has to be done beside the pulls, until canceled."""

    @abstractmethod
    async def ack(self, replies: pa.BinaryArray) -> None:
        """Acknowledge stored messages, as soon as that is allowed."""

    @abstractmethod
    async def keep_alive(self, replies: pa.BinaryArray) -> None:
        """Prevent that messages which are held are redelivered."""

    def seal_before(self, *, all_in_blocks: bool) -> float | None:  # noqa: ARG002
        """Return until when opened blocks have to be sealed, because acknowledging waits for them; None for no need.

        `all_in_blocks` says that no admitted message is still on its way to one.
        """
        return None

    def released(self) -> bool:
        """Whether another replica has taken over for good, so that what is held here can be dropped."""
        return False

    def forget(self) -> None:  # noqa: B027
        """Record that open blocks were dropped: should their messages be delivered here again, they are captured."""

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

        First waits until the consumer responds, because otherwise nobody would receive the acks, and checks that it is
        the same: in a recreated stream, the same sequences are different messages.
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
        """Stop receiving, after what open pulls still deliver."""
        self._all_arrived = await self.source.stop()

    async def check_drained(self) -> None:
        """Ask the server, unless everything has arrived, and what it did not confirm was redelivered since."""
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
