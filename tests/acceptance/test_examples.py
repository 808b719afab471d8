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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from nats.js.errors import NotFoundError

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.config import model
from jetcapture_py.config.units import parse_size
from tests.acceptance.test_run import awaited
from tests.support import s3
from tests.support.commands import check_jetcapture
from tests.support.kubernetes import pod
from tests.support.nats_server import NatsServer
from tests.support.running import consumer, publish, rows, settings

Start = Callable[..., NatsServer]
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {"NATS_URL": "tls://nats.example.com:4222", "NATS_PASSWORD": "secret", "ARCHIVE_BUCKET": "archive"}


def jetcapture(path: Path, environment: dict[str, str], *command: str) -> str:
    """Run a command, or capture until caught up; what it prints."""
    arguments = [*command, str(path)] if command else ["run", str(path), "--until-caught-up"]
    words = [sys.executable, "-m", "jetcapture_py", *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_configuration_is_valid() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        assert model.load(path, ENVIRONMENT).warnings() == (), path


def test_the_s3_configuration_needs_only_its_environment(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server('authorization { user: "archive", password: "from-env" }')
    order: dict[str, Any] = {"order_id": "o-1", "region": "eu", "amount": 12.5, "placed_at": "2026-05-01T12:00:00Z"}
    order |= {"customer": {"id": "c-7"}, "updated": 1777636800123, "items": [{"sku": "s", "quantity": 2}]}
    sent = [
        ("orders.eu.placed", json.dumps(order).encode(), None),
        ("orders.us.changed", json.dumps({**order, "region": "us"}).encode(), None),
        ("orders.eu.placed", json.dumps({**order, "amount": "a lot"}).encode(), None),
        ("orders.eu.viewed", b"not captured", None),
    ]
    asyncio.run(publish(server.url.replace("://", "://archive:from-env@"), sent))
    with s3.serve() as endpoint:
        bucket = s3.upload(endpoint, tmp_path).split("/")[2]
        environment = {"NATS_URL": server.url, "NATS_PASSWORD": "from-env", "ARCHIVE_BUCKET": bucket}
        keys = {"S3_ACCESS_KEY": "dummy", "S3_SECRET_KEY": "dummy-secret", "S3_ENDPOINT": endpoint}
        jetcapture(EXAMPLES / "orders-s3.yaml", {**environment, **keys})
        options = {**s3.CREDENTIALS, "endpoint_url": endpoint}
        found, quarantined = (
            read_archive(f"s3://{bucket}/nats", "ORDERS", quarantine=bad, options=options).read_all().to_pylist()
            for bad in (False, True)
        )
    rows = {row["key"]: row for row in found}
    assert rows.keys() == {"eu", "us"}
    assert (rows["eu"]["amount"], rows["eu"]["customer"]) == (12.5, "c-7")
    assert rows["eu"]["items"] == [{"sku": "s", "quantity": 2}]
    assert rows["eu"]["placed_at"].isoformat() == "2026-05-01T12:00:00+00:00"
    assert rows["eu"]["updated_at"].isoformat() == "2026-05-01T12:00:00.123000+00:00"
    assert [row[layout.PAYLOAD] for row in quarantined] == [sent[2][1]]


def test_the_arrow_writer_gives_files_that_are_read_and_proven(nats_server: Start, tmp_path: Path) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    orders = b'{"order_id": "o-%d", "placed_at": "2026-05-01T%d:30:00Z", "amount": %d.25}'
    asyncio.run(publish(server.url, [("orders.eu", orders % (n, 12 - n % 2, n), None) for n in range(100)]))
    environment = {"NATS_URL": server.url, "ARCHIVE": str(archive), "PYTHONPATH": str(EXAMPLES)}
    jetcapture(EXAMPLES / "arrow.yaml", environment)
    files = sorted(archive.glob("ORDERS/*/*/*/*.arrow"))
    found = [row for path in files for row in pa.ipc.open_file(path).read_all().to_pylist()]
    assert {row["order_id"]: float(row["amount"]) for row in found} == {f"o-{n}": n + 0.25 for n in range(100)}
    assert jetcapture(EXAMPLES / "arrow.yaml", environment, "verify").startswith("complete: every one of 100 messages")


READINGS = [(1_777_636_800_000_000 + number, number / 4) for number in range(5)]


def test_the_custom_decoder_gives_a_row_for_each_reading(nats_server: Start, tmp_path: Path) -> None:
    packed = [struct.pack("<qd", at, value) for at, value in READINGS]
    payloads = [b"".join(packed[:3]), packed[0][:-1], b"", b"".join(packed[3:]), packed[0]]
    subjects = [f"readings.{device}" for device in ("hall-1", "hall-1", "hall-2", "roof-1", "other")]
    sent = [(subject, payload, None) for subject, payload in zip(subjects, payloads, strict=True)]
    server, archive = nats_server(), tmp_path / "archive"
    path = tmp_path / "readings.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, archive, block={"max_age": "200ms"})))
    asyncio.run(publish(server.url, sent, subjects=("readings.>",)))

    def acknowledged() -> bool:
        assert process.poll() is None
        with contextlib.suppress(NotFoundError):  # until the capture has created it
            return bool(asyncio.run(consumer(server.url)).ack_floor.stream_seq == len(sent))
        return False

    with subprocess.Popen([sys.executable, str(EXAMPLES / "custom_decoder.py"), str(path)]) as process:
        try:
            awaited(acknowledged, "everything is acknowledged")
        finally:
            process.terminate()
    assert process.returncode == 0
    decoded = [
        (each["key"], each[layout.SEQ], int(each["at"].timestamp() * 1e6), each["value"]) for each in rows(archive)
    ]
    keys = [("hall", 1), ("hall", 1), ("hall", 1), ("roof", 4), ("roof", 4), (None, 5)]
    assert decoded == [(*key, *reading) for key, reading in zip(keys, [*READINGS, READINGS[0]], strict=True)]
    wrong = "bytes are not one or more readings of 16"
    quarantined = {row[layout.SEQ]: row[layout.ERROR] for row in rows(archive, quarantine=True)}
    assert quarantined == {2: f"15 {wrong}", 3: f"0 {wrong}"}


def test_the_example_of_jet_capture_gives_gzipped_csv_by_region(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    people = [("Ada", "Lovelace", "eu"), ("Grace", 'Hopper, "Amazing"', "us"), ("Line\nbreak", "Müller", "eu")]
    names = ("first_name", "last_name", "region")
    sent = [("people", json.dumps(dict(zip(names, person, strict=True))).encode(), None) for person in people]
    asyncio.run(publish(server.url, [*sent, ("people", b"not JSON", None)], subjects=("people",)))
    text = (EXAMPLES / "from-jet-capture.yaml").read_text()
    path = tmp_path / "config.yaml"
    text = text.replace("nats://127.0.0.1:4222", server.url)
    path.write_text(text.replace("/var/lib/jetcapture", str(tmp_path / "backup")))
    jetcapture(path, {})
    found: dict[str, list[tuple[str, ...]]] = {}
    for file in (tmp_path / "backup").glob("*/ORDERS/key=*/date=*/hour=*/*.csv.gz"):
        region = file.relative_to(tmp_path / "backup").parts[0]
        with gzip.open(file, "rt", encoding="utf-8", newline="") as opened:
            found[region] = [tuple(row[name] for name in names) for row in csv.DictReader(opened)]
    assert found == {region: [each for each in people if each[2] == region] for region in ("eu", "us")}


def test_the_own_store_and_the_function_get_every_object(nats_server: Start, tmp_path: Path) -> None:
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


KUBERNETES = EXAMPLES / "kubernetes"
CAPTURES = ["cronjob.yaml", "deployment.yaml"]
CONFIG_MAPS = {
    each["metadata"]["name"]: each["data"]
    for path in KUBERNETES.glob("*.yaml")
    for each in yaml.safe_load_all(path.read_text())
    if each["kind"] == "ConfigMap"
}


@pytest.mark.parametrize("name", sorted(path.name for path in KUBERNETES.glob("*.yaml")))
def test_a_pod_finds_its_valid_configuration_and_may_do_no_more_than_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workload,) = (each for each in yaml.safe_load_all((KUBERNETES / name).read_text()) if each["kind"] != "ConfigMap")
    spec = pod(workload)
    (container,) = spec["containers"]
    (mounted,) = (volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume)
    ((file, text),) = CONFIG_MAPS[mounted].items()
    environment = {each["name"]: each["value"] for each in container["env"]}
    loaded = model.loads(text, environment)
    mounts = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert (volumes["tmp"], mounts["tmp"]) == ({"name": "tmp", "emptyDir": {}}, PurePosixPath("/tmp"))
    words = " ".join(container["args"]).replace("=", " ").split()
    assert str(mounts["config"] / file) in words
    image, needed = "jetcapture-spark", 2 << 30  # Java's heap, and the Python workers
    if name in CAPTURES:
        assert words[0] == "run"
        assert ("--until-caught-up" in words) is (name == "cronjob.yaml")
        assert spec["terminationGracePeriodSeconds"] > loaded.drain_timeout
        image, needed = "jetcapture", loaded.limits.memory
    else:
        (tmp_path / file).write_text(text)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        check_jetcapture([word.replace(str(mounts["config"]), str(tmp_path)) for word in container["args"]])
        # the image has no packages for Spark's own reader
        assert container["args"][1] == "compact" or "--engine=arrow" in container["args"]
    assert container["image"] == f"{image}:{version('jetcapture')}"
    assert parse_size(f"{container['resources']['limits']['memory']}B") > needed
    if name in CAPTURES or "--to-nats" in words:
        assert loaded.nats.creds is not None
        assert mounts["nats"] == PurePosixPath(loaded.nats.creds).parent
    if name == "deployment.yaml":
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (port,) = container["ports"]
        assert loaded.http is not None
        assert loaded.http.listen == f":{port['containerPort']}"
        for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert spec["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_crontab_runs_jobs_with_arguments_that_they_understand(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((EXAMPLES / "minimal.yaml").read_text())
    lines = [line for line in (EXAMPLES / "crontab").read_text().splitlines() if line and not line.startswith("#")]
    jobs = [line.split(maxsplit=5) for line in lines if not re.match(r"(CONFIG|JETCAPTURE)=", line)]
    assert len(jobs) == 3
    for *when, command in jobs:
        assert all(re.fullmatch(r"\*|[0-9]+", field) for field in when)
        assert "%" not in command  # cron would take it for the end of the line
        program, *words = shlex.split(command.replace("$CONFIG", str(path)))
        assert program == "$JETCAPTURE"
        check_jetcapture(words)


def test_an_image_has_the_extras_that_there_are() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [set(extras.split(",")) for extras in re.findall(r"'\.\[(.+?)\]'", text)]
    common = {"s3", "azure", "fast", "avro", "protobuf", "query", "table"}
    assert installed == [common, {"spark", *common}]
    assert all(extras <= known.keys() for extras in installed)
    assert "\nFROM base AS spark\n" in text
