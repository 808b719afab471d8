"""The newest row of each key is that of a model that sorts all rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py import read_latest
from jetcapture_py.archive import layout, stream_config
from jetcapture_py.errors import JetcaptureError
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


@pytest.mark.parametrize("seed", range(6))
def test_the_newest_row_of_each_key(archive: Path, seed: int) -> None:
    orders = Archive(archive)
    rows = fill(orders, random.Random(seed))
    for by, order, deleted in (
        (["id"], "_nats_seq", None),
        (["id"], "_nats_seq", "d"),
        (["op", "id"], "version", None),
        (["id"], "version", "d"),
    ):
        for dedupe in ("auto", "full"):
            condition = None if deleted is None else f"op = '{deleted}'"
            read = read_latest(orders.url, "ORDERS", by=by, order=order, deleted=condition, dedupe=dedupe).read_all()
            times = read["_nats_timestamp"].cast(pa.int64()).to_pylist()
            numbers, ids, ops = (read[name].to_pylist() for name in ("_nats_row", "id", "op"))
            got = sorted(
                (time, number, -1 if id_ is None else id_ or -1, op or "")
                for time, number, id_, op in zip(times, numbers, ids, ops, strict=True)
            )
            assert got == newest(rows, by, order, deleted), (by, order, deleted, dedupe)


def test_the_result_has_the_columns_types_and_range_of_read_archive(archive: Path) -> None:
    orders = Archive(archive)
    orders.write([1, 2], "a", id=[1, 1], after=[{"id": 7}, None], before=[None, {"id": 7}], size=["1", "x"])
    orders.write([3], "b", id=[2], after=[{"id": 8}], before=pa.nulls(1), size=["3"])
    by = "coalesce(after.id, before.id)"
    read = read_latest(orders.url, "ORDERS", by=by, columns=["size", "KEY"], types={"size": "bigint"})
    assert read.schema == pa.schema({"size": pa.int64(), "KEY": pa.string()})
    assert sorted(read.read_all().to_pylist(), key=str) == [{"size": 3, "KEY": "b"}, {"size": None, "KEY": "a"}]
    times = {"end": "2026-05-01T12:00:00.000002Z"}
    assert read_latest(orders.url, "ORDERS", by=["id"], columns="size", **times).read_all().to_pylist() == [
        {"size": "1"}
    ]
    assert read_latest(orders.url, "ORDERS", by="id", keys="c").read_all().num_rows == 0


def test_a_wrong_expression_is_named(archive: Path) -> None:
    orders = Archive(archive)
    orders.write([1], id=[1])
    for wrong, text in (
        ({"by": "ids"}, "by: ids: Binder Error: Referenced column"),
        ({"by": []}, "by: expected at least one"),
        ({"by": "id", "order": "at"}, "order: at: "),
        ({"by": "id", "deleted": "op ="}, "deleted: op =: Parser Error"),
    ):
        with pytest.raises(JetcaptureError, match=text):
            read_latest(orders.url, "ORDERS", **wrong).read_all()  # type: ignore[arg-type]
