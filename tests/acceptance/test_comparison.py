"""The benchmark's runners do the work that they are measured by.

Bento takes minutes to build, and jet-capture is not on every module proxy: they are built and tested with
JETCAPTURE_TEST_PEERS set, whose value may be a checkout of jet-capture. Tenzir is tested if it is on the PATH.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nats
import pytest

from benchmarks.compare.formats import FORMATS
from benchmarks.compare.measure import FailedError, Measured, measure
from benchmarks.compare.orders import Scenario, fill
from benchmarks.compare.peers import UnavailableError
from benchmarks.compare.runners import Runner, Work, limit, runners
from benchmarks.compare.storage import Storage
from tests.support.nats_server import NatsServer

SCENARIO = Scenario(messages=2000)
PEERS = os.environ.get("JETCAPTURE_TEST_PEERS", "")
CHECKOUT = Path(PEERS) if Path(PEERS, "go.mod").is_file() else None
GO = ("bento", "jet-capture")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the scenario's messages."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        for name in FORMATS:
            asyncio.run(fill(server.url, replace(SCENARIO, format=name)))
        yield server


def run(runner: Runner, server: NatsServer, directory: Path, scenario: Scenario = SCENARIO) -> Measured:
    """One run."""
    storage = Storage(directory, {scenario.store})

    async def once() -> Measured:
        client = await nats.connect(server.url)
        try:
            with storage.target(scenario.store) as target:
                work = Work(
                    scenario=scenario,
                    url=server.url,
                    server=server.pid,
                    consumer="test",
                    directory=directory,
                    target=target,
                )
                return await measure(client, runner, work)
        finally:
            await client.close()

    try:
        return asyncio.run(once())
    finally:
        storage.close()


@pytest.mark.parametrize("name", [name for name in runners(None) if not name.startswith("limit")])
@pytest.mark.exhaustive
def test_every_runner_stores_and_acknowledges_each_message_once(name: str, server: NatsServer, tmp_path: Path) -> None:
    if name in GO and not PEERS:
        pytest.skip("JETCAPTURE_TEST_PEERS is not set")
    try:
        runner = runners(CHECKOUT)[name]()
    except UnavailableError as error:
        pytest.skip(str(error))
    measured = run(runner, server, tmp_path, replace(SCENARIO, format=runner.takes))
    assert (measured.stored.rows, measured.stored.different) == (SCENARIO.messages, SCENARIO.messages)
    assert measured.redelivered == 0
    assert measured.stored.objects >= SCENARIO.keys
    assert measured.stored.bytes > SCENARIO.messages
    assert measured.seconds > 0
    assert measured.cpu > 0
    assert measured.peak > 1 << 20


@pytest.mark.parametrize("name", ["limit", "limit-ordered"])
def test_the_limit_acknowledges_each_message_and_stores_nothing(name: str, server: NatsServer, tmp_path: Path) -> None:
    measured = run(runners(None)[name](), server, tmp_path)
    assert measured.redelivered == 0
    assert measured.stored.rows == 0


def test_replicas_share_the_work(server: NatsServer, tmp_path: Path) -> None:
    scenario = replace(SCENARIO, replicas=2)
    measured = run(runners(None)["jetcapture-raw"](), server, tmp_path, scenario)
    assert measured.stored.rows == SCENARIO.messages
    assert measured.redelivered == 0
    assert {path.name for path in tmp_path.glob("*.log")} == {"0.log", "1.log"}


def test_a_runner_that_loses_messages_has_failed(server: NatsServer, tmp_path: Path) -> None:
    acknowledges_only = replace(limit(), files="parquet", identity="order_id")
    with pytest.raises(FailedError, match="0 of 2000 messages are stored"):
        run(acknowledges_only, server, tmp_path)


def test_a_runner_that_ends_early_has_failed(server: NatsServer, tmp_path: Path) -> None:
    def command(_: Work) -> list[str]:
        return [sys.executable, "-c", "pass"]

    with pytest.raises(FailedError, match="ended with 2000 unacknowledged"):
        run(Runner(name="idle", command=command), server, tmp_path)
    assert not list(tmp_path.glob("stored-*"))
