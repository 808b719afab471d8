"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from jetcapture_py.reading.output import table


def test_a_table_shows_line_breaks_and_nulls() -> None:
    assert list(table(["a", "b"], [("x\ny", None)])) == ["a     b", "----  ----", "x\\ny  NULL"]


def test_a_table_of_any_length_is_shown_while_it_is_read() -> None:
    def rows() -> Iterator[list[str]]:
        for number in range(5000):
            read.append(number)
            yield [str(number), "x"]

    read: list[int] = []
    lines = table(["n", "x"], rows())
    assert [next(lines), next(lines), next(lines)] == ["n    x", "---  -", "0    x"]
    assert len(read) < 5000
    assert list(lines)[-1] == "4999  x"
