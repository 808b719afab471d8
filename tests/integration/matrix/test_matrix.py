"""Every kind of stream, consumer and server: a capture archives each message once, or says in one line why it cannot.

docs/compatibility.md is made from the same table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jetcapture_py.jetstream import pulls, read_session
from tests.integration.matrix import sites
from tests.integration.matrix.cell import Cell
from tests.integration.matrix.cells import cells_of
from tests.integration.matrix.stage import Site, Stage, connected
from tests.support.nats_server import OLDER_SERVERS

# nats-py's, for every websocket
pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, every capture waits until its pulls have expired; `check` asks several times for what is missing."""
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=0.1, grace=1.0))
    monkeypatch.setattr(read_session, "PAUSE", 0.02)


def opened(request: pytest.FixtureRequest, factory: pytest.TempPathFactory, opener: sites.Opener) -> Iterator[Site]:
    version: tuple[int, int] = request.param
    command = sites.command_of(version)
    if command is None:
        number = ".".join(map(str, version))
        pytest.skip(f"nats-server {number} is not installed: {OLDER_SERVERS} names a directory of older servers")
    with opener(factory.mktemp("site"), version, command) as site:
        yield site


def text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


*OLDER, NEWEST = sites.VERSIONS
VERSIONS = [*(pytest.param(version, marks=pytest.mark.exhaustive) for version in OLDER), NEWEST]


@pytest.fixture(scope="module", params=VERSIONS, ids=text)
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from opened(request, tmp_path_factory, sites.single)


@pytest.fixture(scope="module", params=VERSIONS, ids=text)
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from opened(request, tmp_path_factory, sites.hub)


@pytest.fixture(scope="module", params=VERSIONS, ids=text)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from opened(request, tmp_path_factory, sites.cluster)


def run(cell: Cell, site: Site, number: int, directory: Path) -> None:
    async def scenario() -> None:
        async with connected(site.url) as client:
            version = client.connected_server_version
            connected_to = (version.major, version.minor)
            assert connected_to == site.version or site.version == sites.VERSIONS[-1] < connected_to
            await cell.run(Stage(client=client, site=site, url=site.url, number=number, directory=directory))

    asyncio.run(scenario())


def every(opener: sites.Opener) -> pytest.MarkDecorator:
    cells = cells_of(opener)
    return pytest.mark.parametrize(("number", "cell"), list(enumerate(cells)), ids=[cell.name for cell in cells])


@every(sites.single)
def test_a_stream_or_consumer_of_any_kind_is_captured_whole_or_refused_in_one_line(
    single: Site, number: int, cell: Cell, tmp_path: Path
) -> None:
    run(cell, single, number, tmp_path)


@every(sites.hub)
def test_a_stream_is_captured_whole_whatever_the_way_to_it_or_refused_in_one_line(
    hub: Site, number: int, cell: Cell, tmp_path: Path
) -> None:
    run(cell, hub, number, tmp_path)


@every(sites.cluster)
def test_a_stream_of_a_cluster_is_captured_whole(cluster: Site, number: int, cell: Cell, tmp_path: Path) -> None:
    run(cell, cluster, number, tmp_path)
