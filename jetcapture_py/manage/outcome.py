"""Decode and route messages as a configuration says: key, bucket and columns, or the reason for quarantine."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.config.units import format_time
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import BatchTooWideError
from jetcapture_py.transform.keys import Run
from jetcapture_py.transform.prepare import Prepared, Preparer


@dataclass(slots=True, kw_only=True)
class MessageOutcome:
    """One message as it would be archived. Times are UTC; `rows` has the decoded columns of each of its rows.

    `quarantine` is the stage and error of a message that goes there; it has no key and no rows.
    """

    seq: int
    timestamp: datetime
    subject: str
    headers: dict[str, list[str]] | None
    payload: bytes
    key: str | None
    bucket: datetime
    rows: list[dict[str, Any]] = field(default_factory=list)
    quarantine: tuple[str, str] | None = None


def outcomes(preparer: Preparer, received: Received) -> list[MessageOutcome]:
    """Decode and route messages as a capture does, in the order of their sequences. `preparer` keeps payloads."""
    try:
        prepared = replace(preparer, bundles=0)(received)  # in runs of one key each
    except BatchTooWideError:
        first, rest = received.split(len(received) // 2)
        return sorted(outcomes(preparer, first) + outcomes(preparer, rest), key=lambda found: found.seq)
    return _outcomes(prepared)


def _outcomes(prepared: Prepared) -> list[MessageOutcome]:
    found: dict[int, MessageOutcome] = {}
    for run, row in _rows(prepared.rows, prepared.runs):
        outcome = found.setdefault(row[layout.SEQ], _outcome(run, row))
        outcome.rows.append({name: value for name, value in row.items() if not name.startswith("_nats_")})
    for run, row in _rows(prepared.quarantine, prepared.quarantine_runs):
        outcome = _outcome(run, row)
        outcome.quarantine = (row[layout.STAGE], row[layout.ERROR])
        found[outcome.seq] = outcome
    return [found[seq] for seq in sorted(found)]


def _rows(table: pa.RecordBatch, runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    for run in runs:
        for row in table.slice(run.start, run.length).to_pylist():
            yield run, row


def _outcome(run: Run, row: dict[str, Any]) -> MessageOutcome:
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
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
