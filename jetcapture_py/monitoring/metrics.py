"""The metrics of a capture, for Prometheus; the one module that knows its client library.

Each scrape reads counters and state that the pipeline keeps anyway. No metric has a label for a key, a subject or an
object: their number is unbounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jetcapture_py.archive.watermark import NEVER
from jetcapture_py.capture.stats import Histogram
from jetcapture_py.monitoring.health import health

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState
    from jetcapture_py.monitoring.facts import MaintenanceState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMMON_STAGES = ("decode", "key", "time")
"""Stages that are counted from the start, so that their rates are 0 before the first failure."""
SEALED_BY = ("age", "bytes", "messages", "pressure", "drain", "caught_up")


class _Metrics(Collector):
    """Metrics. Collect them in the captures' event loop."""

    def text(self) -> bytes:
        """Return all metrics, and those of the process, in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class Metrics(_Metrics):
    """The metrics of one capture."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        source = self._state.config.source
        about = {"version": version("jetcapture"), "stream": source.stream, "consumer": source.consumer}
        info = GaugeMetricFamily(
            "jetcapture_info", "Version, stream and consumer of this process; always 1", labels=list(about)
        )
        info.add_metric(list(about.values()), 1)
        yield info
        yield from self._counters()
        yield from self._storing()
        yield from self._now()
        if self._state.opened:
            yield from self._consumer()

    def _counters(self) -> Iterator[Metric]:
        stats, source = self._state.stats, self._state.source
        yield _counter("messages_fetched", "Messages received from the server", source.fetched)
        yield _counter("messages_redelivered", "Messages received that had been delivered before", stats.redelivered)
        yield _counter("messages_stored", "Messages stored, including those in quarantine", stats.stored_messages)
        yield _counter("messages_acked", "Messages acknowledged after storing", stats.acked)
        yield _counter("messages_quarantined", "Messages quarantined", stats.quarantined)
        failed = stats.quarantine.stages
        stages = {stage: failed[stage] for stage in (*COMMON_STAGES, *failed)}
        yield _counters("messages_quarantined_by_stage", "Messages quarantined, by what failed", "stage", stages)
        text = "Messages delivered again after they were erased: acknowledged and not stored"
        yield _counter("messages_erased", text, stats.erased)
        yield _counter("stray_frames", "Received frames that are not messages of the consumer", stats.strays)
        sealed = {reason: stats.sealed_by[reason] for reason in (*SEALED_BY, *stats.sealed_by)}
        yield _counters("blocks_sealed", "Blocks sealed, by reason", "reason", sealed)
        yield _counter("stored_objects", "Objects stored", stats.stored_blocks)
        yield _counter("stored_rows", "Rows stored", stats.stored_rows)
        yield _counter("stored_bytes", "Bytes stored", stats.stored_bytes)
        yield _counter("acks_unconfirmed", "Unconfirmed ack attempts", stats.unconfirmed_acks)
        failures = {kind: stats.on_stored_failures[kind] for kind in ("subject", "call")}
        yield _counters("on_stored_failures", "Stored objects not announced, by receiver", "receiver", failures)
        losses = {kind: stats.stream_losses[kind] for kind in ("rewind", "recreated")}
        yield _counters("stream_losses", "Times that the stream lost messages or was created again", "kind", losses)
        spooling = self._state.spooling
        yield _counter("spool_failures", "Failures to write to the spool", spooling.failures if spooling else 0)
        yield _counter("reconnects", "Reconnects to NATS", source.reconnects)

    def _storing(self) -> Iterator[Metric]:
        storing = self._state.stats.storing
        errors = {kind: storing.errors[kind] for kind in ("temporary", "permanent")}
        yield _counters("store_errors", "Failed object uploads", "kind", errors)
        yield _counter("store_retries", "Object upload retries", storing.retries)
        name, bounds = "jetcapture_store_seconds", [str(bound) for bound in (*Histogram.BOUNDS, math.inf)]
        bounds[-1] = "+Inf"
        buckets = list(zip(bounds, storing.seconds.cumulative(), strict=True))
        family = HistogramMetricFamily(name, "Object upload duration in seconds")
        family.add_metric([], buckets, storing.seconds.total)
        yield family
        if storing.last_success is not None:
            yield _gauge(
                "last_store_timestamp_seconds",
                "Time of the last successful upload, seconds since the epoch",
                storing.last_success,
            )

    def _now(self) -> Iterator[Metric]:
        capture, blocks = self._state, self._state.blocks
        now = health(capture)
        yield _gauge("ready", "1 when connected, consuming, decoding and storing", now.ready)
        yield _gauge("connected", "1 when connected to NATS", now.connected)
        yield _gauge("consuming", "1 when the server answers pulls", now.consuming)
        active = capture.opened and capture.ended is None and capture.source.active
        yield _gauge("active", "1 when this replica receives; 0 on standby in source.mode ordered", active)
        yield _gauge("storing", "1 unless the store is failing or hanging", now.storing)
        yield _gauge("open_blocks", "Open blocks", blocks.open)
        yield _gauge("open_block_rows", "Rows in open blocks", blocks.rows)
        yield _gauge("open_block_bytes", "Bytes in open blocks", blocks.bytes)
        age = blocks.oldest_age(asyncio.get_running_loop().time())
        yield _gauge("oldest_open_block_seconds", "Age of the oldest open block; 0 without open blocks", age)
        seconds = capture.decoding_for()
        yield _gauge("decoding_seconds", "Age of the batch in the decoder and key function; 0 without a batch", seconds)
        yield _gauge("blocks_waiting", "Sealed blocks waiting to be stored", capture.sealed.qsize())
        held = capture.memory + capture.source.waiting_bytes
        yield _gauge("buffered_bytes", "Bytes held of messages not stored yet", held)
        yield _gauge("buffered_bytes_limit", "limits.memory", capture.config.limits.memory)
        spooling = capture.spooling
        yield _gauge("spool_bytes", "Bytes of files in the spool", spooling.spool.bytes if spooling else 0)
        size = spooling.spool.size if spooling else 0
        yield _gauge("spool_bytes_limit", "limits.spool.size; 0 without a spool", size)
        yield _gauge(
            "in_flight_bytes", "Bytes in flight: what open pulls may still deliver", capture.source.pulls.in_flight
        )
        limit = "Limit of in_flight_bytes, except for a single larger message; lower for a while after a loss"
        yield _gauge("in_flight_bytes_limit", limit, capture.source.pulls.limits.limit)
        yield _gauge("unacked_messages", "Unacknowledged messages held by this process", capture.unacked)

    def _consumer(self) -> Iterator[Metric]:
        capture, state = self._state, self._state.source.state
        yield _gauge("consumer_pending_messages", "Messages not yet delivered to any replica", state.pending)
        yield _gauge(
            "consumer_unacked_messages", "Messages delivered to any replica and not yet acknowledged", state.unacked
        )
        yield _gauge("consumer_max_ack_pending", "Limit of consumer_unacked_messages", state.max_ack_pending)
        yield _gauge("consumer_ack_floor", "All messages up to this sequence are acknowledged", state.ack_floor)
        lag = capture.observer.lag(state).total_seconds()
        yield _gauge("lag_seconds", "Age of the oldest message not stored; use the maximum over replicas", lag)
        yield _gauge("block_max_age_seconds", "block.max_age: lag up to this is normal", capture.config.block.max_age)
        if max_age := capture.source.stream_max_age:
            yield _gauge("stream_max_age_seconds", "Age at which the stream removes messages", max_age)
        if capture.watermark is not None and capture.watermark.time > NEVER:
            time = capture.watermark.time.timestamp()
            text = "Every message that the consumer selects, up to this time, is stored; seconds since the epoch"
            yield _gauge("watermark_timestamp_seconds", text, time)


class JoinedMetrics(_Metrics):
    """The metrics of the process and its captures, by name; `failed` of them failed.

    Every sample of a capture has the labels `capture` and `stream`; each metric is one family.
    """

    def __init__(self, states: Mapping[str, CaptureState], failed: int) -> None:
        self._states, self._failed = states, failed

    def collect(self) -> Iterator[Metric]:
        yield _gauge("captures_failed", "Captures of this process that failed or could not start", self._failed)
        families: dict[str, Metric] = {}
        for name, state in sorted(self._states.items()):
            about = {"capture": name, "stream": state.config.source.stream}
            for metric in Metrics(state).collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [sample._replace(labels={**about, **sample.labels}) for sample in metric.samples]
        yield from families.values()


class MaintenanceMetrics(_Metrics):
    """The metrics of a process of `jetcapture maintain`: of each archive, by the name of its capture."""

    def __init__(self, states: Mapping[str, MaintenanceState]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, state in self._states.items():
            about = {"capture": name, "stream": state.stream}
            for metric in _maintenance(state):
                family = families.setdefault(metric.name, metric)
                samples = [sample._replace(labels=about) for sample in metric.samples]
                family.samples = samples if family is metric else family.samples + samples
        yield from families.values()


def _maintenance(state: MaintenanceState) -> Iterator[Metric]:
    yield _counter("maintain_passes", "Passes that have ended", state.passes)
    yield _counter("maintain_failures", "Passes that have ended with a failure", state.failures)
    yield _gauge("maintain_failing", "1 if something failed in the last pass", bool(state.failure))
    text = "When the last pass without a failure ended; seconds since the epoch, 0 before the first one"
    yield _gauge("maintain_last_pass_timestamp_seconds", text, state.ended or 0)
    yield _gauge("maintain_pass_seconds", "How long the last pass took", state.seconds)
    yield _gauge("maintain_backlog_objects", "Objects that the running pass has still to merge", state.backlog_objects)
    yield _gauge("maintain_backlog_bytes", "Their bytes", state.backlog_bytes)
    yield _gauge("maintain_objects_before", "Objects that the last pass found", state.objects_before)
    yield _gauge("maintain_objects_after", "Objects that it left", state.objects_after)
    yield _gauge("maintain_bytes_after", "Their bytes", state.bytes_after)
    yield _gauge("maintain_waiting_objects", "Replaced objects that a later pass removes", state.waiting)
    yield _counter("maintain_removed_objects", "Replaced objects that were removed", state.removed)
    yield _counter("maintain_expired_objects", "Objects that were removed because they have expired", state.expired)
    if state.tables:
        text = "Up to when complete buckets are in the table; seconds since the epoch, 0 before the first commit"
        yield _gauge("maintain_table_complete_to_timestamp_seconds", text, state.tables[0].complete_to or 0)
        yield _gauge("maintain_table_files", "Objects in the tables", sum(table.files for table in state.tables))
        waiting = sum(table.waiting for table in state.tables)
        yield _gauge("maintain_table_waiting_objects", "Objects that the tables cannot have yet", waiting)
        renamed = sum(table.renamed for table in state.tables)
        yield _gauge("maintain_table_renamed_columns", "Columns whose names in the tables say their type", renamed)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"jetcapture_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"jetcapture_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"jetcapture_{name}", text, value=value)
