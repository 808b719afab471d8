"""What the comparison makes of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.compare import claims, page, results
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


def test_a_round_that_only_one_of_them_has_does_not_count() -> None:
    found = Results(runs={(BASE, "a"): {0: measured(4), 1: measured(1)}, (BASE, "b"): {0: measured(1)}})
    assert found.ratio((BASE, "a"), (BASE, "b"), rate) == pytest.approx(0.25)
    assert found.ratio((BASE, "a"), (BASE, "c"), rate) is None


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


def test_a_busy_machine_many_keys_and_replicas_are_compared_with_the_scenario_without_them() -> None:
    large, bundled = replace(BASE, size=10_000, messages=500), replace(MANY, bundles=16, messages=500)
    runs = {
        (BASE, "jetcapture-json"): {0: measured(10)},
        (large, "limit"): {0: measured(4)},
        (large, "jetcapture-columns"): {0: measured(2, cpu=0.9, size=12)},
        (large, "jetcapture-json"): {0: measured(4)},
        (large, "jet-capture"): {0: measured(4)},
        (large, "nats-py"): {0: measured(2.9, cpu=1.0, size=10)},
        (replace(large, busy=2), "jetcapture-json"): {0: measured(10)},
        (replace(large, busy=2), "jet-capture"): {0: measured(9)},
        (bundled, "jetcapture-json"): {0: measured(5)},
        (replace(BASE, replicas=3), "jetcapture-json"): {0: measured(10.6)},
    }
    found = {claim.what: (round(claim.ratio or 0, 2), claim.holds) for claim in claims.claims(Results(runs=runs))}
    assert found == {
        "columns, 10 KB, rate, against jet-capture": (2, True),
        "columns, 10 KB, rate, against the plain nats-py loop": (1.45, False),
        "columns, 10 KB, CPU, against the plain nats-py loop": (0.9, True),
        "columns, 10 KB, bytes stored, against the plain nats-py loop": (1.2, True),
        "json, 500 messages of 10,000 B, 4 keys, 2 busy loops beside, rate, against none": (0.4, True),
        "json, 500 messages of 10,000 B, 4 keys, 2 busy loops beside, that ratio, against jet-capture's": (0.9, False),
        "json, CPU of a message, 10,000 keys in 16 bundles against 4": (2, True),
        "json, rate, 3 replicas against 1": (0.94, False),
    }


def test_the_standard_run_has_everything_that_is_claimed() -> None:
    names = ["limit", "jetcapture-raw", "jetcapture-json", "jetcapture-columns", "nats-py", "jet-capture"]
    runs = {case: {0: measured(1, size=1)} for case in standard(1000, names)}
    found = [claim.what for claim in claims.claims(Results(runs=runs))]
    for what in ("raw, 1 KB", "raw, 10 KB", "columns, 10 KB", "2 busy loops", "16 bundles", "3 replicas"):
        assert any(what in each for each in found)


def test_the_table_has_a_line_for_each_runner_and_remarks_tell_what_went_twice() -> None:
    twice = replace(measured(1), redelivered=3, stored=Stored(objects=1, bytes=10, rows=1005, different=1000))
    found = Results(
        runs={(BASE, "a"): {0: twice}},
        missing={"b": "Go is not on the PATH"},
        failed={(MANY, "a"): "999 of 1000 messages are stored"},
    )
    header, _, line = results.table(found, BASE).splitlines()
    assert header.count("|") == line.count("|")
    assert line.startswith("| a | 1,000 | 1,000 to 1,000 | 0.2 |  | 1000.00 |")
    assert list(results.remarks(found)) == [
        "a, 1,000 messages of 250 B, 4 keys: 3 redelivered, 5 stored more than once",
        "a, 1,000 messages of 250 B, 10,000 keys: failed: 999 of 1000 messages are stored",
        "b did not take part: Go is not on the PATH",
    ]


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


def test_the_page_and_the_readme_have_the_marks_between_which_the_tables_are() -> None:
    page.check()
