"""Notes of what was removed on purpose: exact, small, and safe against a damaged file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import removed
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.archive.removed import Erased, Expired, Tombstone
from jetcapture_py.errors import JetcaptureError

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
CREATED = "2026-01-01T00:00:00Z"
SECOND = 1_000_000
LIFE = 100 * SECOND


def _expired(*parts: tuple[str, list[int]]) -> Expired:
    expired = Expired(stream="ORDERS", until=NOON)
    for created, seqs in parts:
        expired = expired.with_messages(created, np.array(seqs, np.int64), NOON, NOON + timedelta(hours=len(seqs)))
    return expired


def _tombstone(*messages: tuple[int, int]) -> Tombstone:
    seqs, times = np.array(messages, np.int64).reshape(-1, 2).T
    return _stone(MessageSet(seqs, times))


def _stone(messages: MessageSet) -> Tombstone:
    return Tombstone(stream="ORDERS", time=NOON, by="ops@host", reason="asked for", messages=messages)


def test_expired_messages_are_told_apart_by_incarnation() -> None:
    expired = _expired((CREATED, [1, 2, 3, 7]), (CREATED, [2, 3, 4]), ("2026-03-01T00:00:00Z", [1, 2]))
    assert expired.messages == 7
    assert expired.ranges([CREATED]) == [(1, 4), (7, 7)]
    assert expired.until == NOON + timedelta(hours=4)
    later_first = _expired(("2026-03-01T00:00:00Z", [1]), (CREATED, [1]))
    assert [part.created for part in later_first.incarnations] == [CREATED, "2026-03-01T00:00:00Z"]


@given(st.lists(st.lists(st.integers(1, 60), max_size=30), max_size=4), st.sampled_from([0, 4096]))
def test_exactly_the_expired_messages_are_in_the_note(passes: list[list[int]], listed: int) -> None:
    """However many ranges they make: what is between them is not gone on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(removed, "MAX_LISTED", listed)
        expired = _expired(*((CREATED, sorted(seqs)) for seqs in passes))
        assert Expired.decode(expired.encode(), "ORDERS", "x.json") == expired
    every = {seq for seqs in passes for seq in seqs}
    assert expired.messages == len(every)
    assert {seq for first, last in expired.ranges([CREATED]) for seq in range(first, last + 1)} == every
    assert np.flatnonzero(expired.contains(np.arange(70))).tolist() == sorted(every)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=40), st.sampled_from([0, 4096]))
def test_exactly_the_erased_messages_are_in_the_tombstones(pairs: list[tuple[int, int]], listed: int) -> None:
    """A stream that is rewound or created again gives sequences to later messages, which are not erased."""
    messages = sorted({(seq, life * LIFE + seq * SECOND) for seq, life in pairs})
    first, second = _tombstone(*messages[::2]), _tombstone(*messages[::3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(removed, "MAX_LISTED", listed)
        notes = {"a.json": first.encode(), "b.json": second.encode()}
        before = Erased.read("ORDERS", lambda _: ["a.json"], lambda paths: map(notes.get, paths))
        erased = Erased.read("ORDERS", lambda _: ["a.json", "b.json"], lambda paths: map(notes.get, paths), before)
    one = Erased.read("ORDERS", lambda _: ["b.json"], lambda paths: map(notes.get, paths), erased)
    assert (len(before), len(one)) == (len(messages[::2]), len(messages[::3]))
    expected = {*messages[::2], *messages[::3]}
    every = [(seq, life * LIFE + seq * SECOND) for seq in range(1, 31) for life in range(4)]
    seqs, times = np.array(every, np.int64).T
    assert {message for message, hit in zip(every, erased.contains(seqs, times), strict=True) if hit} == expected
    near = {seq for seq in range(1, 31) if erased.near(seq, seq)}
    assert near == {seq for seq, _ in expected}
    assert (len(first.messages), len(erased)) == (len(messages[::2]), len(expected))


_PART = b'{"stream_created": "", "oldest": "2026-05-01T12:00:00Z", "ranges": %b}'
_NOTE = b'{"stream": "ORDERS", "until": "2026-05-01T12:00:00Z", "incarnations": [' + _PART + b"]}"


def test_a_damaged_note_or_tombstone_is_an_error() -> None:
    note = _NOTE % b"[[1, 2]]"
    damaged = [b"", b"[]", b"{}", b'{"stream": "ORDERS", "until": "x", "incarnations": 3}']
    damaged += [note.replace(b"oldest", b"newest"), note.replace(b'_created": ""', b'_created": "x"')]
    damaged += [_NOTE % ranges for ranges in (b"[[2, 1]]", b"[[1]]", b'"x"', b'"AAAA"')]
    for data in damaged:
        with pytest.raises(JetcaptureError, match="is damaged"):
            Expired.decode(data, "ORDERS", "x.json")
        with pytest.raises(JetcaptureError, match=r"_erased/ORDERS/x\.json is damaged"):
            Tombstone.decode(data, "ORDERS", "_erased/ORDERS/x.json")

    for ranges, times in ((b"[[1,2]]", b"[1]"), (b"[[2,1]]", b"[]"), (b"[[1]]", b"[1]"), (b"[[1,1]]", b'"AAAA"')):
        data = _tombstone((1, 7)).encode().replace(b'"ranges":[[1,1]]', b'"ranges":' + ranges)
        with pytest.raises(JetcaptureError, match=r"x\.json is damaged"):
            Tombstone.decode(data.replace(b'"times":[7]', b'"times":' + times), "ORDERS", "x.json")


def test_a_note_of_another_stream_is_an_error() -> None:
    with pytest.raises(JetcaptureError, match="belongs to stream ORDERS"):
        Expired.decode(_expired().encode(), "OTHERS", "x.json")
    with pytest.raises(JetcaptureError, match="belongs to stream ORDERS, not OTHERS"):
        Tombstone.decode(_tombstone((1, 1)).encode(), "OTHERS", "x.json")
