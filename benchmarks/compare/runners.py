"""The programs in the comparison: how each is started, its consumer, and the files that it stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks.compare import formats, peers
from benchmarks.compare.formats import COLUMNS
from benchmarks.compare.orders import Scenario
from benchmarks.compare.storage import Target
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.jetstream.consumer import consumer_config
from jetcapture_py.jetstream.ordered_consumer import GROUP

ACK_WAIT = 120
BATCH = 5000
LARGE_BATCH, BATCH_BYTES = 20_000, 32 << 20
"""Servers and clients drop what does not fit into 64 MB, by default."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run: what to take from where, and the target to store it to; `directory` is the run's own.

    `server` is the id of the server's process.
    """

    scenario: Scenario
    url: str
    server: int
    consumer: str
    directory: Path
    target: Target


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A program in the comparison.

    - `command` returns its command line, and writes the files it needs into the run's directory.
    - `consumer`: settings of its consumer beside the common ones.
    - `files` and `identity`: what it stores, and the column that numbers the messages from 1.
    - `ends`: it ends by itself; others get SIGTERM once everything is acknowledged.
    - `anywhere`: it can share a consumer with other processes, and store to S3.
    - `takes`: the format of the orders that it decodes.
    """

    name: str
    command: Callable[[Work], list[str]]
    files: str = ""
    identity: str = ""
    consumer: Callable[[Scenario], Mapping[str, Any]] = lambda _: {}
    ends: bool = True
    anywhere: bool = False
    takes: str = "json"

    def does(self, scenario: Scenario) -> bool:
        """Whether it can take part."""
        fits = self.takes == scenario.format or self.name.startswith("limit")
        return fits and (self.anywhere or (scenario.replicas == 1 and scenario.store == "local"))


def runners(checkout: Path | None) -> dict[str, Callable[[], Runner]]:
    """All by name; making one may raise `UnavailableError`. `checkout` is one of jet-capture's sources."""
    return {
        "limit": limit,
        "limit-ordered": lambda: limit(GROUP),
        "jetcapture-raw-ordered": lambda: jetcapture(
            "jetcapture-raw-ordered", "_nats_seq", mode="ordered", key="{subject[1]}"
        ),
        "jetcapture-json-ordered": lambda: jetcapture(
            "jetcapture-json-ordered", "order_id", mode="ordered", key="{region}", decode=JSON
        ),
        "jetcapture-raw": lambda: jetcapture("jetcapture-raw", "_nats_seq", key="{subject[1]}"),
        "jetcapture-json": lambda: jetcapture("jetcapture-json", "order_id", key="{region}", decode=JSON),
        # without the raw payload, which the other programs do not keep either
        "jetcapture-columns": lambda: jetcapture(
            "jetcapture-columns", "order_id", key="{region}", decode={**JSON, "keep_payload": False}
        ),
        **{f"jetcapture-{name}": partial(jetcapture_of, name) for name in formats.FORMATS if name != "json"},
        "nats-py": nats_py,
        "jet-capture": lambda: jet_capture(checkout),
        "bento": bento,
        "tenzir": tenzir,
    }


JSON = {"format": "json", "columns": COLUMNS}
ORDERED = ("limit-ordered", "jetcapture-raw-ordered", "jetcapture-json-ordered")
FORMATS = tuple(f"jetcapture-{name}" for name in formats.FORMATS if name != "json")


def pinned(_: Scenario) -> Mapping[str, Any]:
    """Return the further settings of a consumer of `source.mode: ordered`."""
    config = consumer_config(SourceConfig(stream="S", consumer="C", mode="ordered"))
    return {name: config[name] for name in config if name.startswith(("ack_", "priority_"))}


def limit(group: str = "") -> Runner:
    """A bare socket; with a group, at a pinned consumer."""

    def command(work: Work) -> list[str]:
        address = urlsplit(work.url)
        script = str(peers.SOURCES / "limit.py")
        # the server drops a client with more than 64 MB waiting
        pull = str(min(BATCH, BATCH_BYTES // work.scenario.size // 5))
        stream = work.scenario.stream
        consumer = [work.consumer, pull, *([group] if group else [])]
        return [sys.executable, script, str(address.hostname), str(address.port), stream, *consumer]

    settings = {"name": "limit-ordered", "consumer": pinned} if group else {"name": "limit"}
    return Runner(command=command, ends=False, anywhere=True, **settings)


def jetcapture(name: str, identity: str, mode: str = "shared", **sections: Any) -> Runner:
    """The real command with default limits."""

    def command(work: Work) -> list[str]:
        settings = {
            "nats": {"servers": [work.url]},
            "source": {"stream": work.scenario.stream, "consumer": work.consumer, "mode": mode},
            "store": work.target.settings,
            "http": None,
            "log": {"format": "json"},
            **sections,
        }
        if work.scenario.bundles:
            settings["block"] = {"bundles": work.scenario.bundles}
        path = work.directory / "jetcapture.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False))  # the fields of CSV are in the columns' order
        return [sys.executable, "-m", "jetcapture_py", "run", str(path), "--until-caught-up"]

    more = {"consumer": pinned} if mode == "ordered" else {}
    return Runner(name=name, command=command, files="parquet", identity=identity, anywhere=True, **more)


def jetcapture_of(name: str) -> Runner:
    """The real command for orders in another format than JSON."""

    def command(work: Work) -> list[str]:
        made = jetcapture(
            f"jetcapture-{name}", "order_id", key="{region}", decode=formats.settings(name, work.directory)
        )
        return made.command(work)

    return Runner(
        name=f"jetcapture-{name}", command=command, files="parquet", identity="order_id", anywhere=True, takes=name
    )


def nats_py() -> Runner:
    """A plain loop."""

    def command(work: Work) -> list[str]:
        script = str(peers.SOURCES / "nats_py_loop.py")
        messages = str(work.scenario.messages)
        return [
            *(sys.executable, script, work.url, work.scenario.stream, work.consumer),
            *(messages, str(work.target.directory)),
        ]

    return Runner(name="nats-py", command=command, files="parquet", identity="order_id")


def jet_capture(checkout: Path | None) -> Runner:
    """The Go library; it has one pull under way, as large as the consumer allows: large ones suit it."""
    program = str(peers.binary("jet-capture", checkout))

    def batch(scenario: Scenario) -> int:
        return min(LARGE_BATCH, BATCH_BYTES // scenario.size)

    def command(work: Work) -> list[str]:
        # a block for each key is open, and all of them together must stay below what may be unacknowledged
        block = max(1, (work.scenario.unacked - 2 * batch(work.scenario)) // work.scenario.keys)
        options = {
            "url": work.url,
            "stream": work.scenario.stream,
            "consumer": work.consumer,
            "output": work.target.directory,
            "messages": work.scenario.messages,
            "block": block,
        }
        return [program, *(f"-{name}={value}" for name, value in options.items())]

    return Runner(
        name="jet-capture",
        command=command,
        files="csv",
        identity="order_id",
        consumer=lambda scenario: {"max_batch": batch(scenario)},
    )


def bento() -> Runner:
    """Bento, with a push consumer: from a pull consumer it fetches one message at a time."""
    program = str(peers.binary("bento"))
    types = {"int64": "INT64", "float64": "DOUBLE", "string": "UTF8"}

    def unacked(scenario: Scenario) -> int:
        return min(scenario.unacked, BATCH_BYTES // scenario.size)  # all of it may be pushed at once

    def command(work: Work) -> list[str]:
        source = {
            "urls": [work.url],
            "stream": work.scenario.stream,
            "durable": work.consumer,
            "bind": True,
            "ack_wait": f"{ACK_WAIT}s",
            "max_ack_pending": unacked(work.scenario),
        }
        encode = {
            "schema": [{"name": name, "type": types[kind]} for name, kind in COLUMNS.items()],
            "default_compression": "zstd",
        }
        settings = {
            "http": {"enabled": False},
            "logger": {"level": "ERROR"},
            "shutdown_timeout": "5s",
            "input": {
                "broker": {
                    "inputs": [{"nats_jetstream": source}],
                    "batching": {"count": min(BATCH, unacked(work.scenario) // 4), "period": "250ms"},
                }
            },
            "pipeline": {
                "processors": [
                    {"group_by_value": {"value": '${! json("region") }'}},
                    {"mapping": "meta region = this.region\nroot = this\nroot.order_id = this.order_id.int64()"},
                    {"parquet_encode": encode},
                ]
            },
            "output": {
                "file": {
                    "path": f'{work.target.directory}/${{! meta("region") }}/${{! uuid_v4() }}.parquet',
                    "codec": "all-bytes",
                }
            },
        }
        path = work.directory / "bento.yaml"
        path.write_text(json.dumps(settings))
        return [program, "-c", str(path)]

    return Runner(
        name="bento",
        command=command,
        files="parquet",
        identity="order_id",
        consumer=lambda scenario: {"deliver_subject": "to-bento", "max_ack_pending": unacked(scenario)},
        ends=False,
    )


def tenzir() -> Runner:
    """Tenzir, with room for everything that may be unacknowledged: it returns what does not fit into its queue."""
    program = peers.installed("tenzir")

    def command(work: Work) -> list[str]:
        source = {
            "url": work.url,
            "durable": work.consumer,
            "count": work.scenario.messages,
            "_queue_capacity": work.scenario.unacked + BATCH,
        }
        options = ", ".join(f"{name}={json.dumps(value)}" for name, value in source.items())
        target = json.dumps(f"{work.target.directory}/**/{{uuid}}.parquet")
        pipeline = [
            f"from_nats {json.dumps(f'{work.scenario.subjects}.>')}, {options}",
            "this = string(message).parse_json()",
            f'to_file {target}, partition_by=[region] {{ write_parquet compression_type="zstd" }}',
        ]
        return [program, "\n".join(pipeline)]

    return Runner(name="tenzir", command=command, files="parquet", identity="order_id")
