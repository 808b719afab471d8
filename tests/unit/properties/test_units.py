"""Sizes and durations: a parser written by the grammar in the documentation agrees about every text."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given

from jetcapture_py.config.units import MAX_BYTES, MAX_SECONDS, parse_duration, parse_size

DURATIONS = (
    ("d", Fraction(86_400)),
    ("h", Fraction(3600)),
    ("m", Fraction(60)),
    ("s", Fraction(1)),
    ("ms", Fraction(1, 1000)),
)
SIZES = {"": 1, "B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

numbers = st.integers(0, 200).map(str) | st.sampled_from(
    ["0", "00", "1.5", "0.001", "1.", ".5", "1.0000000001", "9" * 19]
)
pieces = st.sampled_from(
    [
        "d",
        "h",
        "m",
        "s",
        "ms",
        "us",
        "B",
        "KB",
        "kB",
        "Kb",
        "MB",
        "MiB",
        "mib",
        "GB",
        "TiB",
        "k",
        "G",
        "Ki",
        " ",
        "-",
        "+",
    ]
)
pairs = st.tuples(numbers, st.sampled_from(["d", "h", "m", "s", "ms"])).map("".join)
texts = (
    st.lists(pairs, min_size=1, max_size=3).map("".join)
    | st.lists(numbers | pieces, max_size=5).map("".join)
    | st.text("0123456789.dhmsBKMGTib +-e\n", max_size=8)
)


def number(text: str) -> tuple[Fraction, str] | None:
    """The number that the text begins with, and the rest."""
    whole = len(text) - len(text.lstrip("0123456789"))
    if not 1 <= whole <= 19:
        return None
    rest, part = text[whole:], ""
    if rest[:1] == ".":
        part = rest[1 : 1 + len(rest[1:]) - len(rest[1:].lstrip("0123456789"))]
        if not 1 <= len(part) <= 9:
            return None
        rest = rest[1 + len(part) :]
    return Fraction(int(text[:whole] + part), 10 ** len(part)), rest


def seconds(text: str) -> Fraction | None:
    """What a duration says: a number, or numbers with units, the largest first and each once."""
    found = number(text)
    if found is not None and not found[1]:
        return found[0]
    total, left = Fraction(), list(DURATIONS)
    while text:
        found = number(text)
        if found is None:
            return None
        value, text = found
        unit = "ms" if text.startswith("ms") else text[:1]
        names = [name for name, _ in left]
        if unit not in names:
            return None
        total += value * left[names.index(unit)][1]
        left = left[names.index(unit) + 1 :]
        text = text[len(unit) :]
    return total if len(left) < len(DURATIONS) else None


def bytes_of(text: str) -> Fraction | None:
    """What a size says: a number and at most one unit."""
    found = number(text)
    return None if found is None or found[1] not in SIZES else found[0] * SIZES[found[1]]


@given(texts)
def test_a_duration_is_what_the_grammar_says_or_an_error(text: str) -> None:
    expected = seconds(text)
    found: float | None = None
    message = ""
    try:
        found = parse_duration(text)
    except ValueError as error:
        message = str(error)
    if expected is None or expected > MAX_SECONDS:
        assert found is None
        assert message.isprintable()
    else:
        assert found == float(expected)


@given(texts)
def test_a_size_is_what_the_grammar_says_or_an_error(text: str) -> None:
    expected = bytes_of(text)
    found: int | None = None
    message = ""
    try:
        found = parse_size(text)
    except ValueError as error:
        message = str(error)
    assert message.isprintable()
    assert found == (None if expected is None or expected.denominator != 1 or expected > MAX_BYTES else int(expected))
