"""Medians, ranges and ratios of the runs, as a table in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.compare.measure import Measured
from benchmarks.compare.orders import Scenario

Figure = Callable[[Measured], float]
MIB = 1 << 20
HEAD = (
    "messages/s",
    "range",
    "MB/s",
    "of the limit",
    "CPU s per million",
    "CPU s before",
    "server CPU s per million",
    "peak MiB",
    "stored MB",
    "objects",
)


@dataclass(kw_only=True)
class Results:
    """Runs by scenario, runner and round. `missing` are runners that are not available, `failed` runs; with reasons."""

    runs: dict[tuple[Scenario, str], dict[int, Measured]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[Scenario, str], str] = field(default_factory=dict)

    @property
    def scenarios(self) -> list[Scenario]:
        """Those with runs, in their order."""
        return list(dict.fromkeys(scenario for scenario, _ in self.runs))

    def runners(self, scenario: Scenario) -> list[str]:
        """Those with runs in `scenario`, in their order."""
        return [name for other, name in self.runs if other == scenario]

    def all(self, scenario: Scenario, name: str, figure: Figure) -> list[float]:
        """A figure of every round."""
        return [figure(measured) for measured in self.runs[scenario, name].values()]

    def median(self, scenario: Scenario, name: str, figure: Figure) -> float:
        """A figure's median over the rounds."""
        return statistics.median(self.all(scenario, name, figure))

    def ratio(
        self, one: tuple[Scenario, str], other: tuple[Scenario, str], figure: Callable[[Scenario], Figure]
    ) -> float | None:
        """The median of the rounds' ratios; None when they have no round in common."""
        ours, theirs = self.runs.get(one, {}), self.runs.get(other, {})
        both = [number for number in ours if number in theirs]
        above, below = figure(one[0]), figure(other[0])
        return statistics.median(above(ours[number]) / below(theirs[number]) for number in both) if both else None


def rate(scenario: Scenario) -> Figure:
    """Messages a second."""
    return lambda measured: scenario.messages / measured.seconds


def cpu(scenario: Scenario) -> Figure:
    """CPU seconds for a million messages."""
    return lambda measured: measured.cpu / scenario.messages * 1e6


def server_cpu(scenario: Scenario) -> Figure:
    """The server's CPU seconds for a million messages."""
    return lambda measured: measured.server_cpu / scenario.messages * 1e6


def limit_of(name: str) -> str:
    """Return what limits a runner: a consumer has a mode."""
    return "limit-ordered" if name.endswith("-ordered") else "limit"


def stored(measured: Measured) -> float:
    """Bytes stored."""
    return measured.stored.bytes


def table(results: Results, scenario: Scenario) -> str:
    """The runners of a scenario."""
    names = results.runners(scenario)
    lines = [
        f"| {' | '.join(('', *HEAD))} |",
        "|" + "---|" * (1 + len(HEAD)),
    ]
    for name in names:
        rates = results.all(scenario, name, rate(scenario))
        middle = statistics.median(rates)
        of_limit = results.ratio((scenario, name), (scenario, limit_of(name)), rate)
        objects = results.median(scenario, name, lambda measured: measured.stored.objects)
        cells = [
            name,
            f"{middle:,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            f"{middle * scenario.size / 1e6:,.1f}",
            "" if of_limit is None else f"{of_limit:.2f}",
            f"{results.median(scenario, name, cpu(scenario)):.2f}",
            f"{results.median(scenario, name, lambda measured: measured.cpu_before):.2f}",
            f"{results.median(scenario, name, server_cpu(scenario)):.2f}",
            f"{results.median(scenario, name, lambda measured: measured.peak) / MIB:,.0f}",
            f"{results.median(scenario, name, stored) / 1e6:,.1f}" if objects else "",
            f"{objects:,.0f}" if objects else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def remarks(results: Results) -> Iterable[str]:
    """Return what the tables lack: redeliveries, rows stored twice, failed runs, missing runners."""
    for (scenario, name), runs in results.runs.items():
        redelivered = sum(measured.redelivered for measured in runs.values())
        twice = sum(measured.stored.rows - measured.stored.different for measured in runs.values())
        if redelivered or twice:
            yield f"{name}, {scenario}: {redelivered:,} redelivered, {twice:,} stored more than once"
    for (scenario, name), reason in results.failed.items():
        yield f"{name}, {scenario}: failed: {reason}"
    for name, reason in results.missing.items():
        yield f"{name} did not take part: {reason}"
