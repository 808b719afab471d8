"""Run schedules of commands on the simulated store: `python -m tests.simulation --schedules 100000 --seed 1`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice

from tests.simulation.actors import simulated
from tests.simulation.schedules import FailedError, at_random, every, run, units

Part = tuple[Counter[str], list[str]]
"""How many schedules, by what, and what failed."""
_RANDOM = 0.1
"""The share of random schedules, which take longer."""


def part(count: int, seed: int, processes: int, number: int) -> Part:
    """The schedules of one of several processes."""
    done: Counter[str] = Counter()
    failed = []
    with simulated():
        for unit in _units(seed, processes, number):
            before = done.total()
            if before >= count * (1 - _RANDOM):
                break
            try:
                for _ in islice(every(*unit), count - before):
                    done["+".join(unit[1])] += 1
            except FailedError as error:
                failed.append(str(error))
        for step in range(number, 1 << 62, processes):
            if done.total() >= count:
                break
            try:
                run(at_random(seed + step))
            except FailedError as error:
                failed.append(str(error))
            done["at random"] += 1
    return done, failed


def _units(seed: int, processes: int, number: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
    return islice(units(seed), number, None, processes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1, help="which pairs come first, and the random schedules")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    begin, processes = time.monotonic(), options.processes
    work = partial(part, -(-options.schedules // processes), options.seed, processes)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = pool.map(work, range(processes))
    done = sum((counts for counts, _ in parts), Counter[str]())
    failed = [story for _, stories in parts for story in stories]
    for name, count in sorted(done.items()):
        print(f"{count:>9,}  {name}")
    print(*failed, sep="\n\n")
    seconds = time.monotonic() - begin
    print(
        f"{done.total():,} schedules ({done['at random']:,} at random, the others of {len(done) - 1} sets of actors) "
        f"in {seconds:.0f} s, {done.total() / seconds:,.0f} a second; {len(failed)} failed; seed {options.seed}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
