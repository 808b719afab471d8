"""What the comparison makes of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.compare import claims
from benchmarks.compare.measure import Measured
from benchmarks.compare.orders import Scenario
from benchmarks.compare.results import Results, rate
from benchmarks.compare.storage import Stored

BASE = Scenario(messages=1000)
MANY = replace(BASE, keys=10_000)


def measured(seconds: float, cpu: float = 1.0, size: int = 0) -> Measured:
    """One run of 1,000 messages."""
    stored = Stored(objects=min(size, 1), bytes=size, rows=1000, different=1000)
    return Measured(seconds=seconds, cpu=cpu, cpu_before=0.1, peak=50 << 20, redelivered=0, stored=stored)


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians() -> None:
    ours = {0: measured(2), 1: measured(8), 2: measured(10)}
    found = Results(runs={(BASE, "a"): ours, (BASE, "limit"): {0: measured(1), 1: measured(2), 2: measured(9)}})
    assert found.median(BASE, "a", rate(BASE)) == 125
    assert found.ratio((BASE, "a"), (BASE, "limit"), rate) == pytest.approx(0.5)


def test_claims_hold_at_their_bound_and_not_beyond_it() -> None:
    runs = {
        (BASE, "limit"): {0: measured(9)},
        (BASE, "jetcapture-raw"): {0: measured(10, cpu=0.61)},
        (BASE, "jetcapture-json"): {0: measured(12, cpu=1.0, size=16)},
        (BASE, "jet-capture"): {0: measured(19, cpu=1.0, size=100)},
        (MANY, "jetcapture-json"): {0: measured(12, cpu=2.5)},
    }
    found = {claim.what: claim.holds for claim in claims.claims(Results(runs=runs))}
    assert found == {
        "raw, rate, against the limit": True,
        "json, rate, against the limit": False,
        "json, rate, against jet-capture": True,
        "json, CPU, against jet-capture": True,
        "raw, CPU, against jet-capture": False,
        "json, bytes stored, against jet-capture": False,
        "json, CPU of a message, 10,000 keys against 4": False,
    }
