"""No secret is ever printed, stored, served, or shown to who lists processes; whatever fails."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
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

from jetcapture_py import cli
from jetcapture_py.text import one_line, without_credentials
from tests.support import s3
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


def store(endpoint: str, bucket: str = "bucket") -> dict[str, Any]:
    options = {"key": S3_KEY, "secret": S3_SECRET, "token": S3_TOKEN, "endpoint_url": endpoint}
    return {"url": f"s3://{bucket}/nats", "options": options, "retry_for": "0.1s"}


class Watched:
    """The real command with all it says in memory, and the command lines of it and its children."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jetcapture_py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONWARNINGS": "default", **environment},
        )
        self.said = b""
        self.command_lines: set[str] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def look(self) -> None:
        """Note the command lines as they are now."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self.command_lines.add(" ".join(each.cmdline()))

    def until(self, condition: Callable[[], object], what: str, timeout: float = 120) -> None:
        deadline, look = time.monotonic() + timeout, 0.0
        while not condition():
            assert time.monotonic() < deadline, f"still not so that {what}: {self.said!r}"
            if time.monotonic() > look:
                self.look()
                look = time.monotonic() + 0.25  # it asks for every process of the machine
            time.sleep(0.02)

    def ended(self, timeout: float = 300) -> int:
        self.until(lambda: self.process.poll() is not None, "it has ended", timeout)
        self._reader.join()
        assert_clean(self.said, "what it printed")
        assert_clean("\n".join(self.command_lines), "a command line")
        return int(self.process.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


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
    data = settings(
        server.url,
        "",
        nats={"user": "app", "password": "${APP_PASSWORD}"},
        store=store(moto) | {"options": {**store(moto)["options"], "secret": "${S3_SECRET}"}},
        block={"max_age": "0.1s"},
        log={"level": "debug"},
        http={"listen": "127.0.0.1:0"},
    )
    path = write(tmp_path, "run", data)
    with Watched("run", str(path), APP_PASSWORD=PASSWORD, S3_SECRET=S3_SECRET) as replica:
        replica.until(lambda: b"blocks.stored" in replica.said, "something is stored")
        port = next(
            entry["port"] for entry in map(json.loads, replica.said.splitlines()) if entry["event"] == "http.listening"
        )
        for page in ("/", "/metrics", "/readyz", "/livez", "/none"):
            assert_clean(fetch(f"http://127.0.0.1:{port}{page}"), page)
        replica.process.send_signal(signal.SIGTERM)
        assert replica.ended() == 0
    with client_of(moto) as client:
        names = [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]]
        for name in names:
            assert_clean(name, "the tree")
            assert_clean(client.get_object(Bucket="bucket", Key=name)["Body"].read(), name)
    assert any(name.endswith(".parquet") for name in names)
    assert any(name.endswith(".json") for name in names)


def test_a_store_that_refuses_while_it_runs_shows_none(server: NatsServer, moto: str, tmp_path: Path) -> None:
    secretive = moto.replace("://", f"://me:{USERINFO}@")
    with client_of(moto) as client:
        client.create_bucket(Bucket="fleeting")
        data = settings(
            server.url,
            "",
            nats={"user": "app", "password": PASSWORD},
            store={"url": "s3://fleeting/x", "options": {"endpoint_url": secretive, "anon": True}},
            block={"max_age": "0.1s"},
            log={"level": "debug"},
            http={"listen": "127.0.0.1:0"},
            drain_timeout="0.5s",
        )
        with Watched("run", str(write(tmp_path, "run", data))) as replica:
            replica.until(lambda: b"blocks.stored" in replica.said, "something is stored")
            for entry in client.list_objects_v2(Bucket="fleeting")["Contents"]:
                client.delete_object(Bucket="fleeting", Key=entry["Key"])
            client.delete_bucket(Bucket="fleeting")
            asyncio.run(publish(server.url, [("orders.more", b"more", None)]))
            replica.until(lambda: b"store.failed" in replica.said, "the store fails")
            (port,) = re.findall(rb'"port": (\d+)', replica.said)
            for path in ("/", "/metrics", "/readyz"):
                assert_clean(fetch(f"http://127.0.0.1:{int(port)}{path}"), path)
            replica.process.send_signal(signal.SIGTERM)
            assert replica.ended() == 1


def test_a_certificate_that_is_refused_shows_none(nats_server: Start, tmp_path: Path) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "ca", None))
    server = nats_server(f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server-key.pem" }}')
    data = settings(server.url, tmp_path / "archive", nats={"user": "app", "password": PASSWORD, "tls": {}})
    with Watched("run", str(write(tmp_path, "tls", data))) as replica:
        assert replica.ended() == 1
    assert b"certificate verify failed" in replica.said


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it has printed."""
    monkeypatch.setattr(sys, "argv", ["jetcapture", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as error:
        code = int(error.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


NOWHERE = "http://127.0.0.1:1"
HASTY = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
AT_ONCE = {"retry_config": {"max_retries": 0}}
REFUSED: list[Any] = [
    {"nats": {"user": "app", "password": OTHER}},
    {"nats": {"user": SAS, "password": OTHER}},
    {"nats": {"token": TOKEN}},
    {"nats": {"nkey_seed": SEED}},
    {"nats": {"nkey_seed": SAS}},
    {"nats": {"creds": "damaged.creds"}},
    {"s3": {"anon": True, "endpoint_url": f"http://me:{USERINFO}@127.0.0.1:1", "config_kwargs": HASTY}},
    {"s3": {"key": S3_KEY, "secret": S3_SECRET, "endpoint_url": NOWHERE, "config_kwargs": HASTY}},
    {"s3": {"key": [S3_KEY], "secret": {"a": S3_SECRET}}},
    {"s3": {"key": S3_KEY, "secret": S3_SECRET, "bogus": S3_TOKEN}},
    {"az": {"account_name": "a", "account_key": AZURE[:-3]}},
    {"az": {"connection_string": f"AccountKey={AZURE}"}},
    pytest.param(
        {"az": {"account_name": "a", "sas_token": f"?sig={SAS}", "account_host": "127.0.0.1:1"}},
        marks=pytest.mark.exhaustive,  # Azure's library tries again for a minute
    ),
    {"s3": {"driver": "obstore", "skip_signature": True, "endpoint": f"http://me:{USERINFO}@127.0.0.1:1", **AT_ONCE}},
    {
        "s3": {
            "driver": "obstore",
            "access_key_id": S3_KEY,
            "secret_access_key": S3_SECRET,
            "endpoint": NOWHERE,
            **AT_ONCE,
        }
    },
    {"s3": {"driver": "obstore", "access_key_id": S3_KEY, "secret_access_key": S3_SECRET, "bogus": S3_TOKEN}},
    {"az": {"driver": "obstore", "account_name": "a", "account_key": AZURE[:-3]}},
    {
        "az": {
            "driver": "obstore",
            "account_name": "a",
            "sas_key": f"?sig={SAS}",
            "endpoint": f"{NOWHERE}/a",
            **AT_ONCE,
        }
    },
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda case: "-".join([*case, *next(iter(case.values()))]))
def test_a_login_or_a_store_that_is_refused_shows_no_secret(
    nats_server: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    refused: dict[str, Any],
) -> None:
    server = nats_server(f"authorization {{ user: app, password: {PASSWORD} }}")
    monkeypatch.chdir(tmp_path)
    Path("damaged.creds").write_text(f"-----BEGIN NATS USER JWT-----\n{TOKEN}\n{SEED}\n")
    ((part, options),) = refused.items()
    if part == "nats":
        wanted = settings(server.url, tmp_path / "archive", nats=options)
    else:
        given = dict(options)
        driver = given.pop("driver", "fsspec")
        wanted = settings(server.url, f"{part}://b/x", store={"options": given, "driver": driver})
    code, said = command(capsys, monkeypatch, "check", str(write(tmp_path, "refused", wanted)))
    assert code > 0, said
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
    with Watched("spark", "query", "--config", str(path), "--engine", "arrow", "SELECT nothing FROM archive") as job:
        assert job.ended(180) == 1
    assert any("java" in line for line in job.command_lines)
    assert b"query: " in job.said
