"""Rows as a table for people."""

from __future__ import annotations

from jetcapture_py.reading.output import table


def test_a_table_shows_line_breaks_and_nulls() -> None:
    assert list(table(["a", "b"], [("x\ny", None)])) == ["a     b", "----  ----", "x\\ny  NULL"]
