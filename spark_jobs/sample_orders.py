"""The orders of the demonstration."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

CURRENCIES = {"eu": "EUR", "us": "USD", "apac": "JPY", "latam": "BRL"}
EVERY = 1000
"""One order in so many cannot be decoded."""
COLUMNS = {
    "order_id": "string",
    "region": "string",
    "customer": "string",
    "amount": "double",
    "currency": "string",
    "created_at": "timestamp",
    "items": "list<struct<sku: string, quantity: int64>>",
}


def orders(count: int) -> Iterator[tuple[str, bytes]]:
    """Subjects and payloads of `count` orders, always the same; one in `EVERY` cannot be decoded."""
    dice = random.Random(7)  # noqa: S311  # sample data, not secrets
    encode = msgspec.json.encode
    regions = dice.choices(list(CURRENCIES), weights=(4, 3, 2, 1), k=count)
    start = datetime.now(UTC) - timedelta(hours=6)
    for number, region in enumerate(regions):
        order = {
            "order_id": f"o-{number:08}",
            "region": region,
            "customer": f"c-{int(dice.expovariate(1 / 4000)):05}",
            "amount": round(5 + dice.expovariate(1 / 80), 2),
            "currency": CURRENCIES[region],
            "created_at": start + timedelta(milliseconds=100 * number),
            "items": [{"sku": f"sku-{int(dice.random() * 500):03}", "quantity": 1 + number % 3}] * (1 + number % 4),
        }
        if number % EVERY == EVERY // 2:
            yield f"orders.{region}", _broken(order, number // EVERY % 3)
        else:
            yield f"orders.{region}", encode(order)


def _broken(order: dict[str, Any], kind: int) -> bytes:
    if kind == 0:
        return msgspec.json.encode(order)[:-20]
    if kind == 1:
        return msgspec.json.encode({**order, "amount": "a lot"})
    return b"\x00\x01\xfe\xff" + str(order["order_id"]).encode()
