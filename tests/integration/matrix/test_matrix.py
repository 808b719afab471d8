"""Each kind of stream, consumer and server: a capture archives each message once, or says in one line why it cannot.

docs/compatibility.md is made from the same table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.jetstream import pulls, read_session
from tests.integration.matrix import sites
from tests.integration.matrix.cells import GROUPS, Cell
from tests.integration.matrix.stage import Site
from tests.support.nats_server import OLDER_SERVERS

# nats-py's, for every websocket
pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, every capture waits until its pulls have expired; `check` asks several times for what is missing."""
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=0.1, grace=1.0))
    monkeypatch.setattr(read_session, "PAUSE", 0.02)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The servers of one version on which cells run one after the other."""
    opener, version = request.param
    command = sites.command_of(version)
    if command is None:
        pytest.skip(f"nats-server {version} is not installed: {OLDER_SERVERS} names a directory of older servers")
    with opener(tmp_path_factory.mktemp("site"), version, command) as opened:
        yield opened


def cases() -> Iterator[Any]:
    """Every cell on the servers of each version that supports it, site by site."""
    for opener, version in itertools.product((sites.single, sites.hub, sites.cluster), reversed(sites.VERSIONS)):
        servers = opener, version  # the same object for all cells, for which pytest opens the site once
        marks = [pytest.mark.exhaustive] * (version != max(sites.VERSIONS))
        cells = [cell for group in GROUPS if group.site is opener for cell in group.cells if version >= cell.since]
        for number, cell in enumerate(cells):
            name = f"{'.'.join(map(str, version))}-{cell.name}"
            yield pytest.param(servers, number, cell, marks=marks, id=name)


@pytest.mark.parametrize(("site", "number", "cell"), [*cases()], indirect=["site"])
async def test_a_stream_is_captured_whole_or_refused_in_one_line(
    site: Site, number: int, cell: Cell, tmp_path: Path
) -> None:
    await cell.run(site, number, tmp_path)
