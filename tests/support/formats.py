"""Rows in every format that is decoded, by libraries other than ours: valid ones, and hostile ones."""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import avro.io
import avro.schema
import msgpack
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

UTC = dt.UTC
Row = dict[str, Any]
COLUMNS = {
    "id": "int64",
    "name": "string",
    "amount": "float64",
    "price": "decimal(12, 2)",
    "at": "timestamp",
    "day": "date",
    "flag": "bool",
    "small": "int32",
    "tags": "list<string>",
}
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "amount", "type": "double"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "flag", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
PROTO = """
syntax = "proto3";
package shop.v1;
import "google/protobuf/timestamp.proto";
message Row {
  int64 id = 1;
  optional string name = 2;
  double amount = 3;
  string price = 4;
  google.protobuf.Timestamp at = 5;
  sint32 day = 6;
  bool flag = 7;
  int32 small = 8;
  repeated string tags = 9;
  Row next = 10;
}
"""
NAMES = (
    "",
    "plain",
    'quoted "name"',
    "comma, and\nline break",
    "Zürich 東京 🎉",
    "a\r\nb",
    '"',
    "null",
    " space ",
    None,
)


def rows(count: int, seed: int = 1) -> list[Row]:
    """Random rows."""
    chance = random.Random(seed)
    return [
        {
            "id": chance.choice([number, chance.randrange(-(2**63), 2**63)]),
            "name": chance.choice(NAMES),
            "amount": chance.choice([0.0, -1.5, chance.random() * 10 ** chance.randrange(-300, 300)]),
            "price": Decimal(chance.randrange(-(10**12) + 1, 10**12)).scaleb(-2),
            "at": dt.datetime(2026, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=chance.randrange(10**15)),
            "day": dt.date(2026, 1, 1) + dt.timedelta(days=chance.randrange(-100_000, 100_000)),
            "flag": chance.random() < 0.5,
            "small": chance.randrange(-(2**31), 2**31),
            "tags": [str(name) for name in chance.choices(NAMES, k=chance.randrange(4))],
        }
        for number in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format: its settings in a configuration, how a row is written and read by another library, what is hostile.

    `stored` says what a row's values are in the archive.
    """

    settings: dict[str, Any]
    encode: Callable[[Row], bytes]
    reference: Callable[[bytes], Row]
    hostile: Callable[[random.Random, bytes], bytes]
    stored: Callable[[Row], Row] = lambda row: row


@lru_cache(maxsize=1)
def _bomb() -> bytes:
    return gzip.compress(bytes(200 << 20), 1)


def mixed(of: Format, count: int, seed: int = 1) -> list[tuple[bytes, Row | None]]:
    """`count` payloads, one in ten hostile, with their rows by the reference library; None for hostile ones.

    Some are compressed.
    """
    chance = random.Random(seed)
    found: list[tuple[bytes, Row | None]] = []
    for row in rows(count, seed):
        payload = of.encode(row)
        if chance.random() < 0.1:
            bad = of.hostile(chance, payload)
            found.append((chance.choice([bad, bad, gzip.compress(bad), gzip.compress(payload)[:-5]]), None))
            if chance.random() < 0.02:
                found[-1] = (_bomb(), None)
            continue
        packed = [payload, payload, gzip.compress(payload), pa.compress(payload, codec="zstd", asbytes=True)]
        found.append((chance.choice(packed), of.reference(payload)))
        assert plain(found[-1][1]) == plain(of.stored(row))
    return found


def plain(row: Row | None) -> Row | None:
    """The row without the difference between null and empty text, which CSV readers do not make."""
    return None if row is None else {**row, "name": row["name"] or None}


# ------------------------------------------------------------------ MessagePack


def _msgpack(row: Row) -> bytes:
    at = msgpack.Timestamp.from_datetime(row["at"])
    packed: bytes = msgpack.packb({**row, "price": str(row["price"]), "at": at, "day": str(row["day"]), "more": [1]})
    return packed


def _from_msgpack(payload: bytes) -> Row:
    found = msgpack.unpackb(payload, timestamp=3)
    return {
        **{name: found[name] for name in COLUMNS},
        "price": Decimal(found["price"]),
        "day": dt.date.fromisoformat(found["day"]),
    }


def _hostile_msgpack(chance: random.Random, payload: bytes) -> bytes:
    def with_value(name: str, value: Any) -> bytes:
        found = msgpack.unpackb(payload)
        return bytes(msgpack.packb({**found, name: value}))

    return chance.choice(
        [
            lambda: payload[: chance.randrange(1, len(payload))],
            lambda: payload + b"\0",
            lambda: b"",
            lambda: b"\xc1",
            lambda: bytes(msgpack.packb([1, 2])),
            lambda: with_value("id", "7"),
            lambda: with_value("id", 1.0),
            lambda: with_value("id", 2**63),
            lambda: with_value("small", 2**31),
            lambda: with_value("flag", 1),
            lambda: with_value("name", b"bytes"),
            lambda: with_value("price", "1.005"),
            lambda: with_value("price", "1e30"),
            lambda: with_value("day", "2026-02-30"),
            lambda: with_value("at", "yesterday"),
            lambda: with_value("at", msgpack.ExtType(5, b"12345678")),
            lambda: with_value("at", msgpack.Timestamp(2**40)),
            lambda: with_value("tags", ["a", 1]),
            lambda: b"\x81\xa4name\xa2\xff\xfe",
            lambda: b"\x81\xa4tags\xdd\xff\xff\xff\xff",
            lambda: b"\x81\xa4name\xdb\xff\xff\xff\xff",
            lambda: b"\xdf\xff\xff\xff\xff",
            lambda: b"\x81\xa4more" + b"\x91" * 50_000,
            lambda: b"\x81\xa4more" + b"\x91" * 50_000 + b"\xc0",
        ]
    )()


# ------------------------------------------------------------------ CSV


def _csv(delimiter: str) -> Callable[[Row], bytes]:
    def encode(row: Row) -> bytes:
        texts = [
            row["id"],
            row["name"],
            repr(row["amount"]),
            row["price"],
            row["at"].isoformat(),
            row["day"],
            str(row["flag"]).lower(),
            row["small"],
            json.dumps(row["tags"]),
        ]
        fields = []
        for text in texts:
            field = "" if text is None else str(text)
            if text == "" or any(char in field for char in f'"\r\n{delimiter}'):
                field = '"' + field.replace('"', '""') + '"'
            fields.append(field)
        return (delimiter.join(fields) + "\n" * (row["id"] % 2)).encode()

    return encode


def _from_csv(delimiter: str) -> Callable[[bytes], Row]:
    def decode(payload: bytes) -> Row:
        (fields,) = csv.reader(io.StringIO(payload.decode(), newline=""), delimiter=delimiter, strict=True)
        found: Row = dict(zip(COLUMNS, fields, strict=True))
        return {
            "id": int(found["id"]),
            "name": found["name"],
            "amount": float(found["amount"]),
            "price": Decimal(found["price"]),
            "at": dt.datetime.fromisoformat(found["at"]),
            "day": dt.date.fromisoformat(found["day"]),
            "flag": found["flag"] == "true",
            "small": int(found["small"]),
            "tags": json.loads(found["tags"]),
        }

    return decode


def _hostile_csv(delimiter: str) -> Callable[[random.Random, bytes], bytes]:
    def fields(**changed: str) -> bytes:
        good = {"id": "1", "name": "a", "amount": "1.5", "price": "1.50", "at": "2026-01-01T00:00:00Z"}
        good |= {"day": "2026-01-01", "flag": "true", "small": "1", "tags": "[]"}
        return delimiter.join((good | changed).values()).encode("utf-8", "surrogateescape")

    def hostile(chance: random.Random, payload: bytes) -> bytes:
        return chance.choice(
            [
                lambda: b"",
                lambda: b"\n",
                lambda: fields() + delimiter.encode() + b"one more",
                lambda: fields().rpartition(delimiter.encode())[0],
                lambda: b"\n" + fields(),
                lambda: fields() + b"\n" + fields(),
                lambda: fields(name='"open'),
                lambda: fields(name='open"'),
                lambda: fields(name='a"b"'),
                lambda: fields(name='"a"b'),
                lambda: fields(tags='"'),
                lambda: b'"' + fields(),
                lambda: fields(name="a\rb"),
                lambda: fields(name="a\nb"),
                lambda: fields(name="\udcff"),
                lambda: fields(name="\udced\udca0\udc80"),
                lambda: fields(id="1.0"),
                lambda: fields(id=" 1"),
                lambda: fields(id="0x10"),
                lambda: fields(id="1_000"),
                lambda: fields(id="9223372036854775808"),
                lambda: fields(id="9" * 100_000),
                lambda: fields(small="2147483648"),
                lambda: fields(amount="1e400"),
                lambda: fields(amount="nan"),
                lambda: fields(price="1.005"),
                lambda: fields(price="10000000000.00"),
                lambda: fields(price=str(2**128 + 1)),
                lambda: fields(price=f"-{2**127}.00"),
                lambda: fields(price="9" * 5000),
                lambda: fields(price="1e-41"),
                lambda: fields(price="0.5e-60"),
                lambda: fields(price="1e-10000000"),
                lambda: fields(price="1e-99999999"),
                lambda: fields(price="1e99999999"),
                lambda: fields(price="1e99999999999999999999"),
                lambda: fields(price="9999999999.99" + "9" * 26),
                lambda: fields(flag="yes"),
                lambda: fields(flag="1"),
                lambda: fields(at="2026-01-01T00:00:00"),
                lambda: fields(day="2026-02-30"),
                lambda: fields(tags="[1]"),
                lambda: fields(tags="[" * 50_000),
            ]
        )()

    return hostile


# ------------------------------------------------------------------ Avro


def zigzag(number: int) -> bytes:
    """A number as Avro writes it."""
    value, found = number << 1 ^ number >> 63, bytearray()
    while value & ~0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


_AVRO = avro.schema.parse(json.dumps(AVRO))


def _avro(row: Row) -> bytes:
    stream = io.BytesIO()
    avro.io.DatumWriter(_AVRO).write(row, avro.io.BinaryEncoder(stream))
    return stream.getvalue()


def _from_avro(payload: bytes) -> Row:
    found: Any = avro.io.DatumReader(_AVRO).read(avro.io.BinaryDecoder(io.BytesIO(payload)))
    return {name: found[name] for name in COLUMNS}


def _hostile_avro(chance: random.Random, payload: bytes) -> bytes:
    def parts(**changed: bytes) -> bytes:
        good = {"id": zigzag(1), "name": zigzag(1) + zigzag(1) + b"a", "amount": struct.pack("<d", 1.5)}
        good |= {"price": zigzag(1) + b"\x7d", "at": zigzag(10**15), "day": zigzag(1), "flag": b"\1"}
        good |= {"small": zigzag(1), "tags": zigzag(0)}
        return b"".join((good | changed).values())

    return chance.choice(
        [
            lambda: payload[: chance.randrange(1, len(payload))],
            lambda: payload + b"\0",
            lambda: b"",
            lambda: parts(id=b"\xff" * 11),
            lambda: parts(name=zigzag(5)),
            lambda: parts(name=zigzag(1) + zigzag(2) + b"\xff\xfe"),
            lambda: parts(name=zigzag(1) + zigzag(2**40) + b"a"),
            lambda: parts(name=zigzag(1) + zigzag(-3) + b"a"),
            lambda: parts(price=zigzag(8) + b"\x7f" * 8),
            lambda: parts(price=zigzag(2**50)),
            lambda: parts(at=zigzag(2**62)),
            lambda: parts(day=zigzag(2**30)),
            lambda: parts(small=zigzag(2**31)),
            lambda: parts(tags=zigzag(2**55)),
            lambda: parts(tags=zigzag(1) + zigzag(1)),
            lambda: parts(tags=b""),
            lambda: b'{"id": 1}',
            lambda: b"\xc3\x01\0\0\0\0\0\0\0\0" + payload,
        ]
    )()


# ------------------------------------------------------------------ protobuf


def descriptor_set(directory: Path, text: str = PROTO) -> Path:
    """What protoc writes for a .proto file with `text`."""
    (directory / "row.proto").write_text(text)
    path = directory / "row.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={path}", "row.proto"], check=True)
    return path


def message_class(path: Path, name: str) -> Any:
    """Google's class for a type in a descriptor set."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))  # type: ignore[no-untyped-call]


EPOCH = dt.date(1970, 1, 1)


def _protobuf(kind: Any) -> Callable[[Row], bytes]:
    def encode(row: Row) -> bytes:
        found = kind(**{name: row[name] for name in ("id", "amount", "flag", "small", "tags")})
        found.price = str(row["price"])
        found.at.FromDatetime(row["at"])
        found.day = (row["day"] - EPOCH).days
        if row["name"] is not None:
            found.name = row["name"]
        return bytes(found.SerializeToString())

    return encode


def _from_protobuf(kind: Any) -> Callable[[bytes], Row]:
    def decode(payload: bytes) -> Row:
        found = kind.FromString(payload)
        return {
            **{name: getattr(found, name) for name in ("id", "amount", "flag", "small")},
            "name": found.name if found.HasField("name") else None,
            "price": found.price,
            "at": found.at.ToDatetime(UTC),
            "day": found.day,
            "tags": list(found.tags),
        }

    return decode


def _hostile_protobuf(chance: random.Random, payload: bytes) -> bytes:
    deep = b""
    for _ in range(200):
        size, length = len(deep), bytearray()
        while size > 0x7F:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        deep = b"\x52" + bytes([*length, size]) + deep
    return chance.choice(
        [
            lambda: payload + b"\x12\x05a",
            lambda: payload + b"\x0a",
            lambda: b"\x12\x01\xff",
            lambda: payload + b"\x4a\x02\xc3\x28",
            lambda: b"\x09" + bytes(8),
            lambda: b"\x08" + b"\xff" * 11,
            lambda: b"\x12\xff\xff\xff\xff\x07",
            lambda: b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
            lambda: b"\x1d" + bytes(4),
            lambda: b"\x10\x01",
            lambda: b"\x52\x02\x10\x01",
            lambda: b"\x0c",
            lambda: b"\x07",
            lambda: b"\x52" * 100_000,
            lambda: b"\x5b" * 100_000,
            lambda: deep,
            lambda: b"\x2a\x0a\x08" + b"\xff" * 8 + b"\x7f",
            lambda: b"\x2a\x0b\x10" + b"\xff" * 9 + b"\x01",
            lambda: b'{"id": 1}',
        ]
    )()


def formats(directory: Path) -> dict[str, Format]:
    """All formats; their schemas are written to `directory`."""
    (directory / "row.avsc").write_text(json.dumps(AVRO))
    found = {
        "msgpack": Format(
            settings={"columns": COLUMNS},
            encode=_msgpack,
            reference=_from_msgpack,
            hostile=_hostile_msgpack,
        ),
        "avro": Format(
            settings={"schema": str(directory / "row.avsc"), "columns": COLUMNS},
            encode=_avro,
            reference=_from_avro,
            hostile=_hostile_avro,
        ),
    }
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        found[name] = Format(
            settings={"columns": COLUMNS},
            encode=_csv(delimiter),
            reference=_from_csv(delimiter),
            hostile=_hostile_csv(delimiter),
        )
    path = descriptor_set(directory)
    kind = message_class(path, "shop.v1.Row")
    found["protobuf"] = Format(
        settings={"schema": str(path), "message": "shop.v1.Row", "columns": COLUMNS_OF_PROTOBUF},
        encode=_protobuf(kind),
        reference=_from_protobuf(kind),
        hostile=_hostile_protobuf,
        stored=lambda row: {**row, "price": str(row["price"]), "day": (row["day"] - EPOCH).days},
    )
    return found


COLUMNS_OF_PROTOBUF = {**COLUMNS, "price": "string", "day": "int32"}
