"""A replica that lacked messages becomes leader, because the others have lost their disks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from jetcapture_py.verify.findings import Kind
from jetcapture_py.verify.proof import verify
from tests.support.losses import api
from tests.support.nats_server import NatsServer, cluster_configs
from tests.support.proofs import losses_of, spans
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, until


def cluster(directory: Path) -> list[NatsServer]:
    return [NatsServer(directory / f"server-{number}", extra) for number, extra in enumerate(cluster_configs())]


async def answer(url: str, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The API's answer, as soon as the cluster has leaders for it."""
    found: list[dict[str, Any]] = []

    async def asked() -> bool:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
            async with connection(url) as client:
                found.append(await asyncio.wait_for(api(client, subject, body), 5))
        return bool(found)

    await until(asked, f"{subject} is answered")
    return found[-1]


async def publish(url: str, numbers: range) -> None:
    async with connection(url) as client:
        for number in numbers:
            await client.jetstream().publish("orders.a", b"%d" % number, timeout=30)


@pytest.mark.parametrize("behind", [pytest.param(100, marks=pytest.mark.exhaustive), 1])
@pytest.mark.exhaustive
async def test_messages_that_a_promoted_replica_lacked_are_a_rewind(tmp_path: Path, behind: int) -> None:
    servers = cluster(tmp_path)
    with contextlib.ExitStack() as stack:
        await asyncio.gather(*(asyncio.to_thread(stack.enter_context, server) for server in servers))
        stream = {"name": STREAM, "subjects": ["orders.>"], "num_replicas": 3}
        await answer(servers[0].url, f"STREAM.CREATE.{STREAM}", stream)
        await publish(servers[0].url, range(50))
        leader = (await answer(servers[0].url, f"STREAM.INFO.{STREAM}"))["cluster"]["leader"]
        stale, *others = sorted(servers, key=lambda server: server is servers[int(leader[1:])])
        settings = config(others[0].url, tmp_path / "a")
        await capture_all(settings)

        async def caught_up() -> bool:
            info = await answer(others[0].url, f"STREAM.INFO.{STREAM}")
            return all(each["current"] and not each.get("lag") for each in info["cluster"]["replicas"])

        await until(caught_up, "every replica has the messages")
        await asyncio.to_thread(stale.stop)
        await publish(others[0].url, range(behind))
        await capture_all(settings)
        for server in others:
            await asyncio.to_thread(server.kill)
            shutil.rmtree(server.store_dir / "jetstream")
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        info = await answer(stale.url, f"STREAM.INFO.{STREAM}")
        await answer(stale.url, f"CONSUMER.INFO.{STREAM}.{CONSUMER}")
        last = info["state"]["last_seq"]
        assert last == 50
        report = await verify(config(stale.url, tmp_path / "a"))
        (found,) = losses_of(report)
        assert (found.kind, spans(found.ranges), found.count) == (Kind.REWIND, ((51, 50 + behind),), behind)
        assert report.exit_code() == 1
