from __future__ import annotations

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.jetstream.restore import BROKEN, PADDING
from jetcapture_py.restoring import backup
from tests.support.backups import Entry, entries, inflated

numbers = some.sampled_from([1, 127, 128, 16_383, 16_384, 2**31, 2**62]) | some.integers(1, 2**62)
times = some.integers(-(2**62), 2**62) | some.integers(1_700_000_000_000_000_000, 1_900_000_000_000_000_000)
messages = some.builds(
    Entry,
    name=some.binary(min_size=1, max_size=200),
    nanoseconds=times,
    seq=numbers,
    header=some.just(b"") | some.binary(max_size=200),
    payload=some.just(b"") | some.binary(max_size=300),
)


def written(found: list[Entry], *, headers: bool = True) -> memoryview:
    subjects, nanoseconds, seqs, blocks, payloads = zip(*found, strict=True) if found else ((),) * 5
    return backup.messages(
        pa.array(subjects, pa.binary()),
        np.array(nanoseconds, np.int64),
        np.array(seqs, np.int64),
        pa.array(blocks, pa.binary()) if headers else None,
        pa.array(payloads, pa.binary()),
    )


@given(some.lists(messages, max_size=20))
def test_messages_are_read_back_as_they_were(found: list[Entry]) -> None:
    assert list(entries(bytes(written(found)) + backup.END)) == [*found, Entry(b"", 0, 0, b"", b"")]
    without = [entry._replace(header=b"") for entry in found]
    assert list(entries(bytes(written(without, headers=False)))) == without


def test_messages_of_a_slice_are_those_of_the_slice_alone() -> None:
    found = [Entry(b"s%d" % seq, seq, seq, b"h" * seq, b"p" * seq) for seq in range(1, 9)]
    subjects, blocks, payloads = (pa.array([each[at] for each in found], pa.binary()) for at in (0, 3, 4))
    seqs = np.arange(1, 9)
    part = backup.messages(subjects.slice(2, 3), seqs[2:5], seqs[2:5], blocks.slice(2, 3), payloads.slice(2, 3))
    assert list(entries(bytes(part))) == found[2:5]


def test_the_beginning_has_the_state_and_the_consumers() -> None:
    data = backup.head(5, 900, [({"name": "a", "durable_name": "a"}, 7), ({"name": "b"}, 0)])
    assert data.startswith(b"NATSARC1")
    state, *consumers = entries(data[8:])
    assert (state.name, state.seq) == (b"state.json", 0)
    assert json.loads(state.payload) == {"first_seq": 5, "last_seq": 900, "consumer_count": 2}
    assert [each.name for each in consumers] == [b"consumers/a", b"consumers/b"]
    found = json.loads(consumers[0].payload)
    assert found["config"]["durable_name"] == "a"
    assert found["state"]["ack_floor"] == found["state"]["delivered"] == {"consumer_seq": 7, "stream_seq": 7}


def test_pieces_can_be_joined_with_padding_between_them() -> None:
    pieces = [b"NATSARC1", b"x" * 200_000, b"", bytes(range(256)) * 500, random.Random(1).randbytes(300_000)]
    frames = PADDING.join(b"".join(backup.framed(piece)) for piece in pieces)
    assert inflated(frames) == b"".join(pieces)


def test_a_broken_frame_is_read_by_nobody() -> None:
    with pytest.raises(Exception, match="unsupported"):
        inflated(b"".join(backup.framed(b"x")) + BROKEN)
