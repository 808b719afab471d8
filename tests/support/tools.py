"""Programs of others that some tests need, and are skipped without; .ci/nightly builds them with Go."""

from __future__ import annotations

import shutil

import pytest

HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
PROMTOOL = "github.com/prometheus/prometheus/cmd/promtool@v0.316.0"


def tool(package: str) -> str:
    """Return the path of a program, or skip the test with the command that installs it."""
    name = package.partition("@")[0].rpartition("/")[2]
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH (go install {package})")
    return found
