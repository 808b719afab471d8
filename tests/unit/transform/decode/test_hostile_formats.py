"""Thousands of messages in each format, of which one in ten is hostile, compared with other libraries' readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from tests.support.formats import Format, descriptor_set, formats, mixed, plain
from tests.support.memory import forget_peak, peak_resident
from tests.unit.transform.decode.test_avro import file_of

MESSAGES = 2_000
AT_ONCE = 1_500
MEMORY = 400 << 20
NAMES = ["msgpack", "csv", "tsv", "avro", "protobuf"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    return formats(tmp_path_factory.mktemp("schemas"))


def preparer(name: str, of: Format) -> Preparer:
    config = DecodeConfig.model_validate({"format": name, **of.settings, "compression": "auto", "max_inflated": "1MiB"})
    decoder = make_decoder(config)
    return Preparer(stream="S", consumer="C", decoder=decoder, key=TemplateKey(""), interval=900, keep_payload=True)


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
def test_valid_messages_have_their_values_and_hostile_ones_are_quarantined(known: dict[str, Format], name: str) -> None:
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
