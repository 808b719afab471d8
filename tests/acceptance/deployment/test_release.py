"""What a release consists of agrees with itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documents import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def notes(tag: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(REPOSITORY / ".ci" / "release.py"), tag]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_version_is_the_same_everywhere_and_the_changelog_describes_it() -> None:
    assert PROJECT["version"] == version("jetcapture")
    found = notes(f"v{PROJECT['version']}")
    assert found.returncode == 0, found.stderr
    assert "`jetcapture run`" in found.stdout
    assert "\n## " not in found.stdout


def test_a_tag_of_another_version_is_refused() -> None:
    found = notes("v99.0.0")
    assert found.returncode == 1
    assert found.stderr.startswith("the tag is v99.0.0, but pyproject.toml has version ")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    for action, comment in used:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
            assert re.fullmatch(r" # v[0-9.]+", comment), action


def jobs() -> dict[str, Any]:
    return {
        f"{path.stem}.{name}": job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    }


def test_all_supported_versions_of_python_are_tested() -> None:
    supported = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    for name in ("ci.test", "release.wheel"):
        assert jobs()[name]["strategy"]["matrix"]["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"


def test_only_what_was_tested_is_published_and_only_that_job_may_publish() -> None:
    found = jobs()
    assert found["release.test"] == {"uses": "./.github/workflows/ci.yml"}
    for name in ("release.publish", "release.image"):
        assert {"test", "wheel"} <= set(found[name]["needs"])
    allowed = {name for name, job in found.items() if job.get("permissions", {}).get("id-token") == "write"}
    assert allowed == {"release.dist", "release.image", "release.publish"}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_every_script_that_a_workflow_runs_is_there() -> None:
    for path in WORKFLOWS:
        for script in re.findall(r"\.ci/[\w.]+", path.read_text()):
            assert (REPOSITORY / script).exists(), script
