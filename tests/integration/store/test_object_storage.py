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
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import ConfigError, PermanentStoreError, StoreError
from jetcapture_py.reading.plan import list_objects
from jetcapture_py.store import NoteStore, Store, change_note, open_store, ports
from jetcapture_py.store import credentials as renewal
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.objects import ObjectStore
from tests.integration.store.conftest import AzurePlace, Place, S3Place
from tests.support.azurite import KEY as AZURE_KEY
from tests.support.drivers import options_for
from tests.support.links import Link
from tests.support.versity import Versity

NAME = ObjectName(
    stream="S", key="k", bucket=1_700_000_100, first_seq=1, last_seq=9, rows=9, digest="0123456789abcdef"
)  # fmt: skip
LARGE = 101 << 20
"""From 100 MiB on, s3fs would send an object in parts."""


def put(store: Store, data: bytes) -> str:
    return store.put(NAME, pa.py_buffer(data))


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


def test_an_empty_object_is_read_and_moved_aside(place: Place) -> None:
    store, files = place.open(), ArchiveFiles(place.url, place.options)
    assert isinstance(store, NoteStore)
    store.write_note("S/x.parquet", b"")
    (file,) = files.below("S")
    assert (files.read(file), list(files.footers([file]))) == (b"", [b""])
    files.move_aside(file)
    assert place.objects() == {"S/.x.parquet.damaged": b""}


def test_a_key_that_marks_a_directory_is_no_file(s3: S3Place) -> None:
    for key in ("archive/ORDERS/", "archive/ORDERS/key=eu/", "archive/ORDERS/key=eu/note.txt"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    files = ArchiveFiles(s3.url, s3.options)
    assert [file.path for file in files.below("ORDERS")] == ["ORDERS/key=eu/note.txt"]
    assert list_objects(files, "ORDERS") == {}


def test_an_object_above_the_size_of_a_part_is_sent_in_one_request_and_not_written_again(s3: S3Place) -> None:
    put(s3.open(), bytes(LARGE))
    put(s3.open(), b"second")
    (found,) = s3.client.list_objects_v2(Bucket=s3.bucket)["Contents"]
    assert (found["Size"], "-" in found["ETag"]) == (LARGE, False)  # of several parts it would be <hash>-<parts>
    s3.client.delete_object(Bucket=s3.bucket, Key=found["Key"])
    put(s3.open(), b"first")
    put(s3.open(), bytes(LARGE))
    assert s3.objects() == {NAME.path: b"first"}
    assert not s3.client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads")


def test_an_azure_object_sent_in_blocks_is_not_written_again_either(azure: AzurePlace) -> None:
    azure.client.get_blob_client(f"archive/{NAME.path}").stage_block("MDE=", bytes(1000))  # of an upload not ended
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
    refused, explained, checksums, read_only = 501, True, False, False
    region = ""
    """Where the bucket is; "" for everywhere."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        condition = self.headers["If-None-Match"] or self.headers["If-Match"]
        self.requests.append(condition)
        unknown = any("checksum" in name.lower() for name in self.headers) if self.checksums else condition is not None
        if self._elsewhere():
            self._answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")
        elif not (unknown or self.read_only) or self.region:
            self.kept[self.path] = body
            self._answer(200)
        else:
            code = {400: "InvalidArgument", 405: "MethodNotAllowed", 501: "NotImplemented"}[self.refused]
            error = f"<Error><Code>{code}</Code><Message>A header is not known.</Message></Error>".encode()
            self._answer(self.refused, error if self.explained else b"")

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("x-amz-bucket-region", self.region)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _elsewhere(self) -> bool:
        return bool(self.region) and f"/{self.region}/" not in self.headers.get("Authorization", "")

    def do_GET(self) -> None:
        found = self.kept.get(self.path)
        self._answer(301 if self._elsewhere() else 404 if found is None else 200, found or b"")

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
    config = {"retries": {"total_max_attempts": 1}, "request_checksum_calculation": "when_required"}
    where = {"endpoint_url": f"http://127.0.0.1:{port}"}
    return options_for(driver, {"key": "k", "secret": "s", "client_kwargs": where, "config_kwargs": config})


@pytest.mark.parametrize(
    ("status", "explained", "there"), [(400, True, None), (405, False, b"first"), (501, True, b"first")]
)
def test_a_server_that_knows_no_conditions_is_asked_once_and_then_written_to_without(
    simple: tuple[int, type[Simple]],
    driver: str,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    explained: bool,
    there: bytes | None,
) -> None:
    port, server = simple
    monkeypatch.setattr(renewal, "RENEW", 0.0)  # s3fs takes 405 for a missing permission
    server.refused, server.explained = status, explained
    store = open_store("s3://bucket", simple_options(port, driver))
    put(store, b"first")
    put(store, b"second")
    assert server.requests == ["*", None, None]
    assert list(server.kept.values()) == [b"second"]
    server.requests.clear()
    if there is not None:
        server.kept["/bucket/note"] = there
    store = open_store("s3://bucket", simple_options(port, driver))
    assert isinstance(store, ObjectStore)
    for content in (b"second", b"third"):
        change_note(store, "note", lambda _, content=content: content)  # type: ignore[misc]
    assert server.requests == ["*" if there is None else '"tag"', None, None]
    assert server.kept["/bucket/note"] == b"third"


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
    reason = rf"set store\.options\.config_kwargs\.request_checksum_calculation: {advised}$"
    with pytest.raises(StoreError, match=reason):
        put(open_store("s3://bucket", options), b"content")
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


# ------------------------------------------------------------------ silence


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are accepted by the system and nobody reads or answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("by_default", [True, False])
def test_a_server_that_never_answers_is_given_up(
    served: S3Place | AzurePlace, silent: int, monkeypatch: pytest.MonkeyPatch, by_default: bool
) -> None:
    options = hurried(served, silent, 0.2)
    if by_default:
        for name, value in (("CONNECT_TIMEOUT", 0.3), ("READ_TIMEOUT", 0.3), ("SLOWEST", 1 << 30)):
            monkeypatch.setattr(ports, name, value)
        for name in ("config_kwargs", "client_options", "retry_config"):
            options.pop(name, None)
    store = served.open("", options)
    assert isinstance(store, ObjectStore)
    data = bytes(32 << 20) if by_default else b"content"
    for work in (lambda: put(store, data), store.probe, lambda: store.read_note("note")):
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            work()
        assert not isinstance(caught.value, PermanentStoreError)
        assert time.monotonic() - began < 20


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


def test_exchanged_credentials_are_found_and_refused_ones_are_a_permanent_error_until_there_are_others(
    real_s3: S3Place, users: Versity, credentials: Path, eager: None
) -> None:
    shared(credentials, "first")
    store = real_s3.open("", without_login(real_s3))
    store.probe()
    shared(credentials, "second")
    users.remove_user("first")
    put(store, b"content")  # without a failure
    assert real_s3.objects() == {NAME.path: b"content"}
    users.add_user("first", "first-secret")
    shared(credentials, "nobody")
    store = real_s3.open("", without_login(real_s3))
    for content in (credentials.read_text(), "[default]\naws_access_key_id = fi", ""):  # half of it, and none
        credentials.write_text(content)
        for _ in range(2):
            with pytest.raises(PermanentStoreError, match=r"cannot write s3://|redentials") as caught:
                put(store, b"more")
            assert "nobody-secret" not in str(caught.value)
    shared(credentials, "first")
    put(store, b"more")


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
