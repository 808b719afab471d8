"""Tombstones, as an erasure writes them before it rewrites objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Tombstone
from jetcapture_py.config.units import microseconds_of
from jetcapture_py.store import LocalStore, change_note
from tests.support.running import STREAM


def bury(root: Path, messages: Iterable[Mapping[str, Any]]) -> Tombstone:
    """Write a tombstone of these rows of an archive."""
    pairs = [(row[layout.SEQ], microseconds_of(row[layout.TIMESTAMP])) for row in messages]
    seqs, times = np.array(pairs, np.int64).reshape(-1, 2).T
    tombstone = Tombstone.of(STREAM, seqs, times, by="ops@host", reason="a customer asked for it")
    change_note(LocalStore(str(root)), tombstone.path, lambda _: tombstone.encode())
    return tombstone
