"""Units are compacted at the same time as far as the memory allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.memory import MemoryBudget
from jetcapture_py.compaction.plan import Source
from jetcapture_py.compaction.unit import CompactionSpec, Merged
from jetcapture_py.maintain import compact as maintained
from jetcapture_py.maintain.compact import Compaction, CompactionSettings, compact_in_threads
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.archives import Archive


def test_work_that_needs_more_than_there_is_gets_all_of_it() -> None:
    budget = MemoryBudget(100)
    with budget.taken(1000):
        assert budget._free == 0
    assert budget._free == budget.size == 50


@pytest.mark.parametrize(("units_at_once", "memory"), [(1, 1 << 10), (3, 1 << 30)], ids=["little", "plenty"])
def test_as_many_units_are_compacted_at_the_same_time_as_fit_in_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units_at_once: int, memory: int
) -> None:
    archive = Archive(tmp_path)
    for number in range(12):
        archive.write([2 * number + 1, 2 * number + 2], "abc"[number % 3])
    running, most, all_run = 0, 0, threading.Barrier(units_at_once)
    lock = threading.Lock()

    def compact_unit(_files: Files, _spec: CompactionSpec, sources: Sequence[Source]) -> list[Merged]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_run.wait(60)
        with lock:
            running -= 1
        return [Merged(key=sources[0].name.key, bucket=sources[0].name.bucket, bundle="", objects=len(sources), size=0)]

    monkeypatch.setattr(maintained, "compact_unit", compact_unit)
    monkeypatch.setattr(maintained, "_cores", lambda: 3)
    files, left = ArchiveFiles(archive.url, {}), []
    compaction = Compaction(files, "ORDERS", CompactionSettings(target=1 << 20, after=0, grace=0))
    compact_in_threads(files, compaction, memory, progress=lambda objects, _: left.append(objects))
    assert most == units_at_once
    assert left == [12, 8, 4, 0]
    assert sorted(str(merged.key) for merged in compaction.merged) == ["a", "b", "c"]


def test_no_object_gets_more_rows_than_the_memory_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path)
    for first in range(0, 500, 10):
        archive.write([*range(first + 1, first + 11)], "a")
    monkeypatch.setattr(maintained, "_MIN_ROWS", 100)
    files = ArchiveFiles(archive.url, {})
    for expected in (1, 0):  # a second pass does nothing
        compaction = Compaction(files, "ORDERS", CompactionSettings(target=1 << 20, after=0, grace=0))
        compact_in_threads(files, compaction, 1 << 10)
        assert len(compaction.outcomes) == expected
        compaction.remove()
        rows = [source.name.rows for source in Files(files).find(["ORDERS"])]
        assert (len(rows), sum(rows), max(rows) < 150) == (5, 500, True)


def test_no_unit_is_begun_after_the_end(tmp_path: Path) -> None:
    archive, stop = Archive(tmp_path), threading.Event()
    for number in range(4):
        archive.write([number + 1], "a")
    stop.set()
    files = ArchiveFiles(archive.url, {})
    compaction = Compaction(files, "ORDERS", CompactionSettings(target=1 << 20, after=0, grace=0))
    compact_in_threads(files, compaction, 1 << 30, stop=stop)
    assert compaction.outcomes == []
    assert len(list(tmp_path.rglob("*.parquet"))) == 4
