"""Create a stream from its archive, exactly as it was, through the restore of nats-server 2.15.

The stream gets its messages with their sequences, timestamps to the nanosecond, subjects, headers and payloads;
sequences without a message become deleted messages, and the next message gets the next sequence. Its configuration is
the one that the capture keeps in the archive.

The archive is divided into ranges of sequences. Threads read each range, sort it, drop copies, and encode a piece in
the server's own backup format. The pieces are sent in order, as fast as the server takes them; only a few are in
memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.restoring.checks import RestoreSurvey, describe, drops, holes, notes
from jetcapture_py.restoring.config import (
    archived_config,
    beginning_at,
    consumer_settings,
    limits_of,
    target_config,
    without_sources,
)
from jetcapture_py.restoring.part import Reading, last_until, make_part, survey_part
from jetcapture_py.restoring.plan import RestorePlan, plan_restore, removed_ranges
from jetcapture_py.restoring.request import RestoreRequest
from jetcapture_py.restoring.send import ahead, check_target, send
from jetcapture_py.retry import retried
from jetcapture_py.text import duration, plural, progress_bars

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRestore:
    """A restore that can begin."""

    request: RestoreRequest
    reading: Reading
    plan: RestorePlan
    """Its ranges."""
    survey: RestoreSurvey
    """Their contents."""
    config: Mapping[str, Any]
    """Configuration of the new stream."""
    notes: tuple[str, ...]
    """Further notes, one line each."""
    drops: tuple[str, ...]
    """Reasons why the new stream would drop messages, one line each."""


def prepare(request: RestoreRequest) -> PreparedRestore:
    """Read the archive's names, footers, sequences and timestamps. Raises JetcaptureError.

    Starts again if a compaction replaces objects meanwhile.
    """
    return retried(lambda: _prepared(request))


def _prepared(request: RestoreRequest) -> PreparedRestore:
    files, stream = request.files, request.stream
    plan = plan_restore(files, stream, first=request.first, last=request.last, created=request.created)
    archived = archived_config(files, stream, plan.created)
    config = target_config(
        archived,
        request.stream_config,
        source=stream,
        name=request.target,
        prefix=request.prefix,
        without_limits=request.without_limits,
    )
    limits, erased = limits_of(config), files.erased(stream)
    configs = (config, {} if archived is None else archived.config)
    reading = Reading(
        files=files,
        prefix=request.prefix,
        until=request.until,
        erased=erased,
        without_schedules=not request.with_schedules and any(item.get("allow_msg_schedules") for item in configs),
        by_subject="max_msgs_per_subject" in limits,
        by_size="max_msg_size" in limits,
    )
    if request.until is not None:
        plan = plan.up_to(max((last.result() for last in ahead(partial(last_until, reading), plan.parts)), default=0))
    removed = removed_ranges(plan, files.expired(stream), erased, continues=archived is not None and archived.continues)
    begins = request.first if request.first > 1 else min([plan.begins, *(first for first, _ in removed)])
    ends = request.last if request.last is not None and request.until is None else 0
    parts = (part.result() for part in ahead(partial(survey_part, reading), plan.parts))
    survey = RestoreSurvey.of(parts, begins, ends, removed)
    _check(request, survey, limits)
    return PreparedRestore(
        request=request,
        reading=reading,
        plan=plan,
        survey=survey,
        config=beginning_at(config, survey.first),
        notes=(*filter(None, [without_sources(archived, config)]), *notes(survey)),
        drops=tuple(drops(survey, config, plan.size_of(survey.messages), consumers=bool(request.consumers))),
    )


def _check(request: RestoreRequest, survey: RestoreSurvey, limits: Mapping[str, int]) -> None:
    """Raise JetcaptureError if a restore is impossible."""
    if not survey.messages:
        but = " except schedules (--with-schedules)" if survey.schedules else ""
        raise JetcaptureError(f"the archive of stream {request.stream} has no messages in this range{but}")
    if survey.largest > (limit := limits.get("max_msg_size", survey.largest)):
        raise JetcaptureError(
            f"stream {request.target} takes messages of up to {limit:,} bytes (max_msg_size), but the largest has "
            f"{survey.largest:,}: restore with --without-limits, or another setting in --stream-config"
        )
    for name, floor in request.consumers:
        if floor > survey.last:
            raise JetcaptureError(
                f"--consumer {name}={floor}: the last restored sequence is {survey.last}, and the consumer would skip "
                "messages that are published later"
            )


def restore(prepared: PreparedRestore, login: NatsConfig) -> int:
    """Create the stream; return the number of messages kept by the server. On a JetcaptureError, the incomplete stream
    is removed."""
    request, survey = prepared.request, prepared.survey
    consumers = [(consumer_settings(name, request.source, request.prefix), floor) for name, floor in request.consumers]
    pieces = ahead(partial(make_part, prepared.reading), prepared.plan.parts)
    try:
        with closing(pieces), progress_bars() as progress:
            span = survey.first, survey.last
            sending = send(
                login, prepared.config, span, consumers, pieces, lambda n: progress("restoring", n, survey.messages)
            )
            info = asyncio.run(sending)
    except asyncio.CancelledError as error:
        raise JetcaptureError(f"terminated; the incomplete stream {request.target} was removed") from error
    return int(info["state"]["messages"])


def run(request: RestoreRequest) -> int:
    """Restore, or without a login print a dry run; return the exit code. Raises JetcaptureError."""
    try:
        lines = _examined(request) if request.login is None else [_restored(request, request.login)]
        sys.stdout.writelines(f"{line}\n" for line in lines)
    except KeyboardInterrupt:
        sys.stderr.write("jetcapture: interrupted\n")
        return _INTERRUPTED
    return 0


def _restored(request: RestoreRequest, login: NatsConfig) -> str:
    name = request.target
    asyncio.run(check_target(login, name))
    prepared = prepare(request)
    if (lacking := holes(prepared.survey, request.stream)) and not request.allow_holes:
        raise JetcaptureError(lacking)
    if prepared.drops and not request.allow_drops:
        raise JetcaptureError(
            f"stream {name} would drop messages: {'; '.join(prepared.drops)}. Restore with --without-limits, "
            "--allow-drops, or other settings in --stream-config"
        )
    sys.stderr.writelines(f"jetcapture: {line}\n" for line in prepared.notes)
    sys.stderr.write(
        f"jetcapture: creating stream {name}; if this process is killed, remove what it has left with: "
        f"nats stream rm {name}\n"
    )
    began, survey = time.monotonic(), prepared.survey
    dropped = survey.messages - restore(prepared, login)
    seconds = time.monotonic() - began
    text = (
        f"restored {plural(survey.messages, 'message')} into stream {name}, sequences {survey.first} to {survey.last}, "
        f"in {duration(seconds)} ({survey.messages / max(seconds, 0.001):,.0f} messages/s)"
    )
    if dropped > 0:
        text += f"; not kept: {plural(dropped, 'message')} that expired or exceeded the stream's limits"
    return text


def _examined(request: RestoreRequest) -> Iterator[str]:
    prepared = prepare(request)
    plan, name = prepared.plan, request.target
    yield f"stream {request.stream} as {name}, from {plural(len(plan.parts), 'range')} of the archive"
    if plan.continued:
        yield f"created {plan.created}; it continues the stream that was created {', '.join(plan.continued)}"
    if plan.others:
        yield f"created {plan.created}; the archive also has: {', '.join(plan.others)} (--created)"
    if plan.read > 2 * plan.weight:
        yield f"every object is read {plan.read / plan.weight:.0f} times, because its sequences are far apart"
    yield from (*describe(prepared.survey), *prepared.notes)
    if prepared.survey.absent:
        yield "needs --allow-holes, because sequences are missing"
    yield from (f"stream {name} would drop messages: {line}" for line in prepared.drops)
