"""Expired messages of a stream that was restored from a backup, or recreated, are told from those before it."""

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
RESTORED = Incarnation.of(CREATED, mirror=False, restored=3, oldest=microseconds_of(parse_time(BEFORE)))
RECREATED = Incarnation.of(CREATED, mirror=False)
MIRROR = Incarnation.of(CREATED, mirror=True)
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
