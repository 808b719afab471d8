"""Receive from a consumer that is pinned to one replica, and acknowledge everything up to a message (ADR-42).

`OrderedAcks` decides what is received and acknowledged; this does it. The server pins the consumer to one of the
replicas that pull, until it has not pulled for `priority_timeout` or unpins itself. The others wait, each with one pull
for one message, which tells the replica that it is pinned now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import ORDERED_SHARE
from jetcapture_py.errors import ApiError, DeniedError, MissingStreamError, SourceError, UnavailableError
from jetcapture_py.jetstream import acks
from jetcapture_py.jetstream.acks import (
    COUNT,
    DELIVERY,
    SEQ,
    TIME,
    AckResult,
    ack_numbers,
    subjects_like,
    unpacked,
)
from jetcapture_py.jetstream.consumer import GROUP, TAKEOVER
from jetcapture_py.jetstream.ordered import OrderedAcks, Phase, Position
from jetcapture_py.jetstream.pulls import PAUSE
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.ledger import Ledger
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.source")

MIN_VERSION, MIN_IMPORTED = (2, 14), (2, 14, 4)
"""The answer to CONSUMER.RESET does not pass from one account to another before."""
RENEWALS = 4
"""Pulls in each `takeover`."""
HAND_OVER = 0.4
"""Maximum seconds in which a stopping replica stores and acknowledges before another takes over."""
STILL = 1.0
"""Seconds without a message after which none should be on its way."""
_PIN = b"Nats-Pin-Id: "


class OrderedSource(PullSource):
    """The consumer's messages, while it is pinned to this replica."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        super().__init__(config, ledger)
        self.ordered = self.pulls.ordered = OrderedAcks()
        self._last_reply = b""
        self._marks: deque[tuple[int, float]] = deque()
        self._acking, self._moved = asyncio.Lock(), asyncio.Event()
        self._unpinning: asyncio.Task[None] | None = None
        self._standby_since: float | None = None
        self._abandoned_since: float | None = None
        self._looked = 0.0

    async def _attach(self) -> None:
        if problem := too_old(self._client.server_version, imported=self._api.imported):
            raise SourceError(problem)
        if (problem := await self._unusable_stream()) is not None:
            raise SourceError(problem)
        await super()._attach()

    async def _unusable_stream(self) -> str | None:
        """Return why the stream cannot be used; None if it can, or if it is missing, which others report."""
        subject = f"STREAM.INFO.{self.stream}"
        try:
            return unsuitable((await self._api.request(subject))["config"])
        except MissingStreamError:
            return None
        except SourceError:
            needed = f"{self._api.prefix}.{subject}"
            return f"source.mode ordered needs an answer from {needed}, and permission to publish it"

    @property
    def active(self) -> bool:
        """Whether the consumer is pinned to this replica."""
        return self.ordered.active

    @property
    def takeover(self) -> float:
        """Seconds without a pull after which the server unpins a replica."""
        return self.state.takeover or TAKEOVER

    @property
    def unacked_limit(self) -> int:
        """No limit: `overdue` says which blocks to seal."""
        return 1 << 62

    # ------------------------------------------------------------------ receiving

    async def receive(self) -> Received | None:
        """Return the next messages to capture; None once stopped."""
        while True:
            if (seq := self.ordered.last_seq) > (self._marks[-1][0] if self._marks else 0):
                self._marks.append((seq, self._loop.time()))  # all earlier ones are in blocks
            received = await super().receive()
            if received is None or self._ended:
                return None  # what is not in blocks comes again, to the next replica
            if kept := self._admit(received):
                return kept

    def _admit(self, received: Received) -> Received:
        """Return those of the messages that are to be captured."""
        before = self.ordered.phase
        tokens = (COUNT, SEQ, TIME, DELIVERY)
        parsed, indexes = ack_numbers(received.replies, self.stream, self.consumer, tokens)
        _, seqs, times, numbers = parsed
        mask = np.ones(len(received), bool)
        if indexes is not None:
            mask[indexes] = False  # the others are strays, which are counted later
        own = received if indexes is None else received.where(~mask)
        if not own:
            return received
        received.numbers = parsed[:3] if indexes is None else None
        self._last_reply = own.last_reply()
        accepted = self.ordered.received(numbers, seqs, times, _pin_of(own.last_headers()))
        mask[indexes if indexes is not None else slice(None)] = accepted
        if self.ordered.phase is not before:
            self._wake.set()
        return received if mask.all() else received.where(mask)

    def overdue(self) -> float | None:
        """Return the time until which blocks were opened that keep too many later messages from being acknowledged."""
        seq = self.ordered.arrived_before(self.state.max_ack_pending // ORDERED_SHARE)
        if seq is None:
            return None
        while self._marks and self._marks[0][0] < seq:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else None

    # ------------------------------------------------------------------ pulling

    async def pull(self) -> None:
        """Keep pulls open, and begin each run with a RESET, until stopped."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_pinned())
            while not self.pulls.stopped:
                self._wake.clear()
                if self.ordered.phase is Phase.INTERRUPTED and self.connected:
                    await self._reset(self.ordered.reason)
                elif await self._is_abandoned():
                    await self._reset("nobody is pinned")
                await self.pulls.renew()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE):
                        await self._wake.wait()

    async def _keep_pinned(self) -> None:
        while not self.pulls.stopped:
            await self.pulls.keep_pinned(self.takeover / RENEWALS)
            await asyncio.sleep(self.takeover / RENEWALS / 2)

    async def _reconnected(self) -> None:
        """Begin another run: messages in flight are lost."""
        self.ordered.interrupt("reconnected")
        await super()._reconnected()

    async def _is_abandoned(self) -> bool:
        """Whether, for `takeover`, nobody was pinned who would acknowledge what was delivered."""
        now = self._loop.time()
        if self.active or not self.connected or now - self._looked < self.takeover / 2:
            return False
        self._looked = now
        if not await self.refresh() or not self.ordered.abandoned(self.state.pinned, self.state.unacked):
            self._abandoned_since = None
        elif self._abandoned_since is None:
            self._abandoned_since = now
        elif now - self._abandoned_since >= self.takeover:
            self._abandoned_since = None
            return True
        return False

    async def _reset(self, reason: str) -> None:
        """Have everything above the ack floor delivered again."""
        run = self.ordered.run
        subject = f"CONSUMER.RESET.{self.stream}.{self.consumer}"
        try:
            answer = await self._api.request(subject)
        except UnavailableError as error:
            event(log, logging.DEBUG, "consumer.unavailable", error=error)
            return
        except ApiError as error:
            if isinstance(error, DeniedError):
                self.fail(error)
            event(log, logging.WARNING, "consumer.unavailable", error=error)
            await asyncio.sleep(PAUSE)
            return
        self.ordered.reset(run, int(answer["reset_seq"]), (answer.get("cluster") or {}).get("leader", ""))
        self._marks.clear()  # what was dropped comes again later
        event(log, logging.INFO, "consumer.reset", reason=reason, seq=answer["reset_seq"])

    # ------------------------------------------------------------------ the consumer

    async def refresh(self) -> bool:
        """Request the consumer's state, and notice deliveries that do not arrive."""
        still = self.idle_for() > STILL and not self.waiting
        mark = self.ordered.mark()
        if not await super().refresh():
            return False
        if self.active:
            self.other_unacked = 0
        if still and not self.waiting and not self.pulls.stopped:  # then, what is on its way is dropped on purpose
            self.ordered.idle(mark, self.state.deliveries)
            self._wake.set()
        return True

    async def stream_info(self) -> dict[str, Any] | None:
        """Return the server's answer to STREAM.INFO; fail if the stream has become one that cannot be used."""
        answer = await super().stream_info()
        if answer is not None and (problem := unsuitable(answer["config"])):
            self.fail(SourceError(problem))
        return answer

    async def ack(self, replies: pa.BinaryArray) -> AckResult:
        """Record stored messages, `packed`, and acknowledge up to the first one that is not stored."""
        self.ordered.stored(*unpacked(replies))
        async with self._acking:
            while True:
                mark = self.ordered.mark()
                if not self.ordered.has_news or not await self.refresh():
                    return AckResult.CONFIRMED  # the next block does it
                floor = Position(self.state.acknowledged, self.state.ack_floor)
                ack = self.ordered.next_ack(mark, floor, self.state.leader)
                if ack is None:
                    self._wake.set()
                    return AckResult.CONFIRMED
                numbers = (ack.before, ack.position.delivery)
                both = [subjects_like(self._last_reply, [ack.position.seq], number) for number in numbers]
                result = await acks.acknowledge(self._client, pa.concat_arrays(both), lambda: self.reconnects)
                if result is not AckResult.CONFIRMED:
                    self.ordered.unconfirmed(ack)
                    self._wake.set()
                    return result
                self.acked += self.ordered.acked(ack)
                self._moved.set()
                while self._marks and self._marks[0][0] <= ack.position.seq:
                    self._marks.popleft()

    async def settle(self) -> None:
        """Acknowledge what was stored before it could be acknowledged."""
        await self.ack(pa.array([], pa.binary()))

    async def owes_acks(self) -> bool:
        """Try once more to acknowledge what is stored; return whether something is left that no other replica has."""
        await self.settle()
        if not self.ordered.unacknowledged:
            return False
        await self.refresh()
        return self.active and self.state.pinned in ("", self.ordered.pin)

    def released(self) -> bool:
        """Whether another replica has taken over for good, so that what is held here can be dropped."""
        now = self._loop.time()
        if self.active or self._ended:
            self._standby_since = None
        elif self._standby_since is None:
            self._standby_since = now
        return self._standby_since is not None and now - self._standby_since > 2 * self.takeover

    def forget(self) -> None:
        """Record that open blocks were dropped: should their messages be delivered here again, they are captured."""
        self.ordered.forget()

    async def nak(self, replies: pa.BinaryArray) -> None:
        """Do nothing: the next run redelivers unacknowledged messages."""

    # ------------------------------------------------------------------ handing over

    async def stop(self) -> bool:
        """Stop receiving. What is not in blocks is delivered to the next replica."""
        if self._unpinning is None and not self.pulls.stopped:
            self._unpinning = asyncio.create_task(self._hand_over())
        await super().stop()
        return True

    async def _pulls_end(self) -> None:
        """Do not wait for open pulls: what they still deliver comes again."""

    async def _hand_over(self) -> None:
        """Unpin once everything is acknowledged: another replica would store again what is not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER):
                while self.ordered.unacknowledged:
                    self._moved.clear()
                    await self._moved.wait()
        await self._unpin()

    async def _unpin(self) -> None:
        """Let another replica take over at once."""
        if self.active and self.connected:
            with contextlib.suppress(SourceError):  # it does so after `takeover`
                await self._api.request(f"CONSUMER.UNPIN.{self.stream}.{self.consumer}", {"group": GROUP})

    async def close(self) -> None:
        """Hand over, if that has not been done, and close the connection."""
        if self._unpinning is None or not self._unpinning.done():
            if self._unpinning is not None:
                self._unpinning.cancel()
            await self._unpin()
        await super().close()


def too_old(version: str, *, imported: bool = False) -> str | None:
    """Return why a server of this version cannot be used, or not through an imported API; None if it can."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if number >= (MIN_IMPORTED if imported else MIN_VERSION):
        return None
    needed = "2.14.4 or newer with nats.api_prefix" if imported else "2.14 or newer"
    return f"source.mode ordered needs nats-server {needed}, this is {version}; use source.mode shared"


def unsuitable(stream: Mapping[str, Any]) -> str | None:
    """Return why a stream with this configuration of the API cannot be used; None if it can.

    When a message is removed that was delivered and is not acknowledged, the server acknowledges it by itself, and with
    `ack_policy: all` every earlier one with it, stored or not (nats-server 2.15.1).
    """
    if stream.get("retention") == "workqueue":
        return "a work queue needs an acknowledgement for each message, which is source.mode shared, not ordered"
    wanted = [name for name in ("deny_delete", "deny_purge") if not stream.get(name)]
    wanted += [
        f"no {name}" for name in ("allow_msg_ttl", "allow_rollup_hdrs", "allow_msg_schedules") if stream.get(name)
    ]
    wanted += ["no max_msgs_per_subject"] if stream.get("max_msgs_per_subject", -1) > 0 else []
    if not wanted:
        return None
    reason = "needs a stream from which messages are only removed at its beginning"
    return f"source.mode ordered {reason} ({', '.join(wanted)}); use source.mode shared"


def _pin_of(headers: bytes) -> str:
    """Return the pin id that the server has added last to a message's headers; "" without one."""
    _, found, rest = headers.rpartition(_PIN)
    return rest.partition(b"\r\n")[0].decode("ascii", "replace") if found else ""
