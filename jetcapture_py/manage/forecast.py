"""Predict the length of blocks and the number of their objects from the messages' rate and keys.

A block ends by its age, by its own size, or under pressure: open blocks together hold at most a third of the messages
that may be unacknowledged, and half of the memory (`config/shares.py`), besides what the spool has room for. Under
pressure the largest blocks are sealed: blocks of busy keys end at about the same size, and those of slow keys by age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jetcapture_py.capture.side_tasks import MARK
from jetcapture_py.config.model import Config
from jetcapture_py.config.shares import BLOCK_SHARE, OPEN_SHARE, OPEN_UNACKED_SHARE, SEALED_UNACKED_SHARE
from jetcapture_py.config.values import DAY
from jetcapture_py.plugins import is_reference

PUT_PRICES = {"s3": 0.005, "gs": 0.005, "abfs": 0.0055, "az": 0.0055}
"""US dollars per 1,000 requests that write, by the scheme of `store.url`: the public list prices of Amazon S3 Standard
(us-east-1: PUT, COPY, POST, LIST), Google Cloud Storage Standard (class A operations, single region) and Azure Blob
Storage (hot, locally redundant, East US: write operations, there per 10,000). `check --put-price` replaces them."""
_FEW = 3
"""Number of blocks up to which they are sealed one at a time under pressure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Arriving messages: `rate` per second, `message_bytes` of memory each, and the share of every key or bundle."""

    rate: float
    message_bytes: float
    shares: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`block_seconds` is the mean length of a block, `configured_seconds` the configured one.

    `limit` is the setting that seals blocks early, None if they reach the configured length. Counts are per day.
    """

    block_seconds: float
    configured_seconds: float
    limit: str | None
    objects: float
    requests: float


def forecast(config: Config, traffic: Traffic, unacked_limit: int) -> Forecast:
    """Predict the blocks of one capture; `unacked_limit` is the consumer's `max_ack_pending`."""
    block, memory, spool = config.block, config.limits.memory, config.limits.spool
    configured = min(block.interval, block.max_age)
    rates = sorted((traffic.rate * share for share in traffic.shares), reverse=True)
    size = max(traffic.message_bytes, 1.0)
    own = {
        "block.max_messages": float(block.max_messages),
        "block.max_bytes": block.max_bytes / size,
    }
    if spool is None or is_reference(block.format):
        own["limits.memory"] = memory / BLOCK_SHARE / size
    resident = memory / OPEN_SHARE
    spooled = max(0.0, (spool.size - resident) / 2) if spool else 0.0  # the other half is kept for the objects
    together = {
        "source.max_ack_pending": unacked_limit / OPEN_UNACKED_SHARE,
        "limits.spool.size" if spool else "limits.memory": (resident + spooled) / size,
    }
    first = min(own, key=lambda name: own[name])
    pressing = min(together, key=lambda name: together[name])
    sizes = [min(rate * configured, own[first]) for rate in rates]
    largest = _largest_under_pressure(sizes, together[pressing], unacked_limit)
    lengths = [min(configured, min(own[first], largest) / rate) for rate in rates]
    blocks = [max(1, math.ceil(block.interval / length - 1e-6)) for length in lengths]
    per_day = DAY / block.interval
    objects = sum(min(per_day * count, DAY * rate) for count, rate in zip(blocks, rates, strict=True))
    limit = None if lengths[0] >= configured else pressing if largest < own[first] else first
    return Forecast(
        block_seconds=len(blocks) * block.interval / sum(blocks),
        configured_seconds=configured,
        limit=limit,
        objects=objects,
        requests=objects + DAY / MARK,
    )


def _largest_under_pressure(sizes: Sequence[float], budget: float, unacked_limit: int) -> float:
    """Return the rows at which blocks are sealed so that all open ones stay within the budget; inf without pressure.

    `sizes` are the rows that blocks would have otherwise, largest first. Of n busy keys, open blocks have 1/n, 2/n, …
    of the size at which they are sealed; the others are half full on average.
    """
    if sum(sizes) <= budget:
        return math.inf
    rest = sum(sizes) / 2
    for count, size in enumerate(sizes, 1):
        rest -= size / 2
        slack = unacked_limit / SEALED_UNACKED_SHARE / 2 if count > _FEW else 0.0
        largest = max(budget - slack - rest, 1.0) / ((count + 1) / 2)
        following = sizes[count] if count < len(sizes) else 0.0
        if largest >= following:
            return largest
    return 1.0


def put_price(url: str, given: float | None) -> float:
    """Return US dollars per 1,000 writes; 0 if they cost nothing."""
    return PUT_PRICES.get(url.partition("://")[0], 0.0) if given is None else given
