"""Patterns of subjects cover and overlap one another as NATS has it."""

from __future__ import annotations

import pytest

from jetcapture_py.config.subjects import check_pattern, covers, overlaps


def test_patterns_cover_and_overlap() -> None:
    covering = [("a.b", "a.b"), ("a.*", "a.b"), ("a.>", "a.*"), ("a.>", "a.b.c"), (">", "a.b")]
    overlapping = [("a.b", "a.*"), ("a.*", "a.>"), ("*.b", "a.*"), ("a.*.c", "*.b.>")]
    apart = [("a.b", "a.c"), ("a.>", "a"), ("a.*.c", "*.b")]
    for pair in covering + overlapping + apart:
        assert covers(*pair) is (pair in covering), pair
        assert overlaps(*pair) is overlaps(*reversed(pair)) is (pair not in apart), pair


def test_what_a_server_can_store_is_a_pattern_and_nothing_else() -> None:
    for pattern in (">", "a.*.c", "a.>", "a.b*", "a.b>c", "a.>b", "a.\xa0b"):
        assert check_pattern(pattern) == pattern
    for pattern in ("", "a.", ".a", "a..b", "a.>.b", "a b", "a.b\n"):
        with pytest.raises(ValueError, match=r"expected a subject such as"):
            check_pattern(pattern)
