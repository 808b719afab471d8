"""Patterns of subjects cover and overlap one another as NATS has it."""

from __future__ import annotations

import pytest

from jetcapture_py.config.subjects import check_pattern, covers, overlaps


def test_patterns_cover_and_overlap() -> None:
    expected = {
        ("a.b", "a.b"): (True, True),
        ("a.b", "a.c"): (False, False),
        ("a.*", "a.b"): (True, True),
        ("a.b", "a.*"): (False, True),
        ("a.*", "a.>"): (False, True),
        ("a.>", "a.*"): (True, True),
        ("a.>", "a.b.c"): (True, True),
        ("a.>", "a"): (False, False),
        (">", "a.b"): (True, True),
        ("*.b", "a.*"): (False, True),
        ("a.*.c", "*.b.>"): (False, True),
        ("a.*.c", "*.b"): (False, False),
    }
    assert {pair: (covers(*pair), overlaps(*pair)) for pair in expected} == expected
    assert {pair: overlaps(*reversed(pair)) for pair in expected} == {
        pair: both for pair, (_, both) in expected.items()
    }


def test_what_a_server_can_store_is_a_pattern_and_nothing_else() -> None:
    for pattern in (">", "a.*.c", "a.>", "a.b*", "a.b>c", "a.>b", "a.\xa0b"):
        assert check_pattern(pattern) == pattern
    for pattern in ("", "a.", ".a", "a..b", "a.>.b", "a b", "a.b\n"):
        with pytest.raises(ValueError, match=r"expected a subject such as"):
            check_pattern(pattern)
