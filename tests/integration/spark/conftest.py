"""Archives written by the rules of `layout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.spark.live import Live
from tests.support.archives import HOUR as HOUR
from tests.support.archives import Archive as Archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.nats_server import NatsServer


both_layouts = pytest.mark.parametrize("archive", [0, 4], indirect=True, ids=["keys", "bundles"])
"""Marks a test that runs with an archive of keys, and with one of bundles."""


@pytest.fixture
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", getattr(request, "param", 0))


@pytest.fixture
def live(nats_server: Callable[..., NatsServer]) -> Live:
    return Live(nats_server())


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Set a setting of the session for the rest of the test."""
    before: dict[str, str | None] = {}

    def change(name: str, value: str) -> None:
        before.setdefault(name, spark.conf.get(name, None))
        spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)
