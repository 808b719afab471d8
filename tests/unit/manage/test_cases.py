"""`jetcapture test`: a case passes exactly when the capture would do what it expects."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import ConfigError
from jetcapture_py.manage.cases import differences, load_cases, run, same
from jetcapture_py.manage.many import show_one
from tests.support.running import settings

COLUMNS = {"id": "int64", "region": "string", "amount": "decimal(12,2)", "at": "timestamp"}


def config(**sections: Any) -> Config:
    defaults = {"decode": {"format": "json", "columns": COLUMNS}, "key": "{region}", "block": {"interval": "15m"}}
    return parse(settings("nats://127.0.0.1:4222", "/archive", **{**defaults, **sections}))


def problems(tmp_path: Path, message: dict[str, Any], expect: dict[str, Any], **sections: Any) -> list[str]:
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump([{"name": "one", "message": message, "expect": expect}], sort_keys=False))
    (case,) = load_cases(path)
    return list(differences(config(**sections), case, 1))


ORDER = {"id": 7, "region": "eu", "amount": 12.5, "at": "2026-05-01T12:03:00Z"}
MESSAGE = {"subject": "orders.eu.new", "json": ORDER, "timestamp": "2026-05-01T12:16:00Z"}


def test_a_case_that_holds_has_no_difference_and_each_one_is_a_line_with_both_values(tmp_path: Path) -> None:
    expect = {"key": "eu", "bucket": "2026-05-01T12:15:00Z", "columns": ORDER}
    assert problems(tmp_path, MESSAGE, expect) == []
    expect = {"key": "us", "bucket": "2026-05-01T12:00:00Z", "columns": {**ORDER, "id": 8, "amount": "12.51"}}
    assert problems(tmp_path, MESSAGE, expect) == [
        'key: expected "us", got "eu"',
        'bucket: expected "2026-05-01T12:00:00Z", got "2026-05-01T12:15:00Z"',
        "columns.id: expected 8, got 7",
        'columns.amount: expected "12.51", got "12.50"',
    ]

    rest = {name: value for name, value in ORDER.items() if name != "id"}
    assert problems(tmp_path, MESSAGE, {"columns": rest}) == ["columns.id: expected nothing, got 7"]
    without = {"subject": "orders", "json": {"id": 7}}
    assert problems(tmp_path, without, {"key": None, "columns": {"id": 7}}) == []


def test_a_quarantined_message_is_expected_by_a_part_of_its_error(tmp_path: Path) -> None:
    broken = {"subject": "orders", "payload": "{broken"}
    assert problems(tmp_path, broken, {"quarantine": "JSON"}) == []
    assert problems(tmp_path, broken, {"quarantine": {"stage": "decode"}}) == []
    (line,) = problems(tmp_path, broken, {"quarantine": {"stage": "key", "error": "JSON"}})
    assert line == 'quarantine.stage: expected "key", got "decode"'
    (line,) = problems(tmp_path, broken, {"quarantine": "no such text"})
    assert line.startswith('quarantine.error: expected "no such text" in it, got ')
    (line,) = problems(tmp_path, broken, {"key": "eu"})
    assert line.startswith("quarantine: expected none, got decode: ")
    (line,) = problems(tmp_path, MESSAGE, {"quarantine": ""})
    assert line == 'quarantine: expected, but the message is archived with key "eu"'


def test_subject_headers_sequence_and_bytes_reach_the_configuration(tmp_path: Path) -> None:
    message = {"subject": "orders.eu.new", "headers": {"X-Tenant": ["a", "b"]}, "payload_base64": "AP8="}
    raw = {"format": "raw", "columns": {}}
    assert problems(tmp_path, message, {"key": "a"}, key="{header.X-Tenant}", decode=raw) == []
    assert problems(tmp_path, message, {"key": "eu"}, key="{subject[1]}", decode=raw) == []
    assert problems(tmp_path, message, {"columns": {}}, decode=raw) == []
    (line,) = problems(tmp_path, MESSAGE, {"key": "eu"}, source={"filter_subjects": ["orders.us.*"]})
    assert line == "subject: orders.eu.new matches none of source.filter_subjects; it would not be captured"
    message = {"subject": "orders", "payload": '{"region": "${HOME} $$"}'}  # which are no variables
    assert problems(tmp_path, message, {"key": "${HOME} $$"}) == []


def test_values_compare_by_meaning() -> None:
    equal = [("1.50", Decimal("1.5")), (1.5, Decimal("1.5")), (".nan", float("nan")), ({"a": 1}, {"a": 1, "b": None})]
    assert all(same(expected, value) for expected, value in equal)
    different = [(1, True), (True, 1), ("x", Decimal(1)), ([1], [1, 2]), ("1", 1)]
    assert not any(same(expected, value) for expected, value in different)


PROBLEMS = {
    "[]": "expected a list of cases, got an empty list",
    "{a: 1}": "expected a list of cases, got a mapping",
    "[{name: a, message: {subjct: b}, expect: {key: c}}]": "[0].message.subjct: unknown setting; did you mean subject?",
    "[{name: a, message: {subject: b}, expect: {}}]": "cases[0].expect.key: nothing is expected",
    "[{name: a, message: {subject: b, payload: c, json: {}}, expect: {key: c}}]": "json: cannot be combined with",
    "[{name: a, message: {subject: b, payload_base64: ä}, expect: {key: c}}]": "expected base64",
}


def test_a_file_of_cases_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    for text, problem in PROBLEMS.items():
        path = tmp_path / "cases.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as raised:
            load_cases(path)
        assert problem in str(raised.value)


def test_the_summary_counts_and_the_exit_code_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.yaml"
    good = {"name": "good", "message": MESSAGE, "expect": {"key": "eu"}}
    bad = {"name": "bad", "message": MESSAGE, "expect": {"key": "us"}}
    path.write_text(yaml.safe_dump([good]))
    assert show_one(run(config(), path)) == 0
    assert capsys.readouterr().out == "ok     good\n1 passed\n"
    path.write_text(yaml.safe_dump([good, bad]))
    assert show_one(run(config(), path)) == 1
    failed = 'failed bad\n         key: expected "us", got "eu"\n'
    assert capsys.readouterr().out == f"ok     good\n{failed}1 of 2 failed\n"
