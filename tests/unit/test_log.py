"""Log lines: one line each, stable names, no value that can forge a line."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py import log

LOGGER = logging.getLogger("jetcapture.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", *log.ROOTS)]
    levels, handlers = [logger.level for logger in loggers], list(loggers[0].handlers)
    with warnings.catch_warnings():
        yield
        logging.captureWarnings(capture=False)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    loggers[0].handlers[:] = handlers


def text_line(**fields: object) -> str:
    stream = io.StringIO()
    log.setup("text", "debug", stream)
    log.event(LOGGER, logging.INFO, "blocks.stored", **fields)
    return stream.getvalue()


def json_line(**fields: object) -> dict[str, object]:
    stream = io.StringIO()
    log.setup("json", "debug", stream)
    log.event(LOGGER, logging.INFO, "blocks.stored", **fields)
    assert stream.getvalue().count("\n") == 1
    line: dict[str, object] = json.loads(stream.getvalue())
    return line


def test_text_and_json_are_time_level_event_and_fields() -> None:
    line = text_line(key="eu", rows=5, late=True, reason=None, took=0.25)
    fields = r"key=eu rows=5 late=true reason=null took=0\.25"
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z INFO blocks\.stored {fields}\n", line)
    found = json_line(key="eu", rows=5, tags=["a", 1])
    assert datetime.fromisoformat(str(found.pop("ts"))).tzinfo is not None
    assert found == {"level": "info", "event": "blocks.stored", "key": "eu", "rows": 5, "tags": ["a", 1]}


def test_text_values_are_quoted_only_when_needed() -> None:
    expected = {"": '""', "a b": '"a b"', "a=b": '"a=b"', 'a"b': r'"a\"b"', "a\\b": r'"a\\b"', "ключ": "ключ"}
    expected |= {"a\nINFO forged": r'"a\nINFO forged"', "\x1b[2J": r'"\u001b[2J"', "\ud800": r'"\ud800"'}
    for value, shown in (expected | {"a\u2028b": r'"a\u2028b"'}).items():
        assert text_line(x=value).partition(" x=")[2] == f"{shown}\n"


@given(st.text(), st.text(min_size=1))
def test_no_value_and_no_field_name_can_begin_a_line(value: str, name: str) -> None:
    record = logging.LogRecord("jetcapture", logging.INFO, "", 0, "x", None, None)
    setattr(record, log.FIELDS, {name: value})
    assert log.TextFormatter().format(record).isprintable()
    line = log.JsonFormatter().format(record)
    assert line.isprintable()
    key = f"{name}_" if name in ("ts", "level", "event") else name
    assert json.loads(line)[key] == value


def test_a_field_cannot_replace_the_event_or_its_level_and_what_json_does_not_know_is_text() -> None:
    line = json_line(level="x", event="y", ts="z", name="n", logger="l", error=ValueError("no\nsuch  bucket"))
    assert (line["event"], line["level"]) == ("blocks.stored", "info")
    assert (line["level_"], line["event_"], line["ts_"]) == ("x", "y", "z")
    assert (line["name"], line["logger"], line["error"]) == ("n", "l", "ValueError: no such bucket")
    line = json_line(nan=float("nan"), raw=b"a\xff", when=datetime(2026, 1, 31), nested={"a": {1: (2,)}})
    assert (line["nan"], line["raw"], line["when"]) == ("nan", "a\\xff", "2026-01-31 00:00:00")
    assert line["nested"] == {"a": {"1": [2]}}


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
        log.setup("auto", "info", stream)
        log.event(LOGGER, logging.INFO, "blocks.stored")
        assert stream.getvalue().startswith("{") is is_json


def test_every_line_names_the_capture_that_the_task_or_thread_works_for() -> None:
    stream = io.StringIO()
    log.setup("json", "info", stream)
    with log.about("orders"):
        log.event(LOGGER, logging.INFO, "blocks.stored", blocks=1)
        logging.getLogger("library").warning("slow")
        context = contextvars.copy_context()
    log.event(LOGGER, logging.INFO, "capture.draining")
    thread = threading.Thread(target=context.run, args=(log.event, LOGGER, logging.INFO, "block.quarantined"))
    thread.start()
    thread.join()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line.get("capture")) for line in lines] == [
        ("blocks.stored", "orders"),
        ("library.log", "orders"),
        ("capture.draining", None),
        ("block.quarantined", "orders"),
    ]


def test_what_happens_often_is_logged_now_and_then_with_its_count() -> None:
    limit = log.LogLimit(every=10.0)
    assert limit.due(0.0) == 1
    assert [limit.due(float(second)) for second in range(1, 10)] == [0] * 9
    assert limit.due(10.0, 5) == 14
    assert limit.due(30.0, 0) == 0
    assert limit.due(30.0, 2) == 2
