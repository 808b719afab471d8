"""Every example is checked, and what can run here runs: against a real server, and S3 as moto plays it."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import io
import json
import os
import re
import shlex
import sqlite3
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import boto3  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from moto.server import ThreadedMotoServer
from nats.js.errors import NotFoundError

from examples.hooks import SqliteStore
from jetcapture_py import PermanentStoreError, StoreError
from jetcapture_py.archive import layout, watermark
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config import model
from jetcapture_py.config.units import parse_size
from jetcapture_py.monitoring.facts import (
    MaintenanceState,
    TableState,
    capture_metrics,
    gather,
    maintenance_metrics,
    this_process,
)
from jetcapture_py.monitoring.history import History
from tests.support.commands import check_jetcapture
from tests.support.nats_server import NatsServer
from tests.support.running import connection, consumer, publish, rows, settings, until

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {"NATS_URL": "tls://nats.example.com:4222", "NATS_PASSWORD": "secret", "ARCHIVE_BUCKET": "archive"}


def jetcapture(path: Path, environment: dict[str, str]) -> None:
    """Run the command until it is caught up."""
    words = [sys.executable, "-m", "jetcapture_py", "run", str(path), "--until-caught-up"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_configuration_is_valid() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        assert model.load(path, ENVIRONMENT).warnings() == (), path


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
    entries = {entry["Key"]: entry for entry in client.list_objects_v2(Bucket="archive")["Contents"]}
    assert entries.pop(f"nats/{watermark.path('ORDERS', 'archive')}")
    (note,) = (path for path in entries if path.startswith("nats/_streams/ORDERS/"))
    del entries[note]
    for entry in entries.values():
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


def test_the_arrow_writer_gives_files_that_are_read_and_proven_by_their_names(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    orders = [
        {"order_id": f"o-{number}", "placed_at": f"2026-05-01T{12 - number % 2}:30:00Z", "amount": number / 4}
        for number in range(100)
    ]
    asyncio.run(publish(server.url, [("orders.eu", json.dumps(order).encode(), None) for order in orders]))
    environment = {"NATS_URL": server.url, "ARCHIVE": str(archive), "PYTHONPATH": str(EXAMPLES)}
    jetcapture(EXAMPLES / "arrow.yaml", environment)

    files = sorted(archive.glob("ORDERS/*/*/*/*.arrow"))
    tables = [pa.ipc.open_file(path).read_all() for path in files]
    found = {row["order_id"]: row for table in tables for row in table.to_pylist()}
    assert {name: float(row["amount"]) for name, row in found.items()} == {
        order["order_id"]: order["amount"] for order in orders
    }

    def verify() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "jetcapture_py", "verify", str(EXAMPLES / "arrow.yaml")]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
        )

    assert verify().stdout.startswith("complete: every one of 100 messages")
    files[0].unlink()
    assert verify().returncode == 1


def test_the_example_of_a_bucket_has_every_change_of_every_key(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, archive = nats_server(), tmp_path / "archive"

    async def use() -> None:
        async with connection(server.url) as client:
            bucket = await client.jetstream().create_key_value(bucket="settings", history=5)
            await bucket.put("auth.user", b'{"name": "ada"}')
            await bucket.put("auth.user", b"not JSON")
            await bucket.delete("auth.user")
            await bucket.purge("limits")

    asyncio.run(use())
    jetcapture(EXAMPLES / "bucket.yaml", {"NATS_URL": server.url, "ARCHIVE": str(archive)})
    names = ("key", "key_name", "operation", "revision", "name")
    assert [tuple(row[name] for name in names) for row in rows(archive)] == [
        (None, "auth.user", "put", 1, "ada"),
        (None, "auth.user", "delete", 3, None),
        (None, "limits", "purge", 4, None),
    ]
    assert [row[layout.SEQ] for row in rows(archive, quarantine=True)] == [2]


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


def test_the_example_of_jet_capture_gives_gzipped_csv_in_one_folder_per_region(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = nats_server()
    people = [
        ("Ada", "Lovelace", "eu"),
        ("Grace", 'Hopper, "Amazing"', "us"),
        ("Edsger", "Dijkstra", "eu"),
        ("Line\nbreak", "Müller", "eu"),
    ]
    names = ("first_name", "last_name", "region")
    sent = [("people", json.dumps(dict(zip(names, person, strict=True))).encode(), None) for person in people]
    asyncio.run(publish(server.url, [*sent, ("people", b"not JSON", None)], subjects=("people",)))
    text = (EXAMPLES / "from-jet-capture.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(
        text.replace("nats://127.0.0.1:4222", server.url).replace("/var/lib/jetcapture", str(tmp_path / "backup"))
    )
    jetcapture(path, {})
    found: dict[str, list[tuple[str, ...]]] = {}
    for file in (tmp_path / "backup").glob("*/ORDERS/key=*/date=*/hour=*/*.csv.gz"):
        region = file.relative_to(tmp_path / "backup").parts[0]
        with gzip.open(file, "rt", encoding="utf-8", newline="") as opened:
            found[region] = [tuple(row[name] for name in names) for row in csv.DictReader(opened)]
    assert found == {region: [each for each in people if each[2] == region] for region in ("eu", "us")}


def test_the_own_store_and_the_function_for_stored_objects_have_every_object(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, database, noted = nats_server(), tmp_path / "archive.db", tmp_path / "stored.jsonl"
    sent = [(f"orders.{number % 3}", b"%d" % number, None) for number in range(300)]
    asyncio.run(publish(server.url, sent))
    own = {"store": {"type": "examples.hooks:SqliteStore"}, "on_stored": {"call": "examples.hooks:note_in_file"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, f"sqlite://{database}", **own)))
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    for _ in range(2):  # the second one has nothing to store
        jetcapture(path, {"PYTHONPATH": python_path, "STORED_OBJECTS": str(noted)})
    with contextlib.closing(sqlite3.connect(database)) as connection:
        found = dict(connection.execute("SELECT path, data FROM objects"))
    lines = {entry["path"]: entry for entry in map(json.loads, noted.read_text().splitlines())}
    assert lines.keys() == found.keys()
    payloads = []
    for name, data in found.items():
        assert lines[name]["bytes"] == len(data)
        assert lines[name]["location"] == f"{database}#{name}"
        payloads += pq.read_table(io.BytesIO(data)).column(layout.PAYLOAD).to_pylist()
    assert sorted(payloads) == sorted(payload for _, payload, _ in sent)


def test_the_own_store_says_what_can_be_tried_again_and_what_not(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(PermanentStoreError, match="file is not a database"):
        SqliteStore(f"sqlite://{tmp_path / 'other.db'}", {}).probe()
    store = SqliteStore(f"sqlite://{tmp_path / 'archive.db'}", {"timeout": 0})
    store.probe()
    with contextlib.closing(sqlite3.connect(tmp_path / "archive.db")) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="database is locked") as caught:
            store.probe()
    assert not isinstance(caught.value, PermanentStoreError)


KUBERNETES = EXAMPLES / "kubernetes"
CONFIG_MAPS = {
    each["metadata"]["name"]: each["data"]
    for path in KUBERNETES.glob("*.yaml")
    for each in yaml.safe_load_all(path.read_text())
    if each["kind"] == "ConfigMap"
}


def workload(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The files that the pod of a Kubernetes example has as its configuration, and the pod."""
    documents = {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / name).read_text())}
    documents.pop("ConfigMap", None)
    ((kind, other),) = documents.items()
    spec = other["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else other["spec"]
    if kind == "Deployment":
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
    pod = spec["template"]["spec"]
    (mounted,) = (volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume)
    return CONFIG_MAPS[mounted], pod


WORKLOADS = sorted(path.name for path in KUBERNETES.glob("*.yaml"))
CAPTURES = ["cronjob.yaml", "deployment.yaml"]
SCHEDULED = [name for name in WORKLOADS if name not in CAPTURES]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_finds_its_valid_configuration_and_may_do_no_more_than_it_needs(name: str) -> None:
    files, pod = workload(name)
    (container,) = pod["containers"]
    ((file, text),) = files.items()
    loaded = model.loads(text, {each["name"]: each["value"] for each in container["env"]})
    mounts = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["tmp"] == {"name": "tmp", "emptyDir": {}}
    assert mounts["tmp"] == PurePosixPath("/tmp")
    words = " ".join(container["args"]).replace("=", " ").split()
    assert str(mounts["config"] / file) in words
    needed = 2 << 30  # Java's heap, and the Python workers
    if name in CAPTURES:
        assert words[0] == "run"
        assert ("--until-caught-up" in words) is (name == "cronjob.yaml")
        assert pod["terminationGracePeriodSeconds"] > loaded.drain_timeout
        needed = loaded.limits.memory
    assert parse_size(f"{container['resources']['limits']['memory']}B") > needed
    if name in CAPTURES or "--to-nats" in words:
        assert loaded.nats.creds is not None
        assert mounts["nats"] == PurePosixPath(loaded.nats.creds).parent
    if name == "deployment.yaml":
        (port,) = container["ports"]
        assert loaded.http is not None
        assert loaded.http.listen == f":{port['containerPort']}"
        for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_scheduled_pod_runs_a_job_with_arguments_that_it_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SCHEDULED:
        files, pod = workload(name)
        (container,) = pod["containers"]
        ((file, text),) = files.items()
        (tmp_path / file).write_text(text)
        for each in container["env"]:
            monkeypatch.setenv(each["name"], each["value"])
        (mounted,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "config")
        check_jetcapture([word.replace(mounted, str(tmp_path)) for word in container["args"]])
        # the image has no packages for Spark's own reader
        assert container["args"][1] == "compact" or "--engine=arrow" in container["args"]


def test_the_crontab_runs_jobs_with_arguments_that_they_understand(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((EXAMPLES / "minimal.yaml").read_text())
    lines = [line for line in (EXAMPLES / "crontab").read_text().splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]+=", line))
    jobs = [line.split(maxsplit=5) for line in lines if line.partition("=")[0] not in variables]
    assert {"CONFIG", "JETCAPTURE"} == variables.keys()
    assert len(jobs) == 3
    for *when, command in jobs:
        assert all(re.fullmatch(r"\*|[0-9]+", field) for field in when)
        assert "%" not in command  # cron would take it for the end of the line
        words = shlex.split(command.replace("$CONFIG", str(path)))
        assert words[0] == "$JETCAPTURE"
        check_jetcapture(words[1:])


def test_an_image_has_the_extras_that_there_are_and_every_pod_uses_one() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [set(extras.split(",")) for extras in re.findall(r"'\.\[(.+?)\]'", text)]
    common = {"s3", "azure", "fast", "avro", "protobuf", "query", "table"}
    assert installed == [common, {"spark", *common}]
    assert all(extras <= known.keys() for extras in installed)
    assert "\nFROM base AS spark\n" in text
    for name in WORKLOADS:
        (container,) = workload(name)[1]["containers"]
        image = "jetcapture-spark" if name in SCHEDULED else "jetcapture"
        assert container["image"] == f"{image}:{version('jetcapture')}"


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    async def known() -> dict[str, set[str]]:
        observed = Capture(model.loads((EXAMPLES / "minimal.yaml").read_text()))
        found = {"jetcapture_lag_seconds": set[str](), "jetcapture_consumer_unacked_messages": set[str]()}
        found["jetcapture_captures_failed"] = set()  # with several captures
        found["jetcapture_consumer_max_ack_pending"] = set()  # these once the consumer is known
        found["jetcapture_block_max_age_seconds"] = found["jetcapture_stream_max_age_seconds"] = set()
        found["jetcapture_consumer_pending_messages"] = found["jetcapture_watermark_timestamp_seconds"] = set()
        table = TableState(name="nats.orders", snapshot=None, files=0, waiting=0, renamed=0, complete_to=None)
        maintained = maintenance_metrics({"orders": MaintenanceState(stream="ORDERS", tables=(table,))})
        captured = capture_metrics({"": gather(History(observed), this_process())})
        for metric in (*captured.collect(), *maintained.collect()):
            for sample in metric.samples:
                found.setdefault(sample.name, set()).update(sample.labels.values())
        return found

    metrics = asyncio.run(known())
    (group,) = yaml.safe_load((EXAMPLES / "monitoring" / "alerts.yaml").read_text())["groups"]
    assert len(group["rules"]) >= 8
    for rule in group["rules"]:
        asked = re.findall(r"jetcapture_\w+", rule["expr"])
        assert asked
        assert metrics.keys() >= set(asked)
        for name, reason in re.findall(r'(jetcapture_\w+)\{reason="(\w+)"\}', rule["expr"]):
            assert reason in metrics[name]
        assert rule["labels"]["severity"] in ("page", "ticket")
    board = json.loads((EXAMPLES / "monitoring" / "grafana.json").read_text())
    asked = re.findall(r"jetcapture_\w+", json.dumps([panel.get("targets") for panel in board["panels"]]))
    assert len(asked) >= 20
    assert metrics.keys() >= set(asked)
