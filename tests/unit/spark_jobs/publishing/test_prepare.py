"""Rows that can be no messages are refused by their columns, before anything runs."""

from __future__ import annotations

import pytest
from pyspark.sql import types as st

from jetcapture_py.errors import JetcaptureError
from spark_jobs.datasource.options import WriteOptions, parse
from spark_jobs.datasource.write import prepared
from spark_jobs.publishing.instructions import OBEYED, keepable
from spark_jobs.publishing.prepare import ARCHIVED, Rows

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
