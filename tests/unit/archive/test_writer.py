from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive import writer as encode
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE, HEADERS_TYPE, REPLY
from jetcapture_py.archive.writer import EncodedBlock, Encoder

ORDERS: dict[str, Any] = {"stream": "ORDERS", "interval": 900, "compression": "zstd"}
ENCODER = Encoder(**ORDERS, stream_created="2024-01-01T00:00:00Z", consumer="archive", writer="host:1")
BLOCK = BlockId(key="eu/west", bucket=1_700_000_100)
Identity = tuple[int, int]  # sequence, timestamp in microseconds


def batch(identities: list[Identity], **columns: Any) -> pa.RecordBatch:
    """Messages with everything else derived from the identity; `columns` are added."""
    count = len(identities)
    known = {
        layout.SUBJECT: pa.array([f"s.{seq % 3}" for seq, _ in identities], pa.string()),
        layout.SEQ: pa.array([seq for seq, _ in identities], pa.int64()),
        layout.TIMESTAMP: pa.array([time for _, time in identities], pa.timestamp("us", "UTC")),
        layout.NANOS: pa.array([seq * 7 % 1000 for seq, _ in identities], pa.int16()),
        layout.DELIVERED: pa.array([1] * count, pa.int32()),
        layout.HEADERS: pa.array([[("N", [str(seq), "x"])] for seq, _ in identities], HEADERS_TYPE),
        layout.PAYLOAD: pa.array([b"%d/%d" % each for each in identities], pa.binary()),
        REPLY: pa.array([b"ack"] * count, pa.binary()),
    }
    rows = pa.RecordBatch.from_arrays([known[field.name] for field in ENVELOPE], schema=ENVELOPE)
    for name, values in columns.items():
        rows = rows.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))
    return rows


def write(*batches: pa.RecordBatch, block: BlockId = BLOCK, encoder: Encoder = ENCODER) -> EncodedBlock:
    return encoder.encode(block, "age", list(batches))


def read(encoded: EncodedBlock) -> pa.Table:
    table = pq.read_table(pa.BufferReader(encoded.data))
    table.validate(full=True)
    return table


def metadata(encoded: EncodedBlock) -> dict[str, str]:
    """The footer's entries of ours."""
    found = pq.read_metadata(pa.BufferReader(encoded.data)).metadata or {}
    entries = {key.decode().partition(layout.METADATA_PREFIX): value.decode() for key, value in found.items()}
    return {name: value for (_, prefix, name), value in entries.items() if prefix}


def plain(count: int, start: int = 1) -> list[Identity]:
    return [(seq, 1_700_000_100_000_000 + seq) for seq in range(start, start + count)]


identities = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=40)


@settings(deadline=None)
@given(identities, st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 10))
def test_the_same_messages_in_any_order_and_batching_have_one_name(
    messages: list[Identity], chance: random.Random, batches: int, again: int
) -> None:
    distinct = sorted(set(messages))
    reference = write(batch(distinct))
    shuffled = distinct + messages + messages[:again]
    chance.shuffle(shuffled)
    cut = -(-len(shuffled) // batches)
    encoded = write(*(batch(shuffled[at : at + cut]) for at in range(0, len(shuffled), cut)))
    assert encoded.name == reference.name
    assert encoded.messages == encoded.name.rows == len(distinct)
    assert encoded.duplicates == len(shuffled) - len(distinct)
    table = read(encoded)
    assert table.column(layout.PAYLOAD).to_pylist() == [b"%d/%d" % each for each in distinct]


def test_what_was_decoded_and_who_wrote_it_does_not_change_the_name() -> None:
    other = Encoder(stream="ORDERS", interval=900, compression="none", writer="elsewhere:2")
    assert write(batch(plain(5), a=list("abcde")), encoder=other).name == write(batch(plain(5))).name
    assert write(batch(plain(100))).data == write(batch(plain(100))).data


def test_rows_and_messages_are_counted_apart_and_a_batch_without_row_numbers_is_row_zero() -> None:
    one = batch([(1, 5)], v=["a"])
    again = batch([(1, 5), (2, 6), (2, 6)], _nats_row=pa.array([0, 0, 1], pa.int32()), v=["a", "b0", "b1"])
    encoded = write(one, again)
    found = metadata(encoded)
    assert (encoded.name.rows, encoded.duplicates, found["messages"], found["rows"]) == (3, 1, "2", "3")


def test_columns_and_types_are_those_of_the_format() -> None:
    rows = batch(plain(2), _nats_row=pa.array([0, 0], pa.int32()), a=[1, 2])
    schema = read(write(rows)).schema
    types = {"stream": "string", "subject": "string", "seq": "int64", "timestamp": "timestamp[us, tz=UTC]"}
    types |= {"nanos": "int16", "delivered": "int32", "payload": "binary", "row": "int32"}
    expected = {f"_nats_{name}": text for name, text in types.items()} | {"key": "string", "a": "int64"}
    assert {field.name: str(field.type) for field in schema if field.name != layout.HEADERS} == expected
    assert schema.field(layout.HEADERS).type == pa.map_(pa.string(), pa.list_(pa.string()))
    assert schema.names == [*layout.ENVELOPE, layout.ROW, layout.KEY, "a"]


def test_rows_that_are_in_order_are_not_copied() -> None:
    one, two = batch(plain(500)), batch(plain(500, start=501))
    for order in ([one, two], [two, one]):
        real = encode.ObjectWriter.write
        with mock.patch.object(encode.ObjectWriter, "write", autospec=True, side_effect=real) as to:
            write(*order)
        (_, table), _ = to.call_args
        addresses = [chunk.buffers()[2].address for chunk in table.column(layout.PAYLOAD).chunks]
        assert addresses == [rows.column(layout.PAYLOAD).buffers()[2].address for rows in (one, two)]


NESTED = pa.array(
    [
        {"point": {"x": 1.5, "tags": ["a", None]}, "list": [{"k": 1}, {"k": None}], "deep": [[1], [], None]},
        {"point": None, "list": [], "deep": None},
        None,
    ]
)


def test_nested_columns_come_back_and_have_statistics() -> None:
    values = {
        "nested": NESTED,
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "large": pa.array([["a"], [], None], pa.large_list(pa.large_string())),
    }
    values = {name: pa.concat_arrays([column] * 50) for name, column in values.items()}
    encoded = write(batch(plain(150), **values))
    table = read(encoded)
    for name, column in values.items():
        assert table.column(name).to_pylist() == column.to_pylist(), name
    leaves = columns(encoded)
    for path in ("nested.point.x", "nested.list.list.element.k", "map.key_value.key", "map.key_value.value"):
        assert leaves[path].statistics is not None, path
        assert leaves[path].statistics.has_min_max, path
        assert any("DICTIONARY" in encoding for encoding in leaves[path].encodings), path


KINDS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ns")),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.decimal128(20, 4)),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(8)),
]


def test_columns_of_every_type_come_back_whether_they_repeat_themselves_or_not() -> None:
    units = {pa.timestamp("s"): pa.timestamp("ms"), pa.time32("s"): pa.time32("ms"), pa.date64(): pa.date32()}
    for different, rows in ((1, 3), (90, 100), (1, 2000), (2000, 2000)):
        expected = {f"c{number}": values_of(kind, different, rows) for number, kind in enumerate(KINDS)}
        table = read(write(batch(plain(rows), **expected)))
        for (name, values), kind in zip(expected.items(), KINDS, strict=True):
            column = table.column(name)
            assert column.combine_chunks().cast(kind).equals(values), kind
            assert column.type in (kind, units.get(kind), pa.string(), pa.binary()), kind


def values_of(kind: pa.DataType, different: int, rows: int) -> pa.Array:
    """Numbers up to `different`, again and again, as `kind` writes them; the second is null."""
    top = min(different, 100) if kind in (pa.int8(), pa.uint8()) else different
    numbers: list[Any] = [index * 7919 % top for index in range(rows)]
    if "binary" in str(kind) or "string" in str(kind):
        numbers = [b"%08d" % number for number in numbers]
    elif kind == pa.bool_():
        numbers = [number % 2 == 0 for number in numbers]
    elif kind == pa.date64():
        numbers = [number * 86_400_000 for number in numbers]
    numbers[1] = None
    return pa.array(numbers, kind)


def columns(encoded: EncodedBlock) -> dict[str, Any]:
    """What the footer says of the first row group's columns."""
    group = pq.read_metadata(pa.BufferReader(encoded.data)).row_group(0)
    return {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}


def encodings(encoded: EncodedBlock) -> dict[str, str]:
    """The encoding of every column's values."""
    chosen = ("DICTIONARY", "DELTA_BINARY_PACKED")
    found = {path: " ".join(column.encodings) for path, column in columns(encoded).items()}
    return {path: next((each for each in chosen if each in text), "PLAIN") for path, text in found.items()}


def test_a_column_has_a_dictionary_only_where_it_repeats_itself() -> None:
    chance = random.Random(0)
    count = 5000
    makers: dict[str, Callable[[int], Any]] = {
        "number": int,
        "status": lambda _: chance.choice([200, 404, 500]),
        "hashed": lambda _: chance.getrandbits(62),
        "customer": lambda _: chance.randrange(300) << 40,
        "amount": lambda _: chance.randrange(100_000) / 100,
        "price": lambda _: chance.randrange(100) / 100,
        "name": lambda _: chance.choice(["red", "green", "blue"]),
        "id": lambda _: f"{chance.getrandbits(128):032x}",
    }
    columns = {name: [make(index) for index in range(count)] for name, make in makers.items()}
    times = pa.array([chance.randrange(1 << 30) for _ in range(count)], pa.timestamp("us", "UTC"))
    found = encodings(write(batch(plain(count), **columns, time=times)))
    by_encoding = {
        "DICTIONARY": ("key", "status", "customer", "price", "name", "_nats_subject", "_nats_stream"),
        "DELTA_BINARY_PACKED": ("number", "time", "_nats_seq", "_nats_timestamp"),
        "PLAIN": ("hashed", "amount", "id"),
    }
    assert {encoding: {found[name] for name in names} for encoding, names in by_encoding.items()} == {
        encoding: {encoding} for encoding in by_encoding
    }


def test_a_compatible_object_has_only_encodings_that_every_reader_knows() -> None:
    known = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
    rows = batch(plain(5000), number=list(range(5000)), time=pa.array(range(5000), pa.timestamp("us", "UTC")))
    for compatible in (True, False):
        found = columns(write(rows, encoder=replace(ENCODER, compatible=compatible)))
        assert ({text for column in found.values() for text in column.encodings} <= known) is compatible


def test_of_a_few_rows_only_what_is_long_is_compressed_and_the_first_column_which_tells_the_codec() -> None:
    rows = batch(plain(5), note=["x" * 1000] * 5, short=["x"] * 5)
    found = {path: column.compression for path, column in columns(write(rows)).items()}
    assert [path for path, codec in found.items() if codec != "UNCOMPRESSED"] == [layout.STREAM, "note"]
    assert found["note"] == found[layout.STREAM] == "ZSTD"


def test_payloads_that_are_too_small_to_compress_are_written_however_much_they_repeat() -> None:
    for count in range(60, 130):
        payloads = pa.array([b"{}"] * count, pa.binary())
        rows = batch([(seq, seq) for seq in range(1, count + 1)])
        rows = rows.set_column(rows.schema.get_field_index(layout.PAYLOAD), layout.PAYLOAD, payloads)
        assert read(write(rows))[layout.PAYLOAD].combine_chunks() == payloads


def test_batches_whose_columns_drifted_are_written_together() -> None:
    drifted: list[dict[str, Any]] = [{}, {"a": [1]}, {"a": [1.5], "b": ["x"]}, {"b": [{"c": 1}]}, {"a": pa.nulls(1)}]
    encoded = write(*(batch([(seq, seq)], **columns) for seq, columns in enumerate(drifted, 1)))
    table = read(encoded)
    assert table.column("a").to_pylist() == [None, 1.0, 1.5, None, None]
    assert table.column("b").to_pylist() == [None, None, "x", '{"c":1}', None]
    assert table.column(layout.SEQ).to_pylist() == [1, 2, 3, 4, 5]
    assert metadata(encoded)["rows"] == "5"
    for kind in (pa.null(), pa.list_(pa.null()), pa.struct([("a", pa.null())])):
        assert read(write(batch(plain(2), a=pa.nulls(2, kind)))).num_rows == 2


def test_the_footer_says_all_that_the_format_promises() -> None:
    encoded = write(batch([*plain(3, start=10), plain(1, start=10)[0]], a=[1, 2, 3, 1]))
    found = metadata(encoded)
    expected = {"format": "1", "stream": "ORDERS", "stream_created": "2024-01-01T00:00:00Z", "consumer": "archive"}
    expected |= {"key": "eu/west", "bucket": "1700000100", "interval": "900", "first_seq": "10", "last_seq": "12"}
    expected |= {"messages": "3", "rows": "3", "sealed_by": "age", "writer": "host:1", "digest": encoded.name.digest}
    assert found == expected | {name: found[name] for name in ("schema_id", "checksum", "footer_checksum")}
    assert len(found["schema_id"]) == 16
    assert b"ARROW:schema" not in pq.read_metadata(pa.BufferReader(encoded.data)).metadata


HOSTILE = "\x18\x13jetcapture.checksum\x18\x10" + "0" * 16


def test_the_checksums_are_those_of_the_file_and_of_its_footer_with_zeros_in_their_places() -> None:
    for key in ("eu", HOSTILE, None):
        encoded = write(batch(plain(100), a=[HOSTILE] * 100), block=BlockId(key=key, bucket=0))
        data, found = encoded.data.to_pybytes(), metadata(encoded)
        assert [data.count(found[entry].encode()) for entry in ("checksum", "footer_checksum")] == [1, 1]
        footer_bytes = data[len(data) - 8 - int.from_bytes(data[-8:-4], "little") :]
        zeroed = footer_bytes.replace(found["footer_checksum"].encode(), b"0" * 16)
        assert hashlib.blake2b(zeroed, digest_size=8).hexdigest() == found["footer_checksum"]
        for entry in ("checksum", "footer_checksum"):
            data = data.replace(found[entry].encode(), b"0" * 16)
        assert hashlib.blake2b(data, digest_size=8).hexdigest() == found["checksum"]
        assert found.get("key") == key


def test_a_checksum_does_not_depend_on_the_pieces() -> None:
    data, places = bytes(range(256)), [200, 40]
    whole = layout.checksum([data], places)
    assert whole != layout.checksum([data], [41, 200])
    for cuts in ([0, 45, 256], [0, 1, 40, 56, 57, 205, 216, 256], list(range(257))):
        assert layout.checksum([data[start:end] for start, end in pairwise(cuts)], places) == whole


def test_the_footer_names_key_and_rule_where_there_are_any() -> None:
    encoded = write(batch(plain(1)), block=BlockId(key=None, bucket=0))
    assert not {"key", "key_rule"} & metadata(encoded).keys()
    assert "key=__HIVE_DEFAULT_PARTITION__" in encoded.name.path
    for rule in ("", "{subject}", "a-{größe}\n"):
        assert metadata(write(batch(plain(1)), encoder=replace(ENCODER, key_rule=rule)))["key_rule"] == rule


def test_a_footer_is_found_at_the_end_of_an_object_and_proven_by_its_checksum() -> None:
    for columns in (1, 3000):  # a footer of more than is read at first
        values = {f"column_{number}": list(range(100)) for number in range(columns)}
        encoded = write(batch(plain(100), **values), encoder=replace(ENCODER, key_rule="{subject}"))
        data = encoded.data.to_pybytes()
        found = footer_of(data)
        assert footer.is_proven(found)
        assert footer.entries(footer.decoded(found).metadata) == metadata(encoded)
    place = data.rindex(b"jetcapture.key_rule")
    for broken in (data[:-1], data[:place] + b"J" + data[place + 1 :], b"", b"PAR1", data[-100:], b"x" * 70_000):
        assert not footer.is_proven(footer_of(broken))


def footer_of(data: bytes) -> bytes:
    return footer.find(lambda size: data[-size:])


def test_the_schema_id_is_the_same_for_the_same_columns_only() -> None:
    one = metadata(write(batch(plain(1), a=[1])))["schema_id"]
    assert one == metadata(write(batch(plain(9), a=list(range(9)))))["schema_id"]
    assert one != metadata(write(batch(plain(1), a=["x"])))["schema_id"]
    assert one != metadata(write(batch(plain(1), b=[1])))["schema_id"]


def test_columns_are_compressed_and_have_statistics_as_readers_need_them() -> None:
    leaves = columns(write(batch(plain(3000))))
    assert {leaf.compression for leaf in leaves.values()} == {"ZSTD"}
    seq, subject, payload = leaves[layout.SEQ], leaves[layout.SUBJECT], leaves[layout.PAYLOAD]
    assert (seq.statistics.min, seq.statistics.max) == (1, 3000)
    assert (subject.statistics.min, subject.statistics.max) == ("s.0", "s.2")
    assert leaves[layout.TIMESTAMP].statistics.has_min_max
    assert leaves["_nats_headers.key_value.key"].statistics.has_min_max
    assert payload.statistics is None or not payload.statistics.has_min_max
    for compression, codec in {"none": "UNCOMPRESSED", "snappy": "SNAPPY", "gzip": "GZIP"}.items():
        encoded = write(batch(plain(100)), encoder=replace(ENCODER, compression=compression))
        assert columns(encoded)[layout.STREAM].compression == codec
        assert read(encoded).num_rows == 100


def test_a_large_block_has_several_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "ROW_GROUP_BYTES", 100_000)
    encoded = write(batch(plain(10_000)))
    found = pq.read_metadata(pa.BufferReader(encoded.data))
    assert found.num_row_groups > 3
    assert found.num_rows == 10_000
    ranges = [found.row_group(index).column(2).statistics for index in range(found.num_row_groups)]
    assert all(before.max < after.min for before, after in pairwise(ranges))


def quarantined(identities: list[Identity]) -> pa.RecordBatch:
    count = len(identities)
    raw = pa.array([None] * count, pa.binary())
    return batch(identities, stage=["decode"] * count, error=["not JSON"] * count, raw_headers=raw)


def field_ids(encoded: EncodedBlock) -> dict[str, int]:
    """The field id of every field by its path, as Parquet readers see it."""

    def of(fields: Any, path: str) -> dict[str, int]:
        found = {}
        for field in fields:
            kind, own = field.type, f"{path}{field.name}"
            found[own] = int(field.metadata[b"PARQUET:field_id"])
            inner = kind.field(0).type if pa.types.is_map(kind) else kind  # its entries have no id
            found |= of([inner.field(index) for index in range(inner.num_fields)], f"{own}.")
        return found

    return of(pq.read_schema(pa.BufferReader(encoded.data)), "")


OWN_IDS = {"_nats_stream": 1, "_nats_subject": 2, "_nats_seq": 3, "_nats_timestamp": 4, "_nats_delivered": 5}
OWN_IDS |= {"_nats_headers": 6, "_nats_payload": 7, "_nats_nanos": 10, "_nats_headers.key": 12}
OWN_IDS |= {"_nats_headers.value": 13, "_nats_headers.value.element": 14}
"""Tables name columns by these numbers: none may ever change."""


def test_field_ids_never_change_and_do_not_depend_on_the_order_of_columns_or_the_case_of_names() -> None:
    columns = {
        "_nats_row": pa.array([0, 0], pa.int32()),
        "_nats_time": pa.array([1, 2], pa.timestamp("us", "UTC")),
        "error": pa.array(["x", None]),
        "point": pa.array([{"x": 1.5, "tags": [{"name": "a"}]}] * 2),
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
    }
    decoded = {"error": 1_376_038_627, "map": 1_148_936_415, "map.key": 1_868_590_432, "map.value": 2_047_682_691}
    decoded |= {"point": 529_635_621, "point.x": 36_825_084, "point.tags": 1_458_711_353}
    decoded |= {"point.tags.element": 2_127_720_901, "point.tags.element.name": 1_621_311_155}
    found = field_ids(write(batch(plain(2), **columns)))
    assert found == OWN_IDS | {"_nats_row": 8, "key": 9, "_nats_time": 11} | decoded
    turned = dict(sorted(columns.items(), reverse=True))
    assert field_ids(write(batch(plain(2), **turned))) == found
    of_integers = field_ids(write(batch(plain(2), point=[1, 2])))["point"]
    assert of_integers != decoded["point"], "no number may stand for values that no column of a table can hold together"
    for integers in (pa.array([1, 2], pa.int8()), pa.array([1, 2], pa.uint16())):
        assert field_ids(write(batch(plain(2), POINT=integers)))["POINT"] == of_integers
    of_quarantine = field_ids(write(quarantined(plain(2)), block=BlockId(key=None, bucket=0, quarantine=True)))
    assert of_quarantine == OWN_IDS | {"stage": 15, "error": 16, "raw_headers": 17}


def test_fields_that_get_the_same_id_by_chance_are_told_apart_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layout._hashed_id.cache_clear()
    monkeypatch.setattr(layout, "MAX_FIELD_ID", layout.MIN_FIELD_ID + 3)
    try:
        found = layout.field_ids(dict.fromkeys("cabd", "long"))
        assert sorted(found.values()) == [1000, 1001, 1002, 1003]
        assert found == layout.field_ids(dict.fromkeys("dbca", "long"))
        assert {path: layout.field_ids({path: "long"})[path] == found[path] for path in "abcd"}["a"]
    finally:
        layout._hashed_id.cache_clear()


def test_a_block_whose_columns_cannot_be_written_is_salvaged_into_the_quarantine() -> None:
    unwritable = batch(plain(2), a=pa.nulls(2, pa.struct([])))
    with pytest.raises(pa.ArrowException) as caught:
        write(unwritable)
    encoded = ENCODER.salvage(BLOCK, [unwritable, batch(plain(2, start=2), b=[1, 2])], caught.value)
    table = read(encoded)
    assert (encoded.name.quarantine, encoded.name.key, encoded.name.bucket) == (True, None, BLOCK.bucket)
    assert table.schema.names == [*layout.ENVELOPE, "stage", "error", "raw_headers"]
    assert table.column(layout.PAYLOAD).to_pylist() == [b"%d/%d" % each for each in plain(3)]
    assert set(table.column("stage").to_pylist()) == {"encode"}
    assert all(error.startswith("Arrow") and "\n" not in error for error in table.column("error").to_pylist())
    assert metadata(encoded)["sealed_by"] == "error"
    assert (encoded.messages, encoded.duplicates) == (3, 1)
    rows = batch([(1, 5), (1, 5)], _nats_row=pa.array([0, 1], pa.int32()), a=["x", "y"])
    encoded = ENCODER.salvage(BLOCK, [rows], ValueError("no"))
    assert read(encoded).num_rows == encoded.messages == 1, "a message of several rows is salvaged once"


def test_without_payloads_what_was_decoded_is_salvaged() -> None:
    positions = pa.array([0, 1, 0], pa.int32())
    rows = batch([(1, 5), (1, 5), (2, 6)], _nats_row=positions, a=["x", "y", "z"], Error=[1, 2, 3])
    encoded = ENCODER.salvage(BLOCK, [rows.drop_columns([layout.PAYLOAD])], ValueError("no"))
    assert (encoded.messages, encoded.name.quarantine) == (2, True)
    assert read(encoded).column("a").to_pylist() == ["x", "y", "z"]
    assert read(encoded).column("decoded_Error").to_pylist() == [1, 2, 3]
    assert read(encoded).column("error").to_pylist() == ["ValueError: no"] * 3
    unwritable = batch([(1, 5)], a=pa.nulls(1, pa.struct([]))).drop_columns([layout.PAYLOAD])
    assert read(ENCODER.salvage(BLOCK, [unwritable], ValueError("no"))).column(layout.SEQ).to_pylist() == [1]
