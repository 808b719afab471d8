"""The columns of a KV bucket's entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.config.model import parse
from jetcapture_py.transform.batch import Decoded, Failure, MessageBatch, decode_checked
from jetcapture_py.transform.decode import RawDecoder, make_decoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.keys import make_key
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


OPERATIONS: list[tuple[dict[str, str], str]] = [
    (PUT, "put"),
    ({"Nats-TTL": "1h"}, "put"),
    ({"KV-Operation": ""}, "put"),
    ({"KV-Operation": "PUT"}, "put"),
    ({"kv-operation": "DEL"}, "put"),
    (DELETE, "delete"),
    (PURGE, "purge"),
    (EXPIRED, "expire"),
    ({"Nats-Marker-Reason": "Purge"}, "purge"),
    ({"Nats-Marker-Reason": "Remove"}, "delete"),
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
    found = decoded(
        decoder,
        ("$KV.s.a", b"", DELETE),
        ("$KV.s.b", b'{"n": 1}', PUT),
        ("$KV.s.c", b"{", PUT),
        ("$KV.s.d", b"", EXPIRED),
        ("$KV.s.e", b'{"n": 2}', PUT),
        ("$KV.s.f", b"", PUT),
    )
    assert [each and (each["key_name"], each["operation"], each["n"]) for each in found] == [
        ("a", "delete", None),
        ("b", "put", 1),
        None,
        ("d", "expire", None),
        ("e", "put", 2),
        ("f", "put", None),
    ]


def test_entries_without_any_value_have_no_columns_of_values() -> None:
    assert decoded(InferringDecoder(), ("$KV.s.a", b"", DELETE)) == [
        {"key_name": "a", "operation": "delete", "revision": 7}
    ]


def test_values_with_several_rows_keep_their_order() -> None:
    decoder = make_decoder(decode_settings(format="json", rows="array", columns={"n": Declared("int64")}))
    batch = entries(("$KV.s.a", b'[{"n":1},{"n":2}]', PUT), ("$KV.s.b", b"", DELETE), ("$KV.s.c", b'[{"n":3}]', PUT))
    found = decode_checked(BucketDecoder(decoder), batch)
    assert found.messages is not None
    assert found.messages.to_pylist() == [0, 0, 1, 2]
    assert found.fields.select(["key_name", "n"]).to_pylist() == [
        {"key_name": "a", "n": 1},
        {"key_name": "a", "n": 2},
        {"key_name": "b", "n": None},
        {"key_name": "c", "n": 3},
    ]


def test_fields_called_like_columns_of_the_bucket_are_renamed_without_a_collision() -> None:
    value = b'{"Operation": "sum", "operation_": "x", "revision": "v2", "key_name": 5, "key": 6}'
    (found,) = decoded(InferringDecoder(), ("$KV.s.a", value, PUT))
    assert found == {
        "key_name": "a",
        "operation": "put",
        "revision": 7,
        "Operation_": "sum",
        "operation__": "x",
        "revision_": "v2",
        "key_name_": 5,
        "key_": 6,
    }


def test_known_columns_are_passed_on_under_their_names() -> None:
    found = BucketDecoder(InferringDecoder()).decode(entries(("$KV.s.a", b'{"revision": 1, "b": 2}', PUT)))
    assert found.columns is not None
    assert sorted(found.columns.names) == ["b", "revision_"]


class _Wrong:
    """A decoder that returns too few rows for several messages."""

    def decode(self, batch: MessageBatch) -> Decoded:
        if len(batch) == 1 and batch.column(layout.PAYLOAD)[0].as_py() == b"bad":
            failure = Failure(index=0, stage="mine", error="bad")
            return Decoded(
                fields=pa.RecordBatch.from_arrays([], []), messages=pa.array([], pa.int32()), failures=(failure,)
            )
        return Decoded(fields=pa.RecordBatch.from_pydict({"n": [1]}))


def test_a_decoder_that_breaks_its_promise_is_asked_for_each_value_alone() -> None:
    found = decoded(_Wrong(), ("$KV.s.a", b"1", PUT), ("$KV.s.b", b"", DELETE), ("$KV.s.c", b"bad", PUT))
    assert found[:2] == [
        {"key_name": "a", "operation": "put", "revision": 7, "n": 1},
        {"key_name": "b", "operation": "delete", "revision": 8, "n": None},
    ]
    assert found[2] is None


def test_key_templates_take_columns_of_the_bucket_and_fields_of_values() -> None:
    for template, keys in [
        ("{key_name}", ["a.b", "c"]),
        ("{operation}", ["put", "delete"]),
        ("{region}", ["eu", None]),
    ]:
        source = {"bucket": "s", "consumer": "c"}
        config = parse({"source": source, "store": {"url": "/a"}, "decode": {"format": "json"}, "key": template})
        batch = entries(("$KV.s.a.b", b'{"key_name": "x", "region": "eu"}', PUT), ("$KV.s.c", b"", DELETE))
        fields = decode_checked(BucketDecoder(make_decoder(config.decode)), batch).fields
        own = ("key_name", "operation", "revision")
        assert make_key(config.key, config.decode, own)(batch, fields).to_pylist() == keys
