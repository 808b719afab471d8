"""Keeps messages without their payload out of the archive.

A consumer that is switched to `headers_only` under a running capture delivers headers alone from some message on. What
it delivered cannot be told from an empty message that was published with a `Nats-Msg-Size` header, and the setting may
be off again by the time it is looked up. So such a message is given back once. When it comes again without a payload,
the stream is asked for it; where that is not allowed, it is believed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.jetstream.ack_subject import sequences
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.log import event
from jetcapture_py.log_limit import LogLimit

log = logging.getLogger("jetcapture.source")

AT_ONCE = 64
"""Messages that the stream is asked for at the same time."""


class PayloadCheck:
    """Decides about messages that may lack their payload, and remembers which it has given back.

    `look_up` asks the server for the consumer: its ack floor if it is without `headers_only`, None if nothing more can
    come from it. `give_back` has messages delivered again, by their ack subjects. `is_empty` asks the stream whether
    the message with a sequence has no payload; None where it does not tell. With `limited` the consumer has
    `max_deliver`: a message that was given back might never come again, so the look-up alone decides.
    """

    def __init__(
        self,
        stream: str,
        consumer: str,
        look_up: Callable[[], Awaitable[int | None]],
        give_back: Callable[[pa.BinaryArray], Awaitable[None]],
        is_empty: Callable[[int], Awaitable[bool | None]],
        *,
        limited: bool = False,
    ) -> None:
        self._stream, self._consumer = stream, consumer
        self._look_up, self._give_back, self._is_empty, self._limited = look_up, give_back, is_empty, limited
        self._given_back = np.empty(0, np.int64)
        self._said = LogLimit()

    async def only_whole(self, received: Received) -> Received:
        """Those of these messages that have their payload."""
        lacking = received.lacking_payload()
        if lacking is None:
            return received
        ack_floor = await self._look_up()  # after the messages came, or it would say nothing about them
        replies = received.where(lacking).replies
        if ack_floor is None:
            await self._give_back(replies)
            return received.where(~lacking)
        if self._limited:
            return received
        seqs = sequences(self._stream, self._consumer, replies)
        believed = await self._believed(seqs, ack_floor)
        stored: Any = ~lacking
        stored[np.flatnonzero(lacking)[believed]] = True
        doubted = replies.filter(pa.array(~believed))
        if messages := self._said.due(asyncio.get_running_loop().time(), len(doubted)):
            event(log, logging.WARNING, "messages.without_payload", given_back=messages)
        await self._give_back(doubted)
        return received.where(stored)

    async def _believed(self, seqs: Any, ack_floor: int) -> Any:
        """Which of these messages have no payload in the stream, as a mask; the others are remembered from now on.

        Sequences below 0 are not the consumer's; others reject them.
        """
        believed = np.isin(seqs, self._given_back) | (seqs < 0)
        again = np.flatnonzero(believed & (seqs >= 0)).tolist()
        for chunk in (again[start : start + AT_ONCE] for start in range(0, len(again), AT_ONCE)):
            answers = await asyncio.gather(*(self._is_empty(int(seqs[index])) for index in chunk))
            believed[chunk] = [answer is not False for answer in answers]
        known = self._given_back[(self._given_back > ack_floor) & ~np.isin(self._given_back, seqs)]
        self._given_back = np.unique(np.concatenate([known, seqs[~believed]]))
        return believed
