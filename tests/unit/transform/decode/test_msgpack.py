"""MessagePack where columns are inferred, and its values as JSON text."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

import msgpack
import pyarrow as pa

from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.decode.msgpack import OBJECT_FORMAT
from jetcapture_py.transform.keys import make_key, payload_texts
from tests.support.batches import Declared, batch_of, decode_settings, outcomes

STAMP = datetime(2026, 1, 31, 12, 0, 0, 123_456, UTC)


def test_inferred_columns_have_the_types_of_messagepack() -> None:
    decoder = InferringDecoder(OBJECT_FORMAT, "widen")
    documents = [
        {"i": 1, "b": b"\xff", "t": msgpack.Timestamp.from_datetime(STAMP), "n": {"x": 1.5}, "l": [b"a"]},
        {"i": 2, "n": {1: 2}, "e": msgpack.ExtType(5, b"hi")},
        {"b": "text"},
    ]
    payloads = [msgpack.packb(document) for document in documents]
    first = decoder.decode(batch_of(payloads[:1]))
    assert first.fields.schema.field("b").type == pa.binary()
    assert first.fields.schema.field("t").type == pa.timestamp("us", "UTC")
    rows = outcomes(decoder.decode(batch_of([*payloads, b"\x90", b"\x81\x01\x02"])), 5)
    assert rows[0] == {"i": 1, "b": '"/w=="', "t": STAMP, "n": '{"x":1.5}', "l": [b"a"], "e": None}
    assert rows[1] == {"i": 2, "b": None, "t": None, "n": '{"1":2}', "l": None, "e": '{"code":5,"data":"aGk="}'}
    assert rows[2] == {"i": None, "b": "text", "t": None, "n": None, "l": None, "e": None}
    assert rows[3:] == [None, None]


def test_nanoseconds_are_cut_off_in_every_column() -> None:
    for seconds, nanos in product([-1, 0, 2**34], [0, 1_499, 1_500, 999_999_500, 999_999_999]):
        stamp = msgpack.Timestamp(seconds, nanos)
        text = b"\xd7\xff" + stamp.to_bytes()
        payload = msgpack.packb({"at": stamp, "deep": [{"at": stamp}], "text": text, "after": "x" * 300})
        expected = datetime.fromtimestamp(seconds, UTC).replace(microsecond=nanos // 1_000)
        inferred = make_decoder(decode_settings(format="msgpack")).decode(batch_of([payload]))
        assert outcomes(inferred, 1) == [{"at": expected, "deep": [{"at": expected}], "text": text, "after": "x" * 300}]
        times = payload_texts(decode_settings(format="msgpack"), ["at"], times=True)
        assert times is not None
        assert times(batch_of([payload]))["at"].to_pylist() == [expected.isoformat()]
        declared = make_decoder(decode_settings(format="msgpack", columns={"at": Declared("json")}))
        shown = expected.isoformat().removesuffix("+00:00")
        assert outcomes(declared.decode(batch_of([payload])), 1) == [{"at": f'"{shown}Z"'}]


KEYS: list[tuple[str, Any, str | None]] = [
    *(("{x}", {"x": "a"}, "a"), ("{x}", {"x": 1.5}, "1.5"), ("{x}", {"x": 2**63}, "9223372036854775808")),
    *(("{x}", {"x": True}, "true"), ("{x}", {"x": b"a"}, None), ("{x}", {"x": [1]}, None), ("{x}", {}, None)),
    *(("{x.y}", {"x": {"y": "deep"}}, "deep"), ("{x.y}", {"x.y": 1, "x": {"y": 2}}, "1")),
    ("{x.y}", {"x": {str(number): 0 for number in range(20)} | {"y": 7}}, "7"),
]


def test_a_key_of_inferred_fields_is_taken_from_the_message_alone() -> None:
    for template, document, key in KEYS:
        batch = batch_of([msgpack.packb(document)])
        made = make_key(template, decode_settings(format="msgpack"))
        assert made(batch, pa.RecordBatch.from_arrays([], names=[])).to_pylist() == [key], document
