"""Thousands of messages in each format, of which one in ten is hostile, compared with other libraries' readers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import DecodeConfig
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.keys import TemplateKey
from jetcapture_py.transform.prepare import Prepared, Preparer
from tests.support.batches import batch_of, outcomes
from tests.support.formats import Format, formats, mixed, plain

MESSAGES = 20_000
AT_ONCE = 4_000
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    archived: dict[int, dict[str, Any]] = {}
    quarantined: dict[int, bytes] = {}
    for start in range(0, MESSAGES, AT_ONCE):
        part = [payload for payload, _ in sent[start : start + AT_ONCE]]
        prepared = prepare(received(part, start))
        archived |= values(prepared)
        quarantined |= {row[layout.SEQ]: row[layout.PAYLOAD] for row in prepared.quarantine.to_pylist()}
        assert all(row[layout.ERROR].isprintable() for row in prepared.quarantine.to_pylist())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    expected = {seq: row for seq, (_, row) in enumerate(sent) if row is not None}
    assert quarantined == {seq: payload for seq, (payload, row) in enumerate(sent) if row is None}
    assert archived.keys() == expected.keys()
    for seq, row in expected.items():
        assert plain(archived[seq]) == plain(row), sent[seq]
        if name != "csv" and name != "tsv":
            assert archived[seq]["name"] == row["name"]
    assert peak < MEMORY, f"{peak >> 20} MiB"


@pytest.mark.parametrize("name", NAMES)
def test_a_message_gives_the_same_alone_as_among_any_others(
    known: dict[str, Format], name: str, tmp_path: Path
) -> None:
    of = known[name]
    decoder = make_decoder(DecodeConfig.model_validate({"format": name, **of.settings, "compression": "auto"}))
    payloads = [payload for payload, _ in mixed(of, 400, seed=2) if len(payload) < 1 << 16]
    together = outcomes(decoder.decode(batch_of(payloads)), len(payloads))
    backwards = outcomes(decoder.decode(batch_of(payloads[::-1])), len(payloads))[::-1]
    alone = [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in payloads]
    assert together == alone
    assert backwards == alone


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_nothing_but_failures_still_has_its_columns(known: dict[str, Format], name: str) -> None:
    decoder = make_decoder(DecodeConfig.model_validate({"format": name, **known[name].settings}))
    good = decoder.decode(batch_of([payload for payload, row in mixed(known[name], 10) if row]))
    bad = decoder.decode(batch_of([b"\xff\xff\xff"] * 3))
    assert bad.fields.schema == good.fields.schema
    assert outcomes(bad, 3) == [None] * 3
    nothing = decoder.decode(batch_of([]))
    assert isinstance(nothing.fields, pa.RecordBatch)
    assert nothing.fields.num_rows == 0
