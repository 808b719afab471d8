from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.schema import REPLY
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform import prepare as prepare_module
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Decoder, Failure, MessageBatch
from jetcapture_py.transform.decode import RawDecoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.keys import KeyFunction, TemplateKey
from jetcapture_py.transform.prepare import Prepared, Preparer

NOTHING = pa.RecordBatch.from_arrays([], names=[])
SECOND = 1_000_000_000


@dataclass
class Sent:
    """A message as it was received."""

    payload: bytes = b""
    subject: bytes = b"s.t"
    headers: bytes = b""
    delivered: int = 1
    seconds: int = 1000


def received(*messages: Sent) -> Received:
    return Received.of(
        subjects=[message.subject for message in messages],
        replies=[
            f"$JS.ACK.S.C.{message.delivered}.{seq}.1.{message.seconds * SECOND}.0".encode()
            for seq, message in enumerate(messages, 1)
        ],
        headers=[message.headers for message in messages],
        payloads=[message.payload for message in messages],
    )


def prepare(
    *messages: Sent | bytes,
    decoder: Decoder | None = None,
    key: KeyFunction | str = "",
    keep_payload: bool = True,
    bundles: int = 0,
) -> Prepared:
    function = TemplateKey(key) if isinstance(key, str) else key
    more: dict[str, Any] = {"interval": 900, "keep_payload": keep_payload, "bundles": bundles}
    preparer = Preparer(stream="S", consumer="C", decoder=decoder or RawDecoder(), key=function, **more)
    prepared = preparer(received(*(Sent(m) if isinstance(m, bytes) else m for m in messages)))
    for rows, runs in ((prepared.rows, prepared.runs), (prepared.quarantine, prepared.quarantine_runs)):
        rows.validate(full=True)
        assert sum(run.length for run in runs) == rows.num_rows
    return prepared


def seqs(rows: pa.RecordBatch) -> list[int]:
    return list(rows.column(layout.SEQ).to_pylist())


def faults(prepared: Prepared) -> dict[int, str]:
    """Stage of each quarantined message, by sequence."""
    columns = prepared.quarantine.column(layout.SEQ), prepared.quarantine.column(layout.STAGE)
    return dict(zip(*(column.to_pylist() for column in columns), strict=True))


@dataclass
class Scripted:
    """A decoder that does what the payload says; `sizes` are the batches that it was asked to decode."""

    columns: bool = True
    sizes: list[int] = field(default_factory=list)

    def decode(self, batch: MessageBatch) -> Decoded:
        self.sizes.append(len(batch))
        origins: list[int] = []
        failures: list[Failure] = []
        for index, payload in enumerate(batch.column(layout.PAYLOAD).to_pylist()):
            match payload.split():
                case [b"raise"]:
                    raise RuntimeError("cannot\nread http://app:s3cret@registry/1")
                case [b"fail"]:
                    failures.append(
                        Failure(index=index, stage="schema", error="not like\nhttp://app:s3cret@registry/2")
                    )
                case [b"skip"]:
                    pass
                case [b"rows", count]:
                    origins += [index] * int(count)
                case [b"both"]:
                    origins.append(index)
                    failures.append(Failure(index=index, stage="decode", error="twice"))
                case [b"beyond"]:
                    origins.append(len(batch))
                case [b"twice"]:
                    failures += [Failure(index=len(batch), stage="decode", error="elsewhere")]
                case _:
                    origins.append(index)
        values = [batch.column(layout.SEQ)[origin].as_py() if origin < len(batch) else 0 for origin in origins]
        fields = pa.RecordBatch.from_pydict({"value": pa.array(values, pa.int64())}) if self.columns else NOTHING
        return Decoded(fields=fields, messages=pa.array(origins, pa.int32()), failures=tuple(failures))


def test_every_reason_is_one_line_without_credentials() -> None:
    def key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        raise LookupError("no tenant at\nhttp://app:s3cret@cache/3")

    prepared = prepare(b"raise", b"fail", b"a", decoder=Scripted(), key=key)
    assert prepared.quarantine.column(layout.ERROR).to_pylist() == [
        "RuntimeError: cannot read http://***@registry/1",
        "not like http://***@registry/2",
        "LookupError: no tenant at http://***@cache/3",
    ]


NONSENSE: list[Any] = [None, "text", Decoded(fields=pa.RecordBatch.from_pydict({"x": [1, 2]}))]
WRONG_KEYS: list[Any] = [None, "text", pa.array(["too", "many", "keys", "for", "any"]), pa.array([1, 2, 3])]


def test_a_decoder_or_key_function_that_answers_nonsense_quarantines_and_does_not_crash() -> None:
    sent = b"1", b"2", b"3"
    found = [(prepare(*sent, decoder=Mock(decode=Mock(return_value=answer))), "decode") for answer in NONSENSE]
    found += [(prepare(*sent, key=Mock(return_value=answer)), "key") for answer in WRONG_KEYS]
    for prepared, stage in found:
        assert faults(prepared) == {1: stage, 2: stage, 3: stage}
        assert prepared.rows.num_rows == 0


class OneByOne:
    """A decoder that raises for several messages, and gives each one the column that is meant for it."""

    def __init__(self, columns: dict[bytes, pa.Array | None]) -> None:
        self.columns = columns

    def decode(self, batch: MessageBatch) -> Decoded:
        (payload,) = batch.column(layout.PAYLOAD).to_pylist()
        column = self.columns[payload]
        return Decoded(fields=NOTHING if column is None else pa.RecordBatch.from_arrays([column], names=["value"]))


def test_messages_decoded_one_by_one_whose_columns_do_not_go_together_are_quarantined() -> None:
    twice = pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))
    decoder = OneByOne({b"map": twice, b"text": pa.array(["x"]), b"none": None})
    prepared = prepare(b"none", b"map", b"text", b"map", decoder=decoder)
    assert seqs(prepared.rows) == [1, 2, 4]
    assert faults(prepared) == {3: "decode"}


def test_a_message_of_several_rows_has_its_payload_in_the_first_one_alone() -> None:
    prepared = prepare(b"rows 3", b"a", b"rows 2", decoder=Scripted())
    assert prepared.rows.column(layout.PAYLOAD).to_pylist() == [b"rows 3", None, None, b"a", b"rows 2", None]
    many = prepare(b"rows 100000" + b" " * 100_000, decoder=Scripted())
    assert many.rows.nbytes < 100 << 20  # 10 GB with a payload in each row


STAGES = {b"fail": "schema", **dict.fromkeys((b"raise", b"skip", b"both", b"beyond", b"twice"), "decode")}
ROWS = {b"a": 1, b"rows 1": 1, b"rows 3": 3}


@given(st.lists(st.sampled_from([*STAGES, *ROWS]), max_size=12), st.booleans())
def test_every_message_is_in_the_rows_or_alone_in_the_quarantine(batch: list[bytes], columns: bool) -> None:
    prepared = prepare(*batch, decoder=Scripted(columns))
    numbered = list(enumerate(batch, 1))
    assert prepared.messages == len(batch)
    if prepared.quarantine.num_rows or STAGES.keys() & set(batch):
        assert faults(prepared) == {seq: STAGES[payload] for seq, payload in numbered if payload in STAGES}
    assert prepared.quarantine.column(layout.PAYLOAD).to_pylist() == [each for each in batch if each in STAGES]
    rows = [(seq, row) for seq, payload in numbered for row in range(ROWS.get(payload, 0))]
    assert seqs(prepared.rows) == [seq for seq, _ in rows]
    if columns and rows:
        assert prepared.rows.column("value").to_pylist() == [seq for seq, _ in rows]
    if len(rows) > len({seq for seq, _ in rows}):
        assert prepared.rows.column(layout.ROW).to_pylist() == [row for _, row in rows]
        assert prepared.rows.column(layout.ROW).type == pa.int32()
    else:
        assert layout.ROW not in prepared.rows.schema.names


def test_rows_are_brought_together_by_bundle_and_bucket_with_their_keys_as_a_column() -> None:
    keys = ["a", "b", "a", "iceberg", "", "c", "größe"]
    messages = [Sent(subject=f"s.{key}".encode(), seconds=1000 if at < 5 else 0) for at, key in enumerate(keys)]
    prepared = prepare(*messages, Sent(subject=b"s"), key="{subject[1]}", bundles=16)
    found = prepared.rows.column(layout.KEY).to_pylist()
    assert dict(zip(seqs(prepared.rows), found, strict=True)) == {
        seq: key or None for seq, key in enumerate([*keys, None], 1)
    }
    assert len({(run.bundle, run.bucket) for run in prepared.runs}) == len(prepared.runs)
    for run in prepared.runs:
        assert run.key is None
        assert {bundle_of(key, 16) for key in found[run.start : run.start + run.length]} == {run.bundle}


def test_decoded_fields_follow_the_envelope_and_take_the_place_of_none_of_ours() -> None:
    payload = b'{"key": "k", "bundle": 1, "reply": "stolen", "_nats_reply": "too"}'
    prepared = prepare(payload, decoder=InferringDecoder(conflict="widen"), key="own", bundles=4)
    ours = [*(name for name in layout.ENVELOPE if name != layout.STREAM), REPLY, layout.KEY]
    names = prepared.rows.schema.names
    assert names[: len(ours)] == ours
    assert {*names[len(ours) :]} == {"bundle_", "key_", "reply", "_nats_reply_"}
    (row,) = prepared.rows.to_pylist()
    assert (row[layout.KEY], row["reply"], row["_nats_reply_"]) == ("own", "stolen", "too")
    assert row[REPLY].startswith(b"$JS.ACK.")


def test_a_key_function_that_raises_for_a_message_quarantines_it_alone() -> None:
    def key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        names = batch.column(layout.SUBJECT).to_pylist()
        if "bad" in names:
            raise KeyError("no\ntenant")
        return pa.array(names, pa.string())

    subjects = (b"a", b"bad", b"b", b"bad")
    for decoder in (RawDecoder(), Scripted()):
        prepared = prepare(*(Sent(subject=subject) for subject in subjects), key=key, decoder=decoder)
        assert seqs(prepared.rows) == [1, 3]
        assert {run.key for run in prepared.runs} == {"a", "b"}
        assert faults(prepared) == {2: "key", 4: "key"}
        assert "\n" not in prepared.quarantine.column(layout.ERROR)[0].as_py()


def test_a_message_of_several_rows_goes_to_quarantine_whole_when_its_first_row_has_no_place() -> None:
    def key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        return pa.array(["x" * 300 if index == 1 else "k" for index in range(len(batch))])

    prepared = prepare(b"a", b"rows 3", b"b", decoder=Scripted(), key=key)
    assert seqs(prepared.rows) == [1, 3]
    assert faults(prepared) == {2: "key"}


def test_a_key_function_is_asked_about_messages_not_about_their_rows_and_has_every_payload() -> None:
    asked: list[list[bytes]] = []

    def key(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        payloads = batch.column(layout.PAYLOAD).to_pylist()
        asked.append(payloads)
        return pa.array([payload.decode().replace(" ", "-") for payload in payloads])

    decoder = Scripted()
    prepared = prepare(b"rows 3", b"a", b"fail", b"rows 2", decoder=decoder, key=key)
    assert asked == [[b"rows 3", b"a", b"rows 2"]]
    assert decoder.sizes == [4], "a decoder that keeps count is asked once"
    assert [(run.key, run.length) for run in prepared.runs] == [("rows-3", 3), ("a", 1), ("rows-2", 2)]


def test_large_headers_of_a_message_with_many_rows_quarantine_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "ENVELOPE_BYTES", 100_000)
    large = b"NATS/1.0\r\nA: " + b"x" * 1000 + b"\r\nA: " + "ü".encode() * 500 + b"\r\nB: y\r\n\r\n"
    alone = prepare(Sent(b"rows 60", headers=large), decoder=Scripted())
    assert faults(alone) == {1: "decode"}
    assert alone.rows.num_rows == 0
    (error,) = alone.quarantine.column(layout.ERROR).to_pylist()
    assert re.fullmatch(
        r"its subject and headers, in each of its 60 rows, would take \d{6} bytes; the limit is 100000", error
    )
    with pytest.raises(BatchTooWideError):
        prepare(Sent(b"rows 60", headers=large), b"rows 3", decoder=Scripted())
    several = [Sent(b"rows 20", headers=large)] * 3
    with pytest.raises(BatchTooWideError):
        prepare(*several, decoder=Scripted())
    assert prepare(*several[:2], decoder=Scripted()).rows.num_rows == 40


GOOD, BAD_HEADERS = b"NATS/1.0\r\nA: 1\r\n\r\n", b"NATS/1.0\r\nno colon\r\n\r\n"


def test_headers_that_cannot_be_read_are_kept_raw_in_the_quarantine() -> None:
    messages, decoder = [Sent(b"b", headers=BAD_HEADERS), Sent(b"fail", headers=GOOD), Sent(b"d")], Scripted()
    prepared = prepare(Sent(b"a"), *messages, decoder=decoder)
    assert decoder.sizes == [3], "a message that cannot be read is not decoded"
    assert faults(prepared) == {2: "headers", 3: "schema"}
    assert prepared.quarantine.column(layout.RAW_HEADERS).to_pylist() == [BAD_HEADERS, None]
    assert prepared.quarantine.column(layout.HEADERS).to_pylist() == [None, [("A", ["1"])]]
    assert prepared.quarantine.column(layout.PAYLOAD).to_pylist() == [b"b", b"fail"]
    assert seqs(prepared.rows) == [1, 4]
    assert prepared.rows.column("value").to_pylist() == [1, 4]


def test_a_message_in_quarantine_lies_in_the_bucket_of_its_time_without_a_key_and_keeps_its_payload() -> None:
    failing = [Sent(b"fail", seconds=seconds) for seconds in (0, 950, 10)]
    prepared = prepare(*failing, b"a", decoder=Scripted(), key="k", keep_payload=False)
    assert layout.PAYLOAD not in prepared.rows.schema.names
    assert prepared.quarantine.column(layout.PAYLOAD).to_pylist() == [b"fail"] * 3
    assert {(run.key, run.bucket, run.length) for run in prepared.quarantine_runs} == {(None, 0, 2), (None, 900, 1)}
    assert all(reply.startswith(b"$JS.ACK.") for reply in prepared.quarantine.column(REPLY).to_pylist())


def test_redelivered_messages_are_counted_and_strays_left_out() -> None:
    messages = received(Sent(delivered=1), Sent(delivered=2), Sent(b"x", delivered=9), Sent())
    columns = [column.to_pylist() for column in messages.columns()]
    columns[1][3] = b"from.somebody"
    messages = Received.of(*columns)
    preparer = Preparer(
        stream="S", consumer="C", decoder=RawDecoder(), key=TemplateKey(""), interval=900, keep_payload=True
    )
    prepared = preparer(messages)
    assert (prepared.messages, prepared.redelivered, prepared.strays) == (3, 2, 1)
    assert prepared.rows.column(layout.DELIVERED).to_pylist() == [1, 2, 9]


def test_fields_called_like_the_envelope_take_nobodys_place() -> None:
    class Greedy:
        def decode(self, batch: MessageBatch) -> Decoded:
            return Decoded(fields=pa.RecordBatch.from_pydict({layout.SEQ: pa.array([99] * len(batch), pa.int64())}))

    prepared = prepare(b"1", b"2", decoder=Greedy())
    assert faults(prepared) == {1: "decode", 2: "decode"}
    assert prepared.quarantine.column(layout.SEQ).to_pylist() == [1, 2]


def test_a_batch_that_has_to_come_in_smaller_parts_is_not_decoded_message_by_message() -> None:
    decoder = TooWide()
    with pytest.raises(BatchTooWideError):
        prepare(b"a", b"b", b"c", decoder=decoder)
    assert decoder.sizes == [3]
    assert faults(prepare(b"a", decoder=decoder)) == {1: "decode"}


@dataclass
class TooWide:
    """A decoder that finds everything too wide."""

    sizes: list[int] = field(default_factory=list)

    def decode(self, batch: MessageBatch) -> Decoded:
        self.sizes.append(len(batch))
        raise BatchTooWideError
