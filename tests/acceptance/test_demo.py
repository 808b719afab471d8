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


def run(
    words: list[str], directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=600, env=environment, cwd=directory, check=False
    )


def marked(mark: str) -> Iterator[list[str]]:
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


@pytest.mark.parametrize("spark", [False, pytest.param(True, marks=(pytest.mark.spark, pytest.mark.exhaustive))])
def test_the_demonstration_ends_well_and_says_where_everything_is(tmp_path: Path, spark: bool) -> None:
    """In a directory whose name means something to URLs, globs, YAML, SQL, shells or terminals, wherever it can."""
    directory = tmp_path / """all 'my' "orders": 50%20 #1 é [bold] *? $HOME :smile: & co"""
    words, mark = command(directory, *["--spark"] * spark), uuid.uuid4().hex
    java = {} if spark else {"JAVA_HOME": str(tmp_path)}  # it needs none
    done = run(words, tmp_path, {**os.environ, **java, MARK: mark})
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"All files are in {directory}." in done.stdout
    assert f"\n{directory}/archive\n" in done.stdout
    assert {path.name for path in directory.iterdir()} == {"archive", "jetcapture.yaml", "logs"}
    assert list(tmp_path.iterdir()) == [directory]
    assert left_over(mark) == []
    assert not accepts(server_port(done.stdout))

    counts = re.search(r"([\d,]+) orders published, ([\d,]+) in the archive, ([\d,]+) in the quarantine", done.stdout)
    assert counts, done.stdout
    assert [int(count.replace(",", "")) for count in counts.groups()] == [MESSAGES, MESSAGES - BROKEN, BROKEN]
    replayed = re.findall(r"^  results\.(\w+) +\{.*\"orders\":(\d+)", done.stdout, re.MULTILINE)
    assert {region for region, _ in replayed} == REGIONS
    assert sum(int(orders) for _, orders in replayed) == MESSAGES - BROKEN

    lines = [line.strip() for line in done.stdout.splitlines()]
    ((_, option, sql),) = (shlex.split(line) for line in lines if line.startswith("duckdb "))
    ((_, *arguments),) = (shlex.split(line) for line in lines if line.startswith("jetcapture "))
    assert option == "-c"
    with duckdb.connect() as connection:
        stored = dict(connection.execute(sql).fetchall())
    assert stored.keys() == REGIONS
    assert sum(stored.values()) == MESSAGES - BROKEN
    ours = run([sys.executable, "-m", "jetcapture_py", *arguments], tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert set(re.findall(r"\w+", ours.stdout)) >= REGIONS
    assert list(tmp_path.iterdir()) == [directory]


def interrupted(directory: Path, marker: str, delay: float, number: int) -> None:
    mark = uuid.uuid4().hex
    marking, pipe = {**os.environ, MARK: mark}, subprocess.PIPE
    with subprocess.Popen(command(directory), stdout=pipe, stderr=pipe, text=True, env=marking) as process:
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


def test_what_a_demonstration_needs_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"  # with no nats-server beside it
    python.symlink_to(Path(sys.executable).resolve())
    bare = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    directory = tmp_path / "demo"
    for words, environment, line in (
        ([str(python), *command(directory)[1:]], bare, "nats-server is missing: pip install 'jetcapture[demo]'"),
        (
            command(directory, "--spark"),
            {**os.environ, "JAVA_HOME": str(tmp_path)},
            "Spark needs Java: install Java 17 (pip install 'jetcapture[java]'",
        ),
    ):
        done = run(words, tmp_path, environment)
        assert (done.returncode, done.stdout) == (1, ""), done
        assert done.stderr.startswith(f"jetcapture demo: {line}")
        assert len(done.stderr.splitlines()) == 1
        assert not directory.exists()
