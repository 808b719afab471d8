"""jetcapture and other programs, alternating, on the same stored messages.

    python -m benchmarks.compare                       the standard run, which docs/benchmarks.md shows
    python -m benchmarks.compare --publish             the same, written to the page, the README and benchmarks/results
    python -m benchmarks.compare --formats             the same orders as JSON, MessagePack, CSV, Avro, protobuf
    python -m benchmarks.compare --sizes 100 1000 --keys 4 1000 --runners limit jetcapture-json

Each runner is a process with a new durable consumer: it receives, decodes, splits by a field, encodes, stores, and
acknowledges every message. Its rate is measured from the first delivery to the last acknowledgement, as reported by the
server. Afterwards everything stored is read, and a run that lost a message has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import nats
from nats.aio.client import Client

from benchmarks.compare import claims, page, results
from benchmarks.compare.chart import Panel, chart
from benchmarks.compare.formats import FORMATS
from benchmarks.compare.machine import machine, versions
from benchmarks.compare.measure import FailedError, measure
from benchmarks.compare.orders import UNACKED, Scenario, fill, fitting
from benchmarks.compare.peers import UnavailableError
from benchmarks.compare.results import MIB, Results, cpu, rate
from benchmarks.compare.runners import FORMATS as IN_FORMATS
from benchmarks.compare.runners import ORDERED, Runner, Work, runners
from benchmarks.compare.storage import Storage
from tests.support.nats_server import NatsServer

RESULTS = Path(__file__).parents[1] / "results"
OURS = ["jetcapture-raw", "jetcapture-json"]
MEDIUM, LARGE = 250_000, 50_000
"""Messages of 1 KB and of 10 KB in the standard run."""
BUSY = 2
BUNDLES = 16
STORES = ["local", "s3", "s3-fsspec", "s3-obstore"]
Case = tuple[Scenario, str]


def arguments() -> argparse.Namespace:
    """The command line."""
    names = list(runners(None))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=400_000, help="fewer of large ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a message")
    parser.add_argument("--keys", type=int, nargs="+", help="how many regions the messages have")
    parser.add_argument("--runners", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--replicas", type=int, nargs="+", help="processes that share the work")
    parser.add_argument("--busy", type=int, nargs="+", help="busy loops beside everything")
    parser.add_argument("--bundles", type=int, default=0, help="block.bundles")
    parser.add_argument("--unacked", type=int, default=UNACKED, help="how many the consumer lets be unacknowledged")
    parser.add_argument("--store", nargs="+", choices=STORES, help="s3: versitygw, or moto without it")
    parser.add_argument("--formats", action="store_true", help="the same orders in every format that is decoded")
    parser.add_argument("--output", type=Path, help="a directory for table, chart and all figures")
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results, the page and the README")
    parser.add_argument("--jet-capture-source", type=Path, help="a checkout, if the module proxy lacks it")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    """Return what is run in each round."""
    if options.formats:
        return in_formats(options.messages, list(FORMATS))
    names = options.runners or [name for name in runners(None) if name not in (*ORDERED, *IN_FORMATS)]
    if is_standard(options):
        return standard(options.messages, options.runners or list(runners(None)))
    scenarios = [
        Scenario(
            size=size,
            keys=keys,
            messages=fitting(options.messages, size),
            replicas=replicas,
            store=store,
            unacked=options.unacked,
            bundles=options.bundles,
            busy=busy,
        )
        for size, keys, replicas, store, busy in product(
            options.sizes or [250],
            options.keys or [4],
            options.replicas or [1],
            options.store or ["local"],
            options.busy or [0],
        )
    ]
    return [(scenario, name) for scenario in scenarios for name in names]


def standard(messages: int, names: list[str]) -> list[Case]:
    """Return what docs/benchmarks.md shows: sizes, modes, formats, a busy machine, many keys, and replicas."""
    peers = [name for name in names if name not in (*ORDERED, *IN_FORMATS)]
    base, large = Scenario(messages=messages), Scenario(size=10_000, messages=min(messages, LARGE))
    plan: list[tuple[Scenario, list[str]]] = [(base, [*peers, *ORDERED])]
    plan += [(Scenario(size=1000, messages=min(messages, MEDIUM)), peers), (large, peers)]
    plan += [(replace(scenario, busy=BUSY), [*OURS, "jet-capture"]) for scenario in (base, large)]
    plan += [(replace(base, keys=10_000, bundles=BUNDLES), OURS), (replace(base, replicas=3), OURS)]
    chosen = [(scenario, name) for scenario, runners_ in plan for name in runners_ if name in names]
    return chosen + [case for case in in_formats(messages, list(FORMATS)) if case[1] in names and case not in chosen]


def in_formats(messages: int, formats: list[str]) -> list[Case]:
    """Return the same orders in these formats."""
    return [(Scenario(messages=messages, format=name), f"jetcapture-{name}") for name in formats]


def is_standard(options: argparse.Namespace) -> bool:
    """Whether nothing says which scenarios to run."""
    return not (options.formats or options.sizes or options.keys or options.replicas or options.store or options.busy)


def available(plan: Iterable[Case], checkout: Path | None, outcome: Results) -> list[tuple[Scenario, Runner]]:
    """Return the cases whose runner is available and able; `outcome` records the missing runners."""
    makers, made, possible = runners(checkout), dict[str, Runner](), []
    for scenario, name in plan:
        try:
            if name not in made and name not in outcome.missing:
                made[name] = makers[name]()
        except UnavailableError as error:
            outcome.missing[name] = str(error)
        if name in made and made[name].does(scenario):
            possible.append((scenario, made[name]))
    return possible


async def run(todo: list[tuple[Scenario, Runner]], rounds: int, outcome: Results) -> None:
    """Store the messages, then run everything, alternating; `outcome` records the figures."""
    scenarios = list(dict.fromkeys(scenario for scenario, _ in todo))
    with tempfile.TemporaryDirectory(prefix="jetcapture-bench-") as name, NatsServer(Path(name, "nats")) as server:
        directory = Path(name)
        for scenario in {scenario.stream: scenario for scenario in scenarios}.values():
            print(f"Storing {scenario} …", flush=True)
            await fill(server.url, scenario)
        storage = Storage(directory, {scenario.store for scenario in scenarios})
        client = await nats.connect(server.url)
        try:
            for number in range(rounds):
                for scenario, runner in todo[number % len(todo) :] + todo[: number % len(todo)]:
                    if (scenario, runner.name) not in outcome.failed:
                        await _one(client, server, storage, scenario, runner, number, outcome)
        finally:
            await client.close()
            storage.close()


async def _one(
    client: Client,
    server: NatsServer,
    storage: Storage,
    scenario: Scenario,
    runner: Runner,
    number: int,
    outcome: Results,
) -> None:
    consumer = f"{runner.name}-{time.time_ns()}"
    with tempfile.TemporaryDirectory(prefix="run-") as name, storage.target(scenario.store) as target:
        work = Work(
            scenario=scenario,
            url=server.url,
            server=server.pid,
            consumer=consumer,
            directory=Path(name),
            target=target,
        )
        try:
            measured = await measure(client, runner, work)
        except FailedError as error:
            outcome.failed[scenario, runner.name] = str(error)
            outcome.runs.pop((scenario, runner.name), None)
            print(f"{runner.name}, {scenario}, failed: {error}", flush=True)
            return
    outcome.runs.setdefault((scenario, runner.name), {})[number] = measured
    print(
        f"{number + 1}  {scenario!s:52} {runner.name:20} {rate(scenario)(measured):>10,.0f} messages/s"
        f" {cpu(scenario)(measured):>7.2f} CPU s/million {measured.peak / MIB:>6,.0f} MiB",
        flush=True,
    )


def document(outcome: Results, head: str) -> str:
    """Return all tables in Markdown."""
    parts = [f"# Comparison\n\n{head}\n"]
    parts += [f"## {scenario}\n\n{results.table(outcome, scenario)}" for scenario in outcome.scenarios]
    if shown := claims.claims(outcome):
        parts.append(f"## Goals\n\nMedians of the rounds' ratios.\n\n{claims.table(shown)}")
    parts += [f"- {remark}\n" for remark in results.remarks(outcome)]
    return "\n".join(parts)


def picture(outcome: Results, head: str) -> str:
    """Return the chart of the scenario with the most runners."""
    scenario = max(outcome.scenarios, key=lambda scenario: len(outcome.runners(scenario)))
    names = [name for name in outcome.runners(scenario) if name not in ORDERED]
    stored = [name for name in names if outcome.median(scenario, name, results.stored)]

    def panel(title: str, shown: list[str], figure: results.Figure, digits: int = 0) -> Panel:
        return Panel(title=title, values=[(name, outcome.all(scenario, name, figure)) for name in shown], digits=digits)

    panels = [
        panel("messages per second", names, rate(scenario)),
        panel("CPU seconds per million messages", names, cpu(scenario), 2),
        panel("peak resident memory, MiB", names, lambda measured: measured.peak / MIB),
        panel("stored, MB", stored, lambda measured: measured.stored.bytes / 1e6, 1),
    ]
    return chart(str(scenario), head, panels)


def save(outcome: Results, head: str, output: Path) -> None:
    """Write the tables, the chart, and the figures of every run."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "comparison.md").write_text(document(outcome, head))
    (output / "comparison.svg").write_text(picture(outcome, head.split(":")[0]))
    runs = [
        {"scenario": asdict(scenario), "runner": name, "round": number, **asdict(run_)}
        for (scenario, name), rounds in outcome.runs.items()
        for number, run_ in rounds.items()
    ]
    lines = ",\n".join(json.dumps(run_) for run_ in runs)
    (output / "comparison.json").write_text(f"[\n{lines}\n]\n")
    print(f"Written: {output}/comparison.md, .svg, .json")


def main() -> int:
    """Run, print, save; return 1 if a runner failed."""
    options = arguments()
    if options.publish:
        page.check()
    outcome = Results()
    todo = available(cases(options), options.jet_capture_source, outcome)
    began = time.monotonic()
    asyncio.run(run(todo, options.rounds, outcome))
    if not outcome.runs:
        print(*results.remarks(outcome), sep="\n")
        return 1
    print(f"\n{document(outcome, f'{time.monotonic() - began:.0f} s')}")
    today, names = f"{datetime.now(UTC):%Y-%m-%d}", {name for _, name in outcome.runs}
    head = f"{today}, medians of {options.rounds} rounds, on {machine()}: {versions(names)}."
    if options.output:
        save(outcome, head, options.output)
    if options.publish:
        save(outcome, head, RESULTS)
        page.publish(outcome, head)
    return int(bool(outcome.failed))


if __name__ == "__main__":
    sys.exit(main())
