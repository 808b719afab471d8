"""What a release consists of agrees with itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import version

import pytest
import yaml

from tests.support.documents import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def notes(tag: str, repository: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(REPOSITORY / ".ci" / "release.py"), tag]
    environment = {**os.environ, "GITHUB_REPOSITORY": repository}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def test_the_changelog_describes_the_version_and_a_tag_or_a_repository_of_another_name_is_refused() -> None:
    assert PROJECT["version"] == version("jetcapture")
    tag, repository = f"v{PROJECT['version']}", PROJECT["urls"]["Source"].removeprefix("https://github.com/")
    found = notes(tag, repository)
    assert found.returncode == 0, found.stderr
    assert "`jetcapture run`" in found.stdout
    assert "\n## " not in found.stdout
    for refused, message in (
        (notes("v99.0.0"), "the tag is v99.0.0, but pyproject.toml has version "),
        (notes(tag, "somebody/else"), "but this is somebody/else"),
    ):
        assert refused.returncode == 1
        assert message in refused.stderr


def test_all_links_to_the_repository_lead_to_the_same_one() -> None:
    words = ["git", "ls-files", "-z", "--", ".", ":!tests", ":!benchmarks"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    source = PROJECT["urls"]["Source"].removeprefix("https://github.com/")
    linked = defaultdict[str, set[str]](set)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (path := REPOSITORY / name).suffix in (".md", ".yaml", ".yml", ".toml"):
            page = r"https://github\.com/([\w.-]+/[\w.-]+)/(?:blob|tree|security|discussions)\b"
            for repository in re.findall(page, path.read_text()):
                linked[repository].add(name)
    assert linked.keys() == {source}, linked
    assert "examples/kubernetes/chart/Chart.yaml" in linked[source]


def test_every_action_of_a_workflow_is_pinned_to_a_commit_and_every_script_is_there() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used
        for action, comment in used:
            if not action.startswith("./"):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
                assert re.fullmatch(r" # v[0-9.]+", comment), action
        for script in re.findall(r"\.ci/[\w.]+", text):
            assert (REPOSITORY / script).exists(), script


def test_all_supported_versions_of_python_are_tested_and_only_what_was_tested_is_published() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    jobs = {f"{stem}.{name}": job for stem, found in workflows.items() for name, job in found["jobs"].items()}
    supported = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    assert PROJECT["requires-python"] == f">={supported[0]}"
    for name in ("ci.test", "release.wheel"):
        assert jobs[name]["strategy"]["matrix"]["python"] == supported
    assert jobs["release.test"] == {"uses": "./.github/workflows/ci.yml"}
    for name in ("release.publish", "release.image"):
        assert {"test", "wheel"} <= set(jobs[name]["needs"])
    assert "image" in jobs["release.chart"]["needs"]
    assert set(jobs["release.announce"]["needs"]) == {"publish", "image", "chart"}
    allowed = {name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"}
    assert allowed == {"release.dist", "release.image", "release.chart", "release.publish", "site.publish"}
    assert all(found["permissions"] == {"contents": "read"} for found in workflows.values())
