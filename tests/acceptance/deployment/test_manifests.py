"""The plain manifests are objects that Kubernetes accepts."""

from __future__ import annotations

import pytest
import yaml

from tests.support.kubernetes import MANIFESTS, VERSIONS, check_schemas


def test_kubernetes_accepts_every_manifest() -> None:
    for path in MANIFESTS.glob("*.yaml"):
        objects = list(yaml.safe_load_all(path.read_text()))
        assert objects, path
        check_schemas(objects)


def test_a_misspelled_field_is_found_by_the_schemas_of_every_version() -> None:
    (_, deployment) = yaml.safe_load_all((MANIFESTS / "deployment.yaml").read_text())
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    from kubernetes_validate import ValidationError  # takes more than a second

    for version in VERSIONS:
        with pytest.raises(ValidationError, match="terminationGracePeriod"):
            check_schemas([deployment], [version])
