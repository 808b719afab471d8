from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes

from jetcapture_py.archive.varint import varint

BOUNDARIES = [(1 << bits) + step for bits in (*range(7, 64, 7), 64) for step in (-1, 0)][:-1]


def test_a_number_is_read_where_it_begins_and_refused_if_it_is_cut_off() -> None:
    for number in (0, 1, *BOUNDARIES):
        data: bytes = _VarintBytes(number)
        for around in (b"", b"\0", b"\xff" * 3):
            assert varint(around + data + around, len(around)) == (number, len(around) + len(data))
            with pytest.raises(ValueError, match="truncated"):
                varint(around + data[:-1], len(around))


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    for data in (b"\xff" * 9 + b"\2", b"\xff" * 9 + b"\x81\0", b"\x80" * 10 + b"\0"):
        with pytest.raises(ValueError, match="64 bits"):
            varint(data)
