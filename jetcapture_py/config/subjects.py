"""Subjects with wildcards."""

from __future__ import annotations


def matches(pattern: str, subject: str) -> bool:
    """Whether a pattern such as `orders.*.new` or `orders.>` matches a subject without wildcards."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, want in enumerate(wanted):
        if want == ">":
            return len(tokens) > place
        if place >= len(tokens) or want not in ("*", tokens[place]):
            return False
    return len(wanted) == len(tokens)
