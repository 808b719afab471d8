"""An object is either what its name and footer say, or damaged."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive import writer as writing
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.verify import examine as verify_object
from jetcapture_py.verify.examine import DamagedError, ObjectContents, ObjectExaminer
from jetcapture_py.verify.scan import ArchiveScan, survey
from tests.support.archives import encoded, lay_out, merge, put, tangle

CREATED = "2024-01-01T00:00:00Z"
LIFE = Incarnation.of(CREATED, mirror=False)
NOW = LIFE.since + 10**9
MESSAGES = [(seq, NOW + seq) for seq in (1, 2, 3, 5, 8)]
DENSE = [(seq, NOW + seq) for seq in range(10, 20)]
KEYS: dict[int, list[str]] = {
    n: [f"k{i:02}" for i in range(40) if bundle_of(f"k{i:02}", 4) == str(n)] for n in range(4)
}
"""Keys of each of 4 bundles, sorted."""


def file_of(root: Path, block: EncodedBlock, name: layout.ObjectName | None = None) -> File:
    path = put(root, block)
    return File(path=block.name.path, place=str(path), size=path.stat().st_size, name=name or block.name)


def look(
    root: Path, block: EncodedBlock, *, life: Incarnation | None = LIFE, deep: bool = False, name: Any = None
) -> ObjectContents:
    return ObjectExaminer(ArchiveFiles(str(root), {}), life).examine(
        file_of(root, block), name or block.name, deep=deep
    )


def surveyed(root: Path, bound: int, *, deep: bool) -> ArchiveScan:
    return survey(ObjectExaminer(ArchiveFiles(str(root), {}), LIFE), "ORDERS", bound, deep=deep)


def with_data(block: EncodedBlock, data: bytes) -> EncodedBlock:
    return replace(block, data=pa.py_buffer(data))


def in_bundle(root: Path, bundle: str, keys: Sequence[str | None]) -> EncodedBlock:
    """An object of one message for each of these keys, in this bundle of 4."""
    (name,) = lay_out(root, dict(zip(DENSE, ["a"] * len(keys), strict=False)), 4)
    table = pq.ParquetFile(root / name.path).read().drop_columns([layout.STREAM, layout.KEY])
    table = table.append_column(REPLY, pa.nulls(len(keys), pa.binary()))
    table = table.append_column(layout.KEY, pa.array(keys, pa.string())).combine_chunks()
    (root / name.path).unlink()
    encoder = Encoder(stream="ORDERS", interval=900, compression="zstd", stream_created=CREATED, bundles=4)
    return encoder.encode(BlockId(key=None, bucket=name.bucket, bundle=bundle), "age", table.to_batches())


# ------------------------------------------------------------------ whole objects


def test_an_object_without_gaps_is_a_range_and_another_is_its_sequences(tmp_path: Path) -> None:
    for deep in (False, True):
        dense, sparse = look(tmp_path, encoded(DENSE), deep=deep), look(tmp_path, encoded(MESSAGES), deep=deep)
        assert (dense.range, dense.seqs.tolist(), dense.messages) == ((10, 19), [], 10)
        assert (sparse.range, sparse.seqs.tolist(), sparse.messages) == (None, [1, 2, 3, 5, 8], 5)
        assert (dense.newest, sparse.newest) == (NOW + 19, NOW + 8)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each request was answered with."""
    sizes: list[int] = []
    real = ArchiveFiles.read

    def counted(shelf: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        data = real(shelf, file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ArchiveFiles, "read", counted)
    return sizes


def test_a_footer_is_all_that_is_read_of_an_object_without_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    block = encoded([(seq, NOW) for seq in range(1, 50_000)])
    monkeypatch.setattr(verify_object, "TAIL_BYTES", 4096)
    assert look(tmp_path, block).range == (1, 49_999)
    assert read == [4096] < [block.data.size]


def test_a_small_object_is_read_at_once(tmp_path: Path, read: list[int]) -> None:
    block = encoded(MESSAGES)
    for deep in (False, True):
        assert look(tmp_path, block, deep=deep).messages == 5
    assert read == [block.data.size] * 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [("TAIL_BYTES", 1 << 20), ("WHOLE_BYTES", 1 << 20), ("PIECE_BYTES", 7), ("PIECE_BYTES", 1 << 20)],
)
def test_it_does_not_matter_in_which_parts_an_object_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: int
) -> None:
    for name, least in (("TAIL_BYTES", 100), ("WHOLE_BYTES", 0), (setting, value)):
        monkeypatch.setattr(verify_object, name, least)
    block = encoded(MESSAGES)
    for deep in (False, True):
        assert look(tmp_path, block, deep=deep).seqs.tolist() == [1, 2, 3, 5, 8]
    data = bytearray(block.data.to_pybytes())
    data[len(data) // 3] ^= 1
    with pytest.raises(DamagedError):
        look(tmp_path, with_data(block, bytes(data)), deep=True)


# ------------------------------------------------------------------ lives


EARLIER = ["", "2023-01-01T00:00:00Z", f"2023-01-01T00:00:00Z,{CREATED}"]


def test_messages_belong_to_the_streams_present_life_if_they_are_younger_than_it(tmp_path: Path) -> None:
    old = [(seq, LIFE.since - 100 + seq) for seq in (1, 2, 3)]
    for created in (CREATED, *EARLIER):
        young = look(tmp_path, encoded(MESSAGES, created=created))
        assert (young.messages, young.older) == (5, 0)
    for created in EARLIER:
        for deep in (False, True):
            held = look(tmp_path, encoded(old, created=created), deep=deep)
            assert (held.messages, held.older, held.range) == (0, 3, None)
            both = look(tmp_path, encoded([*old, (2, NOW), (4, NOW)], created=created), deep=deep)
            assert (both.messages, both.older, both.seqs.tolist()) == (2, 3, [2, 4])
            assert both.newest == NOW


def test_an_object_merged_of_known_and_unknown_ones_is_judged_by_its_times(tmp_path: Path) -> None:
    old = [(seq, LIFE.since - 100 + seq) for seq in (1, 2, 3)]
    names = [put(tmp_path, block).relative_to(tmp_path) for block in (encoded(old, created=""), encoded(MESSAGES))]
    merge(tmp_path, [name for path in names if (name := layout.parse_path(path.as_posix()))])
    found = surveyed(tmp_path, 100, deep=False)
    assert (found.totals.messages, found.totals.older, len(found.sequences)) == (5, 3, 5)


def test_a_clock_that_went_back_does_not_either_where_compaction_has_merged_one_life(tmp_path: Path) -> None:
    early = [(9, LIFE.since - 10**9)]
    names = [put(tmp_path, block).relative_to(tmp_path) for block in (encoded(early), encoded(MESSAGES))]
    merge(tmp_path, [name for path in names if (name := layout.parse_path(path.as_posix()))])
    assert surveyed(tmp_path, 100, deep=False).totals.messages == 6


# ------------------------------------------------------------------ damage


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    block, chance = encoded(MESSAGES), random.Random(1)
    data = block.data.to_pybytes()
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        flipped = with_data(block, bytes(broken))
        with pytest.raises(DamagedError):
            look(tmp_path, flipped, deep=True)


def test_a_flipped_bit_in_a_footer_is_found_without_reading_more(tmp_path: Path) -> None:
    block, chance = encoded(MESSAGES), random.Random(2)
    data = block.data.to_pybytes()
    for place in range(len(data) - int.from_bytes(data[-8:-4], "little") - 8, len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        with pytest.raises(DamagedError):
            look(tmp_path, with_data(block, bytes(broken)))


def test_a_key_that_looks_like_a_checksum_is_none(tmp_path: Path) -> None:
    key = "\x18\x1ajetcapture.footer_checksum\x18\x10" + "0" * 16
    assert look(tmp_path, encoded(MESSAGES, key=key), deep=True).messages == 5


def test_an_object_that_was_cut_off_is_found_from_its_end(tmp_path: Path) -> None:
    block = encoded(MESSAGES)
    data = block.data.to_pybytes()
    for length in {0, 1, 4, 8, 11, 12, *range(20, len(data), 37), len(data) - 1}:
        with pytest.raises(DamagedError):
            look(tmp_path, with_data(block, data[:length]))


def test_bytes_missing_from_the_middle_are_found_from_the_footer(tmp_path: Path) -> None:
    block = encoded(MESSAGES)
    data = block.data.to_pybytes()
    with pytest.raises(DamagedError, match="column chunks are not where"):
        look(tmp_path, with_data(block, data[:50] + data[51:]))


CHANGES: Mapping[str, Callable[[layout.ObjectName], layout.ObjectName]] = {
    "stream": lambda name: replace(name, stream="OTHER"),
    "key": lambda name: replace(name, key="us"),
    "no key": lambda name: replace(name, key=None),
    "bucket": lambda name: replace(name, bucket=name.bucket + 900),
    "first_seq": lambda name: replace(name, first_seq=name.first_seq + 1),
    "last_seq": lambda name: replace(name, last_seq=name.last_seq + 1),
    "rows": lambda name: replace(name, rows=name.rows + 1),
    "digest": lambda name: replace(name, digest="0" * 16),
    "quarantine": lambda name: replace(name, key=None, quarantine=True),
}


def test_a_name_that_is_another_objects_is_found_from_the_footer(tmp_path: Path) -> None:
    block = encoded(DENSE)
    for change in CHANGES.values():
        with pytest.raises(DamagedError, match="footer says"):
            look(tmp_path, block, name=change(block.name))
    aside = encoded(DENSE, quarantine=True)
    assert look(tmp_path, aside).name.quarantine
    with pytest.raises(DamagedError, match="quarantine"):
        look(tmp_path, aside, name=replace(aside.name, quarantine=False))


def rewritten(block: EncodedBlock, change: Callable[[pa.Table], pa.Table], **entries: str | None) -> EncodedBlock:
    """The object with other rows, or other entries in its footer, with its checksums unless one is taken out."""
    file = pq.ParquetFile(pa.BufferReader(block.data))
    table, sink = change(file.read()), pa.BufferOutputStream()
    metadata = {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}
    metadata |= {f"jetcapture.{name}": text or "" for name, text in entries.items()}
    for name, text in entries.items():
        if text is None:
            del metadata[f"jetcapture.{name}"]
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    data, digits = sink.getvalue(), {entry: metadata.get(f"jetcapture.{entry}", "") for entry in writing._CHECKSUMS}
    if all(digits.values()):
        writing._sign(data, digits)
    return replace(block, data=data)


def test_an_object_without_checksums_was_not_written_by_jetcapture(tmp_path: Path) -> None:
    for gone in (("checksum",), ("footer_checksum",), ("digest", "checksum", "footer_checksum")):
        other = rewritten(encoded(MESSAGES), lambda table: table, **dict.fromkeys(gone))
        with pytest.raises(DamagedError, match="checksum of its footer is wrong or missing"):
            look(tmp_path, other)


def test_a_footer_that_cannot_be_true_is_damage(tmp_path: Path) -> None:
    for entries in ({"messages": "6"}, {"messages": "x"}, {"messages": "0"}, {"format": "2"}):
        with pytest.raises(DamagedError):
            look(tmp_path, rewritten(encoded(MESSAGES), lambda table: table, **entries))
    with pytest.raises(DamagedError, match="4 rows"):
        look(tmp_path, rewritten(encoded(MESSAGES), lambda table: table.slice(0, 4)))


def test_fewer_messages_than_the_footer_counts_are_found_by_reading_the_sequences(tmp_path: Path) -> None:
    wrong = rewritten(encoded(MESSAGES), lambda table: table, messages="4")
    with pytest.raises(DamagedError, match="has 5 messages"):
        look(tmp_path, wrong)


LONG = "k" * 5000  # too long for statistics


IN_BUNDLE_1: list[tuple[list[str | None], bool]] = [
    (KEYS[1][:3], True),
    ([KEYS[2][0]], False),
    ([None], False),
    ([KEYS[1][0], KEYS[2][0], KEYS[1][-1]], True),
    ([LONG], bundle_of(LONG, 4) == "1"),
    ([KEYS[1][0], KEYS[3][0]], False),
]
"""Keys of an object, and whether its footer shows no key of another bundle."""


def test_a_key_that_belongs_to_another_bundle_is_found(tmp_path: Path) -> None:
    """The lowest and highest from the footer, all others with `deep`."""
    for keys, from_footer in IN_BUNDLE_1:
        block = in_bundle(tmp_path, "1", keys)
        right = all(bundle_of(key, 4) == "1" for key in keys)
        for deep, accepted in ((False, from_footer), (True, right)):
            if accepted:
                assert look(tmp_path, block, deep=deep).messages == len(keys)
            else:
                with pytest.raises(DamagedError, match=r"of bundle [023]: it was moved or renamed"):
                    look(tmp_path, block, deep=deep)


# ------------------------------------------------------------------ an archive of many


def test_a_file_that_no_request_can_read_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, encoded(MESSAGES))

    def refused(*_: Any, **__: Any) -> bytes:
        raise StoreError("cannot read it: access denied")

    monkeypatch.setattr(ArchiveFiles, "read", refused)
    found = surveyed(tmp_path, 100, deep=False)
    assert [problem.reason for problem in found.unusable.unread.paths] == ["cannot read it: access denied"]
    assert (len(found.sequences), found.unusable.damaged.paths) == (0, [])
    (finding,) = found.findings()
    assert finding.is_unproven


def test_an_object_that_was_stored_again_in_other_bytes_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, encoded(MESSAGES))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    real = ArchiveFiles.again

    def stored_again(shelf: ArchiveFiles, file: File) -> File:
        path.write_bytes(whole)
        return real(shelf, file)

    monkeypatch.setattr(ArchiveFiles, "again", stored_again)
    found = surveyed(tmp_path, 100, deep=True)
    assert (found.unusable.damaged.paths, found.totals.messages) == ([], 5)


def test_objects_that_are_gone_at_every_look_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def always_another(shelf: ArchiveFiles, stream: str) -> Any:
        nonlocal count
        count += 1
        yield file_of(tmp_path, encoded([(count, NOW)]))

    def gone(*_: Any, **__: Any) -> bytes:
        raise VanishedError("it is gone")

    monkeypatch.setattr(ArchiveFiles, "files", always_another)
    monkeypatch.setattr(ArchiveFiles, "read", gone)
    assert surveyed(tmp_path, 100, deep=False).unusable.unstable


def test_what_a_killed_store_leaves_is_not_foreign_and_everything_else_is(tmp_path: Path) -> None:
    path = put(tmp_path, encoded(MESSAGES))
    (path.parent / f".{path.name}.0123.tmp").write_bytes(b"half")
    for name in ("notes.txt", f"{path.name}.bak", ".hidden", "x.tmp"):
        (path.parent / name).write_bytes(b"")
    found = surveyed(tmp_path, 100, deep=False)
    assert sorted(re.sub(r".*/", "", file.path) for file in found.unusable.foreign.paths) == sorted(
        [f"{path.name}.bak", ".hidden", "notes.txt", "x.tmp"]
    )
    assert (found.totals.objects, found.unusable.damaged.paths) == (1, [])


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, encoded(MESSAGES))
    put(tmp_path, encoded(DENSE, key="us"))
    real = os.scandir

    def refused(path: str) -> Any:
        if "key=us" in path:  # root, who may run this test, is refused nothing
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StoreError, match="cannot list"):
        surveyed(tmp_path, 100, deep=False)


def test_links_are_followed_unless_they_lead_nowhere_or_in_a_circle(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    lay_out(root, {each: "abc"[index % 3] for index, each in enumerate(DENSE)}, 0)
    tangle(root, "b")
    found = surveyed(root, 100, deep=True)
    assert set(found.sequences.within(1, 100).tolist()) == {seq for seq, _ in DENSE}
    assert (
        found.totals.objects,
        found.unusable.foreign.paths,
        found.unusable.damaged.paths,
        found.unusable.unstable,
    ) == (3, [], [], False)


def test_what_is_counted_does_not_depend_on_how_the_objects_overlap(tmp_path: Path) -> None:
    chance = random.Random(3)
    reference: set[int] = set()
    copies = 0
    for _ in range(30):
        seqs = chance.sample(range(1, 400), chance.randrange(1, 60))
        start = chance.randrange(400)
        put(tmp_path, encoded((seq, NOW + seq) for seq in seqs))
        put(tmp_path, encoded(((seq, NOW + seq) for seq in range(start, start + 20)), quarantine=True))
        reference |= {*seqs, *range(start, start + 20)}
        copies += len(seqs) + 20
    names = list(ArchiveFiles(str(tmp_path), {}).files("ORDERS"))
    found = surveyed(tmp_path, 1000, deep=False)
    assert found.totals.objects == len(names)
    assert (len(found.sequences), found.unusable.damaged.paths) == (len(reference), [])
    assert found.totals.messages <= copies
    everything = np.arange(500, dtype=np.int64)
    assert set(everything[found.sequences.contains(everything)].tolist()) == reference
