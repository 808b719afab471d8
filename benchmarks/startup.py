"""How long it takes to start: `jetcapture --help`, and `jetcapture run` until its first pull reaches the server.

    python -m benchmarks.startup [--rounds 10]

Prints the median of each, with its range; the CPU seconds, too, those of `run` until it has ended; and the libraries
that a local run has loaded by then. As in an installation, no module has to be compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nats

from benchmarks.others import row
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
"""A command that tells which top-level modules it has loaded."""


def modules(*arguments: str) -> set[str]:
    """The top-level modules that `jetcapture` with these arguments has loaded by its end."""
    done = subprocess.run([sys.executable, "-c", MODULES, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return set(done.stdout.splitlines()[-1].split())


def compiled(directory: Path) -> dict[str, str]:
    """The environment in which compiled modules are kept in `directory`."""
    return {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}


def helped(environment: Mapping[str, str]) -> float:
    """Seconds that the help text takes."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "jetcapture_py", "--help"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return time.perf_counter() - began


def cpu() -> float:
    """CPU seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def told(what: str, seconds: Sequence[float]) -> None:
    """Print median and range."""
    row(what, f"{statistics.median(seconds):.2f} s", f"{min(seconds):.2f} to {max(seconds):.2f}")


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory, "nats")) as server:
        asyncio.run(publish(server.url, [("orders.new", b"{}", None)]))
        environment = compiled(Path(directory, "compiled"))
        figures: list[tuple[float, ...]] = []
        configuration = settings(server.url, Path(directory, "archive"))
        with Command(Path(directory), configuration, environment=environment) as command:
            for _ in range(options.rounds + 1):
                before = cpu()
                help_seconds, between = helped(environment), cpu()
                figures.append(
                    (help_seconds, between - before, asyncio.run(pulled(server.url, command)), cpu() - between)
                )
        unread = settings(server.url, Path(directory, "archive"), source={"consumer": "modules"})
        with Command(Path(directory), unread, "modules") as command:
            found = modules("run", str(command.path), "--until-caught-up")
    names = ("`jetcapture --help`", "its CPU", "`jetcapture run`, to the first pull", "its CPU, until stopped")
    for name, seconds in zip(names, zip(*figures[1:], strict=True), strict=True):  # the first round compiles
        told(name, seconds)
    libraries = sorted(name for name in found if name not in sys.stdlib_module_names and not name.startswith("_"))
    print(f"{len(libraries)} libraries: {', '.join(libraries)}")


if __name__ == "__main__":
    main()
