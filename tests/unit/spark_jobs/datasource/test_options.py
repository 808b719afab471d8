"""The data source's options: what is wrong is said in one line each, and nothing is ignored."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql import types as st

from jetcapture_py.errors import ConfigError
from spark_jobs.datasource.columns import MessageColumns
from spark_jobs.datasource.options import ReadOptions, WriteOptions, parse

STREAM = {"stream": "ORDERS"}


def test_case_and_underscores_in_a_name_do_not_count() -> None:
    options = parse(
        ReadOptions, {"STREAM": "ORDERS", "starting_offsets": "7", "minpartitions": "3", "tlsCa": "/ca.pem"}
    )
    assert (options.stream, options.starting_offsets, options.min_partitions) == ("ORDERS", 7, 3)
    assert options.nats.tls is not None
    assert str(options.nats.tls.ca) == "/ca.pem"


def test_values_are_read_as_people_write_them() -> None:
    given = {
        "subjects": "orders.*, returns.>",
        "startingTimestamp": "2026-01-31T13:00:00+01:00",
        "failOnDataLoss": "FALSE",
        "mode": "failfast",
        "timeout": "2m",
        "servers": "nats://a:1, nats://b:2",
    }
    options = parse(ReadOptions, STREAM | given)
    assert options.subjects == ("orders.*", "returns.>")
    assert options.starting_timestamp == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert (options.fail_on_data_loss, options.mode, options.timeout) == (False, "FAILFAST", 120)
    assert options.nats.servers == ("nats://a:1", "nats://b:2")


REFUSED: tuple[tuple[dict[str, str], str], ...] = (
    ({"stream": "A.B"}, "stream: expected a name without spaces, '.', '*', '>', '/' and '\\', got \"A.B\""),
    ({"startingOffset": "1"}, "startingOffset: unknown option; did you mean startingOffsets?"),
    ({"subject": "a"}, "subject: unknown option; did you mean subjects?"),
    ({"kafka.bootstrap.servers": "a"}, "kafka.bootstrap.servers: unknown option"),
    ({"path": "ORDERS"}, "path: not supported; call load() and save() without an argument"),
    ({"subjects": "a..b"}, 'subjects[0]: expected a subject such as orders.*.new or orders.>, got "a..b"'),
    ({"startingOffsets": "first"}, "startingOffsets: expected earliest, latest, new, last, last_per_subject or a "),
    ({"startingOffsets": "0"}, "startingOffsets: "),
    ({"startingOffsets": str(1 << 63)}, "startingOffsets: "),
    ({"endingOffsets": "earliest"}, 'endingOffsets: expected latest or a sequence from 1, got "earliest"'),
    ({"startingOffsets": "1", "startingTimestamp": "2026-01-01T00:00:00Z"}, "startingTimestamp: "),
    ({"endingOffsets": "1", "endingTimestamp": "2026-01-01T00:00:00Z"}, "endingTimestamp: "),
    ({"startingTimestamp": "yesterday"}, "startingTimestamp: "),
    ({"minPartitions": "0"}, 'minPartitions: expected at least 1, got "0"'),
    ({"maxOffsetsPerTrigger": "many"}, 'maxOffsetsPerTrigger: expected a whole number, got "many"'),
    ({"failOnDataLoss": "maybe"}, 'failOnDataLoss: expected true or false, got "maybe"'),
    ({"format": "xml"}, 'format: expected raw, json, msgpack, csv, tsv, avro or protobuf, got "xml"'),
    ({"mode": "STRICT"}, 'mode: expected PERMISSIVE, DROPMALFORMED or FAILFAST, got "STRICT"'),
    ({"columns": "id bigint"}, "columns: only with a format that decodes payloads, not with raw"),
    ({"timeout": "soon"}, "timeout: "),
    ({"user": "app"}, "password: "),
    ({"servers": "localhost"}, "servers"),
)


def test_a_wrong_option_is_one_clear_line() -> None:
    for given, expected in REFUSED:
        with pytest.raises(ConfigError) as raised:
            parse(ReadOptions, STREAM | given)
        (line,) = raised.value.problems
        assert "\n" not in line
        assert line.startswith(expected)


def test_a_streaming_query_has_no_end() -> None:
    for name, value in (("endingOffsets", "5"), ("endingTimestamp", "2026-01-01T00:00:00Z")):
        with pytest.raises(ConfigError, match=f"^{name}: a streaming query has no end$"):
            parse(ReadOptions, STREAM | {name: value}).for_stream()


def test_a_secret_is_in_no_message_and_in_no_text_of_the_options() -> None:
    login = {"user": "app", "password": "hunter2"}
    with pytest.raises(ConfigError) as raised:
        parse(ReadOptions, STREAM | login | {"token": "hunter2", "minPartitions": "x"})
    assert "hunter2" not in str(raised.value)
    assert "hunter2" not in repr(parse(ReadOptions, STREAM | login))
    assert "hunter2" not in repr(parse(WriteOptions, login))


JSON, LONG = {"format": "json"}, st.LongType()
ITEMS, INNER = st.ArrayType(LONG, containsNull=False), st.StructType().add("a:b", LONG)
UNREADABLE: tuple[tuple[dict[str, str], st.StructField, str], ...] = (
    ({}, st.StructField("_NATS_SEQ", st.StringType()), "column _NATS_SEQ: its type is bigint"),
    ({}, st.StructField("id", LONG), "format raw has no column id; format json decodes it from the payload"),
    (JSON, st.StructField("_nats_seq", LONG), "format json: no column to decode: declare them in option columns, or"),
    (JSON, st.StructField("id", LONG, nullable=False), "column id: published data cannot be declared NOT"),
    (JSON, st.StructField("ids", ITEMS), "column ids: cannot be read as array<bigint>"),
    (JSON, st.StructField("at", st.TimestampNTZType()), "column at: cannot be read as timestamp_ntz"),
    (JSON, st.StructField("s", INNER), "column s: "),
    ({"format": "avro"}, st.StructField("a", LONG), "schema: required with decode.format avro"),
    (JSON | {"rows": "container"}, st.StructField("a", LONG), "rows: container is only for decode.format"),
    (JSON | {"maxInflated": "x"}, st.StructField("a", LONG), "maxInflated: expected a size"),
    ({"format": "csv", "delimiter": "ab"}, st.StructField("a", LONG), "delimiter: expected a character"),
)


def test_a_column_that_cannot_be_read_is_one_clear_line() -> None:
    for options, column, expected in UNREADABLE:
        with pytest.raises(ConfigError) as raised:
            MessageColumns(parse(ReadOptions, STREAM | options), st.StructType([column]))
        assert str(raised.value).startswith(expected)
