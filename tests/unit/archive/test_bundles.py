"""Bundles: the hash of keys, and objects that are sorted by key."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given

from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import TextWriter
from jetcapture_py.archive.bundles import bundle_numbers, bundle_of, bundle_text, row_group_rows
from jetcapture_py.archive.layout import BlockId
from tests.unit.archive.test_writer import ENCODER, Identity, batch, metadata, plain, read, write

BLOCK = BlockId(key=None, bundle="03", bucket=1_700_000_100)
SIXTEEN = replace(ENCODER, bundles=16)


def murmur3(data: bytes) -> int:
    """murmur3_x86_32 with seed 0, as its author describes it."""

    def scrambled(word: int) -> int:
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        return ((word << 15 | word >> 17) & 0xFFFFFFFF) * 0x1B873593 & 0xFFFFFFFF

    found, whole = 0, len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        found ^= scrambled(word)
        found = ((found << 13 | found >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    found ^= scrambled(int.from_bytes(data[whole:], "little"))
    found ^= len(data)
    found = (found ^ found >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    found = (found ^ found >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return found ^ found >> 16


def test_the_bundle_is_that_of_the_hash_in_icebergs_specification() -> None:
    assert murmur3(b"iceberg") == 1_210_000_089
    assert bundle_numbers(pa.array(["iceberg"]), 1 << 31).tolist() == [1_210_000_089]
    assert bundle_of("iceberg", 16) == "09"


@given(st.lists(st.none() | st.text(max_size=40), max_size=20), st.integers(0, 3), st.integers(1, 100))
def test_every_key_has_the_bundle_of_its_own_hash(keys: list[str | None], skipped: int, count: int) -> None:
    expected = [murmur3((key or "").encode()) % (1 << 31) % count for key in keys]
    assert bundle_numbers(pa.array(keys, pa.string())[skipped:], count).tolist() == expected[skipped:]


def test_a_bundle_has_as_many_digits_as_the_last_one() -> None:
    expected = {(0, 1): "0", (3, 10): "3", (3, 11): "03", (99, 100): "99"}
    assert {bundle: bundle_text(*bundle) for bundle in expected} == expected
    assert bundle_of(None, 16) == bundle_of("", 16) == "00"


def keyed(identities: list[Identity], keys: list[str | None]) -> pa.RecordBatch:
    return batch(identities, key=pa.array(keys, pa.string()))


def test_an_object_in_a_bundle_is_sorted_by_key_and_then_by_sequence() -> None:
    keys = ["b", None, "a", "b", "größe", "a", None, "Z"]
    encoded = write(keyed(plain(8)[::-1], keys[::-1]), keyed(plain(2), keys[:2]), block=BLOCK, encoder=SIXTEEN)
    rows = [(row["key"], row[layout.SEQ]) for row in read(encoded).to_pylist()]
    assert rows == [(None, 2), (None, 7), ("Z", 8), ("a", 3), ("a", 6), ("b", 1), ("b", 4), ("größe", 5)]
    assert (encoded.messages, encoded.duplicates, encoded.name.rows) == (8, 2, 8)
    group = pq.ParquetFile(pa.BufferReader(encoded.data)).metadata.row_group(0)
    order = [group.column(each.column_index).path_in_schema for each in group.sorting_columns]
    assert order == [layout.KEY, layout.SEQ]
    assert all(group.column(at).has_column_index or not group.column(at).statistics for at in range(group.num_columns))


def test_the_name_and_the_footer_say_which_bundle_of_how_many() -> None:
    encoded = write(keyed(plain(3), ["b", "a", "b"]), block=BLOCK, encoder=replace(SIXTEEN, key_rule="{x}"))
    assert encoded.name.path.startswith("ORDERS/bundle=03/date=2023-11-14/hour=22/")
    assert layout.parse_path(encoded.name.path) == encoded.name
    found = metadata(encoded)
    assert (found["bundles"], found["key_rule"], found.get("key")) == ("16", "{x}", None)


def test_the_digest_is_that_of_the_same_messages_in_any_layout() -> None:
    identities = [*plain(50), *plain(9, start=20)]
    keys: list[str | None] = [f"k{seq * 7 % 5}" for seq, _ in identities]
    bundled = write(keyed(identities, keys), block=BLOCK, encoder=SIXTEEN)
    assert bundled.name.digest == write(batch(identities)).name.digest
    assert replace(bundled.name, bundle="") == replace(write(batch(identities)).name, key=None)


@given(st.integers(1, 5_000_000))
def test_row_groups_have_16k_to_64k_rows(rows: int) -> None:
    size = row_group_rows(rows)
    if rows < 1 << 14:
        assert size == rows
    else:
        assert 1 << 14 <= size <= 1 << 16
        assert rows % size == 0 or rows % size >= size - -(-rows // size)


def test_what_cannot_be_written_is_salvaged_into_the_quarantine_without_keys() -> None:
    rows = keyed(plain(3), ["b", None, "a"]).drop_columns([layout.PAYLOAD]).append_column("n", pa.array([1, 2, 3]))
    salvaged = SIXTEEN.salvage(BLOCK, [rows], ValueError("no"))
    assert salvaged.name.path.startswith("_quarantine/ORDERS/date=")
    table = read(salvaged)
    assert layout.KEY not in table.schema.names
    assert (table.column(layout.SEQ).to_pylist(), table.column("n").to_pylist()) == ([1, 2, 3], [1, 2, 3])


def test_text_objects_in_bundles_have_the_key_as_a_column_and_are_sorted_by_it() -> None:
    encoder = replace(SIXTEEN, format=TextWriter("ndjson", "none"))
    rows = map(
        json.loads,
        write(keyed(plain(3), ["b", None, "a"]), block=BLOCK, encoder=encoder).data.to_pybytes().splitlines(),
    )
    assert [(row["key"], row[layout.SEQ]) for row in rows] == [(None, 2), ("a", 3), ("b", 1)]
