"""One store of each kind, each with a place of its own to look at without the store's help."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import boto3  # type: ignore[import-untyped]
import pytest
from azure.storage.blob import BlobServiceClient

from jetcapture_py.archive.layout import MARKER
from jetcapture_py.store import Store, open_store
from tests.simulation.local import patches
from tests.simulation.store import Answer, Files, Operation, StoredFile
from tests.support import azurite, gcs
from tests.support import s3 as servers
from tests.support.drivers import options_for
from tests.support.versity import Versity, options

S3_OPTIONS: dict[str, Any] = {
    "key": "dummy",
    "secret": "dummy",  # moto takes any
    "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 30},
}

LONG = {
    "test_a_process_killed_in_an_upload_leaves_nothing",
    "test_a_server_that_never_answers_is_given_up",
    "test_a_slow_upload_is_not_taken_for_silence",
    "test_an_azure_object_sent_in_blocks_is_not_written_again_either",
}
"""Tests of which `make test` runs one driver's."""
WITHOUT_DRIVER = ("local", "simulated", "simulated_local")
SERVERS = {"real_s3", "azure", "azure_connection", "google", "served", "keeping"}
"""Fixtures of servers that are missing on most machines."""


class Place(ABC):
    """Where a store under test keeps its objects; `url` is its root."""

    url: str
    options: Mapping[str, Any]
    driver = "fsspec"

    def open(self, suffix: str = "", options: Mapping[str, Any] | None = None) -> Store:
        """A store for `url` with `suffix`, and with other options than the place's."""
        return open_store(self.url + suffix, self.options if options is None else options_for(self.driver, options))

    def speak(self, driver: str) -> Self:
        """Be reached through another driver."""
        self.driver, self.options = driver, options_for(driver, self.options)
        return self

    @abstractmethod
    def objects(self) -> dict[str, bytes]:
        """Everything that lies there, by path relative to `url`."""


@dataclass
class LocalPlace(Place):
    root: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"file://{self.root}"

    def leave(self, path: str, age: float) -> None:
        """Leave a file of this age there."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)

    def objects(self) -> dict[str, bytes]:
        files = [path for path in self.root.rglob("*") if not path.is_dir() and path.name != MARKER]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}


@dataclass
class S3Place(Place):
    client: Any
    bucket: str
    options: Mapping[str, Any]

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"s3://{self.bucket}/archive"

    def objects(self) -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        bodies = [self.client.get_object(Bucket=self.bucket, Key=name)["Body"] for name in names]
        return {name.removeprefix("archive/"): body.read() for name, body in zip(names, bodies, strict=True)}


@contextlib.contextmanager
def bucket(endpoint: str, options: Mapping[str, Any]) -> Iterator[S3Place]:
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )
    name = f"bucket-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    yield S3Place(client, name, {**S3_OPTIONS, **options})
    client.close()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """The address of moto's server, which speaks S3 and believes everybody."""
    with servers.serve() as endpoint:
        yield endpoint


@pytest.fixture(params=["fsspec", "obstore"])
def driver(request: pytest.FixtureRequest) -> str:
    """What stores in places that are not local."""
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Local stores and Google have one driver. What takes long is tried with one in `make test`, and what needs
    another server than moto is in the exhaustive tier."""
    for item in list(items):
        if Path(__file__).parent not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        only = {"google": "obstore", **dict.fromkeys(WITHOUT_DRIVER, "fsspec")}.get(str(params.get("place")))
        driver = params.get("driver")
        if only and driver not in (None, only):
            items.remove(item)
            continue
        elsewhere = not SERVERS.isdisjoint({*map(str, params.values()), *item.fixturenames})
        if elsewhere or (driver == "obstore" and item.originalname in LONG):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def moto(moto_endpoint: str, driver: str) -> Iterator[S3Place]:
    with bucket(moto_endpoint, {**S3_OPTIONS, "client_kwargs": {"endpoint_url": moto_endpoint}}) as place:
        yield place.speak(driver)


@pytest.fixture(scope="session")
def versity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versity]:
    """A real S3 server, for all tests that do it no harm."""
    with Versity(tmp_path_factory.mktemp("versity")) as server:
        yield server


@pytest.fixture
def real_s3(versity: Versity, driver: str) -> Iterator[S3Place]:
    with bucket(versity.endpoint, options(versity.endpoint)) as place:
        yield place.speak(driver)


@pytest.fixture(params=["moto", "real_s3"])
def s3(request: pytest.FixtureRequest, driver: str) -> S3Place:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, S3Place)
    return found


@dataclass
class AzurePlace(Place):
    """A container of a server that speaks Azure's blob storage."""

    client: Any
    options: Mapping[str, Any]

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"az://{self.client.container_name}/archive"

    def objects(self) -> dict[str, bytes]:
        names = [str(blob.name) for blob in self.client.list_blobs()]
        return {name.removeprefix("archive/"): self.client.download_blob(name).readall() for name in names}


@pytest.fixture(scope="session")
def azure_connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """How to reach an Azurite that lives as long as the tests."""
    with azurite.serve(tmp_path_factory.mktemp("azurite")) as connection:
        yield connection


@pytest.fixture
def azure(azure_connection: str, driver: str) -> Iterator[AzurePlace]:
    with BlobServiceClient.from_connection_string(azure_connection) as service:
        container = service.create_container(f"container-{uuid.uuid4().hex}")
        yield AzurePlace(container, {"connection_string": azure_connection}).speak(driver)


@dataclass
class GcsPlace(Place):
    """A bucket of a server that speaks Google's XML API."""

    endpoint: str
    bucket: str
    options: Mapping[str, Any]

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"gs://{self.bucket}/archive"

    def objects(self) -> dict[str, bytes]:
        found = json.loads(gcs.request(self.endpoint, "GET", f"/storage/v1/b/{self.bucket}/o"))
        names = [str(item["name"]) for item in found.get("items", [])]
        paths = {name: f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}?alt=media" for name in names}
        return {name.removeprefix("archive/"): gcs.request(self.endpoint, "GET", path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def gcs_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that lives as long as the tests."""
    with gcs.serve(tmp_path_factory.mktemp("gcs")) as endpoint:
        yield endpoint


@pytest.fixture
def google(gcs_endpoint: str) -> GcsPlace:
    name = f"bucket-{uuid.uuid4().hex}"
    gcs.request(gcs_endpoint, "POST", "/storage/v1/b?project=tests", json.dumps({"name": name}).encode())
    options = {"driver": "obstore", "base_url": gcs_endpoint, "bearer_token": "any"}
    return GcsPlace(gcs_endpoint, name, options)


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "archive")


@dataclass
class SimulatedPlace(Place):
    """The store of `make simulate`, without its scheduler."""

    files: Files = field(default_factory=lambda: Files({}))
    options: Mapping[str, Any] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    @property
    def url(self) -> str:  # type: ignore[override]
        return "file:///archive" if self.is_local() else "simulated://archive"

    def is_local(self) -> bool:
        return self.files.store == "local"

    def objects(self) -> dict[str, bytes]:
        return {path.removeprefix("archive/"): file.content for path, file in self.files.files.items()}

    def leave(self, path: str, age: float) -> None:
        self.files.files[f"archive/{path}"] = StoredFile(b"half", time.time() - age)

    def do(self, operation: Operation) -> Answer:
        if operation.kind == "lock":
            self.locks[operation.path].acquire()
        elif operation.kind == "unlock":
            self.locks[operation.path].release()
        with self.locks["/"]:
            return self.files.do(operation, time.time())


def _simulated(monkeypatch: pytest.MonkeyPatch, store: str) -> SimulatedPlace:
    place = SimulatedPlace(Files({}, store))
    for patch in patches(place.do, place.is_local):
        monkeypatch.setattr(*patch)
    return place


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedPlace:
    return _simulated(monkeypatch, "conditional")


@pytest.fixture
def simulated_local(monkeypatch: pytest.MonkeyPatch) -> SimulatedPlace:
    return _simulated(monkeypatch, "local")


@pytest.fixture(params=["local", "simulated", "simulated_local", "moto", "real_s3", "azure", "google"])
def place(request: pytest.FixtureRequest, driver: str) -> Place:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Place)
    return found
