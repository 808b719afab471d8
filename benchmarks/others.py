"""Run the smaller benchmarks, and write what they print into the tables of docs/benchmarks.md.

    python -m benchmarks.others [NAME …]

A table is between `<!-- COMMANDS -->` and `<!-- end -->`; its rows are the rows that the commands print, one after the
other. With names, only the tables with such a name in their commands are written again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"<!-- (python -m benchmarks\.[^>]+) -->\n\n.*?\n\n<!-- end -->", re.DOTALL)


def row(what: str, figure: str, more: str = "") -> None:
    """Print a row."""
    print(f"| {what} | {figure} | {more} |", flush=True)


def rates(what: str, values: Sequence[float], unit: str = "messages/s") -> None:
    """Print a row with a median and a range."""
    row(what, f"{statistics.median(values):,.0f} {unit}", f"{min(values):,.0f} to {max(values):,.0f}")


def rows(command: str) -> list[str]:
    """Run a command, and return the rows that it printed. Raises CalledProcessError."""
    print(f"$ {command}", flush=True)
    words = [sys.executable, *shlex.split(command)[1:]]
    output = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(output, flush=True)
    return [line for line in output.splitlines() if line.startswith("| ")]


def table(commands: str) -> str:
    """Return a table with its marks."""
    lines = [line for command in commands.split("; ") for line in rows(command)]
    head = f"| {datetime.now(UTC):%Y-%m-%d} | | |\n|---|---|---|"
    return "\n".join([f"<!-- {commands} -->\n", head, *lines, "\n<!-- end -->"])


def main() -> int:
    """Write each table as soon as it is measured; return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark, such as put")
    names = parser.parse_args().names
    failed = 0
    for commands in TABLE.findall(PAGE.read_text()):
        if not names or any(f"benchmarks.{name}" in commands for name in names):
            try:
                measured = table(commands)
            except subprocess.CalledProcessError as error:
                print(f"{shlex.join(error.cmd)}: exit code {error.returncode}; its table stays", file=sys.stderr)
                failed = 1
                continue
            old = re.compile(rf"<!-- {re.escape(commands)} -->\n\n.*?\n\n<!-- end -->", re.DOTALL)
            PAGE.write_text(old.sub(lambda _, new=measured: new, PAGE.read_text()))  # type: ignore[misc]
    return failed


if __name__ == "__main__":
    sys.exit(main())
