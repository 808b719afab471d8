"""The examples of docs/formats.md decode messages as the page says."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from jetcapture_py.config.model import DecodeConfig
from jetcapture_py.transform.decode import make_decoder
from tests.support.batches import batch_of
from tests.support.documents import blocks
from tests.support.formats import descriptor_set, message_class
from tests.unit.transform.decode.test_avro import datum

STAMP = datetime(2026, 1, 31, 12, tzinfo=UTC)
CITY = {"address": {"city": "Bern"}}
PROTO = """
syntax = "proto3";
package shop.v1;
message Address { string city = 1; }
message Customer { Address address = 1; }
message Item { string sku = 1; }
message Order { int64 order_id = 1; Customer customer = 2; repeated Item items = 3; }
"""
AVRO: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "order_id", "type": "long"}]}
OLDER: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "order_id", "type": "int"}]}


def example(words: str, directory: Path) -> Any:
    """The decoder of the page's example that has the line `words`, with files in `directory`."""
    (block,) = [each for each in blocks("docs/formats.md", "yaml") if words in each.text.splitlines()]
    text = block.text.replace("/etc/jetcapture", str(directory))
    return make_decoder(DecodeConfig.model_validate(yaml.safe_load(text)["decode"]))


def rows(decoder: Any, *payloads: bytes) -> list[dict[str, Any]]:
    decoded = decoder.decode(batch_of(payloads))
    assert not decoded.failures
    found: list[dict[str, Any]] = decoded.fields.to_pylist()
    return found


def test_csv(tmp_path: Path) -> None:
    sent = 'order_id;amount;created at;tags;more\n1;NULL;2026-01-31T12:00:00Z;"[""a;b""]";x\n'
    (found,) = rows(example("  format: csv", tmp_path), sent.encode())
    assert found == {"order_id": 1, "amount": None, "at": STAMP, "tags": ["a;b"]}


def test_avro(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(AVRO))
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "7.avsc").write_text(json.dumps(OLDER))
    sent = b"\0" + struct.pack(">I", 7) + datum(OLDER, {"order_id": 5})
    assert rows(example("  format: avro", tmp_path), sent) == [{"order_id": 5}]


def test_protobuf(tmp_path: Path) -> None:
    path = descriptor_set(tmp_path, PROTO)
    order = message_class(path, "shop.v1.Order")(order_id=7)
    path.rename(tmp_path / "shop.pb")
    order.customer.address.city = "Bern"
    order.items.add(sku="a")
    (found,) = rows(example("  format: protobuf", tmp_path), order.SerializeToString())
    assert found == {"order_id": 7, "city": "Bern", "items": '[{"sku":"a"}]'}
