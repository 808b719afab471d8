"""A declarative pipeline with the sources and the sink, as the example shows it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.spark.live import Live
from tests.support import java
from tests.support.documents import REPOSITORY, SERVER
from tests.support.running import capture_all, config, settings
from tests.support.streams import read_stream

DECODE = {"format": "json", "columns": {"region": "string", "amount": "int64"}}


def order(number: int) -> tuple[str, bytes]:
    region = "eu" if number % 2 else "us"
    return f"orders.{region}", json.dumps({"region": region, "amount": 100 * number}).encode()


def run(directory: Path) -> None:
    variables = {**java.only(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    variables |= {"PYTHONPATH": str(REPOSITORY), "SPARK_TESTING": "1"}  # any free port
    done = subprocess.run(
        [Path(sys.executable).with_name("spark-pipelines"), "run", "--spec", directory / "spark-pipeline.yml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=directory,
        env=variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.spark
@pytest.mark.exhaustive
def test_a_pipeline_publishes_what_is_new_since_its_last_run(live: Live, tmp_path: Path) -> None:
    url, path = live.server.url, tmp_path / "config.yaml"
    live.do(lambda stream: stream.add_stream(name="LARGE", subjects=["large.>"]))
    path.write_text(yaml.safe_dump(settings(url, tmp_path / "archive", decode=DECODE)))
    text = (REPOSITORY / "examples" / "pipeline.py").read_text().replace(SERVER, url)
    (tmp_path / "orders.py").write_text(text.replace("/etc/jetcapture/config.yaml", str(path)))
    spec = {
        "name": "orders",
        "storage": f"file://{tmp_path}/storage",
        "libraries": [{"glob": {"include": "orders.py"}}],
    }
    (tmp_path / "spark-pipeline.yml").write_text(yaml.safe_dump(spec))
    live.send(order(number) for number in range(20))
    asyncio.run(capture_all(config(url, tmp_path / "archive", decode=DECODE)))
    for count in (20, 30):
        run(tmp_path)
        found = [json.loads(message.payload) for message in asyncio.run(read_stream(url, "LARGE"))]
        assert sorted(each["amount"] for each in found) == [100 * number for number in range(11, count)]
        live.send(order(number) for number in range(20, 30))
