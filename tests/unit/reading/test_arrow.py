"""`read_archive` without Spark: each message once, whatever a compaction does while it reads."""

from __future__ import annotations

import io
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

import duckdb
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.reading import arrow
from jetcapture_py.reading.arrow import PlanReader, read_archive
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Bound
from jetcapture_py.store import archive as store
from jetcapture_py.store.archive import ArchiveFiles, File
from tests.support import archives as support
from tests.support.archives import Identity

BUCKETS = (1_777_636_800, 1_777_637_700)
KEYS = ("a", "b", None)
Messages = Mapping[Identity, str | None]


@dataclass
class Archive:
    """An archive on disk, of objects with row groups of three messages."""

    root: Path
    random: Random
    messages: dict[Identity, str | None] = field(default_factory=dict)
    """All messages with their keys."""
    replaced: list[Path] = field(default_factory=list)
    """Objects of which others have all messages."""
    later: Mapping[str, Any] = field(default_factory=dict)
    """Columns, and their values, of objects that are stored from now on."""

    def store(self, messages: Messages, bucket: int, bundles: int = 0) -> None:
        """Store messages as a capture does: an object for each key or bundle."""
        self.messages.update(messages)
        places: dict[tuple[str | None, str], list[Identity]] = {}
        for identity, key in messages.items():
            place = (None, bundle_of(key, bundles)) if bundles else (key, "")
            places.setdefault(place, []).append(identity)
        for (key, bundle), identities in places.items():
            seqs, times = map(list, zip(*sorted(identities), strict=True))
            table = pa.table(
                {
                    layout.STREAM: ["ORDERS"] * len(seqs),
                    layout.SEQ: pa.array(seqs, pa.int64()),
                    layout.TIMESTAMP: pa.array(times, pa.timestamp("us", "UTC")),
                    layout.PAYLOAD: [b"%d" % seq for seq in seqs],
                    layout.KEY: pa.array([messages[each] for each in sorted(identities)], pa.string()),
                    **{column: [value] * len(seqs) for column, value in self.later.items()},
                }
            )
            name = ObjectName(
                stream="ORDERS",
                key=key,
                bucket=bucket,
                bundle=bundle,
                first_seq=min(seqs),
                last_seq=max(seqs),
                rows=len(seqs),
                digest=layout.digest(*(table.column(n).chunk(0).buffers()[1].to_pybytes() for n in (1, 2))),
            )
            path = self.root / name.path
            path.parent.mkdir(parents=True, exist_ok=True)
            table = table.replace_schema_metadata({"jetcapture.bundles": str(bundles)} if bundles else {})
            partial = path.with_name(f".{path.name}")
            pq.write_table(table, partial, row_group_size=3)
            partial.replace(path)

    def objects(self) -> list[tuple[Path, ObjectName]]:
        paths = sorted(self.root.rglob("[0-9]*.parquet"))
        return [(path, name) for path in paths if (name := layout.parse_path(str(path.relative_to(self.root))))]

    def read(self, paths: Iterable[Path]) -> dict[Identity, str | None]:
        columns = (layout.SEQ, layout.TIMESTAMP, layout.KEY)
        messages = {}
        for path in paths:
            table = pq.ParquetFile(path).read()
            seqs, times, keys = (table[name].to_pylist() for name in columns)
            micros = table[layout.TIMESTAMP].cast(pa.int64()).to_pylist()
            messages |= {(seq, time): key for seq, time, key in zip(seqs, micros, keys, strict=True)}
            del times
        return messages

    def compact(self) -> None:
        """Take one step: merge some objects, or move them to bundles, or remove those that were merged."""
        for path in self.replaced:
            path.unlink(missing_ok=True)
        self.replaced.clear()
        objects = self.objects()
        _, chosen = self.random.choice(objects)
        bundles = 2 if self.random.random() < 0.3 else len(chosen.bundle) and 2
        group = [
            path
            for path, name in objects
            if name.bucket == chosen.bucket
            and (name.bundle in ("", chosen.bundle) if bundles else name.group == chosen.group)
            and self.random.random() < 0.7
        ]
        if not group:
            return
        self.store(self.read(group), chosen.bucket, bundles)
        new = {path for path, _ in self.objects()} - {path for path, _ in objects}
        if new:
            covered = self.read(new)
            self.replaced += [path for path in group if path not in new and self.read([path]).keys() <= covered.keys()]
        if self.random.random() < 0.6:
            for path in self.replaced:
                path.unlink(missing_ok=True)
            self.replaced.clear()

    def capture(self) -> None:
        """Store some new messages."""
        first = max(self.messages)[0] + 1
        bucket = self.random.choice(BUCKETS)
        seqs = range(first, first + self.random.randint(1, 9))
        self.store({(seq, bucket * 1_000_000 + seq): self.random.choice(KEYS) for seq in seqs}, bucket)


def filled(root: Path, random: Random) -> Archive:
    """An archive with copies, and overlaps without copies, under keys and in bundles."""
    archive = Archive(root, random)
    seq = 1
    for bucket in BUCKETS:
        for _ in range(random.randint(2, 6)):
            seqs = range(seq, seq + random.randint(1, 20))
            seq = seqs.stop
            messages = {(seq, bucket * 1_000_000 + seq): random.choice(KEYS) for seq in seqs}
            archive.store(messages, bucket, random.choice((0, 0, 2)))
            some = {each: key for each, key in archive.messages.items() if random.random() < 0.2}
            some = {each: key for each, key in some.items() if each[1] // 1_000_000 - bucket in range(900)}
            archive.store(some, bucket, random.choice((0, 0, 2)))
    return archive


def test_what_drifts_reads_from_polars_duckdb_and_pandas(tmp_path: Path) -> None:
    objects: list[dict[str, list[Any]]] = [
        {"grown": [1], "ids": [2**53 + 1], "mixed": [1], "nested": [{"a": [1, None]}], "narrow": [1]},
        {"grown": [1.5], "ids": [0.5], "mixed": ["x"], "nested": ["y"], "narrow": [2**40], "added": [True]},
    ]
    for number, fields in enumerate(objects):
        narrow = pa.array(fields.pop("narrow"), pa.int64() if number else pa.int32())
        columns = {layout.SEQ: [number + 1], layout.TIMESTAMP: pa.array([number], pa.timestamp("us", "UTC"))}
        table = pa.table({layout.STREAM: ["ORDERS"], **columns, **fields, "narrow": narrow})
        name = ObjectName(
            stream="ORDERS",
            key="eu",
            bucket=BUCKETS[0],
            first_seq=number + 1,
            last_seq=number + 1,
            rows=1,
            digest="0" * 16,
        )
        (tmp_path / name.directory).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / name.path)

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
    support.Archive(tmp_path).write([1, 2], "eu", columns={"amount": [5, 6]})
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
    name = support.Archive(tmp_path).write([1], "eu")
    rows = 2000
    table = pa.table(
        {
            layout.SEQ: range(rows),
            layout.TIMESTAMP: pa.array(range(rows), pa.timestamp("us", "UTC")),
            "a.b": ["x" * 10_000] * rows,
        }
    )
    pq.write_table(table, tmp_path / name.path, row_group_size=100)
    batches = list(read_archive(tmp_path, "ORDERS", columns=["a.b"]))
    assert sum(batch.num_rows for batch in batches) == rows
    assert max(batch.nbytes for batch in batches) < 2 << 20


def test_objects_may_vanish_one_after_the_other_while_an_archive_is_planned_but_not_the_same_one_again() -> None:
    gone = iter([*range(20), None])

    def planned() -> str:
        if (number := next(gone)) is not None:
            raise VanishedError(f"{number} is gone")
        return "planned"

    assert store.retried(planned) == "planned"
    gone = iter([1] * 3)
    with pytest.raises(VanishedError):
        store.retried(planned)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few rows at a time."""
    monkeypatch.setattr(arrow, "_PIECE_BYTES", 1)
    monkeypatch.setattr(arrow, "_MAX_ROWS", 2)


def identities(batches: Iterable[pa.RecordBatch]) -> Iterator[Identity]:
    for batch in batches:
        times = batch.column(layout.TIMESTAMP).cast(pa.int64()).to_pylist()
        yield from zip(batch.column(layout.SEQ).to_pylist(), times, strict=True)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 10), marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
@pytest.mark.parametrize("dedupe", ["auto", "full"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_each_message_is_read_once_while_objects_are_compacted_and_removed_after_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dedupe: Literal["auto", "full"], local: bool, seeds: range
) -> None:
    if not local:  # read as a store without files does: an object that is open can vanish too
        monkeypatch.setattr(ArchiveFiles, "local", False)
        monkeypatch.setattr(store, "SMALL", 0)
        monkeypatch.setattr(arrow, "SMALL", 0)
    for seed in seeds:
        random = Random(seed)
        archive = filled(tmp_path / str(seed), random)
        before = set(archive.messages)
        reader = read_archive(str(archive.root), "ORDERS", dedupe=dedupe)
        archive.later = {"later": seed}
        read: Counter[Identity] = Counter()
        for batch in reader:
            read.update(identities([batch]))
            archive.compact()
            if random.random() < 0.2:
                archive.capture()
        assert max(read.values()) == 1, seed
        assert before <= read.keys() <= archive.messages.keys(), seed
        again = Counter(identities(read_archive(str(archive.root), "ORDERS", dedupe=dedupe)))
        assert again == Counter(archive.messages.keys()), seed


def test_a_column_that_changes_its_type_while_an_archive_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    archive = Archive(tmp_path, Random(0), later={"amount": 1})
    for seq in range(1, 40):
        archive.store({(seq, BUCKETS[0] * 1_000_000 + seq): f"key {seq}"}, BUCKETS[0])
    reader = read_archive(str(tmp_path), "ORDERS")
    reader.read_next_batch()
    archive.later = {"amount": "one"}
    path, _ = max(archive.objects(), key=lambda item: item[1].first_seq)
    messages = {**archive.read([path]), (50, BUCKETS[0] * 1_000_000 + 50): "key 39"}
    path.unlink()
    archive.store(messages, BUCKETS[0])
    with pytest.raises(JetcaptureError, match=r"column amount is string in .* was int64 when the read began: read it"):
        reader.read_all()


def test_only_the_columns_and_row_groups_that_are_needed_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    count, target = 40_000, io.BytesIO()
    table = pa.table(
        {
            layout.SEQ: range(count),
            layout.TIMESTAMP: pa.array(range(count), pa.timestamp("us", "UTC")),
            layout.PAYLOAD: [uuid.uuid4().bytes * 20 for _ in range(count)],
        }
    )
    pq.write_table(table, target, row_group_size=count // 4, compression="none", use_dictionary=False)

    name = ObjectName(
        stream="S", key=None, bucket=0, first_seq=0, last_seq=count - 1, rows=count, digest="0" * 16, quarantine=True
    )
    fsspec.filesystem("memory").pipe_file(f"/needed/{name.path}", target.getvalue())
    files, fetch, sizes = ArchiveFiles("memory://needed", {}), ArchiveFiles.read, list[int]()

    def counted(files: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        data = fetch(files, file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ArchiveFiles, "read", counted)

    def read(columns: list[str], bound: Bound | None = None, ranges: list[tuple[int, int]] | None = None) -> Any:
        reader = PlanReader(
            files=files,
            table=Table([table.schema], quarantine=True, columns=None, case_sensitive=False),
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
