"""Log lines: one line each, stable names, no value that can forge a line."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import pickle
import queue
import re
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime
from logging.handlers import QueueHandler

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


def test_text_is_time_level_event_and_fields() -> None:
    line = text_line(key="eu", rows=5, late=True, reason=None, took=0.25)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO blocks\.stored "
        r"key=eu rows=5 late=true reason=null took=0\.25\n",
        line,
    )


def test_json_is_one_object_with_time_level_event_and_fields() -> None:
    line = json_line(key="eu", rows=5, tags=["a", 1])
    assert datetime.fromisoformat(str(line.pop("ts"))).tzinfo is not None
    assert line == {"level": "info", "event": "blocks.stored", "key": "eu", "rows": 5, "tags": ["a", 1]}


def test_text_values_are_quoted_only_when_needed() -> None:
    expected = {
        "": '""',
        "a b": '"a b"',
        "a=b": '"a=b"',
        'a"b': r'"a\"b"',
        "a\\b": r'"a\\b"',
        "a\nINFO forged": r'"a\nINFO forged"',
        "\x1b[2J": r'"\u001b[2J"',
        "a\u2028b": r'"a\u2028b"',
        "\ud800": r'"\ud800"',
        "ключ": "ключ",
    }
    assert {value: text_line(x=value).partition(" x=")[2] for value in expected} == {
        value: f"{shown}\n" for value, shown in expected.items()
    }


@given(st.text(), st.text(min_size=1))
def test_no_value_and_no_field_name_can_begin_a_line(value: str, name: str) -> None:
    record = logging.LogRecord("jetcapture", logging.INFO, "", 0, "x", None, None)
    setattr(record, log.FIELDS, {name: value})
    assert log.TextFormatter().format(record).isprintable()
    line = log.JsonFormatter().format(record)
    assert line.isprintable()
    key = f"{name}_" if name in ("ts", "level", "event") else name
    assert json.loads(line)[key] == value


def test_a_field_cannot_replace_the_event_or_its_level() -> None:
    line = json_line(level="x", event="y", ts="z", name="n", logger="l")
    assert line["event"] == "blocks.stored"
    assert line["level"] == "info"
    assert (line["level_"], line["event_"], line["ts_"]) == ("x", "y", "z")
    assert (line["name"], line["logger"]) == ("n", "l")


def test_an_exception_is_one_line_with_its_type() -> None:
    assert json_line(error=ValueError("no\nsuch  bucket"))["error"] == "ValueError: no such bucket"
    assert json_line(error=KeyboardInterrupt())["error"] == "KeyboardInterrupt"
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("b", [OSError("c")])])
    assert json_line(error=group)["error"] == "ExceptionGroup: two [ValueError: a; ExceptionGroup: b [OSError: c]]"


def test_values_that_json_does_not_know_are_text() -> None:
    line = json_line(nan=float("nan"), raw=b"a\xff", when=datetime(2026, 1, 31), nested={"a": {1: (2,)}})
    assert (line["nan"], line["raw"], line["when"]) == ("nan", "a\\xff", "2026-01-31 00:00:00")
    assert line["nested"] == {"a": {"1": [2]}}


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
        log.setup("auto", "info", stream)
        log.event(LOGGER, logging.INFO, "blocks.stored")
        assert stream.getvalue().startswith("{") is is_json


def test_setting_up_again_replaces_the_handler_and_keeps_others() -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    log.setup("json", "info", first)
    log.setup("json", "warning", second)
    log.event(LOGGER, logging.INFO, "blocks.stored")
    log.event(LOGGER, logging.WARNING, "store.failed")
    assert not first.getvalue()
    assert [json.loads(line)["event"] for line in second.getvalue().splitlines()] == ["store.failed"]
    assert other in logging.getLogger().handlers


def test_library_lines_come_through_from_warnings_on() -> None:
    stream = io.StringIO()
    log.setup("json", "debug", stream)
    library = logging.getLogger("nats.aio.client")
    library.info("not shown")
    library.error("nats: %s", "lost\nconnection", exc_info=ValueError("x"))
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"]) == ("library.log", "nats.aio.client")
    assert (line["message"], line["error"]) == ("nats: lost connection", "ValueError: x")


def test_python_warnings_are_events() -> None:
    stream = io.StringIO()
    log.setup("json", "info", stream)
    warnings.simplefilter("always")
    warnings.warn("old\nway", stacklevel=1)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"]) == ("python.warning", "warning")
    assert "UserWarning: old way" in line["message"]


def test_events_reach_pytest_and_other_handlers_with_their_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jetcapture"):
        log.event(LOGGER, logging.INFO, "blocks.stored", rows=5, object="100 %d", error=ValueError("two\nlines"))
    record = caplog.records[0]
    assert caplog.messages == ['blocks.stored rows=5 object="100 %d" error="ValueError: two lines"']
    assert logging.Formatter("%(name)s %(message)s").format(record) == f"jetcapture.test {caplog.messages[0]}"
    assert (record.msg, getattr(record, log.FIELDS)["rows"]) == ("blocks.stored", 5)
    assert str(pickle.loads(pickle.dumps(record.msg))) == caplog.messages[0]
    queued = QueueHandler(queue.Queue()).prepare(record)
    assert json.loads(log.JsonFormatter().format(queued))["event"] == "blocks.stored"


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
