"""What the comparison makes of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.compare import claims, page
from benchmarks.compare.__main__ import standard
from benchmarks.compare.formats import FORMATS
from benchmarks.compare.measure import Measured
from benchmarks.compare.orders import Scenario
from benchmarks.compare.results import Results, rate
from benchmarks.compare.runners import runners
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


def test_the_page_and_the_readme_have_every_runner_of_the_standard_run() -> None:
    names = list(runners(None))
    outcome = Results(runs={case: {0: measured(1, size=1_000_000)} for case in standard(1000, names)})
    text = page.page(outcome, "2026-11-28, on 2 cores.")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert set(names) - {f"jetcapture-{name}" for name in FORMATS} <= set(rows)
    assert set(FORMATS) <= set(rows)
    assert "limit-ordered" not in text.split("### Both modes")[0]
    table = page.readme(outcome, "2026-11-28, on 2 cores.")
    assert table.startswith("2026-11-28, 1,000 messages of 250 B, 4 keys:")
    assert all(f"| {title} |" in table for title in page.NAMES.values())
    assert page.replaced(f"a\n{page.BEGIN}\nold\n{page.END}\nb", "new") == f"a\n{page.BEGIN}\n\nnew\n{page.END}\nb"
    page.check()
