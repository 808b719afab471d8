"""The `tap` command: show how the configuration decodes the newest messages. Store and acknowledge nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from jetcapture_py.archive import layout
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage.newest import newest
from jetcapture_py.manage.outcome import MessageOutcome, outcomes, plain
from jetcapture_py.text import escaped, is_text

TIMEOUT = 10.0
_LONGEST = 200
"""Maximum characters of a value or payload that are shown."""


def run(config: Config, *, count: int, as_json: bool) -> int:
    """Print the outcome of the newest `count` messages; return the exit code. Raises ConfigError, SourceError."""
    found = asyncio.run(tap(config, count))
    console = Console(soft_wrap=True, highlight=False)
    declared = {layout.field_name(name) for name in config.decode.columns}
    for outcome in found:
        console.print(Text(json.dumps(fields(outcome))) if as_json else _shown(outcome, declared))
    if not found and not as_json:
        console.print(Text(f"stream {config.source.stream} has no message that the filters match"))
    return 0


async def tap(config: Config, count: int) -> list[MessageOutcome]:
    """Return the outcome of the newest `count` messages, oldest first. Raises ConfigError, SourceError."""
    prepare = replace(preparer(config, None, None), keep_payload=True)
    async with ReadSession(config.nats, f"jetcapture tap {config.source.stream}", timeout=TIMEOUT) as session:
        parts = await newest(session, config, count)
    found: dict[int, MessageOutcome] = {}
    for name, received in parts:
        made = await asyncio.to_thread(outcomes, replace(prepare, consumer=name), received)
        found |= {outcome.seq: outcome for outcome in made}
    return [found[seq] for seq in sorted(found)[-count:]]


def fields(outcome: MessageOutcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    text = _text(outcome.payload)
    payload = {"payload": text} if text is not None else {"payload_base64": base64.b64encode(outcome.payload).decode()}
    head = {
        "sequence": outcome.seq,
        "timestamp": format_time(outcome.timestamp),
        "subject": outcome.subject,
        "headers": outcome.headers,
        **payload,
        "bucket": format_time(outcome.bucket),
    }
    if outcome.quarantine is not None:
        stage, error = outcome.quarantine
        return {**head, "quarantine": {"stage": stage, "error": error}}
    if len(outcome.rows) == 1:
        return {**head, "key": outcome.key, "columns": plain(outcome.rows[0])}
    return {**head, "key": outcome.key, "rows": plain(outcome.rows)}


def _text(payload: bytes) -> str | None:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _shown(outcome: MessageOutcome, declared: Collection[str]) -> Text:
    text = Text()
    text.append(f"{outcome.seq}", "bold")
    text.append(f"  {format_time(outcome.timestamp)}  {escaped(outcome.subject)}")
    if outcome.quarantine is None:
        key = "no key" if outcome.key is None else f'key "{escaped(outcome.key)}"'
        text.append(f"  {key}  bucket {format_time(outcome.bucket)}", "green")
    else:
        stage, error = outcome.quarantine
        text.append(f"  quarantine ({escaped(stage)}): {escaped(error)}", "red")
    for line in _lines(outcome, declared):
        text.append(f"\n    {line}")
    return text


def _lines(outcome: MessageOutcome, declared: Collection[str]) -> Iterator[str]:
    """Yield the columns of each row: those with a value and those that are declared; else the payload."""
    rows = [
        {name: value for name, value in row.items() if value is not None or name in declared} for row in outcome.rows
    ]
    for number, row in enumerate(rows):
        head = f"row {number}: " if len(rows) > 1 else ""
        if row:
            yield head + "  ".join(f"{escaped(name)}={_short(plain(value))}" for name, value in row.items())
    if outcome.quarantine is not None or all(value is None for row in rows for value in row.values()):
        size, text = len(outcome.payload), _text(outcome.payload[:_LONGEST])
        yield f"{size} bytes" if not size or text is None or not is_text(text) else f"{size} bytes: {escaped(text)}"


def _short(value: object) -> str:
    text = escaped(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
