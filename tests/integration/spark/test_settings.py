"""The core cases under the settings of a session that change what a row is or where it is computed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.spark import core
from tests.integration.spark.conftest import Archive
from tests.support import java
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SETTINGS = {
    "spark.sql.session.timeZone": "Asia/Kathmandu",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.caseSensitive": "true",
    "spark.sql.adaptive.enabled": "false",
}
"""None of them has its default here."""
NUMBERS = count()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Archive, NatsServer]]:
    """The archive of the core cases, and a server."""
    archive = Archive(tmp_path_factory.mktemp("core"))
    core.fill(archive)
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield archive, server


def new_stream(server: NatsServer) -> str:
    stream = f"CORE{next(NUMBERS)}"
    add_stream(server.url, stream, f"{stream.lower()}.>")
    return stream


@pytest.mark.exhaustive
def test_the_core_cases_hold_under_other_settings(spark: SparkSession, places: tuple[Archive, NatsServer]) -> None:
    archive, server = places
    before = {key: str(spark.conf.get(key)) for key in SETTINGS}
    try:
        for key, value in SETTINGS.items():
            spark.conf.set(key, value)
        core.check(spark, archive.url, server.url, new_stream(server))
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("master", ["remote", "local-cluster[2,1,1024]"])
@pytest.mark.timeout(700)  # it starts up to four JVMs
def test_the_core_cases_hold_on_connect_and_on_a_cluster(places: tuple[Archive, NatsServer], master: str) -> None:
    archive, server = places
    given = [f"{key}={value}" for key, value in (SETTINGS | java.COMPILED).items()]
    words = [archive.url, server.url, new_stream(server), master, *given]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.spark.core", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[3],
        env=java.only(),
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]
