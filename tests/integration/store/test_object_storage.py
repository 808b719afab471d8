"""What stores of objects must do when servers, networks, processes and credentials fail."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import ConfigError, PermanentStoreError, StoreError
from jetcapture_py.reading.plan import list_objects
from jetcapture_py.store import Store, change_note, open_store, ports
from jetcapture_py.store import credentials as renewal
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.credentials import RenewedDriver
from jetcapture_py.store.objects import ObjectStore
from tests.integration.store.conftest import AzurePlace, Place, S3Place
from tests.support.azurite import KEY as AZURE_KEY
from tests.support.drivers import options_for
from tests.support.links import Link
from tests.support.versity import Versity

NAME = ObjectName(
    stream="S",
    key="k",
    bucket=1_700_000_100,
    first_seq=1,
    last_seq=9,
    rows=9,
    digest="0123456789abcdef",
    quarantine=False,
)
LARGE = 101 << 20
"""From 100 MiB on, s3fs would send an object in parts."""


def put(store: Store, data: bytes) -> str:
    return store.put(NAME, pa.py_buffer(data))


@pytest.fixture(params=["simulated", "moto", "real_s3", "azure", "google"])
def remote_place(request: pytest.FixtureRequest, driver: str) -> Place:
    """A place of every kind that knows conditions."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Place)
    return found


@pytest.fixture(params=["real_s3", "azure"])
def served(request: pytest.FixtureRequest, driver: str) -> S3Place | AzurePlace:
    """A place on a server that others can be put before."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, S3Place | AzurePlace)
    return found


def port_of(place: S3Place | AzurePlace) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)", json.dumps(place.options))
    assert found is not None
    return int(found[1])


def through(place: S3Place | AzurePlace, port: int, **more: Any) -> dict[str, Any]:
    """The options to get there by way of another port."""
    there, here = f"http://127.0.0.1:{port_of(place)}", f"http://127.0.0.1:{port}"
    found = json.loads(json.dumps(place.options).replace(there, here))
    assert isinstance(found, dict)
    return {**found, **more}


def hurried(place: S3Place | AzurePlace, port: int, seconds: float) -> dict[str, Any]:
    """The same, with as much patience as that with a silent server."""
    if place.driver == "obstore":
        given = {"connect_timeout": "0.5s", "timeout": f"{seconds}s"}
        return through(place, port, client_options=given, retry_config={"max_retries": 0})
    if isinstance(place, S3Place):
        config = {"connect_timeout": 0.5, "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
        return through(place, port, config_kwargs=config)
    return through(place, port, connection_timeout=0.5, read_timeout=seconds)


def nothing_is_left(place: S3Place | AzurePlace) -> bool:
    if isinstance(place, S3Place) and place.client.list_multipart_uploads(Bucket=place.bucket).get("Uploads"):
        return False
    return not place.objects()


# ------------------------------------------------------------------ once


def test_an_object_that_is_there_is_not_written_again(remote_place: Place) -> None:
    location = put(remote_place.open(), b"first")
    assert put(remote_place.open(), b"second") == location
    assert remote_place.objects() == {NAME.path: b"first"}


def test_an_empty_object_is_read_and_moved_aside(remote_place: Place) -> None:
    store, files = remote_place.open(), ArchiveFiles(remote_place.url, remote_place.options)
    assert isinstance(store, ObjectStore)
    store.write_note("S/x.parquet", b"")
    (file,) = files.below("S")
    assert (files.read(file), list(files.footers([file]))) == (b"", [b""])
    files.move_aside(file)
    assert remote_place.objects() == {"S/.x.parquet.damaged": b""}


def test_a_key_that_marks_a_directory_is_no_file(s3: S3Place) -> None:
    for key in ("archive/ORDERS/", "archive/ORDERS/key=eu/", "archive/ORDERS/key=eu/note.txt"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    files = ArchiveFiles(s3.url, s3.options)
    assert [file.path for file in files.below("ORDERS")] == ["ORDERS/key=eu/note.txt"]
    assert list_objects(files, "ORDERS") == {}


def test_an_object_above_the_size_of_a_part_is_not_written_again_either(s3: S3Place) -> None:
    put(s3.open(), b"first")
    put(s3.open(), bytes(LARGE))
    assert s3.objects() == {NAME.path: b"first"}
    assert not s3.client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads")


def test_an_azure_object_sent_in_blocks_is_not_written_again_either(azure: AzurePlace) -> None:
    put(azure.open(), b"first")
    put(azure.open(), bytes(65 << 20))
    assert azure.objects() == {NAME.path: b"first"}


def test_an_object_whose_answer_was_lost_is_found_there_by_the_next_attempt(served: S3Place | AzurePlace) -> None:
    with Link(port_of(served), lose_answers=2) as link:
        store = served.open("", hurried(served, link.port, 10))
        for _ in range(3):
            with contextlib.suppress(StoreError):
                put(store, b"content")
                break
        else:
            pytest.fail("it was never stored")
        assert link.lose_answers == 0
        assert served.objects() == {NAME.path: b"content"}


class Simple(BaseHTTPRequestHandler):
    """An S3 server that knows of no conditions or, with `checksums`, of no checksums."""

    protocol_version = "HTTP/1.1"
    requests: list[str | None]
    kept: dict[str, bytes]
    refused = 501
    explained = True
    checksums = False
    read_only = False
    region = ""
    """Where the bucket is; "" for everywhere."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        condition = self.headers["If-None-Match"] or self.headers["If-Match"]
        self.requests.append(condition)
        unknown = any("checksum" in name.lower() for name in self.headers) if self.checksums else condition is not None
        answer, status = b"", 200
        if self._elsewhere():
            answer, status = b"<Error><Code>PermanentRedirect</Code></Error>", 301
        elif not (unknown or self.read_only) or self.region:
            self.kept[self.path] = body
        else:
            status = self.refused
            if self.explained:
                code = {400: "InvalidArgument", 405: "MethodNotAllowed", 501: "NotImplemented"}[status]
                answer = f"<Error><Code>{code}</Code><Message>A header is not known.</Message></Error>".encode()
        self.send_response(status)
        self.send_header("x-amz-bucket-region", self.region)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        self.wfile.write(answer)

    def _elsewhere(self) -> bool:
        return f"/{self.region}/" not in self.headers.get("Authorization", "") if self.region else False

    def do_GET(self) -> None:
        found = self.kept.get(self.path)
        self.send_response(301 if self._elsewhere() else 404 if found is None else 200)
        self.send_header("x-amz-bucket-region", self.region)
        self.send_header("Content-Length", str(len(found or b"")))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found or b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_request(self, *args: object) -> None:
        pass


@pytest.fixture
def simple() -> Iterator[tuple[int, type[Simple]]]:
    """The port of such a server, and what it was asked and keeps."""

    class Server(Simple):
        requests: list[str | None] = []  # noqa: RUF012  it is this test's own
        kept: dict[str, bytes] = {}  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, Server
        server.shutdown()
        thread.join()


def simple_options(port: int, driver: str) -> dict[str, Any]:
    options = {
        "key": "k",
        "secret": "s",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
        "config_kwargs": {"retries": {"total_max_attempts": 1}, "request_checksum_calculation": "when_required"},
    }
    return options_for(driver, options)


@pytest.mark.parametrize(("status", "explained"), [(400, True), (405, False), (501, True)])
def test_a_server_that_knows_no_conditions_is_asked_once_and_then_written_to_without(
    simple: tuple[int, type[Simple]], driver: str, status: int, monkeypatch: pytest.MonkeyPatch, *, explained: bool
) -> None:
    port, server = simple
    monkeypatch.setattr(renewal, "RENEW", 0.0)  # s3fs takes 405 for a missing permission
    server.refused, server.explained = status, explained
    store = open_store("s3://bucket", simple_options(port, driver))
    put(store, b"first")
    put(store, b"second")
    assert server.requests == ["*", None, None]
    assert list(server.kept.values()) == [b"second"]


def test_a_server_that_does_not_allow_writes_is_reported_at_once(simple: tuple[int, type[Simple]], driver: str) -> None:
    port, server = simple
    server.refused, server.read_only = 405, True
    with pytest.raises(PermanentStoreError):
        put(open_store("s3://bucket", simple_options(port, driver)), b"content")


@pytest.mark.parametrize("status", [400, 501])
def test_where_a_server_refuses_checksums_the_error_names_the_setting(
    simple: tuple[int, type[Simple]], status: int
) -> None:
    port, server = simple
    server.refused, server.checksums = status, True
    options = simple_options(port, "fsspec")
    advised = options["config_kwargs"].pop("request_checksum_calculation")
    with pytest.raises(
        StoreError, match=r"set store\.options\.config_kwargs\.request_checksum_calculation: (\w+)$"
    ) as caught:
        put(open_store("s3://bucket", options), b"content")
    assert str(caught.value).endswith(advised)
    put(open_store("s3://bucket", simple_options(port, "fsspec")), b"content")
    assert server.requests == ["*", None, "*"]


def test_a_bucket_is_found_in_another_region_than_the_environments(
    simple: tuple[int, type[Simple]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, server = simple
    server.region = "eu-west-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    put(open_store("s3://bucket", {"key": "k", "secret": "s"}), b"content")
    assert list(server.kept.values()) == [b"content"]


@pytest.mark.parametrize(("status", "there"), [(400, None), (501, b"first")])
def test_a_note_on_a_server_that_knows_no_conditions_is_changed_without(
    simple: tuple[int, type[Simple]], there: bytes | None, driver: str, status: int
) -> None:
    port, server = simple
    server.refused = status
    if there is not None:
        server.kept["/bucket/note"] = there
    store = open_store("s3://bucket", simple_options(port, driver))
    assert isinstance(store, ObjectStore)
    for content in (b"second", b"third"):
        change_note(store, "note", lambda _, content=content: content)  # type: ignore[misc]
    assert server.requests == ["*" if there is None else '"tag"', None, None]
    assert server.kept == {"/bucket/note": b"third"}


# ------------------------------------------------------------------ halves


def test_an_upload_that_is_cut_leaves_nothing_and_can_be_made_again(served: S3Place | AzurePlace) -> None:
    with Link(port_of(served), cut_after=2 << 20) as link:
        store = served.open("", hurried(served, link.port, 10))
        with pytest.raises(StoreError, match="cannot write") as caught:
            put(store, bytes(LARGE))
        assert not isinstance(caught.value, PermanentStoreError)
        assert nothing_is_left(served)
        link.cut_after = None
        put(store, b"content")
    assert served.objects() == {NAME.path: b"content"}


PUT = """
import json, sys
import pyarrow as pa
from jetcapture_py.store import open_store
from tests.integration.store.test_object_storage import NAME
url, options, size = json.loads(sys.argv[1])
open_store(url, options).put(NAME, pa.py_buffer(bytes(size)))
"""


def test_a_process_killed_in_an_upload_leaves_nothing(served: S3Place | AzurePlace) -> None:
    with Link(port_of(served), rate=3 << 20) as link:
        arguments = json.dumps([served.url, through(served, link.port), LARGE])
        with subprocess.Popen([sys.executable, "-c", PUT, arguments], cwd=Path(__file__).parents[3]) as process:
            deadline = time.monotonic() + 60
            while link.passed < 1 << 20:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.kill()
    assert nothing_is_left(served)
    put(served.open(), b"content")
    assert served.objects() == {NAME.path: b"content"}


def test_parts_of_an_upload_that_nobody_ended_are_not_taken_for_the_object(azure: AzurePlace) -> None:
    azure.client.get_blob_client(f"archive/{NAME.path}").stage_block("MDE=", bytes(1000))
    store = azure.open()
    put(store, b"content")
    put(store, b"content")
    assert azure.objects() == {NAME.path: b"content"}


# ------------------------------------------------------------------ silence


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are accepted by the system and nobody reads or answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience by default."""
    monkeypatch.setattr(ports, "CONNECT_TIMEOUT", 0.3)
    monkeypatch.setattr(ports, "READ_TIMEOUT", 0.3)
    monkeypatch.setattr(ports, "SLOWEST", 1 << 30)


def timed(work: Callable[[], object]) -> tuple[StoreError, float]:
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        work()
    assert not isinstance(caught.value, PermanentStoreError)
    return caught.value, time.monotonic() - began


def test_a_server_that_never_answers_is_given_up_after_the_time_in_the_options(
    served: S3Place | AzurePlace, silent: int
) -> None:
    store = served.open("", hurried(served, silent, 0.2))
    for work in (lambda: put(store, b"content"), store.probe):
        _, seconds = timed(work)
        assert seconds < 20


def test_a_server_that_never_answers_is_given_up_without_any_options(
    served: S3Place | AzurePlace, silent: int, hasty: None
) -> None:
    options = through(served, silent)
    for name in ("config_kwargs", "client_options", "retry_config"):
        options.pop(name, None)
    store = served.open("", options)
    assert isinstance(store, ObjectStore)
    for work in (lambda: put(store, b"content"), lambda: put(store, bytes(32 << 20)), lambda: store.read_note("note")):
        _, seconds = timed(work)
        assert seconds < 20


def test_a_slow_upload_is_not_taken_for_silence(served: S3Place | AzurePlace) -> None:
    data = bytes(16 << 20)
    for seconds in (1, 5, 20):  # a busy server may itself be silent for long
        with Link(port_of(served), rate=len(data) // (2 * seconds)) as link:
            try:
                hurry = hurried if served.driver == "fsspec" else lambda *given: through(*given[:2], client_options={})
                put(served.open("", hurry(served, link.port, seconds)), data)
                break
            except StoreError:
                if seconds == 20:
                    raise
    assert served.objects() == {NAME.path: data}


# ------------------------------------------------------------------ credentials


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new credentials whenever they are refused."""
    monkeypatch.setattr(renewal, "RENEW", 0.0)


@pytest.fixture
def users(versity: Versity) -> Iterator[Versity]:
    """The server, with two users that may write."""
    for key in ("first", "second"):
        versity.add_user(key, f"{key}-secret")
    yield versity
    for key in ("first", "second"):
        versity.remove_user(key)


def shared(path: Path, key: str) -> None:
    """Write the file that AWS's tools share."""
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {key}-secret\n")


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where AWS's tools look for credentials, and nowhere else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return path


def without_login(place: S3Place) -> dict[str, Any]:
    login = ("key", "secret", "access_key_id", "secret_access_key")
    return {name: value for name, value in place.options.items() if name not in login}


def test_exchanged_credentials_are_found_without_a_failure(
    real_s3: S3Place, users: Versity, credentials: Path, eager: None
) -> None:
    shared(credentials, "first")
    store = real_s3.open("", without_login(real_s3))
    store.probe()
    shared(credentials, "second")
    users.remove_user("first")
    put(store, b"content")
    assert real_s3.objects() == {NAME.path: b"content"}
    users.add_user("first", "first-secret")


def test_refused_credentials_are_a_permanent_error_until_there_are_others(
    real_s3: S3Place, users: Versity, credentials: Path, eager: None
) -> None:
    shared(credentials, "nobody")
    store = real_s3.open("", without_login(real_s3))
    for _ in range(2):
        with pytest.raises(PermanentStoreError, match="cannot write s3://") as caught:
            put(store, b"content")
    assert "nobody-secret" not in str(caught.value)
    credentials.write_text("[default]\naws_access_key_id = fi")  # half of it, as somebody may just be writing
    with pytest.raises(PermanentStoreError):
        put(store, b"content")
    credentials.unlink()
    with pytest.raises(PermanentStoreError, match="redentials"):
        put(store, b"content")
    shared(credentials, "first")
    put(store, b"content")
    assert real_s3.objects() == {NAME.path: b"content"}


def test_credentials_are_looked_for_only_every_few_seconds(real_s3: S3Place, credentials: Path) -> None:
    shared(credentials, "nobody")
    store = real_s3.open("", without_login(real_s3))
    assert isinstance(store, ObjectStore)
    assert isinstance(store.driver, RenewedDriver)
    first = store.driver.driver
    for _ in range(5):
        with pytest.raises(PermanentStoreError):
            put(store, b"content")
    assert store.driver.driver is first


def secret_files(place: S3Place | AzurePlace, directory: Path) -> tuple[dict[str, Any], Mapping[Path, str]]:
    """The place's options with its secrets in files, and what belongs into these."""
    options, files = dict(place.options), {}
    secrets = ("key", "secret", "access_key_id", "secret_access_key", "account_key", "connection_string")
    for name in [name for name in secrets if name in options]:
        files[directory / name] = str(options.pop(name))
        options[f"{name}_file"] = str(directory / name)
    return options, files


def test_secrets_in_files_are_read_again_when_they_are_refused(
    served: S3Place | AzurePlace, tmp_path: Path, eager: None
) -> None:
    options, files = secret_files(served, tmp_path)
    for path, content in files.items():
        wrong = content.replace(AZURE_KEY, f"A{AZURE_KEY[1:]}") if AZURE_KEY in content else "wrong"
        path.write_text(wrong + "\n")
    store = served.open("", options)
    for _ in range(2):
        with pytest.raises(PermanentStoreError):
            put(store, b"content")
    for path, content in files.items():
        path.write_text(content + "\n")
    put(store, b"content")
    assert served.objects() == {NAME.path: b"content"}


def test_a_secret_that_is_given_twice_or_whose_file_is_missing_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^store\.options: secret or secret_file, not both$"):
        open_store("s3://bucket", {"key": "k", "secret": "s3cret", "secret_file": str(tmp_path / "secret")})
    with pytest.raises(ConfigError, match=r"^store\.options: cannot read secret_file; FileNotFoundError: /"):
        open_store("s3://bucket", {"key": "k", "secret_file": str(tmp_path / "secret")})
