"""Patterns of subjects cover and overlap one another as NATS has it."""

from __future__ import annotations

import pytest

from jetcapture_py.config.subjects import check_pattern, covers, overlaps


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


@pytest.mark.parametrize("pattern", [">", "a.*.c", "a.>", "a.b*", "a.b>c", "a.>b", "a.\xa0b"])
def test_every_subject_that_a_server_stores_is_a_pattern(pattern: str) -> None:
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["", "a.", ".a", "a..b", "a.>.b", "a b", "a.b\n"])
def test_what_no_subject_can_match_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expected a subject such as"):
        check_pattern(pattern)
