"""Copies in different groups against what a reader returns that goes by the objects' names."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from jetcapture_py.archive.block_writer import UserWriter
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify import copies, ranges
from jetcapture_py.verify.scan import ArchiveScan, survey
from jetcapture_py.verify.scope import Incarnation
from tests.support.archives import Identity, encoded, put

CREATED = "2024-01-01T00:00:00Z"
LIFE = Incarnation.of(CREATED, mirror=False)
NOW = LIFE.since + 10**9
BUCKETS = (1_700_000_100, 1_700_001_000)


def surveyed(root: Path, life: Incarnation | None = LIFE) -> ArchiveScan:
    return survey(ArchiveFiles(str(root), {}), "ORDERS", life, 1 << 40, deep=False, progress=lambda *_: None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("life", [LIFE, None], ids=["life", "no life"])
def test_copies_are_counted_as_a_reader_returns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, life: Incarnation | None
) -> None:
    monkeypatch.setattr(ranges, "CHUNK", 1 << 6)
    monkeypatch.setattr(ranges, "_BITS", 6)
    monkeypatch.setattr(ranges, "FEW", seed % 3 * 20)
    chance = random.Random(seed)
    groups: dict[Identity, set[tuple[bool, str, int]]] = defaultdict(set)
    paths: dict[Identity, set[str]] = defaultdict(set)
    for _ in range(30):
        first = chance.randrange(1, 300)
        seqs = range(first, first + chance.randrange(1, 60), chance.choice((1, 1, 2, 7)))
        other = chance.random() < 0.1  # a server numbered others the same
        messages = [(seq, NOW + seq + other) for seq in seqs]
        group = chance.random() < 0.2, chance.choice("ab"), chance.choice(BUCKETS)
        block = encoded(messages, key=group[1], bucket=group[2], quarantine=group[0], created=CREATED)
        put(tmp_path, block)
        for message in messages:
            groups[message].add((group[0], "" if group[0] else group[1], group[2]))
            paths[message].add(block.name.path)
    found = surveyed(tmp_path, life).copies
    sides = {message: Counter(aside for aside, _, _ in held) for message, held in groups.items()}
    twice = sorted(message for message, count in sides.items() if max(count.values()) > 1)
    assert [(each.seq, microseconds_of(each.time)) for each in found.listed] == twice
    assert found.read_twice == len(twice) > 0
    assert found.also_quarantined == sum(len(count) == 2 for count in sides.values())
    for each in found.listed:
        held = groups[each.seq, microseconds_of(each.time)]
        assert set(each.paths) <= paths[each.seq, microseconds_of(each.time)]
        assert len(each.paths) == len(held)


def test_no_object_is_read_again_where_none_has_a_sequence_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "positions", lambda *_: pytest.fail("it was read again"))
    for key, seqs in (("a", (1, 3, 5)), ("b", (2, 4, 6)), ("b", (8, 9, 11))):
        put(tmp_path, encoded([(seq, NOW + seq) for seq in seqs], key=key))
    assert surveyed(tmp_path).copies.read_twice == 0


@pytest.mark.parametrize(("error", "unread"), [(VanishedError("gone"), 0), (StoreError("away"), 1)])
def test_an_object_that_cannot_be_read_again_is_told_unless_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError, unread: int
) -> None:
    messages = [(seq, NOW + seq) for seq in (1, 3, 5)]
    names = [encoded(messages, key=key).name for key in "ab"]
    for key in "ab":
        put(tmp_path, encoded(messages, key=key))
    real = copies.positions

    def positions(
        shelf: ArchiveFiles, file: File, name: ObjectName, life: Incarnation | None, writer: UserWriter | None
    ) -> object:
        if name == names[1]:
            raise error
        return real(shelf, file, name, life, writer)

    monkeypatch.setattr(copies, "positions", positions)
    found = surveyed(tmp_path).copies
    assert (found.read_twice, found.unread) == (0, unread)


def test_copies_beyond_those_that_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_COPIES", 10)
    for key in "ab":
        put(tmp_path, encoded([(seq, NOW + seq) for seq in range(1, 100)], key=key))
    found = surveyed(tmp_path).copies
    assert ([each.seq for each in found.listed], found.read_twice) == (list(range(1, 11)), 99)
