"""`jetcapture demo` as a user sees it: the real command, its output, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb
import psutil
import pytest

from tests.support.ports import accepts

MARK = "JETCAPTURE_TEST_MARK"
"""Processes inherit it, whoever their parent is in the end."""
MESSAGES = 5000
BROKEN = 5
REGIONS = {"eu", "us", "apac", "latam"}


def command(directory: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "jetcapture_py", "demo", "--messages", str(MESSAGES), "--dir", str(directory), *more]


def marked(mark: str) -> Iterator[list[str]]:
    """The command lines of running processes that `mark` was handed down to."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                yield process.cmdline()
        except psutil.Error:  # it has just ended, or is another user's
            continue


def left_over(mark: str, within: float = 60) -> list[str]:
    """What still runs of the marked processes, which get some seconds to end."""
    deadline = time.monotonic() + within
    while (left := list(map(" ".join, marked(mark)))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def server_port(output: str) -> int:
    found = re.search(r"nats://127\.0\.0\.1:(\d+)", output)
    assert found, output
    return int(found[1])


@dataclass(frozen=True)
class Run:
    """A demonstration that has ended."""

    directory: Path
    code: int
    output: str
    errors: str
    left: list[str]

    def printed(self, start: str) -> list[str]:
        """The words of the one command in the output that begins so."""
        (line,) = [line for line in self.output.splitlines() if line.strip().startswith(start)]
        return shlex.split(line)


@pytest.fixture(scope="module", params=["", pytest.param("--spark", marks=(pytest.mark.spark, pytest.mark.exhaustive))])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In a directory whose name means something to URLs, globs, YAML, SQL, shells or terminals, wherever it can."""
    parent, mark = tmp_path_factory.mktemp("demo"), uuid.uuid4().hex
    directory = parent / """all 'my' "orders": 50%20 #1 é [bold] *? $HOME :smile: & co"""
    more = [request.param] if request.param else []
    java = {} if more else {"JAVA_HOME": str(parent)}  # it needs none
    done = subprocess.run(
        command(directory, *more),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **java, MARK: mark},
        cwd=parent,
        check=False,
    )
    return Run(directory, done.returncode, done.stdout, done.stderr, left_over(mark))


def test_the_demonstration_ends_well_and_says_where_everything_is(demo: Run) -> None:
    assert demo.code == 0, demo.output + demo.errors
    assert demo.errors == ""
    assert f"All files are in {demo.directory}." in demo.output
    assert f"\n{demo.directory}/archive\n" in demo.output
    assert {path.name for path in demo.directory.iterdir()} == {"archive", "jetcapture.yaml", "logs"}
    assert list(demo.directory.parent.iterdir()) == [demo.directory]
    assert demo.left == []
    assert not accepts(server_port(demo.output))


def test_every_order_is_in_the_archive_or_the_quarantine_and_the_result_comes_back(demo: Run) -> None:
    counts = re.search(r"([\d,]+) orders published, ([\d,]+) in the archive, ([\d,]+) in the quarantine", demo.output)
    assert counts, demo.output
    assert [int(count.replace(",", "")) for count in counts.groups()] == [MESSAGES, MESSAGES - BROKEN, BROKEN]
    replayed = re.findall(r"^  results\.(\w+) +\{.*\"orders\":(\d+)", demo.output, re.MULTILINE)
    assert {region for region, _ in replayed} == REGIONS
    assert sum(int(orders) for _, orders in replayed) == MESSAGES - BROKEN
    program, option, sql = demo.printed("duckdb ")
    assert (program, option) == ("duckdb", "-c")
    with duckdb.connect() as connection:
        stored = dict(connection.execute(sql).fetchall())
    assert stored.keys() == REGIONS
    assert sum(stored.values()) == MESSAGES - BROKEN


@pytest.mark.exhaustive
def test_the_printed_command_of_ours_reads_the_archive(demo: Run) -> None:
    _, *arguments = demo.printed("jetcapture ")
    arguments = ["-m", "jetcapture_py", *arguments]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=demo.directory.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(demo.directory.parent.iterdir()) == [demo.directory]
    assert set(re.findall(r"\w+", done.stdout)) >= REGIONS


def interrupted(directory: Path, marker: str, delay: float, number: int = signal.SIGTERM) -> None:
    """Send the signal so long after the marker was printed."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        command(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    ) as process:
        assert process.stdout is not None
        before = "".join(until(process.stdout, marker))
        time.sleep(delay)
        process.send_signal(number)
        began = time.monotonic()
        output, errors = process.communicate(timeout=300)
    said = f"after {delay} s: {before}{output}{errors}"
    assert process.returncode == 130, said
    assert output.endswith("\nInterrupted; all processes are stopped.\n"), said
    assert time.monotonic() - began < 60, said
    assert errors == "", said
    assert left_over(mark) == [], said
    assert not accepts(server_port(before)), said
    assert not (directory / "nats").exists()


def until(lines: Iterable[str], marker: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line.startswith(marker):
            return


def test_an_interrupted_demonstration_leaves_no_process(tmp_path: Path) -> None:
    moments = [("1.", 0.01, signal.SIGINT), ("2.", 1.0, signal.SIGTERM), ("3.", 2.0, signal.SIGINT)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda moment: interrupted(tmp_path / f"demo-{moment[0]}", *moment), moments))


def test_a_server_that_dies_ends_the_demonstration_with_one_line(tmp_path: Path) -> None:
    words = command(tmp_path / "demo")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        "".join(until(process.stdout, "2."))
        (server,) = [each for each in psutil.Process(process.pid).children() if "nats-server" in each.cmdline()[0]]
        server.kill()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    log = tmp_path / "demo" / "logs" / "nats-server.log"
    assert errors == f"jetcapture demo: nats-server has ended: see {log}\n"


def refused(directory: Path, environment: Mapping[str, str], *more: str, python: str = sys.executable) -> str:
    """What a demonstration that cannot start says: one line, and it leaves nothing."""
    words = [python, *command(directory, *more)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert not directory.exists()
    (line,) = done.stderr.splitlines()
    return line


def test_what_a_demonstration_needs_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"  # with no nats-server beside it
    python.symlink_to(Path(sys.executable).resolve())
    environment = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    line = refused(tmp_path / "demo", environment, python=str(python))
    assert line == "jetcapture demo: nats-server is missing: pip install 'jetcapture[demo]'"
    line = refused(tmp_path / "demo", {**os.environ, "JAVA_HOME": str(tmp_path)}, "--spark")
    assert line.startswith("jetcapture demo: Spark needs Java: install Java 17 (pip install 'jetcapture[java]'")
