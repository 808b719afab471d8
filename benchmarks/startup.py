"""How long it takes to start: `jetcapture --help`, and `jetcapture run` until its first pull reaches the server.

    python -m benchmarks.startup [--rounds 10]

Prints the median of each, with its range, and the libraries that a local run has loaded by its end.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nats

from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, Command, publish, settings

MODULES = """
import sys
from jetcapture_py.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None}))
"""
"""A run of the command that tells which top-level modules it has loaded."""


def modules(command: Command) -> set[str]:
    """The top-level modules that a run of `command` until caught up has loaded."""
    arguments = [sys.executable, "-c", MODULES, "run", str(command.path), "--until-caught-up"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return set(done.stdout.split())


def helped() -> float:
    """Seconds that the help text takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "jetcapture_py", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


async def pulled(url: str, command: Command) -> float:
    """Seconds from starting the process to its first pull at the server."""
    client = await nats.connect(url)
    subscription = await client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}")
    await client.flush()
    began = time.perf_counter()
    command.start()
    await subscription.next_msg(30)
    seconds = time.perf_counter() - began
    command.process.terminate()
    await asyncio.to_thread(command.wait)
    await client.close()
    return seconds


def told(what: str, seconds: Sequence[float]) -> str:
    """Median and range."""
    return f"{what:32} {statistics.median(seconds):.3f} s   {min(seconds):.3f} to {max(seconds):.3f}"


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        asyncio.run(publish(server.url, [("orders.new", b"{}", None)]))
        helps, pulls = [], []
        with Command(Path(directory), settings(server.url, Path(directory, "archive"))) as command:
            for _ in range(options.rounds):
                helps.append(helped())
                pulls.append(asyncio.run(pulled(server.url, command)))
        unread = settings(server.url, Path(directory, "archive"), source={"consumer": "modules"})
        with Command(Path(directory), unread, "modules") as command:
            found = modules(command)
    print(told("jetcapture --help", helps))
    print(told("jetcapture run, first pull", pulls))
    libraries = sorted(name for name in found if name not in sys.stdlib_module_names and not name.startswith("_"))
    print(f"{len(libraries)} libraries: {', '.join(libraries)}")


if __name__ == "__main__":
    main()
