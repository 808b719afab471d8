"""The core cases under the settings of a session that change what a row is or where it is computed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.mark import ParameterSet

from tests.integration.spark import core
from tests.integration.spark.conftest import Archive
from tests.support import java
from tests.support.nats_server import NatsServer
from tests.support.replays import add_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ZONE, ANSI, CASE, AQE = (
    f"spark.sql.{name}" for name in ("session.timeZone", "ansi.enabled", "caseSensitive", "adaptive.enabled")
)
DEFAULTS = {ZONE: "UTC", ANSI: "true", CASE: "false", AQE: "true"}
ZONES = ("UTC", "America/New_York", "Asia/Kolkata", "Pacific/Apia")
OTHERS = {ZONE: "Asia/Kathmandu", ANSI: "false", CASE: "true", AQE: "false"}

Settings = dict[str, str]
WEST = DEFAULTS | {ZONE: "America/New_York"}
PAIRS: list[Settings] = [
    dict(zip(DEFAULTS, (zone, *(str(bit).lower() for bit in bits)), strict=True)) | java.COMPILED
    for number, zone in enumerate(ZONES)
    for on in (True, False)
    for bits in [(on, on ^ bool(number & 1), on ^ bool(number & 2))]
]
"""Each value of a setting together with each of every other one."""
MASTERS = ["remote", pytest.param("local-cluster[2,1,1024]", marks=pytest.mark.exhaustive)]
NUMBERS = count()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Archive, NatsServer]]:
    """The archive of the core cases, and a server."""
    archive = Archive(tmp_path_factory.mktemp("core"))
    core.fill(archive)
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield archive, server


def name(settings: Settings) -> str:
    return ",".join(f"{key.removeprefix('spark.sql.')}={value}" for key, value in settings.items())


def exhaustive(given: Iterable[Settings]) -> list[ParameterSet]:
    return [pytest.param(each, marks=pytest.mark.exhaustive) for each in given]


def new_stream(server: NatsServer) -> str:
    stream = f"CORE{next(NUMBERS)}"
    add_stream(server.url, stream, f"{stream.lower()}.>")
    return stream


@pytest.mark.parametrize("settings", [OTHERS, *exhaustive((WEST, *PAIRS))], ids=name)
@pytest.mark.exhaustive
def test_the_core_cases_hold_under_every_setting(
    spark: SparkSession, places: tuple[Archive, NatsServer], settings: Settings
) -> None:
    archive, server = places
    before = {key: str(spark.conf.get(key)) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        core.check(spark, archive.url, server.url, new_stream(server))
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [OTHERS, DEFAULTS], ids=name)
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.timeout(700)  # it starts up to four JVMs
def test_the_core_cases_hold_on_connect_and_on_a_cluster(
    places: tuple[Archive, NatsServer], master: str, settings: Settings
) -> None:
    archive, server = places
    given = [f"{key}={value}" for key, value in (settings | java.COMPILED).items()]
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
