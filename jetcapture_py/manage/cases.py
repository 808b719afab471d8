"""The `test` command: run unit tests of a configuration. Messages in; key, bucket, columns or quarantine out.

No server and no store is needed. Cases are a YAML list; docs/jetstream.md describes them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from rich.text import Text

from jetcapture_py.capture.parts import preparer
from jetcapture_py.config import values as types
from jetcapture_py.config import yaml_text
from jetcapture_py.config.messages import problems, wrong
from jetcapture_py.config.model import Config, read_text
from jetcapture_py.config.section import Section
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.units import dotted, format_time, kind, microseconds_of, parse_time
from jetcapture_py.errors import ConfigError
from jetcapture_py.jetstream.ack_subject import first_delivery
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.manage.outcome import MessageOutcome, outcomes, plain
from jetcapture_py.text import escaped

PASSED, FAILED = 0, 1
_DEFAULT_TIME = datetime(2000, 1, 1, tzinfo=UTC)


class CaseMessage(Section):
    """The message of a case: at most one of payload, payload_base64 and json."""

    subject: types.Subject
    headers: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    payload: str | None = None
    payload_base64: str | None = None
    as_json: Any = Field(default=None, alias="json")
    timestamp: types.StartTime = _DEFAULT_TIME
    sequence: types.Count | None = None

    @model_validator(mode="after")
    def _one_payload(self) -> Self:
        given = [name for name in ("payload", "payload_base64", "as_json") if name in self.model_fields_set]
        if len(given) > 1:
            first, second = (name.replace("as_", "") for name in given[:2])
            raise wrong(second, f"cannot be combined with {first}")
        for name, values in self.headers.items():
            lines = [values] if isinstance(values, str) else values
            if not name or ":" in name or not all(line.isprintable() for line in (name, *lines)):
                raise wrong("headers", "expected names without a colon, and values of one line")
        try:
            base64.b64decode(self.payload_base64 or "", validate=True)
        except ValueError:
            raise wrong("payload_base64", "expected base64") from None
        return self

    @property
    def data(self) -> bytes:
        """The payload."""
        if "as_json" in self.model_fields_set:
            return json.dumps(self.as_json, ensure_ascii=False).encode()
        if self.payload_base64 is not None:
            return base64.b64decode(self.payload_base64)
        return (self.payload or "").encode()

    @property
    def header_block(self) -> bytes:
        """The headers as NATS sends them; empty without headers."""
        if not self.headers:
            return b""
        lines = [
            f"{name}: {value}\r\n"
            for name, values in self.headers.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()


class CaseQuarantine(Section):
    """Expects that the message goes to the quarantine, with this stage and this text in its error."""

    stage: str | None = None
    error: str = ""


class CaseExpectation(Section):
    """The expected outcome of a message; only the given parts are compared."""

    keeps_null = frozenset({"key"})

    key: str | None = None
    bucket: types.StartTime | None = None
    columns: dict[str, Any] | None = None
    rows: tuple[dict[str, Any], ...] | None = None
    quarantine: CaseQuarantine | str | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        given = self.model_fields_set
        if not given:
            raise wrong("key", "nothing is expected: give key, bucket, columns, rows or quarantine")
        for first, second in (("columns", "rows"), ("quarantine", "columns"), ("quarantine", "rows")):
            if {first, second} <= given:
                raise wrong(second, f"cannot be combined with {first}")
        return self


class Case(Section):
    """One case."""

    name: str
    message: CaseMessage
    expect: CaseExpectation


class _Cases(Section):
    cases: tuple[Case, ...]


def load_cases(path: Path) -> tuple[Case, ...]:
    """Read cases from a file. Raises ConfigError with one line per problem."""
    data = yaml_text.read(read_text(path, str(path)), None)
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{path}: expected a list of cases, got {'an empty list' if data == [] else kind(data)}")
    try:
        return _Cases.model_validate({"cases": data}).cases
    except ValidationError as error:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems(error, _Cases))) from None


def run(config: Config, path: Path) -> int:
    """Run every case, print the results and the differences, and return the exit code. Raises ConfigError."""
    cases = load_cases(path)
    console = Console(soft_wrap=True, highlight=False)
    failed = 0
    for number, case in enumerate(cases, 1):
        found = list(differences(config, case, number))
        failed += bool(found)
        verdict = Text("failed", "red") if found else Text("ok    ", "green")
        console.print(verdict, Text(escaped(case.name)))
        for line in found:
            console.print(Text(f"         {line}"))
    console.print(Text(f"{failed} of {len(cases)} failed" if failed else f"{len(cases)} passed"))
    return FAILED if failed else PASSED


def differences(config: Config, case: Case, number: int) -> Iterator[str]:
    """Yield one line per difference. `number` is the message's sequence, unless the case has one."""
    source, message, expected = config.source, case.message, case.expect
    if not matches(message.subject, source.filter_subjects):
        yield f"subject: {escaped(message.subject)} matches none of source.filter_subjects; it would not be captured"
        return
    found = _outcome(config, message, number)
    given = expected.model_fields_set
    if found.quarantine is not None or "quarantine" in given:
        if "quarantine" in given and found.quarantine is not None:
            yield from _quarantine(expected, found.quarantine)
        else:
            yield _not_expected(found)
            return
    if "key" in given and (expected.key or None) != found.key:
        yield _line("key", expected.key or None, found.key)
    if expected.bucket is not None and expected.bucket != found.bucket:
        yield _line("bucket", format_time(expected.bucket), format_time(found.bucket))
    if expected.columns is not None:
        yield from _rows((expected.columns,), found.rows, "columns")
    if expected.rows is not None:
        yield from _rows(expected.rows, found.rows, "rows")


def _outcome(config: Config, message: CaseMessage, number: int) -> MessageOutcome:
    source, seq = config.source, message.sequence or number
    reply = first_delivery(source.stream, source.consumer, seq, microseconds_of(message.timestamp) * 1000)
    received = Received.of([message.subject.encode()], [reply], [message.header_block], [message.data])
    return outcomes(replace(preparer(config, None, None), keep_payload=True), received)[0]


def _quarantine(expected: CaseExpectation, found: tuple[str, str]) -> Iterator[str]:
    wanted = expected.quarantine
    stage, part = (None, wanted) if isinstance(wanted, str) else (wanted and wanted.stage, wanted and wanted.error)
    if stage is not None and stage != found[0]:
        yield _line("quarantine.stage", stage, found[0])
    if part and part not in found[1]:
        yield f"quarantine.error: expected {_quoted(part)} in it, got {_quoted(found[1])}"


def _not_expected(found: MessageOutcome) -> str:
    if found.quarantine is not None:
        stage, error = found.quarantine
        return f"quarantine: expected none, got {escaped(stage)}: {_quoted(error)}"
    return f"quarantine: expected, but the message is archived with key {_quoted(found.key)}"


def _rows(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], what: str) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"rows: expected {len(expected)}, got {len(found)}"
        return
    for index, (wanted, row) in enumerate(zip(expected, found, strict=True)):
        path = ("columns",) if what == "columns" else ("rows", index)
        for name in {**wanted, **row}:
            if not same(wanted.get(name), row.get(name)):
                yield _line(dotted((*path, name)), wanted.get(name), plain(row.get(name)))


def _line(path: str, expected: object, found: object) -> str:
    return f"{path}: expected {_quoted(expected)}, got {_quoted(found)}"


def _quoted(value: object) -> str:
    if value is None:
        return "nothing"
    return f'"{escaped(value)}"' if isinstance(value, str) else json.dumps(value, default=str)


def same(expected: Any, found: Any) -> bool:
    """Whether a YAML value equals a column's value: times and decimals may be text, bytes are base64."""
    if expected is None or found is None:
        return expected is found
    if isinstance(found, bool) or isinstance(expected, bool):
        return expected is found
    if isinstance(found, Decimal):
        try:
            return Decimal(str(expected)) == found
        except InvalidOperation:
            return False
    if isinstance(found, float):
        return _same_float(expected, found)
    if isinstance(found, datetime):
        return _same_time(expected, found)
    if isinstance(found, dict):
        return isinstance(expected, dict) and all(
            same(expected.get(name), found.get(name)) for name in {**expected, **found}
        )
    if isinstance(found, list):
        if found and all(isinstance(each, tuple) for each in found):  # a map
            return same(expected, dict(found))
        return (
            isinstance(expected, list)
            and len(expected) == len(found)
            and all(same(one, other) for one, other in zip(expected, found, strict=True))
        )
    return bool(expected == (plain(found) if isinstance(found, bytes | date | time | timedelta) else found))


def _same_float(expected: Any, found: float) -> bool:
    if isinstance(expected, str):
        return expected.lower().lstrip(".") == str(found).lower()
    if not isinstance(expected, int | float):
        return False
    return expected == found or float(np.float32(expected)) == found or (math.isnan(expected) and math.isnan(found))


def _same_time(expected: Any, found: datetime) -> bool:
    try:
        moment = parse_time(expected)
    except ValueError:
        return False
    return moment == (found if found.tzinfo else found.replace(tzinfo=UTC))
