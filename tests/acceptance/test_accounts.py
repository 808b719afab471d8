"""All streams of an account in one process: captures come and go with their streams, and nothing is lost meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from tests.acceptance.test_run import awaited
from tests.integration.monitoring.test_http import get
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, Command, connection, remove_unfinished, rows, settings, until

Start = Callable[..., NatsServer]
SECONDS = float(os.environ.get("JETCAPTURE_TEST_SECONDS", "60"))
"""For how long streams are created, deleted, created again and renamed."""
PLAIN, BUCKETS, STORES, QUEUES = 40, 10, 5, 5
LIMIT = 1 << 30


def configuration(url: str, archive: Path) -> dict[str, Any]:
    found = settings(url, archive, block={"max_age": "1s"}, http={"listen": "127.0.0.1:0"})
    found["source"] = {"streams": ["*", "!left-*"], "buckets": ["*"], "consumer": CONSUMER}
    return found


def look(running: Command) -> None:
    before = len(list(running.events("config.reloaded")))
    running.process.send_signal(signal.SIGHUP)
    awaited(lambda: len(list(running.events("config.reloaded"))) > before, "it has looked")


def archived(archive: Path) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    for row in rows(archive):
        found.setdefault(row["_nats_stream"], set()).add(row["_nats_payload"])
    return found


@dataclass
class Account:
    """An account's streams, and what was published to each and must be in the archive."""

    client: Client
    expected: dict[str, set[bytes]] = field(default_factory=dict)
    present: dict[str, set[bytes]] = field(default_factory=dict)
    """What streams have now, which were created again since."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def create(self, name: str, **config: Any) -> None:
        stream = self.client.jetstream()
        if name.startswith("KV_"):
            await stream.create_key_value(bucket=name[3:])
        elif name.startswith("OBJ_"):
            await stream.create_object_store(name[4:])
        else:
            await stream.add_stream(name=name, subjects=[f"{name}.>"], **config)

    async def publish(self, name: str, count: int = 1) -> None:
        """Publish messages that differ from all others; what a work queue gets is not expected."""
        stream = self.client.jetstream()
        for number in itertools.islice(self.numbers, count):
            payload = b"%d" % number
            if name.startswith("KV_"):
                await (await stream.key_value(name[3:])).put(f"key{number}", payload)
            elif name.startswith("OBJ_"):
                await (await stream.object_store(name[4:])).put(f"file{number}", payload)
            else:
                await stream.publish(f"{name}.a", payload)
            for payloads in (self.expected, self.present):
                payloads.setdefault(name, set()).add(payload)

    async def stored(self, name: str) -> bool:
        try:
            info = await self.client.jetstream().consumer_info(name, CONSUMER)
        except NotFoundError:
            return False
        return bool(info.num_pending == 0 and info.num_ack_pending == 0)

    async def delete(self, name: str) -> None:
        self.present.pop(name, None)
        await self.client.jetstream().delete_stream(name)


async def test_captures_come_and_go_with_their_streams(nats_server: Start, tmp_path: Path) -> None:
    url = nats_server().url
    async with connection(url) as client:
        account = Account(client)
        for name in ("A", "B", "KV_settings", "OBJ_files", "left-out"):
            await account.create(name)
            await account.publish(name, 5)
        await account.create("JOBS", retention="workqueue")
        await client.jetstream().publish("JOBS.a", b"to do")
        with Command(tmp_path, configuration(url, tmp_path / "archive"), "account") as running:
            running.start()
            captured = ["A", "B", "KV_settings", "OBJ_files"]

            async def all_stored() -> bool:
                return all([await account.stored(name) for name in captured])

            await until(all_stored, "all are stored")
            await account.create("C")
            await account.publish("C", 5)
            await account.delete("B")
            await until(lambda: bool(list(running.events("stream.gone"))), "the end of a stream is noticed at once")
            captured[1:2] = ["C"]
            await asyncio.to_thread(look, running)
            await until(all_stored, "the new one is captured")
            await account.delete("A")
            await account.create("A")
            await account.publish("A", 5)
            await until(lambda: bool(list(running.events("capture.failed"))), "it has got another consumer")
            await asyncio.to_thread(look, running)
            await until(all_stored, "the one that was created again is captured")
            port = next(running.events("http.listening"))["port"]
            await asyncio.to_thread(awaited, lambda: get(port, "/readyz") == (200, "ready\n"), "all is well")
            status, text = await asyncio.to_thread(get, port, "/status.json")
            assert sorted(each["stream"] for each in json.loads(text)["captures"]) == sorted(captured), status
            await asyncio.to_thread(running.drain)
        (gone,) = running.events("stream.gone")
        assert (gone["capture"], gone["stream"]) == ("account.B", "B")
        (queue,) = running.events("stream.left_out")
        assert (queue["stream"], queue["reason"][:27]) == ("JOBS", "its retention is workqueue,")
        assert await client.jetstream().get_msg("JOBS", 1)
        expected = {name: payloads for name, payloads in account.expected.items() if name != "left-out"}
        found = archived(tmp_path / "archive")
        assert found.keys() == expected.keys()
        assert all(expected[name] <= found[name] for name in expected), "object stores also have metadata"


async def reached(client: Client, name: str, seq: int) -> bool:
    return bool((await client.jetstream().stream_info(name)).state.last_seq == seq)


def test_a_process_waits_for_streams_and_not_for_a_server(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    with Command(tmp_path, configuration(server.url, tmp_path / "archive"), "account") as running:
        running.start()
        awaited(lambda: list(running.events("http.listening")), "it runs without a stream")
        running.drain()
    server.stop()
    with Command(tmp_path, configuration(server.url, tmp_path / "archive"), "lost") as running:
        running.start()
        assert running.wait() == 1
        assert "cannot connect to NATS" in running.log


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS * 4 + 900)
async def test_nothing_is_lost_while_streams_come_and_go_and_processes_are_killed(
    nats_server: Start, tmp_path: Path
) -> None:
    url, archive, draw, peak = nats_server().url, tmp_path / "archive", random.Random(1), 0
    done = dict.fromkeys(("created", "deleted", "again", "renamed", "killed"), 0)
    async with connection(url) as client:
        account = Account(client)
        names = [f"S{number}" for number in range(PLAIN)]
        names += [f"KV_b{number}" for number in range(BUCKETS)] + [f"OBJ_o{number}" for number in range(STORES)]
        for name in names:
            await account.create(name)
        for number in range(QUEUES):
            await account.create(f"JOBS{number}", retention="workqueue")
            await client.jetstream().publish(f"JOBS{number}.a", b"to do")
        with Command(tmp_path, configuration(url, archive), "account") as running:
            running.start()
            mirrors: set[str] = set()
            numbers, end = itertools.count(PLAIN), time.monotonic() + SECONDS
            while (missed := [kind for kind, times in done.items() if not times]) or time.monotonic() < end:
                if time.monotonic() < end:
                    for name in draw.sample([name for name in names if name not in mirrors], 20):
                        await account.publish(name, draw.randint(1, 20))
                    kind = draw.choice((*done, "looked", "published", "published"))
                else:  # a busy machine has not come to everything
                    await asyncio.sleep(0.1)
                    kind = draw.choice(missed)
                old = draw.choice([name for name in names if name[0] == "S"])
                if kind in ("deleted", "again", "renamed"):
                    if not await account.stored(old):  # what nobody has captured yet would be lost with it
                        continue
                    if kind == "renamed":  # that is a copy of it, and the end of the first one
                        new = f"S{next(numbers)}"
                        await client.jetstream().add_stream(name=new, mirror={"name": old})
                        account.expected[new] = set(account.present.get(old, ()))
                        account.present[new] = set(account.expected[new])
                        last = (await client.jetstream().stream_info(old)).state.last_seq
                        await until(partial(reached, client, new, last), "it is copied")
                        names[names.index(old)] = new
                        mirrors.add(new)
                    await account.delete(old)
                    mirrors.discard(old)
                    if kind == "again":
                        await account.create(old)
                    elif kind == "deleted":
                        names.remove(old)
                elif kind == "created" and len(names) < PLAIN + BUCKETS + STORES + 5:
                    names.append(f"S{next(numbers)}")
                    await account.create(names[-1])
                elif kind == "killed" and done["killed"] < SECONDS / 15:
                    running.kill()
                    running.start()
                elif kind == "looked":
                    running.process.send_signal(signal.SIGHUP)
                    continue
                else:
                    continue
                done[kind] += 1
                peak = max(peak, psutil.Process(running.process.pid).memory_info().rss)
            missing = set(names)

            async def all_stored() -> bool:
                for name in [*missing]:
                    if await account.stored(name):
                        missing.remove(name)
                return not missing

            running.process.send_signal(signal.SIGHUP)
            await until(all_stored, f"the rest is stored: {missing}", 300)
            await asyncio.to_thread(running.drain)
        remove_unfinished(archive)
        found = archived(archive)
        lost = {name: gone for name, each in account.expected.items() if (gone := each - found.get(name, set()))}
        assert not lost
        assert not [name for name in found if name.startswith("JOBS")]
        for number in range(QUEUES):
            assert await client.jetstream().get_msg(f"JOBS{number}", 1)
    print(f"{peak >> 20} MiB at the peak; {done}")
    assert min(done.values()) > 0
    assert peak <= 1.3 * LIMIT
