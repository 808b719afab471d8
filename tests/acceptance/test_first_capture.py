"""The page on the first capture, followed from its first command to its last."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from moto.core.authorization import enable_iam_authentication
from moto.server import ThreadedMotoServer

from tests.support.documents import SERVER, blocks, commands
from tests.support.nats_server import NatsServer

PAGE = "docs/first-capture.md"
INSTALLED = ("python3 -m venv", ". .venv", "pip install", "nats-server")
"""Beginnings of commands for what a test has already: packages, and a server."""


def shape(text: str) -> str:
    """A text without the numbers and digests in it."""
    return re.sub(r"[0-9][0-9,.:TZ-]*", "N", re.sub(r"-[0-9a-f]{16}\.", "-0.", text))


def shell(command: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the reader's directory, as after the installation."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PWD": str(home), **environment}
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def save_files(home: Path, url: str, store: str | None = None) -> None:
    """Save the page's files, with this server; `store` replaces the S3 bucket."""
    for block in blocks(PAGE):
        if block.file is not None:
            text = block.text.replace(SERVER, url)
            (home / block.file).write_text(text if store is None else text.replace("s3://example-archive/nats", store))


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The environment of a user of an S3 server, who may do what the page's policy allows, and nothing else."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    root = {"endpoint_url": endpoint, "aws_access_key_id": "root", "aws_secret_access_key": "root"}
    (policy,) = blocks(PAGE, "json")
    try:
        with contextlib.closing(boto3.client("s3", region_name="us-east-1", **root)) as client:
            client.create_bucket(Bucket="example-archive")
        with contextlib.closing(boto3.client("iam", region_name="us-east-1", **root)) as client:
            client.create_user(UserName="archive")
            client.put_user_policy(UserName="archive", PolicyName="archive", PolicyDocument=policy.text)
            key = client.create_access_key(UserName="archive")["AccessKey"]
        with enable_iam_authentication():
            yield {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                "AWS_DEFAULT_REGION": "us-east-1",
            }
    finally:
        server.stop()


def test_a_new_user_captures_queries_and_proves_a_stream(
    nats_server: Callable[..., NatsServer], s3: dict[str, str], tmp_path: Path
) -> None:
    server = nats_server()
    save_files(tmp_path, server.url)
    printed: dict[str, str] = {}
    for block in blocks(PAGE):
        if block.language == "console":
            command, expected = block.text.removeprefix("$ ").split("\n", 1)
            done = shell(command, tmp_path, **s3)
            assert (done.returncode, shape(done.stdout)) == (0, shape(expected)), done.stderr
        elif block.language == "sh":
            for command in commands(block):
                if not command.startswith(INSTALLED):
                    done = shell(command, tmp_path, **s3)
                    assert done.returncode == 0, (done.stdout, done.stderr)
                    printed[command] = done.stdout
    checked = re.findall(r"^(\w+) +(\S+)", printed["jetcapture check config.yaml"], re.MULTILINE)
    notable = {(state, about) for state, about in checked if state != "ok"}
    assert notable == {("warning", "decode"), ("skipped", "versions")}  # moto lets everybody read the other settings
    assert "key=eu/" in printed["jetcapture objects config.yaml"]
    orders, quarantine = (text for command, text in printed.items() if " query " in command)
    assert re.search(r"us +334 +41791\.75", orders)
    assert "this is not JSON" in quarantine
    assert "<title>" in (tmp_path / "report.html").read_text()
    assert "1,001" in printed["jetcapture status config.yaml"]


def test_what_is_removed_from_the_archive_is_noticed_and_repaired_as_the_readme_shows(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = nats_server()
    save_files(tmp_path, server.url, str(tmp_path / "archive"))
    steps = ["python publish.py", "jetcapture run config.yaml --until-caught-up", "rm -r archive/ORDERS/key=us"]
    for command in steps:
        done = shell(command, tmp_path)
        assert done.returncode == 0, done.stderr
    (screen,) = blocks("README.md", "console")
    for part in screen.text.removeprefix("$ ").split("\n$ "):
        command, printed = part.rstrip("\n").split("\n", 1)
        done = shell(command, tmp_path)
        assert done.returncode == (1 if printed.startswith("NOT complete") else 0), done.stderr
        assert shape(done.stdout).strip() == shape(printed)
