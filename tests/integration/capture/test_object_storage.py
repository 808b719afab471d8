"""The whole capture on real object storage: killed, and with credentials that are exchanged under it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.storage.blob import BlobServiceClient

from jetcapture_py.archive import layout
from tests.support import azurite
from tests.support.drivers import options_for
from tests.support.nats_server import NatsServer
from tests.support.outages import BUCKET, bodies, make_bucket, readiness
from tests.support.ports import free_port
from tests.support.running import STREAM, Command, consumer, publish, settings, until
from tests.support.versity import Versity, options

Start = Callable[..., NatsServer]
MESSAGES = 20_000


@dataclass
class Storage:
    """A place for an archive, and everything that lies in it, by path below its root."""

    url: str
    options: dict[str, Any]
    read: Callable[[], Iterator[tuple[layout.ObjectName, bytes]]]


@pytest.fixture
def versity(tmp_path: Path) -> Iterator[Versity]:
    """A real S3 server with a bucket."""
    with Versity(tmp_path / "s3") as server:
        make_bucket(server)
        yield server


@pytest.fixture
def s3(versity: Versity) -> Storage:
    """A real S3 server."""
    return Storage(f"s3://{BUCKET}/nats", options(versity.endpoint), lambda: bodies(versity))


@pytest.fixture
def azure(tmp_path: Path) -> Iterator[Storage]:
    """Azurite."""
    (tmp_path / "azurite").mkdir()
    with (
        azurite.serve(tmp_path / "azurite") as connection,
        BlobServiceClient.from_connection_string(connection) as service,
        service.create_container(BUCKET) as container,
    ):

        def read() -> Iterator[tuple[layout.ObjectName, bytes]]:
            for blob in container.list_blobs(f"nats/{STREAM}/"):
                name = layout.parse_path(blob.name.removeprefix("nats/"))
                assert name is not None, blob.name
                yield name, container.download_blob(blob.name).readall()

        yield Storage(f"az://{BUCKET}/nats", {"connection_string": connection}, read)


@pytest.fixture(params=["obstore", pytest.param("fsspec", marks=pytest.mark.exhaustive)])
def driver(request: pytest.FixtureRequest) -> str:
    """What stores."""
    return str(request.param)


def stored_by(command: Command) -> int:
    """How many messages its log says are stored."""
    return sum(int(each["messages"]) for each in command.events("blocks.stored"))


@pytest.mark.parametrize("storage", ["s3", pytest.param("azure", marks=pytest.mark.exhaustive)])
def test_a_capture_that_is_killed_again_and_again_loses_nothing(
    nats_server: Start, tmp_path: Path, request: pytest.FixtureRequest, storage: str, driver: str
) -> None:
    place: Storage = request.getfixturevalue(storage)
    server, source = nats_server(), random.Random(7)
    payloads = [b"%d %b" % (index, source.randbytes(200)) for index in range(MESSAGES)]
    configuration = settings(
        server.url,
        place.url,
        store={"options": options_for(driver, place.options), "driver": driver},
        source={"ack_wait": "2s", "batch": 500, "max_ack_pending": 3000},
        key="{subject[1]}",
        block={"max_age": "0.3s"},
    )
    messages = [(f"orders.k{index % 5}", payload, None) for index, payload in enumerate(payloads)]
    asyncio.run(publish(server.url, messages))

    async def killed() -> None:
        with Command(tmp_path, configuration) as command:
            for life in range(4):
                stored = stored_by(command) if life else 0

                def more(stored: int = stored) -> bool:
                    return stored_by(command) > stored

                command.start()
                await until(more, "it stores")
                command.kill()

    asyncio.run(killed())
    assert asyncio.run(consumer(server.url)).num_pending > 0, "there was nothing left to be killed in"
    with Command(tmp_path, configuration, "last") as command:
        command.start("--until-caught-up")
        assert command.wait() == 0, command.log[-2000:]
    found: dict[int, bytes] = {}
    for name, body in place.read():
        table = pq.read_table(pa.BufferReader(body))
        assert table.num_rows == name.rows
        for row in table.select([layout.SEQ, layout.PAYLOAD]).to_pylist():
            assert found.setdefault(row[layout.SEQ], row[layout.PAYLOAD]) == row[layout.PAYLOAD]
    assert [found[seq] for seq in sorted(found)] == payloads


def test_credentials_exchanged_under_a_running_capture_are_picked_up_and_said_to_be_missing_until_then(
    nats_server: Start, tmp_path: Path, versity: Versity, driver: str
) -> None:
    versity.add_user("first", "first-secret")
    server, port = nats_server(), free_port()
    for part in ("key", "secret"):
        (tmp_path / part).write_text("first" if part == "key" else "first-secret")
    files = {f"{part}_file": str(tmp_path / part) for part in ("key", "secret")}
    client = options(versity.endpoint)["client_kwargs"]
    configuration = settings(
        server.url,
        f"s3://{BUCKET}/nats",
        store={"options": options_for(driver, {**files, "client_kwargs": client}), "driver": driver},
        source={"ack_wait": "2s"},
        block={"max_age": "0.2s"},
        http={"listen": f"127.0.0.1:{port}"},
    )

    async def scenario() -> None:
        await publish(server.url, [("orders.a", b"%d" % index, None) for index in range(100)])
        with Command(tmp_path, configuration) as command:
            command.start()
            await until(lambda: any(command.events("blocks.stored")), "it stores")
            versity.remove_user("first")
            await publish(server.url, [("orders.a", b"%d" % index, None) for index in range(100, 200)])
            await until(
                lambda: f"cannot write s3://{BUCKET}/nats/{STREAM}" in readiness(port)[1],
                "it says why",
            )
            (refused, *_) = command.events("store.failed")
            assert refused["level"] == "error"
            assert "Access Key Id you provided does not exist" in refused["error"]
            versity.add_user("second", "second-secret")
            (tmp_path / "key").write_text("second")
            (tmp_path / "secret").write_text("second-secret")
            await until(lambda: any(command.events("store.recovered")), "it stores again", timeout=40)
            await until(lambda: readiness(port)[0] == 200, "it is ready again")
            assert "first-secret" not in command.log
            command.process.terminate()
            assert command.wait() == 0
            assert "second-secret" not in command.log
        state = await consumer(server.url)
        assert (state.num_pending, state.num_ack_pending, state.delivered.consumer_seq) == (0, 0, 200)

    asyncio.run(scenario())
    stored: Counter[int] = Counter()
    for _, body in bodies(versity):
        stored.update(pq.read_table(pa.BufferReader(body), columns=[layout.SEQ]).column(0).to_pylist())
    assert stored == dict.fromkeys(range(1, 201), 1)
