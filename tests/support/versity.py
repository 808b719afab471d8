"""A real S3 server: versitygw, which keeps objects as files, checks signatures, and has users of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import boto3  # type: ignore[import-untyped]
import pytest

from tests.support.ports import await_listening, free_port

KEY, SECRET = "root-key", "root-secret"
REGION = "us-east-1"


def options(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, Any]:
    """What a store is told to get there."""
    return {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint, "region_name": REGION}}


class Versity:
    """One versitygw with its files in `home`; `start` after `kill` resumes on the same port. Skips where there is none.

    Users that are removed are refused at once: nothing is cached. With `versions`, buckets may have versioning.
    """

    def __init__(self, home: Path, *, versions: bool = False) -> None:
        binary = shutil.which("versitygw")
        if binary is None:
            pytest.skip("versitygw is not on the PATH (go install github.com/versity/versitygw/cmd/versitygw@v1.8.0)")
        self.home, self.objects = home, home / "objects"
        self._versions = home / "versions" if versions else None
        for directory in filter(None, (self.objects, home / "users", home / "sidecar", self._versions)):
            directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        command = [
            *(self._binary, "--access", KEY, "--secret", SECRET, "--region", REGION, "--quiet"),
            *("--port", f"127.0.0.1:{self.port}", "--keep-alive"),
            *("--iam-dir", str(self.home / "users"), "--iam-cache-disable"),
            *("posix", "--sidecar", str(self.home / "sidecar")),
            *(("--versioning-dir", str(self._versions)) if self._versions else ()),
            str(self.objects),
        ]
        log = self.home / "versitygw.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        await_listening(self._process, self.port, log)
        return self

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
        )

    def add_user(self, key: str, secret: str, role: str = "admin") -> None:
        """Have another user, who may do everything or, with the role `user`, what a bucket's policy allows."""
        self._admin("create-user", "--access", key, "--secret", secret, "--role", role)

    def remove_user(self, key: str) -> None:
        self._admin("delete-user", "--access", key)

    def _admin(self, *command: str) -> None:
        login = ("--access", KEY, "--secret", SECRET, "--region", REGION, "--endpoint-url", self.endpoint)
        done = subprocess.run([self._binary, "admin", *login, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def __enter__(self) -> Self:
        return self if self._process else self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
