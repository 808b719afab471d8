from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive.messages import MessageSet, runs

Messages = list[tuple[int, int]]
lists = some.lists(some.tuples(some.integers(1, 20), some.integers(0, 2)), max_size=30)


def set_of(messages: Messages) -> MessageSet:
    return MessageSet(*np.array(messages, np.int64).reshape(-1, 2).T)


def listed(messages: MessageSet) -> Messages:
    return list(zip(messages.seqs.tolist(), messages.times.tolist(), strict=True))


@given(lists, lists)
def test_sets_of_messages_are_sets(one: Messages, other: Messages) -> None:
    left, right = set_of(one), set_of(other)
    assert listed(left) == sorted(set(one))
    assert listed(MessageSet.union([left, right])) == sorted({*one, *other})
    assert listed(left.without(right)) == sorted(set(one) - set(other))
    assert left.positions(*np.array(one, np.int64).reshape(-1, 2).T).tolist() == [
        sorted(set(one)).index(m) for m in one
    ]
    seqs = sorted({seq for seq, _ in one})
    assert [seq for first, last in runs(np.array(seqs, np.int64)) for seq in range(first, last + 1)] == seqs
