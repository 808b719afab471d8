"""The words of a command line, before the parser sees them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from spark_jobs.arguments import parse
from spark_jobs.query import QueryCommand
from spark_jobs.replaying.arguments import ReplayCommand

SQL = "-- sums of = a day\nSELECT 1"


@pytest.mark.parametrize("place", [2, 4])
@pytest.mark.parametrize("sql", [SQL, SQL.replace("-- ", "--")])
def test_sql_may_begin_with_a_comment(sql: str, place: int) -> None:
    words = ["file:///a", "ORDERS", "--format", "csv"]
    chosen = parse("query", QueryCommand, [*words[:place], sql, *words[place:]])
    assert (chosen.url, chosen.stream, chosen.sql, chosen.format) == ("file:///a", "ORDERS", sql, "csv")


def test_sql_that_is_the_value_of_an_option_may_begin_with_a_comment() -> None:
    words = ["file:///a", "ORDERS", "--servers", "nats://a", "--subject", "b", "--sql", SQL]
    assert parse("replay", ReplayCommand, words).sql == SQL


@pytest.mark.parametrize("words", [["--from", "-1h"], ["--since", "1h"], ["--from=-1h"]], ids=str)
def test_a_time_may_be_how_long_ago(words: list[str]) -> None:
    start = parse("query", QueryCommand, ["file:///a", "ORDERS", "SELECT 1", *words]).start
    assert start is not None
    assert timedelta(hours=1) <= datetime.now(UTC) - start < timedelta(hours=2)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_printed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse("query", QueryCommand, [word])
    assert raised.value.code == 0
    assert "--to-nats" in capsys.readouterr().out
