"""The goals of the comparison, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.compare.orders import Scenario
from benchmarks.compare.results import Results, cpu, rate, stored

RAW, JSON, COLUMNS = "jetcapture-raw", "jetcapture-json", "jetcapture-columns"
LIMIT, CSV, LOOP = "limit", "jet-capture", "nats-py"
BASE = Scenario()
MEDIUM, LARGE = 1000, 10_000
MANY = 10_000
REPLICAS = 3


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A ratio and its bound: `least` or most. None: not measured."""

    what: str
    bound: float
    least: bool
    ratio: float | None

    @property
    def holds(self) -> bool | None:
        """Return whether the goal is met."""
        if self.ratio is None:
            return None
        return self.ratio >= self.bound if self.least else self.ratio <= self.bound


def claims(results: Results) -> list[Claim]:
    """Return the goals of the scenarios that were measured."""
    return [claim for claim in _claims(results) if claim.ratio is not None]


def _claims(results: Results) -> Iterator[Claim]:
    base = next((scenario for scenario in results.scenarios if _is_plain(scenario, BASE.size)), BASE)

    def least(what: str, ours: tuple[Scenario, str], theirs: tuple[Scenario, str], bound: float) -> Claim:
        return Claim(what=what, bound=bound, least=True, ratio=results.ratio(ours, theirs, rate))

    def most(what: str, ratio: float | None, bound: float) -> Claim:
        return Claim(what=what, bound=bound, least=False, ratio=ratio)

    yield least("raw, rate, against the limit", (base, RAW), (base, LIMIT), 0.9)
    yield least("json, rate, against the limit", (base, JSON), (base, LIMIT), 0.8)
    yield least("json, rate, against jet-capture", (base, JSON), (base, CSV), 1.5)
    yield least("json, rate, against the plain nats-py loop", (base, JSON), (base, LOOP), 5)
    for name, bound in ((JSON, 1.0), (RAW, 0.6)):
        ratio = results.ratio((base, name), (base, CSV), cpu)
        yield most(f"{_short(name)}, CPU, against jet-capture", ratio, bound)
    ratio = results.ratio((base, JSON), (base, CSV), lambda _: stored)
    yield most("json, bytes stored, against jet-capture", ratio, 0.15)
    for name, bound in (("msgpack", 1.0), ("csv", 0.8), ("avro", 0.5), ("protobuf", 0.5)):
        same = replace(base, format=name)
        yield least(f"{name}, rate, against json", (same, f"jetcapture-{name}"), (base, JSON), bound)
    for scenario in results.scenarios:
        if _is_plain(scenario, MEDIUM):
            yield least("raw, 1 KB, rate, against the limit", (scenario, RAW), (scenario, LIMIT), 0.85)
            yield least("json, 1 KB, rate, against the limit", (scenario, JSON), (scenario, LIMIT), 0.7)
        if _is_plain(scenario, LARGE):
            yield least("raw, 10 KB, rate, against the limit", (scenario, RAW), (scenario, LIMIT), 0.45)
            ours = scenario, COLUMNS
            yield least("columns, 10 KB, rate, against jet-capture", ours, (scenario, CSV), 1.5)
            loop = scenario, LOOP
            yield least("columns, 10 KB, rate, against the plain nats-py loop", ours, loop, 1.5)
            yield most("columns, 10 KB, CPU, against the plain nats-py loop", results.ratio(ours, loop, cpu), 0.9)
            ratio = results.ratio(ours, loop, lambda _: stored)
            yield most("columns, 10 KB, bytes stored, against the plain nats-py loop", ratio, 1.2)
        quiet = replace(scenario, busy=0)
        for name in (RAW, JSON) if scenario.busy else ():
            ours, alone = (scenario, name), (quiet, name)
            yield least(f"{_short(name)}, {scenario}, rate, against none", ours, alone, 0.4)
            theirs = results.ratio((scenario, CSV), (quiet, CSV), rate)
            ratio = results.ratio(ours, alone, rate)
            if ratio is not None and theirs is not None:
                what = f"{_short(name)}, {scenario}, that ratio, against jet-capture's"
                yield Claim(what=what, bound=1, least=True, ratio=ratio / theirs)
        for name in (RAW, JSON):
            if scenario == replace(base, keys=MANY, messages=scenario.messages, bundles=scenario.bundles):
                layout = f" in {scenario.bundles} bundles" if scenario.bundles else ""
                ratio = results.ratio((scenario, name), (base, name), cpu)
                yield most(f"{_short(name)}, CPU of a message, 10,000 keys{layout} against 4", ratio, 2)
            if scenario == replace(base, replicas=REPLICAS):
                yield least(f"{_short(name)}, rate, 3 replicas against 1", (scenario, name), (base, name), 0.95)


def _is_plain(scenario: Scenario, size: int) -> bool:
    """Return whether only size and number of messages differ from the default."""
    return scenario == replace(BASE, size=size, messages=scenario.messages)


def _short(name: str) -> str:
    return name.removeprefix("jetcapture-")


def table(found: list[Claim]) -> str:
    """Return the goals in Markdown."""
    lines = ["| | goal | is | |", "|---|---|---|---|"]
    for claim in found:
        bound = f"{'at least' if claim.least else 'at most'} {claim.bound:g} times"
        lines.append(f"| {claim.what} | {bound} | {claim.ratio:.2f} times | {'yes' if claim.holds else '**no**'} |")
    return "\n".join(lines) + "\n"
