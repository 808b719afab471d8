"""A stream of another account, whose JetStream API is imported under a prefix, is captured as any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import nats

from jetcapture_py.manage.check import check
from jetcapture_py.verify.proof import verify
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, capture_all, config, rows

ACCOUNTS = """
accounts {
  OWNER {
    jetstream: enabled
    users: [{ user: owner, password: o }]
    exports: [
      { service: "$JS.API.>", response_type: stream }
      { service: "$JS.ACK.>" }
    ]
  }
  READER {
    users: [{ user: reader, password: r }]
    imports: [
      { service: { account: OWNER, subject: "$JS.API.>" }, to: "JS.owner.API.>" }
      { service: { account: OWNER, subject: "$JS.ACK.>" } }
    ]
  }
  DEAF {
    users: [{ user: deaf, password: d }]
    imports: [{ service: { account: OWNER, subject: "$JS.API.>" }, to: "JS.owner.API.>" }]
  }
}
"""


async def fill(url: str, count: int) -> None:
    client = await nats.connect(url, user="owner", password="o")
    await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"])
    for number in range(count):
        await client.jetstream().publish("orders.eu", b"%d" % number)
    await client.close()


async def capture_imported(server: NatsServer, archive: Path) -> None:
    await fill(server.url, 50)
    login = {"user": "reader", "password": "r", "api_prefix": "JS.owner.API"}
    configuration = config(server.url, archive, nats=login)
    await capture_all(configuration)
    assert [row["_nats_seq"] for row in rows(archive)] == list(range(1, 51))
    proof = await verify(configuration)
    assert proof.exit_code() == 0, proof.as_text()


async def check_without_acks(server: NatsServer, archive: Path) -> None:
    await capture_imported(server, archive)
    login = {"user": "deaf", "password": "d", "api_prefix": "JS.owner.API"}
    problems = (await check(config(server.url, archive, nats=login))).problems
    text = f"nobody receives acknowledgements to $JS.ACK.{STREAM}.{CONSUMER}.>; import $JS.ACK.>"
    assert [each.text for each in problems] == [text]


def test_check_names_an_account_that_does_not_import_the_acknowledgements(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    asyncio.run(check_without_acks(nats_server(ACCOUNTS), tmp_path / "archive"))
