"""A standalone cluster of Spark: a master and workers as processes, which a test kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import psutil
import pyspark

from tests.support import java
from tests.support.ports import free_port

TIMEOUT = 600.0
Victim = Literal["executor", "worker"]


class Cluster:
    """A master and two workers of one core each, with their files in `home`; a context manager."""

    def __init__(self, home: Path, workers: int = 2) -> None:
        self._home, self._count = home, workers
        self._port, self._page = free_port(), free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._started = 0

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            addresses = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", str(self._page)]
            self._master = self._start("master.Master", addresses)
            wait(lambda: self._told() is not None, "the master answers")
            self.complete()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._workers, *filter(None, [self._master])):
            _kill(process.pid, *_executors(process))
            process.wait()

    def complete(self) -> None:
        """Start workers in place of those that were killed."""
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        while len(self._workers) < self._count:
            self._started += 1
            words = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", str(free_port())]
            self._workers.append(
                self._start("worker.Worker", [*words, "-d", f"{self._home}/worker-{self._started}", self.url])
            )
        wait(lambda: self._alive() == self._count, "the workers have registered")

    def executors(self) -> int:
        return sum(len(_executors(worker)) for worker in self._workers)

    def kill(self, victim: Victim) -> None:
        """Kill one of the workers, or what runs the tasks of one."""
        worker = random.choice([worker for worker in self._workers if _executors(worker)])
        if victim == "executor":
            _kill(*_executors(worker))
        else:
            _kill(worker.pid)
            worker.wait()

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        words = [f"{pyspark.__path__[0]}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments]
        variables = {**java.only(), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        with (self._home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, env=variables, start_new_session=True)

    def _told(self) -> Any:
        """What the master says about itself."""
        # until all its pages are there, a master answers with the one for people
        with (
            suppress(OSError, json.JSONDecodeError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/", timeout=10) as answer,
        ):
            return json.load(answer)
        return None

    def _alive(self) -> int:
        told = self._told()
        return sum(worker["state"] == "ALIVE" for worker in told["workers"]) if told else 0


class Driver:
    """A program that runs the jobs of `tests.integration.spark.cluster.program` on a cluster; a context manager."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        words = [sys.executable, "-m", "tests.integration.spark.cluster.program", cluster.url]
        variables = {**java.only(), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(self, job: str, *arguments: object, once_running: Callable[[], object] = lambda: None) -> Any:
        """Run a job; what it returns. `once_running` is called when it has tasks that run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([job, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line == "running\n":
                once_running()
            elif line.startswith("result "):
                return json.loads(line.removeprefix("result "))
        raise AssertionError(self.log.read_text()[-5000:])


def _executors(worker: subprocess.Popen[bytes]) -> list[int]:
    """The executors that a worker has started; the script that started the worker may have left it a shell."""
    try:
        return [child.pid for child in psutil.Process(worker.pid).children() if child.name() == "java"]
    except psutil.NoSuchProcess:
        return []


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"it never was so that {what}"
        time.sleep(0.05)
