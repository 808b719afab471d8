"""What the comparison must show, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.compare.orders import Scenario
from benchmarks.compare.results import Results, cpu, rate, stored

RAW, JSON, LIMIT, CSV, LOOP = "jetcapture-raw", "jetcapture-json", "limit", "jet-capture-csv", "nats-py"
BASE = Scenario()
LARGE = 10_000
MANY = 10_000
REPLICAS = 3


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A ratio and its bound; `least`: the ratio must be at least the bound, else at most. None: not measured."""

    what: str
    bound: float
    least: bool
    ratio: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it is so."""
        if self.ratio is None:
            return None
        return self.ratio >= self.bound if self.least else self.ratio <= self.bound


def claims(results: Results) -> list[Claim]:
    """All of them, for the scenarios of the standard run that were measured."""
    return [claim for claim in _claims(results) if claim.ratio is not None]


def _claims(results: Results) -> Iterator[Claim]:
    at = {
        (scenario.size, scenario.keys, scenario.replicas, scenario.store): scenario
        for scenario in results.scenarios
        if scenario.unacked == BASE.unacked and scenario.format == BASE.format and scenario.busy == BASE.busy
    }
    base = at.get((BASE.size, BASE.keys, 1, "local"), BASE)

    def least(what: str, ours: tuple[Scenario, str], theirs: tuple[Scenario, str], bound: float) -> Claim:
        return Claim(what=what, bound=bound, least=True, ratio=results.ratio(ours, theirs, rate))

    yield least("raw, rate, against the limit", (base, RAW), (base, LIMIT), 0.9)
    yield least("json, rate, against the limit", (base, JSON), (base, LIMIT), 0.8)
    yield least("json, rate, against jet-capture's CSV", (base, JSON), (base, CSV), 1.5)
    yield least("json, rate, against the plain nats-py loop", (base, JSON), (base, LOOP), 5)
    for name, bound in ((JSON, 1.0), (RAW, 0.6)):
        ratio = results.ratio((base, name), (base, CSV), cpu)
        yield Claim(what=f"{_short(name)}, CPU, against jet-capture's CSV", bound=bound, least=False, ratio=ratio)
    ratio = results.ratio((base, JSON), (base, CSV), lambda _: stored)
    yield Claim(what="json, bytes stored, against jet-capture's CSV", bound=0.15, least=False, ratio=ratio)
    for name, bound in (("msgpack", 1.0), ("csv", 0.8), ("avro", 0.5), ("protobuf", 0.5)):
        same = replace(base, format=name)
        yield least(f"{name}, rate, against json", (same, f"jetcapture-{name}"), (base, JSON), bound)
    large = at.get((LARGE, BASE.keys, 1, "local"))
    many = at.get((BASE.size, MANY, 1, "local"))
    shared = at.get((BASE.size, BASE.keys, REPLICAS, "local"))
    for scenario in results.scenarios:
        quiet = replace(scenario, busy=0)
        for name in (RAW, JSON) if scenario.busy else ():
            yield least(f"{_short(name)}, {scenario}, rate, against none", (scenario, name), (quiet, name), 0.4)
    for name in (RAW, JSON):
        if large is not None:
            yield least(f"{_short(name)}, 10 KB messages, MB/s, against the limit", (large, name), (large, LIMIT), 0.9)
        if many is not None:
            ratio = results.ratio((many, name), (base, name), cpu)
            what = f"{_short(name)}, CPU of a message, 10,000 keys against 4"
            yield Claim(what=what, bound=2, least=False, ratio=ratio)
        if shared is not None:
            yield least(f"{_short(name)}, rate, 3 replicas against 1", (shared, name), (base, name), 1)


def _short(name: str) -> str:
    return name.removeprefix("jetcapture-")


def table(found: list[Claim]) -> str:
    """The claims in Markdown."""
    lines = ["| | goal | is | |", "|---|---|---|---|"]
    for claim in found:
        bound = f"{'at least' if claim.least else 'at most'} {claim.bound:g} times"
        lines.append(f"| {claim.what} | {bound} | {claim.ratio:.2f} times | {'yes' if claim.holds else '**no**'} |")
    return "\n".join(lines) + "\n"
