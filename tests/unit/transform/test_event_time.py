"""Buckets that are made of a time of the message's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.config.model import BlockConfig, DecodeConfig
from jetcapture_py.transform.batch import Decoded, MessageBatch
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.event_time import EventTime, make_event_time
from jetcapture_py.transform.keys import make_key
from jetcapture_py.transform.kv import BucketDecoder
from jetcapture_py.transform.prepare import Prepared, Preparer
from tests.unit.transform.test_prepare import Sent, faults, received, seqs

NOON = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp())
FIELDS: dict[str, Any] = {"format": "json", "columns": {"at": "timestamp", "id": "int64"}}


def prepare(
    *messages: Sent,
    time: str | EventTime,
    key: str = "",
    decode: dict[str, Any] | None = None,
    decoder: Any = None,
    **block: Any,
) -> Prepared:
    decoding = DecodeConfig.model_validate(decode or {"format": "raw"})
    if isinstance(time, str):
        time = make_event_time(BlockConfig(time=time, **block), decoding if decode or not decoder else None)
    more: dict[str, Any] = {"key": make_key(key, decoding), "interval": 900, "keep_payload": True, "time": time}
    preparer = Preparer(stream="S", consumer="C", decoder=decoder or make_decoder(decoding), **more)
    prepared = preparer(received(*messages))
    prepared.rows.validate(full=True)
    return prepared


def header(value: str) -> Sent:
    return Sent(headers=f"NATS/1.0\r\nX-Time: {value}\r\n\r\n".encode())


def sent(**fields: Any) -> Sent:
    return Sent(json.dumps(fields).encode())


def places(prepared: Prepared) -> dict[int, int]:
    """The bucket of each message."""
    return {seq: run.bucket for run in prepared.runs for seq in seqs(prepared.rows.slice(run.start, run.length))}


def errors(prepared: Prepared) -> list[str]:
    return list(prepared.quarantine.column(layout.ERROR).to_pylist())


def test_a_bucket_is_made_of_a_declared_field_also_inside_of_another() -> None:
    messages = sent(at="2026-05-01T12:14:59.999999Z"), sent(at="2026-05-01T14:15:00+02:00")
    found = prepare(*messages, time="at", decode=FIELDS)
    assert places(found) == {1: NOON, 2: NOON + 900}
    times = [NOON * 10**6 + 899_999_999, NOON * 10**6 + 900_000_000]
    assert found.rows.column(layout.TIME).cast(pa.int64()).to_pylist() == times
    decode = {"format": "json", "columns": {"meta": "struct<at: timestamp>"}}
    assert places(prepare(sent(meta={"at": "2026-05-01T12:00:00Z"}), time="meta.at", decode=decode)) == {1: NOON}


def test_inferred_fields_are_read_from_the_message_alone() -> None:
    messages = [sent(at="2026-05-01T12:00:00Z"), sent(at=NOON), sent(at={"deep": 1}), sent(at=f"{NOON + 900}.5")]
    found = prepare(*messages, time="at", time_unit="s", decode={"format": "json"})
    assert places(found) == {1: NOON, 2: NOON, 4: NOON + 900}
    assert faults(found) == {3: "time"}
    numbers = sent(at=(NOON + 900) * 10**9 - 1), sent(at=0.5)  # which keep their digits beside a fraction
    assert places(prepare(*numbers, time="at", time_unit="ns", decode={"format": "json"})) == {1: NOON, 2: 0}


def test_a_number_counts_the_configured_unit() -> None:
    decode = {"format": "json", "columns": {"at": "int64"}}
    for unit, number in {"s": NOON, "ms": NOON * 10**3, "us": NOON * 10**6, "ns": NOON * 10**9}.items():
        assert places(prepare(sent(at=number), time="at", time_unit=unit, decode=decode)) == {1: NOON}
        assert places(prepare(header(str(number)), time="header.X-Time", time_unit=unit)) == {1: NOON}


def test_messages_without_a_sane_time_are_quarantined_alone_or_take_the_streams() -> None:
    values = ["", "soon", "2026-05-01", "2200-01-01T00:00:00Z"]
    prepared = prepare(header("2026-05-01T12:00:00Z"), *map(header, values), Sent(), time="header.X-Time")
    assert places(prepared) == {1: NOON}
    assert faults(prepared) == dict.fromkeys(range(2, 7), "time")
    assert {run.bucket for run in prepared.quarantine_runs} == {900}, "its buckets are of the stream's time"
    *unreadable, missing = errors(prepared)
    assert all(value in error for value, error in zip(values, unreadable, strict=True))
    assert missing == 'the message has no "header.X-Time", which block.time names'
    messages = [header("2026-05-01T12:00:00Z"), header("soon"), Sent(seconds=2000)]
    found = prepare(*messages, time="header.X-Time", time_fallback="timestamp")
    assert places(found) == {1: NOON, 2: 900, 3: 1800}
    times = dict(zip(seqs(found.rows), found.rows.column(layout.TIME).cast(pa.int64()).to_pylist(), strict=True))
    assert times == {1: NOON * 10**6, 2: 1000 * 10**6, 3: 2000 * 10**6}
    assert not found.quarantine_runs


class Lines:
    """Gives a row for each line: the time of some is no time."""

    def decode(self, batch: MessageBatch) -> Decoded:
        lines = [payload.decode().split() for payload in batch.column(layout.PAYLOAD).to_pylist()]
        values = pa.array([line for each in lines for line in each], pa.string())
        messages = pa.array([index for index, each in enumerate(lines) for _ in each], pa.int32())
        return Decoded(fields=pa.RecordBatch.from_arrays([values], names=["at"]), messages=messages)


def test_all_rows_of_a_message_go_where_its_first_row_belongs() -> None:
    lines = b"2026-05-01T12:00:00Z 2026-05-02T12:00:00Z soon", b"soon 2026-05-01T12:00:00Z", b"2026-05-01T12:15:00Z"
    found = prepare(*map(Sent, lines), time="at", decoder=Lines())
    assert places(found) == {1: NOON, 3: NOON + 900}
    assert seqs(found.rows) == [1, 1, 1, 3]
    assert found.rows.column(layout.TIME).cast(pa.int64()).to_pylist() == [NOON * 10**6] * 3 + [(NOON + 900) * 10**6]
    assert faults(found) == {2: "time"}
    payload = b'{"at": "2026-05-01T12:00:00Z"}\n{"at": "2026-05-01T13:00:00Z"}\n'
    for columns in ({}, {"at": "timestamp"}):
        decode = {"format": "json", "rows": "lines", "columns": columns}
        found = prepare(Sent(payload), header("x"), Sent(b'{"at": 1}'), time="at", decode=decode)
        assert places(found) == {1: NOON}
        assert seqs(found.rows) == [1, 1]
        assert set(faults(found)) == {2, 3}


def test_a_payload_that_cannot_be_read_again_has_no_time() -> None:
    def texts(batch: MessageBatch) -> dict[str, pa.StringArray]:
        payloads = batch.column(layout.PAYLOAD).to_pylist()
        if b"bad" in payloads:
            raise OverflowError("beyond\nall bounds")
        return {"at": pa.array([payload.decode() for payload in payloads], pa.string())}

    messages = [Sent(b"2026-05-01T12:00:00Z"), Sent(b"bad"), Sent(b"2026-05-01T12:15:00Z")]
    prepared = prepare(*messages, time=EventTime("at", texts=texts))
    assert places(prepared) == {1: NOON, 3: NOON + 900}
    assert faults(prepared) == {2: "time"}
    assert "all bounds" in errors(prepared)[0]
    assert errors(prepared)[0].isprintable()


@dataclass
class Counts:
    """A decoder of a user's: payloads are numbers, which become values of an Arrow type."""

    of: pa.DataType

    def decode(self, batch: MessageBatch) -> Decoded:
        numbers = [int(payload) for payload in batch.column(layout.PAYLOAD).to_pylist()]
        return Decoded(fields=pa.RecordBatch.from_pydict({"at": pa.array(numbers, pa.int64()).cast(self.of)}))


def test_a_time_that_python_cannot_hold_is_quarantined() -> None:
    for of in (pa.timestamp("us"), pa.timestamp("s", "UTC"), pa.timestamp("ns"), pa.duration("s")):
        decoder = Counts(of)
        found = prepare(Sent(b"%d" % (2**63 - 1)), Sent(b"-%d" % (2**63 - 1)), time="at", decoder=decoder)
        assert faults(found) == {1: "time", 2: "time"}
        assert all("expected a time with a zone" in error and error.isprintable() for error in errors(found))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("at", {"format": "raw"}, 'decode.format raw has no field "at"'),
    ("when", FIELDS, 'decode.columns has no "when"'),
    ("id", FIELDS, '"id" is a number: set block.time_unit'),
    ("ok", {"format": "json", "columns": {"ok": "bool"}}, '"ok" is of type bool, which is not a time'),
    ("at.x", FIELDS, 'decode.columns has no "at.x"'),
]


def test_a_field_that_cannot_be_a_time_is_refused_at_the_start() -> None:
    for time, decode, problem in REFUSED:
        with pytest.raises(ValueError, match=problem):
            make_event_time(BlockConfig(time=time), DecodeConfig.model_validate(decode))


def test_a_deletion_in_a_bucket_takes_the_fallback_whatever_its_payload_is() -> None:
    deleted = [Sent(payload, headers=b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n") for payload in (b"", b"gone")]
    decode = {"format": "json"}
    decoder = BucketDecoder(make_decoder(DecodeConfig.model_validate(decode)))
    prepared = prepare(*deleted, time="at", time_fallback="timestamp", key="{at}", decode=decode, decoder=decoder)
    assert (seqs(prepared.rows), prepared.quarantine.num_rows) == ([1, 2], 0)
    assert [run.key for run in prepared.runs] == [None]
