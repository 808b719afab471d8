"""Avro: types, resolution of older schemas, framings, containers, and data that is meant to do harm."""

from __future__ import annotations

import http.server
import io
import json
import struct
import threading
import tracemalloc
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import fastavro
import pyarrow as pa
import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form

from jetcapture_py.transform.batch import BatchTooWideError, decode_checked
from jetcapture_py.transform.decode import avro
from jetcapture_py.transform.decode.avro import AvroDecoder, Registry
from tests.support.batches import Declared, batch_of, outcomes
from tests.support.formats import zigzag


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def field(name: str, of: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": of, **more}


def logical(of: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": of, "logicalType": name, **more}


def datum(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def container(schema: Any, values: list[Any], codec: str = "null") -> bytes:
    stream = io.BytesIO()
    fastavro.writer(stream, fastavro.parse_schema(schema), values, codec=codec)
    return stream.getvalue()


def mark(schema: Any) -> bytes:
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


def decode(decoder: AvroDecoder, *payloads: bytes) -> list[dict[str, Any] | None]:
    return outcomes(decoder.decode(batch_of(payloads)), len(payloads))


def rows_of(decoder: AvroDecoder, *payloads: bytes) -> list[tuple[int, dict[str, Any]]]:
    decoded = decoder.decode(batch_of(payloads))
    messages = range(len(payloads)) if decoded.messages is None else decoded.messages.to_pylist()
    return list(zip(messages, decoded.fields.to_pylist(), strict=True))


STAMP = datetime(2026, 1, 31, 12, 0, 0, 123_456, UTC)
MICROS = int(STAMP.timestamp()) * 1_000_000 + 123_456


TYPES: list[tuple[Any, Any, str, Any]] = [
    ("boolean", True, "bool", True),
    ("int", -5, "int32", -5),
    ("long", 2**62, "int64", 2**62),
    ("float", 1.5, "float", 1.5),
    ("double", 0.1, "double", 0.1),
    ("bytes", b"\xff", "binary", b"\xff"),
    ("string", "東京", "string", "東京"),
    ({"type": "fixed", "name": "F", "size": 3}, b"abc", "binary", b"abc"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "string", "B"),
    (["null", "string"], None, "string", None),
    (["string", "null"], "x", "string", "x"),
    (["null", "int", "long"], 2**40, "int64", 2**40),
    (["float", "double"], 0.1, "double", 0.1),
    (["null", "string", "long"], 7, "string", "7"),
    (["null", "string", "long"], "x", "string", '"x"'),
    ({"type": "array", "items": ["null", "int"]}, [1, None], "list<item: int32>", [1, None]),
    ({"type": "map", "values": "double"}, {"a": 1.5}, "map<string, double>", [("a", 1.5)]),
    (record(field("a", "int"), name="S"), {"a": 1}, "struct<a: int32>", {"a": 1}),
    (["null", record(field("a", "int"), name="S")], None, "struct<a: int32>", None),
    (record(name="S"), {}, "string", "{}"),
    (logical("bytes", "decimal", precision=6, scale=2), Decimal("-1.25"), "decimal128(6, 2)", Decimal("-1.25")),
    (logical("int", "date"), date(2026, 1, 31), "date32[day]", date(2026, 1, 31)),
    (logical("int", "time-millis"), clock(1, 2, 3, 4000), "time64[us]", clock(1, 2, 3, 4000)),
    (logical("long", "time-micros"), clock(1, 2, 3, 4), "time64[us]", clock(1, 2, 3, 4)),
    (logical("long", "timestamp-millis"), 1500, "timestamp[us, tz=UTC]", datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)),
    (logical("long", "timestamp-micros"), STAMP, "timestamp[us, tz=UTC]", STAMP),
    (logical("long", "timestamp-nanos"), MICROS * 1000 + 789, "timestamp[us, tz=UTC]", STAMP),
    (logical("long", "local-timestamp-millis"), 1500, "timestamp[us]", datetime(1970, 1, 1, 0, 0, 1, 500_000)),
    (logical("long", "local-timestamp-micros"), MICROS, "timestamp[us]", STAMP.replace(tzinfo=None)),
    (logical("long", "local-timestamp-nanos"), MICROS * 1000, "timestamp[us]", STAMP.replace(tzinfo=None)),
    (logical("string", "uuid"), str(uuid.UUID(int=5)), "string", str(uuid.UUID(int=5))),
    (
        {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
        uuid.UUID(int=5).bytes,
        "string",
        str(uuid.UUID(int=5)),
    ),
    (
        {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"},
        struct.pack("<III", 1, 2, 3),
        "struct<months: int64, days: int64, milliseconds: int64>",
        {"months": 1, "days": 2, "milliseconds": 3},
    ),
    (logical("long", "no such type"), 7, "int64", 7),
]
"""Schema, value, type of the column, stored value."""
OUT_OF_RANGE: list[tuple[Any, bytes]] = [
    (logical("bytes", "decimal", precision=3, scale=2), zigzag(2) + b"\x7f\xff"),
    (logical("int", "time-millis"), zigzag(86_400_000)),
    (logical("long", "time-micros"), zigzag(-1)),
    (logical("long", "timestamp-millis"), zigzag(2**60)),
    (logical("string", "uuid"), zigzag(5) + b"hello"),
    ("bytes", zigzag(-5) + b"abcde"),
    (["null", "string"], zigzag(2)),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, zigzag(1)),
    ({"type": "map", "values": "long"}, zigzag(1) + zigzag(2**40)),
]
"""What is not among the hostile rows of `tests/support/formats.py`."""


def test_every_type_has_its_column() -> None:
    for of, sent, kind, stored in TYPES:
        schema = record(field("x", of))
        payload = datum(schema, {"x": sent})
        decoded = AvroDecoder(schema, {}).decode(batch_of([payload, payload[:-1], payload]))
        assert str(decoded.fields.schema.field("x").type) == kind
        rows = [row for row in outcomes(decoded, 3) if row is not None]
        assert rows == [{"x": stored}] * (2 if payload else 3), of


def test_a_column_whose_name_is_taken_gets_an_underscore() -> None:
    schema = record(*(field(name, "int") for name in ("key", "Id", "id", "_nats_seq")))
    decoded = AvroDecoder(schema, {}).decode(batch_of([datum(schema, {"key": 1, "Id": 2, "id": 3, "_nats_seq": 4})]))
    assert decoded.fields.to_pylist() == [{"key_": 1, "Id": 2, "id_": 3, "_nats_seq_": 4}]


def test_a_value_out_of_range_fails_its_message() -> None:
    for of, data in OUT_OF_RANGE:
        assert decode(AvroDecoder(record(field("x", of)), {}), data) == [None], of
        beside = record(field("id", "long"), field("x", of), field("end", "long"))
        assert decode(AvroDecoder(beside, {"id": Declared("int64")}), zigzag(1) + data) == [None], of


SCHEMA = record(
    field("id", "long"),
    field("at", logical("long", "timestamp-micros")),
    field("customer", ["null", record(field("city", "string"), field("age", "int"), name="C")]),
)


def test_declared_columns_are_found_by_path_and_widened_exactly() -> None:
    columns = {
        "id": Declared("int16"),
        "city": Declared("string", path="customer.city"),
        "age": Declared("float64", path="customer.age"),
        "whole": Declared("json", path="customer"),
        "seconds": Declared("timestamp", path="id", unit="s"),
    }
    sent = [
        {"id": 60, "at": STAMP, "customer": {"city": "Bern", "age": 40}},
        {"id": 2**20, "at": STAMP, "customer": None},
        {"id": 61, "at": STAMP, "customer": None},
    ]
    rows = decode(AvroDecoder(SCHEMA, columns), *(datum(SCHEMA, each) for each in sent))
    minute = datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
    whole = '{"city":"Bern","age":40}'
    assert rows[0] == {"id": 60, "city": "Bern", "age": 40.0, "whole": whole, "seconds": minute}
    assert rows[1] is None
    assert rows[2] == {"id": 61, "city": None, "age": None, "whole": None, "seconds": minute.replace(second=1)}


WRITER = record(field("id", "int"), field("gone", "string"))
READER = record(field("id", "long"), field("name", "string", default="none"))
OLD = {"id": 5, "gone": "x"}
NEW = {"id": 5, "name": "none"}


def test_single_object_encoding_names_the_schema_of_the_writer(tmp_path: Path) -> None:
    (tmp_path / "old.avsc").write_text(json.dumps(WRITER))
    (tmp_path / "broken.avsc").write_text("{")
    own = b"\xc3\x01" + mark(READER) + datum(READER, {"id": 5, "name": "none"})
    old = b"\xc3\x01" + mark(WRITER) + datum(WRITER, OLD)
    unknown = b"\xc3\x01" + b"12345678" + datum(WRITER, OLD)
    assert decode(AvroDecoder(READER, {}), own, datum(READER, NEW)) == [NEW, NEW]
    number = record(field("id", "long"), field("more", {"type": "fixed", "name": "F", "size": 8}))
    garbage = b"\xc3\x01" + b"12345678"  # which is also a datum of the reader's schema
    (reason,) = reasons(AvroDecoder(number, {}), garbage)
    assert reason.startswith("no schema with the fingerprint 3132333435363738")
    decoder = AvroDecoder(READER, {}, registry=Registry(str(tmp_path)))
    assert decode(decoder, own, old, unknown, old[:-1], datum(READER, NEW)) == [NEW, NEW, None, None, None]


def confluent(number: int, data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", number) + data


def test_the_wire_format_of_confluent_names_a_schema_in_the_registry(tmp_path: Path) -> None:
    (tmp_path / "7.avsc").write_text(json.dumps(WRITER))
    (tmp_path / "8.avsc").write_text(json.dumps(record(field("id", "string"))))
    (tmp_path / "9.avsc").write_text("no json")
    decoder = AvroDecoder(READER, {}, registry=Registry(str(tmp_path)))
    good = confluent(7, datum(WRITER, OLD))
    other = confluent(8, datum(record(field("id", "string")), {"id": "x"}))
    bad = [confluent(6, datum(WRITER, OLD)), other, confluent(9, datum(WRITER, OLD))]
    bad += [b"\1" + good[1:], b"\0\0\0", good[:-1], good + b"x", b""]
    assert decode(decoder, good, *bad, good) == [NEW, *[None] * len(bad), NEW]
    (reason,) = reasons(AvroDecoder(READER, {}), good)
    assert reason.endswith("; it begins like Confluent's wire format, with schema 7: set decode.registry")


ENDLESS = record(field("x", {"type": "array", "items": "null"}))
UNUSABLE = "cannot be used: an array whose items have no bytes"


class Answers(http.server.BaseHTTPRequestHandler):
    """A schema registry with two schemas, of which one cannot be used; it is down for its first requests."""

    asked: ClassVar[list[str]] = []
    down = 2

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if len(self.asked) <= self.down:
            self.send_error(503)
        elif (schema := {"/schemas/ids/7": WRITER, "/schemas/ids/9": ENDLESS}.get(self.path)) is None:
            self.send_error(404)
        else:
            body = json.dumps({"schema": json.dumps(schema)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Answers.asked = []
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_registry_over_http_is_asked_once_for_each_id_and_again_while_it_is_down(server: str) -> None:
    decoder = AvroDecoder(READER, {}, registry=Registry(f"{server}/"))
    good, unknown = confluent(7, datum(WRITER, OLD)), confluent(8, datum(WRITER, OLD))
    assert decode(decoder, good, unknown, good, unknown, good) == [NEW, None, NEW, None, NEW]
    assert decode(decoder, good, unknown) == [NEW, None]
    assert reasons(decoder, *[confluent(9, b"\2\0")] * 50) == [f"schema 9 {UNUSABLE}"] * 50
    assert Answers.asked == [*["/schemas/ids/7"] * 3, "/schemas/ids/8", "/schemas/ids/9"]


def test_a_registry_that_never_answers_is_not_asked_for_each(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avro, "_PATIENCE", 0.1)
    monkeypatch.setattr(Answers, "down", 1 << 30)
    decoder = AvroDecoder(READER, {}, registry=Registry(server))
    assert decode(decoder, *(confluent(number % 50, datum(WRITER, OLD)) for number in range(1000))) == [None] * 1000
    assert set(Answers.asked) == {"/schemas/ids/0"}


def test_the_rows_of_containers_are_rows_of_their_messages() -> None:
    decoder = AvroDecoder(READER, {}, container=True)
    for codec in ("null", "deflate", "snappy"):
        three = container(WRITER, [{"id": number, "gone": "x" * 100} for number in range(3)], codec)
        one = container(READER, [{"id": 9, "name": "own"}], codec)
        many = container(WRITER, [{"id": number, "gone": "x" * 100} for number in range(5000)], codec)
        bad = [three[:-1], three[:40], three + b"x", container(WRITER, [], codec), b"Obj\1", b"", datum(READER, NEW)]
        rows = rows_of(decoder, three, *bad, one, many)
        assert rows[:3] == [(0, {"id": number, "name": "none"}) for number in range(3)]
        assert rows[3] == (8, {"id": 9, "name": "own"})
        assert [row["id"] for message, row in rows if message == 9] == list(range(5000))
        assert len(rows) == 5004

    plain = container(WRITER, [OLD])
    sync = plain[-16:]
    header = plain[: plain.index(sync) + 16].replace(zigzag(4) + b"null", zigzag(9) + b"zstandard")
    data = pa.compress(datum(WRITER, OLD), codec="zstd", asbytes=True)
    zstandard = header + zigzag(1) + zigzag(len(data)) + data + sync
    assert rows_of(decoder, zstandard) == [(0, NEW)]


def test_a_container_cannot_inflate_or_count_beyond_bounds() -> None:
    decoder = AvroDecoder(READER, {}, container=True, max_inflated=100_000)
    large = container(WRITER, [{"id": 1, "gone": "x" * 200_000}], "deflate")
    good = container(WRITER, [OLD])
    sync = good[-16:]
    header = good[: good.index(sync) + 16]
    endless = header + zigzag(2**40) + zigzag(1) + b"\2" + sync
    negative = header + zigzag(-5) + zigzag(1) + b"\2" + sync
    other_marker = good[:-16] + bytes(16)
    codec = good.replace(zigzag(4) + b"null", zigzag(4) + b"what")
    nulls = container(record(field("a", {"type": "array", "items": "int"})), [{"a": []}])
    nulls = nulls.replace(b'"int"', b'"null"')
    sent = [large, endless, negative, other_marker, codec, nulls, good]
    assert rows_of(decoder, *sent) == [(6, NEW)]


def file_of(schema: Any, *blocks: tuple[int, bytes]) -> bytes:
    """A container with `schema` and blocks of a number of rows and their data, whatever these are."""
    text, sync = json.dumps(schema).encode(), bytes(range(16))
    parts = [b"Obj\1", zigzag(1), zigzag(11), b"avro.schema", zigzag(len(text)), text, zigzag(0), sync]
    for count, data in blocks:
        parts += [zigzag(count), zigzag(len(data)), data, sync]
    return b"".join(parts)


def tower(levels: int, of: Any) -> dict[str, Any]:
    """A record whose value has 2 ** `levels` values of type `of`."""
    fields = [field("id", "long")]
    for level in range(levels):
        fields.append(field(f"f{level}", record(field("a", of), field("b", of), name=f"L{level}")))
        of = f"L{level}"
    return record(*fields)


def reasons(decoder: AvroDecoder, *payloads: bytes) -> list[str]:
    return [failure.error for failure in decode_checked(decoder, batch_of(list(payloads))).failures]


def test_a_containers_schema_is_bounded() -> None:
    decoder = AvroDecoder(READER, {}, container=True)
    (reason,) = reasons(decoder, file_of(tower(30, "int"), (1, b"\2")))
    assert reason.startswith("not a datum of its schema"), "it costs no more than its size"
    wide = record(field("id", "long"), *(field(f"f{number}", "int") for number in range(10_000)))
    deep = record(
        field("f", record(field("x", "int"), name="D0")),
        *(field(f"f{level}", record(field("x", f"D{level}"), name=f"D{level + 1}")) for level in range(400)),
    )
    many = record(field("id", "long"), *(field(f"f{number}", record(name=f"E{number}")) for number in range(11)))
    found = reasons(decoder, *(file_of(of, (1, b"\2")) for of in (wide, deep, tower(30, "null"), many)))
    assert ["more than 20000" in found[0], "deep" in found[1]] == [True, True]
    assert [error.endswith("more than 10 parts without bytes") for error in found[2:]] == [True, True]


def test_rows_without_bytes_are_bounded_by_their_number() -> None:
    decoder = AvroDecoder(record(field("id", "long", default=7)), {}, container=True)
    beside = record(field("id", "long"), *(field(f"n{number}", "null") for number in range(10)))
    assert reasons(decoder, file_of(record(), (200_000, b""), (200_000, b""))) == ["more than 250000 rows"]
    assert len(rows_of(decoder, file_of(beside, (5_000, b"\2" * 5_000)))) == 5_000
    assert len(rows_of(decoder, file_of(record(), (250, b"")))) == 250


def test_items_that_are_announced_and_not_there_are_not_skipped_for_hours(tmp_path: Path) -> None:
    """The library alone would look for the end of 2 ** 40 items in a field that only the writer's schema has."""
    items = ["float", "double", "boolean", {"type": "fixed", "name": "F", "size": 5}]
    for number, item in enumerate(items):
        older = record(field("id", "long"), field("gone", {"type": "array", "items": item}))
        (tmp_path / f"{number}.avsc").write_text(json.dumps(older))
    decoder = AvroDecoder(record(field("id", "long")), {}, registry=Registry(str(tmp_path)))
    for number in range(len(items)):
        sent = confluent(number, b"\2" + zigzag(2**40)), confluent(number, b"\2\0")
        assert decode(decoder, *sent) == [None, {"id": 1}]


def test_bombs_in_containers_take_no_memory_beyond_the_limit() -> None:
    decoder = AvroDecoder(READER, {}, container=True, max_inflated=1 << 20)
    inflating = container(WRITER, [{"id": 1, "gone": "x" * (50 << 20)}], "deflate")
    text = b"[" + b"[]," * (3 << 20) + b"[]]"
    schema = b"Obj\1" + zigzag(1) + zigzag(11) + b"avro.schema" + zigzag(len(text)) + text + zigzag(0) + bytes(16)
    for payload, limit in ((inflating, 8 << 20), (schema, 3 * len(schema))):
        tracemalloc.start()
        (reason,) = reasons(decoder, payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit
    assert reason == "the schema has more than 1048576 bytes"


def test_containers_of_many_rows_or_bytes_are_decoded_in_smaller_batches() -> None:
    decoder = AvroDecoder(READER, {}, container=True)
    rows = container(WRITER, [OLD] * 60_000, "deflate")
    large = container(WRITER, [{"id": 1, "gone": "x" * (8 << 20)}], "deflate")
    for payload, count, fewer, expected in ((rows, 5, 1, 60_000), (large, 9, 7, 7)):
        with pytest.raises(BatchTooWideError):
            decoder.decode(batch_of([payload] * count))
        assert len(rows_of(decoder, *[payload] * fewer)) == expected


def test_a_schema_that_cannot_be_used_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    check = avro.check_size
    monkeypatch.setattr(avro, "check_size", lambda schema: (asked.append(schema), check(schema)))
    decoder = AvroDecoder(READER, {}, container=True)
    bad = file_of(record(field("id", {"type": "array", "items": "null"})), (1, b"\2"))
    assert len(set(reasons(decoder, bad, bad) + reasons(decoder, bad))) == 1
    assert len(asked) == 1
    for number in range(300):
        assert len(rows_of(decoder, file_of(record(field("id", "long"), name=f"R{number}"), (1, b"\2")))) <= 1
    assert reasons(decoder, bad)
    assert len(asked) == 302


def test_an_enum_has_no_symbol_with_a_negative_number(tmp_path: Path) -> None:
    enum = {"type": "enum", "name": "default", "symbols": ["A", "B"]}
    items = {"type": "array", "items": "default"}
    schema = record(field("a", enum), field("b", ["null", "default"]), field("c", items))
    older = record(field("a", {**enum, "symbols": ["B", "A"]}))
    newer = record(field("a", enum), field("b", ["null", "default"], default=None))
    good = [b"\0\2\2\2\2\0", b"\2\0\0"]
    bad = [b"\1\2\2\0", b"\0\2\1\0", b"\0\2\2\2\1\0", b"\4\0\0"]
    assert decode(AvroDecoder(schema, {}), *good, *bad) == [
        {"a": "A", "b": "B", "c": ["B"]},
        {"a": "B", "b": None, "c": []},
        *[None] * 4,
    ]
    (tmp_path / "1.avsc").write_text(json.dumps(older))
    resolving = AvroDecoder(newer, {}, registry=Registry(str(tmp_path)))
    assert decode(resolving, confluent(1, b"\0"), confluent(1, b"\1")) == [{"a": "B", "b": None}, None]


def test_a_directory_of_schemas_is_read_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = avro._read
    monkeypatch.setattr(avro, "_read", lambda path: (read.append(path), real(path))[1])
    (tmp_path / "1.avsc").write_text(json.dumps(record(field("id", "long"))))
    decoder = AvroDecoder(READER, {}, registry=Registry(str(tmp_path)))
    unknown = [b"\xc3\x01" + struct.pack(">Q", number) + b"\2" for number in range(1, 500)]
    assert decode(decoder, *unknown) == [None] * 499
    assert len(read) == 1
    (tmp_path / "2.avsc").write_text(json.dumps(WRITER))
    assert decode(decoder, unknown[0], b"\xc3\x01" + mark(WRITER) + datum(WRITER, OLD), unknown[0]) == [None, NEW, None]
    assert len(read) == 4
    (tmp_path / "3.avsc").write_text(json.dumps(ENDLESS))
    assert set(reasons(decoder, *[b"\xc3\x01" + mark(ENDLESS) + b"\2\0"] * 50)) == {f"its schema {UNUSABLE}"}
    assert len(read) < 10, "what cannot be used is read once"
