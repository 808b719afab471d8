"""Nothing is read twice and nothing is left out, however the copies of messages lie in objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.overlaps import MAX_OBJECTS, MAX_RANGES, Identities, Resolved, resolve

Message = tuple[int, int]
Place = tuple[str | None, int]
"""Key and bucket, which follow from the message."""

Stored = dict[ObjectName, list[Message]]


def identities_in(objects: Stored, names: Sequence[ObjectName]) -> list[Identities]:
    columns = [np.array(objects[name], np.int64).reshape(-1, 2).T for name in names]
    return [(seqs, times) for seqs, times in columns]


def read(objects: Stored) -> list[tuple[Place, Message]]:
    """What a reader gets that goes by the rule: disjoint objects as they are, the others as they are resolved."""
    alone, shared = layout.split_overlapping(objects)
    assert sorted(map(repr, (*alone, *shared))) == sorted(map(repr, objects))
    found = resolve(shared, partial(identities_in, objects))
    rows = [((name.key, name.bucket), message) for name in (*alone, *found.whole) for message in objects[name]]
    for name, ranges in found.parts.items():
        rows += [((name.key, name.bucket), m) for m in objects[name] if any(a <= m[0] <= b for a, b in ranges)]
    compared = {((name.key, name.bucket), message) for name in found.unresolved for message in objects[name]}
    return sorted([*rows, *compared], key=repr)


def name_of(place: Place, messages: Sequence[Message]) -> ObjectName:
    """The name, by the format's rules alone."""
    seqs, times = np.array(sorted(messages), "<i8").T
    digest = layout.digest(seqs.tobytes(), times.tobytes())
    where: dict[str, Any] = {"stream": "S", "key": place[0], "bucket": place[1], "digest": digest}
    return ObjectName(**where, first_seq=int(seqs[0]), last_seq=int(seqs[-1]), rows=len(seqs))


def subsets(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    for size in range(1, len(messages) + 1):
        yield from combinations(messages, size)


def test_every_way_in_which_three_objects_can_overlap() -> None:
    """Four messages of a stream, and one of a later life of it that has the sequence of another."""
    messages = [(1, 10), (2, 20), (2, 90), (3, 30), (4, 40)]
    cases = 0
    for contents in combinations(list(subsets(messages)), 3):
        objects = {name_of(("a", 0), content): sorted(content) for content in contents}
        assert len(objects) == 3, "another set of messages is another object"
        expected = {message for content in contents for message in content}
        assert [message for _, message in read(objects)] == sorted(expected, key=repr)
        cases += 1
    assert cases == 4495


def test_objects_of_copies_alone_are_not_read() -> None:
    large, small = (name_of(("a", 0), [(seq, 1) for seq in seqs]) for seqs in (range(1, 10), (3, 4)))
    objects = {large: [(seq, 1) for seq in range(1, 10)], small: [(3, 1), (4, 1)]}
    resolved = resolve(objects, partial(identities_in, objects))
    assert (resolved.whole, resolved.parts, resolved.unresolved) == ([large], {}, [])


def resolved_ranges(*contents: Sequence[int]) -> Resolved:
    objects: Stored = {name_of(("a", 0), [(seq, 1) for seq in seqs]): [(seq, 1) for seq in seqs] for seqs in contents}
    return resolve(objects, partial(identities_in, objects))


def test_too_many_ranges_or_objects_are_left_to_the_engine() -> None:
    alone = resolved_ranges(range(1, 101, 2), range(1, 102))
    assert (len(alone.whole), alone.parts, alone.unresolved) == (1, {}, [])
    for ranges, unresolved in ((MAX_RANGES, 0), (MAX_RANGES + 1, 2)):
        seqs = range(1, 3 * ranges + 1)  # the second object has every third sequence alone
        resolved = resolved_ranges([seq for seq in seqs if seq % 3], [seq for seq in seqs if seq % 3 != 1])
        assert len(resolved.unresolved) == unresolved
    many = [name_of(("a", 0), [(seq, 1)]) for seq in range(MAX_OBJECTS + 1)]
    assert resolve(many, lambda _: pytest.fail("it was read")).unresolved == many
