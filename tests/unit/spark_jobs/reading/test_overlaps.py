"""Which rows of overlapping objects are read: every message once, and none of them from nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive import overlaps
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import Identities, Resolved, resolve

Message = tuple[int, int]
Content = dict[ObjectName, list[Message]]


def contents(groups: Sequence[tuple[str, Sequence[Sequence[Message]]]]) -> Content:
    """Objects of these messages, by key."""
    found: Content = {}
    for key, blocks in groups:
        for number, messages in enumerate(blocks):
            seqs = [seq for seq, _ in messages]
            name = ObjectName(
                stream="S",
                key=key,
                bucket=0,
                first_seq=min(seqs),
                last_seq=max(seqs),
                rows=len(seqs),
                digest=f"{number:016x}",
            )
            found[name] = list(messages)
    return found


def resolved(content: Content) -> Resolved:
    def identities(names: Sequence[ObjectName]) -> list[Identities]:
        columns = [np.array(content[name], np.int64).reshape(-1, 2).T for name in names]
        return [(seqs, times) for seqs, times in columns]

    return resolve(content, identities)


def read(content: Content, found: Resolved) -> list[tuple[str | None, int, int]]:
    """What a reader gets: whole objects, parts, and the unresolved deduplicated."""
    rows = [(name.key, *message) for name in found.whole for message in content[name]]
    for name, ranges in found.parts.items():
        rows += [(name.key, *m) for m in content[name] if any(first <= m[0] <= last for first, last in ranges)]
    rows += {(name.key, *message) for name in found.unresolved for message in content[name]}
    return sorted(rows, key=str)


@given(
    some.lists(
        some.tuples(
            some.sampled_from("ab"),
            some.lists(
                some.lists(some.tuples(some.integers(1, 30), some.sampled_from([1, 1, 1, 2])), min_size=1, max_size=30),
                min_size=1,
                max_size=5,
            ),
        ),
        unique_by=lambda group: group[0],
        max_size=2,
    )
)
def test_every_message_is_read_once_whatever_overlaps(groups: list[tuple[str, list[list[Message]]]]) -> None:
    content = contents([(key, [list(dict.fromkeys(block)) for block in blocks]) for key, blocks in groups])
    expected = {(name.key, *message) for name, messages in content.items() for message in messages}
    assert read(content, resolved(content)) == sorted(expected, key=str)


def test_objects_that_hold_copies_only_are_not_read() -> None:
    content = contents([("a", [[(seq, 1) for seq in range(1, 10)], [(3, 1), (4, 1)]])])
    large, small = content
    found = resolved(content)
    assert found.whole == [large]
    assert small not in found.parts
    assert not found.unresolved


def test_too_many_ranges_are_left_to_spark() -> None:
    odd, every = [(seq, 1) for seq in range(1, 101, 2)], [(seq, 1) for seq in range(1, 102)]
    found = resolved(contents([("a", [odd, every])]))
    assert (len(found.whole), found.parts, found.unresolved) == (1, {}, [])
    alternating = [(seq, 1) for seq in range(1, 101) if seq % 4 < 2], [(seq, 1) for seq in range(1, 101) if seq % 4]
    found = resolved(contents([("a", list(alternating))]))
    assert len(found.unresolved) == 2
    assert overlaps.MAX_RANGES < 25


def test_what_is_much_is_left_to_spark_unread() -> None:
    def unread(names: Sequence[ObjectName]) -> list[Identities]:
        raise AssertionError("read")

    many = list(contents([("a", [[(seq, 1)] for seq in range(1, overlaps.MAX_OBJECTS + 2)])]))
    assert resolve(many, unread).unresolved == many
