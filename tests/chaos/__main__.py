"""The long run: `make chaos MINUTES=30 SEED=…`. Prints what it does, what came of it, and how to repeat it.

Ends with 0 when nothing was lost and nothing was read twice, with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chaos.replica import ChaosError
from tests.chaos.trial import Outcome, Storm, at_once, every, together, trial
from tests.chaos.world import Shape, World

KILLS, SERVER_KILLS = 560, 56
"""In a run of 30 minutes, a tenth more than what it is to show."""
LONG = 30 * 60.0
LEADER_EVERY = 10.0
LEADER_KILLS = 10
STARVED = 4 * Shape.ack_wait + Shape.max_age + 3
"""Seconds within which every message must be stored while one of three replicas stands still for three times ack_wait:
it may be sent there again and again until that goes on, must then come back, and fill a block."""

SERVER = "max_payload: 8MB\nwrite_deadline: '2s'"
"""It drops whoever does not read for 2 s, and not for 10."""

RATES = {
    "daemon.kill": KILLS / 1.29 / LONG,
    "daemon.stop": 0.02,
    "daemon.stop_twice": 0.01,
    "daemon.freeze": 0.01,
    "daemon.freeze_long": 0.004,
    "server.kill": SERVER_KILLS / LONG,
    "server.stop": 0.006,
    "server.freeze": 0.006,
    "network.cut": 0.01,
    "network.delay": 0.01,
    "network.throttle": 0.01,
    "network.half_close": 0.01,
    "network.freeze": 0.01,
    "store.unwritable": 0.02,
    "store.full": 0.02,
    **dict.fromkeys(("store.500", "store.503", "store.403", "store.hang", "store.cut", "store.slow"), 0.006),
    "store.lost_answer": 0.01,
    "clock.jump": 0.02,
    "consumer.change": 0.02,
    "consumer.pause": 0.005,
    "consumer.delete": 2 / LONG,
    "stream.delete_messages": 0.01,
    "stream.purge": 2 / LONG,
    "stream.recreate": 1 / LONG,
}
"""Faults a second. Those at the end have everything delivered again, or make the check excuse messages: few."""
REFUSED_IN_ORDER = ("stream.delete_messages", "stream.purge")
"""The stream of an ordered capture does not allow them."""


def main() -> int:
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    again = f"python -m tests.chaos {' '.join(sys.argv[1:])}" + ("" if options.seed is not None else f" --seed {seed}")
    print(f"seed {seed}; again with: {again}", flush=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request to S3
    directory = Path(tempfile.mkdtemp(prefix="jetcapture-chaos-", dir=options.dir))
    shape, storm, limit = _plan(options)
    try:
        outcome = asyncio.run(_bounded(directory, shape, seed, storm, limit))
    except (ChaosError, TimeoutError) as error:
        reason = str(error) or f"the run did not end within {limit:.0f} s; the logs lie in {directory}"
        print(f"FAILED: {reason}\nagain with: {again}", flush=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted; everything is stopped, the logs lie in {directory}", flush=True)
        return 1
    if options.stall and outcome.verdict.slowest > STARVED:
        outcome.problems.append(f"a message was starved: stored after {outcome.verdict.slowest:.1f} s")
    if options.store == "local" and not options.no_spark:
        outcome.problems.extend(_read_with_spark(directory, outcome))
    _report(outcome)
    if outcome.problems:
        print(f"FAILED; the logs and the archive lie in {directory}\nagain with: {again}", flush=True)
        return 1
    shutil.rmtree(directory)
    print(f"PASSED; again with: {again}", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long faults are injected")
    parser.add_argument("--seed", type=int, help="what the faults and messages follow from; default: random")
    parser.add_argument("--kills", type=int, help="no more faults after so many kills of daemons")
    parser.add_argument("--cluster", action="store_true", help="three servers, R3, the leader killed every 10 s")
    parser.add_argument(
        "--step-downs", type=float, metavar="SECONDS", help="with --cluster: leaders step down this often"
    )
    parser.add_argument("--messages", type=int, help="publish so many; with --cluster 300,000")
    parser.add_argument(
        "--stall", action="store_true", help="only SIGSTOP one of three replicas for three times ack_wait"
    )
    parser.add_argument("--ordered", action="store_true", help="one replica receives, the others stand by")
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--rate", type=float, default=2000, help="messages a second")
    parser.add_argument(
        "--largest",
        type=int,
        default=7_900_000,
        help="bytes of the largest messages, at most 8 MB; not with --cluster",
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--bundles", type=int, default=0, help="block.bundles of the daemons")
    parser.add_argument("--no-spark", action="store_true", help="do not have Spark read the archive at the end")
    parser.add_argument("--dir", type=Path, help="where servers and archive lie; default: where temporary files do")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> tuple[Shape, Storm, float]:
    """What runs, what befalls it, and within how many seconds it must be over."""
    seconds: float = options.minutes * 60
    sections = {"block": {"bundles": options.bundles}}
    if options.cluster:
        messages = options.messages or 300_000
        rate = min(options.rate, messages / (LEADER_EVERY * (LEADER_KILLS + 1)))
        shape = Shape(
            replicas=options.replicas,
            servers=3,
            store=options.store,
            rate=rate,
            messages=messages,
            ordered=options.ordered,
            sections=sections,
        )
        limit = 6 * messages / rate + 300

        def through(world: World) -> bool:
            return world.publishing.done() and world.counts["leader kills"] >= LEADER_KILLS

        storms = [every(LEADER_EVERY, "server.kill_leader", through, limit)]
        if options.step_downs:
            storms.append(every(options.step_downs, "server.step_down", through, limit))
        return shape, together(storms), limit + 900
    shape = Shape(
        replicas=options.replicas,
        store=options.store,
        rate=options.rate,
        messages=options.messages,
        server_config=SERVER,
        largest=options.largest,
        ordered=options.ordered,
        sections=sections,
    )
    if options.stall:

        def often(world: World) -> bool:
            return world.counts["daemon SIGSTOPs"] >= round(seconds / (4 * shape.ack_wait))

        return shape, every(4 * shape.ack_wait, "daemon.stall", often, 2 * seconds), 2 * seconds + 900

    def enough(world: World) -> bool:
        return bool(options.kills is not None and world.counts["daemon kills"] >= options.kills)

    refused = REFUSED_IN_ORDER if options.ordered else ()
    rates = {name: rate for name, rate in RATES.items() if name not in refused}
    return shape, at_once(rates, seconds, enough), 2 * seconds + 900


async def _bounded(directory: Path, shape: Shape, seed: int, storm: Storm, limit: float) -> Outcome:
    def say(line: str) -> None:
        print(line, flush=True)

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with asyncio.timeout(limit):
        return await trial(directory, shape, seed, storm, say)


def _read_with_spark(directory: Path, outcome: Outcome) -> list[str]:
    """Count what `read_archive` returns: each message once."""
    from spark_jobs.archive import read_archive
    from spark_jobs.job import session
    from tests.support.running import STREAM

    root = str((directory / "archive").resolve())
    spark = session("chaos")
    problems = []
    try:
        expected = outcome.verdict.messages
        frames = [read_archive(spark, root, STREAM, quarantine=quarantine) for quarantine in (False, True)]
        rows = sum(frame.count() for frame in frames)
        distinct = sum(frame.select("_nats_seq", "_nats_timestamp").distinct().count() for frame in frames)
        print(f"Spark reads {rows:,} rows, {distinct:,} of them distinct", flush=True)
        if not rows == distinct == expected:
            problems.append(f"Spark reads {rows} rows, {distinct} of them distinct; there are {expected} messages")
    finally:
        spark.stop()
    return problems


def _report(outcome: Outcome) -> None:
    verdict = outcome.verdict
    print(f"\n{outcome.seconds:.0f} s, {outcome.published:,} messages acknowledged by the server")
    _table("done", outcome.counts)
    _table("daemons ended with", outcome.codes)
    _table("because", outcome.ends)
    print(
        f"archive: {verdict.objects:,} objects, {verdict.rows:,} rows, {verdict.copies:,} of them second copies; "
        f"{verdict.excused:,} messages were gone from the stream before they were captured; "
        f"slowest {verdict.slowest:.1f} s; {verdict.watermarks} watermarks"
    )
    counts = ", ".join(f"{key} {count}" for key, count in outcome.verified.get("counts", {}).items())
    print(f"jetcapture verify: {outcome.verified.get('verdict')}, {counts}")
    for finding in outcome.verified.get("findings", []):
        print(f"  {finding['kind']}: {finding['summary']}")
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    if not outcome.problems:
        print("0 lost, 0 read twice")


def _table(title: str, counts: Mapping[Any, int]) -> None:
    print(f"{title}: {', '.join(f'{count} {what}' for what, count in sorted(counts.items(), key=str))}")


if __name__ == "__main__":
    sys.exit(main())
