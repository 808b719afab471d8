"""Create a stream from its archive, exactly as it was, through the restore of nats-server 2.15.

    jetcapture spark restore URL STREAM --servers nats://…       or python -m spark_jobs.restore, or spark-submit
    jetcapture spark restore --config FILE --as RESTORED --subject-prefix restored --to-time 2026-05-01T12:00:00Z

The stream gets its messages with their sequences, timestamps to the nanosecond, subjects, headers and payloads;
sequences without a message become deleted messages, and the next message gets the next sequence. Its configuration is
the one that the daemon keeps in the archive.

The archive is divided into ranges of sequences. Executors read each range, order it, drop copies, and make a piece of
the server's own backup format; the driver sends the pieces in order, as fast as the server takes them. Only a few
pieces are in memory. Small archives are read without Spark.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # spark-submit put this directory there

from rich.console import Console

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, retried
from jetcapture_py.store.remote import with_secrets
from jetcapture_py.text import duration, plural, progress_bars
from spark_jobs.job import guarded, leave, session
from spark_jobs.reading.location import ArchiveLocation
from spark_jobs.restoring.arguments import RestoreCommand, parse
from spark_jobs.restoring.checks import RestoreSurvey, describe, drops, holes, notes
from spark_jobs.restoring.config import (
    beginning_at,
    consumer_settings,
    kept_config,
    limits_of,
    target_config,
    without_sources,
)
from spark_jobs.restoring.part import PartSurvey, Reading, make_part, survey_part
from spark_jobs.restoring.plan import RestorePlan, plan_restore, removed_ranges
from spark_jobs.restoring.send import Maker, RestoreOrder, check_target, send

SMALL = 8 << 30
"""Bytes of messages up to which an archive is read without Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRestore:
    """A restore that can begin."""

    chosen: RestoreCommand
    maker: Maker
    reading: Reading
    plan: RestorePlan
    """Its ranges."""
    survey: RestoreSurvey
    """Their contents."""
    config: Mapping[str, Any]
    """Configuration of the new stream."""
    hole: str | None
    """One line about missing sequences; None without any."""
    notes: tuple[str, ...]
    """What else to say about it, one line each."""
    drops: tuple[str, ...]
    """Why the new stream would drop messages, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of a restore."""

    messages: int
    """Messages sent."""
    kept: int
    """Messages that the server has kept of them."""
    first: int
    """First sequence sent."""
    last: int
    """Last sequence sent."""
    seconds: float
    """Duration."""


def prepare(chosen: RestoreCommand, maker: Maker | None = None) -> PreparedRestore:
    """Read the archive's names, footers, sequences and timestamps. Raises JetcaptureError.

    `maker` decides where ranges are read; default: Spark unless the archive is small. Starts again if a compaction
    replaces objects meanwhile.
    """
    files = ArchiveLocation.open(chosen.url, with_secrets(chosen.options)).files
    return retried(lambda: _prepared(chosen, files, maker))


def _prepared(chosen: RestoreCommand, files: ArchiveFiles, maker: Maker | None) -> PreparedRestore:
    plan = plan_restore(files, chosen.stream, first=chosen.first, last=chosen.last, created=chosen.created)
    kept = kept_config(files, chosen.stream, plan.created)
    config = target_config(
        kept,
        chosen.stream_config,
        source=chosen.stream,
        name=chosen.target,
        prefix=chosen.prefix,
        without_limits=chosen.without_limits,
    )
    if maker is None:
        maker = Maker.here() if plan.weight <= SMALL else Maker.on(session("jetcapture restore"))
    erased, expired = files.erased(chosen.stream), files.expired(chosen.stream)
    removed = removed_ranges(plan, expired, erased, continues=kept is not None and kept.continues)
    configs = (config, {} if kept is None else kept.config)
    reading = Reading(
        files=files,
        prefix=chosen.prefix,
        until=chosen.until,
        erased=erased,
        removed=tuple(removed),
        without_schedules=not chosen.with_schedules
        and any(settings.get("allow_msg_schedules") for settings in configs),
    )
    plan, parts = _surveyed(maker, reading, plan, limits_of(config))
    begins = chosen.first if chosen.first > 1 else min([plan.begins, *(first for first, _ in removed)])
    ends = chosen.last if chosen.last is not None and chosen.until is None else 0
    found = RestoreSurvey.of(parts, begins, ends, removed)
    _check(chosen, found, limits_of(config))
    return PreparedRestore(
        chosen=chosen,
        maker=maker,
        reading=reading,
        plan=plan,
        survey=found,
        config=beginning_at(config, found.first),
        hole=holes(found, chosen.stream),
        notes=(*filter(None, [without_sources(kept, config)]), *notes(found)),
        drops=tuple(drops(found, config, plan.size_of(found.messages), consumers=bool(chosen.consumers))),
    )


def _check(chosen: RestoreCommand, found: RestoreSurvey, limits: Mapping[str, int]) -> None:
    """Raise JetcaptureError if this cannot be restored."""
    if not found.messages:
        but = " except schedules (--with-schedules)" if found.schedules else ""
        raise JetcaptureError(f"the archive of stream {chosen.stream} has no messages in this range{but}")
    if found.largest > (most := limits.get("max_msg_size", found.largest)):
        raise JetcaptureError(
            f"stream {chosen.target} takes messages of up to {most:,} bytes (max_msg_size), but the largest has "
            f"{found.largest:,}: restore with --without-limits, or another setting in --stream-config"
        )
    for name, floor in chosen.consumers:
        if floor > found.last:
            raise JetcaptureError(
                f"--consumer {name}={floor}: the last restored sequence is {found.last}, and the consumer would skip "
                "messages that are published later"
            )


def _surveyed(
    maker: Maker, reading: Reading, plan: RestorePlan, limits: Mapping[str, int]
) -> tuple[RestorePlan, list[PartSurvey]]:
    """Count the ranges up to a time; return the plan without those after it."""
    until = reading.until
    by_subject, by_size = "max_msgs_per_subject" in limits, "max_msg_size" in limits
    count = partial(survey_part, reading, by_subject=by_subject, by_size=by_size)
    parts = list(maker.results(count, plan.parts))
    if until is None:
        return plan, parts
    last = max((part.until for part in parts), default=0)
    kept = [spec for spec in plan.parts if spec.first <= last]
    parts = parts[: len(kept)]
    if kept and kept[-1].last > last:
        kept[-1] = replace(kept[-1], last=last)
        parts[-1] = count(kept[-1])
    return replace(plan, parts=tuple(kept)), parts


def restore(prepared: PreparedRestore, servers: NatsConfig, console: Console | None = None) -> Restored:
    """Create the stream. Raises JetcaptureError; the incomplete stream is then removed."""
    chosen, found = prepared.chosen, prepared.survey
    order = RestoreOrder(
        login=servers,
        stream=chosen.target,
        config=prepared.config,
        first=found.first,
        last=found.last,
        consumers=[(consumer_settings(name, chosen.source, chosen.prefix), floor) for name, floor in chosen.consumers],
    )
    began = time.monotonic()
    made = prepared.maker.futures(partial(make_part, prepared.reading), prepared.plan.parts)
    try:
        with closing(made), progress_bars(console) as progress:
            info = asyncio.run(send(order, made, lambda done: progress("restoring", done, found.messages)))
    except asyncio.CancelledError as error:
        raise JetcaptureError(f"terminated; the incomplete stream {chosen.target} was removed") from error
    return Restored(
        messages=found.messages,
        kept=int(info["state"]["messages"]),
        first=found.first,
        last=found.last,
        seconds=time.monotonic() - began,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when the stream is restored, 1 after printing a one-line error."""
    return guarded("restore", lambda: _job(parse(arguments)))


def _job(chosen: RestoreCommand) -> None:
    servers = None if chosen.dry_run else chosen.target_login
    if servers is not None:
        asyncio.run(check_target(servers, chosen.target))
    prepared = prepare(chosen)
    if servers is None:
        sys.stdout.writelines(f"{line}\n" for line in _lines(prepared))
        return
    if prepared.hole and not chosen.allow_holes:
        raise JetcaptureError(prepared.hole)
    if prepared.drops and not chosen.allow_drops:
        raise JetcaptureError(
            f"stream {chosen.target} would drop messages: {'; '.join(prepared.drops)}. Restore with --without-limits, "
            "--allow-drops, or other settings in --stream-config"
        )
    sys.stderr.writelines(f"restore: {line}\n" for line in prepared.notes)
    sys.stderr.write(
        f"restore: creating stream {chosen.target}; if this process is killed, remove what it has left with: "
        f"nats stream rm {chosen.target}\n"
    )
    done = restore(prepared, servers)
    sys.stdout.write(f"{_report(done, chosen.target)}\n")


def _lines(prepared: PreparedRestore) -> list[str]:
    plan, name = prepared.plan, prepared.chosen.target
    lines = [f"stream {prepared.chosen.stream} as {name}, from {plural(len(plan.parts), 'range')} of the archive"]
    if plan.continued:
        lines.append(f"created {plan.created}; it continues the stream that was created {', '.join(plan.continued)}")
    if plan.others:
        lines.append(f"created {plan.created}; the archive also has: {', '.join(plan.others)} (--created)")
    if plan.read > 2 * plan.weight:
        lines.append(f"every object is read {plan.read / plan.weight:.0f} times, because its sequences are far apart")
    lines += [*describe(prepared.survey), *prepared.notes]
    if prepared.hole:
        lines.append("needs --allow-holes, because sequences are missing")
    lines += [f"stream {name} would drop messages: {line}" for line in prepared.drops]
    return lines


def _report(done: Restored, name: str) -> str:
    rate = done.messages / max(done.seconds, 0.001)
    text = (
        f"restored {plural(done.messages, 'message')} into stream {name}, sequences {done.first} to {done.last}, "
        f"in {duration(done.seconds)} ({rate:,.0f} messages/s)"
    )
    if done.kept < done.messages:
        text += f"; {done.messages - done.kept} of them have expired or are beyond the stream's limits"
    return text


if __name__ == "__main__":
    leave(main())
