"""The tutorial, followed from its first command to its last."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.documents import SERVER, blocks, commands
from tests.support.nats_server import NatsServer

PAGE = "docs/tutorial.md"
INSTALLED = ("python3 -m venv", ". .venv", "pip install", "nats-server")
"""Beginnings of commands for what a test has already: packages, and a server."""


def shape(text: str) -> str:
    """A text without the numbers and digests in it."""
    return re.sub(r"[0-9][0-9,.:TZ-]*", "N", re.sub(r"-[0-9a-f]{16}\.", "-0.", text))


def shell(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the tutorial's directory, as after its installation."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PWD": str(home)}
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_new_user_captures_queries_and_proves_a_stream(
    nats_server: Callable[..., NatsServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = nats_server()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    printed: dict[str, str] = {}
    for block in blocks(PAGE):
        if block.file is not None and block.language in ("python", "yaml"):
            assert SERVER in block.text
            (tmp_path / block.file).write_text(block.text.replace(SERVER, server.url))
        elif block.language == "console":
            command, expected = block.text.removeprefix("$ ").split("\n", 1)
            done = shell(command, tmp_path)
            assert (done.returncode, shape(done.stdout)) == (0, shape(expected)), done.stderr
        else:
            assert block.language == "sh"
            for command in commands(block):
                if command.startswith("jetcapture spark"):  # in this process, whose Spark has started
                    _, _, job, *arguments = shlex.split(command)
                    assert import_module(f"spark_jobs.{job}").main(arguments) == 0
                    printed[command] = capsys.readouterr().out
                elif not command.startswith(INSTALLED):
                    done = shell(command, tmp_path)
                    assert done.returncode == 0, done.stderr
                    printed[command] = done.stdout
    assert "ORDERS/key=eu/" in printed["find archive -name '*.parquet'"]
    duckdb, quarantine, spark = (text for command, text in printed.items() if " query " in command)
    assert duckdb.split() == spark.split()
    assert re.search(r"us +334 +41791\.75", duckdb)
    assert "this is not JSON" in quarantine
    assert "<title>" in (tmp_path / "report.html").read_text()
    assert "1,001" in printed["jetcapture status config.yaml"]


def test_what_is_removed_from_the_archive_is_noticed_and_repaired_as_the_readme_shows(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = nats_server()
    for block in blocks(PAGE):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text.replace(SERVER, server.url))
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
