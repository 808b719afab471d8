"""Nothing is read twice and nothing is left out, however the copies of messages lie in objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

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
    ordered = sorted(messages)
    return ObjectName(
        stream="S",
        key=place[0],
        bucket=place[1],
        first_seq=ordered[0][0],
        last_seq=ordered[-1][0],
        rows=len(ordered),
        digest=layout.digest(
            np.array([seq for seq, _ in ordered], "<i8").tobytes(), np.array([t for _, t in ordered], "<i8").tobytes()
        ),
    )


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


places = st.sampled_from([("a", 0), ("a", 900), (None, 0), ("None", 0), ("__HIVE_DEFAULT_PARTITION__", 0)])


@given(
    st.lists(
        st.tuples(places, st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 1])), min_size=1, max_size=8)),
        max_size=6,
    ),
    st.data(),
)
def test_copies_compactions_and_later_lives_are_read_once(
    blocks: list[tuple[Place, list[Message]]], data: st.DataObject
) -> None:
    """Blocks are stored; some are delivered again in part; some are merged, and their sources are there still."""
    contents = [(place, sorted({(seq, life * 1000 + seq) for seq, life in found})) for place, found in blocks]
    for place, content in list(contents):
        if data.draw(st.booleans()):
            again = content[: data.draw(st.integers(1, len(content)))]
            contents.append((place, again))
    for place in {place for place, _ in contents}:
        sources = [content for where, content in contents if where == place]
        if len(sources) > 1 and data.draw(st.booleans()):
            contents.append((place, sorted({message for content in sources for message in content})))
            if data.draw(st.booleans()):
                contents.remove((place, sources[0]))
    objects = {name_of(place, content): content for place, content in contents}
    expected = {(place, message) for place, content in contents for message in content}
    assert read(objects) == sorted(expected, key=repr)
