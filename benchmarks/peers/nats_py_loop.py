"""The loop that most people would write: nats-py and pyarrow. `python nats_py_loop.py URL STREAM CONSUMER MESSAGES DIR`

A batch is fetched, decoded, grouped by a field, written as one Parquet file for each group, and acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pyarrow.parquet as pq

BATCH = 5000


async def main() -> None:
    """Fetch, decode, group, write, acknowledge."""
    url, stream, consumer, messages, directory = sys.argv[1:]
    client = await nats.connect(url)
    subscription = await client.jetstream().pull_subscribe_bind(consumer, stream)
    received = batches = 0
    while received < int(messages):
        batch = await subscription.fetch(BATCH, timeout=5)
        received += len(batch)
        batches += 1
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for message in batch:
            order = json.loads(message.data)
            groups[order["region"]].append(order)
        for region, orders in groups.items():
            file = Path(directory, region, f"{batches}.parquet")
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(orders), file, compression="zstd")
        for message in batch:
            await message.ack()
    await client.drain()


if __name__ == "__main__":
    asyncio.run(main())
