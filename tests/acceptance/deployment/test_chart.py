"""The Helm chart: Kubernetes accepts what it renders, and jetcapture finds everything where its configuration says."""

from __future__ import annotations

import json
import math
import re
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from jetcapture_py.capture.spool import MAX_FILES
from jetcapture_py.config import model
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import parse_duration, parse_size
from jetcapture_py.monitoring.http import TIMEOUT
from tests.support.commands import check_jetcapture, check_job
from tests.support.documents import REPOSITORY, blocks
from tests.support.kubernetes import (
    CHART,
    KUBE_VERSION,
    MANIFESTS,
    VERSIONS,
    Object,
    RefusedError,
    by_kind,
    check_schemas,
    helm,
    pod,
    render,
)

CASES = sorted(MANIFESTS.glob("values/*.yaml"))
CAPTURE: dict[str, Any] = {
    "config": {
        "nats": {"servers": ["nats://nats:4222"]},
        "source": {"stream": "ORDERS", "consumer": "archive"},
        "store": {"url": "s3://archive/nats"},
    }
}
"""The least that a release needs."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)


def deployment(*values: Any) -> Object:
    return by_kind(render(*values))["Deployment"]


def loaded(objects: list[Object]) -> Config:
    """The release's configuration, as its pods load it."""
    found = by_kind(objects)
    (container,) = pod(found["Deployment"])["containers"]
    environment = {each["name"]: each.get("value", "secret") for each in container.get("env", ())}
    ((_, text),) = found["ConfigMap"]["data"].items()
    return model.loads(text, environment)


@each_case
def test_kubernetes_accepts_every_object(case: Path) -> None:
    objects = render(case)
    check_schemas(objects)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 52 for _, name in names)  # a CronJob's


def test_helm_finds_no_fault() -> None:
    assert len(CASES) == 6
    for case in CASES:
        assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "--values", str(case), *KUBE_VERSION)


@each_case
def test_a_release_has_the_configuration_of_its_values(case: Path) -> None:
    wanted = yaml.safe_load(case.read_text())["config"]
    objects = render(case)
    config = loaded(objects)
    assert config.warnings() == ()
    ((_, text),) = by_kind(objects)["ConfigMap"]["data"].items()
    found = yaml.safe_load(text)
    assert {**found, **wanted} == found  # with the chart's defaults beside it


@each_case
def test_every_file_of_the_configuration_is_mounted(case: Path) -> None:
    objects = render(case)
    workloads = [each for each in objects if each["kind"] in ("Deployment", "CronJob")]
    for workload in workloads:
        spec = pod(workload)
        (container,) = spec["containers"]
        mounts = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert mounts["tmp"] == PurePosixPath("/tmp")
        words = " ".join(container["args"]).replace("=", " ").split()
        assert "/etc/jetcapture/jetcapture.yaml" in words
        config = loaded(objects)
        files = [config.nats.creds, config.nats.token_file, config.nats.password_file]
        files += [config.nats.tls.ca] if config.nats.tls else []
        for file in filter(None, files):
            assert any(PurePosixPath(file).is_relative_to(mount) for mount in mounts.values()), file
        if str(config.store.url).startswith("file:"):
            assert mounts["archive"] == PurePosixPath("/var/lib/jetcapture")
        if config.limits.spool and workload["kind"] == "Deployment":
            assert mounts["spool"] == PurePosixPath(str(config.limits.spool.path))


@each_case
def test_no_pod_may_do_more_than_it_needs(case: Path) -> None:
    objects = render(case)
    for workload in (each for each in objects if each["kind"] in ("Deployment", "CronJob")):
        spec = pod(workload)
        assert spec["securityContext"]["runAsNonRoot"]
        user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
        assert f"\nUSER {user}\n" in (REPOSITORY / "Dockerfile").read_text()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_case
def test_probes_and_metrics_are_where_the_process_serves_them(case: Path) -> None:
    objects = render(case)
    config, found = loaded(objects), by_kind(objects)
    (container,) = pod(found["Deployment"])["containers"]
    (port,) = container["ports"]
    assert config.http is not None
    assert config.http.listen.rpartition(":")[2] == str(port["containerPort"])
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert container[probe]["timeoutSeconds"] > TIMEOUT
    (service,) = found["Service"]["spec"]["ports"]
    assert service == {"name": "http", "port": port["containerPort"], "targetPort": port["name"]}
    annotations = found["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    if "ServiceMonitor" in found:
        (endpoint,) = found["ServiceMonitor"]["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
        assert "prometheus.io/scrape" not in annotations
        selected = found["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert selected.items() <= found["Service"]["metadata"]["labels"].items()
    else:
        assert annotations["prometheus.io/port"] == str(port["containerPort"])


@each_case
def test_selectors_select_the_pods(case: Path) -> None:
    found = by_kind(render(case))
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [found["Deployment"]["spec"]["selector"]["matchLabels"], found["Service"]["spec"]["selector"]]
    if "PodDisruptionBudget" in found:
        selectors.append(found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    if "NetworkPolicy" in found:
        selectors.append(found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    spread = pod(found["Deployment"]).get("topologySpreadConstraints", ())
    selectors += [constraint["labelSelector"]["matchLabels"] for constraint in spread]
    assert all(selector.items() <= labels.items() for selector in selectors)
    for name, each in found.items():
        if name.startswith("CronJob"):  # a job's pod is no replica
            of_job = each["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
            assert not selectors[0].items() <= of_job.items()


@pytest.mark.parametrize("drain", ["60s", "1h30m", "500ms", "1.5h", "2m30s", "90", 90, "1d", 45.5])
def test_a_pod_is_killed_only_after_its_drain(drain: str | float) -> None:
    spec = pod(deployment(CAPTURE, {"config": {"drain_timeout": drain}}))
    assert spec["terminationGracePeriodSeconds"] == math.ceil(parse_duration(drain)) + 30


@pytest.mark.parametrize("memory", ["1GiB", "512MiB", "500MB", "1.5GiB", 268_435_456, "268435456"])
def test_a_pod_has_the_memory_that_its_limit_needs(memory: str | int) -> None:
    (container,) = pod(deployment(CAPTURE, {"config": {"limits": {"memory": memory}}}))["containers"]
    wanted = (400 << 20) + 2 * math.ceil(parse_size(memory) / (1 << 20)) * (1 << 20)
    assert parse_size(f"{container['resources']['limits']['memory']}B") == wanted


def test_an_upgrade_does_not_wait_for_a_claim_that_only_one_node_can_mount() -> None:
    def strategy(*values: Any) -> str:
        return str(deployment(CAPTURE, {"claim": "archive"}, *values)["spec"]["strategy"]["type"])

    assert strategy({"replicas": 1}) == "Recreate"
    assert strategy({"replicas": 2}) == "RollingUpdate"
    assert strategy({"replicas": 1, "autoscaling": {"enabled": True}}) == "RollingUpdate"
    assert deployment(CAPTURE, {"replicas": 1})["spec"]["strategy"]["type"] == "RollingUpdate"


def test_a_full_spool_does_not_evict_its_pod() -> None:
    limits = {"memory": "256MiB", "spool": {"path": "/spool", "size": "1GB"}}
    (spool,) = [
        each for each in pod(deployment(CAPTURE, {"config": {"limits": limits}}))["volumes"] if each["name"] == "spool"
    ]
    assert parse_size(f"{spool['emptyDir']['sizeLimit']}B") >= parse_size("1GB") + MAX_FILES * 4096


def test_large_numbers_stay_numbers() -> None:
    numbers = {"block": {"max_messages": 123_456_789}, "source": {"start_sequence": 9_007_199_254_740_991}}
    text = by_kind(render(CAPTURE, {"config": numbers}))["ConfigMap"]["data"]["jetcapture.yaml"]
    found = yaml.safe_load(text)
    assert found["block"]["max_messages"] == 123_456_789
    assert found["source"]["start_sequence"] == 9_007_199_254_740_991


def test_a_change_of_the_configuration_replaces_the_replicas() -> None:
    def checksum(*values: Any) -> str:
        return str(deployment(CAPTURE, *values)["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    before = checksum()
    assert checksum({"config": {"block": {"interval": "1h"}}}) != before
    assert checksum({"replicas": 7}) == before


def test_keda_scales_on_lag_beyond_that_of_a_waiting_block() -> None:
    scaled = by_kind(render(MANIFESTS / "values" / "autoscaling.yaml"))
    spec = scaled["ScaledObject"]["spec"]
    assert "replicas" not in scaled["Deployment"]["spec"]
    assert spec["scaleTargetRef"]["name"] == scaled["Deployment"]["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 20)
    lag, cpu = spec["triggers"]
    assert (lag["type"], lag["metricType"], lag["metadata"]["threshold"]) == ("prometheus", "Value", "600")
    assert lag["metadata"]["ignoreNullValues"] == "false"
    assert cpu == {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "80"}}
    query = r'max\(jetcapture_lag_seconds\{namespace="archive",pod=~"(.+)"\}\)'
    match = re.fullmatch(query, lag["metadata"]["query"])
    assert match is not None
    assert re.fullmatch(match[1], "orders-jetcapture-7d9f8b6c5-x2x4z")
    assert not re.fullmatch(match[1], "orders-jetcapture-eu-7d9f8b6c5-x2x4z")
    # scale-in leaves one pod at a time the time to drain
    policies = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"]
    assert policies == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"replica": 3}, "replica"),
        ({"config": {"nats": None}}, "nats"),
        ({"config": {"nats": {"password": "hunter2"}}}, "password"),
        ({"config": {"nats": {"user_seed": "SUAB"}}}, "user_seed"),
        ({"config": {"source": {"stream": None}}}, "stream"),
        ({"config": {"http": {"listen": "127.0.0.1:8080"}}}, "listen"),
        ({"config": {"drain_timeout": "soon"}}, "expected a duration such as 90s or 15m, got soon"),
        ({"config": {"limits": {"memory": "1G"}}}, "expected a size such as 512MiB or 1GiB, got 1G"),
        ({"secrets": [{"name": "nats", "mountPath": "etc"}]}, "mountPath"),
        ({"autoscaling": {"enabled": True, "lagSeconds": 900}}, "must be above config.block.max_age (900 s)"),
        ({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}}, "must not be below minReplicas"),
        ({"jobs": {"report": {"enabled": True}}}, "jobs.report.claim: a report needs an existing claim"),
        ({"jobs": {"Compact": {"enabled": True, "schedule": "30 1 * * *", "args": ["compact"]}}}, "Compact"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], reason: str) -> None:
    assert render(CAPTURE)
    with pytest.raises(RefusedError, match=re.escape(reason)):
        render(CAPTURE, values)


def test_a_password_in_the_environment_is_accepted() -> None:
    text = by_kind(render(CAPTURE, {"config": {"nats": {"user": "a", "password": "${PASSWORD}"}}}))["ConfigMap"]["data"]
    assert model.loads(text["jetcapture.yaml"], {"PASSWORD": "hunter2"}).nats.password is not None


def test_jobs_have_arguments_that_they_understand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(MANIFESTS / "values" / "jobs.yaml")
    jobs = [each for each in objects if each["kind"] == "CronJob"]
    assert [each["metadata"]["name"].rpartition("-")[2] for each in jobs] == ["compact", "report", "totals"]
    path = tmp_path / "jetcapture.yaml"
    path.write_text(by_kind(objects)["ConfigMap"]["data"]["jetcapture.yaml"])
    for job in jobs:
        (container,) = pod(job)["containers"]
        assert container["image"].startswith("jetcapture-spark:")
        mounted = "/etc/jetcapture/jetcapture.yaml"
        check_job([word.replace(mounted, str(path)) for word in container["args"]], monkeypatch)
    report = pod(jobs[1])
    assert {"name": "output", "mountPath": "/output"} in report["containers"][0]["volumeMounts"]


def test_maintenance_is_one_pod_with_the_configuration_of_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"config": {"maintain": {"compact": {}}, "limits": {"memory": "512MiB"}}, "maintain": {"enabled": True}}
    objects = render(CAPTURE, values)
    check_schemas(objects)
    (workload,) = (each for each in objects if "maintain" in each["metadata"]["name"] and each["kind"] == "Deployment")
    (service,) = (each for each in objects if "maintain" in each["metadata"]["name"] and each["kind"] == "Service")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["replicas"] == 1
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod(workload)["containers"]
    assert container["args"] == ["maintain", "/etc/jetcapture/jetcapture.yaml", "--every=5m"]
    check_jetcapture(container["args"], monkeypatch)
    assert parse_size(f"{container['resources']['limits']['memory']}B") == (200 + 512) << 20
    capture = next(each for each in objects if each["kind"] == "Deployment" and each is not workload)
    assert not capture["spec"]["selector"]["matchLabels"].items() <= labels.items()
    with pytest.raises(RefusedError, match=r"config\.maintain says what to do"):
        render(CAPTURE, {"maintain": {"enabled": True}})


def test_the_chart_is_of_the_packages_version_and_its_oldest_kubernetes_is_checked() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("jetcapture")
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


# ------------------------------------------------------------------ the values


def paths(schema: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Every value that the schema names, with its schema; sections are not values."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in schema["properties"].items():
        if name == "global":
            continue
        if each.get("additionalProperties") is False:
            found |= paths(each, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = each
    return found


SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_every_value_has_a_default_and_a_description() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, schema in paths(SCHEMA).items():
        assert schema["description"], path
        value: Any = defaults
        for part in path.split("."):
            assert part in value, path
            value = value[part]
    assert set(defaults["jobs"]["report"]) <= SCHEMA["properties"]["jobs"]["additionalProperties"]["properties"].keys()


def test_the_values_of_the_page_give_a_release() -> None:
    (release, maintenance) = (yaml.safe_load(shown.text) for shown in blocks("docs/kubernetes.md", "yaml"))
    objects = render(release)
    check_schemas(objects)
    assert loaded(objects).nats.creds is not None
    objects = render(release, maintenance)
    check_schemas(objects)
    assert sum(each["kind"] == "Deployment" for each in objects) == 2, "the captures, and maintenance"
