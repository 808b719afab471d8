"""A store that is away for minutes under a steady stream: what the daemon holds meanwhile, and how it catches up.

Runs the real command against an S3 server (versitygw, which must be on the PATH) that is killed, or with `--silent`
accepts connections and never answers, and checks that every message is stored once.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.others import row
from tests.support.outages import Plan, endure


def main() -> None:
    """Run once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=int, default=5000, help="messages per second")
    parser.add_argument("--size", type=int, default=200, help="payload bytes")
    parser.add_argument("--memory", default="128MiB", help="limits.memory")
    parser.add_argument("--max-ack-pending", type=int, default=50_000)
    parser.add_argument("--silent", action="store_true", help="the store accepts connections and never answers")
    chosen = parser.parse_args()
    plan = Plan(
        seconds=chosen.minutes * 60,
        rate=chosen.rate,
        size=chosen.size,
        memory=chosen.memory,
        max_ack_pending=chosen.max_ack_pending,
        silent=chosen.silent,
        before=10,
    )
    with tempfile.TemporaryDirectory() as directory:
        seen = asyncio.run(endure(Path(directory), plan))
    how = "never answers" if plan.silent else "is down"
    print(f"ready while down: {sorted({status for status, _ in seen.ready(seen.down + 60, seen.up)})}")
    print(f"at most {seen.pending:,} undelivered, {seen.unacked:,} unacknowledged; exit code {seen.drained}")
    twice = sum(times > 1 for times in seen.stored.values())
    print(f"{seen.published:,} published, {len(seen.stored):,} stored, {twice} of them twice")
    caught_up = seen.caught_up - seen.up
    row(
        f"{how} for {chosen.minutes:g} minutes, {plan.rate:,} messages/s of {plan.size} B, {plan.memory}",
        f"{seen.peak_down >> 20} MiB, {seen.peak >> 20} MiB catching up",
        f"{len(seen.stored):,} stored, {seen.redelivered} redelivered, caught up after {caught_up:.0f} s",
    )
    if set(seen.stored) != set(range(1, seen.published + 1)) or twice or seen.redelivered:
        raise SystemExit("that is not each message once")


if __name__ == "__main__":
    main()
