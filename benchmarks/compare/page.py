"""What `--publish` writes between the marks of docs/benchmarks.md and of the README."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.compare import claims
from benchmarks.compare.orders import Scenario
from benchmarks.compare.results import MIB, Results, cpu, limit_of, rate, server_cpu, stored
from benchmarks.compare.runners import ORDERED

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- comparison: `make bench ARGS=--publish` writes this -->", "<!-- end of the comparison -->"
NAMES = {
    "limit": "a bare socket that only pulls and acknowledges",
    "jetcapture-raw": "jetcapture, raw",
    "jetcapture-json": "jetcapture, JSON to five columns, raw payload kept",
    "jetcapture-columns": "jetcapture, JSON to five columns",
    "jet-capture": "jet-capture (Go), CSV",
    "bento": "Bento, Parquet",
    "tenzir": "Tenzir, Parquet",
    "nats-py": "a loop of nats-py and pyarrow, Parquet",
}
"""The rows of the README."""


def check() -> None:
    """Raise SystemExit unless both files have the marks."""
    for path in (PAGE, README):
        text = path.read_text()
        if not 0 <= text.find(BEGIN) < text.find(END):
            raise SystemExit(f"{path.name} has no lines {BEGIN!r} and {END!r}")


def publish(outcome: Results, head: str) -> None:
    """Write the tables."""
    for path, part in ((PAGE, page(outcome, head)), (README, readme(outcome, head))):
        path.write_text(replaced(path.read_text(), part))


def replaced(text: str, part: str) -> str:
    """Return the text with `part` between its marks."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{part}\n{END}{after}"


def page(outcome: Results, head: str) -> str:
    """Return the part of docs/benchmarks.md."""
    parts = [f"{head}\n", "![The first table as a chart](../benchmarks/results/comparison.svg)\n"]
    plain = [other for other in outcome.scenarios if other == Scenario(size=other.size, messages=other.messages)]
    parts += [f"**{scenario}:**\n\n{sizes(outcome, scenario)}" for scenario in plain]
    for scenario in plain[:1]:
        parts += [f"### Both modes\n\n{modes(outcome, scenario)}", f"### Formats\n\n{formats(outcome, scenario)}"]
    parts.append(f"### Goals\n\n{goals(claims.claims(outcome))}")
    return "\n".join(parts)


def readme(outcome: Results, head: str) -> str:
    """Return the README's table, fastest first below the limit."""
    date = head.split(",")[0]
    scenario = outcome.scenarios[0]
    names = sorted(
        (name for name in outcome.runners(scenario) if name in NAMES),
        key=lambda name: (name != "limit", -outcome.median(scenario, name, rate(scenario))),
    )
    lines = [f"{date}, {scenario}:", "", "| | messages/s | CPU s per million | stored MB |", "|---|---|---|---|"]
    for name in names:
        size = outcome.median(scenario, name, stored) / 1e6
        cells = [
            NAMES[name],
            f"{outcome.median(scenario, name, rate(scenario)):,.0f}",
            f"{outcome.median(scenario, name, cpu(scenario)):.2f}",
            f"{size:,.1f}" if size else "",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def sizes(outcome: Results, scenario: Scenario) -> str:
    """Return the table of one size of messages."""
    heads = ("messages/s", "range", "of the limit", "CPU s per million", "peak MiB", "stored MB", "objects")
    lines = [_row(["", *heads]), "|" + "---|" * (1 + len(heads))]
    for name in outcome.runners(scenario):
        if name in ORDERED:
            continue
        rates = outcome.all(scenario, name, rate(scenario))
        objects = outcome.median(scenario, name, lambda run: run.stored.objects)
        cells = [
            name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            _ratio(outcome.ratio((scenario, name), (scenario, "limit"), rate)),
            f"{outcome.median(scenario, name, cpu(scenario)):.2f}",
            f"{outcome.median(scenario, name, lambda run: run.peak) / MIB:,.0f}",
            f"{outcome.median(scenario, name, stored) / 1e6:,.1f}" if objects else "",
            f"{objects:,.0f}" if objects else "",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def modes(outcome: Results, scenario: Scenario) -> str:
    """Return the table of shared and ordered mode."""
    heads = ("messages/s", "of its own limit", "CPU s per million", "server CPU s per million")
    lines = [_row(["", *heads]), "|" + "---|" * (1 + len(heads))]
    for name in outcome.runners(scenario):
        if name not in ORDERED and f"{name}-ordered" not in ORDERED:
            continue
        cells = [
            name,
            f"{outcome.median(scenario, name, rate(scenario)):,.0f}",
            _ratio(outcome.ratio((scenario, name), (scenario, limit_of(name)), rate)),
            f"{outcome.median(scenario, name, cpu(scenario)):.2f}",
            f"{outcome.median(scenario, name, server_cpu(scenario)):.2f}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def formats(outcome: Results, base: Scenario) -> str:
    """Return the table of formats, against JSON."""
    json = (base, "jetcapture-json")
    lines = [_row(["", "messages/s", "of JSON", "CPU s per million"]), "|---|---|---|---|"]
    for scenario, name in [json, *(case for case in outcome.runs if case[0].format != "json")]:
        cells = [
            scenario.format,
            f"{outcome.median(scenario, name, rate(scenario)):,.0f}",
            _ratio(outcome.ratio((scenario, name), json, rate)),
            f"{outcome.median(scenario, name, cpu(scenario)):.2f}",
        ]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def goals(shown: list[claims.Claim]) -> str:
    """Return how many goals are met, and the table of the others."""
    missed = [claim for claim in shown if not claim.holds]
    text = f"{len(shown) - len(missed)} of {len(shown)} goals are met"
    return f"{text}. Not met are:\n\n{claims.table(missed)}" if missed else f"{text}.\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
