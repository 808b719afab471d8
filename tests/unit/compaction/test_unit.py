from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import BlockId, ObjectName
from jetcapture_py.archive.writer import Encoder, ObjectWriter
from jetcapture_py.compaction import unit as work
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import DRIFTED, OPEN, SEVERAL, TOLERANCE, units
from jetcapture_py.compaction.unit import CHANGED, CompactionSpec, Failed, Merged, Outcome, Skipped, compact_unit
from jetcapture_py.errors import StoreError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import Removal, remove
from tests.integration.spark.conftest import HOUR, Archive, both_layouts
from tests.support.archives import encoded, lay_out, put, write_parquet
from tests.support.examples import examples
from tests.unit.archive.test_writer import ENCODER, batch

Row = tuple[int, int, int | None]  # sequence, timestamp, position in the message
Blocks = Sequence[tuple[str, set[Row]]]
AFTER = HOUR + 2 * 86_400.0

quick = examples(cost=2)
messages = some.tuples(some.integers(1, 25), some.integers(0, 1))  # some in a recreated stream, too
targets = some.sampled_from([1_500, 3_000, 4_500, 8_000, 1 << 20])


def rows_of(found: set[tuple[int, int]]) -> set[Row]:
    """Every third message has two rows."""
    return {(seq, at, row) for seq, at in found for row in ((0, 1) if seq % 3 == 0 else (None,))}


blocks_of_objects = some.lists(
    some.tuples(some.sampled_from("aab"), some.sets(messages, min_size=1, max_size=15).map(rows_of)),
    min_size=1,
    max_size=8,
)


def write(archive: Archive, key: str, found: set[Row], row_group: int = 1000) -> ObjectName:
    """An object with these rows; what else is in a row follows from the message."""
    ordered = sorted(found, key=lambda row: (row[0], row[1], row[2] or 0))
    positions, times = [row[2] for row in ordered], [HOUR * 1_000_000 + row[1] for row in ordered]
    several: dict[str, Any] = {layout.ROW: pa.array(positions, pa.int32())} if set(positions) != {None} else {}
    payloads = [repr(row).encode() for row in ordered]
    name = archive.write([row[0] for row in ordered], key, timestamps=times, payloads=payloads, columns=several)
    path = archive.root / name.path
    write_parquet(pq.ParquetFile(path).read(), path, row_group_size=row_group)
    return name


def contents(path: Path) -> list[Row]:
    table = pq.ParquetFile(path).read()
    positions = table[layout.ROW].to_pylist() if layout.ROW in table.schema.names else [None] * table.num_rows
    times = (moment - HOUR * 1_000_000 for moment in table[layout.TIMESTAMP].cast(pa.int64()).to_pylist())
    found = list(zip(table[layout.SEQ].to_pylist(), times, positions, strict=True))
    assert table[layout.PAYLOAD].to_pylist() == [repr(row).encode() for row in found]
    return found


def stored(archive: Archive) -> list[ObjectName]:
    paths = (str(path.relative_to(archive.root)) for path in archive.root.rglob("*.parquet"))
    return [name for name in map(layout.parse_path, paths) if name is not None]


def keyed(archive: Archive, name: ObjectName) -> list[tuple[str | None, Row]]:
    """The rows of an object with their keys, which those of a bundle have in a column."""
    rows = contents(archive.root / name.path)
    columns = pq.ParquetFile(archive.root / name.path).read([layout.KEY]).columns
    keys = columns[0].to_pylist() if columns else [name.key] * len(rows)
    assert name.bundle or set(keys) == {name.key}
    return list(zip(keys, rows, strict=True))


def counted(archive: Archive) -> Counter[tuple[str | None, Row]]:
    """How often a reader by the rule of `layout` counts each row."""
    names = stored(archive)
    bundles = dict.fromkeys(names, archive.bundles) if archive.bundles else None
    alone, shared = layout.split_overlapping(names, bundles)
    rows = Counter(row for name in alone for row in keyed(archive, name))
    rows.update({row for name in shared for row in keyed(archive, name)})
    return rows


def once(blocks: Blocks) -> Counter[tuple[str | None, Row]]:
    return Counter({(key, row): 1 for key, found in blocks for row in found})


def compacted(files: Files, target: int, *, closed: float = AFTER, dry_run: bool = False) -> list[Outcome]:
    """A whole compaction but for the waiting."""
    spec = CompactionSpec(target=target, closed=closed, dry_run=dry_run)
    listed = files.find(["ORDERS"])
    found = [outcome for unit in units(listed, target) for outcome in compact_unit(files, spec, unit.sources)]
    for outcome in found:
        if isinstance(outcome, Merged):
            assert all(result is True for result in removing(files, outcome.removals))
    return found


def removing(files: Files, removals: Sequence[Removal]) -> list[bool | StoreError]:
    return files.removing(removals) if isinstance(files, Watched) else remove(files.archive, removals)


def merged(outcomes: Iterable[Outcome]) -> list[Merged]:
    return [outcome for outcome in outcomes if isinstance(outcome, Merged)]


class Killed(BaseException):
    """The process ends here."""


class Watched(Files):
    """Looks at the archive after every change to it, and dies after some of them."""

    def __init__(self, url: str, look: Callable[[], None], lives: int) -> None:
        super().__init__(ArchiveFiles(url, {}))
        self._look = look
        self._lives = lives

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        super().put(name, data)
        self._changed()

    def removing(self, removals: Sequence[Removal]) -> list[bool | StoreError]:
        results = []
        for removal in removals:
            results += remove(self.archive, [removal])
            self._changed()
        return results

    def _changed(self) -> None:
        self._look()
        self._lives -= 1
        if self._lives == 0:
            raise Killed


@pytest.fixture
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", getattr(request, "param", 0))


@quick
@given(
    blocks=blocks_of_objects,
    bundles=some.sampled_from([0, 0, 4]),
    target=targets,
    lives=some.lists(some.integers(1, 6), max_size=4),
    sizes=some.tuples(some.sampled_from([2, 1000]), some.sampled_from([300, 1 << 20])),
)
def test_killed_after_any_change_and_run_again_every_row_is_counted_once_all_the_time(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: Blocks,
    bundles: int,
    target: int,
    lives: list[int],
    sizes: tuple[int, int],
) -> None:
    row_group, window = sizes
    archive = Archive(tmp_path_factory.mktemp("archive"), bundles)
    for key, rows in blocks:
        write(archive, key, rows, row_group)

    def look() -> None:
        assert counted(archive) == once(blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "ROW_GROUP_BYTES", window)
        for changes in lives:
            try:
                compacted(Watched(archive.url, look, changes), target)
            except Killed:
                continue
        files = Watched(archive.url, look, 0)
        assert [outcome for outcome in compacted(files, target) if isinstance(outcome, Failed)] == []
        look()
        assert layout.split_overlapping(stored(archive))[1] == []
        for name in stored(archive):
            rows_of_keys = keyed(archive, name)
            assert rows_of_keys == sorted(rows_of_keys, key=lambda row: (row[0] or "", *row[1][:2], row[1][2] or 0))
            assert {bundle_of(key, bundles) if bundles else "" for key, _ in rows_of_keys} == {name.bundle}
        before = stored(archive)
        assert [each for each in merged(compacted(files, target)) if each.written or each.removable] == []
        assert stored(archive) == before


class Spoiling(Files):
    """Stores something else than it is given, as if that had been encoded."""

    def __init__(self, url: str, spoil: Callable[[pa.Table], pa.Table]) -> None:
        super().__init__(ArchiveFiles(url, {}))
        self._spoil = spoil

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        file = pq.ParquetFile(pa.BufferReader(data))
        sink = pa.BufferOutputStream()
        table = self._spoil(file.read()).replace_schema_metadata(file.metadata.metadata)
        write_parquet(table, sink)
        super().put(name, sink.getvalue())


class Damaging(Files):
    """Damages a payload of what it stores."""

    def put(self, name: ObjectName, data: pa.Buffer) -> None:
        raw = bytearray(data.to_pybytes())
        group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
        columns = (group.column(index) for index in range(group.num_columns))
        pages = next(column for column in columns if column.path_in_schema == layout.PAYLOAD)
        raw[pages.data_page_offset + pages.total_compressed_size - 1] ^= 1
        super().put(name, pa.py_buffer(bytes(raw)))


def _with(table: pa.Table, column: str, value: object) -> pa.Table:
    """The table with the last row's `column` changed."""
    index = table.schema.get_field_index(column)
    changed = pa.array([*table[column].to_pylist()[:-1], value], table.schema.field(column).type)
    return table.set_column(index, table.schema.field(column), changed)


SPOILS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "a row less": lambda table: table.slice(1),
    "a row twice": lambda table: pa.concat_tables([table, table.slice(0, 1)]),
    "another sequence": lambda table: _with(table, layout.SEQ, 9),
    "another timestamp": lambda table: _with(table, layout.TIMESTAMP, 5),
    "another row of the message": lambda table: _with(table, layout.ROW, 7),
}


@both_layouts
def test_sources_stay_when_the_stored_object_does_not_hold_what_they_hold(archive: Archive) -> None:
    for name, spoil in SPOILS.items():
        spoiled = Archive(archive.root / name, archive.bundles)
        write(spoiled, "a", {(3, 0, 0), (3, 0, 1), (4, 0, None)})
        write(spoiled, "a", {(4, 0, None), (6, 0, 0), (6, 0, 1)})
        (outcome,) = compacted(Spoiling(spoiled.url, spoil), 1 << 20)
        assert isinstance(outcome, Failed), name
        assert "does not match its sources, which are kept" in outcome.reason
        assert len(stored(spoiled)) == 3


@both_layouts
def test_sources_stay_when_a_byte_of_the_stored_object_is_another(archive: Archive) -> None:
    sources = [archive.write(seqs, payloads=payloads(2)) for seqs in ([1, 2], [3, 4])]
    (outcome,) = compacted(Damaging(ArchiveFiles(archive.url, {})), 1 << 20)
    (again,) = compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)  # finds that object, and leaves it
    for failed in (outcome, again):
        assert isinstance(failed, Failed)
        assert "CRC checksum verification failed" in failed.reason
    assert {*sources} < {*stored(archive)}


def test_a_damaged_object_with_columns_of_other_types_replaces_no_other(archive: Archive) -> None:
    for seqs in ([1, 2], [3, 4]):
        put(archive.root, encoded([(seq, seq) for seq in seqs], customer=1))
    whole = encoded([(seq, seq) for seq in range(1, 5)], customer="one")
    Damaging(ArchiveFiles(archive.url, {})).put(whole.name, whole.data)
    outcomes = compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)
    assert any("CRC checksum verification failed" in str(outcome) for outcome in outcomes)
    assert [each.removable for each in merged(outcomes) if each.removable] == []


def test_an_object_that_is_not_what_its_name_says_is_left_alone_with_its_group(archive: Archive) -> None:
    for lie in ({"first_seq": 2}, {"last_seq": 2}, {"rows": 2}, {"rows": 4}):
        renamed = Archive(archive.root / str(lie))
        name = renamed.write([1, 2, 3])
        (renamed.root / name.path).rename(renamed.root / replace(name, **lie).path)  # type: ignore[arg-type]
        renamed.write([2, 4])
        (outcome,) = compacted(Files(ArchiveFiles(renamed.url, {})), 1 << 20)
        assert isinstance(outcome, Failed)
        assert outcome.reason.endswith("do not match its name")
        assert len(stored(renamed)) == 2


@both_layouts
def test_a_row_twice_in_one_object_is_left_to_people(archive: Archive) -> None:
    path = archive.root / archive.write([1, 2, 3], timestamps=[5, 5, 6]).path
    table = pq.ParquetFile(path).read()
    path.unlink()
    twice = table.set_column(table.schema.get_field_index(layout.SEQ), layout.SEQ, pa.array([1, 1, 3]))
    encoder = Encoder(stream="ORDERS", interval=3600, compression="zstd", bundles=archive.bundles)
    bundle = bundle_of("a", archive.bundles) if archive.bundles else ""
    block = BlockId(key=None if bundle else "a", bucket=HOUR, bundle=bundle)
    with ObjectWriter(encoder, block, table.schema) as writer:
        writer.write(twice.cast(table.schema))
        put(archive.root, writer.finish("age"))
    archive.write([3, 4])
    (outcome,) = compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)
    assert isinstance(outcome, Failed)
    assert outcome.reason.endswith("contains a message twice")
    assert len(stored(archive)) == 2


def test_a_damaged_object_fails_its_group_alone(archive: Archive) -> None:
    for key in "ab":
        archive.write([1, 2], key)
        name = archive.write([2, 3], key)
    (archive.root / name.path).write_bytes(b"half an object")
    good, bad = compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)
    assert isinstance(good, Merged)
    assert (len(good.written), len(good.removable)) == (1, 2)
    assert isinstance(bad, Failed)
    assert name.digest in bad.reason
    assert "\n" not in bad.reason


def test_a_group_that_changes_while_it_is_read_is_left_alone(archive: Archive) -> None:
    archive.write([1, 2])
    gone = archive.write([2, 3])
    files = Files(ArchiveFiles(archive.url, {}))
    (unit,) = units(files.find(["ORDERS"]), 1 << 20)
    (archive.root / gone.path).unlink()
    (outcome,) = compact_unit(files, CompactionSpec(target=1 << 20, closed=AFTER), unit.sources)
    assert outcome == Skipped(CHANGED)


def test_removing_tells_why_it_failed_and_takes_what_is_gone_for_removed(archive: Archive) -> None:
    files = Files(ArchiveFiles(archive.url, {}))
    name = archive.write([1])
    target = files.at(name.path)
    assert target is not None
    assert remove(files.archive, [Removal(target=target)] * 2) == [True, False]
    (archive.root / name.path).mkdir()
    again = files.at(name.path)
    assert again is not None
    (reason,) = remove(files.archive, [Removal(target=again)])
    assert str(reason).startswith(f"cannot remove {archive.url}/{name.path}: ")


def payloads(count: int, seed: int = 0) -> list[bytes | None]:
    chance = random.Random(seed)
    return [chance.randbytes(100) for _ in range(count)]


@both_layouts
def test_objects_are_of_the_target_size_within_a_factor(archive: Archive) -> None:
    """Interleaved ones under keys, and a chain of ones that overlap in bundles."""
    chance, target, step = random.Random(1), 120_000, 1 if archive.bundles else 5
    first = 1
    for number in range(150):
        count = chance.randint(20, 120)
        seqs = list(range(first, first + count * step, step))
        archive.write(seqs, payloads=payloads(count, number), v=[seq % 7 for seq in seqs])
        first += count * 2 // 3 if archive.bundles else 1 if number % 5 else count * step
    compacted(Files(ArchiveFiles(archive.url, {})), target)
    sizes = [(archive.root / name.path).stat().st_size for name in stored(archive)]
    assert len(sizes) > 5
    assert all(target / TOLERANCE <= size <= target * TOLERANCE for size in sizes), str(sizes)
    assert layout.split_overlapping(stored(archive))[1] == []


def test_an_object_that_comes_out_too_large_before_a_gap_is_encoded_again(archive: Archive) -> None:
    source, first = random.Random(1), 1
    for count, size in [(100, 0), *[(1, 1 << 19)] * 7, (1, 5 << 20)]:  # the last one is kept
        first += 500 * (size > 1 << 20)
        content = [source.randbytes(size) or bytes(700_000)] * count  # the first rows compress better than the others
        put(archive.root, encoded([(seq, seq) for seq in range(first, first + count)], payloads=content))
        first += count
    (outcome,) = compacted(Files(ArchiveFiles(archive.url, {})), 2 << 20)
    assert isinstance(outcome, Merged), outcome
    assert len(stored(archive)) == 2


def test_the_footer_says_what_the_format_promises(archive: Archive) -> None:
    for seqs, created in (((1, 2), "2024-01-01T00:00:00Z"), ((2, 3), "2025-01-01T00:00:00Z")):
        encoder = replace(ENCODER, stream_created=created, compression="gzip", compatible=True)
        rows = batch([(seq, HOUR * 1_000_000) for seq in seqs])
        put(archive.root, encoder.encode(BlockId(key="a", bucket=HOUR), "age", [rows]))
    compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)
    (name,) = stored(archive)
    metadata = pq.read_metadata(archive.root / name.path)
    found = footer.entries(metadata.metadata)
    expected = {"format": "1", "stream": "ORDERS", "stream_created": "2024-01-01T00:00:00Z,2025-01-01T00:00:00Z"}
    expected |= {"consumer": "archive", "key": "a", "bucket": str(HOUR), "interval": "900", "first_seq": "1"}
    expected |= {"last_seq": "3", "messages": "3", "rows": "3", "sealed_by": "compact", "digest": name.digest}
    assert found == expected | {each: found[each] for each in ("writer", "schema_id", "checksum", "footer_checksum")}
    group = metadata.row_group(0)
    assert group.column(0).compression == "GZIP"
    assert not any("DELTA" in text for at in range(group.num_columns) for text in group.column(at).encodings)


FOOTERS: list[tuple[str, list[Any], bytes | None]] = [
    ("created", ["", "2025-01-01T00:00:00Z"], b""),
    ("key_rule", ["{subject}", "{subject}"], b"{subject}"),
    ("key_rule", ["", ""], b""),
    ("key_rule", ["{subject}", "{id}"], None),
    ("key_rule", ["{id}", None], None),
]


def test_a_footer_says_only_what_all_its_sources_say(archive: Archive) -> None:
    for entry, values, merged in FOOTERS:
        said = Archive(archive.root / f"{entry}{values}".replace("/", ""))
        for first, value in enumerate(values, 1):
            identities = [(seq, HOUR * 1_000_000) for seq in (first, first + 1)]
            put(said.root, encoded(identities, key="a", bucket=HOUR, **{entry: value}))
        compacted(Files(ArchiveFiles(said.url, {})), 1 << 20)
        (name,) = stored(said)
        metadata = pq.read_metadata(said.root / name.path).metadata
        name_of_entry = b"jetcapture.stream_created" if entry == "created" else b"jetcapture.key_rule"
        assert (metadata.get(name_of_entry), metadata[b"jetcapture.consumer"]) == (merged, b"archive")


def test_an_open_bucket_is_left_alone_by_what_its_objects_say_of_its_length(archive: Archive) -> None:
    archive.write([1, 2])
    archive.write([2, 3])
    files = Files(ArchiveFiles(archive.url, {}))
    (outcome,) = compacted(files, 1 << 20, closed=HOUR + 86_399)  # these do not say, so it may be a day
    assert (outcome, len(stored(archive))) == (Skipped(OPEN), 2)
    for name in stored(archive):
        path = archive.root / name.path
        table = pq.ParquetFile(path).read()
        write_parquet(table.replace_schema_metadata({"jetcapture.interval": "900"}), path)
    (outcome,) = compacted(files, 1 << 20, closed=HOUR + 899)
    assert outcome == Skipped(OPEN)
    (outcome,) = compacted(files, 1 << 20, closed=HOUR + 900)
    assert (type(outcome), len(stored(archive))) == (Merged, 1)


@both_layouts
def test_objects_whose_columns_do_not_go_together_are_merged_by_kind(archive: Archive) -> None:
    for number in range(6):
        value = pa.array([number] * 2) if number % 2 else pa.array([str(number)] * 2)
        archive.write([number * 2, number * 2 + 1], columns={"value": value})
    note, *outcomes = compacted(Files(ArchiveFiles(archive.url, {})), 1 << 20)
    assert note == Skipped(DRIFTED)
    assert [len(outcome.written) for outcome in merged(outcomes)] == [1, 1]
    tables = [pq.ParquetFile(archive.root / name.path).read() for name in stored(archive)]
    values = {str(table.schema.field("value").type): table["value"].to_pylist() for table in tables}
    assert values == {"string": ["0", "0", "2", "2", "4", "4"], "int64": [1, 1, 3, 3, 5, 5]}


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
