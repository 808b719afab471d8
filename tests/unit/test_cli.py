"""How commands behave in a terminal, whatever they do, and what the command line does before it imports anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jetcapture_py.cli import GROUPS, app


def commands(command: object, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *words, name)


def test_every_command_explains_itself_with_a_short_option() -> None:
    for words in commands(get_command(app)):
        short, long = (CliRunner().invoke(app, [*words, option]) for option in ("-h", "--help"))
        assert (short.exit_code, short.output) == (0, long.output)
        assert "-h, --help" in short.output


def test_commands_are_listed_in_the_order_of_use() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    there = re.findall(r"^  ([a-z]+) ", listed.partition("Set up:")[2], re.MULTILINE)
    assert there == [name for names in GROUPS.values() for name in names]
    assert set(there) == getattr(get_command(app), "commands", {}).keys()


def test_a_time_may_begin_with_a_minus() -> None:
    for words in (["--from", "-1x"], ["--since", "-1x"], ["--to=-1x"]):
        error = CliRunner().invoke(app, ["objects", "config.yaml", *words]).exception
        assert str(error).endswith('or -1h, got "-1x"')


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")  # noqa: PTH112
def test_importing_numpy_starts_no_thread_per_core() -> None:
    code = (
        "import contextlib, os\nfrom jetcapture_py.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "import numpy\nprint(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    output = subprocess.check_output([sys.executable, "-c", code, "--version"], env=environment)
    assert output.splitlines()[-1] == b"1"
