"""Copies in different groups against what a reader returns that goes by the objects' names."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify import ranges, scan
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.findings import Kind, SequenceRange
from jetcapture_py.verify.scan import ArchiveScan, survey
from tests.support.archives import Identity, encoded, put

CREATED = "2024-01-01T00:00:00Z"
LIFE = Incarnation.of(CREATED, mirror=False)
NOW = LIFE.since + 10**9
BUCKETS = (1_700_000_100, 1_700_001_000)


def count(found: ArchiveScan, kind: Kind) -> int:
    return sum(each.count for each in found.copies.findings if each.kind is kind)


def time_of(part: SequenceRange) -> int:
    assert part.first_time is not None
    return microseconds_of(part.first_time)


def twice_read(found: ArchiveScan) -> list[SequenceRange]:
    return [part for each in found.copies.findings for part in each.ranges]


def surveyed(root: Path, life: Incarnation | None = LIFE) -> ArchiveScan:
    return survey(ObjectExaminer(ArchiveFiles(str(root), {}), life), "ORDERS", 1 << 40)


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_counted_as_a_reader_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
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
    sides = {message: Counter(aside for aside, _, _ in held) for message, held in groups.items()}
    twice = sorted(message for message, count in sides.items() if max(count.values()) > 1)
    for incarnation in (LIFE, None):
        scan_result = surveyed(tmp_path, incarnation)
        assert [(part.first, time_of(part)) for part in twice_read(scan_result)] == twice
        assert count(scan_result, Kind.READ_TWICE) == len(twice) > 0
        assert count(scan_result, Kind.QUARANTINE) == sum(len(count) == 2 for count in sides.values())
        for part in twice_read(scan_result):
            message = part.first, time_of(part)
            assert set(part.paths) <= paths[message]
            assert len(part.paths) == len(groups[message])


@pytest.mark.parametrize(("error", "unread"), [(VanishedError("gone"), 0), (StoreError("away"), 1)])
def test_an_object_that_cannot_be_read_again_is_told_unless_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError, unread: int
) -> None:
    messages = [(seq, NOW + seq) for seq in (1, 3, 5)]
    names = [encoded(messages, key=key).name for key in "ab"]
    for key in "ab":
        put(tmp_path, encoded(messages, key=key))
    real = ObjectExaminer.positions

    def positions(reader: ObjectExaminer, file: File, name: ObjectName) -> object:
        if name == names[1]:
            raise error
        return real(reader, file, name)

    monkeypatch.setattr(ObjectExaminer, "positions", positions)
    found = surveyed(tmp_path)
    told = [f"{unread} object that may hold copies: they could not be reread"] * unread
    assert (count(found, Kind.READ_TWICE), [each.summary for each in found.copies.findings]) == (0, told)


def test_copies_beyond_those_that_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_COPIES", 10)
    for key in "ab":
        put(tmp_path, encoded([(seq, NOW + seq) for seq in range(1, 100)], key=key))
    found = surveyed(tmp_path)
    assert ([each.first for each in twice_read(found)], count(found, Kind.READ_TWICE)) == (list(range(1, 11)), 99)
