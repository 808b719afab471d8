"""Compaction of bundles, also beside objects under keys: no message is lost or read twice, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import OPEN, SEVERAL
from jetcapture_py.compaction.unit import Failed, Skipped
from jetcapture_py.store.archive import ArchiveFiles
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import lay_out
from tests.unit.compaction.test_unit import compacted, merged, stored, write


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
