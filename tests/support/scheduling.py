"""Which of several workers runs which tests, and which come first."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

REPOSITORY = Path(__file__).parents[2]
_ARCHIVES = re.compile("/(reading|compaction)/")
_USES_SPARK = "pytest.mark.usefixtures('spark')"
_LONGEST_FIRST = ("spark: ", "acceptance/chaos", "integration/spark", "acceptance", "integration", "")
"""What a group's name contains, in the order in which workers take the groups: no long one begins at the end."""


class Scheduler(LoadScopeScheduling):
    """The tests of a file on one worker, and those that share a Spark session on two, of which each starts one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by `turn` instead
        super().__init__(config, log)

    def schedule(self) -> None:
        """Give every worker a second group, or say that none follows: it begins no test before it knows the next one.

        A worker that replaces a crashed one gets a single group from xdist. If that had a single test, all would wait.
        """
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    file, *names = nodeid.partition("[")[0].split("::")
    if takes_spark(file).isdisjoint(["", *names]):
        return file
    return "spark: archives" if _ARCHIVES.search(file) else "spark: streams"


def turn(item: pytest.Item) -> int:
    """When it is an item's turn: the lower the sooner."""
    name = group(item.nodeid)
    return next(at for at, part in enumerate(_LONGEST_FIRST) if part in name)


@cache
def takes_spark(file: str) -> frozenset[str]:
    """The classes and functions of a file that take the shared session; "" for all of them."""
    found = set()
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            arguments = [each.arg for each in node.args.args] if isinstance(node, ast.FunctionDef) else []
            marks = [ast.unparse(each) for each in node.decorator_list]
            if "spark" in arguments or _USES_SPARK in marks:
                is_fixture = any(mark.startswith("pytest.fixture") for mark in marks)
                found.add("" if is_fixture else node.name)
        elif isinstance(node, ast.Assign) and _USES_SPARK in ast.unparse(node.value):
            found.add("")
    return frozenset(found)
