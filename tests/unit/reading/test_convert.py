"""Values read as a type that was asked for."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from jetcapture_py.reading.convert import forced

AT = datetime(2026, 5, 1, 12, 0, 0, 123456, UTC)
TEXTS = ["42", "n/a", None, "4.5", "2026-05-01", "2026-05-01T14:00:00.123456789+02:00", "true", str(2**63)]


def test_a_value_that_is_none_of_a_type_is_null_and_counted() -> None:
    decimal, instant = pa.decimal128(18, 2), pa.timestamp("us", "UTC")
    cases: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
        (pa.array(TEXTS), pa.int64(), [42, *[None] * 7]),
        (pa.array(TEXTS), pa.float64(), [42.0, None, None, 4.5, None, None, None, float(2**63)]),
        (pa.array(TEXTS[:4]), decimal, [Decimal("42.00"), None, None, Decimal("4.50")]),
        (pa.array(TEXTS), pa.date32(), [None] * 4 + [date(2026, 5, 1)] + [None] * 3),
        (pa.array(TEXTS[4:]), instant, [None, AT, None, None]),
        (pa.array([*TEXTS[:2], "true"]), pa.bool_(), [None, None, True]),
        (pa.array([1.0, 1.5, float("nan"), None, 1e30]), pa.int64(), [1, None, None, None, None]),
        (pa.array([1, 2**40]), pa.int32(), [1, None]),
        (pa.array([7, 2**62]), decimal, [Decimal(7), None]),
        (pa.array([7, None]), pa.string(), ["7", None]),
        (pa.array([7]), instant, [None]),
        (pa.array([True]), pa.int64(), [None]),
        (pa.array([{"a": 1}, None]), pa.string(), ['{"a":1}', None]),
        (pa.array([{"a": 1}]), pa.int64(), [None]),
        (pa.array([AT]).cast(instant), pa.date32(), [date(2026, 5, 1)]),
        (pa.array(["1", "1", "x"]).dictionary_encode(), pa.int64(), [1, 1, None]),
        (pa.nulls(2), pa.int64(), [None, None]),
        (pa.array([None], pa.string()), pa.int64(), [None]),
    ]
    for array, target, expected in cases:
        values, nulled = forced(array, target)
        assert (values.type, values.to_pylist()) == (target, expected), (array, target)
        assert nulled == sum(value is None for value in expected) - array.null_count, (array, target)
