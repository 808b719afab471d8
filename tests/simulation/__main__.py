"""Run schedules of commands on the simulated store: `python -m tests.simulation --schedules 100000 --seed 1`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial
from itertools import islice

from tests.simulation.actors import simulated
from tests.simulation.schedules import schedules

Part = tuple[Counter[str], list[tuple[str, int, str]]]
"""How many schedules of each set of actors; and which failed: the actors, the number of the schedule, and its story."""


def part(number: int, count: int, seed: int, processes: int, first: bool) -> Part:
    """The schedules of one of several processes, or up to the first one that fails."""
    done: Counter[str] = Counter()
    failed = []
    with simulated():
        for world in islice(schedules(seed, number, processes), count):
            actors = _named(world.schedule.actors)
            done[actors] += 1
            if world.story:
                failed.append((actors, done.total(), world.story))
                if first:
                    break
    return done, failed


def _named(actors: tuple[str, ...]) -> str:
    return " + ".join(actors) if len(actors) < 3 else "three and more"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1, help="which come first, and the random schedules")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--first", action="store_true", help="end at the first one that fails")
    options = parser.parse_args()
    begin, processes = time.monotonic(), options.processes
    count = -(-options.schedules // processes)
    work = partial(part, count=count, seed=options.seed, processes=processes, first=options.first)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = pool.map(work, range(processes))
    done = sum((counts for counts, _ in parts), Counter[str]())
    failed = [failure for _, failures in parts for failure in failures]
    failures = Counter(actors for actors, _, _ in failed)
    print("| actors | explored | failed |", "|---|---:|---:|", sep="\n")
    for actors, explored in sorted(done.items()):
        print(f"| {actors} | {explored:,} | {failures[actors]:,} |")
    for _, number, story in failed:
        print(f"\nschedule {number:,}: {story}")
    total, seconds = done.total(), time.monotonic() - begin
    print(f"\n{total:,} schedules in {seconds:.0f} s, {total / seconds:,.0f} a second; ", end="")
    print(f"{len(failed)} failed; seed {options.seed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
