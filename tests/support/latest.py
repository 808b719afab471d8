"""Archives with several versions of rows, and the newest of each key by a model that sorts all of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout, stream_config
from tests.support.archives import HOUR, Archive

AGAIN = HOUR + 1800
"""When the stream was created again."""


def fill(archive: Archive, chance: random.Random) -> list[dict[str, Any]]:
    """Write overlapping objects of two lives, with copies, several rows a message, nulls and ties; return the rows."""
    configs = archive.root / stream_config.directory("ORDERS")
    configs.mkdir(parents=True)
    for created in ("2026-05-01T11:00:00Z", "2026-05-01T12:30:00Z"):
        config = stream_config.StreamConfig(stream="ORDERS", created=created, config={})
        Path(configs, Path(stream_config.path("ORDERS", created)).name).write_bytes(config.encode())
    rows: list[dict[str, Any]] = []
    for life, count in ((0, 60), (1, 40)):
        begin = (AGAIN if life else HOUR) * 1_000_000
        messages = [
            {
                "life": life,
                "_nats_seq": seq,
                "_nats_timestamp": begin + seq,
                "_nats_row": row,
                "id": chance.choice([None, *range(12)]),
                "op": chance.choice(["u", "u", "d", None]),
                "version": chance.choice([None, 1, 2, 3, 3.5]),
            }
            for seq in range(1, count)
            for row in range(chance.choice([1, 1, 3]))
        ]
        if life:  # the stream was rewound: a sequence has another message, which is newer
            messages += [{**row, "_nats_timestamp": row["_nats_timestamp"] + 500} for row in messages[-6:]]
        rows += messages
        for key in ("a", "b"):
            placed = [row for row in messages if (row["_nats_seq"] % 2 == 0) == (key == "a")]
            for low, high in ((0, 25), (15, 60)):  # messages 15 to 24 are in both
                some = [row for row in placed if low <= row["_nats_seq"] < high]
                archive.write(
                    [row["_nats_seq"] for row in some],
                    key,
                    timestamps=[row["_nats_timestamp"] for row in some],
                    columns={
                        layout.ROW: pa.array([row["_nats_row"] for row in some], pa.int32()),
                        "id": pa.array([row["id"] for row in some], pa.int64() if low else pa.int32()),
                        "op": pa.array([row["op"] for row in some], pa.string()),
                        "version": pa.array([row["version"] for row in some], pa.float64()),
                    },
                )
    return rows


def newest(rows: list[dict[str, Any]], by: list[str], order: str, deleted: str | None) -> list[tuple[Any, ...]]:
    """Return time, number, `id` and `op` of the newest rows."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        place = (row["_nats_timestamp"], row["_nats_seq"], row["_nats_row"])
        if order == "_nats_seq":
            return row["life"], row["_nats_seq"], *place
        return row[order] is not None, row[order] or 0, *place

    found = {tuple(row[column] for column in by): row for row in sorted(rows, key=place)}
    return sorted(
        (row["_nats_timestamp"], row["_nats_row"], row["id"] or -1, row["op"] or "")
        for row in found.values()
        if deleted is None or row["op"] != deleted
    )


def described(read: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows that were read as `newest` returns them."""
    times = read["_nats_timestamp"].cast(pa.int64()).to_pylist()
    numbers, ids, ops = (read[name].to_pylist() for name in ("_nats_row", "id", "op"))
    return sorted(
        (time, number, id_ or -1, op or "") for time, number, id_, op in zip(times, numbers, ids, ops, strict=True)
    )
