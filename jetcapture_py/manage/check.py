"""The `check` command: whether a configuration will work, before anything is captured.

Nothing is stored but a probe, which is removed, and nothing is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from jetcapture_py.archive import layout
from jetcapture_py.capture import parts
from jetcapture_py.capture.announcing import configured_call
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.config.units import format_duration
from jetcapture_py.errors import SourceError, StoreError
from jetcapture_py.jetstream.admin import consumer_state, unusable
from jetcapture_py.jetstream.connection import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND
from jetcapture_py.jetstream.imported import OneAnswerError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage import check_server
from jetcapture_py.manage.findings import Findings
from jetcapture_py.manage.forecast import Forecast, forecast, put_price
from jetcapture_py.manage.plan import info_or_none
from jetcapture_py.manage.traffic import Sample, rates, sample
from jetcapture_py.store import LocalStore, configured_store
from jetcapture_py.text import plural

WORKS, FAILS = 0, 1
TIMEOUT = 5.0
OUTAGE = 86_400.0
"""Default of --outage: seconds that a capture may be down without losing messages."""
_SHORT_RETENTION = 3_600.0
_SMALL_PART = 0.8
"""Report blocks shorter than this share of the configured length."""
_MONTH = 30
_MAX_REASONS, _MAX_NAMES = 10, 20
"""Reasons of quarantine, and columns, that are named."""


def run(config: Config, *, as_json: bool, outage: float | None, price: float | None) -> int:
    """Check, print one line per finding, and return the exit code. Raises ConfigError."""
    findings = asyncio.run(check(config, outage=outage, price=price))
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        console.print(Text(json.dumps(findings.fields())))
    for line in findings.lines() if not as_json else ():
        console.print(line)
    return FAILS if findings.problems else WORKS


async def check(config: Config, *, outage: float | None = None, price: float | None = None) -> Findings:
    """Check the configuration; `outage` is in seconds, `price` in US dollars per 1,000 writes.

    Raises ConfigError for problems that also end a capture at its start, such as a missing extra.
    """
    _make_parts(config)
    findings = Findings()
    for text in config.warnings():
        findings.warning("settings", text)
    consumer = None
    try:
        async with ReadSession(config.nats, f"jetcapture check {config.source.stream}", timeout=TIMEOUT) as session:
            consumer = await _server(session, config, findings, outage, put_price(config.store.url, price))
    except SourceError as error:
        findings.problem("connection", str(error))
    await asyncio.to_thread(_store, config, findings, consumer)
    return findings


def _make_parts(config: Config) -> None:
    """Make what a start makes of the configuration. Raises ConfigError, as the start would."""
    parts.encoder(config, None, None)
    parts.preparer(config, None, None)
    configured_call(config.on_stored)


def _store(config: Config, findings: Findings, consumer: Mapping[str, Any] | None) -> None:
    """Try the store out. A local archive must not be created by it: a start would no longer see that it is new."""
    store, empty = configured_store(config.store), False
    try:
        if isinstance(store, LocalStore):
            empty = store.try_out()
        else:
            store.probe()
    except StoreError as error:
        findings.problem("store", f"objects cannot be stored: {error}")
        return
    findings.ok("store", "a probe was written and removed")
    if empty and consumer is not None and consumer_state(dict(consumer)).acknowledged:
        reason = "is empty or missing, but the consumer has acknowledged messages; is the volume mounted?"
        findings.warning("store", f"{config.store.url} {reason}")
    elif empty:
        findings.ok("store", f"{config.store.url} is empty or missing: a new archive")


async def _server(
    session: ReadSession, config: Config, findings: Findings, outage: float | None, price: float
) -> Mapping[str, Any] | None:
    """Check everything that needs the server; return the consumer, None if it does not exist or is unknown."""
    source = config.source
    account = await check_server.check_account(session, findings)
    if account is None:
        return None
    check_server.check_size(findings, config, account)
    stream, allowed = await _stream(session, source.stream, findings)
    consumer = await _consumer(session, source, findings) if stream is not None or not allowed else None
    if consumer is not None or stream is not None:
        check_server.check_clock(findings, consumer or stream or {}, datetime.now(UTC))
    if allowed:
        await check_server.check_plans(session, config, findings)
    elif consumer is not None and (problem := unusable(source.stream, source.consumer, consumer["config"])):
        findings.problem("consumer", problem)
    await check_server.check_permissions(session, config, findings, new_consumer=consumer is None)
    check_server.check_wait(findings, consumer, source)
    if stream is None:
        return consumer
    check_server.check_bucket(findings, source, stream)
    if consumer is not None:
        check_server.check_consumer(findings, consumer)
    check_server.check_limits(findings, config, account, stream, new_consumer=consumer is None)
    if consumer is None:
        await check_server.check_work_queue(session, config, findings, stream)
    await check_server.check_filters(session, config, findings, stream)
    try:
        await _traffic(session, config, findings, stream, consumer, outage, price)
    except OneAnswerError as error:
        findings.problem("permission", str(error))
    except SourceError as error:
        findings.skipped("traffic", f"the stream cannot be read: {error}")
    return consumer


async def _stream(session: ReadSession, stream: str, findings: Findings) -> tuple[dict[str, Any] | None, bool]:
    """Return the stream, None if it does not exist or is unknown, and whether the user may look it up."""
    try:
        return await info_or_none(session, f"STREAM.INFO.{stream}", STREAM_NOT_FOUND), True
    except SourceError as error:
        findings.skipped("stream", _reason(error))
        return None, False


async def _consumer(session: ReadSession, source: SourceConfig, findings: Findings) -> dict[str, Any] | None:
    """Return the consumer, None if it does not exist. A capture needs the permission to look it up."""
    try:
        return await info_or_none(session, f"CONSUMER.INFO.{source.stream}.{source.consumer}", CONSUMER_NOT_FOUND)
    except SourceError as error:
        findings.problem("permission", f"{_reason(error)}; allow it")
        return None


def _reason(error: SourceError) -> str:
    return str(error).removeprefix("NATS refused: ")


async def _traffic(
    session: ReadSession,
    config: Config,
    findings: Findings,
    stream: dict[str, Any],
    consumer: Mapping[str, Any] | None,
    outage: float | None,
    price: float,
) -> None:
    """Sample the newest messages, measure the rate, and predict blocks and costs."""
    newest = await sample(session, config)
    source = config.source
    rate, whole = await rates(session, source.stream, source.filter_subjects, stream, newest)
    findings.figures |= {"messages_per_second": rate, "stream_messages_per_second": whole}
    _decoded(findings, config, newest)
    _retention(findings, stream, whole, config, outage)
    if not rate:
        findings.skipped("traffic", "no recent messages; blocks and costs cannot be predicted")
        return
    unacked = source.max_ack_pending if consumer is None else consumer_state(dict(consumer)).max_ack_pending
    predicted = forecast(config, newest.traffic(rate, config.block.bundles), unacked)
    findings.figures |= {**asdict(predicted), "keys": len(newest.keys)}
    _blocks(findings, config, predicted, rate, len(newest.keys))
    _cost(findings, predicted, price)


def _decoded(findings: Findings, config: Config, newest: Sample) -> None:
    """Report what becomes of the newest messages: quarantine, keys, columns and times."""
    count = f"the newest {plural(newest.messages, 'message', grouped=True)}"
    reasons = newest.reasons.most_common()
    for reason, number in reasons[:_MAX_REASONS]:
        text = f"{number:,} of {count} go to quarantine ({reason[0]}): {newest.examples[reason]}"
        findings.warning("decode", text)
    if rest := reasons[_MAX_REASONS:]:
        number = sum(number for _, number in rest)
        findings.warning("decode", f"{number:,} more go to quarantine for {plural(len(rest), 'other reason')}")
    if not newest.rows:
        return
    if not reasons:
        keys = plural(len(newest.keys), "key", grouped=True)
        findings.ok("decode", f"the newest messages ({newest.messages:,}) have {keys}; none goes to quarantine")
    if newest.keyless and config.key:
        missing = ", ".join(f"{{{name}}}" for name in newest.missing)
        what = f"no message of {count} has {missing}" if missing else f"no message of {count} has this key"
        findings.warning("key", f"{what}, so none has a key: correct key ({config.key}); {_columns(newest)}")
    empty = [
        f"{name} (path: {column.path})" if column.path else name
        for name, column in config.decode.columns.items()
        if layout.field_name(name) not in newest.columns
    ]
    if empty:
        names, more = ", ".join(empty[:_MAX_NAMES]), f" and {len(empty) - _MAX_NAMES} more"
        findings.warning(
            "columns",
            f"null in all rows of {count}: {names}{more if len(empty) > _MAX_NAMES else ''}; compare decode.columns "
            "with the payloads that `jetcapture tap` shows (a path has names only, separated by dots)",
        )
    if newest.untimed:
        text = f"no message of {count} has block.time ({config.block.time}), so all take the stream's time"
        findings.warning("time", f"{text}; {_columns(newest)}")


def _columns(newest: Sample) -> str:
    names = [name for name in sorted(newest.columns) if not name.startswith("_nats_")]
    shown = ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")
    return f"columns with values are {shown}" if names else "no column has a value"


def _blocks(findings: Findings, config: Config, predicted: Forecast, rate: float, keys: int) -> None:
    length, wanted = predicted.block_seconds, predicted.configured_seconds
    shown, asked = _short(length), format_duration(wanted)
    text = f"at {rate:,.1f} messages/s and {plural(keys, 'key', grouped=True)}, blocks will be {shown} long"
    if predicted.limit is None or length >= wanted * _SMALL_PART:
        findings.ok("blocks", f"{text}, as configured ({asked})")
    else:
        remedy = f"raise {predicted.limit}, shorten block.interval, or let compaction merge them"
        findings.warning("blocks", f"{text}, not {asked}: {remedy}")
    if config.block.bundles:
        return
    if keys > config.limits.open_blocks:
        findings.warning(
            "keys", f"more keys than limits.open_blocks ({config.limits.open_blocks:,}): raise it, or use a coarser key"
        )
    if keys > MANY_KEYS:
        findings.warning("keys", f"{keys:,} keys, each with objects of its own: block.bundles stores them together")


def _cost(findings: Findings, predicted: Forecast, price: float) -> None:
    daily = predicted.requests / 1000 * price
    findings.figures |= {"put_price": price, "dollars_a_day": daily}
    cost = f", about ${daily:,.2f} a day or ${daily * _MONTH:,.2f} a month" if price else ""
    findings.ok("cost", f"{predicted.objects:,.0f} objects and {predicted.requests:,.0f} writes a day{cost}")


def _retention(
    findings: Findings, stream: Mapping[str, Any], rate: float, config: Config, outage: float | None
) -> None:
    """Compare how long the stream keeps uncaptured messages with the longest outage."""
    settings, state = stream["config"], stream["state"]
    size = state["bytes"] / state["messages"] if state["messages"] else 0
    kept = {
        "max_age": settings.get("max_age", 0) / 1e9,
        "max_msgs": settings.get("max_msgs", -1) / rate if rate else 0,
        "max_bytes": settings.get("max_bytes", -1) / (rate * size) if rate and size else 0,
    }
    limited = {name: seconds for name, seconds in kept.items() if seconds > 0}
    if settings.get("discard") == "new":
        limited = {name: seconds for name, seconds in limited.items() if name == "max_age"}
    if not limited:
        findings.ok("retention", "no limit of the stream removes a message before it is captured")
        return
    setting = min(limited, key=lambda name: limited[name])
    seconds, wanted = limited[setting], OUTAGE if outage is None else outage
    findings.figures["retention_seconds"] = seconds
    text = f"the stream keeps messages for {_short(seconds)} ({setting})"
    held = config.block.max_age
    if seconds < max(_SHORT_RETENTION, held) or (outage is not None and seconds < outage):
        longest = format_duration(max(held, wanted))
        findings.problem(
            "retention", f"{text}: a longer outage loses messages; raise {setting} to keep {longest} or more"
        )
    elif seconds < wanted:
        findings.warning("retention", f"{text}: a longer outage loses messages; {format_duration(wanted)} is safer")
    else:
        findings.ok("retention", f"{text}, longer than an outage of {format_duration(wanted)}")


def _short(seconds: float) -> str:
    """Format a duration, rounded to a sensible precision."""
    digits = -1 if seconds >= 600 else 0 if seconds >= 10 else 1
    return format_duration(float(round(seconds, digits)))
