"""jetcapture beside others: the same stored messages, the same work, alternating, in one run.

    python -m benchmarks.compare                       the standard run: what docs/benchmarks.md shows
    python -m benchmarks.compare --formats             the same orders as JSON, MessagePack, CSV, Avro, protobuf
    python -m benchmarks.compare --sizes 100 1000 --keys 4 1000 --runners limit jetcapture-json

Each runner is a process of its own with a fresh durable consumer: it receives, decodes, splits by a field, encodes,
stores, and acknowledges every message. The rate is taken from the first delivery to the last acknowledgement, as the
server tells them. Afterwards everything stored is read, and a run that lost a message has failed.
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

from benchmarks.compare import claims, results
from benchmarks.compare.chart import Panel, chart
from benchmarks.compare.formats import FORMATS
from benchmarks.compare.machine import machine, versions
from benchmarks.compare.measure import FailedError, measure
from benchmarks.compare.orders import UNACKED, Scenario, fill, fitting
from benchmarks.compare.peers import UnavailableError
from benchmarks.compare.results import MIB, Results, cpu, rate
from benchmarks.compare.runners import OPTIONAL, Runner, Work, runners
from benchmarks.compare.storage import Storage
from tests.support.nats_server import NatsServer

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- comparison: `make bench ARGS=--publish` writes this -->", "<!-- end of the comparison -->"
OURS = ["jetcapture-raw", "jetcapture-json"]
FEWER = 300_000
"""Messages of all scenarios but the first one."""
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
    parser.add_argument("--messages", type=int, default=1_000_000, help="fewer of large ones: a stream has up to 1 GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a message")
    parser.add_argument("--keys", type=int, nargs="+", help="how many regions the messages have")
    parser.add_argument("--runners", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--replicas", type=int, nargs="+", help="processes that share the work")
    parser.add_argument("--busy", type=int, nargs="+", help="busy loops beside everything")
    parser.add_argument("--bundles", type=int, default=0, help="block.bundles")
    parser.add_argument("--unacked", type=int, default=UNACKED, help="how many the consumer lets be unacknowledged")
    parser.add_argument("--store", nargs="+", choices=STORES, help="s3: versitygw if it is there, else moto")
    parser.add_argument("--formats", action="store_true", help="the same orders in every format that is decoded")
    parser.add_argument("--output", type=Path, help="a directory for table, chart and all figures")
    parser.add_argument("--publish", action="store_true", help="write them to benchmarks/results and the page")
    parser.add_argument("--jet-capture-source", type=Path, help="a checkout, where Go's module proxy does not have it")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    """What is to be run in each round."""
    if options.formats:
        found = [Scenario(messages=options.messages, format=name) for name in FORMATS]
        return [(scenario, f"jetcapture-{scenario.format}") for scenario in found]
    names = options.runners or [name for name in runners(None) if name not in OPTIONAL]
    if is_standard(options):
        return standard(options.messages, names)
    found = [
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
    return [(scenario, name) for scenario in found for name in names]


def standard(messages: int, names: list[str]) -> list[Case]:
    """What docs/benchmarks.md shows: sizes, a busy machine, many keys, and replicas."""
    fewer, ours = min(messages, FEWER), [*OURS, "jet-capture-csv"]
    wanted: list[tuple[Scenario, list[str]]] = [(Scenario(messages=messages), names)]
    wanted += [(Scenario(size=size, messages=fitting(fewer, size)), names) for size in (1000, 10_000)]
    for size in (250, 10_000):
        # of large messages as many as are captured in some seconds
        base = Scenario(size=size, messages=fewer if size == 250 else fewer // 5)
        wanted += [(replace(base, busy=busy), ours) for busy in (0, BUSY)]
    wanted += [(Scenario(keys=10_000, bundles=BUNDLES, messages=fewer), OURS)]
    wanted += [(Scenario(replicas=3, messages=messages), OURS)]
    return list(dict.fromkeys((scenario, name) for scenario, found in wanted for name in found if name in names))


def is_standard(options: argparse.Namespace) -> bool:
    """Whether nothing says which scenarios to run."""
    return not (options.formats or options.sizes or options.keys or options.replicas or options.store or options.busy)


def available(wanted: Iterable[Case], checkout: Path | None, found: Results) -> list[tuple[Scenario, Runner]]:
    """The cases whose runner is there, and can; `found` learns of the others."""
    makers, made, kept = runners(checkout), dict[str, Runner](), []
    for scenario, name in wanted:
        try:
            if name not in made and name not in found.missing:
                made[name] = makers[name]()
        except UnavailableError as error:
            found.missing[name] = str(error)
        if name in made and made[name].does(scenario):
            kept.append((scenario, made[name]))
    return kept


async def run(todo: list[tuple[Scenario, Runner]], rounds: int, found: Results) -> None:
    """Store the messages, run everything, alternating, and put what was measured into `found`."""
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
                    if runner.name not in found.missing:
                        await _one(client, server, storage, scenario, runner, number, found)
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
    found: Results,
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
            found.missing[runner.name] = f"failed, {scenario}: {error}"
            print(f"{runner.name}: {found.missing[runner.name]}", flush=True)
            return
    found.runs.setdefault((scenario, runner.name), {})[number] = measured
    print(
        f"{number + 1}  {scenario!s:52} {runner.name:20} {rate(scenario)(measured):>10,.0f} messages/s"
        f" {cpu(scenario)(measured):>7.2f} CPU s/million {measured.peak / MIB:>6,.0f} MiB",
        flush=True,
    )


def document(found: Results, head: str) -> str:
    """Tables of everything, in Markdown."""
    parts = [f"# Comparison\n\n{head}\n"]
    parts += [f"## {scenario}\n\n{results.table(found, scenario)}" for scenario in found.scenarios]
    if shown := claims.claims(found):
        parts.append(f"## Claims\n\nMedians of the rounds' ratios.\n\n{claims.table(shown)}")
    parts += [f"- {remark}\n" for remark in results.remarks(found)]
    return "\n".join(parts)


def picture(found: Results, head: str) -> str:
    """The chart of the scenario in which most take part."""
    scenario = max(found.scenarios, key=lambda each: len(found.runners(each)))
    names = found.runners(scenario)
    stored = [name for name in names if found.median(scenario, name, results.stored)]

    def panel(title: str, shown: list[str], figure: results.Figure, digits: int = 0) -> Panel:
        return Panel(title=title, values=[(name, found.all(scenario, name, figure)) for name in shown], digits=digits)

    panels = [
        panel("messages per second", names, rate(scenario)),
        panel("CPU seconds per million messages", names, cpu(scenario), 2),
        panel("peak resident memory, MiB", names, lambda measured: measured.peak / MIB),
        panel("stored, MB", stored, lambda measured: measured.stored.bytes / 1e6, 1),
    ]
    return chart(str(scenario), head, panels)


def save(found: Results, options: argparse.Namespace, output: Path) -> str:
    """Write table, chart, and every run's figures; what docs/benchmarks.md shows of them."""
    names = {name for _, name in found.runs}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    rounds = f"{options.rounds} rounds"
    head = f"{today}, {rounds}, on {machine()}: {versions(names)}."
    output.mkdir(parents=True, exist_ok=True)
    (output / "comparison.md").write_text(document(found, head))
    (output / "comparison.svg").write_text(picture(found, f"{today}, medians and ranges of {rounds}, {machine()}"))
    runs = [
        {"scenario": asdict(scenario), "runner": name, "round": number, **asdict(measured)}
        for (scenario, name), rounds_ in found.runs.items()
        for number, measured in rounds_.items()
    ]
    lines = ",\n".join(json.dumps(each) for each in runs)
    (output / "comparison.json").write_text(f"[\n{lines}\n]\n")
    print(f"Written: {output}/comparison.md, .svg, .json")
    scenario = found.scenarios[0]
    return (
        f"![The same as the table](../benchmarks/results/comparison.svg)\n\n{head}\n\n{scenario}:\n\n"
        f"{results.table(found, scenario)}\n{claims.table(claims.claims(found))}"
    )


def published(text: str, part: str) -> str:
    """The page with `part` between its marks."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{part}{END}{after}"


def main() -> int:
    """Run, print, save; 1 when a runner failed."""
    options = arguments()
    found = Results()
    todo = available(cases(options), options.jet_capture_source, found)
    began = time.monotonic()
    asyncio.run(run(todo, options.rounds, found))
    if not found.runs:
        print(*results.remarks(found), sep="\n")
        return 1
    print(f"\n{document(found, f'{time.monotonic() - began:.0f} s')}")
    if options.output:
        save(found, options, options.output)
    if options.publish:
        PAGE.write_text(published(PAGE.read_text(), save(found, options, RESULTS)))
    return int(any(reason.startswith("failed") for reason in found.missing.values()))


if __name__ == "__main__":
    sys.exit(main())
