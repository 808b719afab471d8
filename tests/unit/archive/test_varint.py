from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive.varint import varint

BOUNDARIES = [power + step for bits in range(7, 64, 7) for power in (1 << bits,) for step in (-1, 0)]


@given(st.sampled_from([0, *BOUNDARIES, (1 << 63) - 1, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1), st.binary())
def test_a_number_is_read_where_it_begins_and_refused_if_it_is_cut_off(number: int, around: bytes) -> None:
    data: bytes = _VarintBytes(number)
    assert varint(around + data + around, len(around)) == (number, len(around) + len(data))
    with pytest.raises(ValueError, match="truncated"):
        varint(around + data[:-1], len(around))


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\2", b"\xff" * 9 + b"\x81\0", b"\x80" * 10 + b"\0", b"\x80" * 20])
def test_a_number_of_more_than_64_bits_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        varint(data)
