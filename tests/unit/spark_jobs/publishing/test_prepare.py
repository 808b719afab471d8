"""Which rows become which messages, and which are refused, before anything runs or is published."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as st
from pyspark.sql.pandas.types import from_arrow_schema

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.errors import JetcaptureError
from spark_jobs.datasource.options import WriteOptions, parse
from spark_jobs.datasource.write import prepared
from spark_jobs.publishing.instructions import OBEYED, keepable
from spark_jobs.publishing.login import login_at
from spark_jobs.publishing.prepare import ARCHIVED, Archived, Rows, Targets

REFUSED: tuple[tuple[str, dict[str, str], str], ...] = (
    ("payload string", {}, "no subject: the rows have no column subject, and the template is {subject}"),
    ("payload string", {"subject": "a.*"}, "subject: invalid subject 'a.*': a message cannot be published to"),
    ("payload string", {"subject": "a..b"}, "subject: invalid subject 'a..b'"),
    ("payload string", {"subject": "a.{}"}, "subject: cannot read '{}'"),
    ("payload string", {"subject": "a.{b"}, "subject: unbalanced braces in 'a.{b'"),
    ("payload string", {"subject": "a.{b}"}, "subject: there is no column b; there are payload"),
    ("payload string", {"subject": "{header.To}"}, "subject: the rows have no headers for {header.To}"),
    ("payload string", {"subjects": "a"}, "subjects: unknown option; did you mean subject?"),
    ("payload string", {"subject": "a", "window": "0"}, "window: expected at least 1"),
    ("a double", {"subject": "a.{a}"}, "subject: column a must be string or integer: cast it"),
    ("value integer", {"subject": "a"}, "column value: a payload must be binary or string; to_json(value) makes it"),
    ("subject string", {}, "the rows have nothing to publish: no payload, and no other columns"),
    ("headers string, value string", {"subject": "a"}, "column headers: headers: expected map<string, string>"),
    ("msg_id integer, value string", {"subject": "a"}, "column msg_id: a message id must be a string"),
    ("Subject string, SUBJECT string, value string", {}, "columns Subject and SUBJECT differ in case only"),
    ("x string, x string", {"subject": "a"}, "two columns are called x: "),
)


def schema(text: str) -> st.StructType:
    found = st.StructType()
    for column in text.split(", "):
        found.add(*column.split())
    return found


def test_rows_that_can_be_no_messages_are_refused_by_their_columns() -> None:
    for columns, options, expected in REFUSED:
        with pytest.raises(JetcaptureError) as raised:
            prepared(parse(WriteOptions, {"servers": "nats://127.0.0.1:1"} | options), schema(columns))
        assert str(raised.value).startswith(expected)


def test_an_interval_of_months_is_refused_and_a_payload_has_to_be_a_column() -> None:
    months = st.StructType().add("a", st.YearMonthIntervalType(0, 0))
    with pytest.raises(JetcaptureError, match=r"^column a: interval year cannot be published: cast it to string$"):
        Rows(months, "a", ARCHIVED)
    with pytest.raises(JetcaptureError, match=r"^there is no column missing; there are n$"):
        Rows(schema("n integer"), "a", ARCHIVED, "missing")


def row(**columns: Any) -> pa.RecordBatch:
    arrays = (value if isinstance(value, pa.Array) else pa.array([value]) for value in columns.values())
    return pa.RecordBatch.from_pydict(dict(zip(columns, arrays, strict=True)))


def archived(headers: list[tuple[str, list[str]]] | None = None, name: Any = str, **columns: Any) -> pa.RecordBatch:
    """A message of an archive, with its columns' names changed by `name`."""
    values = {
        layout.STREAM: ["ORDERS"],
        layout.SEQ: [7],
        layout.TIMESTAMP: pa.array([1_500_000], pa.timestamp("us", "UTC")),
        layout.SUBJECT: ["orders.eu.new"],
        layout.HEADERS: pa.array([headers], HEADERS_TYPE),
        layout.PAYLOAD: pa.array([b"\xff"]),
    }
    batch = pa.RecordBatch.from_pydict({name(column): value for column, value in values.items()})
    return pa.RecordBatch.from_arrays([*batch.columns, *row(**columns).columns], [*batch.schema.names, *columns])


def publish(batch: pa.RecordBatch, template: str, **more: Any) -> dict[str, Any]:
    """The message that a replay publishes for a row, and the pattern of its subjects."""
    rows = Rows(from_arrow_schema(batch.schema), template, ARCHIVED)
    how: dict[str, Any] = {"recreated": False, "apart": False, "kept": (), "targets": None, "before": True, **more}
    (messages,) = Archived(rows=rows, replay_id="r", **how)([batch])
    (message,) = messages.to_pylist()
    return {**message, "pattern": rows.pattern}


TEMPLATES: tuple[tuple[str, bytes, str], ...] = (
    ("replay.a", b"replay.a", "replay.a"),
    ("{subject}", b"orders.eu.new", ">"),
    ("replay.{subject}", b"replay.orders.eu.new", "replay.>"),
    ("re-{subject[1]}-{subject[0]}", b"re-eu-orders", ">"),
    ("replay.x{key}.{amount}", b"replay.xk.7", "replay.>"),
    ("replay.{header.X-Tenant}", b"replay.acme", "replay.>"),
    ("{header.X-Home}", b"replay.home", ">"),
)


def test_a_template_makes_the_subject() -> None:
    batch = archived([("X-Tenant", ["acme", "other"]), ("X-Home", ["replay.home"])], key="k", amount=7)
    for template, subject, pattern in TEMPLATES:
        message = publish(batch, template)
        assert (message["subject"], message["pattern"]) == (subject, pattern)


NULL = pa.nulls(1, pa.string())
FORGED = pa.array([[("A", ["x\r\nB: y"])]], HEADERS_TYPE)
TARGETS = Targets(streams={"REPLAY": ["replay.>"], "LOOP": ["again.>"]}, ingested={"LOOP": ["again.a"]})
WRONG: tuple[tuple[pa.RecordBatch, str, str], ...] = (
    (row(a="a b"), "replay.{a}", "invalid subject 'replay.a b': expected tokens without white space"),
    (row(a="*"), "replay.{a}", "invalid subject 'replay.*': a message cannot be published to a wildcard"),
    (row(a=""), "replay.{a}", "invalid subject 'replay.': "),
    (row(a="$JS.API.STREAM.DELETE.REPLAY"), "{a}", "invalid subject '$JS.API.STREAM.DELETE.REPLAY': it is reserved"),
    (row(a=NULL, n=7), "replay.{a}", 'a row has no subject: a is null in {"a":null,"n":7}'),
    (archived(a=NULL), "{subject}.{a}", "a row has no subject: a is null in message 7 of stream ORDERS"),
    (archived(), "replay.{subject[5]}", "a row has no subject: subject[5] is null in message 7 of stream ORDERS"),
    (archived([("A", ["x"])]), "{header.B}", "a row has no subject: header.B is null in message 7 of stream ORDERS"),
    (row(_nats_headers=FORGED, a=1), "a", "invalid value of header A: it contains a line break"),
    (row(subject="nowhere.a", n=1), "{subject}", "no stream listens on nowhere.a"),
    (row(subject="again.a", n=1), "{subject}", "this archive's capture consumes again.a from stream LOOP, directly or"),
)


def test_a_row_that_can_be_no_message_is_named_before_anything_is_published() -> None:
    for batch, template, expected in WRONG:
        targets = TARGETS if template == "{subject}" else None
        with pytest.raises(JetcaptureError, match=rf"^{re.escape(expected)}.*; nothing was published$"):
            publish(batch, template, targets=targets)
    assert publish(row(subject="again.b", n=1), "{subject}", targets=TARGETS)["subject"] == b"again.b"


def test_a_message_of_an_archive_has_its_headers_but_for_instructions_and_says_where_it_is_from() -> None:
    headers = [
        ("a b", ["lone\nline feed", "nul\0", " "]),
        ("Ünïcode\t", ["値: a:b", ""]),
        *((name, ["out"]) for name in ("nats-msg-id", "Nats-Expected-Last-Sequence", "Nats-Batch-Id", "Nats-Schedule")),
        ("Nats-Msg-Id-Like", ["kept"]),
        *((name, ["of an earlier replay"]) for name in ("Jetcapture-Replay", "Jetcapture-Sequence")),
    ]
    block = (
        "NATS/1.0\r\na b: lone\nline feed\r\na b: nul\0\r\na b:  \r\nÜnïcode\t: 値: a:b\r\nÜnïcode\t: \r\n"
        "Nats-Msg-Id-Like: kept\r\nJetcapture-Stream: ORDERS\r\nJetcapture-Sequence: 7\r\n"
        "Jetcapture-Timestamp: 1970-01-01T00:00:01.500000Z\r\nJetcapture-Replay: r\r\nNats-Msg-Id: ORDERS:7:r\r\n\r\n"
    )
    for name in (str, str.upper):  # Spark's names are the same in any case
        message = publish(archived(headers, name, Region="eu"), "replay.{subject}.{region}")
        assert message == {
            "subject": b"replay.orders.eu.new.eu",
            "payload": b"\xff",
            "headers": block.encode(),
            "id": "ORDERS:7:r",
            "time": 1_500_000,
            "seq": 7,
            "row": None,
            "instructed": True,
            "pattern": "replay.>",
        }


def test_a_servers_marker_in_a_bucket_becomes_a_deletion_and_what_is_kept_is_kept() -> None:
    for headers, subject, line in (
        ([("Nats-Marker-Reason", ["MaxAge"]), ("Nats-TTL", ["60s"])], "$KV.copy.a", b"KV-Operation: PURGE\r\n"),
        ([("Nats-Marker-Reason", ["Remove"])], "$KV.copy.a", b"KV-Operation: DEL\r\n"),
        ([("Nats-Marker-Reason", ["Remove"])], "other.a", b""),
        ([("Nats-Rollup", ["sub"]), ("nats-ttl", ["1s"])], "$KV.copy.a", b"Nats-Rollup: sub\r\n"),
    ):
        block = publish(archived(headers), subject, kept=["nats-rollup"])["headers"]
        assert block.startswith(b"NATS/1.0\r\n" + line + b"Jetcapture-Stream: ORDERS\r\n")


def test_a_row_has_one_message_id() -> None:
    def block(headers: list[tuple[str, list[str]]] | None, msg_id: str | None, name: str = "headers") -> bytes:
        columns = {name: pa.array([headers], HEADERS_TYPE), "msg_id": pa.array([msg_id], pa.string())}
        batch = row(payload="x", **columns)
        writer = prepared(parse(WriteOptions, {"servers": "nats://a", "subject": "a"}), from_arrow_schema(batch.schema))
        (messages,) = writer.messages([batch], "w")
        return bytes(messages.column("headers")[0].as_py())

    mine = [("Nats-Msg-Id", ["a"]), ("Nats-Expected-Stream", ["B"])]
    assert block(mine, None) == block(mine, "a") == b"NATS/1.0\r\nNats-Expected-Stream: B\r\nNats-Msg-Id: a\r\n\r\n"
    assert block(mine, "b", layout.HEADERS) == b"NATS/1.0\r\nNats-Msg-Id: b\r\n\r\n"  # of another message
    assert re.fullmatch(rb"NATS/1.0\r\nNats-Msg-Id: w:0:[0-9a-f]{16}\r\n\r\n", block(None, ""))
    error = "^a row has two message ids: msg_id is 'b', and Nats-Msg-Id in its headers is 'a'$"
    with pytest.raises(JetcaptureError, match=error):
        block(mine, "b")


def test_only_instructions_about_the_message_can_be_repeated() -> None:
    for name in (*OBEYED, "nats-ttl", "Nats-Schedule-Target"):
        assert keepable(name) == name
    for name, reason in (
        ("Nats-Msg-Id", "it cannot be repeated"),
        ("Nats-Batch-Id", "it cannot be repeated"),
        ("Trace", "it is kept in any case"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {reason}; expected one of Nats-Rollup, "):
            keepable(name)


def test_credentials_may_be_part_of_an_address() -> None:
    login = login_at(["nats://a%40b:c%3Ad%2F@one:1", "nats://two:2"])
    assert (login.servers, login.user) == (("nats://one:1", "nats://two:2"), "a@b")
    assert login.password is not None
    assert login.password.get_secret_value() == "c:d/"
