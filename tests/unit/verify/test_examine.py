"""An object is either what its name and footer say, or damaged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

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
    examiner = ObjectExaminer(ArchiveFiles(str(root), {}), life)
    return examiner.examine(file_of(root, block), name or block.name, deep=deep)


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


def test_an_object_without_gaps_is_a_range_and_another_is_its_sequences(tmp_path: Path) -> None:
    for deep in (False, True):
        dense, sparse = look(tmp_path, encoded(DENSE), deep=deep), look(tmp_path, encoded(MESSAGES), deep=deep)
        assert (dense.range, dense.seqs.tolist(), dense.messages) == ((10, 19), [], 10)
        assert (sparse.range, sparse.seqs.tolist(), sparse.messages) == (None, [1, 2, 3, 5, 8], 5)
        assert (dense.newest, sparse.newest) == (NOW + 19, NOW + 8)


def test_a_footer_is_all_that_is_read_or_a_small_object_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = ArchiveFiles.read

    def counted(shelf: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        data = real(shelf, file, start, end)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(ArchiveFiles, "read", counted)
    small, large = encoded(MESSAGES), encoded([(seq, NOW) for seq in range(1, 50_000)])
    for deep in (False, True):
        assert look(tmp_path, small, deep=deep).messages == 5
    monkeypatch.setattr(verify_object, "TAIL_BYTES", 4096)
    assert look(tmp_path, large).range == (1, 49_999)
    assert sizes == [small.data.size, small.data.size, 4096] < [large.data.size]


PARTS = [("TAIL_BYTES", 1 << 20), ("WHOLE_BYTES", 1 << 20), ("PIECE_BYTES", 7), ("PIECE_BYTES", 1 << 20)]


def test_it_does_not_matter_in_which_parts_an_object_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = encoded(MESSAGES)
    data = bytearray(block.data.to_pybytes())
    data[len(data) // 3] ^= 1
    for setting, value in PARTS:
        for name, least in (("TAIL_BYTES", 100), ("WHOLE_BYTES", 0), (setting, value)):
            monkeypatch.setattr(verify_object, name, least)
        for deep in (False, True):
            assert look(tmp_path, block, deep=deep).seqs.tolist() == [1, 2, 3, 5, 8]
        with pytest.raises(DamagedError):
            look(tmp_path, with_data(block, bytes(data)), deep=True)
        monkeypatch.undo()


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


def test_a_merged_object_is_judged_by_its_times_unless_all_of_it_is_of_one_life(tmp_path: Path) -> None:
    old = [(seq, LIFE.since - 100 + seq) for seq in (1, 2, 3)]
    early = [(9, LIFE.since - 10**9)]  # a clock went back
    for root, blocks, counts in (
        (tmp_path / "1", [encoded(old, created=""), encoded(MESSAGES)], (5, 3)),
        (tmp_path / "2", [encoded(early), encoded(MESSAGES)], (6, 0)),
    ):
        for block in blocks:
            put(root, block)
        merge(root, [block.name for block in blocks])
        found = surveyed(root, 100, deep=False)
        assert (found.totals.messages, found.totals.older) == counts
        assert len(found.sequences) == counts[0]


def test_without_a_known_life_an_object_of_two_has_only_the_sequences_that_are_in_it(tmp_path: Path) -> None:
    block = encoded([(1, NOW), (1, NOW + 9), (3, NOW + 10)], created=f"{CREATED},2024-02-01T00:00:00Z")
    found = look(tmp_path, block, life=None)
    assert (found.range, found.seqs.tolist(), found.messages) == (None, [1, 1, 3], 3)


def test_a_flipped_bit_anywhere_is_found_and_one_in_the_footer_without_reading_more(tmp_path: Path) -> None:
    block, chance = encoded(MESSAGES), random.Random(1)
    data = block.data.to_pybytes()
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        for deep in (True, False)[: 1 + (place >= footer)]:
            with pytest.raises(DamagedError):
                look(tmp_path, with_data(block, bytes(broken)), deep=deep)


def test_an_object_that_was_cut_off_or_lacks_bytes_in_the_middle_is_found_from_its_footer(tmp_path: Path) -> None:
    block = encoded(MESSAGES)
    data = block.data.to_pybytes()
    for length in {0, 1, 4, 8, 11, 12, *range(20, len(data), 37), len(data) - 1}:
        with pytest.raises(DamagedError):
            look(tmp_path, with_data(block, data[:length]))
    with pytest.raises(DamagedError, match="column chunks are not where"):
        look(tmp_path, with_data(block, data[:50] + data[51:]))


CHANGES: list[dict[str, Any]] = [{"stream": "OTHER"}, {"key": "us"}, {"key": None}, {"bucket": 1_700_001_000}]
CHANGES += [{"first_seq": 11}, {"last_seq": 20}, {"rows": 11}, {"digest": "0" * 16}, {"key": None, "quarantine": True}]


def test_a_name_that_is_another_objects_is_found_from_the_footer(tmp_path: Path) -> None:
    block = encoded(DENSE)
    for change in CHANGES:
        with pytest.raises(DamagedError, match="footer says"):
            look(tmp_path, block, name=replace(block.name, **change))
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


def test_a_footer_without_checksums_or_that_cannot_be_true_is_damage(tmp_path: Path) -> None:
    for gone in (("checksum",), ("footer_checksum",), ("digest", "checksum", "footer_checksum")):
        other = rewritten(encoded(MESSAGES), lambda table: table, **dict.fromkeys(gone))
        with pytest.raises(DamagedError, match="checksum of its footer is wrong or missing"):
            look(tmp_path, other)
    for entries in ({"messages": "6"}, {"messages": "x"}, {"messages": "0"}, {"format": "2"}):
        with pytest.raises(DamagedError):
            look(tmp_path, rewritten(encoded(MESSAGES), lambda table: table, **entries))
    with pytest.raises(DamagedError, match="4 rows"):
        look(tmp_path, rewritten(encoded(MESSAGES), lambda table: table.slice(0, 4)))
    wrong = rewritten(encoded(MESSAGES), lambda table: table, messages="4")
    with pytest.raises(DamagedError, match="has 5 messages"):
        look(tmp_path, wrong)


LONG = "k" * 5000  # too long for statistics


IN_BUNDLE_1: list[tuple[list[str | None], bool]] = [
    *((KEYS[1][:3], True), ([KEYS[2][0]], False), ([None], False), ([KEYS[1][0], KEYS[3][0]], False)),
    *(([KEYS[1][0], KEYS[2][0], KEYS[1][-1]], True), ([LONG], bundle_of(LONG, 4) == "1")),
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


def test_objects_that_are_gone_at_every_look_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(1)

    def gone(*_: Any, **__: Any) -> bytes:
        raise VanishedError("it is gone")

    monkeypatch.setattr(ArchiveFiles, "files", lambda *_: [file_of(tmp_path, encoded([(next(numbers), NOW)]))])
    monkeypatch.setattr(ArchiveFiles, "read", gone)
    assert surveyed(tmp_path, 100, deep=False).unusable.unstable


def test_what_a_killed_store_leaves_is_not_foreign_and_everything_else_is(tmp_path: Path) -> None:
    path = put(tmp_path, encoded(MESSAGES))
    (path.parent / f".{path.name}.0123.tmp").write_bytes(b"half")
    for name in ("notes.txt", f"{path.name}.bak", ".hidden", "x.tmp"):
        (path.parent / name).write_bytes(b"")
    found = surveyed(tmp_path, 100, deep=False)
    names = {re.sub(r".*/", "", file.path) for file in found.unusable.foreign.paths}
    assert names == {f"{path.name}.bak", ".hidden", "notes.txt", "x.tmp"}
    assert (found.totals.objects, found.unusable.damaged.paths) == (1, [])


def test_links_are_followed_unless_they_lead_nowhere_or_in_a_circle(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    lay_out(root, {each: "abc"[index % 3] for index, each in enumerate(DENSE)}, 0)
    tangle(root, "b")
    found = surveyed(root, 100, deep=True)
    assert set(found.sequences.within(1, 100).tolist()) == {seq for seq, _ in DENSE}
    unusable = found.unusable
    assert (unusable.foreign.paths, unusable.damaged.paths, unusable.unstable) == ([], [], False)
    assert found.totals.objects == 3
