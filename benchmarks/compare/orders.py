"""The messages: orders in JSON, or in another format, stored once for each scenario."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.compare.formats import encoder
from jetcapture_py.jetstream.publish.publisher import Publisher
from tests.support.publishing import connect

ITEMS = 200
"""Different items: their texts repeat, as in a catalogue."""
ROWS = 20_000
STREAM_BYTES = 1 << 30
UNACKED = 50_000
TEXT = """
    blue cotton winter jacket with hood and two zipped pockets organic green tea loose leaf first flush stainless
    steel bottle double walled keeps drinks cold wireless keyboard compact layout quiet keys hardcover notebook
    dotted paper running shoe light sole reflective laces ceramic bowl hand glazed set of four garden hose
"""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Messages of about `size` bytes, evenly over `keys` regions, received by `replicas` processes together.

    `unacked` is the consumer's max_ack_pending, `format` that of the orders. Meanwhile, each of `busy` other processes
    occupies a core. `bundles` is the setting of jetcapture.
    """

    size: int = 250
    keys: int = 4
    messages: int = 1_000_000
    replicas: int = 1
    store: str = "local"
    unacked: int = UNACKED
    format: str = "json"
    busy: int = 0
    bundles: int = 0

    @property
    def stream(self) -> str:
        """The stream that holds its messages."""
        return f"ORDERS-{self.size}-{self.keys}-{self.messages}{'' if self.format == 'json' else f'-{self.format}'}"

    @property
    def subjects(self) -> str:
        """The subjects of that stream; the second token is the region."""
        return f"orders{self.size}x{self.keys}x{self.messages}{'' if self.format == 'json' else self.format}"

    def __str__(self) -> str:
        parts = [f"{self.messages:,} messages of {self.size:,} B", f"{self.keys:,} key{'s' * (self.keys > 1)}"]
        parts += [f"{self.bundles} bundles"] if self.bundles else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [self.store] if self.store != "local" else []
        parts += [f"{self.unacked:,} unacknowledged"] if self.unacked != UNACKED else []
        parts += [f"as {self.format}"] if self.format != "json" else []
        parts += [f"{self.busy} busy loop{'s' * (self.busy > 1)} beside"] if self.busy else []
        return ", ".join(parts)


def fitting(messages: int, size: int) -> int:
    """Return `messages`, or fewer if a stream of that size would exceed `STREAM_BYTES`."""
    return min(messages, STREAM_BYTES // size)


def orders(scenario: Scenario) -> Iterator[tuple[list[str], list[bytes]]]:
    """Regions and payloads, in parts; always the same ones."""
    chance = random.Random(scenario.size * 31 + scenario.keys)
    room = max(1, scenario.size - len(_order(scenario.messages, "r00000", 500.25, "")))
    words, items = TEXT.split(), []
    for _ in range(ITEMS):
        text = chance.choice(words)
        while len(text) < room:
            text += " " + chance.choice(words)
        items.append(text[: room - 1] + "e")
    for start in range(0, scenario.messages, ROWS):
        numbers = range(start + 1, min(start + ROWS, scenario.messages) + 1)
        regions = [f"r{chance.randrange(scenario.keys):05}" for _ in numbers]
        payloads = [
            _order(number, region, chance.randrange(100, 100_000) / 100, chance.choice(items)).encode()
            for number, region in zip(numbers, regions, strict=True)
        ]
        yield regions, payloads


def _order(number: int, region: str, amount: float, item: str) -> str:
    second = number // 100
    created = f"2026-01-{1 + second // 86400 % 28:02}T{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}Z"
    return f'{{"order_id":{number},"region":"{region}","amount":{amount},"created_at":"{created}","item":"{item}"}}'


async def fill(url: str, scenario: Scenario) -> None:
    """Store the messages of `scenario`."""
    client = await connect(url)
    kept = {"deny_delete": True, "deny_purge": True}  # as source.mode ordered needs it
    await client.jetstream().add_stream(name=scenario.stream, subjects=[f"{scenario.subjects}.>"], **kept)
    async with Publisher(client) as publisher:
        for regions, texts in orders(scenario):
            payloads = texts if scenario.format == "json" else list(map(encoder(scenario.format), texts))
            subjects = [f"{scenario.subjects}.{region}" for region in regions]
            await publisher.publish_batch(pa.array(subjects), pa.array(payloads))
    await client.close()
