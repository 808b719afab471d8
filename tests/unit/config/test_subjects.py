"""Patterns of subjects cover and overlap one another as NATS has it."""

from __future__ import annotations

import pytest

from jetcapture_py.config.subjects import covers, overlaps


@pytest.mark.parametrize(
    ("pattern", "other", "covered", "overlapping"),
    [
        ("a.b", "a.b", True, True),
        ("a.b", "a.c", False, False),
        ("a.*", "a.b", True, True),
        ("a.b", "a.*", False, True),
        ("a.*", "a.>", False, True),
        ("a.>", "a.*", True, True),
        ("a.>", "a.b.c", True, True),
        ("a.>", "a", False, False),
        (">", "a.b", True, True),
        ("a.b", ">", False, True),
        ("*.b", "a.*", False, True),
        ("a.*.c", "*.b.>", False, True),
        ("a.*.c", "*.b", False, False),
        ("a.b.c", "a.b", False, False),
        ("*", ">", False, True),
    ],
)
def test_patterns_cover_and_overlap(pattern: str, other: str, covered: bool, overlapping: bool) -> None:
    assert covers(pattern, other) is covered
    assert overlaps(pattern, other) is overlaps(other, pattern) is overlapping
