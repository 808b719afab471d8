"""Compaction of bundles, also beside objects under keys: no message is lost or read twice, whatever happens."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import bundles as bundles_of
from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.compaction import merge
from jetcapture_py.compaction import unit as work
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import OPEN, SEVERAL, Unit
from jetcapture_py.compaction.unit import Failed, Skipped
from jetcapture_py.store.archive import ArchiveFiles
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import lay_out, write_parquet
from tests.unit.compaction.test_unit import compacted, merged, stored, write


def test_merged_bundles_have_row_groups_that_let_readers_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles_of, "MIN_ROWS", 20)
    chance = random.Random(1)
    laid = {(seq, HOUR * 1_000_000 + seq): f"k{chance.randrange(300):03}" for seq in range(1, 3001)}
    for first in range(1, 3001, 100):
        lay_out(tmp_path, {each: key for each, key in laid.items() if first <= each[0] < first + 100}, 4, bucket=HOUR)
    outcomes = compacted(Files(ArchiveFiles(f"file://{tmp_path}", {})), 1 << 20, closed=HOUR + 3600)
    assert len(outcomes) == len(stored(Archive(tmp_path))) == 4
    assert {each.bundle for each in merged(outcomes)} == set("0123")
    found: dict[int, str] = {}
    for name in stored(Archive(tmp_path)):
        file = pq.ParquetFile(tmp_path / name.path)
        rows = file.read([layout.SEQ, layout.KEY, layout.PAYLOAD]).to_pylist()
        found |= {row[layout.SEQ]: row[layout.KEY] for row in rows}
        assert all(row[layout.PAYLOAD] == b"%d" % row[layout.SEQ] for row in rows)
        assert file.num_row_groups >= 8
        assert file.metadata.row_group(0).column(0).has_offset_index
        entries = footer.entries(file.metadata.metadata)
        assert (entries["bundles"], entries["sealed_by"], entries.get("key")) == ("4", "compact", None)
        of_key = [footer.group_bounds(file.metadata.row_group(at), layout.KEY) for at in range(file.num_row_groups)]
        keys = sorted({row[layout.KEY] for row in rows})
        middle = keys[len(keys) // 2]
        assert sum(low <= middle <= high for low, high in filter(None, of_key)) <= file.num_row_groups / 8 + 1
    assert found == {seq: key for (seq, _), key in laid.items()}


def test_the_rows_of_bundles_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(64):
        rows = {(seq, HOUR * 1_000_000 + seq): f"k{key:02}" for seq in range(key, 640, 64)}
        for name in lay_out(tmp_path, rows, 1, bucket=HOUR):
            path = tmp_path / name.path
            table = pq.ParquetFile(path).read()
            payloads = pa.array([random.Random(seq).randbytes(50_000) for seq, _ in rows], pa.binary())
            table = table.set_column(table.schema.get_field_index(layout.PAYLOAD), layout.PAYLOAD, payloads)
            write_parquet(table, path)
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


def test_values_that_take_few_bytes_in_objects_are_not_held_in_memory_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(1, 641, 10):
        rows = {(seq, HOUR * 1_000_000 + seq): "k" for seq in range(first, first + 10)}
        for name in lay_out(tmp_path, rows, 1, bucket=HOUR):
            path = tmp_path / name.path
            table = pq.ParquetFile(path).read()
            payloads = pa.array([bytes(50_000)] * len(rows), pa.binary())
            table = table.set_column(table.schema.get_field_index(layout.PAYLOAD), layout.PAYLOAD, payloads)
            write_parquet(table, path)
    files, held, rows_of = Files(ArchiveFiles(f"file://{tmp_path}", {})), [0], Files.rows
    infos = [files.info(source) for source in files.find(["ORDERS"])]
    before = pa.total_allocated_bytes()

    def watched(files: Files, *part: Any, **how: Any) -> pa.Table:
        held.append(pa.total_allocated_bytes() - before)
        return rows_of(files, *part, **how)

    monkeypatch.setattr(Files, "rows", watched)
    monkeypatch.setattr(merge, "_PIECE_ROWS", 40)
    assert merge.read_rows(files, Unit(infos), infos[0].schema, 1, 641, in_file=True).num_rows == 640
    assert max(held) < 8 << 20, "of 32 MB"


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
