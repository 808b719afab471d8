"""Metrics for Prometheus, from facts; the one module that knows its client library.

A field of facts is a metric if its type is annotated with `counter`, `gauge` or `histogram`. Keys, subjects and objects
are never labels, because their number is unbounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricName(NamedTuple):
    """A metric's type, name without the prefix, and help text."""

    type: str
    name: str
    text: str
    label: str = ""
    """The label of a metric whose values are a mapping."""
    always: Sequence[str] = ()
    """Label values that start at 0, so that a rate sees the first failure."""


def counter(name: str, text: str, label: str = "", always: Sequence[str] = ()) -> MetricName:
    """Name a counter; with `label`, one for each of its values."""
    return MetricName("counter", name, text, label, always)


def gauge(name: str, text: str) -> MetricName:
    """Name a gauge."""
    return MetricName("gauge", name, text)


def histogram(name: str, text: str) -> MetricName:
    """Name a histogram of seconds."""
    return MetricName("histogram", name, text)


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram's values."""

    buckets: Mapping[str, int]
    """Cumulative counts by upper bound in seconds; the last one is +Inf."""
    sum: float
    """Seconds."""


Value = Mapping[str, int] | Durations | datetime | float | None


@cache
def _metrics_of(facts: type) -> Mapping[str, MetricName]:
    """Return the metrics of a class of facts by field."""
    return {
        field: metric
        for field, hint in get_type_hints(facts, include_extras=True).items()
        for metric in getattr(hint, "__metadata__", ())
        if isinstance(metric, MetricName)
    }


class Metrics(Collector):
    """Metrics with their values. Each is one family, even with several captures."""

    def __init__(self) -> None:
        self.labels: Mapping[str, str] = {}
        """Labels of the next samples."""
        self._families: dict[str, Metric] = {}

    def add_all(self, *facts: Any) -> None:
        """Add the metrics of some facts."""
        for group in facts:
            for field, metric in _metrics_of(type(group)).items():  # type: ignore[arg-type]  # classes are hashable
                self.add(metric, getattr(group, field))

    def add(self, metric: MetricName, value: Value, more: Mapping[str, str] | None = None) -> None:
        """Add a metric with `more` labels; without a value it is left out."""
        if value is None:
            return
        name, labels = f"jetcapture_{metric.name}", {**self.labels, **(more or {})}
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Metric(name, metric.text, metric.type)
        name += "_total" if metric.type == "counter" else ""
        if isinstance(value, Durations):
            for bound, count in value.buckets.items():
                family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{name}_count", labels, value.buckets["+Inf"])
            family.add_sample(f"{name}_sum", labels, value.sum)
        elif isinstance(value, Mapping):
            for kind, count in {**dict.fromkeys(metric.always, 0), **value}.items():
                family.add_sample(name, {**labels, metric.label: kind}, count)
        else:
            family.add_sample(name, labels, value.timestamp() if isinstance(value, datetime) else value)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()

    def text(self) -> bytes:
        """Return all metrics, and those of the process, in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)
