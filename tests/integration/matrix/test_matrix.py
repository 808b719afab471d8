"""Each kind of stream, consumer and server: a capture archives each message once, or says in one line why it cannot.

docs/compatibility.md is made from the same table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.jetstream import pulls, read_session
from tests.integration.matrix import sites
from tests.integration.matrix.cells import Cell, cells_of
from tests.integration.matrix.stage import Site, Stage, connected
from tests.support.nats_server import OLDER_SERVERS

# nats-py's, for every websocket
pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, every capture waits until its pulls have expired; `check` asks several times for what is missing."""
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=0.1, grace=1.0))
    monkeypatch.setattr(read_session, "PAUSE", 0.02)


def text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


*OLDER, NEWEST = sites.VERSIONS


def site_of(opener: sites.Opener) -> Any:
    """A fixture: the servers of each version."""

    @pytest.fixture(
        scope="module",
        params=[*(pytest.param(version, marks=pytest.mark.exhaustive) for version in OLDER), NEWEST],
        ids=text,
    )
    def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        version: tuple[int, int] = request.param
        command = sites.command_of(version)
        if command is None:
            where = f"{OLDER_SERVERS} names a directory of older servers"
            pytest.skip(f"nats-server {text(version)} is not installed: {where}")
        with opener(tmp_path_factory.mktemp("site"), version, command) as site:
            yield site

    return opened


single, hub, cluster = site_of(sites.single), site_of(sites.hub), site_of(sites.cluster)


def run(cell: Cell, site: Site, number: int, directory: Path) -> None:
    if site.version < cell.since:
        pytest.skip(f"nats-server {text(site.version)} does not have the feature")

    async def scenario() -> None:
        async with connected(site.url) as client:
            await cell.run(Stage(client=client, site=site, number=number, directory=directory))

    asyncio.run(scenario())


def cells(opener: sites.Opener) -> pytest.MarkDecorator:
    numbered = list(enumerate(cells_of(opener)))
    return pytest.mark.parametrize(("number", "cell"), numbered, ids=[cell.name for _, cell in numbered])


@cells(sites.single)
def test_a_stream_or_consumer_is_captured_whole_or_refused_in_one_line(
    single: Site, number: int, cell: Cell, tmp_path: Path
) -> None:
    run(cell, single, number, tmp_path)


@cells(sites.hub)
def test_a_stream_is_captured_whole_whatever_the_way_to_it_or_refused_in_one_line(
    hub: Site, number: int, cell: Cell, tmp_path: Path
) -> None:
    run(cell, hub, number, tmp_path)


@cells(sites.cluster)
def test_a_stream_of_a_cluster_is_captured_whole(cluster: Site, number: int, cell: Cell, tmp_path: Path) -> None:
    run(cell, cluster, number, tmp_path)
