"""The `test` command: run unit tests of a configuration. Messages in; key, bucket, columns or quarantine out.

No server and no store is needed. Cases are a YAML list; docs/jetstream.md describes them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator
from rich.text import Text

from jetcapture_py.archive import layout
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config import values as types
from jetcapture_py.config import yaml_text
from jetcapture_py.config.model import Config, read_text
from jetcapture_py.config.section import Section, validated, wrong
from jetcapture_py.config.subjects import matches
from jetcapture_py.config.units import dotted, format_time, kind, microseconds_of, parse_time
from jetcapture_py.errors import ConfigError
from jetcapture_py.jetstream.acks import first_delivery
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.text import escaped
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.keys import Run
from jetcapture_py.transform.prepare import Prepared, Preparer


@dataclass(slots=True, kw_only=True)
class MessageOutcome:
    """One message as it would be archived."""

    seq: int
    """Stream sequence."""
    timestamp: datetime
    """Its timestamp, in UTC."""
    subject: str
    """Its subject."""
    headers: dict[str, list[str]] | None
    """Its headers; None without any."""
    payload: bytes
    """Its payload."""
    key: str | None
    """Its key; None without one."""
    bucket: datetime
    """Start of its bucket, in UTC."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Decoded columns of each of its rows."""
    quarantine: tuple[str, str] | None = None
    """Stage and error of a message that goes to quarantine; it has no key and no rows."""


def prepared_of(preparer: Preparer, received: Received) -> Iterator[Prepared]:
    """Decode and route messages as a capture does, in runs of one key each."""
    try:
        yield replace(preparer, bundles=0)(received)
    except BatchTooWideError:
        for part in received.split(len(received) // 2):
            yield from prepared_of(preparer, part)


def outcomes(preparer: Preparer, received: Received) -> list[MessageOutcome]:
    """Return the outcomes of messages, by sequence. `preparer` keeps payloads."""
    parts = map(_outcomes, prepared_of(preparer, received))
    return sorted(chain.from_iterable(parts), key=lambda outcome: outcome.seq)


def _outcomes(prepared: Prepared) -> Iterable[MessageOutcome]:
    by_seq: dict[int, MessageOutcome] = {}
    for run, row in _rows_of(prepared.rows, prepared.runs):
        outcome = by_seq.setdefault(row[layout.SEQ], _outcome_of(run, row))
        outcome.rows.append(
            {
                name: value
                for name, value in row.items()
                if not name.startswith("_nats_") or (name == layout.RESCUED and value is not None)
            }
        )
    for run, row in _rows_of(prepared.quarantine, prepared.quarantine_runs):
        outcome = _outcome_of(run, row)
        outcome.quarantine = (row[layout.STAGE], row[layout.ERROR])
        by_seq[outcome.seq] = outcome
    return by_seq.values()


def _rows_of(table: pa.RecordBatch, runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    for run in runs:
        for row in table.slice(run.start, run.length).to_pylist():
            yield run, row


def _outcome_of(run: Run, row: dict[str, Any]) -> MessageOutcome:
    headers = row[layout.HEADERS]
    return MessageOutcome(
        seq=row[layout.SEQ],
        timestamp=row[layout.TIMESTAMP].astimezone(UTC),
        subject=row[layout.SUBJECT],
        headers=None if headers is None else dict(headers),
        payload=row[layout.PAYLOAD] or b"",
        key=run.key,
        bucket=datetime.fromtimestamp(run.bucket, UTC),
    )


def plain(value: object) -> Any:
    """Convert a column's value for JSON: times, decimals and NaN to text, bytes to base64."""
    if isinstance(value, datetime):
        return format_time(value) if value.tzinfo else value.isoformat()
    if isinstance(value, date | time | Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


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
    """Expects the message in the quarantine, with this stage and this text in its error."""

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
    return validated(_Cases, {"cases": data}, rename=lambda problem: f"{path}: {problem}").cases


def run(config: Config, path: Path) -> CommandResult:
    """Run every case, and show the results and the differences. Raises ConfigError."""
    cases = load_cases(path)
    lines: list[str | Text] = []
    failed = 0
    for number, case in enumerate(cases, 1):
        different = list(differences(config, case, number))
        failed += bool(different)
        verdict = ("failed", "red") if different else ("ok    ", "green")
        lines += [Text.assemble(verdict, f" {escaped(case.name)}"), *(f"         {line}" for line in different)]
    summary = f"{failed} of {len(cases)} failed" if failed else f"{len(cases)} passed"
    return CommandResult(summary=summary, lines=[*lines, summary], code=1 if failed else 0)


def differences(config: Config, case: Case, number: int) -> Iterator[str]:
    """Yield one line per difference. `number` is the message's sequence, unless the case has one."""
    source, message, expected = config.source, case.message, case.expect
    if not matches(message.subject, source.filter_subjects):
        yield f"subject: {escaped(message.subject)} matches none of source.filter_subjects; it would not be captured"
        return
    outcome = _outcome(config, message, number)
    given = expected.model_fields_set
    if outcome.quarantine is not None or "quarantine" in given:
        if "quarantine" in given and outcome.quarantine is not None:
            yield from _quarantine(expected, outcome.quarantine)
        else:
            yield _not_expected(outcome)
            return
    if "key" in given and (expected.key or None) != outcome.key:
        yield _line("key", expected.key or None, outcome.key)
    if expected.bucket is not None and expected.bucket != outcome.bucket:
        yield _line("bucket", format_time(expected.bucket), format_time(outcome.bucket))
    if expected.columns is not None:
        yield from _rows((expected.columns,), outcome.rows, "columns")
    if expected.rows is not None:
        yield from _rows(expected.rows, outcome.rows, "rows")


def _outcome(config: Config, message: CaseMessage, number: int) -> MessageOutcome:
    source, seq = config.source, message.sequence or number
    reply = first_delivery(source.stream, source.consumer, seq, microseconds_of(message.timestamp) * 1000)
    received = Received.of([message.subject.encode()], [reply], [message.header_block], [message.data])
    return outcomes(replace(preparer(config, None, None), keep_payload=True), received)[0]


def _quarantine(expected: CaseExpectation, actual: tuple[str, str]) -> Iterator[str]:
    error = expected.quarantine
    stage, part = (None, error) if isinstance(error, str) else (error and error.stage, error and error.error)
    if stage is not None and stage != actual[0]:
        yield _line("quarantine.stage", stage, actual[0])
    if part and part not in actual[1]:
        yield f"quarantine.error: expected {_quoted(part)} in it, got {_quoted(actual[1])}"


def _not_expected(outcome: MessageOutcome) -> str:
    if outcome.quarantine is not None:
        stage, error = outcome.quarantine
        return f"quarantine: expected none, got {escaped(stage)}: {_quoted(error)}"
    return f"quarantine: expected, but the message is archived with key {_quoted(outcome.key)}"


def _rows(expected: Sequence[Mapping[str, Any]], actual: Sequence[Mapping[str, Any]], what: str) -> Iterator[str]:
    if len(expected) != len(actual):
        yield f"rows: expected {len(expected)}, got {len(actual)}"
        return
    for index, (cells, row) in enumerate(zip(expected, actual, strict=True)):
        path = ("columns",) if what == "columns" else ("rows", index)
        for name in {**cells, **row}:
            if not same(cells.get(name), row.get(name)):
                yield _line(dotted((*path, name)), cells.get(name), plain(row.get(name)))


def _line(path: str, expected: object, actual: object) -> str:
    return f"{path}: expected {_quoted(expected)}, got {_quoted(actual)}"


def _quoted(value: object) -> str:
    if value is None:
        return "nothing"
    return f'"{escaped(value)}"' if isinstance(value, str) else json.dumps(value, default=str)


def same(expected: Any, actual: Any) -> bool:
    """Whether a YAML value equals a column's value: times and decimals may be text, bytes are base64."""
    if expected is None or actual is None:
        return expected is actual
    if isinstance(actual, bool) or isinstance(expected, bool):
        return expected is actual
    if isinstance(actual, Decimal):
        try:
            return Decimal(str(expected)) == actual
        except InvalidOperation:
            return False
    if isinstance(actual, float):
        return _same_float(expected, actual)
    if isinstance(actual, datetime):
        return _same_time(expected, actual)
    if isinstance(actual, dict):
        return isinstance(expected, dict) and all(
            same(expected.get(name), actual.get(name)) for name in {**expected, **actual}
        )
    if isinstance(actual, list):
        if actual and all(isinstance(item, tuple) for item in actual):  # a map
            return same(expected, dict(actual))
        return (
            isinstance(expected, list)
            and len(expected) == len(actual)
            and all(same(one, other) for one, other in zip(expected, actual, strict=True))
        )
    return bool(expected == (plain(actual) if isinstance(actual, bytes | date | time | timedelta) else actual))


def _same_float(expected: Any, actual: float) -> bool:
    if isinstance(expected, str):
        return expected.lower().lstrip(".") == str(actual).lower()
    if not isinstance(expected, int | float):
        return False
    return expected == actual or float(np.float32(expected)) == actual or (math.isnan(expected) and math.isnan(actual))


def _same_time(expected: Any, actual: datetime) -> bool:
    try:
        moment = parse_time(expected)
    except ValueError:
        return False
    return moment == (actual if actual.tzinfo else actual.replace(tzinfo=UTC))
