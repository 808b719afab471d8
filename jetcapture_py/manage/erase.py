"""The `erase` command: remove messages for good, take them out of tables as well, and print a certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

from jetcapture_py import log, text
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.rewriting.erase import Erasure, erase
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.table.catalog import table_names
from jetcapture_py.text import escaped, plural
from jetcapture_py.verify.findings import Progress, ignore


def run(
    config: Config,
    condition: Condition,
    reason: str,
    *,
    in_stream: bool = False,
    dry_run: bool = False,
    progress: Progress = ignore,
) -> CommandResult:
    """Erase the messages of a condition. Raises ConfigError, JetcaptureError."""
    log.setup(config.log.format, "error")
    done = asyncio.run(erase(config, condition, reason, in_stream=in_stream, dry_run=dry_run, progress=progress))
    would = "would be " if done.request.dry_run else ""
    erased = f"{plural(done.messages, 'message')} {would}erased"
    return CommandResult(
        summary="; ".join([erased, *(f"REMAINS: {line}" for line in done.remaining)]),
        lines=_lines(done, tables=bool(table_names(config))),
        records=[_fields(done)],
        code=1 if done.remaining else 0,
    )


def _fields(done: Erasure) -> dict[str, object]:
    """Return the certificate as plain values."""
    fields = asdict(done)
    return {
        **fields.pop("request"),
        **fields,
        "copies": done.copies,
        "started": format_time(done.request.started),
        "ended": format_time(datetime.now(UTC)),
        "remains": done.remaining,
    }


def _lines(done: Erasure, *, tables: bool) -> Iterator[str]:
    request = done.request
    would, were = ("would be ", "would be") if request.dry_run else ("", "were")
    yield f"stream {request.stream}: {plural(done.messages, 'message')} {would}erased"
    if not request.dry_run:
        yield f"at {format_time(request.started)} by {escaped(request.by)}: {text.one_line(request.reason)}"
    if done.earlier:
        yield f"{plural(done.earlier, 'message')} of earlier erasures {were} still stored"
    if done.tombstone:
        yield f"tombstone: {done.tombstone}"
    yield (
        f"searched: {plural(done.searched, 'object')}; {plural(done.copies, 'copy', 'copies')} "
        f"in {plural(len(done.objects), 'object')}"
    )
    for item in done.objects:
        digest = f"  sha256 {item.sha256}" if item.sha256 else ""
        yield f"  {escaped(item.path)}: {plural(item.messages, 'message')}{digest}"
        if not request.dry_run:
            after = (
                "removed" if item.after is None else f"{escaped(item.after)}  sha256 {item.sha256_after or 'compacted'}"
            )
            yield f"    now {after}"
    if done.versions:
        yield f"old versions of objects: {done.versions:,} {would}deleted"
    if tables and not request.dry_run:
        yield f"tables: {plural(done.snapshots, 'snapshot')} expired"
        yield from (f"table {name}: dropped; `jetcapture maintain` makes it again" for name in done.dropped)
    if done.in_stream is not None:
        yield f"in the stream: {plural(done.in_stream.deleted, 'message')} {would}deleted and overwritten"
    for title, lines in (
        ("REMAINS", done.remaining),
        ("not checked", [*done.notes, *(done.in_stream.notes if done.in_stream else ())]),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if not done.remaining and not request.dry_run:
        where = "the archive and the stream" if done.in_stream else "the archive"
        until = "(no watermark says up to which sequence)" if done.up_to is None else f"up to sequence {done.up_to}"
        yield f"nothing remains in {where} of what was stored {until}"
