"""Facts about one capture, as a value that the status page, /status.json and the terminal show.

Texts from messages, objects' locations and errors are without credentials, but not escaped: whoever shows them does
that.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from jetcapture_py.archive.watermark import NEVER
from jetcapture_py.capture.stats import QuarantineReason, RecentObject
from jetcapture_py.config.units import format_duration, format_size, format_time
from jetcapture_py.monitoring.health import health
from jetcapture_py.monitoring.notices import LEVELS, Notice, notices
from jetcapture_py.pages import words
from jetcapture_py.text import without_credentials

if TYPE_CHECKING:
    from jetcapture_py.capture.blocks import Block
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.config.model import Config
    from jetcapture_py.monitoring.history import History, PastFailure

MAX_BLOCKS = 6
"""Open blocks that are listed of the oldest, and of the largest, unless there are no more than both together."""
_COUNTS = ("pending", "unacked", "redelivered", "delivered", "ack_floor", "waiting_pulls")
"""What a consumer's facts and its state have alike."""
_FEW_SAMPLES = 12
"""Samples, the last minute, by which other replicas are noticed: a single one may be of two moments."""

_FAILING = {
    "running": "Failed",
    "connected": "Not connected",
    "consuming": "Not consuming",
    "decoding": "Not decoding",
    "storing": "Not storing",
}

Role = Literal["shared", "active", "standby"]
State = Literal["starting", "healthy", "attention", "failing", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The process at one moment, for the header of a page."""

    version: str
    time: datetime
    """The moment."""
    host: str
    pid: int


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
class ConsumerFacts:
    """The consumer's state on the server, over all replicas."""

    asked: datetime
    """The server's time of the answer."""
    ahead: float
    """Seconds that this machine's clock was ahead of the server's then."""
    lag: float
    """Age in seconds of the oldest message that is not stored."""
    pending: int
    """Messages not delivered yet."""
    unacked: int
    """Messages delivered and not acknowledged."""
    max_ack_pending: int | None
    redelivered: int
    """Unacknowledged messages that were delivered more than once."""
    delivered: int
    """Last sequence delivered."""
    ack_floor: int
    """Sequence up to which everything is acknowledged."""
    waiting_pulls: int
    """Open pulls."""
    other_pulls: int
    """Open pulls of other replicas."""
    other_unacked: int
    """Unacknowledged messages that other replicas hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFacts:
    """Messages and objects since the start."""

    received: int
    stored: int
    acked: int
    unacked: int
    """Messages that are here now and not acknowledged."""
    redelivered: int
    quarantined: int
    stored_objects: int
    stored_bytes: int
    store_errors: int
    sealed_by: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Bytes of messages that are not stored."""

    used: int
    open: int
    """Of them in open blocks."""
    limit: int
    spool: int
    spool_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """The open blocks."""

    open: int
    limit: int
    rows: int
    bytes: int
    waiting: int
    """Sealed blocks that wait to be stored."""
    oldest: Sequence[OpenBlock]
    """The oldest ones, `MAX_BLOCKS` of them; all if they are few."""
    largest: Sequence[OpenBlock]
    """The largest ones, up to `MAX_BLOCKS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """The watermark; None until there is one."""

    time: datetime | None
    seq: int | None
    kept: bool
    """Whether this capture keeps one."""


_JSON_NAMES = {
    "process": {},
    "flow": {},
    "memory": {"used": "memory", "open": "memory_open", "limit": "memory_limit"},
    "blocks": {
        "open": "open_blocks",
        "limit": "open_blocks_limit",
        "rows": "open_rows",
        "bytes": "open_bytes",
        "waiting": "blocks_waiting",
    },
    "watermark": {"time": "watermark", "seq": "watermark_seq", "kept": "has_watermark"},
}
"""The groups whose facts stand beside one another in /status.json, and what is named otherwise there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFacts:
    """A capture at one moment. Sizes are in bytes, durations in seconds, times in UTC; counts since the start."""

    process: ProcessFacts
    stream: str
    consumer: str
    role: Role
    """Whether the replica shares the consumer with others, or is the one that receives, or waits to take over."""
    started: datetime
    """When the process started."""
    state: State
    ready: bool
    since: datetime
    """When the capture became ready, or stopped being ready."""
    notices: Sequence[Notice]
    """Current problems and warnings, the worst first."""
    past: Sequence[PastFailure]
    """Failures that have ended."""
    max_age: float
    """The setting `block.max_age`."""
    consumer_state: ConsumerFacts | None
    """None until the capture has found its consumer."""
    flow: FlowFacts
    memory: MemoryFacts
    blocks: BlockFacts
    watermark: WatermarkFacts
    objects: Sequence[RecentObject]
    """The objects stored last."""
    quarantine: Sequence[QuarantineReason]
    """The last reasons of the quarantine."""
    settings: Sequence[tuple[str, str]]
    """Names and values of settings."""
    samples: Mapping[str, Sequence[Any]]
    """The last quarter of an hour by name, oldest first: what a `HistorySample` has, messages per second."""

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

    def fields(self) -> dict[str, Any]:
        """Return all facts by name, times as `datetime`."""
        values = {**asdict(self), "summary": " ".join(self.headline), "settings": dict(self.settings)}
        for group, names in _JSON_NAMES.items():
            values |= {names.get(name, name): value for name, value in values.pop(group).items()}
        return values


def gather(state: CaptureState, history: History) -> CaptureFacts:
    """Return the facts of a capture. Call it in the capture's event loop."""
    history.observe()
    config, present = state.config, health(state)
    what_to_know = tuple(sorted(notices(state, history, present), key=lambda notice: LEVELS.index(notice.level)))
    return CaptureFacts(
        process=this_process(),
        stream=config.source.stream,
        consumer=config.source.consumer,
        role=_role(state),
        started=history.started,
        state=_state(state, what_to_know),
        ready=present.ready,
        since=history.since,
        notices=what_to_know,
        past=tuple(history.past),
        max_age=config.block.max_age,
        consumer_state=_consumer(state, history) if state.opened else None,
        flow=_flow(state),
        memory=_memory(state),
        blocks=_blocks(state),
        watermark=_watermark(state),
        objects=tuple(state.stats.objects),
        quarantine=state.stats.quarantine.reasons,
        settings=_settings(config),
        samples=_samples(history),
    )


def this_process() -> ProcessFacts:
    """Return the facts of this process."""
    return ProcessFacts(version("jetcapture"), datetime.now(UTC), socket.gethostname(), os.getpid())


def _flow(state: CaptureState) -> FlowFacts:
    stats = state.stats
    return FlowFacts(
        received=state.source.fetched,
        stored=stats.stored_messages,
        acked=stats.acked,
        unacked=state.unacked,
        redelivered=stats.redelivered,
        quarantined=stats.quarantined,
        stored_objects=stats.stored_blocks,
        stored_bytes=stats.stored_bytes,
        store_errors=stats.storing.errors.total(),
        sealed_by=dict(stats.sealed_by),
    )


def _memory(state: CaptureState) -> MemoryFacts:
    spool = state.spooling.spool if state.spooling is not None else None
    return MemoryFacts(
        used=state.memory + state.source.waiting_bytes,
        open=state.blocks.resident,
        limit=state.config.limits.memory,
        spool=spool.bytes if spool else 0,
        spool_limit=spool.size if spool else 0,
    )


def _blocks(state: CaptureState) -> BlockFacts:
    blocks, now = state.blocks, asyncio.get_running_loop().time()
    few = blocks.open <= 2 * MAX_BLOCKS
    return BlockFacts(
        open=blocks.open,
        limit=state.config.limits.open_blocks,
        rows=blocks.rows,
        bytes=blocks.bytes,
        waiting=state.sealed.qsize(),
        oldest=[_open_block(block, now) for block in blocks.oldest(blocks.open if few else MAX_BLOCKS)],
        largest=[_open_block(block, now) for block in blocks.largest(MAX_BLOCKS)],
    )


def _watermark(state: CaptureState) -> WatermarkFacts:
    known = state.watermark
    return WatermarkFacts(
        time=known.time if known and known.time > NEVER else None,
        seq=known.seq if known else None,
        kept=state.notes is not None,
    )


def status_json(captures: Sequence[CaptureFacts]) -> bytes:
    """Return the facts of the captures of this process as JSON."""
    return json.dumps({"captures": [facts.fields() for facts in captures]}, default=format_time).encode() + b"\n"


def _state(state: CaptureState, present: Sequence[Notice]) -> State:
    levels = {notice.level for notice in present}
    if "failing" in levels:
        return "failing"
    if state.ended is not None:
        return "ended"
    if not state.opened:
        return "starting"
    if state.draining:
        return "draining"
    return "attention" if "warning" in levels else "healthy"


def _role(state: CaptureState) -> Role:
    if state.config.source.mode == "shared":
        return "shared"
    return "active" if state.source.active else "standby"


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


def _consumer(state: CaptureState, history: History) -> ConsumerFacts:
    consumer, last = state.source.state, list(history.samples)[-_FEW_SAMPLES:]
    pulls = sorted(sample.other_pulls for sample in last) or [state.source.other_pulls]
    return ConsumerFacts(
        asked=consumer.asked.astimezone(UTC),
        ahead=consumer.ahead,
        lag=state.observer.lag(consumer).total_seconds(),
        max_ack_pending=consumer.max_ack_pending if consumer.max_ack_pending < 1 << 62 else None,
        other_pulls=pulls[(len(pulls) - 1) // 2],
        other_unacked=state.source.other_unacked,
        **{name: getattr(consumer, name) for name in _COUNTS},
    )


def _samples(history: History) -> Mapping[str, Sequence[Any]]:
    samples = tuple(history.samples)
    return {
        "time": [words.utc(sample.time) for sample in samples],
        "received": [round(sample.received / sample.seconds, 2) for sample in samples],
        "stored": [round(sample.stored / sample.seconds, 2) for sample in samples],
        "lag": [round(sample.lag, 2) for sample in samples],
        **{name: [getattr(sample, name) for sample in samples] for name in ("pending", "unacked", "memory")},
    }


def _settings(config: Config) -> Sequence[tuple[str, str]]:
    """Return the settings that matter most, as they are written in a configuration."""
    source, block, store, limits = config.source, config.block, config.store, config.limits
    settings = [
        ("nats.servers", ", ".join(config.nats.servers)),
        ("source.filter_subjects", ", ".join(source.filter_subjects) or "all"),
        ("source.ack_wait", format_duration(source.ack_wait)),
        ("source.max_ack_pending", f"{source.max_ack_pending:,}"),
        ("decode.format", config.decode.format),
        ("key", config.key or '""'),
        ("block.interval", format_duration(block.interval)),
        ("block.max_age", format_duration(block.max_age)),
        ("block.max_bytes", format_size(block.max_bytes)),
        ("block.max_messages", f"{block.max_messages:,}"),
        ("block.time", block.time),
        ("block.format", f"{block.format}, {block.compression}"),
        ("store.url", store.url),
        ("store.concurrency", str(store.concurrency)),
        ("limits.memory", format_size(limits.memory)),
        ("limits.open_blocks", f"{limits.open_blocks:,}"),
        ("drain_timeout", format_duration(config.drain_timeout)),
    ]
    if block.bundles:
        settings.insert(6, ("block.bundles", f"{block.bundles:,}"))
    if limits.spool is not None:
        settings.insert(-1, ("limits.spool", f"{format_size(limits.spool.size)} at {limits.spool.path}"))
    return tuple((name, without_credentials(value)) for name, value in settings)


# ---------------------------------------------------------------------- maintenance


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table after the last pass."""

    name: str
    """Namespace and name."""
    snapshot: int | None
    """The current snapshot's id; None if there is none."""
    files: int
    """Objects that it has."""
    waiting: int
    """Objects of complete buckets that it cannot have yet."""
    renamed: int
    """Columns whose names say their type, because a column of that name has another."""
    complete_to: float | None
    """Up to when buckets that ended are in it, in seconds since the epoch; None if none are."""


@dataclass(slots=True, kw_only=True)
class MaintenanceState:
    """The passes over one capture's archive. Times are in seconds since the epoch, sizes in bytes."""

    stream: str
    """The stream's name."""
    started: float | None = None
    """When the pass that is running began; None while none is."""
    ended: float | None = None
    """When the last pass without a failure ended; None before the first one."""
    seconds: float = 0.0
    """How long the last pass took."""
    passes: int = 0
    """Passes that have ended."""
    failures: int = 0
    """Passes that have ended with a failure."""
    failure: str = ""
    """What failed in the last pass; "" if nothing did."""
    backlog: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Objects to merge in this pass, and their bytes, of the messages and of the quarantine."""
    objects_before: int = 0
    """Objects that the last pass found."""
    objects_after: int = 0
    """Objects that it left."""
    bytes_after: int = 0
    """Their bytes."""
    waiting: int = 0
    """Replaced objects that a later pass removes."""
    removed: int = 0
    """Replaced objects that all passes have removed."""
    expired: int = 0
    """Objects that all passes have removed because their buckets have expired."""
    tables: tuple[TableState, ...] = ()
    """Tables of the messages and of the quarantine."""

    @property
    def backlog_objects(self) -> int:
        """Objects that are still to be merged."""
        return sum(objects for objects, _ in self.backlog.values())

    @property
    def backlog_bytes(self) -> int:
        """Their bytes."""
        return sum(size for _, size in self.backlog.values())
