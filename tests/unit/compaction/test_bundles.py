"""Compaction of bundles, also beside objects under keys: no message is lost or read twice, whatever happens."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.compaction import unit as work
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import OPEN, SEVERAL
from jetcapture_py.compaction.unit import Failed, Skipped
from jetcapture_py.store.archive import ArchiveFiles
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import lay_out
from tests.unit.compaction.test_unit import compacted, merged, stored, write


def test_the_rows_of_bundles_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(64):
        seqs = range(key, 640, 64)
        Archive(tmp_path, 1).write(seqs, f"k{key:02}", payloads=[random.Random(seq).randbytes(50_000) for seq in seqs])
    held: list[int] = []
    named: list[Path] = []
    read_rows, rows_of = work.read_rows, Files.rows
    temporary = tmp_path.with_name(f"{tmp_path.name}-temporary")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def look(files: Files, *part: Any, **how: Any) -> pa.Table:
        named.extend(temporary.iterdir())
        return rows_of(files, *part, **how)

    def watched(*part: Any, **how: Any) -> pa.Table:
        before = pa.total_allocated_bytes()
        table = read_rows(*part, **how)
        held.append(pa.total_allocated_bytes() - before)
        return table

    monkeypatch.setattr(work, "read_rows", watched)
    monkeypatch.setattr(Files, "rows", look)
    outcomes = compacted(Files(ArchiveFiles(f"file://{tmp_path}", {})), 12 << 20)
    assert len(merged(outcomes)) == len(outcomes) == 1
    assert sum(name.rows for name in stored(Archive(tmp_path))) == 640
    assert len(stored(Archive(tmp_path))) == 3
    assert max(held) < 1 << 20, "of 32 MB"
    assert named == [], "a compaction that is killed leaves no rows in a temporary file"


def test_an_unreadable_object_may_be_of_a_longer_bucket_that_is_still_open(tmp_path: Path) -> None:
    for seq in range(3):
        (name,) = lay_out(tmp_path, {(seq, HOUR * 1_000_000 + seq): "k"}, 4, bucket=HOUR)
    (tmp_path / name.path).write_bytes(b"PAR1PAR1")
    failed, left = compacted(Files(ArchiveFiles(f"file://{tmp_path}", {})), 1 << 20, closed=HOUR + 7200.0)
    assert (type(failed), left) == (Failed, Skipped(OPEN))
    assert len(list(tmp_path.rglob("*.parquet"))) == 3


def test_objects_of_different_numbers_of_bundles_are_not_merged_with_one_another(tmp_path: Path) -> None:
    key = next(key for key in "abcdefgh" if bundle_of(key, 4) == bundle_of(key, 8))
    for seqs, bundles in (([1], 4), ([2], 4), ([1, 4], 8)):
        write(Archive(tmp_path, bundles), key, {(seq, 0, None) for seq in seqs})
    outcomes = compacted(Files(ArchiveFiles(f"file://{tmp_path}", {})), 1 << 20)
    assert outcomes == [Skipped(SEVERAL), *merged(outcomes)]
    assert len(outcomes) == 2
    metadata = [pq.read_metadata(tmp_path / name.path) for name in stored(Archive(tmp_path))]
    assert sorted(footer.entries(each.metadata)[layout.BUNDLES] for each in metadata) == ["4", "8"]
