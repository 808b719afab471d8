"""Which archived messages count as lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.errors import JetcaptureError
from spark_jobs.publishing.prepare import TIME
from spark_jobs.replaying.missing import ROLLUP, StreamTail, check_overwritten, lost_messages

NOTHING = np.zeros(0, np.int64)


def pairs(*messages: tuple[int, int]) -> MessageSet:
    return MessageSet(*np.array(messages, np.int64).reshape(-1, 2).T)


def lost(archived: MessageSet, stream: MessageSet, last: int, reported: Any = NOTHING) -> list[tuple[int, int]]:
    messages = lost_messages(archived, stream, last, reported)
    return list(zip(messages.seqs.tolist(), messages.times.tolist(), strict=True))


def test_what_limits_purges_and_deletions_have_removed_is_not_lost() -> None:
    archived = pairs((1, 10), (2, 20), (3, 30), (4, 40))
    assert lost(archived, pairs((2, 20), (4, 40)), 4) == []
    assert lost(archived, pairs(), 4) == []


def test_what_is_beyond_the_streams_end_is_lost() -> None:
    assert lost(pairs((1, 10), (2, 20), (4, 40)), pairs((1, 10)), 1) == [(2, 20), (4, 40)]


def test_what_was_overtaken_by_new_messages_is_lost_whether_these_are_archived_or_not() -> None:
    old = [(1, 10), (2, 20), (3, 30), (5, 50)]
    new = [(2, 60), (3, 70), (4, 80)]
    for captured in ([], new[:1], new):
        assert lost(pairs(*old, *captured), pairs((1, 10), *new), 4) == [(2, 20), (3, 30), (5, 50)]
    assert lost(pairs(*old, *new), pairs((3, 70), (9, 90)), 9) == [(2, 20), (3, 30), (5, 50)]


def test_what_the_server_reports_as_lost_is_lost() -> None:
    assert lost(pairs((1, 10), (2, 20), (3, 30)), pairs((1, 10), (3, 30)), 3, np.array([2, 3])) == [(2, 20)]


def test_older_messages_do_not_replace_newer_ones() -> None:
    missing = pa.table({TIME: [10, 20], ROLLUP: [False, True]})
    for newest, keeps_latest, kept, why in (
        (11, True, (), "limits the messages of a subject"),
        (11, False, ("Nats-Rollup",), "has lost rollups"),
        (10, True, ("Nats-Rollup",), None),
        (11, False, (), None),
    ):
        tail = cast("StreamTail", SimpleNamespace(stream="S", newest=newest, keeps_latest=keeps_latest))
        if why is None:
            check_overwritten(tail, missing, kept)
            continue
        with pytest.raises(
            JetcaptureError, match=f"^stream S {why} and has taken .* since it lost 2 messages: older ones"
        ):
            check_overwritten(tail, missing, kept)


@given(st.data())
def test_everything_that_rewinds_have_taken_is_found_and_nothing_else(data: st.DataObject) -> None:
    stream: dict[int, int] = {}
    archived: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    beyond: set[tuple[int, int]] = set()
    last = clock = 0
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 8))):
            last, clock = last + 1, clock + 1
            stream[last] = clock
        archived |= set(stream.items())
        for seq in data.draw(st.sets(st.sampled_from(sorted(stream)), max_size=2)) - {last}:
            del stream[seq]  # a deletion
        end = data.draw(st.integers(1, last))
        beyond |= {(seq, time) for seq, time in archived if seq > end}
        taken |= {(seq, time) for seq, time in archived if seq > end and stream.get(seq) == time}
        stream = {seq: time for seq, time in stream.items() if seq <= end}
        last = end
    found = set(lost(pairs(*archived), pairs(*stream.items()), last))
    assert taken <= found
    assert not found & set(stream.items())
    assert found <= beyond  # deletions that were forgotten with a rewind cannot be told from losses
