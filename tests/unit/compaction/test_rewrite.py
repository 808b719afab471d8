"""Messages are removed from objects, and every other row stays as it was, whatever else happens to the objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import REPLACING, Source
from jetcapture_py.compaction.rewrite import Rewritten, remove_replaced, rewrite
from jetcapture_py.compaction.unit import CompactionSpec, Merged, Outcome, Skipped, compact_unit
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import Removal, remove
from tests.integration.spark.conftest import HOUR, Archive
from tests.support.archives import encoded, lay_out, put, write_parquet

BUCKET = 1_700_000_100
AT = BUCKET * 1_000_000
SPEC = CompactionSpec(target=1 << 20, closed=BUCKET + 2 * 86_400.0)


def messages(*seqs: int) -> MessageSet:
    return MessageSet(np.array(seqs, np.int64), np.array(seqs, np.int64) + AT)


def store(root: Path, *seqs: int, **where: Any) -> ObjectName:
    block = encoded([(seq, AT + seq) for seq in seqs], bucket=BUCKET, **where)
    put(root, block)
    return block.name


def sources(root: Path) -> list[Source]:
    return Files(ArchiveFiles(str(root), {})).find(["ORDERS", f"{layout.QUARANTINE}/ORDERS"])


def without(root: Path, name: ObjectName, *seqs: int) -> Rewritten:
    (source,) = [source for source in sources(root) if source.name == name]
    return rewrite(ArchiveFiles(str(root), {}), source, messages(*seqs), "redecode")


def removed(root: Path, *done: Rewritten) -> int:
    count, errors = remove_replaced(ArchiveFiles(str(root), {}), done)
    assert not errors
    return count


def compacted(root: Path) -> Outcome:
    (outcome,) = compact_unit(Files(ArchiveFiles(str(root), {})), SPEC, sources(root))
    return outcome


def seqs(root: Path) -> list[int]:
    return sorted(read_archive(str(root), "ORDERS").read_all()[layout.SEQ].to_pylist())


@pytest.mark.parametrize("bundles", [0, 2])
def test_every_other_row_is_unchanged(tmp_path: Path, bundles: int) -> None:
    keys = {(seq, AT + seq): "abc"[seq % 3] for seq in range(1, 200)}
    names = lay_out(tmp_path, keys, bundles, bucket=BUCKET)
    before = read_archive(str(tmp_path), "ORDERS").read_all().sort_by(layout.SEQ)
    gone = [seq for seq in range(1, 200) if seq % 7 == 0]
    done = [without(tmp_path, name, *gone) for name in names]
    assert read_archive(str(tmp_path), "ORDERS").read_all().sort_by(layout.SEQ) == before
    assert removed(tmp_path, *done) == len(names)
    mask = np.isin(before[layout.SEQ].to_numpy(), gone)
    assert read_archive(str(tmp_path), "ORDERS").read_all().sort_by(layout.SEQ) == before.filter(pa.array(~mask))
    assert sum(each.dropped for each in done) == len(gone)


def test_values_that_are_no_numbers_are_equal(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    values = pa.array([[float("nan")], [1.0], None], pa.list_(pa.float64()))
    archive.write([1, 2, 3], "eu", columns={"v": values})
    (source,) = sources(tmp_path)
    gone = MessageSet(np.array([3]), np.array([HOUR * 1_000_000 + 3]))
    done = rewrite(ArchiveFiles(str(tmp_path), {}), source, gone, "x")
    assert done.target is not None
    table = pq.ParquetFile(tmp_path / done.target.path).read()
    assert (table[layout.KEY].to_pylist(), repr(table["v"].to_pylist())) == (["eu", "eu"], "[[nan], [1.0]]")


def test_an_object_of_which_nothing_is_left_is_removed(tmp_path: Path) -> None:
    name = store(tmp_path, 1, 2)
    other = store(tmp_path, 3)
    done = without(tmp_path, name, 1, 2)
    assert (done.target, done.dropped, removed(tmp_path, done)) == (None, 2, 1)
    assert [source.name for source in sources(tmp_path)] == [other]


def test_what_does_not_read_like_its_source_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = store(tmp_path, 1, 2, 3)
    other = encoded([(1, AT + 1), (2, AT + 2)], bucket=BUCKET, key="us")

    def put_other(_: Files, found: ObjectName, data: pa.Buffer) -> None:
        table = pq.ParquetFile(put(tmp_path, other)).read()
        metadata = pq.read_schema(pa.BufferReader(data)).metadata
        write_parquet(table.replace_schema_metadata(metadata), tmp_path / found.path)

    monkeypatch.setattr(Files, "put", put_other)
    with pytest.raises(JetcaptureError, match="does not match its source, which is kept"):
        without(tmp_path, name, 3)
    assert (tmp_path / name.path).exists()


def test_a_compaction_never_takes_the_object_for_a_copy_of_the_one_it_replaces(tmp_path: Path) -> None:
    old = store(tmp_path, *range(1, 50))
    done = without(tmp_path, old, 7)
    assert compacted(tmp_path) == Skipped(REPLACING)
    again = without(tmp_path, done.target or old, 9)  # the one that it replaced before counts as well
    assert removed(tmp_path, again) == 1
    assert compacted(tmp_path) == Skipped(REPLACING)
    assert removed(tmp_path, done) == 0  # what took its place is not there any more
    (tmp_path / old.path).unlink()
    store(tmp_path, *range(50, 60))
    outcome = compacted(tmp_path)
    assert isinstance(outcome, Merged)
    assert len(outcome.removable) == 2
    assert seqs(tmp_path) == [seq for seq in range(1, 60) if seq not in (7, 9)]


@pytest.mark.parametrize("changed", ["the object", "its holder"])
def test_of_two_that_would_remove_what_the_other_relies_on_only_the_first_does(tmp_path: Path, changed: str) -> None:
    """Also if what was read is there again, written later."""
    old = store(tmp_path, *range(1, 10))
    done = without(tmp_path, old, 9)
    assert done.removal is not None
    (holder,) = done.removal.holders
    back = Removal(target=holder, holders=[done.removal.target])
    files = ArchiveFiles(str(tmp_path), {})
    os.utime((done.removal.target if changed == "the object" else holder).place, (1, 1))
    (refused,) = remove(files, [done.removal])
    assert isinstance(refused, VanishedError)
    done = without(tmp_path, old, 9)
    assert removed(tmp_path, done) == 1
    (refused,) = remove(files, [back])
    assert isinstance(refused, VanishedError)
    assert seqs(tmp_path) == [*range(1, 9)]


def test_an_object_that_keeps_its_messages_is_replaced_in_place_whatever_its_row_groups(tmp_path: Path) -> None:
    name = store(tmp_path, *range(1, 100))
    path = tmp_path / name.path
    write_parquet(pq.ParquetFile(path).read(), path, row_group_size=30)
    (source,) = sources(tmp_path)

    def changed(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(layout.SUBJECT)
        subjects = pa.array(["other"] * rows.num_rows, rows.schema.field(index).type)
        return rows.set_column(index, rows.schema.field(index), subjects)

    done = rewrite(ArchiveFiles(str(tmp_path), {}), source, messages(), "redecode", changed)
    assert (done.target, done.dropped, done.removal) == (name, 0, None)
    stored = read_archive(str(tmp_path), "ORDERS").read_all()
    assert stored[layout.SEQ].to_pylist() == list(range(1, 100))
    assert set(stored[layout.SUBJECT].to_pylist()) == {"other"}
