"""`read_archive` without Spark: its arguments, what it fetches, and objects that vanish."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import duckdb
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading.arrow import PlanReader, read_archive
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Bound
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles, File
from tests.support.archives import HOUR, Archive, merge, write_parquet

AGAIN = "read it again; maintain.compact.grace is how long a read may take"


def several(root: Path) -> tuple[Archive, list[ObjectName]]:
    """An archive of more objects than are read at the same time; the last two are of one key."""
    archive = Archive(root)
    stored: dict[str, Any] = {"metadata": {"stream_created": "2026-05-01T00:00:00Z"}}
    return archive, [archive.write([seq], f"key {min(seq, 39):02}", amount=[seq], **stored) for seq in range(1, 41)]


def test_what_drifts_reads_from_polars_duckdb_and_pandas(tmp_path: Path) -> None:
    objects: list[dict[str, list[Any]]] = [
        {"grown": [1], "ids": [2**53 + 1], "mixed": [1], "nested": [{"a": [1, None]}], "narrow": [1]},
        {"grown": [1.5], "ids": [0.5], "mixed": ["x"], "nested": ["y"], "narrow": [2**40], "added": [True]},
    ]
    for number, fields in enumerate(objects):
        narrow = pa.array(fields.pop("narrow"), pa.int64() if number else pa.int32())
        Archive(tmp_path).write([number + 1], "eu", columns={**fields, "narrow": narrow})

    names = ["grown", "ids", "mixed", "nested", "narrow", "added", "key"]
    expected = [
        (1.0, "9007199254740993", "1", '{"a":[1,null]}', 1, None, "eu"),
        (1.5, "0.5", "x", "y", 2**40, True, "eu"),
    ]

    def read() -> pa.RecordBatchReader:
        return read_archive(str(tmp_path), "ORDERS", columns=names)

    archive = read()
    assert duckdb.sql("SELECT * FROM archive ORDER BY grown").fetchall() == expected
    assert cast("pl.DataFrame", pl.from_arrow(read())).sort("grown").rows() == expected
    frame = read().read_pandas().sort_values("grown").astype(object)
    assert list(frame.where(frame.notna(), None).itertuples(index=False, name=None)) == expected
    archive.close()


def test_arguments_may_be_a_path_and_any_collection_of_columns_and_are_checked(tmp_path: Path) -> None:
    Archive(tmp_path).write([1, 2], "eu", columns={"amount": [5, 6]})
    for columns in ("amount", iter(["amount"]), {"amount"}):
        assert read_archive(tmp_path, "ORDERS", columns=cast("Any", columns)).read_all().to_pydict() == {
            "amount": [5, 6]
        }
    for stream, wrong, expected in (
        ("ORDERS", [], "columns: expected at least one name"),
        ("ORDERS", [None], "columns: expected names, got nothing"),
        ("ORDERS", ["nope"], "has no column nope; it has .*_nats_payload, amount, key, date, hour"),
        ("", None, 'stream="": expected the name of a stream'),
        ("ORDERS/key=eu", None, "expected the name of a stream"),
    ):
        with pytest.raises(JetcaptureError, match=expected):
            read_archive(str(tmp_path), stream, columns=cast("Any", wrong))


def test_no_batch_is_larger_than_a_row_group_however_small_its_texts_are_when_encoded(tmp_path: Path) -> None:
    name = Archive(tmp_path).write([1], "eu")
    rows = 2000
    table = pa.table(
        {
            layout.SEQ: range(rows),
            layout.TIMESTAMP: pa.array(range(rows), pa.timestamp("us", "UTC")),
            layout.NANOS: pa.nulls(rows, pa.int16()),
            layout.KEY: ["eu"] * rows,
            "a.b": ["x" * 10_000] * rows,
        }
    ).replace_schema_metadata({"jetcapture.interval": "900"})
    write_parquet(table, tmp_path / name.path, row_group_size=100)
    batches = list(read_archive(tmp_path, "ORDERS", columns=["a.b"]))
    assert sum(batch.num_rows for batch in batches) == rows
    assert max(batch.nbytes for batch in batches) < 2 << 20


def test_objects_may_vanish_one_after_the_other_while_an_archive_is_planned_but_not_the_same_one_again() -> None:
    gone = iter([*range(20), None])

    def planned() -> str:
        if (number := next(gone)) is not None:
            raise VanishedError(f"{number} is gone")
        return "planned"

    assert retried(planned) == "planned"
    gone = iter([1] * 3)
    with pytest.raises(VanishedError):
        retried(planned)


def test_objects_that_vanish_before_the_first_batch_are_read_where_their_messages_are_then(tmp_path: Path) -> None:
    archive, names = several(tmp_path)
    reader = read_archive(tmp_path, "ORDERS", columns=[layout.SEQ])
    (tmp_path / names[0].path).unlink()
    archive.write([1, 41], "key 01")
    merge(archive.root, names[-2:])
    assert sorted(reader.read_all().column(0).to_pylist()) == list(range(1, 42))


def test_a_read_whose_objects_vanish_after_the_first_batch_ends_and_says_how_long_it_may_take(tmp_path: Path) -> None:
    archive, names = several(tmp_path)
    reader = read_archive(tmp_path, "ORDERS")
    reader.read_next_batch()
    merge(archive.root, names[-2:])
    gone = rf"^file://{tmp_path}/ORDERS/key=key 39/.* is gone, removed by maintenance: {AGAIN}$"
    with pytest.raises(VanishedError, match=gone):
        reader.read_all()
    assert len(read_archive(tmp_path, "ORDERS").read_all()) == 40


def test_columns_that_change_before_the_first_batch_are_an_error_that_names_them(tmp_path: Path) -> None:
    archive, names = several(tmp_path)
    reader = read_archive(tmp_path, "ORDERS")
    (tmp_path / names[0].path).unlink()
    archive.write([1], "key 01", timestamps=[5], amount=["one"], more=[1])
    with pytest.raises(JetcaptureError, match=r"before the first row was read \(amount, more\): read it again"):
        reader.read_all()


def test_an_object_that_is_merged_before_the_first_batch_may_change_the_order_of_fields(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    parts = [{"b": 1}, {"a": 1, "c": 2}, {"c": 2, "b": 7}]
    names = [archive.write([seq], "eu", nested=[part]) for seq, part in enumerate(parts)]
    reader = read_archive(tmp_path, "ORDERS", columns=["nested"])
    archive.write([0, 2], "eu", nested=[parts[0], parts[2]])
    for name in (names[0], names[2]):
        (tmp_path / name.path).unlink()
    rows = reader.read_all()["nested"].to_pylist()
    assert sorted(rows, key=str) == sorted(({"b": None, "a": None, "c": None} | part for part in parts), key=str)


def test_rows_of_a_message_that_come_before_the_first_batch_are_not_taken_for_copies(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    name = archive.write([1], columns={"amount": [1]})
    reader = read_archive(tmp_path, "ORDERS", columns=["amount"], dedupe="full")
    (tmp_path / name.path).unlink()
    archive.write([2, 2], columns={"amount": [1, 2], layout.ROW: pa.array([0, 1], pa.int32())})
    assert reader.read_all().to_pydict() == {"amount": [1, 2]}


def test_only_the_columns_and_row_groups_that_are_needed_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    count, target = 40_000, pa.BufferOutputStream()
    table = pa.table(
        {
            layout.SEQ: range(count),
            layout.TIMESTAMP: pa.array(range(count), pa.timestamp("us", "UTC")),
            layout.PAYLOAD: [uuid.uuid4().bytes * 20 for _ in range(count)],
        }
    )
    write_parquet(table, target, row_group_size=count // 4, compression="none", use_dictionary=False)

    name = ObjectName(
        stream="S", key=None, bucket=0, first_seq=0, last_seq=count - 1, rows=count, digest="0" * 16, quarantine=True
    )
    fsspec.filesystem("memory").pipe_file(f"/needed/{name.path}", target.getvalue().to_pybytes())
    files, fetch, sizes = ArchiveFiles("memory://needed", {}), ArchiveFiles.read, list[int]()

    def counted(files: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        data = fetch(files, file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ArchiveFiles, "read", counted)

    def read(columns: list[str], bound: Bound | None = None, ranges: list[tuple[int, int]] | None = None) -> Any:
        reader = PlanReader(
            files=files,
            table=Table([table.schema], quarantine=True, columns=None),
            columns=columns,
            bounds=[bound] if bound else [],
            keys=None,
        )
        sizes.clear()
        rows = sum(batch.num_rows for batch in reader.batches(files.at(name.path), name, ranges))
        return rows, sum(sizes)

    whole, columns, times = count * (8 + 8 + 320), table.schema.names, (layout.TIMESTAMP,)
    rows, fetched = read(columns)
    assert rows == count
    assert fetched > whole
    rows, fetched = read([layout.SEQ])
    assert rows == count
    assert fetched < whole / 20
    moment = datetime.fromtimestamp(0, UTC).replace(microsecond=count // 4)
    rows, fetched = read(columns, Bound(times, None, moment))
    assert rows == count // 4
    assert fetched < whole / 3
    rows, fetched = read(columns, Bound(times, moment, None))
    assert rows == count * 3 // 4
    assert fetched < whole * 0.8
    rows, fetched = read(columns, ranges=[(5, 6), (count - 1, count)])
    assert rows == 3
    assert fetched < whole * 0.6


def test_objects_outside_the_range_and_foreign_files_are_not_opened(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    directory = (tmp_path / archive.write([1]).path).parent
    for offset in (-48 * 3600, 3600):
        (tmp_path / archive.write([5], bucket=HOUR + offset).path).write_bytes(b"not Parquet")
    for foreign in (directory, directory.parent, directory.parents[1], tmp_path / "ORDERS"):
        (foreign / "notes.parquet").write_bytes(b"no")
    start = datetime.fromtimestamp(HOUR, UTC)
    table = read_archive(tmp_path, "ORDERS", start=start, end=start + timedelta(hours=1)).read_all()
    assert table[layout.SEQ].to_pylist() == [1]


def test_a_users_own_file_is_named_and_a_column_called_date_is_read(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.write([1], date=["in the file"])
    assert read_archive(tmp_path, "ORDERS", columns=["date"]).read_all().to_pylist() == [{"date": "2026-05-01"}]
    path = tmp_path / archive.write([2]).path
    pq.write_table(pq.read_table(path, partitioning=None), path)
    with pytest.raises(JetcaptureError, match=rf"{path.stem}.*: the checksum of its footer is wrong or missing"):
        read_archive(tmp_path, "ORDERS")


def test_an_empty_quarantine_is_a_table_without_rows(tmp_path: Path) -> None:
    Archive(tmp_path).write([1])
    table = read_archive(tmp_path, "ORDERS", quarantine=True, columns=["stage", "date"]).read_all()
    assert (table.num_rows, table.schema.names) == (0, ["stage", "date"])


def test_objects_that_come_or_are_replaced_while_they_are_planned_are_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(tmp_path)
    sources = [archive.write([1, 2]), archive.write([3])]
    infos = ArchiveFiles.infos

    def compacted(files: ArchiveFiles, objects: list[File], **more: Any) -> Any:
        archive.write([2, 3, 4], "b")  # too late for the first plan
        if [file.name for file in objects] == sources:
            archive.write([1, 2, 3])
            for source in sources:
                (tmp_path / source.path).unlink()
        return infos(files, objects, **more)

    monkeypatch.setattr(ArchiveFiles, "infos", compacted)
    found = read_archive(tmp_path, "ORDERS", columns=[layout.SEQ, "key"]).read_all().to_pylist()
    assert sorted((row["key"], row[layout.SEQ]) for row in found) == [
        *(("a", seq) for seq in (1, 2, 3)),
        *(("b", seq) for seq in (2, 3, 4)),
    ]
