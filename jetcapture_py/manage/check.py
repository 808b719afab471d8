"""The `check` command: predict whether a configuration will work.

It stores only a probe, which it removes, and acknowledges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.capture import parts
from jetcapture_py.capture.announcing import configured_call
from jetcapture_py.capture.inferred import learn_archived
from jetcapture_py.capture.parts import preparer
from jetcapture_py.config.block import MANY_KEYS
from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.config.shares import BLOCK_SHARE, OPEN_SHARE, OPEN_UNACKED_SHARE
from jetcapture_py.config.template import parse_template, part_name
from jetcapture_py.config.units import format_duration, format_time
from jetcapture_py.errors import JetcaptureError, SourceError, StoreError
from jetcapture_py.jetstream.consumer import ConsumerState, consumer_state, unusable
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.jetstream.unreadable import unreadable_with_origins
from jetcapture_py.manage import check_server
from jetcapture_py.manage.cases import prepared_of
from jetcapture_py.manage.check_server import Findings
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.manage.plan import info_or_none
from jetcapture_py.manage.tap import Part, matching, newest
from jetcapture_py.plugins import is_reference
from jetcapture_py.reading.reasons import ReasonCounter
from jetcapture_py.store import LocalStore, configured_store, driver_of
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.text import one_line, plural
from jetcapture_py.threads import in_thread
from jetcapture_py.transform.prepare import Prepared

SAMPLE = 2_000
"""Newest messages to decode."""
WINDOWS = (60.0, 600.0, 3_600.0, 86_400.0)
"""Windows, in seconds before now, to measure the rate over; the highest rate counts."""
_SHORTEST = 1.0
SMALL = 1_000
"""Messages of an object below which reading many of them is slow."""


def messages_per_object(
    config: Config, rate: float, keys: int, message_bytes: float, unacked: int, archived: float = 1.0
) -> tuple[float, str]:
    """Return how many messages an object of the archive will hold with evenly used keys, and the deciding setting.

    `archived` is the share of the messages that do not go to quarantine. Of n open blocks that fill evenly, those
    sealed under pressure have 2 / (n + 1) of the total limit. A spool is assumed to be large enough.
    """
    block, memory, size = config.block, config.limits.memory, max(message_bytes, 1.0)
    of_all = archived * 2 / (keys + 1)
    age = "block.interval" if block.interval <= block.max_age else "block.max_age"
    limits = {
        age: rate * archived * min(block.interval, block.max_age) / keys,
        "block.max_messages": float(block.max_messages),
        "block.max_bytes": block.max_bytes / size,
        "source.max_ack_pending": unacked / OPEN_UNACKED_SHARE * of_all,
    }
    if config.limits.spool is None:
        limits["limits.memory"] = memory / size * min(1 / BLOCK_SHARE, of_all / OPEN_SHARE)
    setting = min(limits, key=lambda name: limits[name])
    return max(limits[setting], 1.0), setting


@dataclass(slots=True)
class Sample:
    """The newest messages, decoded."""

    keys: set[str | None] = field(default_factory=set)
    """Keys of the rows; None is no key."""
    messages: int = 0
    """Number of messages, in the quarantine too."""
    quarantined: int = 0
    """Number of messages that go to quarantine."""
    rows: int = 0
    """Number of rows outside the quarantine."""
    size: int = 0
    """Their bytes."""
    times: list[int] = field(default_factory=list)
    """Times of first and last messages, in microseconds since the epoch."""
    reasons: ReasonCounter = field(default_factory=ReasonCounter)
    """Reasons of the quarantine."""
    columns: set[str] = field(default_factory=set)
    """Columns with a value."""
    rescued: list[str] = field(default_factory=list)
    """Values that do not fit their columns, a JSON object for each row."""
    missing: list[str] = field(default_factory=list)
    """Placeholders of the key without a value in any message, if none has a key."""
    untimed: bool = False
    """Whether all messages take the fallback of `block.time`."""

    @classmethod
    def of(cls, config: Config, parts: Iterable[Part]) -> Sample:
        """Decode messages. Raises ConfigError."""
        decoded, prepare = cls(), preparer(config, None, None)
        learn_archived(prepare.decoder, config)
        for name, received in parts:
            for prepared in prepared_of(replace(prepare, consumer=name), received):
                decoded.add(prepared)
        return decoded

    def add(self, prepared: Prepared) -> None:
        rows, quarantine = prepared.rows, prepared.quarantine
        self.keys |= {run.key for run in prepared.runs}
        self.messages += prepared.messages
        self.quarantined += quarantine.num_rows
        self.rows += rows.num_rows
        self.size += rows.nbytes
        self.times += [time for _, time in prepared.span]
        named = zip(rows.schema.names, rows.columns, strict=True)
        self.columns |= {name for name, column in named if column.null_count < len(column)}
        if layout.RESCUED in rows.schema.names:
            self.rescued += rows.column(layout.RESCUED).drop_null().to_pylist()
        if quarantine.num_rows:
            self.reasons.add(pa.Table.from_batches([quarantine]))

    @property
    def keyless(self) -> bool:
        """Whether no row has a key."""
        return self.keys == {None}


def sample(config: Config, parts: Sequence[Part]) -> Sample:
    """Decode messages. If none has a key or a time, decode them again to find the missing parts."""
    decoded = Sample.of(config, parts)
    if decoded.keyless and not is_reference(config.key):
        for name in filter(None, map(part_name, parse_template(config.key))):
            if Sample.of(config.model_copy(update={"key": f"{{{name}}}"}), parts).keyless:
                decoded.missing.append(name)
    if config.block.time_fallback is not None and decoded.rows:
        strict = config.block.model_copy(update={"time_fallback": None})
        decoded.untimed = not Sample.of(config.model_copy(update={"block": strict}), parts).rows
    return decoded


async def rates(
    session: ReadSession, stream: str, filters: Sequence[str], answer: dict[str, Any], sample: Sample
) -> tuple[float, float]:
    """Return messages per second that the filters match, and of the whole stream, in the busiest window.

    `answer` is the answer to STREAM.INFO. Streams with retention interest or workqueue drop their messages, and no
    other consumer may count them, so their rate is taken from the sample's times.
    """
    state = answer["state"]
    if not state["messages"]:
        return 0.0, 0.0
    if answer["config"].get("retention", "limits") != "limits":
        span = (max(sample.times, default=0) - min(sample.times, default=0)) / 1e6
        rate = sample.messages / max(span, _SHORTEST)
        return rate, rate
    now = datetime.fromisoformat(answer["ts"])
    age = max((now - datetime.fromisoformat(state["first_ts"])).total_seconds(), _SHORTEST)
    matched = total = 0.0
    for window in dict.fromkeys(min(seconds, age) for seconds in WINDOWS):
        start = {"opt_start_time": format_time(now - timedelta(seconds=window))}
        matched = max(matched, await matching(session, stream, filters, start) / window)
        total = max(total, await matching(session, stream, (), start) / window if filters else matched)
    return matched, total


WORKS, FAILS = 0, 1
TIMEOUT = 5.0
OUTAGE = 86_400.0
"""Default of --outage: seconds that a capture may be down without losing messages."""
_SHORT_RETENTION = 3_600.0
_MAX_REASONS, _MAX_NAMES, _MAX_EXAMPLE = 10, 20, 100
"""Maximum reasons of quarantine and columns to name."""


def run(config: Config, others: Iterable[Config] = (), *, outage: float | None = None) -> CommandResult:
    """Check the configuration, beside `others`: one line per finding. Raises ConfigError."""
    findings = asyncio.run(check(config, others, outage=outage))
    code = FAILS if findings.problems else WORKS
    return CommandResult(summary=findings.summary(), lines=findings.lines(), records=[findings.fields()], code=code)


async def check(config: Config, others: Iterable[Config] = (), *, outage: float | None = None) -> Findings:
    """Check the configuration, beside `others`; `outage` is in seconds.

    Raises ConfigError for problems that also end a capture at its start, such as a missing extra.
    """
    parts.encoder(config, None, None)
    parts.preparer(config, None, None)
    configured_call(config.on_stored)
    findings = Findings()
    for text in config.warnings():
        findings.warning("settings", text)
    consumer = None
    try:
        async with ReadSession(config.nats, f"jetcapture check {config.source.stream}", timeout=TIMEOUT) as session:
            consumer = await _server(session, config, findings, outage)
            await check_server.check_notifications(session, config, others, findings)
    except SourceError as error:
        findings.problem("connection", str(error))
    await in_thread(_store, config, findings, consumer)
    return findings


def _store(config: Config, findings: Findings, consumer: ConsumerState | None) -> None:
    """Try out the store, without creating a local archive: a start must still see that it is new."""
    store, empty = configured_store(config.store), False
    try:
        if isinstance(store, LocalStore):
            empty = store.try_out()
        else:
            store.probe()
    except StoreError as error:
        findings.problem("store", f"objects cannot be stored: {error}")
        return
    driver = driver_of(store)
    findings.ok("store", "a probe was written and removed" + (f" through {driver}" if driver else ""))
    if empty and consumer is not None and consumer.acknowledged:
        reason = "is empty or missing, but the consumer has acknowledged messages; is the volume mounted?"
        findings.warning("store", f"{config.store.url} {reason}")
    elif empty:
        findings.ok("store", f"{config.store.url} is empty or missing: a new archive")
    if config.store.type is None and not isinstance(store, LocalStore):
        _protection(config, findings)


def _protection(config: Config, findings: Findings) -> None:
    """Report how the bucket or container protects objects. Unknown settings are no problem."""
    protection = ArchiveFiles(config.store.url, config.store.options).protection
    for fact in () if protection is None else protection.facts:
        (findings.ok if fact.known else findings.skipped)(fact.about, fact.text)


async def _server(
    session: ReadSession, config: Config, findings: Findings, outage: float | None
) -> ConsumerState | None:
    """Check everything that needs the server; return the consumer, None if missing or unknown."""
    source = config.source
    account = await check_server.check_account(session, findings)
    if account is None:
        return None
    check_server.check_size(findings, config, account)
    stream, allowed = await _stream(session, source.stream, findings)
    consumer = await _consumer(session, source, findings) if stream is not None or not allowed else None
    if consumer is not None:
        check_server.check_clock(findings, consumer.ahead)
    elif stream is not None:
        check_server.check_clock(findings, (datetime.now(UTC) - datetime.fromisoformat(stream["ts"])).total_seconds())
    if allowed:
        await check_server.check_plans(session, config, findings)
    elif consumer and (problem := unusable(source.stream, source.consumer, consumer.config, source.mode)):
        findings.problem("consumer", problem)
    await check_server.check_permissions(session, config, findings, new_consumer=consumer is None)
    if source.mode == "shared":
        check_server.check_wait(findings, consumer, source)
    if stream is None:
        return consumer
    if problem := await unreadable_with_origins(session.api, stream):
        findings.problem("stream", problem)
        return consumer
    check_server.check_mode(session, findings, source, stream)
    check_server.check_bucket(findings, source, stream)
    check_server.check_consumer(findings, source, consumer, stream)
    check_server.check_limits(findings, config, account, stream, new_consumer=consumer is None)
    if consumer is None:
        await _new_consumer(session, config, findings, stream)
        await check_server.check_work_queue(session, config, findings, stream)
    await check_server.check_filters(session, config, findings, stream)
    try:
        await _traffic(session, config, findings, stream, consumer, outage)
    except SourceError as error:
        findings.skipped("traffic", f"the stream cannot be read: {error}")
    return consumer


async def _new_consumer(session: ReadSession, config: Config, findings: Findings, stream: dict[str, Any]) -> None:
    """Report a watermark of a missing consumer: it was deleted."""
    source, mark = config.source, None
    with suppress(JetcaptureError):  # `_store` reports problems of the store
        storage = ArchiveFiles(config.store.url, config.store.options)
        archived = await in_thread(storage.watermark, source.stream)
        mark = None if archived is None else archived.of(source.consumer)
    if mark is None or not mark.seq:
        return
    if await session.is_same(source.stream, mark.origin, StreamState.of(stream)):
        text = f"it was deleted: the archive has its messages up to sequence {mark.seq}; a new one begins with"
        text += f" source.deliver_policy {source.deliver_policy}, and readers drop copies of what it delivers again"
        findings.warning("consumer", text)


async def _stream(session: ReadSession, stream: str, findings: Findings) -> tuple[dict[str, Any] | None, bool]:
    """Return the stream, None if missing or unknown, and whether the user may look it up."""
    try:
        return await info_or_none(session, f"STREAM.INFO.{stream}"), True
    except SourceError as error:
        findings.skipped("stream", _reason(error))
        return None, False


async def _consumer(session: ReadSession, source: SourceConfig, findings: Findings) -> ConsumerState | None:
    """Return the consumer; None if it does not exist. A capture needs permission to look it up."""
    try:
        subject = f"CONSUMER.INFO.{source.stream}.{source.consumer}"
        answer = await info_or_none(session, subject)
        return None if answer is None else consumer_state(answer)
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
    consumer: ConsumerState | None,
    outage: float | None,
) -> None:
    """Sample the newest messages, measure the rate, and predict the size of objects."""
    decoded = await in_thread(sample, config, await newest(session, config, SAMPLE))
    source = config.source
    rate, total = await rates(session, source.stream, source.filter_subjects, stream, decoded)
    findings.figures |= {"messages_per_second": rate, "stream_messages_per_second": total}
    _report_decoded(findings, config, decoded)
    _retention(findings, stream, total, config, outage)
    if not rate:
        findings.skipped("traffic", "no recent messages: how large objects will be cannot be told")
        return
    unacked = source.max_ack_pending if consumer is None else consumer.max_ack_pending
    check_server.check_pays(findings, source, stream, rate)
    if not decoded.rows:
        findings.skipped(
            "objects", "all of the newest messages go to quarantine: how large objects will be cannot be told"
        )
        return
    _objects(findings, config, rate, decoded, unacked)


def _report_decoded(findings: Findings, config: Config, sample: Sample) -> None:
    """Report the outcome of the newest messages: quarantine, keys, columns and times."""
    count = f"the newest {plural(sample.messages, 'message')}"
    reasons = sample.reasons.summaries()
    report = findings.problem if 2 * sample.quarantined > sample.messages else findings.warning
    for reason in reasons[:_MAX_REASONS]:
        goes = "goes" if reason.messages == 1 else "go"
        report("decode", f"{reason.messages:,} of {count} {goes} to quarantine ({reason.stage}): {reason.example}")
    if rest := reasons[_MAX_REASONS:]:
        number = plural(sum(reason.messages for reason in rest), "more goes", "more go")
        report("decode", f"{number} to quarantine for {plural(len(rest), 'other reason')}")
    if not sample.rows:
        return
    if not reasons:
        keys = plural(len(sample.keys), "key")
        findings.ok("decode", f"the newest messages ({sample.messages:,}) have {keys}; none goes to quarantine")
    if sample.rescued:
        example = one_line(sample.rescued[0], _MAX_EXAMPLE)
        text = f"{plural(len(sample.rescued), 'row')} of {count} with values that do not fit, such as {example}"
        findings.warning("columns", f"{text}; they go to _nats_rescued; see jetcapture columns")
    if sample.keyless and config.key:
        missing = ", ".join(f"{{{name}}}" for name in sample.missing)
        what = f"no message of {count} has {missing}" if missing else f"no message of {count} has this key"
        findings.warning("key", f"{what}, so none has a key: correct key ({config.key}); {_columns(sample)}")
    empty = [
        f"{name} (path: {column.path})" if column.path else name
        for name, column in config.decode.columns.items()
        if layout.field_name(name) not in sample.columns
    ]
    if empty:
        names, more = ", ".join(empty[:_MAX_NAMES]), f" and {len(empty) - _MAX_NAMES} more"
        findings.warning(
            "columns",
            f"null in all rows of {count}: {names}{more if len(empty) > _MAX_NAMES else ''}; compare decode.columns "
            "with the payloads that `jetcapture tap` shows (a path has names only, separated by dots)",
        )
    if sample.untimed:
        text = f"no message of {count} has block.time ({config.block.time}), so all take the stream's time"
        findings.warning("time", f"{text}; {_columns(sample)}")


def _columns(sample: Sample) -> str:
    names = [name for name in sorted(sample.columns) if not name.startswith("_nats_")]
    shown = ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")
    return f"columns with values are {shown}" if names else "no column has a value"


def _objects(findings: Findings, config: Config, rate: float, sample: Sample, unacked: int) -> None:
    keys, bundles = len(sample.keys), config.block.bundles
    blocks = min(keys, bundles) if bundles else keys
    archived = sample.messages - sample.quarantined
    share = archived / sample.messages
    messages, setting = messages_per_object(config, rate, blocks, sample.size / archived, unacked, share)
    findings.figures |= {"messages_per_object": messages, "limit": setting, "keys": keys}
    where = plural(keys, "key") + (f" in {plural(bundles, 'bundle')}" if bundles else "")
    small = messages < SMALL and (config.maintain is None or config.maintain.compact is None)
    (findings.warning if small else findings.ok)(
        "objects",
        f"at {rate * share:,.1f} messages/s and {where}, objects will have about {messages:,.0f} messages ({setting}); "
        "`jetcapture maintain` merges them"
        + (", and reads are slow until then: set maintain.compact" if small else ""),
    )
    if bundles:
        return
    if keys > config.limits.open_blocks:
        findings.warning(
            "keys", f"more keys than limits.open_blocks ({config.limits.open_blocks:,}): raise it, or use a coarser key"
        )
    if keys > MANY_KEYS:
        findings.warning("keys", f"{keys:,} keys, each with objects of its own: block.bundles stores them together")


def _retention(
    findings: Findings, stream: Mapping[str, Any], rate: float, config: Config, outage: float | None
) -> None:
    """Compare the stream's retention of uncaptured messages with the longest outage."""
    settings, state = stream["config"], stream["state"]
    size = state["bytes"] / state["messages"] if state["messages"] else 0
    limits = {
        "max_age": settings.get("max_age", 0) / 1e9,
        "max_msgs": settings.get("max_msgs", -1) / rate if rate else 0,
        "max_bytes": settings.get("max_bytes", -1) / (rate * size) if rate and size else 0,
    }
    limited = {name: seconds for name, seconds in limits.items() if seconds > 0}
    if settings.get("discard") == "new":
        limited = {name: seconds for name, seconds in limited.items() if name == "max_age"}
    if not limited:
        findings.ok("retention", "no limit of the stream removes a message before it is captured")
        return
    setting = min(limited, key=lambda name: limited[name])
    seconds, allowed = limited[setting], OUTAGE if outage is None else outage
    findings.figures["retention_seconds"] = seconds
    text = f"the stream keeps messages for {_short(seconds)} ({setting})"
    held = config.block.max_age
    if seconds < max(_SHORT_RETENTION, held) or (outage is not None and seconds < outage):
        longest = format_duration(max(held, allowed))
        findings.problem(
            "retention", f"{text}: a longer outage loses messages; raise {setting} to keep {longest} or more"
        )
    elif seconds < allowed:
        findings.warning("retention", f"{text}: a longer outage loses messages; {format_duration(allowed)} is safer")
    else:
        findings.ok("retention", f"{text}, longer than an outage of {format_duration(allowed)}")


def _short(seconds: float) -> str:
    """Format a duration, rounded to a sensible precision."""
    digits = -1 if seconds >= 600 else 0 if seconds >= 10 else 1
    return format_duration(float(round(seconds, digits)))
