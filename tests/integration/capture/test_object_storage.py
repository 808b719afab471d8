"""The whole capture on real object storage: killed, and with credentials that are exchanged under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from tests.support.drivers import options_for
from tests.support.nats_server import NatsServer
from tests.support.outages import BUCKET, bodies, make_bucket, readiness
from tests.support.ports import free_port
from tests.support.running import STREAM, Command, consumer, publish, settings, until
from tests.support.versity import Versity, options


@pytest.fixture
def versity(tmp_path: Path) -> Iterator[Versity]:
    """A real S3 server with a bucket."""
    with Versity(tmp_path / "s3") as server:
        make_bucket(server)
        yield server


@pytest.fixture(params=["obstore", pytest.param("fsspec", marks=pytest.mark.exhaustive)])
def driver(request: pytest.FixtureRequest) -> str:
    """What stores."""
    return str(request.param)


async def test_credentials_exchanged_under_a_running_capture_are_picked_up_and_said_to_be_missing_until_then(
    server: NatsServer, tmp_path: Path, versity: Versity, driver: str
) -> None:
    versity.add_user("first", "first-secret")
    port = free_port()
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
    await publish(server.url, [("orders.a", b"%d" % index, None) for index in range(100)])
    with Command(tmp_path, configuration) as command:
        command.start()
        await until(lambda: any(command.events("blocks.stored")), "it stores")
        versity.remove_user("first")
        await publish(server.url, [("orders.a", b"%d" % index, None) for index in range(100, 200)])
        await until(lambda: f"cannot write s3://{BUCKET}/nats/{STREAM}" in readiness(port)[1], "it says why")
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
    stored: Counter[int] = Counter()
    for _, body in bodies(versity):
        stored.update(pq.read_table(pa.BufferReader(body), columns=[layout.SEQ]).column(0).to_pylist())
    assert stored == dict.fromkeys(range(1, 201), 1)
