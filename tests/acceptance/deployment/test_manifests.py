"""The plain manifests are objects that Kubernetes accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes import MANIFESTS, VERSIONS, check_schemas


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.name)
def test_kubernetes_accepts_every_manifest(path: Path) -> None:
    objects = list(yaml.safe_load_all(path.read_text()))
    assert objects
    check_schemas(objects)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelled_field_is_found(version: str) -> None:
    (_, deployment) = yaml.safe_load_all((MANIFESTS / "deployment.yaml").read_text())
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    from kubernetes_validate import ValidationError  # takes more than a second

    with pytest.raises(ValidationError, match="terminationGracePeriod"):
        check_schemas([deployment], [version])
