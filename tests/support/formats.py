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
    *("", "plain", 'quoted "name"', "comma, and\nline break", "Zürich 東京 🎉", "a\r\nb", '"', "null"),
    *(" space ", None),
)


def rows(count: int, seed: int = 1) -> list[Row]:
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


@dataclass(frozen=True)
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
    changes: dict[str, tuple[Any, ...]] = {
        "id": ("7", 1.0, 2**63),
        "small": (2**31,),
        "flag": (1,),
        "name": (b"bytes",),
        "price": ("1.005", "1e30"),
        "day": ("2026-02-30",),
        "at": ("yesterday", msgpack.ExtType(5, b"12345678"), msgpack.Timestamp(2**40)),
        "tags": (["a", 1],),
    }
    found = msgpack.unpackb(payload)
    changed = [msgpack.packb({**found, name: value}) for name, values in changes.items() for value in values]
    cut = payload[: chance.randrange(1, len(payload))]
    deep = b"\x81\xa4more" + b"\x91" * 50_000
    others = [cut, payload + b"\0", b"", b"\xc1", msgpack.packb([1, 2]), b"\xdf\xff\xff\xff\xff", deep, deep + b"\xc0"]
    others += [b"\x81\xa4name\xa2\xff\xfe", b"\x81\xa4tags\xdd\xff\xff\xff\xff", b"\x81\xa4name\xdb\xff\xff\xff\xff"]
    return chance.choice([*changed, *others])


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


_GOOD = {"id": "1", "name": "a", "amount": "1.5", "price": "1.50", "at": "2026-01-01T00:00:00Z", "day": "2026-01-01"}
_GOOD |= {"flag": "true", "small": "1", "tags": "[]"}
_WRONG = {
    "name": ('"open', 'open"', 'a"b"', '"a"b', "a\rb", "a\nb", "\udcff", "\udced\udca0\udc80"),
    "tags": ('"', "[1]", "[" * 50_000),
    "id": ('"1', "1.0", " 1", "0x10", "1_000", "9223372036854775808", "9" * 100_000),
    "small": ("2147483648",),
    "amount": ("1e400", "nan"),
    "price": (
        *("1.005", "10000000000.00", str(2**128 + 1), f"-{2**127}.00", "9" * 5000, "1e-41", "0.5e-60", "1e-10000000"),
        *("1e-99999999", "1e99999999", "1e99999999999999999999", "9999999999.99" + "9" * 26),
    ),
    "flag": ("yes", "1"),
    "at": ("2026-01-01T00:00:00",),
    "day": ("2026-02-30",),
}
"""What CSV has in fields: good values, and for each field wrong ones."""


def _hostile_csv(delimiter: str) -> Callable[[random.Random, bytes], bytes]:
    mark, good = delimiter.encode(), delimiter.join(_GOOD.values()).encode()
    rows = [{**_GOOD, name: value} for name, values in _WRONG.items() for value in values]
    hostile = [delimiter.join(row.values()).encode("utf-8", "surrogateescape") for row in rows]
    hostile += [b"", b"\n", good + mark + b"one more", good.rpartition(mark)[0], b"\n" + good, good + b"\n" + good]
    return lambda chance, _: chance.choice(hostile)


# ------------------------------------------------------------------ Avro


def zigzag(number: int) -> bytes:
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
    good = {"id": zigzag(1), "name": zigzag(1) + zigzag(1) + b"a", "amount": struct.pack("<d", 1.5)}
    good |= {"price": zigzag(1) + b"\x7d", "at": zigzag(10**15), "day": zigzag(1), "flag": b"\1"}
    good |= {"small": zigzag(1), "tags": zigzag(0)}
    text = zigzag(1)
    wrong = {
        "id": (b"\xff" * 11,),
        "name": (zigzag(5), text + zigzag(2) + b"\xff\xfe", text + zigzag(2**40) + b"a", text + zigzag(-3) + b"a"),
        "price": (zigzag(8) + b"\x7f" * 8, zigzag(2**50)),
        "at": (zigzag(2**62),),
        "day": (zigzag(2**30),),
        "small": (zigzag(2**31),),
        "tags": (zigzag(2**55), zigzag(1) + zigzag(1), b""),
    }
    found = [b"".join({**good, name: value}.values()) for name, values in wrong.items() for value in values]
    found += [payload[: chance.randrange(1, len(payload))], payload + b"\0", b"", b'{"id": 1}']
    return chance.choice([*found, b"\xc3\x01\0\0\0\0\0\0\0\0" + payload])


# ------------------------------------------------------------------ protobuf


def descriptor_set(directory: Path, text: str = PROTO) -> Path:
    (directory / "row.proto").write_text(text)
    path = directory / "row.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={path}", "row.proto"], check=True)
    return path


def message_class(path: Path, name: str) -> Any:
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
    found = [payload + end for end in (b"\x12\x05a", b"\x0a", b"\x4a\x02\xc3\x28")]
    found += [b"\x12\x01\xff", b"\x09" + bytes(8), b"\x08" + b"\xff" * 11, b"\x12" + b"\xff" * 4 + b"\x07"]
    found += [b"\x12" + b"\xff" * 8 + b"\x7f", b"\x1d" + bytes(4), b"\x10\x01", b"\x52\x02\x10\x01", b"\x0c", b"\x07"]
    found += [b"\x52" * 100_000, b"\x5b" * 100_000, deep, b"\x2a\x0a\x08" + b"\xff" * 8 + b"\x7f"]
    return chance.choice([*found, b"\x2a\x0b\x10" + b"\xff" * 9 + b"\x01", b'{"id": 1}'])


def formats(directory: Path) -> dict[str, Format]:
    """All formats; their schemas are written to `directory`."""
    (directory / "row.avsc").write_text(json.dumps(AVRO))
    columns = {"columns": COLUMNS}
    avro_settings = {"schema": str(directory / "row.avsc"), **columns}
    found = {
        "msgpack": Format(columns, _msgpack, _from_msgpack, _hostile_msgpack),
        "avro": Format(avro_settings, _avro, _from_avro, _hostile_avro),
    }
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        found[name] = Format(columns, _csv(delimiter), _from_csv(delimiter), _hostile_csv(delimiter))
    path = descriptor_set(directory)
    kind = message_class(path, "shop.v1.Row")
    found["protobuf"] = Format(
        {"schema": str(path), "message": "shop.v1.Row", "columns": {**COLUMNS, "price": "string", "day": "int32"}},
        _protobuf(kind),
        _from_protobuf(kind),
        _hostile_protobuf,
        lambda row: {**row, "price": str(row["price"]), "day": (row["day"] - EPOCH).days},
    )
    return found
