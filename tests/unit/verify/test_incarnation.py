"""Messages of a stream that was restored from a backup, or recreated, are told from those of the stream before it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np

from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.config.units import microseconds_of, parse_time
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.verify.scope import Removed

BEFORE, CREATED = "2026-05-01T11:00:00Z", "2026-05-01T12:00:00Z"
OLDEST, SINCE = (microseconds_of(parse_time(text)) for text in (BEFORE, CREATED))
RESTORED = Incarnation.of(CREATED, mirror=False, restored=3, oldest=OLDEST)
RECREATED = Incarnation.of(CREATED, mirror=False)


def included(life: Incarnation, *messages: tuple[int, int]) -> list[bool]:
    seqs, times = np.array(messages, np.int64).T
    found: list[bool] = life.includes(seqs, times).tolist()
    return found


def test_a_recreated_stream_has_only_messages_that_are_as_young() -> None:
    assert included(RECREATED, (1, SINCE - 1), (1, SINCE)) == [False, True]
    assert RECREATED.holds("", OLDEST, SINCE - 1) is False
    assert RECREATED.holds("", SINCE, SINCE + 5) is True
    assert RECREATED.holds("", OLDEST, SINCE) is None


def test_a_restored_stream_also_has_those_that_were_in_the_backup() -> None:
    assert included(RESTORED, (1, OLDEST), (3, SINCE - 1), (4, SINCE)) == [True, True, True]
    assert RESTORED.holds(BEFORE, OLDEST, SINCE - 1) is None, "its rows decide"


def test_what_the_earlier_stream_received_after_the_backup_was_made_is_not_in_the_restored_one() -> None:
    assert included(RESTORED, (4, SINCE - 1)) == [False]


def test_a_stream_before_the_one_that_was_backed_up_does_not_count() -> None:
    assert included(RESTORED, (1, OLDEST - 1)) == [False]
    assert RESTORED.holds(BEFORE, OLDEST - 9, OLDEST - 1) is False


def test_an_objects_footer_decides_where_it_names_the_stream() -> None:
    assert RESTORED.holds(CREATED, OLDEST - 9, OLDEST - 1) is True
    mirror = Incarnation.of(CREATED, mirror=True)
    assert [mirror.holds(created, OLDEST, SINCE) for created in (CREATED, "", BEFORE)] == [True, True, False]


def test_what_compaction_has_merged_belongs_to_a_mirror_that_was_created_again() -> None:
    mirror, merged = Incarnation.of(CREATED, mirror=True), f"{BEFORE},{CREATED}"
    assert mirror.holds(merged, OLDEST, SINCE) is True
    assert mirror.holds(f"{BEFORE},2026-05-01T11:30:00Z", OLDEST, SINCE) is False
    assert RECREATED.holds(merged, OLDEST, SINCE) is None, "its rows decide"


EXPIRED: list[tuple[Incarnation | None, str, int, list[int]]] = [
    (RECREATED, CREATED, 0, [1, 2, 7]),
    (RECREATED, BEFORE, 0, []),
    (RECREATED, "", 0, [1, 2, 7]),
    (RECREATED, "", -1, []),
    (RESTORED, "", -1, [1, 2]),
    (RESTORED, BEFORE, -1, [1, 2]),
    (Incarnation.of(CREATED, mirror=True), "", -1, [1, 2, 7]),
    (None, "", -1, [1, 2, 7]),
]
"""Incarnation, creation time of the objects that expired, age of the oldest message, sequences that count."""


def test_expired_messages_of_an_unknown_incarnation_count_only_if_none_is_older_than_the_stream(tmp_path: Path) -> None:
    since = parse_time(CREATED)
    path = tmp_path / expired_path("ORDERS")
    path.parent.mkdir()
    for incarnation, created, oldest, expected in EXPIRED:
        note = Expired(stream="ORDERS", until=since)
        note = note.with_messages(created, np.array([1, 2, 7]), since + timedelta(seconds=oldest), since)
        path.write_bytes(note.encode())
        removed = Removed.read(ArchiveFiles(str(tmp_path), {}), "ORDERS", incarnation)
        assert removed.expired.all().tolist() == expected, (incarnation, created, oldest)
