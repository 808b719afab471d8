"""`read_archive` without Spark: its arguments, what it fetches, and objects that vanish."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import ConfigError, JetcaptureError, VanishedError
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


def test_columns_have_the_types_that_were_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(tmp_path)
    archive.write([1, 2], id=[1, 2])
    archive.write([3, 4, 5], id=["3", "n/a", None])
    archive.write([6], other=["x"])
    for types in ({"ID": pa.int64()}, {"id": "BIGINT"}):
        rows = read_archive(tmp_path, "ORDERS", types=cast("Any", types), columns=["_nats_seq", "id"]).read_all()
        assert rows.schema.field("id").type == pa.int64()
        assert dict(zip(*rows.to_pydict().values(), strict=True)) == {1: 1, 2: 2, 3: 3, 4: None, 5: None, 6: None}
        assert caplog.messages == ["values that do not convert are null: id (1 not int64)"]
        caplog.clear()
    assert read_archive(tmp_path, "ORDERS", types={"other": "text"}, columns=["id"]).read_all().num_rows == 6
    for wrong, expected in (
        ({"nope": "bigint"}, "^the archive has no column nope; it has .*_nats_payload, id, other"),
        ({"id": "nope"}, "^type of column id: unknown type 'nope'"),
        ({"id": 5}, "^type of column id: expected the type of a single value, such as int64, got 5"),
        ({"id": pa.list_(pa.int64())}, "^type of column id: expected the type of a single value"),
        ({"id": pa.timestamp("ns")}, r"^type of column id: column id is timestamp\[ns\]"),
        ({"key": "bigint"}, "^type of column key: this column has the same type in every archive"),
        ({"_nats_seq": "text"}, "^type of column _nats_seq: this column has the same type"),
    ):
        with pytest.raises(ConfigError, match=expected):
            read_archive(tmp_path, "ORDERS", types=cast("Any", wrong))


def test_integers_beside_floats_inside_columns_are_doubles_if_these_hold_them_exactly(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    nested = {"of": [{"n": 1, "t": "a"}], "in": [[1, 2]], "large": [{"n": 2**53 + 1}], "other": [{"n": 1}]}
    archive.write([1], columns=nested)
    archive.write([2], columns={"of": [{"n": 0.5}], "in": [[0.5]], "large": [{"n": 0.5}], "other": [{"n": "x"}]})
    table = read_archive(tmp_path, "ORDERS", columns=["of", "in", "large", "other"]).read_all()
    first, second = sorted(table.to_pylist(), key=str, reverse=True)
    assert (first["of"], first["in"]) == ({"n": 1.0, "t": "a"}, [1.0, 2.0])
    assert (second["of"], second["in"]) == ({"n": 0.5, "t": None}, [0.5])
    assert (first["large"], second["large"]) == ('{"n":9007199254740993}', '{"n":0.5}')
    assert (first["other"], second["other"]) == ('{"n":1}', '{"n":"x"}')


def test_no_batch_is_larger_than_a_row_group_however_small_its_texts_are_when_encoded(tmp_path: Path) -> None:
    name = Archive(tmp_path).write([1], "eu")
    rows = 2000
    times = pa.array(range(rows), pa.timestamp("us", "UTC"))
    columns = {layout.SEQ: range(rows), layout.TIMESTAMP: times, layout.NANOS: pa.nulls(rows, pa.int16())}
    table = pa.table({**columns, layout.KEY: ["eu"] * rows, "a.b": ["x" * 10_000] * rows})
    table = table.replace_schema_metadata({"jetcapture.interval": "900"})
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


def test_only_the_columns_and_row_groups_that_are_needed_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    count, target = 40_000, pa.BufferOutputStream()
    times, payloads = pa.array(range(count), pa.timestamp("us", "UTC")), [uuid.uuid4().bytes * 20 for _ in range(count)]
    table = pa.table({layout.SEQ: range(count), layout.TIMESTAMP: times, layout.PAYLOAD: payloads})
    write_parquet(table, target, row_group_size=count // 4, compression="none", use_dictionary=False)
    where: dict[str, Any] = {"stream": "S", "key": None, "bucket": 0, "digest": "0" * 16, "quarantine": True}
    name = ObjectName(first_seq=0, last_seq=count - 1, rows=count, **where)
    fsspec.filesystem("memory").pipe_file(f"/needed/{name.path}", target.getvalue().to_pybytes())
    files, fetch, sizes = ArchiveFiles("memory://needed", {}), ArchiveFiles.read, list[int]()

    def counted(files: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        data = fetch(files, file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ArchiveFiles, "read", counted)

    every = Table([table.schema], quarantine=True, columns=None)
    whole, columns = count * (8 + 8 + 320), table.schema.names
    moment = datetime.fromtimestamp(0, UTC).replace(microsecond=count // 4)
    before, after = Bound((layout.TIMESTAMP,), None, moment), Bound((layout.TIMESTAMP,), moment, None)
    cases: list[tuple[list[str], list[Bound], list[tuple[int, int]] | None, int, float]] = [
        (columns, [], None, count, 1.1),
        ([layout.SEQ], [], None, count, 0.05),
        (columns, [before], None, count // 4, 0.33),
        (columns, [after], None, count * 3 // 4, 0.8),
        (columns, [], [(5, 6), (count - 1, count)], 3, 0.6),
    ]
    for names, bounds, ranges, expected, share in cases:
        reader = PlanReader(files=files, table=every, columns=names, bounds=bounds, keys=None)
        sizes.clear()
        assert sum(batch.num_rows for batch in reader.batches(files.at(name.path), name, ranges)) == expected
        assert (whole if share > 1 else 0) < sum(sizes) < whole * share


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
    empty = read_archive(tmp_path, "ORDERS", quarantine=True, columns=["stage", "date"]).read_all()
    assert (empty.num_rows, empty.schema.names) == (0, ["stage", "date"])
    path = tmp_path / archive.write([2]).path
    pq.write_table(pq.read_table(path, partitioning=None), path)
    with pytest.raises(JetcaptureError, match=rf"{path.stem}.*: the checksum of its footer is wrong or missing"):
        read_archive(tmp_path, "ORDERS")
