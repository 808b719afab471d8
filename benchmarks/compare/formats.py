"""The same orders in other formats than JSON, and what a capture needs to decode them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FORMATS = ("json", "msgpack", "csv", "avro", "protobuf")
COLUMNS = {
    "order_id": "int64",
    "region": "string",
    "amount": "float64",
    "created_at": "string",
    "item": "string",
}
_AVRO_TYPES = {"int64": "long", "float64": "double", "string": "string"}
_PROTOBUF_TYPES = {"int64": 3, "float64": 1, "string": 9}
Encode = Callable[[bytes], bytes]


def encoder(name: str) -> Encode:
    """Return the function from an order in JSON to a message in the format `name`."""
    return {"msgpack": _msgpack, "csv": _csv, "avro": _avro, "protobuf": _protobuf}[name]()


def settings(name: str, directory: Path) -> dict[str, Any]:
    """The section `decode` for messages in that format; schemas are written to `directory`."""
    if name == "avro":
        (directory / "order.avsc").write_text(json.dumps(_avro_schema()))
        return {"format": name, "schema": str(directory / "order.avsc")}
    if name == "protobuf":
        (directory / "order.pb").write_bytes(_descriptors().SerializeToString())
        return {"format": name, "schema": str(directory / "order.pb"), "message": "Order"}
    return {"format": name, "columns": COLUMNS}


def _msgpack() -> Encode:
    return lambda order: msgspec.msgpack.encode(json.loads(order))


def _csv() -> Encode:
    def encode(order: bytes) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(json.loads(order).values())
        return text.getvalue().encode()

    return encode


def _avro_schema() -> dict[str, Any]:
    fields = [{"name": name, "type": _AVRO_TYPES[kind]} for name, kind in COLUMNS.items()]
    return {"type": "record", "name": "Order", "fields": fields}


def _avro() -> Encode:
    schema = fastavro.parse_schema(_avro_schema())

    def encode(order: bytes) -> bytes:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, json.loads(order))
        return stream.getvalue()

    return encode


def _descriptors() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", syntax="proto3")
    order = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate(COLUMNS.items(), 1):
        order.field.add(name=name, number=number, type=_PROTOBUF_TYPES[kind], label=1)
    return descriptor_pb2.FileDescriptorSet(file=[file])


def _protobuf() -> Encode:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_descriptors().file[0])
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("Order"))
    return lambda order: bytes(kind(**json.loads(order)).SerializeToString())
