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


MIRROR = Incarnation.of(CREATED, mirror=True)
MERGED = f"{BEFORE},{CREATED}"
HOLDS: list[tuple[Incarnation, str, int, int, bool | None]] = [
    (RECREATED, "", OLDEST, SINCE - 1, False),
    (RECREATED, "", SINCE, SINCE + 5, True),
    (RECREATED, "", OLDEST, SINCE, None),
    (RECREATED, MERGED, OLDEST, SINCE, None),
    (RESTORED, BEFORE, OLDEST, SINCE - 1, None),
    (RESTORED, BEFORE, OLDEST - 9, OLDEST - 1, False),
    (RESTORED, CREATED, OLDEST - 9, OLDEST - 1, True),
    (MIRROR, CREATED, OLDEST, SINCE, True),
    (MIRROR, "", OLDEST, SINCE, True),
    (MIRROR, BEFORE, OLDEST, SINCE, False),
    (MIRROR, MERGED, OLDEST, SINCE, True),
    (MIRROR, f"{BEFORE},2026-05-01T11:30:00Z", OLDEST, SINCE, False),
]
"""Incarnation, creation times in an object's footer, its oldest and newest message, whether it is of the incarnation;
None if its rows decide."""


def included(life: Incarnation, *messages: tuple[int, int]) -> list[bool]:
    seqs, times = np.array(messages, np.int64).T
    inside: list[bool] = life.includes(seqs, times).tolist()
    return inside


def test_a_recreated_stream_has_only_younger_messages_and_a_restored_one_those_of_the_backup() -> None:
    assert included(RECREATED, (1, SINCE - 1), (1, SINCE)) == [False, True]
    assert included(RESTORED, (1, OLDEST), (3, SINCE - 1), (4, SINCE)) == [True, True, True]
    assert included(RESTORED, (4, SINCE - 1), (1, OLDEST - 1)) == [False, False], "after the backup, or before it all"


def test_an_object_is_of_an_incarnation_by_its_footer_and_times_or_by_its_rows() -> None:
    for life, created, oldest, newest, expected in HOLDS:
        assert life.holds(created, oldest, newest) is expected, (life, created)


EXPIRED: list[tuple[Incarnation | None, str, int, list[int]]] = [
    (RECREATED, CREATED, 0, [1, 2, 7]),
    (RECREATED, BEFORE, 0, []),
    (RECREATED, "", 0, [1, 2, 7]),
    (RECREATED, "", -1, []),
    (RESTORED, "", -1, [1, 2]),
    (RESTORED, BEFORE, -1, [1, 2]),
    (MIRROR, "", -1, [1, 2, 7]),
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
