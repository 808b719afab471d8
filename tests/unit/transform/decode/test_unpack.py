"""Compressed payloads, and several rows of a message."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import cramjam
import msgpack
import pyarrow as pa
import pytest

from jetcapture_py.transform.batch import BatchTooWideError, decode_checked
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.decode.bounds import BYTES_AT_ONCE, MAX_ROWS
from jetcapture_py.transform.decode.compression import inflater
from jetcapture_py.transform.keys import make_key
from tests.support.batches import Declared, batch_of, decode_settings, outcomes

MAX_SIZE = 10_000
COLUMNS = {"a": Declared("int64")}


def packed(codec: str) -> Callable[[bytes], bytes]:
    return lambda data: bytes(pa.compress(data, codec=codec, asbytes=True))


zstd, snappy = packed("zstd"), packed("snappy")


def zstd_without_size(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def framed(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress(data))


COMPRESSED = [("gzip", gzip.compress), ("zstd", zstd), ("zstd", zstd_without_size)]
COMPRESSED += [("snappy", snappy), ("snappy", framed)]
MAGIC = 11
"""Bytes that `auto` needs to recognize each compression."""


def refused(name: str, data: bytes, reason: str = ".") -> None:
    with pytest.raises(ValueError, match=reason):
        inflater(name, MAX_SIZE)(data)


def test_payloads_are_inflated_up_to_their_limit() -> None:
    for name, compress in COMPRESSED:
        names = [name] if compress is snappy else [name, "auto"]
        for data in (b"x", b"hello " * 20, b"x" * MAX_SIZE, bytes(range(256)) * 20):
            assert [inflater(each, MAX_SIZE)(compress(data)) for each in names] == [data] * len(names)
            assert inflater("auto", MAX_SIZE)(data) == data
        for data in (b"x" * (MAX_SIZE + 1), bytes(50 << 20)):
            for each in names:
                refused(each, compress(data), "inflates to more than")


def test_damaged_or_truncated_data_is_refused() -> None:
    for name, compress in COMPRESSED:
        whole = compress(b"some text, some more text, and some text " * 9)
        for size in range(1, len(whole)):
            refused(name, whole[:size])
            if size >= MAGIC and compress is not snappy:
                refused("auto", whole[:size])
        for follows in (b"x", b"\xff" * 20):
            refused(name, whole + follows)
    data = bytearray(framed(b"hello world"))
    data[-1] ^= 1
    refused("snappy", bytes(data), "checksum")


def test_frames_and_members_that_follow_each_other_are_one_payload() -> None:
    assert inflater("gzip", MAX_SIZE)(gzip.compress(b"a") + gzip.compress(b"b")) == b"ab"
    assert inflater("zstd", MAX_SIZE)(zstd(b"a") + zstd(b"b")) == b"ab"
    refused("gzip", gzip.compress(b"") * 1001, "members")
    for window in (0xFF, 0xA0):
        refused("zstd", b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + b"\x01\x00\x00", "too much memory")


@pytest.mark.parametrize(("name", "compress"), COMPRESSED)
def test_a_bomb_takes_no_memory_beyond_the_limit(name: str, compress: Any) -> None:
    bomb = compress(bytes((10 if name == "snappy" else 100) << 20))  # snappy makes a twentieth of it at best
    config = decode_settings(format="json", compression=name, max_inflated=1 << 20, columns=COLUMNS)
    decoder = make_decoder(config)
    good = compress(b'{"a": 1}')
    assert outcomes(decoder.decode(batch_of([good])), 1) == [{"a": 1}]  # and whatever that imports
    pool, before = pa.default_memory_pool(), pa.default_memory_pool().max_memory()
    tracemalloc.start()
    rows = outcomes(decoder.decode(batch_of([bomb, good] * 5)), 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [None, {"a": 1}] * 5
    assert peak < 5 * len(bomb) + (8 << 20)
    assert pool.max_memory() - before < 64 << 20


COUNT = 1 << 23
CONTAINERS = {
    "json": b'{"a":[' + b"{}," * COUNT + b"1]}",
    "msgpack": b"\x81\xa1a\xdd" + COUNT.to_bytes(4, "big") + b"\x80" * COUNT,
}
DAMAGED = {"json": b"{" + CONTAINERS["json"], "msgpack": b"\x82" + CONTAINERS["msgpack"][1:] + b"\x01\x01"}


@pytest.mark.parametrize("payloads", [CONTAINERS, DAMAGED], ids=["whole", "damaged"])
@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_inferred_objects_beyond_count_are_refused_without_memory(name: str, payloads: dict[str, bytes]) -> None:
    decoder = make_decoder(decode_settings(format=name, compression="gzip"))
    bomb = gzip.compress(payloads[name], 1)
    tracemalloc.start()
    decoded = decode_checked(decoder, batch_of([bomb]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [failure.error for failure in decoded.failures] == [
        "more than 2,097,152 objects and lists; declare decode.columns"
    ]
    assert peak < 6 * len(CONTAINERS[name])
    with pytest.raises(BatchTooWideError):
        decoder.decode(batch_of([bomb, gzip.compress(b"{}")]))


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("json", {"a": {"b": "[{" * 1_500_000, "c": '\\"{' * 1_000_000}}),
        ("msgpack", {"a": {"b": "\u0410" * 2_500_000}, "c": [b"\x80" * 2_500_000], "d": list(range(0x80, 0xA0))}),
    ],
)
def test_what_looks_like_objects_in_strings_does_not_count(name: str, sent: dict[str, Any]) -> None:
    payload = json.dumps(sent).encode() if name == "json" else msgpack.packb(sent)
    decoder = make_decoder(decode_settings(format=name))
    assert outcomes(decode_checked(decoder, batch_of([payload])), 1) == [sent]


LARGE = gzip.compress(b'{"a": 1, "b": "%b"}' % (b"x" * (BYTES_AT_ONCE // 3)))
MUCH: list[tuple[dict[str, Any], list[bytes], int, int]] = [
    ({"format": "json", "compression": "gzip"}, [LARGE] * 4, 1, 1),
    ({"format": "json", "rows": "lines"}, [b'{"a": 1}\n' * 20_000] * 15, 2, 40_000),
    ({"format": "json", "rows": "array"}, [b"[%b{}]" % (b"{}," * 20_000)] * 15, 2, 40_002),
    ({"format": "csv", "rows": "lines"}, [b"1\n" * 20_000] * 15, 2, 40_000),
    (
        {"format": "csv", "rows": "lines", "header": True},
        [b"a,b%d\n" % number + b"1,2\n" * 60_000 for number in range(5)],
        1,
        60_000,
    ),
]
"""Settings, too many payloads for one batch, how many are few enough, and their rows."""


def test_many_bytes_and_rows_are_decoded_in_smaller_batches() -> None:
    for settings, payloads, few, rows in MUCH:
        decoder = make_decoder(decode_settings(columns=COLUMNS, **settings))
        with pytest.raises(BatchTooWideError):
            decoder.decode(batch_of(payloads))
        assert decoder.decode(batch_of(payloads[:few])).fields.num_rows == rows


def rows_of(sent: list[bytes], **settings: Any) -> tuple[list[tuple[int, Any]], dict[int, str]]:
    decoded = decode_checked(make_decoder(decode_settings(columns=COLUMNS, **settings)), batch_of(sent))
    messages = range(len(sent)) if decoded.messages is None else decoded.messages.to_pylist()
    rows = list(zip(messages, (row["a"] for row in decoded.fields.to_pylist()), strict=True))
    return rows, {failure.index: failure.error for failure in decoded.failures}


def test_each_line_is_a_row_and_a_bad_one_fails_its_message() -> None:
    sent = [b'{"a": 1}\n{"a": 2}\n', b'{"a": 3}', b'{"a": 4}\r\n\n  \n{"a": 5}', b'{"a": 6}\n{"a": "x"}\n{"a": 7', b""]
    sent += [b"\n \n", b'{"a": 8}', b'{"a": "\n"}']
    sent += [gzip.compress(b'{"a": 9}\n{"a": 10}'), gzip.compress(b'{"a": 1}')[:-3]]
    rows, errors = rows_of(sent, format="json", rows="lines", compression="auto")
    assert rows == [(0, 1), (0, 2), (1, 3), (2, 4), (2, 5), (4, None), (6, 8), (8, 9), (8, 10)]
    assert errors.keys() == {3, 5, 7, 9}
    assert errors[3].startswith("row 1: ")
    assert errors[5] == "the payload has no rows"


@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_each_element_is_a_row_and_a_bad_one_fails_its_message(name: str) -> None:
    pack = {"json": lambda value: json.dumps(value).encode(), "msgpack": msgpack.packb}[name]
    sent = [pack([{"a": 1}, {"a": 2, "b": [1, {"c": ","}]}]), pack([]), pack({"a": 3}), pack([{"a": 4}, 5])]
    sent += [pack([{"a": 6}]), pack([{"a": 7}])[:-1], pack([{"a": number} for number in range(1000)]), b""]
    rows, errors = rows_of(sent, format=name, rows="array")
    assert rows[:3] == [(0, 1), (0, 2), (4, 6)]
    assert rows[3:] == [*((6, number) for number in range(1000)), (7, None)]
    assert errors.keys() == {1, 2, 3, 5}
    assert errors[3].startswith("row 1: ")


TOO_MANY: list[tuple[str, str, bytes, bytes]] = [
    ("json", "lines", b'{"a": 1}', b"{}\n" * (MAX_ROWS + 1)),
    ("json", "array", b'[{"a": 1}]', b"[%b{}]" % (b"{}," * MAX_ROWS)),
    ("json", "array", b'[{"a": 1}]', b"[%b1]" % (b"1," * 12_000_000)),
    ("msgpack", "array", b"\x91\x81\xa1a\x01", b"\xdd\xff\xff\xff\xff" + b"\x80" * 10),
    ("msgpack", "array", b"\x91\x81\xa1a\x01", b"\xdd\x00\x04\x00\x00" + b"\x80" * (1 << 18)),
    ("csv", "lines", b"1", b"1\n" * (MAX_ROWS + 1)),
]


def test_too_many_rows_fail_their_message_alone() -> None:
    for name, rows, good, payload in TOO_MANY:
        found, errors = rows_of([good, payload, good], format=name, rows=rows)
        assert found == [(0, 1), (2, 1)]
        assert "more than" in errors[1]


def test_too_many_elements_of_an_array_take_little_memory_before_they_are_counted() -> None:
    for element, error in ((b"0", "$[0]"), (b"{}", "more than 250000")):
        payload = b"[%b%b]" % ((element + b",") * 1_100_000, element)
        tracemalloc.start()
        found, errors = rows_of([payload], format="json", rows="array")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == []
        assert error in errors[0]
        assert peak < 12 * len(payload)


def test_a_key_of_inferred_fields_is_that_of_the_first_row_of_an_unpacked_payload() -> None:
    texts = {"one": b'{"k": 1.0}', "lines": b'{"k": 1.0}\n{"k": 2}', "array": b'[{"k": 1.0}, {"k": 2}]'}
    for rows, text in texts.items():
        config = decode_settings(format="json", rows=rows, compression="auto")
        batch = batch_of([gzip.compress(text), text, b"", None])
        keys = make_key("{k}", config)(batch, pa.RecordBatch.from_arrays([], names=[]))
        assert keys.to_pylist() == ["1.0", "1.0", None, None]
