"""No secret is ever printed, stored, served, or shown to who lists processes; whatever fails."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import boto3  # type: ignore[import-untyped]
import nkeys
import psutil
import pytest
import yaml

from jetcapture_py.text import one_line, without_credentials
from tests.support import s3
from tests.support.commands import jetcapture
from tests.support.credentials import certificate, seed_of
from tests.support.nats_server import NatsServer
from tests.support.running import publish, settings

Start = Callable[..., NatsServer]

PASSWORD, OTHER, TOKEN = "pw-Hn4kq9-x", "pw-Zt7Lm2-x", "tk-Wd8Rs3-x"
S3_KEY, S3_SECRET, S3_TOKEN = "ak-Qv5Nb1-x", "sk-Jf6Pc0-x", "st-Ye2Gu7-x"
USERINFO, SAS = "ui-Ka3Xo8-x", "sg-Mi9Db4-x"
AZURE = base64.b64encode(b"az-Bo1Ts6-x az-Bo1Ts6-x").decode()
SEED = seed_of(nkeys.PREFIX_BYTE_USER)[0]
SECRETS = (PASSWORD, OTHER, TOKEN, S3_KEY, S3_SECRET, S3_TOKEN, USERINFO, SAS, AZURE, SEED)
# what a client writes of them on the wire, and what is easily printed by mistake
FORMS = {form for secret in SECRETS for form in (secret, base64.b64encode(secret.encode()).decode(), secret[3:9])}


def assert_clean(data: bytes | str, where: str) -> None:
    text = data.decode("utf-8", "backslashreplace") if isinstance(data, bytes) else data
    for form in FORMS:
        assert form not in text, f"{where} has {form} in it:\n{text[-3000:]}"


def write(directory: Path, name: str, data: dict[str, Any]) -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def store(endpoint: str) -> dict[str, Any]:
    options = {"key": S3_KEY, "secret": S3_SECRET, "token": S3_TOKEN, "endpoint_url": endpoint}
    return {"url": "s3://bucket/nats", "options": options, "retry_for": "0.1s"}


TOLD = {"block": {"max_age": "0.1s"}, "log": {"level": "debug"}, "http": {"listen": "127.0.0.1:0"}}


class Watched:
    """The real command with all it says in a file, and the command lines of it and its children."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self.log, self.command_lines = log, set[str]()
        words = [sys.executable, "-m", "jetcapture_py", *arguments]
        environment = {**os.environ, "PYTHONWARNINGS": "default", **environment}
        with log.open("wb") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)

    @property
    def said(self) -> bytes:
        return self.log.read_bytes()

    def until(self, condition: Callable[[], object], what: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"still not so that {what}: {self.said!r}"
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.process.pid)
                for each in (process, *process.children(recursive=True)):
                    self.command_lines.add(" ".join(each.cmdline()))
            time.sleep(0.25)

    def ended(self, timeout: float = 300) -> int:
        self.until(lambda: self.process.poll() is not None, "it has ended", timeout)
        assert_clean(self.said, "what it printed")
        assert_clean("\n".join(self.command_lines), "a command line")
        return int(self.process.returncode)

    def show_pages(self) -> None:
        (port,) = re.findall(rb'"port": (\d+)', self.said)
        for page in ("/", "/metrics", "/readyz", "/livez", "/none"):
            assert_clean(fetch(f"http://127.0.0.1:{int(port)}{page}"), page)
        self.process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with s3.serve() as endpoint:
        with client_of(endpoint) as client:
            client.create_bucket(Bucket="bucket")
        yield endpoint


@contextlib.contextmanager
def client_of(endpoint: str) -> Iterator[Any]:
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def server(nats_server: Start) -> NatsServer:
    """A server that knows `app` with the password, and lets the tests in without one."""
    server = nats_server(
        f"authorization {{ users: [ {{ user: app, password: {PASSWORD} }}, {{ user: test, password: test }} ] }}\n"
        "no_auth_user: test"
    )
    asyncio.run(publish(server.url, [(f"orders.{number}", b"%d" % number, None) for number in range(20)]))
    return server


def fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return bytes(error.read())


def test_a_run_shows_its_secrets_to_nobody(server: NatsServer, moto: str, tmp_path: Path) -> None:
    bucket = store(moto)
    bucket["options"]["secret"] = "${S3_SECRET}"
    data = settings(server.url, "", nats={"user": "app", "password": "${APP_PASSWORD}"}, store=bucket, **TOLD)
    path = write(tmp_path, "run", data)
    with Watched(tmp_path / "log", "run", str(path), APP_PASSWORD=PASSWORD, S3_SECRET=S3_SECRET) as replica:
        replica.until(lambda: b"blocks.stored" in replica.said, "something is stored")
        replica.show_pages()
        assert replica.ended() == 0
    with client_of(moto) as client:
        names = [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]]
        for name in names:
            assert_clean(name, "the tree")
            assert_clean(client.get_object(Bucket="bucket", Key=name)["Body"].read(), name)
    assert {name.rpartition(".")[2] for name in names} >= {"parquet", "json"}


def test_a_store_that_refuses_while_it_runs_shows_none(server: NatsServer, moto: str, tmp_path: Path) -> None:
    options = {"endpoint_url": moto.replace("://", f"://me:{USERINFO}@"), "anon": True}
    login, bucket = {"user": "app", "password": PASSWORD}, {"url": "s3://fleeting/x", "options": options}
    data = settings(server.url, "", nats=login, store=bucket, drain_timeout="0.5s", **TOLD)
    with client_of(moto) as client:
        client.create_bucket(Bucket="fleeting")
        with Watched(tmp_path / "log", "run", str(write(tmp_path, "run", data))) as replica:
            replica.until(lambda: b"blocks.stored" in replica.said, "something is stored")
            for entry in client.list_objects_v2(Bucket="fleeting")["Contents"]:
                client.delete_object(Bucket="fleeting", Key=entry["Key"])
            client.delete_bucket(Bucket="fleeting")
            asyncio.run(publish(server.url, [("orders.more", b"more", None)]))
            replica.until(lambda: b"store.failed" in replica.said, "the store fails")
            replica.show_pages()
            assert replica.ended() == 1


def test_a_certificate_that_is_refused_shows_none(nats_server: Start, tmp_path: Path) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "ca", None))
    server = nats_server(f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem" }}')
    data = settings(server.url, tmp_path / "archive", nats={"user": "app", "password": PASSWORD, "tls": {}})
    with Watched(tmp_path / "log", "run", str(write(tmp_path, "tls", data))) as replica:
        assert replica.ended() == 1
    assert b"certificate verify failed" in replica.said


NOWHERE = "http://127.0.0.1:1"
FSSPEC = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}
OBSTORE = {"driver": "obstore", "retry_config": {"max_retries": 0}}
LOGIN = {"key": S3_KEY, "secret": S3_SECRET}
KEYS = {"access_key_id": S3_KEY, "secret_access_key": S3_SECRET}
SECRETIVE = f"http://me:{USERINFO}@127.0.0.1:1"
REFUSED: list[Any] = [
    ("nats", {"user": "app", "password": OTHER}),
    ("nats", {"user": SAS, "password": OTHER}),
    ("nats", {"token": TOKEN}),
    ("nats", {"nkey_seed": SEED}),
    ("nats", {"nkey_seed": SAS}),
    ("nats", {"creds": "damaged.creds"}),
    ("s3", {"anon": True, "endpoint_url": SECRETIVE, **FSSPEC}),
    ("s3", {**LOGIN, "endpoint_url": NOWHERE, **FSSPEC}),
    ("s3", {"key": [S3_KEY], "secret": {"a": S3_SECRET}}),
    ("s3", {**LOGIN, "bogus": S3_TOKEN}),
    ("az", {"account_name": "a", "account_key": AZURE[:-3]}),
    ("az", {"connection_string": f"AccountKey={AZURE}"}),
    pytest.param(
        *("az", {"account_name": "a", "sas_token": f"?sig={SAS}", "account_host": "127.0.0.1:1"}),
        marks=pytest.mark.exhaustive,  # Azure's library tries again for a minute
    ),
    ("s3", {"skip_signature": True, "endpoint": SECRETIVE, **OBSTORE}),
    ("s3", {**KEYS, "endpoint": NOWHERE, **OBSTORE}),
    ("s3", {**KEYS, "bogus": S3_TOKEN, **OBSTORE}),
    ("az", {"account_name": "a", "account_key": AZURE[:-3], **OBSTORE}),
    ("az", {"account_name": "a", "sas_key": f"?sig={SAS}", "endpoint": f"{NOWHERE}/a", **OBSTORE}),
]


@pytest.mark.parametrize(("part", "options"), REFUSED)
def test_a_login_or_a_store_that_is_refused_shows_no_secret(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, options: dict[str, Any]
) -> None:
    server = nats_server(f"authorization {{ user: app, password: {PASSWORD} }}")
    monkeypatch.chdir(tmp_path)
    Path("damaged.creds").write_text(f"-----BEGIN NATS USER JWT-----\n{TOKEN}\n{SEED}\n")
    if part == "nats":
        wanted = settings(server.url, tmp_path / "archive", nats=options)
    else:
        given = {name: value for name, value in options.items() if name != "driver"}
        driver = options.get("driver", "fsspec")
        wanted = settings(server.url, f"{part}://b/x", store={"options": given, "driver": driver})
    done = jetcapture("check", write(tmp_path, "refused", wanted))
    said = done.stdout + done.stderr
    assert done.returncode > 0, said
    assert re.search("^problem +connection" if part == "nats" else "store", said), said
    assert_clean(said, "check")


def test_credentials_in_an_address_are_left_out_of_every_error_and_every_line_of_a_library() -> None:
    assert without_credentials(f"at http://me:{USERINFO}@host:1/x and s3://{USERINFO}@b") == (
        "at http://***@host:1/x and s3://***@b"
    )
    assert without_credentials("mail me@host, see http://host/@x") == "mail me@host, see http://host/@x"
    group = ExceptionGroup("two", [OSError(f"http://a:{USERINFO}@h/"), ValueError(f"'ftp://{USERINFO}@h'")])
    assert_clean(one_line(group), "the group")


@pytest.mark.spark
@pytest.mark.exhaustive
def test_a_job_gives_no_child_a_secret_on_its_command_line(moto: str, tmp_path: Path) -> None:
    data = settings("nats://127.0.0.1:1", "", nats={"user": "app", "password": PASSWORD}, store=store(moto))
    path = write(tmp_path, "job", data)
    with Watched(
        tmp_path / "log", "spark", "query", "--config", str(path), "--engine", "arrow", "SELECT nothing FROM archive"
    ) as job:
        assert job.ended(180) == 1
    assert any("java" in line for line in job.command_lines)
    assert b"query: " in job.said
