"""Facts about one capture, as a value that the status page, /status.json and the terminal show.

Texts from messages, objects' locations and errors are without credentials, but not escaped: whoever shows them does
that.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from jetcapture_py.capture.recent import QuarantineReason
from jetcapture_py.config.units import format_duration, format_size, format_time
from jetcapture_py.monitoring.health import health
from jetcapture_py.monitoring.notices import LEVELS, Notice, notices
from jetcapture_py.pages import words
from jetcapture_py.store import NoteStore
from jetcapture_py.text import without_credentials

if TYPE_CHECKING:
    from jetcapture_py.capture.blocks import Block
    from jetcapture_py.capture.recent import RecentObject
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.config.model import Config
    from jetcapture_py.monitoring.history import History

MAX_BLOCKS = 6
"""Open blocks that are listed of the oldest, and of the largest, unless there are no more than both together."""
_FEW_SAMPLES = 12
"""Samples, the last minute, by which other replicas are noticed: a single one may be of two moments."""

_FAILING = {
    "running": "Failed",
    "connected": "Not connected",
    "consuming": "Not consuming",
    "decoding": "Not decoding",
    "storing": "Not storing",
}

State = Literal["starting", "healthy", "attention", "failing", "draining", "ended"]


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
class LastObject:
    """An object that this process stored."""

    path: str
    """Path in the archive."""
    location: str
    """Location as the store knows it."""
    link: str | None
    """The location, if a browser can open it."""
    messages: int
    rows: int
    bytes: int
    sealed_by: str
    acknowledged: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """A failure that has ended."""

    began: datetime
    ended: datetime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The last quarter of an hour, oldest first."""

    time: Sequence[datetime] = ()
    received: Sequence[float] = ()
    """Messages per second that this process received."""
    stored: Sequence[float] = ()
    """Messages per second that this process stored."""
    lag: Sequence[float] = ()
    """Lag in seconds."""
    pending: Sequence[int] = ()
    """Messages not delivered yet to any replica."""
    unacked: Sequence[int] = ()
    """Messages delivered to any replica and not acknowledged."""
    memory: Sequence[int] = ()
    """Memory of this process's messages in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerFacts:
    """The consumer's state on the server, over all replicas."""

    asked: datetime
    """When the server was asked."""
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
class CaptureFacts:
    """A capture at one moment. Sizes are in bytes, durations in seconds, times in UTC; counts since the start."""

    version: str
    host: str
    pid: int
    stream: str
    consumer: str
    time: datetime
    """The moment."""
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
    consumer_state: ConsumerFacts | None
    """None until the capture has found its consumer."""
    max_age: float
    """The setting `block.max_age`."""
    received: int
    stored: int
    acked: int
    redelivered: int
    quarantined: int
    stored_objects: int
    stored_bytes: int
    store_errors: int
    sealed_by: dict[str, int]
    unacked: int
    memory: int
    memory_open: int
    memory_limit: int
    open_blocks: int
    open_blocks_limit: int
    open_rows: int
    open_bytes: int
    blocks_waiting: int
    spool: int
    spool_limit: int
    oldest: Sequence[OpenBlock]
    """The oldest open blocks, `MAX_BLOCKS` of them; all if they are few."""
    largest: Sequence[OpenBlock]
    """The largest open blocks, up to `MAX_BLOCKS`."""
    objects: Sequence[LastObject]
    """The objects stored last."""
    quarantine: Sequence[QuarantineReason]
    """The last reasons of the quarantine."""
    watermark: datetime | None
    """The watermark's time; None until there is one."""
    watermark_seq: int | None
    """The watermark's sequence; None until there is one."""
    has_watermark: bool
    """Whether this capture keeps a watermark."""
    settings: Sequence[tuple[str, str]]
    """Names and values of settings."""
    samples: Samples

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
            what = "Ready" if warnings else "Healthy"
        rest = f", with {'a warning' if warnings == 1 else f'{warnings} warnings'}" if what == "Ready" else ""
        duration = words.age((self.time - since).total_seconds())
        return what, f"for {duration}, since {words.clock(since, self.time)} UTC{rest}"

    def fields(self) -> dict[str, Any]:
        """Return all facts as JSON values."""
        found = _plain(asdict(self))
        found["summary"] = " ".join(self.headline)
        found["settings"] = dict(self.settings)
        return dict(found)


def gather(state: CaptureState, history: History) -> CaptureFacts:
    """Return the facts of a capture. Call it in the capture's event loop."""
    history.observe()
    now, loop = datetime.now(UTC), asyncio.get_running_loop().time()
    stats, blocks, config, found = state.stats, state.blocks, state.config, health(state)
    what_to_know = tuple(sorted(notices(state, history, found), key=lambda notice: LEVELS.index(notice.level)))
    spool = state.spooling.spool if state.spooling is not None else None
    few = blocks.open <= 2 * MAX_BLOCKS
    oldest = [_open_block(block, loop) for block in blocks.oldest(blocks.open if few else MAX_BLOCKS)]
    largest = [_open_block(block, loop) for block in blocks.largest(MAX_BLOCKS)]
    return CaptureFacts(
        version=version("jetcapture"),
        host=socket.gethostname(),
        pid=os.getpid(),
        stream=config.source.stream,
        consumer=config.source.consumer,
        time=now,
        started=words.utc(history.started),
        state=_state(state, what_to_know),
        ready=found.ready,
        since=words.utc(history.since),
        notices=what_to_know,
        past=[
            PastFailure(began=words.utc(each.began), ended=words.utc(each.ended), text=each.text)
            for each in history.past
        ],
        consumer_state=_consumer(state, history) if state.opened else None,
        max_age=config.block.max_age,
        received=state.source.fetched,
        stored=stats.stored_messages,
        acked=stats.acked,
        redelivered=stats.redelivered,
        quarantined=stats.quarantined,
        stored_objects=stats.stored_blocks,
        stored_bytes=stats.stored_bytes,
        store_errors=stats.storing.errors.total(),
        sealed_by=dict(stats.sealed_by),
        unacked=state.unacked,
        memory=state.memory + state.source.waiting_bytes,
        memory_open=blocks.resident,
        memory_limit=config.limits.memory,
        open_blocks=blocks.open,
        open_blocks_limit=config.limits.open_blocks,
        open_rows=blocks.rows,
        open_bytes=blocks.bytes,
        blocks_waiting=state.sealed.qsize(),
        spool=spool.bytes if spool else 0,
        spool_limit=spool.size if spool else 0,
        oldest=oldest,
        largest=largest,
        objects=[_last_object(each) for each in state.recent.objects],
        quarantine=state.recent.reasons,
        watermark=state.watermark.time if state.watermark else None,
        watermark_seq=state.watermark.seq if state.watermark else None,
        has_watermark=isinstance(state.store, NoteStore) and "{key}" not in config.store.url,
        settings=_settings(config),
        samples=_samples(history),
    )


def status_json(captures: Sequence[CaptureFacts]) -> bytes:
    """Return the facts of the captures of this process as JSON."""
    return json.dumps({"captures": [facts.fields() for facts in captures]}).encode() + b"\n"


def _state(state: CaptureState, found: Sequence[Notice]) -> State:
    levels = {notice.level for notice in found}
    if "failing" in levels:
        return "failing"
    if state.ended is not None:
        return "ended"
    if not state.opened:
        return "starting"
    if state.draining:
        return "draining"
    return "attention" if "warning" in levels else "healthy"


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


def _last_object(stored: RecentObject) -> LastObject:
    location = without_credentials(stored.location)
    can_be_opened = location == stored.location and location.startswith(("http://", "https://"))
    return LastObject(
        path=stored.path,
        location=location,
        link=location if can_be_opened else None,
        messages=stored.messages,
        rows=stored.rows,
        bytes=stored.bytes,
        sealed_by=stored.sealed_by,
        acknowledged=stored.acknowledged,
    )


def _consumer(state: CaptureState, history: History) -> ConsumerFacts:
    found = state.source.state
    last = list(history.samples)[-_FEW_SAMPLES:]
    pulls = sorted(sample.other_pulls for sample in last) or [state.source.other_pulls]
    return ConsumerFacts(
        asked=found.asked.astimezone(UTC),
        lag=state.observer.lag(found).total_seconds(),
        pending=found.pending,
        unacked=found.unacked,
        max_ack_pending=found.max_ack_pending if found.max_ack_pending < 1 << 62 else None,
        redelivered=found.redelivered,
        delivered=found.delivered,
        ack_floor=found.ack_floor,
        waiting_pulls=found.waiting_pulls,
        other_pulls=pulls[(len(pulls) - 1) // 2],
        other_unacked=state.source.other_unacked,
    )


def _samples(history: History) -> Samples:
    found = tuple(history.samples)
    return Samples(
        time=[words.utc(each.time) for each in found],
        received=[round(each.received / each.seconds, 2) for each in found],
        stored=[round(each.stored / each.seconds, 2) for each in found],
        lag=[round(each.lag, 2) for each in found],
        pending=[each.pending for each in found],
        unacked=[each.unacked for each in found],
        memory=[each.memory for each in found],
    )


def _settings(config: Config) -> Sequence[tuple[str, str]]:
    """Return the settings that matter most, as they are written in a configuration."""
    source, block, store, limits = config.source, config.block, config.store, config.limits
    found = [
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
        found.insert(6, ("block.bundles", f"{block.bundles:,}"))
    if limits.spool is not None:
        found.insert(-1, ("limits.spool", f"{format_size(limits.spool.size)} at {limits.spool.path}"))
    return tuple((name, without_credentials(value)) for name, value in found)


def _plain(value: Any) -> Any:
    """Return a value of nested dictionaries and sequences with times as text."""
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
