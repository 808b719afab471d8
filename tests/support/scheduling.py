"""Which of several workers runs which tests, and which come first."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

REPOSITORY = Path(__file__).parents[2]
_TAKES_SPARK = re.compile(r"\bspark: SparkSession\b|usefixtures\(\"spark\"\)")
_ARCHIVES = re.compile("/(reading|compaction|reporting)/")
_LONGEST_FIRST = ("spark: ", "acceptance/chaos", "acceptance", "integration", "")
"""What a group's name contains, in the order in which workers take the groups: no long one begins at the end."""


class Scheduler(LoadScopeScheduling):
    """The tests of a file on one worker, and those that share a Spark session on two, of which each starts one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by `turn` instead
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])


@cache
def group(file: str) -> str:
    """The name of the group that a file is in."""
    if not _TAKES_SPARK.search((REPOSITORY / file).read_text()):
        return file
    return "spark: archives" if _ARCHIVES.search(file) else "spark: streams"


def turn(item: pytest.Item) -> int:
    """When it is an item's turn: the lower the sooner."""
    name = group(item.nodeid.partition("::")[0])
    return next(at for at, part in enumerate(_LONGEST_FIRST) if part in name)
