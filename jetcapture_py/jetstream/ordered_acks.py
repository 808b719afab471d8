"""Acknowledge everything up to a message, at a consumer that delivers to one replica at a time (ADR-42).

`OrderedAcks` makes the decisions; this module carries them out. The server pins the consumer to one of the pulling
replicas, until that one has not pulled for `priority_timeout` or unpins itself. The others wait, each with one pull for
one message, whose arrival tells the replica that it is now pinned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import numpy as np
import pyarrow as pa

from jetcapture_py.config.shares import ORDERED_SHARE
from jetcapture_py.errors import ApiError, DeniedError, DrainError, MissingStreamError, SourceError, UnavailableError
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
from jetcapture_py.jetstream.ordered import OrderedAcks, Phase, Position
from jetcapture_py.jetstream.ordered_consumer import GROUP, TAKEOVER_S, too_old, unsuitable
from jetcapture_py.jetstream.pulls import SLOTS, PullTerms
from jetcapture_py.jetstream.shared import Acks, Counts, Role
from jetcapture_py.jetstream.source import PullSource
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.source")

RENEWALS = 4
"""Pulls per `takeover`."""
HAND_OVER_S = 0.4
"""Maximum seconds for a stopping replica to store and acknowledge before another takes over."""
STILL_S = 1.0
"""Seconds without a message after which none should be in flight."""
LOOK_EVERY_S = 0.1
"""Seconds between checks for a lost connection or missing deliveries."""
RETRY_EVERY_S = 0.5
"""Seconds between attempts to RESET or to acknowledge."""
_PIN = b"Nats-Pin-Id: "
_SLOTS = {Phase.STANDBY: 1, Phase.INTERRUPTED: 0}


class Ordered(Acks):
    """Receives messages while the consumer is pinned to this replica."""

    def __init__(self, source: PullSource, counts: Counts) -> None:
        super().__init__(source, counts)
        self.ordered = OrderedAcks()
        self._connection = 0
        """The number of the run's connection."""
        self._reset_at = 0.0
        self._last_reply = b""
        self._marks: deque[tuple[int, float]] = deque()
        """Sequences, and the time by which all messages up to them were in blocks."""
        self._refused: asyncio.Queue[str] = asyncio.Queue()
        """Pin ids of pulls whose deliveries now go to another replica."""
        self._acking = asyncio.Lock()
        self._changed, self._moved = asyncio.Event(), asyncio.Event()
        self._unpinning: asyncio.Task[None] | None = None
        self._standby_since: float | None = None
        self._follow()

    async def open(self) -> None:
        """Connect and find or create the consumer, unless server or stream cannot be used. Raises SourceError."""
        pa.array(np.empty(0))  # imports pandas if installed: 0.2 s of CPU, which could cost the turn
        link = self.source.link
        await link.open()
        problem = too_old(link.client.server_version, imported=link.api.imported)
        if problem := problem or await self._unusable_stream():
            await link.close()
            raise SourceError(problem)
        await self.source.attach()

    async def _unusable_stream(self) -> str | None:
        """Return why the stream cannot be used; None if it can, or if it is missing, which is reported elsewhere."""
        api, subject = self.source.link.api, f"STREAM.INFO.{self.source.config.source.stream}"
        try:
            return unsuitable((await api.request(subject))["config"])
        except MissingStreamError:
            return None
        except SourceError:
            needed = f"{api.prefix}.{subject}"
            return f"source.mode ordered needs an answer from {needed}, and permission to publish it"

    @property
    def _name(self) -> str:
        source = self.source.config.source
        return f"{source.stream}.{source.consumer}"

    @property
    def role(self) -> Role:
        """Active while the consumer is pinned to this replica."""
        return "active" if self.ordered.active else "standby"

    @property
    def takeover(self) -> float:
        """Seconds without a pull after which the server unpins a replica."""
        return self.source.state.takeover or TAKEOVER_S

    @property
    def unacked_limit(self) -> int:
        """No limit: `seal_before` says which blocks to seal."""
        return 1 << 62

    # ------------------------------------------------------------------ receiving

    def admit(self, received: Received) -> Received:
        """Return the messages to capture."""
        if self.source.ended:
            return Received()  # messages that are not in blocks are redelivered to the next replica
        self._notice()
        names = self.source.config.source
        tokens = (COUNT, SEQ, TIME, DELIVERY)
        parsed, indexes = ack_numbers(received.replies, names.stream, names.consumer, tokens)
        _, seqs, times, numbers = parsed
        mask = np.ones(len(received), bool)
        if indexes is not None:
            mask[indexes] = False  # the others are strays, which are counted later
        present = received if indexes is None else received.where(~mask)
        if not present:
            return received
        received.numbers = parsed[:3] if indexes is None else None
        self._last_reply = present.last_reply()
        accepted = self.ordered.received(numbers, seqs, times, _pin_of(present.last_headers()))
        mask[indexes if indexes is not None else slice(None)] = accepted
        self._follow()
        return received if mask.all() else received.where(mask)

    def seal_before(self, *, all_in_blocks: bool) -> float | None:
        """Return the time up to which opened blocks hold back the acks of too many later messages; None for none."""
        if all_in_blocks and (last := self.ordered.last_seq) > (self._marks[-1][0] if self._marks else 0):
            self._marks.append((last, time.monotonic()))
        seq = self.ordered.arrived_before(self.source.state.max_ack_pending // ORDERED_SHARE)
        if seq is None:
            return None
        while self._marks and self._marks[0][0] < seq:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else None

    def _follow(self) -> None:
        """Pull as the phase demands."""
        phase, pulls = self.ordered.phase, self.source.pulls
        active = self.active
        terms = PullTerms(
            slots=_SLOTS.get(phase, SLOTS),
            one=not active,
            exclusive=active,
            group=GROUP,
            id=self.ordered.pin,
            refused=self._refused,
        )
        if terms != pulls.terms:
            pulls.terms = terms
            self._changed.set()
            pulls.wake()

    def _notice(self) -> None:
        """End the run if the connection, and so messages in flight, were lost; fail if the stream has become
        unusable."""
        source = self.source
        if source.reconnects != self._connection:
            self._connection = source.reconnects
            self.ordered.interrupt("reconnected")
            self._follow()
        config = source.consumer.stream_config
        if config and (problem := unsuitable(config)):
            source.link.fail(SourceError(problem))

    # ------------------------------------------------------------------ being pinned

    async def run(self) -> None:
        """Stay pinned, begin each run with a RESET, and retry acks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_pinned())
            tasks.create_task(self._hear_of_others())
            tasks.create_task(self._watch_abandoned())
            tasks.create_task(self._acknowledge_late())
            while True:
                self._changed.clear()
                self._notice()
                self._notice_losses()
                if self.ordered.phase is Phase.INTERRUPTED:
                    await self._reset(self.ordered.reason)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._changed.wait()

    async def _stay_pinned(self) -> None:
        """Pull often enough; only pulls keep the consumer pinned."""
        while True:
            await self.source.pulls.keep_up(self.takeover / RENEWALS)
            await asyncio.sleep(self.takeover / RENEWALS / 2)

    async def _hear_of_others(self) -> None:
        while True:
            self.ordered.unpinned(await self._refused.get())
            self._follow()

    async def _watch_abandoned(self) -> None:
        """RESET if nobody has been pinned for `takeover` while messages are unacknowledged."""
        since: float | None = None
        while True:
            await asyncio.sleep(self.takeover / 2)
            source = self.source
            waiting = not self.active and source.connected and not source.pulls.stopped
            answered = waiting and await source.refresh()
            if not answered or not self.ordered.abandoned(source.state.pinned, source.state.unacked):
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since >= self.takeover:
                since = None
                await self._reset("nobody is pinned")

    def _notice_losses(self) -> None:
        """End the run if the consumer's last state shows deliveries that have not arrived and are not in flight."""
        source = self.source
        asked = source.looked.asked
        still = source.pulls.last_data < asked - STILL_S and not source.waiting
        # once pulls are stopped, messages in flight are dropped
        if still and asked > self._reset_at and not source.pulls.stopped:
            self.ordered.idle(self.ordered.mark(), source.state.deliveries)
            self._follow()

    async def _reset(self, reason: str) -> None:
        """Have everything above the ack floor redelivered."""
        source, run = self.source, self.ordered.run
        subject = f"CONSUMER.RESET.{self._name}"
        if not source.connected or source.pulls.stopped:
            return
        try:
            answer = await source.link.api.request(subject)
        except (ApiError, UnavailableError) as error:
            if isinstance(error, DeniedError):
                source.link.fail(error)
            level = logging.WARNING if isinstance(error, ApiError) else logging.DEBUG
            event(log, level, "consumer.unavailable", error=error)
            await asyncio.sleep(RETRY_EVERY_S)
            return
        self._reset_at = time.monotonic()
        self.ordered.reset(run, int(answer["reset_seq"]), (answer.get("cluster") or {}).get("leader", ""))
        self._marks.clear()  # dropped messages are redelivered later
        self._follow()
        event(log, logging.INFO, "consumer.reset", reason=reason, seq=answer["reset_seq"])

    def released(self) -> bool:
        """Whether this replica has been on standby long enough for the other one to have its messages."""
        now = time.monotonic()
        if self.active or self.source.ended:
            self._standby_since = None
        elif self._standby_since is None:
            self._standby_since = now
        return self._standby_since is not None and now - self._standby_since > 2 * self.takeover

    def forget(self) -> None:
        """Record that open blocks were dropped, so that their messages are captured if they are redelivered here."""
        self.ordered.forget()

    # ------------------------------------------------------------------ acknowledging

    async def ack(self, replies: pa.BinaryArray) -> None:
        """Record stored messages, `packed`, and acknowledge up to the first one that is not stored."""
        self.ordered.stored(*unpacked(replies))
        await self._acknowledge()

    async def _acknowledge_late(self) -> None:
        while True:
            await self._acknowledge()
            await asyncio.sleep(RETRY_EVERY_S)

    async def _acknowledge(self) -> None:
        source = self.source
        async with self._acking:
            while True:
                self._notice()
                mark = self.ordered.mark()
                if not self.ordered.has_news or not await source.refresh():
                    return  # the next block's ack covers it
                self._notice()
                floor = Position(source.state.acknowledged, source.state.ack_floor)
                ack = self.ordered.next_ack(mark, floor, source.state.leader)
                if ack is None:
                    self._follow()
                    return
                numbers = (ack.before, ack.position.delivery)
                both = [subjects_like(self._last_reply, [ack.position.seq], number) for number in numbers]
                result = await acks.acknowledge(source.link.client, pa.concat_arrays(both), lambda: source.reconnects)
                if result is not AckResult.CONFIRMED:
                    self.ordered.unconfirmed(ack)
                    self._follow()
                    return
                self.counts.acked += self.ordered.acked(ack)
                self._moved.set()
                while self._marks and self._marks[0][0] <= ack.position.seq:
                    self._marks.popleft()

    async def keep_alive(self, replies: pa.BinaryArray) -> None:
        """Do nothing: the consumer waits for an ack for a day."""

    async def check_drained(self) -> None:
        """Retry the acks of stored messages, except those that another replica has taken over."""
        source = self.source
        if source.failure is not None:
            return
        await self._acknowledge()
        if self.ordered.unacknowledged:
            await source.refresh()
            if self.active and source.state.pinned in ("", self.ordered.pin):
                reason = "the server did not confirm the acknowledgements; messages are delivered again"
                raise DrainError(f"drain: {reason}")

    # ------------------------------------------------------------------ handing over

    async def stop(self) -> None:
        """Stop receiving at once. Messages that are not in blocks are redelivered to the next replica."""
        if self._unpinning is None and not self.source.pulls.stopped:
            self._unpinning = asyncio.create_task(self._hand_over())
        await self.source.stop(wait=False)

    async def _hand_over(self) -> None:
        """Unpin once everything is acknowledged: another replica would store unacknowledged messages again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while self.ordered.unacknowledged:
                    self._moved.clear()
                    await self._moved.wait()
        await self._unpin()

    async def _unpin(self) -> None:
        """Let another replica take over at once."""
        source = self.source
        if self.active and source.connected:
            with contextlib.suppress(SourceError):  # it does so after `takeover`
                await source.link.api.request(f"CONSUMER.UNPIN.{self._name}", {"group": GROUP})

    async def close(self, replies: pa.BinaryArray) -> None:  # noqa: ARG002  the next run redelivers them
        """Hand over if not done yet, and close the connection."""
        if self._unpinning is None or not self._unpinning.done():
            if self._unpinning is not None:
                self._unpinning.cancel()
            await self._unpin()
        await self.source.link.close()


def _pin_of(headers: bytes) -> str:
    """Return the last pin id in a message's headers, which the server adds; "" without one."""
    _, separator, rest = headers.rpartition(_PIN)
    return rest.partition(b"\r\n")[0].decode("ascii", "replace") if separator else ""
