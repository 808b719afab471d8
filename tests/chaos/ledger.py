"""What the server acknowledged: what an archive is held against. Digests, not payloads: 17 bytes a message."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
import numpy as np
import numpy.typing as npt
from nats.aio.client import Client
from nats.aio.msg import Msg

REGIONS = 4
SUBJECTS = tuple(f"orders.{number}" for number in range(7))
COLUMNS = {"id": "int64", "region": "string"}
ID = "Nats-Msg-Id"

_BATCH = 100
_ACK_TIMEOUT = 2.0
_UNDECODABLE, _WITH_HEADERS, _LARGE, _HUGE = 0.02, 0.1, 0.002, 0.0002
LARGE = 120_000
"""Bytes of a large message at most; `Publisher` may be asked for larger ones, which are fewer."""


def digest(subject: bytes, identifier: bytes, payload: bytes) -> int:
    """64 bits that stand for the whole message."""
    found = hashlib.blake2b(b"%b\0%b\0%b" % (subject, identifier, payload), digest_size=8).digest()
    return int.from_bytes(found, "little")


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Messages that a purge or a deletion removed from the stream."""

    era: int
    """Of which stream: 0, and one more each time it was created again."""
    seqs: range | set[int]
    """A range for a purge."""
    at: float
    """When it was requested, in seconds since the epoch."""


class Ledger:
    """Acknowledged messages: stream sequence, digest, and whether the archive must have it or only may.

    It *may* where the stream lost the message, by a purge or with the whole stream, before a daemon acknowledged it.
    """

    def __init__(self) -> None:
        self.removals: list[Removal] = []
        self.recreations = 0
        self._seqs = array("q")
        self._digests = array("Q")
        self._excused = bytearray()
        self.era = 0  # index of the first entry of the stream that is there now

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, seq: int, content: int) -> None:
        """The server has acknowledged a message."""
        self._seqs.append(seq)
        self._digests.append(content)
        self._excused.append(0)

    def excuse(self, gone: range | set[int]) -> int:
        """Of the present stream these sequences are gone, and no daemon had acknowledged them; how many they are."""
        count = 0
        for index in range(self.era, len(self)):
            if self._seqs[index] in gone and not self._excused[index]:
                self._excused[index] = 1
                count += 1
        return count

    def removing(self, seqs: range | set[int]) -> None:
        """Record that these sequences of the present stream are about to be removed."""
        self.removals.append(Removal(era=self.recreations, seqs=seqs, at=time.time()))

    def new_era(self) -> None:
        """The stream was created again: its sequences start again."""
        self.era = len(self)
        self.recreations += 1

    def sample(self, draw: random.Random, count: int) -> list[int]:
        """Some sequences of the present stream."""
        return [self._seqs[draw.randrange(self.era, len(self))] for _ in range(min(count, len(self) - self.era))]

    @property
    def seqs(self) -> npt.NDArray[np.int64]:
        """Sequences, in the order of the acknowledgements."""
        return np.array(self._seqs, np.int64)

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """Digests, in the same order."""
        return np.array(self._digests, np.uint64)

    @property
    def excused(self) -> npt.NDArray[np.bool_]:
        """Which the archive need not have."""
        return np.frombuffer(bytes(self._excused), np.uint8).astype(np.bool_)


Draft = tuple[str, bytes, dict[str, str]]


class Publisher:
    """Publishes at a rate, and again until the server says it is stored; ids keep that from storing anything twice."""

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        draw: random.Random,
        *,
        rate: float,
        limit: int | None,
        largest: int = LARGE,
    ) -> None:
        self.rate, self.limit, self.largest = rate, limit, largest
        self.published = 0
        self.repeated = 0
        self._client, self._ledger, self._draw = client, ledger, draw
        self._number = 0
        self._acks: dict[str, int] = {}
        self._answered = asyncio.Event()
        self._busy = asyncio.Lock()
        self._stopped = False

    async def run(self) -> None:
        """Publish until stopped or at the limit. What was begun is finished, however long the server is away."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(f"{inbox}.*", cb=self._on_ack)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._stopped and (self.limit is None or self.published < self.limit):
            count = _BATCH if self.limit is None else min(_BATCH, self.limit - self.published)
            async with self._busy:
                await self._publish(inbox, [self._message() for _ in range(count)])
            due = max(due + count / self.rate, loop.time() - 1)  # after an outage it catches up a second's worth
            await asyncio.sleep(max(0.0, due - loop.time()))
        await subscription.unsubscribe()

    def stop(self) -> None:
        """Begin nothing new."""
        self._stopped = True

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Within the block nothing is published, and everything so far is acknowledged."""
        async with self._busy:
            yield

    async def _publish(self, inbox: str, messages: list[Draft]) -> None:
        self._acks.clear()
        waiting = {headers[ID]: (subject, payload, headers) for subject, payload, headers in messages}
        while waiting:
            self._answered.clear()
            with suppress(nats.errors.Error, OSError):
                for identifier, (subject, payload, headers) in waiting.items():
                    await self._client.publish(subject, payload, reply=f"{inbox}.{identifier}", headers=headers)
            with suppress(TimeoutError):
                async with asyncio.timeout(_ACK_TIMEOUT):
                    while waiting.keys() - self._acks.keys():
                        self._answered.clear()
                        await self._answered.wait()
            for identifier in waiting.keys() & self._acks.keys():
                subject, payload, _ = waiting.pop(identifier)
                self._ledger.add(self._acks[identifier], digest(subject.encode(), identifier.encode(), payload))
                self.published += 1
            self.repeated += len(waiting)

    async def _on_ack(self, message: Msg) -> None:
        if not message.data:  # nobody is responsible for the stream just now
            return
        answer = json.loads(message.data)
        if "error" not in answer:
            self._acks[message.subject.rpartition(".")[2]] = int(answer["seq"])
            self._answered.set()

    def _message(self) -> Draft:
        self._number += 1
        draw, number = self._draw, self._number
        chance = draw.random()
        if chance < _HUGE and self.largest > LARGE:
            size = draw.randrange(LARGE, self.largest)
        else:
            size = draw.randrange(LARGE) if chance < _LARGE else draw.randrange(20, 300)
        text = draw.randbytes(size // 2).hex()
        payload = f'{{"id":{number},"region":"r{draw.randrange(REGIONS)}","text":"{text}"}}'.encode()
        if draw.random() < _UNDECODABLE:
            payload = payload[:-1]
        headers = {ID: str(number)}
        if draw.random() < _WITH_HEADERS:
            headers["X-Note"] = text[:40]
        return draw.choice(SUBJECTS), payload, headers
