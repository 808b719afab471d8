"""Print the changelog's section of a release, for its notes: .ci/release.py v0.1.0

Fails unless the tag is the version of pyproject.toml, of the chart and of the manifests, and the changelog has it. In a
workflow, the address of the repository must be that of pyproject.toml.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(tag: str) -> str:
    """The section of the changelog; ends the program with the reason where something does not fit."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, source = project["version"], project["urls"]["Source"]
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if not source.endswith(repository):
        raise SystemExit(f'pyproject.toml has {source}, but this is {repository}: see "Release" in CONTRIBUTING.md')
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but pyproject.toml has version {version}")
    chart = (ROOT / "examples/kubernetes/chart/Chart.yaml").read_text()
    if set(re.findall(r"^(?:version|appVersion): (\S+)$", chart, re.MULTILINE)) != {version}:
        raise SystemExit(f"Chart.yaml does not have version {version}")
    for path in sorted((ROOT / "examples/kubernetes").glob("*.yaml")):
        if set(re.findall(r"image: jetcapture(?:-spark)?:(\S+)", path.read_text())) - {version}:
            raise SystemExit(f"{path.name} has an image of another version than {version}")
    pattern = rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, (ROOT / "CHANGELOG.md").read_text(), re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section {version}")
    return found[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
