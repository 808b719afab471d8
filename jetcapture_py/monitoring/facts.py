"""Facts about one capture: a frozen value in groups, made once a second in its event loop.

The status page, /status.json, /metrics and the probes show it; other threads read nothing else of a capture. To add a
fact, add a field to a group and its value to the function below it. It then appears in /status.json; annotated with
`counter` or `gauge`, it is also a metric.

Texts from messages, locations and errors have no credentials, but are not escaped: the display escapes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jetcapture_py.archive.watermark import NEVER
from jetcapture_py.capture.stats import QuarantineReason, RecentObject
from jetcapture_py.config.units import format_duration, format_size, format_time
from jetcapture_py.jetstream.shared import Role
from jetcapture_py.monitoring.health import Health
from jetcapture_py.monitoring.history import History, HistorySample, PastFailure
from jetcapture_py.monitoring.metrics import Durations, Metrics, counter, gauge, histogram
from jetcapture_py.monitoring.notices import LEVELS, Notice, notices
from jetcapture_py.pages import words
from jetcapture_py.text import sentence, without_credentials

if TYPE_CHECKING:
    from jetcapture_py.capture.blocks import Block
    from jetcapture_py.capture.pipeline import Capture
    from jetcapture_py.config.model import Config

MAX_BLOCKS = 6
"""Maximum of the oldest open blocks to list, and of the largest; all are listed if they are no more than both
together."""
SEALED_BY = ("age", "bytes", "messages", "pressure", "columns", "drain", "caught_up")
_FEW_SAMPLES = 12
"""Samples (the last minute) for detecting other replicas: a single one may mix two moments."""
_FAILING = {
    "running": "Failed",
    "connected": "Not connected",
    "consuming": "Not consuming",
    "decoding": "Not decoding",
    "storing": "Not storing",
}

_version = cache(version)

Counts = Mapping[str, int]
State = Literal["starting", "healthy", "attention", "failing", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The process at one moment, for the header of a page."""

    version: str
    host: str
    pid: int
    time: datetime
    """The moment."""


def this_process() -> ProcessFacts:
    """Return the facts of this process."""
    return ProcessFacts(_version("jetcapture"), socket.gethostname(), os.getpid(), datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerFacts:
    """The consumer's state on the server, over all replicas."""

    asked: datetime
    """The server's time of the answer."""
    ahead: float
    """Seconds that this machine's clock was ahead of the server's then."""
    lag: Annotated[float, gauge("lag_seconds", "Age of the oldest message not stored; use the maximum over replicas")]
    pending: Annotated[int, gauge("consumer_pending_messages", "Messages not yet delivered to any replica")]
    unacked: Annotated[int, gauge("consumer_unacked_messages", "Messages delivered to any replica, not acknowledged")]
    max_ack_pending: Annotated[int | None, gauge("consumer_max_ack_pending", "Limit of consumer_unacked_messages")]
    redelivered: int
    """Unacknowledged messages that were delivered more than once."""
    delivered: int
    """Last sequence delivered."""
    ack_floor: Annotated[int, gauge("consumer_ack_floor", "All messages up to this sequence are acknowledged")]
    waiting_pulls: int
    """Open pulls."""
    other_pulls: int
    """Open pulls of other replicas."""
    other_unacked: int
    """Unacknowledged messages that other replicas hold."""
    stream_max_age: Annotated[float | None, gauge("stream_max_age_seconds", "Age at which the stream removes messages")]


def _consumer(capture: Capture, history: History) -> ConsumerFacts:
    source, consumer = capture.source, capture.source.state
    pulls = sorted(sample.other_pulls for sample in list(history.samples)[-_FEW_SAMPLES:]) or [source.looked.pulls]
    return ConsumerFacts(
        asked=consumer.asked.astimezone(UTC),
        ahead=consumer.ahead,
        lag=capture.marks.observer.lag(consumer).total_seconds(),
        pending=consumer.pending,
        unacked=consumer.unacked,
        max_ack_pending=consumer.max_ack_pending if consumer.max_ack_pending < 1 << 62 else None,
        redelivered=consumer.redelivered,
        delivered=consumer.delivered,
        ack_floor=consumer.ack_floor,
        waiting_pulls=consumer.waiting_pulls,
        other_pulls=pulls[(len(pulls) - 1) // 2],
        other_unacked=source.looked.unacked,
        stream_max_age=source.consumer.stream_max_age or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFacts:
    """Messages and objects since the start."""

    received: Annotated[int, counter("messages_fetched", "Messages received from the server")]
    redelivered: Annotated[int, counter("messages_redelivered", "Messages received that were delivered before")]
    stored: Annotated[int, counter("messages_stored", "Messages stored, including those in quarantine")]
    acked: Annotated[int, counter("messages_acked", "Messages acknowledged")]
    unacked: Annotated[int, gauge("unacked_messages", "Unacknowledged messages held by this process")]
    quarantined: Annotated[int, counter("messages_quarantined", "Messages quarantined")]
    quarantined_by_stage: Annotated[
        Counts, counter("messages_quarantined_by_stage", "Messages quarantined", "stage", ("decode", "key", "time"))
    ]
    rescued: Annotated[int, counter("messages_rescued", "Rows with values that did not fit their inferred columns")]
    erased: Annotated[int, counter("messages_erased", "Messages acknowledged and not stored, because they were erased")]
    stray_frames: Annotated[int, counter("stray_frames", "Received frames that are not messages of the consumer")]
    reconnects: Annotated[int, counter("reconnects", "Reconnects to NATS")]
    stream_losses: Annotated[
        Counts, counter("stream_losses", "Times that the stream lost messages", "kind", ("rewind", "recreated"))
    ]
    sealed_by: Annotated[Counts, counter("blocks_sealed", "Blocks sealed", "reason", SEALED_BY)]
    stored_objects: Annotated[int, counter("stored_objects", "Objects stored")]
    stored_rows: Annotated[int, counter("stored_rows", "Rows stored")]
    stored_bytes: Annotated[int, counter("stored_bytes", "Bytes stored")]
    last_stored: Annotated[datetime | None, gauge("last_store_timestamp_seconds", "Time of the last successful upload")]
    store_seconds: Annotated[Durations, histogram("store_seconds", "Object upload duration in seconds")]
    store_errors: int
    store_errors_by_kind: Annotated[
        Counts, counter("store_errors", "Failed object uploads", "kind", ("temporary", "permanent"))
    ]
    store_retries: Annotated[int, counter("store_retries", "Object upload retries")]
    unconfirmed_acks: Annotated[int, counter("acks_unconfirmed", "Unconfirmed ack attempts")]
    on_stored_failures: Annotated[
        Counts, counter("on_stored_failures", "Stored objects not announced", "receiver", ("subject", "call"))
    ]


def _flow(capture: Capture) -> FlowFacts:
    archiver, stats, storing = capture.archiver, capture.stats, capture.archiver.uploads.storing
    return FlowFacts(
        received=capture.source.fetched,
        redelivered=stats.redelivered,
        stored=stats.stored_messages,
        acked=stats.acked,
        unacked=capture.source.unacked,
        quarantined=stats.quarantine.messages,
        quarantined_by_stage=dict(stats.quarantine.stages),
        rescued=stats.rescued.messages,
        erased=archiver.encoding.left_out,
        stray_frames=stats.strays,
        reconnects=capture.source.reconnects,
        stream_losses=dict(capture.marks.stream.losses),
        sealed_by=dict(archiver.sealed_by),
        stored_objects=stats.stored_blocks,
        stored_rows=stats.stored_rows,
        stored_bytes=stats.stored_bytes,
        last_stored=None if storing.last_success is None else words.utc(storing.last_success),
        store_seconds=Durations(storing.seconds.buckets(), storing.seconds.total),
        store_errors=storing.errors.total(),
        store_errors_by_kind=dict(storing.errors),
        store_retries=storing.retries,
        unconfirmed_acks=stats.unconfirmed_acks,
        on_stored_failures=dict(capture.announcer.failures),
    )


def counts(capture: Capture) -> dict[str, Any]:
    """Return a capture's counts since its start, for the log."""
    archiver = capture.archiver
    return capture.stats.fields() | {
        "erased": archiver.encoding.left_out,
        "sealed_by": dict(archiver.sealed_by),
        "on_stored_failures": capture.announcer.failures.total(),
        "stream_losses": capture.marks.stream.losses.total(),
        "store_errors": archiver.uploads.storing.errors.total(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Bytes of messages that are not stored."""

    memory: Annotated[int, gauge("buffered_bytes", "Bytes held of messages not stored yet")]
    memory_open: int
    """Bytes in open blocks."""
    memory_limit: Annotated[int, gauge("buffered_bytes_limit", "limits.memory")]
    in_flight: Annotated[int, gauge("in_flight_bytes", "Bytes in flight: what open pulls may still deliver")]
    in_flight_limit: Annotated[int, gauge("in_flight_bytes_limit", "Limit of in_flight_bytes; lower after a loss")]
    spool: Annotated[int, gauge("spool_bytes", "Bytes of files in the spool")]
    spool_limit: Annotated[int, gauge("spool_bytes_limit", "limits.spool.size; 0 without a spool")]
    spool_failures: Annotated[int, counter("spool_failures", "Failures to write to the spool")]


def _memory(capture: Capture) -> MemoryFacts:
    spooling, pulls = capture.archiver.spooling, capture.source.pulls
    return MemoryFacts(
        memory=capture.ledger.held,
        memory_open=capture.ledger["open"],
        memory_limit=capture.config.limits.memory,
        in_flight=capture.ledger["asked"],
        in_flight_limit=pulls.limits.limit,
        spool=spooling.spool.bytes if spooling else 0,
        spool_limit=spooling.spool.size if spooling else 0,
        spool_failures=spooling.failures if spooling else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBlock:
    """An open block."""

    key: str | None
    """The messages' key; None without one."""
    bundle: str
    """The bundle's name; "" without bundles."""
    quarantine: bool
    bucket: datetime
    """Start of the bucket."""
    age: float
    """Age in seconds."""
    messages: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """The open blocks."""

    open_blocks: Annotated[int, gauge("open_blocks", "Open blocks")]
    open_blocks_limit: int
    open_rows: Annotated[int, gauge("open_block_rows", "Rows in open blocks")]
    open_bytes: Annotated[int, gauge("open_block_bytes", "Bytes in open blocks")]
    oldest_age: Annotated[float, gauge("oldest_open_block_seconds", "Age of the oldest open block; 0 without one")]
    blocks_waiting: Annotated[int, gauge("blocks_waiting", "Sealed blocks waiting to be stored")]
    oldest: Sequence[OpenBlock]
    """The oldest ones, up to `MAX_BLOCKS`; all if they are few."""
    largest: Sequence[OpenBlock]
    """The largest ones, up to `MAX_BLOCKS`."""


def _blocks(capture: Capture) -> BlockFacts:
    blocks, now = capture.archiver.blocks, asyncio.get_running_loop().time()
    few = blocks.open <= 2 * MAX_BLOCKS
    return BlockFacts(
        open_blocks=blocks.open,
        open_blocks_limit=capture.config.limits.open_blocks,
        open_rows=blocks.rows,
        open_bytes=blocks.bytes,
        oldest_age=blocks.oldest_age(now),
        blocks_waiting=capture.archiver.waiting.amount[0],
        oldest=[_open_block(block, now) for block in blocks.oldest(blocks.open if few else MAX_BLOCKS)],
        largest=[_open_block(block, now) for block in blocks.largest(MAX_BLOCKS)],
    )


def _open_block(block: Block, now: float) -> OpenBlock:
    return OpenBlock(
        key=block.id.key,
        bundle=block.id.bundle,
        quarantine=block.id.quarantine,
        bucket=words.utc(block.id.bucket),
        age=now - block.opened,
        messages=block.messages,
        rows=block.rows,
        bytes=block.bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """The watermark; None until there is one."""

    watermark: Annotated[
        datetime | None,
        gauge("watermark_timestamp_seconds", "Every message that the consumer selects until then is stored"),
    ]
    watermark_seq: int | None
    has_watermark: bool
    """Whether this capture keeps a watermark."""


def _watermark(capture: Capture) -> WatermarkFacts:
    mark = capture.marks.watermark
    return WatermarkFacts(
        watermark=mark.time if mark and mark.time > NEVER else None,
        watermark_seq=mark.seq if mark else None,
        has_watermark=capture.marks.notes is not None,
    )


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFacts:
    """A capture at one moment. Sizes are in bytes, durations in seconds, times in UTC; counts since the start."""

    process: ProcessFacts
    health: Health
    consumer_state: ConsumerFacts | None
    """None until the capture has found its consumer."""
    flow: FlowFacts
    memory: MemoryFacts
    blocks: BlockFacts
    watermark: WatermarkFacts
    stream: str
    consumer: str
    role: Role
    """The replica's role: it shares the consumer, is the active one, or waits to take over."""
    active: Annotated[bool, gauge("active", "1 when this replica receives; 0 on standby in source.mode ordered")]
    started: datetime
    """When the process started."""
    state: State
    ready: Annotated[bool, gauge("ready", "1 when connected, consuming, decoding and storing")]
    since: datetime
    """Time of the last change of readiness."""
    notices: Sequence[Notice]
    """Current problems and warnings, the worst first."""
    past: Sequence[PastFailure]
    """Failures that have ended."""
    max_age: Annotated[float, gauge("block_max_age_seconds", "block.max_age: lag up to this is normal")]
    objects: Sequence[RecentObject]
    """The last stored objects."""
    quarantine: Sequence[QuarantineReason]
    """The last reasons of the quarantine."""
    settings: Mapping[str, str]
    """Settings by name."""
    samples: Sequence[HistorySample]
    """The last quarter of an hour, oldest first."""

    @property
    def headline(self) -> tuple[str, str]:
        """The state in a few words, and since when."""
        failing = [notice for notice in self.notices if notice.level == "failing"]
        warnings = sum(notice.level == "warning" for notice in self.notices)
        since = self.since
        if failing:
            what, since = _FAILING.get(failing[0].check, "Not ready"), failing[0].since or since
        elif self.state in ("starting", "draining", "ended"):
            what = self.state.capitalize()
        else:
            what = "Ready" if warnings else "Standing by" if self.role == "standby" else "Healthy"
        rest = f", with {'a warning' if warnings == 1 else f'{warnings} warnings'}" if what == "Ready" else ""
        now = self.process.time
        return what, f"for {words.age((now - since).total_seconds())}, since {words.clock(since, now)} UTC{rest}"

    @property
    def rate(self) -> float:
        """Messages received per second, in the last sample; 0 without one."""
        return self.samples[-1].received / self.samples[-1].seconds if self.samples else 0.0

    @property
    def late(self) -> bool:
        """Whether a message has waited for longer than a block is open."""
        return self.consumer_state is not None and self.consumer_state.lag > self.max_age

    def series(self) -> dict[str, list[float]]:
        """Return the samples by measure; `received` and `stored` are messages per second."""
        samples = self.samples
        return {
            "received": [round(sample.received / sample.seconds, 2) for sample in samples],
            "stored": [round(sample.stored / sample.seconds, 2) for sample in samples],
            "lag": [round(sample.lag, 2) for sample in samples],
            "pending": [sample.pending for sample in samples],
            "unacked": [sample.unacked for sample in samples],
            "memory": [sample.memory for sample in samples],
        }

    def fields(self) -> dict[str, Any]:
        """Return all facts by name, without groups; times are `datetime`."""
        values = {**asdict(self), "summary": " ".join(self.headline)}
        for group in ("process", "health", "flow", "memory", "blocks", "watermark"):
            values |= values.pop(group)
        return values | {"samples": {"time": [words.utc(sample.time) for sample in self.samples], **self.series()}}


def gather(history: History, process: ProcessFacts, before: CaptureFacts | None = None) -> CaptureFacts:
    """Return the facts of a capture; `before` are its previous ones. Call it once a second, in the capture's event
    loop."""
    capture, health = history.capture, history.observe()
    source, ended = capture.config.source, capture.ended is not None
    what_to_know = sorted(notices(capture, history, health), key=lambda notice: LEVELS.index(notice.level))
    return CaptureFacts(
        process=process,
        health=health,
        consumer_state=_consumer(capture, history) if capture.opened else None,
        flow=_flow(capture),
        memory=_memory(capture),
        blocks=_blocks(capture),
        watermark=_watermark(capture),
        stream=source.stream,
        consumer=source.consumer,
        role=capture.acks.role,
        active=capture.opened and not ended and capture.acks.active,
        started=history.started,
        state=_state(capture, what_to_know),
        ready=health.ready,
        since=history.since,
        notices=what_to_know,
        past=tuple(history.past),
        max_age=capture.config.block.max_age,
        objects=tuple(capture.stats.objects),
        quarantine=capture.stats.quarantine.reasons,
        settings=_settings(capture.config) if before is None else before.settings,
        samples=tuple(history.samples),
    )


def unknown(last: CaptureFacts, reason: str) -> CaptureFacts:
    """Return the last facts of a capture, marked not ready because of an internal error."""
    text = f"its state is not known since {words.moment(last.process.time)} UTC: {reason}"
    action = "It may well capture; figures are from then. Report the log's traceback, and restart the process."
    return replace(
        last,
        health=replace(last.health, trouble={"monitoring": text}, expected=(), stuck=""),
        ready=False,
        state="failing",
        notices=[Notice(level="failing", check="monitoring", text=sentence(text), action=action)],
    )


def _state(capture: Capture, present: Sequence[Notice]) -> State:
    levels = {notice.level for notice in present}
    if "failing" in levels:
        return "failing"
    if capture.ended is not None:
        return "ended"
    if not capture.opened:
        return "starting"
    if capture.draining:
        return "draining"
    return "attention" if "warning" in levels else "healthy"


def _settings(config: Config) -> Mapping[str, str]:
    """Return the most important settings, as written in a configuration."""
    source, block, store, limits = config.source, config.block, config.store, config.limits
    settings = {
        "nats.servers": ", ".join(config.nats.servers),
        "source.filter_subjects": ", ".join(source.filter_subjects) or "all",
        "source.ack_wait": format_duration(source.ack_wait),
        "source.max_ack_pending": f"{source.max_ack_pending:,}",
        "decode.format": config.decode.format,
        "key": config.key or '""',
        "block.bundles": f"{block.bundles:,}" if block.bundles else "",
        "block.interval": format_duration(block.interval),
        "block.max_age": format_duration(block.max_age),
        "block.max_bytes": format_size(block.max_bytes),
        "block.max_messages": f"{block.max_messages:,}",
        "block.time": block.time,
        "block.format": f"{block.format}, {block.compression}",
        "store.url": store.url,
        "store.concurrency": str(store.concurrency),
        "limits.memory": format_size(limits.memory),
        "limits.open_blocks": f"{limits.open_blocks:,}",
        "limits.spool": f"{format_size(limits.spool.size)} at {limits.spool.path}" if limits.spool else "",
        "drain_timeout": format_duration(config.drain_timeout),
    }
    return {name: without_credentials(value) for name, value in settings.items() if value}


def status_json(captures: Iterable[CaptureFacts]) -> bytes:
    """Return the facts of the captures of this process as JSON."""
    return json.dumps({"captures": [facts.fields() for facts in captures]}, default=format_time).encode() + b"\n"


def capture_metrics(captures: Mapping[str, CaptureFacts], failed: int | None = None) -> Metrics:
    """Return the metrics of captures by name. With `failed`, the number of failed ones, samples are labeled by
    capture."""
    metrics = Metrics()
    if failed is not None:
        metrics.add(gauge("captures_failed", "Captures of this process that failed or could not start"), failed)
    for name, facts in captures.items():
        metrics.labels = {} if failed is None else {"capture": name, "stream": facts.stream}
        about = {"version": facts.process.version, "stream": facts.stream, "consumer": facts.consumer}
        metrics.add(gauge("info", "Version, stream and consumer of this process; always 1"), 1, about)
        metrics.add_all(facts, facts.health, facts.flow, facts.memory, facts.blocks, facts.watermark)
        if facts.consumer_state is not None:
            metrics.add_all(facts.consumer_state)
    return metrics


# ---------------------------------------------------------------------- maintenance


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table's state after the last pass."""

    name: str
    """Namespace and name."""
    snapshot: int | None
    """The current snapshot's id; None if there is none."""
    files: int
    """Number of its objects."""
    waiting: int
    """Objects of complete buckets that it cannot include yet."""
    renamed: int
    """Columns with their type in the name, because another column has the plain name."""
    complete_to: float | None
    """It has every message of buckets that ended up to this time, in seconds since the epoch; None if it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceState:
    """The passes over one capture's archive. Times are in seconds since the epoch, sizes in bytes."""

    stream: str
    """The stream's name."""
    started: float | None = None
    """Start of the running pass; None without one."""
    ended: float | None = None
    """End of the last successful pass; None before the first one."""
    seconds: Annotated[float, gauge("maintain_pass_seconds", "How long the last pass took")] = 0.0
    passes: Annotated[int, counter("maintain_passes", "Passes that have ended")] = 0
    failures: Annotated[int, counter("maintain_failures", "Passes that have ended with a failure")] = 0
    failure: str = ""
    """Failure of the last pass; "" without one."""
    backlog: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number and bytes of the objects to merge in this pass, of the messages and of the quarantine."""
    objects_before: Annotated[int, gauge("maintain_objects_before", "Objects that the last pass found")] = 0
    objects_after: Annotated[int, gauge("maintain_objects_after", "Objects that it left")] = 0
    bytes_after: Annotated[int, gauge("maintain_bytes_after", "Their bytes")] = 0
    waiting: Annotated[int, gauge("maintain_waiting_objects", "Replaced objects that a later pass removes")] = 0
    removed: Annotated[int, counter("maintain_removed_objects", "Replaced objects that were removed")] = 0
    expired: Annotated[int, counter("maintain_expired_objects", "Objects removed because they have expired")] = 0
    tables: tuple[TableState, ...] = ()
    """Tables of the messages and of the quarantine."""

    @property
    def backlog_objects(self) -> int:
        return sum(objects for objects, _ in self.backlog.values())

    @property
    def backlog_bytes(self) -> int:
        return sum(size for _, size in self.backlog.values())


def maintenance_metrics(states: Mapping[str, MaintenanceState]) -> Metrics:
    """Return the metrics of archives, by the name of their capture."""
    metrics = Metrics()
    for name, state in states.items():
        metrics.labels = {"capture": name, "stream": state.stream}
        metrics.add_all(state)
        metrics.add(gauge("maintain_failing", "1 if something failed in the last pass"), bool(state.failure))
        text = "When the last pass without a failure ended; seconds since the epoch, 0 before the first one"
        metrics.add(gauge("maintain_last_pass_timestamp_seconds", text), state.ended or 0)
        metrics.add(gauge("maintain_backlog_objects", "Objects that are still to be merged"), state.backlog_objects)
        metrics.add(gauge("maintain_backlog_bytes", "Their bytes"), state.backlog_bytes)
        if tables := state.tables:
            text = "End of the complete time slices in the table, in seconds since the epoch; 0 before the first commit"
            metrics.add(gauge("maintain_table_complete_to_timestamp_seconds", text), tables[0].complete_to or 0)
            metrics.add(gauge("maintain_table_files", "Objects in the tables"), sum(table.files for table in tables))
            text = "Objects that the tables cannot have yet"
            metrics.add(gauge("maintain_table_waiting_objects", text), sum(table.waiting for table in tables))
            text = "Columns whose names in the tables say their type"
            metrics.add(gauge("maintain_table_renamed_columns", text), sum(table.renamed for table in tables))
    return metrics
