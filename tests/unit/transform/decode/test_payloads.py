"""Payloads that are not quite what a format says: empty ones, byte order marks, other wire formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import Decoded, MessageBatch
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.keys import make_key
from tests.support.batches import Declared, batch_of, decode_settings, outcomes

COLUMNS = {"a": Declared("int64")}
EXAMPLES: dict[str, tuple[bytes, Any]] = {
    "json": (b'{"a": 1}', {}),
    "json lines": (b'{"a": 1}\n', {"rows": "lines"}),
    "json array": (b'[{"a": 1}]', {"rows": "array"}),
    "msgpack": (msgpack.packb({"a": 1}), {}),
    "csv": (b"1", {}),
    "csv header": (b"a\n1", {"header": True}),
}


def decoder(format_: str, **more: Any) -> Any:
    settings = {"columns": COLUMNS, **EXAMPLES[format_][1], **more}
    return make_decoder(decode_settings(format=format_.split()[0], **settings))


@pytest.mark.parametrize("format_", EXAMPLES)
def test_a_message_without_a_payload_is_a_row_of_nulls(format_: str) -> None:
    payload, _ = EXAMPLES[format_]
    for compression in ("none", "auto"):
        made = decoder(format_, compression=compression)
        decoded = made.decode(batch_of([b"", payload, None, b"\xff", payload, b""]))
        assert outcomes(decoded, 6) == [{"a": None}, {"a": 1}, {"a": None}, None, {"a": 1}, {"a": None}]
        assert outcomes(made.decode(batch_of([payload])), 1) == [{"a": 1}]
        assert outcomes(made.decode(batch_of([b""])), 1) == [{"a": None}]


class OwnDecoder:
    """A user's decoder, for which an empty payload may mean something."""

    def decode(self, batch: MessageBatch) -> Decoded:
        assert all(batch.column(layout.HEADERS).is_null().to_pylist())
        sizes = pa.compute.binary_length(batch.column(layout.PAYLOAD))
        return Decoded(fields=pa.RecordBatch.from_pydict({"size": sizes}))


def test_a_servers_marker_is_a_row_of_nulls_also_where_an_empty_payload_is_a_value() -> None:
    batch = batch_of([b"", b"", b"ab"])
    index = batch.rows.schema.get_field_index(layout.HEADERS)
    field = batch.rows.schema.field(index)
    headers = pa.array([None, [("Nats-Marker-Reason", ["MaxAge"])], None], field.type)
    batch = replace(batch, rows=batch.rows.set_column(index, field, headers))
    made = make_decoder(decode_settings(format=f"{__name__}:OwnDecoder"))
    assert outcomes(made.decode(batch), 3) == [{"size": 0}, {"size": None}, {"size": 2}]


def test_json_may_begin_with_a_byte_order_mark() -> None:
    for format_ in ("json", "json lines", "json array"):
        payload, settings = EXAMPLES[format_]
        batch = batch_of([b"\xef\xbb\xbf" + payload, payload])
        for columns in (COLUMNS, {}):
            assert outcomes(decoder(format_, columns=columns).decode(batch), 2) == [{"a": 1}, {"a": 1}]
        key = make_key("{a}", decode_settings(format="json", **settings))
        assert key(batch, pa.RecordBatch.from_arrays([], names=[])).to_pylist() == ["1", "1"]


SURROGATE = "a string has a lone surrogate, which is not text"
CONFLUENT = "; it begins like Confluent's wire format, with schema "
REASONS = [
    ("json", rb'{"a":"\ud800"}', SURROGATE),
    ("json", rb'{"a":"\\\udbff","b":1}', SURROGATE),
    ("json", rb'{"a":"\\ud800"', "Input data was truncated"),
    ("json", rb'{"a":"\ud83d', "Input data was truncated"),
    ("json", b'{"z": "\xff"}', "invalid UTF-8 (byte 7)"),
    ("json", b"\xff", "invalid UTF-8 (byte 0)"),
    ("json", b"\0\0\0\0\x07" + b'{"a": 1}', f"JSON is malformed: invalid character (byte 0){CONFLUENT}7"),
    ("json", b"\0\0\0\x01\xff" + b'{"a": 1}', f"invalid UTF-8 (byte 4){CONFLUENT}511"),
    ("json", b"\0", "JSON is malformed: invalid character (byte 0)"),
    ("msgpack", b"\0\0\0\0\x07" + msgpack.packb({"a": 1}), f"Expected `object`, got `int`{CONFLUENT}7"),
]


@pytest.mark.parametrize("columns", [{"b": Declared("int64")}, {}], ids=["declared", "inferred"])
def test_a_reason_names_what_is_wrong_with_the_payload(columns: Any) -> None:
    for format_, payload, reason in REASONS:
        (failure,) = decoder(format_, columns=columns).decode(batch_of([payload])).failures
        assert failure.error == reason, payload
