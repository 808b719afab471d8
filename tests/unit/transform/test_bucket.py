"""The columns of a KV bucket's entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.transform.batch import MessageBatch, decode_checked
from jetcapture_py.transform.decode import RawDecoder, make_decoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.kv import BucketDecoder, operations_of
from tests.support.batches import Declared, decode_settings, outcomes

Entry = tuple[str, bytes, Mapping[str, str]]
PUT: dict[str, str] = {}
DELETE = {"KV-Operation": "DEL"}
PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
EXPIRED = {"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "1m0s"}


def entries(*found: Entry) -> MessageBatch:
    headers = [[(name, [value]) for name, value in each.items()] or None for _, _, each in found]
    known = {
        layout.SUBJECT: pa.array([subject for subject, *_ in found], pa.string()),
        layout.SEQ: pa.array(range(7, 7 + len(found)), pa.int64()),
        layout.HEADERS: pa.array(headers, ENVELOPE.field(layout.HEADERS).type),
        layout.PAYLOAD: pa.array([payload for _, payload, _ in found], pa.binary()),
    }
    arrays = [known.get(field.name, pa.nulls(len(found), field.type)) for field in ENVELOPE]
    return MessageBatch(stream="KV_s", rows=pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE))


def decoded(decoder: Any, *found: Entry) -> list[dict[str, Any] | None]:
    return outcomes(decode_checked(BucketDecoder(decoder), entries(*found)), len(found))


PUTS = [PUT, {"Nats-TTL": "1h"}, {"KV-Operation": ""}, {"KV-Operation": "PUT"}, {"kv-operation": "DEL"}]
OPERATIONS: list[tuple[dict[str, str], str]] = [
    *((headers, "put") for headers in PUTS),
    *((DELETE, "delete"), (PURGE, "purge"), (EXPIRED, "expire")),
    *(({"Nats-Marker-Reason": "Purge"}, "purge"), ({"Nats-Marker-Reason": "Remove"}, "delete")),
    ({"KV-Operation": "DEL", "Nats-Marker-Reason": "MaxAge"}, "delete"),
]


def test_headers_tell_the_operation_as_clients_read_them() -> None:
    batch = entries(*(("$KV.s.a", b"", headers) for headers, _ in OPERATIONS))
    expected = [operation for _, operation in OPERATIONS]
    assert operations_of(batch.column(layout.HEADERS)).to_pylist() == expected
    assert operations_of(batch.slice(3, 4).column(layout.HEADERS)).to_pylist() == expected[3:7]


def test_every_entry_has_its_key_operation_and_revision() -> None:
    found = decoded(RawDecoder(), ("$KV.s.auth.user", b"x", PUT), ("$KV.origin.é=/", b"", PURGE), ("other", b"", PUT))
    assert found == [
        {"key_name": "auth.user", "operation": "put", "revision": 7},
        {"key_name": "é=/", "operation": "purge", "revision": 8},
        {"key_name": None, "operation": "put", "revision": 9},
    ]


@pytest.mark.parametrize("columns", [{}, {"n": Declared("int64")}], ids=["inferred", "declared"])
def test_deletions_are_not_decoded_and_bad_values_fail_alone(columns: dict[str, Declared]) -> None:
    decoder = make_decoder(decode_settings(format="json", columns=columns))
    sent = [(b"", DELETE), (b'{"n": 1}', PUT), (b"{", PUT), (b"", EXPIRED), (b'{"n": 2}', PUT), (b"", PUT)]
    found = decoded(decoder, *((f"$KV.s.{key}", *entry) for key, entry in zip("abcdef", sent, strict=True)))
    rows = [each and (each["key_name"], each["operation"], each["n"]) for each in found]
    assert rows[:3] == [("a", "delete", None), ("b", "put", 1), None]
    assert rows[3:] == [("d", "expire", None), ("e", "put", 2), ("f", "put", None)]


def test_values_with_several_rows_keep_their_order() -> None:
    decoder = make_decoder(decode_settings(format="json", rows="array", columns={"n": Declared("int64")}))
    batch = entries(("$KV.s.a", b'[{"n":1},{"n":2}]', PUT), ("$KV.s.b", b"", DELETE), ("$KV.s.c", b'[{"n":3}]', PUT))
    found = decode_checked(BucketDecoder(decoder), batch)
    assert found.messages is not None
    assert found.messages.to_pylist() == [0, 0, 1, 2]
    assert found.fields.column("key_name").to_pylist() == ["a", "a", "b", "c"]
    assert found.fields.column("n").to_pylist() == [1, 2, None, 3]


def test_fields_called_like_columns_of_the_bucket_are_renamed_without_a_collision() -> None:
    value = b'{"Operation": "sum", "operation_": "x", "revision": "v2", "key_name": 5, "key": 6}'
    found = BucketDecoder(InferringDecoder(conflict="widen")).decode(entries(("$KV.s.a", value, PUT)))
    renamed = {"Operation_": "sum", "operation__": "x", "revision_": "v2", "key_name_": 5, "key_": 6}
    assert found.fields.to_pylist() == [{"key_name": "a", "operation": "put", "revision": 7, **renamed}]
    assert found.columns is not None
    assert set(found.columns.names) == renamed.keys(), "known columns are passed on under their names"
