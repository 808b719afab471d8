"""Whatever programs do to one archive at a time, wherever they are killed: no message is lost, read twice or left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worlds import World


def worlds(root: Path, seeds: range) -> None:
    for seed in seeds:
        World(root / str(seed), seed).run()


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_every_program_on_one_archive(tmp_path: Path, first: int) -> None:
    worlds(tmp_path, range(first, first + 20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(100, 3_000, 100))
def test_every_program_on_one_archive_many_times(tmp_path: Path, first: int) -> None:
    worlds(tmp_path, range(first, first + 100))
