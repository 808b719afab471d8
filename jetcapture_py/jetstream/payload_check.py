"""Keep messages whose payload was not delivered out of the archive.

If a consumer is switched to `headers_only` under a running capture, it starts to deliver headers alone. Such a delivery
looks like an empty message that was published with a `Nats-Msg-Size` header, and the setting may be off again by the
time it is checked. So such a message is NAKed once. If it comes again without a payload, it is read from the stream to
compare; without permission for that, it is accepted as empty.
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
"""Maximum concurrent requests for messages."""


class PayloadCheck:
    """Decides which messages without a payload to accept, and remembers which it has NAKed.

    `look_up` gets the consumer's state: its ack floor if `headers_only` is off, None if it cannot be used any more.
    `nak` NAKs messages by their ack subjects. `is_empty` asks the stream whether the message with a sequence has
    no payload; None if unknown. With `limited`, the consumer has `max_deliver`: a NAKed message might never come again,
    so `look_up` alone decides.
    """

    def __init__(
        self,
        stream: str,
        consumer: str,
        look_up: Callable[[], Awaitable[int | None]],
        nak: Callable[[pa.BinaryArray], Awaitable[None]],
        is_empty: Callable[[int], Awaitable[bool | None]],
        *,
        limited: bool = False,
    ) -> None:
        self._stream, self._consumer = stream, consumer
        self._look_up, self._nak, self._is_empty, self._limited = look_up, nak, is_empty, limited
        self._given_back = np.empty(0, np.int64)
        self._log_limit = LogLimit()

    async def only_whole(self, received: Received) -> Received:
        """Return the messages to accept; NAK the others."""
        lacking = received.lacking_payload()
        if lacking is None:
            return received
        ack_floor = await self._look_up()  # only now: an earlier answer would not cover these messages
        replies = received.where(lacking).replies
        if ack_floor is None:
            await self._nak(replies)
            return received.where(~lacking)
        if self._limited:
            return received
        seqs = sequences(self._stream, self._consumer, replies)
        empty = await self._really_empty(seqs, ack_floor)
        accepted: Any = ~lacking
        accepted[np.flatnonzero(lacking)[empty]] = True
        rejected = replies.filter(pa.array(~empty))
        if messages := self._log_limit.due(asyncio.get_running_loop().time(), len(rejected)):
            event(log, logging.WARNING, "messages.without_payload", given_back=messages)
        await self._nak(rejected)
        return received.where(accepted)

    async def _really_empty(self, seqs: Any, ack_floor: int) -> Any:
        """Return a mask of the messages that are empty in the stream; remember the others as NAKed.

        Sequences below 0 are not of this consumer; later stages reject them.
        """
        empty = np.isin(seqs, self._given_back) | (seqs < 0)
        again = np.flatnonzero(empty & (seqs >= 0)).tolist()
        for chunk in (again[start : start + AT_ONCE] for start in range(0, len(again), AT_ONCE)):
            answers = await asyncio.gather(*(self._is_empty(int(seqs[index])) for index in chunk))
            empty[chunk] = [answer is not False for answer in answers]
        known = self._given_back[(self._given_back > ack_floor) & ~np.isin(self._given_back, seqs)]
        self._given_back = np.unique(np.concatenate([known, seqs[~empty]]))
        return empty
