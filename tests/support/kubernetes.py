"""Rendering the Helm chart, and checking objects against the schemas of Kubernetes."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.documents import REPOSITORY
from tests.support.tools import HELM, tool

MANIFESTS = REPOSITORY / "examples" / "kubernetes"
CHART = MANIFESTS / "chart"
VERSIONS = ("1.27", "1.32", "1.37")
"""Versions of Kubernetes whose schemas are checked; the first is the oldest that the chart supports."""
KUBE_VERSION = ("--kube-version", VERSIONS[0])
"""What helm assumes of the cluster: a helm that `go install` built has an old version for a default."""
CUSTOM = {"PrometheusRule", "ScaledObject", "ServiceMonitor"}
"""Kinds that Kubernetes itself does not know."""

Object = dict[str, Any]


class RefusedError(Exception):
    """Helm did not render the chart; its message."""


def render(*values: Path | Mapping[str, Any], release: str = "orders", namespace: str = "archive") -> list[Object]:
    """Return the objects of a release with these values, later ones over earlier ones; raises RefusedError."""
    return [each for each in yaml.safe_load_all(_rendered(values, release, namespace)) if each]


def _rendered(values: Sequence[Path | Mapping[str, Any]], release: str, namespace: str) -> str:
    words: list[str] = ["template", release, str(CHART), "--namespace", namespace, *KUBE_VERSION]
    with tempfile.TemporaryDirectory() as directory:
        for index, each in enumerate(values):
            path = each
            if isinstance(each, Mapping):
                path = Path(directory) / f"{index}.yaml"
                path.write_text(yaml.safe_dump(dict(each)))
            words += ["--values", str(path)]
        return helm(*words)


def helm(*words: str) -> str:
    done = subprocess.run([tool(HELM), *words], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RefusedError(done.stderr or done.stdout)
    return done.stdout


def check_schemas(objects: Iterable[Object], versions: Sequence[str] = VERSIONS) -> None:
    """Fail for an object that a version of Kubernetes would refuse, or that has a field it does not know."""
    import kubernetes_validate  # takes more than a second

    for each in objects:
        if each["kind"] not in CUSTOM:
            for version in versions:
                kubernetes_validate.validate(json.loads(json.dumps(each)), version, strict=True)


def pod(workload: Object) -> Object:
    spec = workload["spec"]["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else workload["spec"]
    found: Object = spec["template"]["spec"]
    return found
