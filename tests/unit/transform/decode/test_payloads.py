"""Payloads that are not quite what a format says: empty ones, byte order marks, other wire formats."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.keys import make_key, payload_texts
from tests.support.batches import Declared, batch_of, decode_settings, outcomes

NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])
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


def with_header(batch: MessageBatch, row: int, name: str, value: str) -> MessageBatch:
    at = batch.rows.schema.get_field_index(layout.HEADERS)
    headers = [[(name, [value])] if number == row else None for number in range(len(batch))]
    column = pa.array(headers, batch.rows.schema.field(at).type)
    return replace(batch, rows=batch.rows.set_column(at, batch.rows.schema.field(at), column))


@pytest.mark.parametrize("format_", EXAMPLES)
@pytest.mark.parametrize("compression", ["none", "auto"])
def test_a_message_without_a_payload_is_a_row_of_nulls(format_: str, compression: str) -> None:
    payload, _ = EXAMPLES[format_]
    made = decoder(format_, compression=compression)
    decoded = made.decode(batch_of([b"", payload, None, b"\xff", payload, b""]))
    assert outcomes(decoded, 6) == [{"a": None}, {"a": 1}, {"a": None}, None, {"a": 1}, {"a": None}]
    assert outcomes(made.decode(batch_of([payload])), 1) == [{"a": 1}]
    assert outcomes(made.decode(batch_of([b""])), 1) == [{"a": None}]


class OwnDecoder:
    """A user's decoder, for which an empty payload may mean something."""

    def decode(self, batch: MessageBatch) -> Any:
        from jetcapture_py.transform.batch import Decoded

        assert all(batch.column(layout.HEADERS).is_null().to_pylist())
        return Decoded(
            fields=pa.RecordBatch.from_pydict({"size": pa.compute.binary_length(batch.column("_nats_payload"))})
        )


def test_a_servers_marker_is_a_row_of_nulls_also_where_an_empty_payload_is_a_value() -> None:
    made = make_decoder(decode_settings(format=f"{__name__}:OwnDecoder"))
    batch = with_header(batch_of([b"", b"", b"ab"]), 1, "Nats-Marker-Reason", "MaxAge")
    assert outcomes(made.decode(batch), 3) == [{"size": 0}, {"size": None}, {"size": 2}]


@pytest.mark.parametrize("format_", [name for name in EXAMPLES if name.startswith("json")])
@pytest.mark.parametrize("columns", [COLUMNS, {}])
def test_json_may_begin_with_a_byte_order_mark(format_: str, columns: Any) -> None:
    payload, settings = EXAMPLES[format_]
    marked = b"\xef\xbb\xbf" + payload
    made = decoder(format_, columns=columns)
    assert outcomes(made.decode(batch_of([marked, payload])), 2) == [{"a": 1}, {"a": 1}]
    key = make_key("{a}", decode_settings(format="json", **settings))
    assert key(batch_of([marked, payload]), NO_FIELDS).to_pylist() == ["1", "1"]


SURROGATE = "a string has a lone surrogate, which is not text"
CONFLUENT = "; it begins like Confluent's wire format, with schema "


@pytest.mark.parametrize(
    ("format_", "payload", "reason"),
    [
        ("json", rb'{"a":"\ud800"}', SURROGATE),
        ("json", rb'{"a":"\\\udbff","b":1}', SURROGATE),
        ("json", rb'{"a":"\\ud800"', "Input data was truncated"),
        ("json", rb'{"a":"\ud83d', "Input data was truncated"),
        ("json", rb'{"a":"\ud83d\ude', "Input data was truncated"),
        ("json", b"\0\0\0\0\x07" + b'{"a": 1}', f"JSON is malformed: invalid character (byte 0){CONFLUENT}7"),
        ("json", b"\0\0\0\x01\xff" + b'{"a": 1}', f"invalid UTF-8 (byte 4){CONFLUENT}511"),
        ("json", b"\0", "JSON is malformed: invalid character (byte 0)"),
        ("msgpack", b"\0\0\0\0\x07" + msgpack.packb({"a": 1}), f"Expected `object`, got `int`{CONFLUENT}7"),
    ],
)
@pytest.mark.parametrize("columns", [{"b": Declared("int64")}, {}])
def test_a_reason_names_what_it_sees(format_: str, payload: bytes, reason: str, columns: Any) -> None:
    (failure,) = decoder(format_, columns=columns).decode(batch_of([payload])).failures
    assert failure.error == reason


@pytest.mark.parametrize("nanos", [0, 1_499, 1_500, 999_999_500, 999_999_999])
@pytest.mark.parametrize("seconds", [-1, 0, 5, 2**34])
def test_nanoseconds_of_msgpack_are_cut_off_in_every_column(seconds: int, nanos: int) -> None:
    stamp = msgpack.Timestamp(seconds, nanos)
    packed = stamp.to_bytes()
    document = {"at": stamp, "deep": [{"at": stamp}], "text": b"\xd7\xff" + packed, "after": "x" * 300}
    payload = msgpack.packb(document)
    expected = datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanos // 1_000)
    (row,) = outcomes(decoder("msgpack", columns={}).decode(batch_of([payload])), 1)
    assert row == {"at": expected, "deep": [{"at": expected}], "text": document["text"], "after": "x" * 300}
    times = payload_texts(decode_settings(format="msgpack", columns={}), ["at"], times=True)
    assert times is not None
    assert times(batch_of([payload]))["at"].to_pylist() == [expected.isoformat()]
    declared = decoder("msgpack", columns={"at": Declared("json")})
    (row,) = outcomes(declared.decode(batch_of([payload])), 1)
    text = expected.isoformat().removesuffix("+00:00")
    assert row == {"at": f'"{text}Z"'}
