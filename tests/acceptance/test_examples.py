"""Every example is checked, and what can run here runs: against a real server, and S3 as moto plays it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import boto3  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest
import yaml
from moto.server import ThreadedMotoServer
from nats.js.errors import NotFoundError

from jetcapture_py import config, layout
from jetcapture_py.units import parse_size
from tests.support.nats_server import NatsServer
from tests.support.running import consumer, publish, rows, settings, until

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {"NATS_URL": "tls://nats.example.com:4222", "NATS_PASSWORD": "secret", "ARCHIVE_BUCKET": "archive"}


def jetcapture(path: Path, environment: dict[str, str]) -> None:
    """Run the command until it is caught up."""
    words = [sys.executable, "-m", "jetcapture_py", "run", str(path), "--until-caught-up"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_is_valid(path: Path) -> None:
    assert config.load(path, ENVIRONMENT).warnings() == ()


def test_the_minimal_configuration_archives_a_stream(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, [("orders.new", b"%d" % number, None) for number in range(10)]))
    text = (EXAMPLES / "minimal.yaml").read_text()
    for default, here in (
        ("nats://127.0.0.1:4222", server.url),
        ("file:///var/lib/jetcapture", (tmp_path / "archive").as_uri()),
    ):
        assert text.count(default) == 1
        text = text.replace(default, here)
    path = tmp_path / "minimal.yaml"
    path.write_text(text)
    jetcapture(path, {})
    assert [row[layout.PAYLOAD] for row in rows(tmp_path / "archive")] == [b"%d" % number for number in range(10)]


@pytest.fixture
def s3() -> Iterator[str]:
    """An S3 of its own; its address."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_the_s3_configuration_needs_only_its_environment(nats_server: Callable[..., NatsServer], s3: str) -> None:
    server = nats_server('authorization { user: "archive", password: "from-env" }')
    order = {
        "order_id": "o-1",
        "region": "eu",
        "amount": 12.5,
        "placed_at": "2026-05-01T12:00:00Z",
        "customer": {"id": "c-7"},
        "updated": 1777636800123,
        "items": [{"sku": "s", "quantity": 2}],
    }
    sent = [
        ("orders.eu.placed", json.dumps(order).encode(), None),
        ("orders.us.changed", json.dumps({**order, "region": "us"}).encode(), None),
        ("orders.eu.placed", json.dumps({**order, "amount": "a lot"}).encode(), None),
        ("orders.eu.viewed", b"not captured", None),
    ]
    asyncio.run(publish(server.url.replace("://", "://archive:from-env@"), sent))
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3, **keys)
    client.create_bucket(Bucket="archive")

    jetcapture(
        EXAMPLES / "orders-s3.yaml",
        {
            "NATS_URL": server.url,
            "NATS_PASSWORD": "from-env",
            "ARCHIVE_BUCKET": "archive",
            "S3_ACCESS_KEY": "key",
            "S3_SECRET_KEY": "secret",
            "S3_ENDPOINT": s3,
        },
    )

    found: dict[str | None, list[dict[str, Any]]] = {}
    for entry in client.list_objects_v2(Bucket="archive")["Contents"]:
        name = layout.parse_path(entry["Key"].removeprefix("nats/"))
        assert name is not None, entry["Key"]
        body = client.get_object(Bucket="archive", Key=entry["Key"])["Body"].read()
        found[None if name.quarantine else name.key] = pq.read_table(io.BytesIO(body)).to_pylist()
    client.close()
    assert found.keys() == {"eu", "us", None}
    (row,) = found["eu"]
    assert (row["amount"], row["customer"], row["items"]) == (12.5, "c-7", [{"sku": "s", "quantity": 2}])
    assert row["placed_at"].isoformat() == "2026-05-01T12:00:00+00:00"
    assert row["updated_at"].isoformat() == "2026-05-01T12:00:00.123000+00:00"
    (broken,) = found[None]
    assert broken[layout.PAYLOAD] == sent[2][1]


READINGS = [(1_777_636_800_000_000 + number, number / 4) for number in range(5)]


def test_the_custom_decoder_gives_a_row_for_each_reading(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    packed = [struct.pack("<qd", at, value) for at, value in READINGS]
    sent = [
        ("readings.hall-1", b"".join(packed[:3]), None),
        ("readings.hall-1", packed[0][:-1], None),
        ("readings.hall-2", b"", None),
        ("readings.roof-1", b"".join(packed[3:]), None),
        ("readings.other", packed[0], None),
    ]
    server, archive = nats_server(), tmp_path / "archive"
    path = tmp_path / "readings.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, archive, block={"max_age": "200ms"})))

    async def capture() -> tuple[int, str]:
        await publish(server.url, sent, subjects=("readings.>",))
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLES / "custom_decoder.py"), str(path), stderr=asyncio.subprocess.PIPE
        )

        async def acknowledged() -> bool:
            assert process.returncode is None
            with contextlib.suppress(NotFoundError):  # until the capture has created it
                return bool((await consumer(server.url)).ack_floor.stream_seq == len(sent))
            return False

        await until(acknowledged, "everything is acknowledged")
        process.terminate()
        _, errors = await process.communicate()
        return process.returncode or 0, errors.decode()

    code, errors = asyncio.run(capture())
    assert code == 0, errors
    found = [
        (row["key"], row[layout.SEQ], row.get(layout.ROW), int(row["at"].timestamp() * 1e6), row["value"])
        for row in rows(archive)
    ]
    assert found == [
        ("hall", 1, 0, *READINGS[0]),
        ("hall", 1, 1, *READINGS[1]),
        ("hall", 1, 2, *READINGS[2]),
        ("roof", 4, 0, *READINGS[3]),
        ("roof", 4, 1, *READINGS[4]),
        (None, 5, 0, *READINGS[0]),
    ]
    quarantined = {row[layout.SEQ]: row[layout.ERROR] for row in rows(archive, quarantine=True)}
    assert quarantined == {
        2: "15 bytes are not one or more readings of 16",
        3: "0 bytes are not one or more readings of 16",
    }


def workload(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the pod of a Kubernetes example."""
    documents = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())}
    config_map = documents.pop("ConfigMap")
    ((kind, other),) = documents.items()
    spec = other["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else other["spec"]
    if kind == "Deployment":
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
    return config_map, spec["template"]["spec"]


WORKLOADS = sorted(path.name for path in (EXAMPLES / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_finds_its_valid_configuration(name: str) -> None:
    config_map, pod = workload(name)
    (container,) = pod["containers"]
    ((file, text),) = config_map["data"].items()
    loaded = config.loads(text, {each["name"]: each["value"] for each in container["env"]})
    mounts = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert container["args"][:2] == ["run", str(mounts["config"] / file)]
    assert ("--until-caught-up" in container["args"]) is (name == "cronjob.yaml")
    assert loaded.nats.creds is not None
    assert mounts["nats"] == PurePosixPath(loaded.nats.creds).parent
    assert volumes["tmp"] == {"name": "tmp", "emptyDir": {}}
    assert mounts["tmp"] == PurePosixPath("/tmp")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_may_do_little_and_has_time_and_memory_enough(name: str) -> None:
    config_map, pod = workload(name)
    (container,) = pod["containers"]
    (text,) = config_map["data"].values()
    loaded = config.loads(text, {each["name"]: each["value"] for each in container["env"]})
    assert pod["terminationGracePeriodSeconds"] > loaded.drain_timeout
    assert parse_size(f"{container['resources']['limits']['memory']}B") > loaded.limits.memory
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
