"""The newest row of each key is that of a model that sorts all rows."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from jetcapture_py import read_latest
from jetcapture_py.errors import JetcaptureError
from tests.support.archives import Archive
from tests.support.latest import described, fill, newest


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
            assert described(read) == newest(rows, by, order, deleted), (by, order, deleted, dedupe)


def test_the_result_has_the_columns_types_and_range_of_read_archive(archive: Path) -> None:
    orders = Archive(archive)
    orders.write([1, 2], "a", id=[1, 1], after=[{"id": 7}, None], before=[None, {"id": 7}], size=["1", "x"])
    orders.write([3], "b", id=[2], after=[{"id": 8}], before=pa.nulls(1), size=["3"], **{"*": [4]})
    by = "coalesce(after.id, before.id)"
    read = read_latest(orders.url, "ORDERS", by=by, columns=["size", "KEY"], types={"size": "bigint"})
    assert read.schema == pa.schema({"size": pa.int64(), "KEY": pa.string()})
    assert sorted(read.read_all().to_pylist(), key=str) == [{"size": 3, "KEY": "b"}, {"size": None, "KEY": "a"}]
    times = {"end": "2026-05-01T12:00:00.000002Z"}
    assert read_latest(orders.url, "ORDERS", by=["id"], columns="size", **times).read_all().to_pylist() == [
        {"size": "1"}
    ]
    assert read_latest(orders.url, "ORDERS", by="id", keys="c").read_all().num_rows == 0
    star = read_latest(orders.url, "ORDERS", by="id", columns=["id", "*"]).read_all().to_pylist()
    assert sorted(star, key=str) == [{"id": 1, "*": None}, {"id": 2, "*": 4}]


def test_a_wrong_expression_is_named(archive: Path) -> None:
    orders = Archive(archive)
    orders.write([1], id=[1])
    for wrong, text in (
        ({"by": "ids"}, "by: ids: Binder Error: Referenced column"),
        ({"by": []}, "by: expected at least one"),
        ({"by": ["id", " "]}, "by: expected at least one"),
        ({"by": "id", "order": "at"}, "order: at: "),
        ({"by": "id", "columns": []}, "columns: expected at least one"),
        ({"by": "id", "deleted": "op ="}, "deleted: op =: Parser Error"),
    ):
        with pytest.raises(JetcaptureError, match=text):
            read_latest(orders.url, "ORDERS", **wrong).read_all()  # type: ignore[arg-type]
