"""A listing for a selection leaves out what the selection's times exclude, and nothing else."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.reading.plan import list_objects
from jetcapture_py.reading.selection import Selection
from jetcapture_py.store.archive import ArchiveFiles

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def files(tmp_path: Path) -> ArchiveFiles:
    """An archive with an object an hour of four days, each fifth one in a bucket of event time."""
    for hour in range(96):
        bucket, seq = int((NOON + timedelta(hours=hour - 48)).timestamp()), hour + 1
        where: dict[str, Any] = {"stream": "ORDERS", "key": str(hour % 3), "bucket": bucket, "digest": "0" * 16}
        name = ObjectName(**where, first_seq=seq, last_seq=seq, rows=1, event_time=hour % 5 == 0)
        (tmp_path / name.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name.path).touch()
    return ArchiveFiles(str(tmp_path), {})


TIMES: list[dict[str, datetime]] = [
    {},
    {"start": NOON, "end": NOON + timedelta(hours=2)},
    {"start": NOON + timedelta(microseconds=1), "end": NOON + timedelta(microseconds=2)},
    {"start": NOON + timedelta(days=365)},
    {"event_start": NOON, "event_end": NOON + timedelta(hours=1)},
    {"start": NOON, "event_end": NOON},
    {"start": datetime.min.replace(tzinfo=UTC), "end": datetime.max.replace(tzinfo=UTC)},
]


def test_a_listing_for_a_selection_has_what_may_be_needed(files: ArchiveFiles) -> None:
    for times in TIMES:
        selection = Selection(**times)
        every, some = list_objects(files, "ORDERS"), list_objects(files, "ORDERS", selection)
        needed = [name for name in every if selection.may_hold_name(name)]
        assert [name for name in some if selection.may_hold_name(name)] == needed
        assert len(some) <= len(needed) + 2  # names have whole seconds


def test_a_directory_is_listed_or_an_error_and_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("S/key=a/date=x/1.parquet", "S/2.parquet", "T/3.parquet"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"12345"[: int(path[-9])])
    archive = ArchiveFiles(str(tmp_path), {})
    files = {file.path: file for file in archive.below("S")}
    assert {path: file.size for path, file in files.items()} == {"S/key=a/date=x/1.parquet": 1, "S/2.parquet": 2}
    assert files["S/2.parquet"].modified == (tmp_path / "S/2.parquet").stat().st_mtime
    assert list(archive.below("none")) == []
    monkeypatch.chdir(tmp_path)
    for part in ("S", *["x" * 250] * 18):  # a path that is too long for the system, also for root
        Path(part).mkdir(exist_ok=True)
        os.chdir(part)
    Path("1.parquet").touch()
    os.chdir(tmp_path)
    with pytest.raises(JetcaptureError, match=r"^cannot list .*File name too long"):
        list(archive.below("S"))
