"""Thousands of messages in each format, of which one in ten is hostile, compared with other libraries' readers."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import DecodeConfig
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import BatchTooWideError, decode_checked
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.decode.bounds import MAX_VALUES, TOO_MANY
from jetcapture_py.transform.keys import TemplateKey
from jetcapture_py.transform.prepare import Prepared, Preparer
from tests.support.batches import batch_of, outcomes
from tests.support.formats import AVRO, Format, Row, descriptor_set, formats, message_class, mixed, plain, rows
from tests.support.memory import forget_peak, peak_resident
from tests.unit.transform.decode.test_avro import datum, file_of

MESSAGES = 2_000
AT_ONCE = 1_500
MEMORY = 400 << 20
NAMES = ["msgpack", "csv", "tsv", "avro", "protobuf"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    return formats(tmp_path_factory.mktemp("schemas"))


def preparer(name: str, of: Format) -> Preparer:
    config = DecodeConfig.model_validate({"format": name, **of.settings, "compression": "auto", "max_inflated": "1MiB"})
    return Preparer(
        stream="S",
        consumer="C",
        decoder=make_decoder(config),
        key=TemplateKey(""),
        interval=900,
        keep_payload=True,
    )


def received(payloads: list[bytes], first: int) -> Received:
    count = len(payloads)
    replies = [f"$JS.ACK.S.C.1.{first + number}.1.1700000000000000000.0".encode() for number in range(count)]
    return Received.of(subjects=[b"s"] * count, replies=replies, headers=[b""] * count, payloads=payloads)


def in_parts(prepare: Preparer, payloads: list[bytes], first: int) -> list[Prepared]:
    """Prepare messages as a capture does: in smaller batches where one would be too large."""
    try:
        return [prepare(received(payloads, first))]
    except BatchTooWideError:
        half = len(payloads) // 2
        return in_parts(prepare, payloads[:half], first) + in_parts(prepare, payloads[half:], first + half)


def values(prepared: Prepared) -> dict[int, dict[str, Any]]:
    """Rows by sequence, without the envelope."""
    return {
        row[layout.SEQ]: {name: value for name, value in row.items() if not name.startswith("_nats_")}
        for row in prepared.rows.to_pylist()
    }


@pytest.mark.parametrize("name", NAMES)
def test_valid_messages_have_their_values_and_hostile_ones_are_quarantined_with_their_bytes(
    known: dict[str, Format], name: str
) -> None:
    sent = mixed(known[name], MESSAGES)
    prepare = preparer(name, known[name])
    forget_peak()
    before = peak_resident()
    archived: dict[int, dict[str, Any]] = {}
    quarantined: dict[int, bytes] = {}
    for start in range(0, MESSAGES, AT_ONCE):
        part = [payload for payload, _ in sent[start : start + AT_ONCE]]
        for prepared in in_parts(prepare, part, start):
            archived |= values(prepared)
            quarantined |= {row[layout.SEQ]: row[layout.PAYLOAD] for row in prepared.quarantine.to_pylist()}
            assert all(row[layout.ERROR].isprintable() for row in prepared.quarantine.to_pylist())
    peak = peak_resident() - before
    expected = {seq: row for seq, (_, row) in enumerate(sent) if row is not None}
    empty = {seq for seq, (payload, row) in enumerate(sent) if not payload and row is None and name != "protobuf"}
    wrong = {seq: payload for seq, (payload, row) in enumerate(sent) if row is None and seq not in empty}
    assert quarantined == wrong
    assert archived.keys() == expected.keys() | empty
    assert not any(set(archived[seq].values()) - {None} for seq in empty)
    for seq, row in expected.items():
        assert plain(archived[seq]) == plain(row), sent[seq]
        if name != "csv" and name != "tsv":
            assert archived[seq]["name"] == row["name"]
    assert peak < MEMORY, f"{peak >> 20} MiB"


@pytest.mark.parametrize("name", NAMES)
def test_a_message_gives_the_same_alone_as_among_any_others(known: dict[str, Format], name: str) -> None:
    of = known[name]
    decoder = make_decoder(DecodeConfig.model_validate({"format": name, **of.settings, "compression": "auto"}))
    payloads = [payload for payload, _ in mixed(of, 200, seed=2) if len(payload) < 1 << 16]
    together = decoder.decode(batch_of(payloads))
    backwards = outcomes(decoder.decode(batch_of(payloads[::-1])), len(payloads))[::-1]
    alone = [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in payloads]
    assert outcomes(together, len(payloads)) == backwards == alone
    bad = decoder.decode(batch_of([b"\xff\xff\xff"] * 3))
    assert outcomes(bad, 3) == [None] * 3
    assert bad.fields.schema == decoder.decode(batch_of([])).fields.schema == together.fields.schema


# ------------------------------------------------------------------ several rows of a message


def delimited(payloads: list[bytes]) -> bytes:
    """Protobuf messages after their lengths."""
    found = bytearray()
    for payload in payloads:
        size = len(payload)
        while size > 0x7F:
            found.append(size & 0x7F | 0x80)
            size >>= 7
        found += bytes([size]) + payload
    return bytes(found)


SEVERAL: dict[str, tuple[str, Callable[[list[bytes]], bytes]]] = {
    "csv": ("lines", lambda payloads: b"\n".join(payload.removesuffix(b"\n") for payload in payloads)),
    "msgpack": ("array", lambda payloads: b"\xdd" + len(payloads).to_bytes(4, "big") + b"".join(payloads)),
    "avro": ("container", lambda payloads: file_of(AVRO, (len(payloads), b"".join(payloads)))),
    "protobuf": ("delimited", delimited),
}


def messages_of(name: str, of: Format, count: int) -> list[tuple[bytes, list[Row] | None]]:
    """Messages of one to five rows, of which one in five has a hostile row at its end."""
    chance, left = random.Random(3), iter(rows(5 * count, seed=3))
    found: list[tuple[bytes, list[Row] | None]] = []
    for _ in range(count):
        payloads = [of.encode(next(left)) for _ in range(chance.randrange(1, 5))]
        expected: list[Row] | None = [of.reference(payload) for payload in payloads]
        if chance.random() < 0.2:
            bad = of.hostile(chance, payloads[-1])
            while name == "csv" and (not bad or b'"' in bad or b"\n" in bad):  # lines of their own, or of others
                bad = of.hostile(chance, payloads[-1])
            payloads, expected = [*payloads, bad], None
        found.append((SEVERAL[name][1](payloads), expected))
    return found


@pytest.mark.parametrize("name", SEVERAL)
def test_messages_of_several_rows_give_all_of_them_or_none(known: dict[str, Format], name: str) -> None:
    sent = messages_of(name, known[name], 300)
    settings = {"format": name, **known[name].settings, "rows": SEVERAL[name][0], "compression": "auto"}
    if name == "avro":
        del settings["compression"]
    decoder = make_decoder(DecodeConfig.model_validate(settings))

    def outcome(payloads: list[bytes]) -> list[list[Row | None]]:
        try:
            decoded = decode_checked(decoder, batch_of(payloads))
        except BatchTooWideError:
            half = len(payloads) // 2
            return outcome(payloads[:half]) + outcome(payloads[half:])
        owners = range(len(payloads)) if decoded.messages is None else decoded.messages.to_pylist()
        found: list[list[Row | None]] = [[] for _ in payloads]
        for owner, row in zip(owners, decoded.fields.to_pylist(), strict=True):
            found[owner].append(plain(row))
        assert [failure.index for failure in decoded.failures] == [at for at, given in enumerate(found) if not given]
        return found

    together = outcome([payload for payload, _ in sent])
    assert together == [[plain(row) for row in expected or ()] for _, expected in sent]
    assert [outcome([payload])[0] for payload, _ in sent[:50]] == together[:50]


FIFTY = ", ".join(f"f{number}: int64" for number in range(50))
WIDE = {f"f{number}": "int64" for number in range(50)}
DEFAULTS = [{"name": f"d{number}", "type": "long", "default": number} for number in range(50)]
FIELDS_OF_PROTOBUF = " ".join(f"int64 f{number} = {number};" for number in range(1, 51))
WIDE_PROTO = f'syntax = "proto3"; message I {{ {FIELDS_OF_PROTOBUF} }}'
BOMBS: dict[str, tuple[dict[str, Any], bytes]] = {
    "objects in a list": (
        {"format": "json", "columns": {"a": f"list<struct<{FIFTY}>>"}},
        b'{"a":[' + b"{}," * 300_000 + b"{}]}",
    ),
    "objects in lists in a map, cut off": (
        {"format": "json", "columns": {"a": {"type": f"map<string, list<struct<{FIFTY}>>>", "path": "b.c"}}},
        b'{"b":{"c":{"d":[' + b"{}," * 300_000,
    ),
    "lines": ({"format": "json", "rows": "lines", "columns": WIDE}, b"{}\n" * 240_000),
    "elements": ({"format": "json", "rows": "array", "columns": WIDE}, b"[" + b"{}," * 240_000 + b"{}]"),
    "maps in a list": (
        {"format": "msgpack", "columns": {"a": f"list<struct<{FIFTY}>>"}},
        b"\x81\xa1a\xdd" + (300_000).to_bytes(4, "big") + b"\x80" * 300_000,
    ),
    "records without most columns": (
        {"format": "csv", "rows": "lines", "header": True, "columns": WIDE},
        b"f0\n" + b"1\n" * 240_000,
    ),
    "rows of defaults": (
        {"format": "avro", "schema": {"type": "record", "name": "R", "fields": DEFAULTS}, "rows": "container"},
        file_of({"type": "record", "name": "R", "fields": []}, (240_000, b"")),
    ),
    "rows without fields": (
        {"format": "protobuf", "schema": WIDE_PROTO, "message": "I", "rows": "delimited"},
        bytes(240_000),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_that_become_many_values_are_refused_before_they_take_memory(name: str, tmp_path: Path) -> None:
    settings, payload = BOMBS[name]
    if settings["format"] == "avro":
        (tmp_path / "schema.avsc").write_text(json.dumps(settings["schema"]))
        settings = {**settings, "schema": str(tmp_path / "schema.avsc")}
    elif settings["format"] == "protobuf":
        settings = {**settings, "schema": str(descriptor_set(tmp_path, settings["schema"]))}
    decoder = make_decoder(DecodeConfig.model_validate(settings))
    forget_peak()
    before = peak_resident()
    decoded = decode_checked(decoder, batch_of([payload]))
    peak = peak_resident() - before
    (failure,) = decoded.failures
    assert "expands to more than 8,388,608 values" in failure.error
    assert peak < 96 << 20


@pytest.mark.parametrize("name", ["objects in a list", "maps in a list"])
def test_what_is_too_much_for_one_batch_is_asked_for_in_smaller_ones(name: str) -> None:
    settings, _ = BOMBS[name]
    good, many = {
        "json": (b'{"a":[%b]}', lambda count: b",".join([b'{"f0":1}'] * count)),
        "msgpack": (b"\x81\xa1a\xdd%b", lambda count: count.to_bytes(4, "big") + b"\x81\xa2f0\x01" * count),
    }[settings["format"]]
    decoder = make_decoder(DecodeConfig.model_validate(settings))
    large = good % many(60_000)
    with pytest.raises(BatchTooWideError):
        decoder.decode(batch_of([large] * 8))
    (row,) = decode_checked(decoder, batch_of([large])).fields.slice(0, 1).to_pylist()
    assert [len(row["a"]), row["a"][0]["f0"], row["a"][-1]["f0"]] == [60_000, 1, 1]


RECORDS = [{"id": number, "ok": True, "x": number / 7, "s": f"name {number}", "t": None} for number in range(10_000)]
FIELDS = "struct<id: int64, ok: bool, x: float64, s: string, t: int32>"
RECORD = {
    "type": "record",
    "name": "I",
    "fields": [
        {"name": name, "type": of}
        for name, of in (("id", "long"), ("ok", "boolean"), ("x", "double"), ("s", "string"), ("t", ["null", "int"]))
    ],
}
DENSE_AVRO = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "a", "type": {"type": "array", "items": RECORD}},
        {"name": "n", "type": {"type": "array", "items": "int"}},
        {"name": "b", "type": "bytes"},
    ],
}
DENSE_PROTO = f"""
syntax = "proto3";
message W {{ {FIELDS_OF_PROTOBUF} repeated W w = 51; }}
message I {{ int64 id = 1; bool ok = 2; double x = 3; string s = 4; optional int32 t = 5; }}
message R {{ repeated I a = 1; repeated int32 n = 2; bytes b = 3; repeated W w = 4; W v = 5; map<string, W> m = 6; }}
"""


def dense(name: str, row: dict[str, Any], directory: Path) -> tuple[dict[str, Any], bytes]:
    """Settings, and `row` in the format: records, numbers and bytes beside a wide column that is missing."""
    if name == "avro":
        (directory / "schema.avsc").write_text(json.dumps(DENSE_AVRO))
        return {"format": name, "schema": str(directory / "schema.avsc")}, datum(DENSE_AVRO, row)
    if name == "protobuf":
        path = descriptor_set(directory, DENSE_PROTO)
        payload = message_class(path, "R")(**row).SerializeToString()
        return {"format": name, "schema": str(path), "message": "R"}, payload
    columns = {"a": f"list<{FIELDS}>", "n": "list<int32>", "b": "binary", "w": f"list<struct<{FIFTY}>>"}
    if name == "json":
        return {"format": name, "columns": {**columns, "b": "string"}}, json.dumps(
            {**row, "b": "{[" * 500_000}
        ).encode()
    return {"format": name, "columns": columns}, msgpack.packb(row)


@pytest.mark.parametrize("name", ["json", "msgpack", "avro", "protobuf"])
def test_ordinary_dense_messages_are_decoded(name: str, tmp_path: Path) -> None:
    """Many records, more numbers, and bytes that look like the beginnings of a million records."""
    row = {"a": RECORDS, "n": list(range(500_000)), "b": b"\x80\x0a\x22\x2a\x32\0" * 150_000}
    settings, payload = dense(name, row, tmp_path)
    decoder = make_decoder(DecodeConfig.model_validate({**settings, "compression": "gzip"}))
    decoded = decode_checked(decoder, batch_of([gzip.compress(payload, 1)]))
    assert decoded.failures == ()
    (found,) = decoded.fields.to_pylist()
    assert found["a"] == RECORDS
    assert found["n"] == row["n"]


def test_a_payload_may_have_eight_million_values_or_two_for_each_byte() -> None:
    of_item, of_list, own = 16 + 2, 16 + 1, 1
    most = (MAX_VALUES - own - of_list) // of_item - 1  # the message is an object as well
    settings = {"format": "json", "columns": {"a": "list<struct<x: int64, y: int64>>"}, "compression": "auto"}
    decoder = make_decoder(DecodeConfig.model_validate(settings))
    for more, padding, errors in ((0, 0, []), (1, 0, [TOO_MANY]), (60_000, 5 << 20, [])):
        payload = b'{"a":[' + b"{}," * (most + more - 1) + b'{}],"b":"%b"}' % (b"x" * padding)
        decoded = decode_checked(decoder, batch_of([payload]))
        assert [failure.error for failure in decoded.failures] == errors
        assert decoded.fields.num_rows == 1 - len(errors)
