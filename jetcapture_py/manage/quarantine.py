"""The commands `quarantine list`, `show` and `redecode`: list reasons, show messages, and decode them again."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from jetcapture_py import log, text
from jetcapture_py.archive import layout
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage.cases import MessageOutcome, outcomes
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.manage.tap import fields, shown
from jetcapture_py.reading.arrow import read_archive, read_planned
from jetcapture_py.reading.plan import ReadRequest
from jetcapture_py.reading.reasons import COLUMNS, ReasonCounter, ReasonSummary
from jetcapture_py.reading.selection import Selection
from jetcapture_py.rewriting.redecode import QuarantineSelection, Redecoded, redecode
from jetcapture_py.store.archive import open_archive
from jetcapture_py.text import escaped, plural
from jetcapture_py.transform.frames import received_of
from jetcapture_py.verify.findings import Progress, ignore

MAX_SHOWN = 4096
"""Maximum bytes of a payload to show."""
_LINE = 16


def run_list(config: Config) -> CommandResult:
    """List the reasons. Raises JetcaptureError."""
    stream, counter = config.source.stream, ReasonCounter()
    url, options = config.store.url, config.store.options
    for batch in read_archive(url, stream, quarantine=True, columns=COLUMNS, options=options):
        counter.add(pa.Table.from_batches([batch]))
    reasons = counter.summaries()
    messages = sum(reason.messages for reason in reasons)
    total = f"{plural(messages, 'message')} of stream {stream} in quarantine"
    frequent = f"; most for {reasons[0].stage}: {reasons[0].error}" if reasons else ""
    return CommandResult(
        summary=f"{plural(messages, 'message')}, {plural(len(reasons), 'reason')}{frequent}",
        lines=[*_reasons(reasons), total],
        records=[{"stream": stream, "messages": messages, "reasons": [reason.fields() for reason in reasons]}],
    )


def run_show(config: Config, seq: int) -> CommandResult:
    """Show the messages with this sequence; a recreated stream may have several.

    Raises ConfigError, JetcaptureError, also without any.
    """
    rows = _stored(config, seq)
    if not rows:
        raise JetcaptureError(f"the quarantine of stream {config.source.stream} has no message {seq}")
    shown_rows = [(batch.to_pylist()[0], _today(config, batch)) for batch in rows]
    return CommandResult(
        summary=plural(len(rows), "message"),
        lines=[line for stored, outcome in shown_rows for line in _lines(config, stored, outcome)],
        records=[_fields(stored, outcome) for stored, outcome in shown_rows],
    )


def run_redecode(
    config: Config,
    selection: QuarantineSelection,
    *,
    dry_run: bool,
    progress: Progress = ignore,
) -> CommandResult:
    """Decode messages again. Raises ConfigError, JetcaptureError."""
    log.setup(config.log.format, "error")
    work = redecode(config, selection, dry_run=dry_run, progress=progress)
    done = asyncio.run(work)
    lines = list(_summary(done))
    failed = [f"{done.failed:,} cannot be decoded"] if done.failed else []
    return CommandResult(
        summary="; ".join([lines[0], *failed, *done.errors]),
        lines=lines,
        records=[asdict(done) | {"reasons": [reason.fields() for reason in done.reasons]}],
        code=1 if done.errors else 0,
    )


def _reasons(reasons: Iterable[ReasonSummary]) -> Iterator[str]:
    for reason in reasons:
        yield from reason.lines()


def _summary(done: Redecoded) -> Iterator[str]:
    would = "would be " if done.dry_run else ""
    yield f"{plural(done.messages, 'message')} of the quarantine: {done.decoded:,} {would}decoded and archived" + (
        "" if done.dry_run else f" in {plural(done.objects, 'object')}"
    )
    if done.archived:
        left = "" if done.errors else f" and {would}removed from the quarantine"
        yield f"{plural(done.archived, 'message was', 'messages were')} in the archive before{left}"
    if done.without_payload:
        yield f"{plural(done.without_payload, 'message')} cannot be decoded: the quarantine has no payload of theirs"
    if done.failed:
        yield f"{plural(done.failed, 'message')} cannot be decoded:"
        yield from (f"  {line}" for line in _reasons(done.reasons))
    if done.changed or done.waiting:
        objects = plural(done.changed + done.waiting, "object")
        yield f"{objects} changed meanwhile by a compaction: run the command again"
    if done.errors:
        yield "messages that are archived now are still in the quarantine as well:"
        yield from (f"  {error}" for error in done.errors)


def _stored(config: Config, seq: int) -> list[pa.RecordBatch]:
    """Return the messages with this sequence, oldest first, each as a batch of one row. Raises JetcaptureError."""
    archive = open_archive(config.store.url, config.store.options)
    selection = Selection(seqs=(seq, seq))
    request = ReadRequest(
        files=archive, stream=config.source.stream, selection=selection, dedupe="full", quarantine=True
    )
    rows = [batch.slice(index, 1) for batch in read_planned(request.plan) for index in range(batch.num_rows)]
    return sorted(rows, key=lambda row: row.column(layout.TIMESTAMP)[0].value)


def _today(config: Config, batch: pa.RecordBatch) -> MessageOutcome | None:
    """Return a message's outcome with the current configuration; None without its payload. Raises ConfigError."""
    if layout.PAYLOAD not in batch.schema.names or batch.column(layout.PAYLOAD).null_count:
        return None
    prepare = replace(preparer(config, None, None), keep_payload=True)
    return outcomes(prepare, received_of(batch, prepare.consumer))[0]


def _fields(stored: dict[str, Any], outcome: MessageOutcome | None) -> dict[str, Any]:
    payload, raw = stored.get(layout.PAYLOAD), stored.get(layout.RAW_HEADERS)
    return {
        "sequence": stored[layout.SEQ],
        "timestamp": format_time(stored[layout.TIMESTAMP]),
        "subject": stored[layout.SUBJECT],
        "headers": None if stored[layout.HEADERS] is None else dict(stored[layout.HEADERS]),
        "raw_headers_base64": None if raw is None else base64.b64encode(raw).decode(),
        "payload_bytes": None if payload is None else len(payload),
        "payload_base64": None if payload is None else base64.b64encode(payload[:MAX_SHOWN]).decode(),
        "stage": stored[layout.STAGE],
        "error": stored[layout.ERROR],
        "today": None if outcome is None else fields(outcome),
    }


def _lines(config: Config, stored: dict[str, Any], outcome: MessageOutcome | None) -> Iterator[str]:
    yield f"{stored[layout.SEQ]}  {format_time(stored[layout.TIMESTAMP])}  {escaped(stored[layout.SUBJECT])}"
    yield f"reason: {text.one_line(stored[layout.STAGE])}: {text.one_line(stored[layout.ERROR])}"
    for name, values in stored[layout.HEADERS] or ():
        yield from (f"header: {escaped(name)}: {escaped(value)}" for value in values)
    if (raw := stored.get(layout.RAW_HEADERS)) is not None:
        yield f"headers: {plural(len(raw), 'byte')}"
        yield from _dump(raw)
    payload = stored.get(layout.PAYLOAD)
    if payload is None:
        yield "payload: not stored"
    else:
        yield f"payload: {plural(len(payload), 'byte')}"
        yield from _dump(payload)
    if outcome is not None:
        yield f"today: {shown(outcome, config).plain}"


def _dump(data: bytes) -> Iterator[str]:
    """Yield bytes as hexadecimal digits and ASCII; only the first `MAX_SHOWN`."""
    for start in range(0, min(len(data), MAX_SHOWN), _LINE):
        part = data[start : min(start + _LINE, MAX_SHOWN)]
        ascii_ = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"    {start:08x}  {part.hex(' '):{_LINE * 3 - 1}}  {ascii_}"
    if len(data) > MAX_SHOWN:
        yield f"    … and {plural(len(data) - MAX_SHOWN, 'more byte', 'more bytes')}"
