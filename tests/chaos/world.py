"""The world that is broken: servers, proxies, a store, and daemons that are restarted whenever they end."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import nats
import nats.errors
from nats.aio.client import Client

from jetcapture_py.jetstream.ordered_consumer import ACK_WAIT_S
from tests.chaos.archive import Archive, LocalArchive, S3Archive
from tests.chaos.clock import Clock
from tests.chaos.jetstream import JetStream
from tests.chaos.ledger import COLUMNS, LARGE, Ledger, Publisher
from tests.chaos.proxy import HttpProxy, Proxy
from tests.chaos.replica import ChaosError, Replica
from tests.support import s3
from tests.support.nats_server import NatsServer, cluster_configs
from tests.support.running import Command, settings

_WATCHED = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONWARNINGS": "default,ignore:unclosed:ResourceWarning",  # nats-py's, of connections that were cut
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a world is made of. `rate` is in messages a second; `sections` go into the daemons' configuration."""

    replicas: int = 2
    servers: int = 1
    store: Literal["local", "s3"] = "local"
    disk: int = 0
    """Size in bytes of a file system of its own for the archive; 0: none."""
    rate: float = 2000
    messages: int | None = None
    ack_wait: float = 3.0
    max_age: float = 1.0
    hold: float = 1.0
    """What the duration of faults is multiplied by."""
    server_config: str = ""
    largest: int = LARGE
    """Bytes of the largest messages; the servers must allow them."""
    ordered: bool = False
    """Whether one of the replicas receives, and the others stand by."""
    sections: dict[str, Any] = field(default_factory=dict)


class World:
    """Everything that runs, and how to reach it. Leaving the block ends every process in it."""

    def __init__(self, directory: Path, shape: Shape, seed: int, say: Callable[[str], None]) -> None:
        self.directory, self.shape, self.seed = directory, shape, seed
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.servers: list[NatsServer] = []
        self.proxies: list[Proxy] = []
        self.replicas: list[Replica] = []
        self.broken_drains = 0
        self.http: HttpProxy | None = None
        self.archive: Archive
        self.client: Client
        self.jetstream: JetStream
        self.publisher: Publisher
        self._say, self._began = say, time.monotonic()
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    def say(self, text: str, *, count: str | None = None) -> None:
        """Add a line to the timeline, and count what it says."""
        if count:
            self.counts[count] += 1
        self._say(f"[{time.monotonic() - self._began:7.1f} s] {text}")

    def hold(self, draw: random.Random, shortest: float, longest: float) -> float:
        """Seconds that a fault lasts."""
        return draw.uniform(shortest, longest) * self.shape.hold

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def _close_client(self) -> None:
        with suppress(OSError):  # it may be connecting again
            await self.client.close()

    async def _start(self) -> None:
        self._stack.push_async_callback(self._end_everything)
        await self._start_servers()
        for server in self.servers:
            self.proxies.append(await self._stack.enter_async_context(Proxy(partial(getattr, server, "port"))))
        self.client = await self._connect()
        self._stack.push_async_callback(self._close_client)
        self.jetstream = JetStream(self.client, 3 if self.shape.servers >= 3 else 1, ordered=self.shape.ordered)
        await self.jetstream.create_stream()
        options = await self._make_store()
        self.clock = Clock(self.directory)
        environment = {**self.clock.environment, **_WATCHED}
        sections = self.shape.sections
        mode = {"mode": "ordered"} if self.shape.ordered else {"ack_wait": f"{self.shape.ack_wait:g}s"}
        base: dict[str, Any] = {
            "source": {**mode, "max_ack_pending": 10_000, "batch": 500},
            "decode": {"format": "json", "columns": COLUMNS},
            "block": {"interval": "1m", "max_age": f"{self.shape.max_age:g}s"},
            "store": {"options": options},
            "drain_timeout": "10s",
            "key": "{region}",
        }
        for name, value in sections.items():
            base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
        self.configuration = settings("nats://127.0.0.1", self.archive.url, **base)
        self.configuration["nats"]["servers"] = [f"nats://127.0.0.1:{proxy.port}" for proxy in self.proxies]
        for number in range(self.shape.replicas):
            name = f"replica-{number}"
            self.replicas.append(Replica(name, Command(self.directory, self.configuration, name, environment)))
        self._tasks += [asyncio.create_task(replica.supervise(), name=str(replica)) for replica in self.replicas]
        self.publisher = Publisher(
            self.client,
            self.ledger,
            random.Random(f"{self.seed}/messages"),
            rate=self.shape.rate,
            limit=self.shape.messages,
            largest=self.shape.largest,
        )
        self.publishing = asyncio.create_task(self.publisher.run(), name="publisher")
        self._tasks.append(self.publishing)

    async def _end_everything(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            with suppress(AssertionError):  # never started
                replica.command.kill()
        for server in self.servers:
            server.kill()

    def check_alive(self) -> None:
        """Raise what ended the publisher or a supervisor."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    # ------------------------------------------------------------------ servers

    async def _start_servers(self) -> None:
        count = self.shape.servers
        for number, extra in enumerate(cluster_configs(count) if count > 1 else [""]):
            config = f"{self.shape.server_config}\n{extra}"
            self.servers.append(NatsServer(self.directory / f"server-{number}", config))
        for server in self.servers:
            await asyncio.to_thread(server.start)

    async def _connect(self) -> Client:
        async def quiet(error: Exception) -> None:
            """Restarts are our own doing."""

        return await nats.connect(
            [server.url for server in self.servers],
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=quiet,
            allow_reconnect=True,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=32 << 20,
        )

    @property
    def limits(self) -> dict[str, int]:
        """The consumer's limits as configured."""
        source, wait = self.configuration["source"], ACK_WAIT_S if self.shape.ordered else self.shape.ack_wait
        return {"ack_wait": int(wait * 1e9), "max_ack_pending": source["max_ack_pending"]}

    # ------------------------------------------------------------------ the store

    async def _make_store(self) -> dict[str, Any]:
        if self.shape.store == "local":
            self.archive = LocalArchive(self.directory / "archive", self.shape.disk)
            self._stack.callback(self.archive.close)
            return {}
        endpoint = self._stack.enter_context(s3.serve())
        self.http = await self._stack.enter_async_context(HttpProxy(endpoint, random.Random(f"{self.seed}/http")))
        self.archive = await asyncio.to_thread(S3Archive, endpoint)
        self._stack.callback(self.archive.close)
        return {**s3.CREDENTIALS, "endpoint_url": self.http.url}

    # ------------------------------------------------------------------ what it comes to

    async def heal(self) -> None:
        """No fault is left, whatever was injected."""
        for proxy in self.proxies:
            proxy.heal()
        if self.http:
            self.http.heal()
        self.archive.heal()
        self.clock.shift(0)
        for server in self.servers:
            if server.running:
                server.resume()
            else:
                await asyncio.to_thread(server.start)
        for replica in self.replicas:
            if replica.stopped:
                replica.signal(signal.SIGCONT)
        await self.jetstream.change_consumer(pause_until=None, **self.limits)

    async def settle(self, patience: float) -> None:
        """Everything published, everything delivered, everything acknowledged."""
        self.publisher.stop()
        deadline = time.monotonic() + patience
        info: dict[str, Any] = {}
        while time.monotonic() < deadline:
            self.check_alive()
            if self.publishing.done():
                info = await self.jetstream.consumer()
                if "error" not in info and info["num_pending"] == 0 and info["num_ack_pending"] == 0:
                    return
            await asyncio.sleep(0.2)
        state = {name: info.get(name) for name in ("num_pending", "num_ack_pending", "num_redelivered", "error")}
        await asyncio.gather(*(replica.show_stacks() for replica in self.replicas))
        waits = "" if self.publishing.done() else f"; the publisher hangs at {self.publisher.published}"
        raise ChaosError(f"not caught up {patience:.0f} s after the last fault: {state}{waits}")

    async def stop_daemons(self) -> None:
        """Drain all of them: nothing is broken any more, so each must succeed."""
        before = sum(replica.broken_drains for replica in self.replicas)
        await asyncio.gather(*(replica.end(30) for replica in self.replicas))
        await asyncio.gather(*(task for task in self._tasks if task is not self.publishing))
        self.broken_drains = sum(replica.broken_drains for replica in self.replicas) - before

    def verify(self) -> dict[str, Any]:
        """What `jetcapture verify` says, and its exit code as `exit`."""
        path = self.directory / "verify.json"
        command = Command(self.directory, self.configuration, "verify")
        done = subprocess.run(
            [sys.executable, "-m", "jetcapture_py", "verify", str(command.path), "--json"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        path.write_text(done.stdout + done.stderr)
        if not done.stdout:
            raise ChaosError(f"jetcapture verify ended with {done.returncode}: {done.stderr[-500:]}")
        found: dict[str, Any] = {"exit": done.returncode, **json.loads(done.stdout)}
        return found
