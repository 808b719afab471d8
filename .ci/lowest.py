"""Print the lowest version that pyproject.toml allows of every dependency, one pin a line, for `pip install -r`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("s3", "azure", "fast", "avro", "protobuf", "query", "spark")
PIN = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?>=([\w.]+)")


def pins() -> list[str]:
    """The lower bounds of the dependencies and of `EXTRAS`, as exact versions."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for name in EXTRAS for each in project["optional-dependencies"][name])]
    found = [(requirement, PIN.match(requirement)) for requirement in wanted]
    if missing := [requirement for requirement, match in found if match is None]:
        raise SystemExit(f"without a lowest version: {', '.join(missing)}")
    return [f"{match[1]}{f'[{match[2]}]' if match[2] else ''}=={match[3]}" for _, match in found if match]


if __name__ == "__main__":
    print("\n".join(pins()))
