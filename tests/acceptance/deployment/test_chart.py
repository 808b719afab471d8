"""The Helm chart: Kubernetes accepts what it renders, and jetcapture finds everything where its configuration says."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from jetcapture_py.capture.spool import MAX_FILES
from jetcapture_py.config import model
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import parse_duration, parse_size
from tests.support.commands import check_jetcapture
from tests.support.documents import REPOSITORY, blocks, generator
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
from tests.support.tools import PROMTOOL, tool

CASES = sorted(MANIFESTS.glob("values/*.yaml"))
CAPTURE: dict[str, Any] = {
    "config": {
        "nats": {"servers": ["nats://nats:4222"]},
        "source": {"stream": "ORDERS", "consumer": "archive"},
        "store": {"url": "s3://archive/nats"},
    }
}
"""The least that a release needs."""


def deployment(*values: Any) -> Object:
    return by_kind(render(*values))["Deployment"]


@dataclass(frozen=True)
class Release:
    """The objects of a release."""

    objects: list[Object]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.of_kind(kind) if each["metadata"]["name"] == name)
        return found

    @cached_property
    def files(self) -> dict[str, str]:
        """The configuration files."""
        (found,) = (each["data"] for each in self.of_kind("ConfigMap") if "jetcapture.json" not in each["data"])
        return dict(found)

    @cached_property
    def capture(self) -> Object:
        """The Deployment of the captures."""
        (found,) = (each for each in self.of_kind("Deployment") if not each["metadata"]["name"].endswith("-maintain"))
        return found

    @cached_property
    def container(self) -> Object:
        """The container of the captures."""
        (found,) = pod(self.capture)["containers"]
        return dict(found)

    @cached_property
    def configs(self) -> list[Config]:
        """The configurations, as the pods load them."""
        environment = {each["name"]: each.get("value", "secret") for each in self.container.get("env", ())}
        return [model.loads(text, environment) for text in self.files.values()]


@cache
def release_of(case: str) -> Release:
    return Release(render(MANIFESTS / "values" / case))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_every_set_of_values_gives_a_release_that_works(case: Path) -> None:
    release = release_of(case.name)
    check_schemas(release.objects)
    names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 52 for _, name in names)  # a CronJob's
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "--values", str(case), *KUBE_VERSION)
    has_the_configuration_of_its_values(release, yaml.safe_load(case.read_text()))
    mounts_every_file_of_its_configuration(release)
    for workload in release.of_kind("Deployment", "CronJob"):
        may_do_no_more_than_it_needs(pod(workload))
    is_probed_and_scraped_where_it_serves(release)
    selects_its_own_pods(release)


def has_the_configuration_of_its_values(release: Release, values: dict[str, Any]) -> None:
    assert all(config.warnings() == () for config in release.configs)
    captures = values.get("captures", {"jetcapture": {}})
    assert release.files.keys() == {f"{name}.yaml" for name in captures}
    for name, own in captures.items():
        found = yaml.safe_load(release.files[f"{name}.yaml"])
        for section, wanted in {**values["config"], **own}.items():
            common = values["config"].get(section) if name != "jetcapture" else None
            assert found[section] == ({**common, **wanted} if isinstance(common, dict) else wanted)


def mounts_every_file_of_its_configuration(release: Release) -> None:
    for workload in release.of_kind("Deployment", "CronJob"):
        spec = pod(workload)
        (container,) = spec["containers"]
        mounts = {PurePosixPath(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
        assert mounts[PurePosixPath("/tmp")] == "tmp"
        words = " ".join(container["args"]).replace("=", " ").split()
        mentioned = {word for word in words if word.startswith("/etc/jetcapture/")}
        assert {word.removeprefix("/etc/jetcapture/") for word in mentioned} <= release.files.keys()
        assert mentioned
        for config in release.configs:
            paths = [config.nats.creds, config.nats.token_file, config.nats.password_file]
            paths += [config.nats.tls.ca, config.nats.tls.cert] if config.nats.tls else []
            if str(config.store.url).startswith("file:"):
                paths.append(PurePosixPath(str(config.store.url).removeprefix("file://")))
                assert mounts[PurePosixPath("/var/lib/jetcapture")] == "archive"
            for file in filter(None, paths):
                assert any(PurePosixPath(file).is_relative_to(mount) for mount in mounts), file
            if config.limits.spool and workload is release.capture:
                assert mounts[PurePosixPath(str(config.limits.spool.path))] == "spool"
    ran = [word for word in release.container["args"] if word.endswith(".yaml")]
    assert ran == [f"/etc/jetcapture/{name}" for name in release.files]


def may_do_no_more_than_it_needs(spec: Object) -> None:
    assert spec["securityContext"]["runAsNonRoot"]
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in (REPOSITORY / "Dockerfile").read_text()
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def is_probed_and_scraped_where_it_serves(release: Release) -> None:
    (port,) = release.container["ports"]
    for config in release.configs:
        assert config.http is not None
        assert config.http.listen.rpartition(":")[2] == str(port["containerPort"])
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert release.container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    services = release.of_kind("Service")
    for service in services:
        (served,) = service["spec"]["ports"]
        assert served == {"name": "http", "port": port["containerPort"], "targetPort": port["name"]}
    annotations = release.capture["spec"]["template"]["metadata"]["annotations"]
    if monitors := release.of_kind("ServiceMonitor"):
        (endpoint,) = monitors[0]["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
        assert "prometheus.io/scrape" not in annotations
        selected = monitors[0]["spec"]["selector"]["matchLabels"]
        assert all(selected.items() <= service["metadata"]["labels"].items() for service in services)
    else:
        assert annotations["prometheus.io/port"] == str(port["containerPort"])


def selects_its_own_pods(release: Release) -> None:
    selectors = [release.capture["spec"]["selector"]["matchLabels"]]
    for each in release.objects:
        if each["kind"] == "Service" and not each["metadata"]["name"].endswith("-maintain"):
            selectors.append(each["spec"]["selector"])
        elif each["kind"] == "PodDisruptionBudget":
            selectors.append(each["spec"]["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy":
            selectors.append(each["spec"]["podSelector"]["matchLabels"])
        elif each["kind"] == "CronJob":  # a job's pod is no replica
            of_job = each["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
            assert not selectors[0].items() <= of_job.items()
    spread = pod(release.capture).get("topologySpreadConstraints", ())
    selectors += [constraint["labelSelector"]["matchLabels"] for constraint in spread]
    labels = release.capture["spec"]["template"]["metadata"]["labels"]
    assert all(selector.items() <= labels.items() for selector in selectors)


def test_a_pod_is_killed_only_after_its_drain() -> None:
    for drain in ("1h30m", "500ms", "90", 45.5):
        spec = pod(deployment(CAPTURE, {"config": {"drain_timeout": drain}}))
        assert spec["terminationGracePeriodSeconds"] == math.ceil(parse_duration(drain)) + 30, drain


def test_a_pod_has_the_memory_that_its_limit_needs() -> None:
    for memory in ("1.5GiB", "500MB", 268_435_456):
        (container,) = pod(deployment(CAPTURE, {"config": {"limits": {"memory": memory}}}))["containers"]
        needed = (400 << 20) + 2 * math.ceil(parse_size(memory) / (1 << 20)) * (1 << 20)
        assert parse_size(f"{container['resources']['limits']['memory']}B") == needed, memory


def test_an_upgrade_does_not_wait_for_a_claim_that_only_one_node_can_mount() -> None:
    def strategy(*values: Any) -> str:
        return str(deployment(CAPTURE, {"claim": "archive"}, *values)["spec"]["strategy"]["type"])

    assert strategy({"replicas": 1}) == "Recreate"
    assert strategy({"replicas": 2}) == "RollingUpdate"
    assert strategy({"replicas": 1, "autoscaling": {"enabled": True}}) == "RollingUpdate"
    assert deployment(CAPTURE, {"replicas": 1})["spec"]["strategy"]["type"] == "RollingUpdate"


def test_a_full_spool_does_not_evict_its_pod_and_large_numbers_stay_numbers() -> None:
    limits = {"memory": "256MiB", "spool": {"path": "/spool", "size": "1GB"}}
    numbers = {"block": {"max_messages": 123_456_789}, "source": {"start_sequence": 9_007_199_254_740_991}}
    release = Release(render(CAPTURE, {"config": {"limits": limits, **numbers}}))
    (spool,) = (each for each in pod(release.capture)["volumes"] if each["name"] == "spool")
    assert parse_size(f"{spool['emptyDir']['sizeLimit']}B") >= parse_size("1GB") + MAX_FILES * 4096
    found = yaml.safe_load(release.files["jetcapture.yaml"])
    assert found["block"]["max_messages"] == 123_456_789
    assert found["source"]["start_sequence"] == 9_007_199_254_740_991


def test_a_change_of_the_configuration_replaces_the_replicas() -> None:
    def checksum(*values: Any) -> str:
        return str(deployment(CAPTURE, *values)["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    before = checksum()
    assert checksum({"config": {"block": {"interval": "1h"}}}) != before
    assert checksum({"replicas": 7}) == before


def test_keda_scales_on_lag_beyond_that_of_a_waiting_block() -> None:
    release = release_of("autoscaling.yaml")
    spec = release.of_kind("ScaledObject")[0]["spec"]
    assert "replicas" not in release.capture["spec"]
    assert spec["scaleTargetRef"]["name"] == release.capture["metadata"]["name"]
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


WRONG: dict[str, Any] = {
    "replica": 3,
    "config": {
        "nats": {"password": "hunter2", "user_seed": "SUAB"},
        "source": {"ack_waitt": "30s", "mode": "other", "consumer": None},
        "http": {"listen": "127.0.0.1:8080"},
        "drain_timeout": "soon",
        "limits": {"memory": "1G"},
    },
    "secrets": [{"name": "nats", "mountPath": "etc"}],
    "jobs": {"Compact": {"enabled": True, "schedule": "30 1 * * *", "args": ["compact"]}},
}
REASONS = (
    "additional properties 'replica' not allowed",
    "at '/config/nats/password': ",
    "at '/config/nats/user_seed': ",
    "at '/config/source': additional properties 'ack_waitt' not allowed",
    "at '/config/source/mode': value must be one of 'shared', 'ordered'",
    "at '/config/source/consumer': got null, want string",
    "at '/config/http/listen': ",
    "at '/config/drain_timeout': 'soon' does not match pattern '^([0-9]",
    "at '/config/limits/memory': '1G' does not match pattern '^[0-9]",
    "at '/secrets/0/mountPath': ",
    "Compact",
)
"""Why the schema refuses them."""


def test_values_that_the_schema_does_not_allow_are_refused_with_every_reason() -> None:
    with pytest.raises(RefusedError) as refused:
        render(CAPTURE, WRONG)
    assert [reason for reason in REASONS if reason not in str(refused.value)] == [], refused.value


TWO: dict[str, Any] = {"a": {}, "b": {"source": {"consumer": "b"}}}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"config": {"nats": None}}, "nats"),
    ({"config": {"source": {"stream": None}}}, "stream"),
    ({"config": {"source": {"consumer": ""}}}, "config.source.consumer: required, but not set"),
    (
        {"config": {"source": {"stream": ""}}},
        "config.source: expected stream, streams, bucket",
    ),
    ({"config": {"store": {"url": "file:///data"}}}, "config.store.url: /data is in no volume; set claim or persis"),
    ({"captures": {"a": {"log": {"level": "debug"}}}}, "captures.a.log: one process has one, so it belongs in"),
    ({"captures": {"a": {}, "b": {}}}, "captures.b.source: the same consumer of the same stream as in captures.a"),
    ({"captures": {"metrics": {}}}, "captures.metrics: the replicas serve this name themselves"),
    ({"claim": "a", "persistence": {"enabled": True}}, "persistence.enabled: claim names an existing claim"),
    ({"persistence": {"enabled": True}}, "persistence.accessModes: 2 replicas need ReadWriteMany"),
    ({"spool": {"perPod": True}}, "spool: no capture has config.limits.spool"),
    ({"prometheusRule": {"enabled": True, "disabled": ["Gone"]}}, "no alert is named Gone; expected one of Jetcapture"),
    ({"autoscaling": {"enabled": True, "lagSeconds": 900}}, "must be above config.block.max_age (900 s)"),
    ({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}}, "must not be below minReplicas"),
    ({"jobs": {"report": {"enabled": True}}}, "jobs.report.claim: a report needs an existing claim"),
    ({"captures": TWO, "jobs": {"compact": {"enabled": True}}}, "jobs.compact.capture: required with several captures"),
    ({"maintain": {"enabled": True}}, "config.maintain says what to do"),
)


def test_values_that_cannot_work_are_refused_with_the_reason() -> None:
    assert render(CAPTURE)
    for values, reason in REFUSED:
        with pytest.raises(RefusedError, match=re.escape(reason)):
            render(CAPTURE, values)


def test_a_password_in_the_environment_is_accepted() -> None:
    release = Release(render(CAPTURE, {"config": {"nats": {"user": "a", "password": "${PASSWORD}"}}}))
    assert model.loads(release.files["jetcapture.yaml"], {"PASSWORD": "hunter2"}).nats.password is not None


def test_jobs_have_arguments_that_they_understand(tmp_path: Path) -> None:
    release = release_of("jobs.yaml")
    jobs = release.of_kind("CronJob")
    assert [each["metadata"]["name"].rpartition("-")[2] for each in jobs] == ["compact", "report", "totals"]
    path = tmp_path / "jetcapture.yaml"
    path.write_text(release.files["jetcapture.yaml"])
    for job in jobs:
        (container,) = pod(job)["containers"]
        assert container["image"].startswith("jetcapture-spark:" if container["args"][0] == "spark" else "jetcapture:")
        mounted = "/etc/jetcapture/jetcapture.yaml"
        check_jetcapture([word.replace(mounted, str(path)) for word in container["args"]])
    report = pod(jobs[1])["containers"][0]
    assert report["args"][0] == "report"
    assert {"name": "output", "mountPath": "/output"} in report["volumeMounts"]


def test_maintenance_is_one_pod_with_the_configuration_of_the_captures() -> None:
    config = {"maintain": {"compact": {}}, "limits": {"memory": "512MiB"}}
    release = Release(render(CAPTURE, {"config": config, "maintain": {"enabled": True}}))
    check_schemas(release.objects)
    workload = release.named("Deployment", "orders-jetcapture-maintain")
    service = release.named("Service", "orders-jetcapture-maintain")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["replicas"] == 1
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod(workload)["containers"]
    assert container["args"] == ["maintain", "/etc/jetcapture/jetcapture.yaml", "--every=5m"]
    check_jetcapture(container["args"])
    assert parse_size(f"{container['resources']['limits']['memory']}B") == (200 + 512) << 20
    assert not release.capture["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_several_captures_share_a_process_and_its_limits() -> None:
    release = release_of("several.yaml")
    spec, container = pod(release.capture), release.container
    check_jetcapture(container["args"])
    assert container["args"][-1] == "--keep-going"
    assert parse_size(f"{container['resources']['limits']['memory']}B") == (400 + 2 * (512 + 128 + 128)) << 20
    assert spec["terminationGracePeriodSeconds"] == 120 + 30
    (maintained,) = pod(release.named("Deployment", "orders-jetcapture-maintain"))["containers"]
    check_jetcapture(maintained["args"])
    assert maintained["args"][1:-1] == container["args"][1:-1]
    (job,) = pod(release.named("CronJob", "orders-jetcapture-compact"))["containers"]
    assert "--config=/etc/jetcapture/orders.yaml" in job["args"]
    shared = release_of("shared.yaml").container
    assert "--keep-going" not in shared["args"]
    spools = [mount for mount in shared["volumeMounts"] if mount["name"] == "spool"]
    assert [mount["subPath"] for mount in spools] == ["0", "1"]


def test_volumes_of_a_release_are_as_large_as_asked_and_an_archive_outlives_it() -> None:
    release = release_of("volumes.yaml")
    (claim,) = release.of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = {each["name"]: each for each in pod(release.capture)["volumes"]}
    assert volumes["archive"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    asked = volumes["spool"]["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
    assert parse_size(f"{asked}B") >= parse_size("8GiB") + MAX_FILES * 4096
    assert release.capture["spec"]["strategy"]["type"] == "Recreate"


def test_alerts_of_a_release_are_about_its_own_pods_and_can_be_chosen(tmp_path: Path) -> None:
    def rules(case: str) -> dict[str, dict[str, Any]]:
        (found,) = release_of(case).of_kind("PrometheusRule")
        (tmp_path / case).write_text(yaml.safe_dump(found["spec"]))
        done = subprocess.run(
            [tool(PROMTOOL), "check", "rules", str(tmp_path / case)], capture_output=True, text=True, check=False
        )
        assert "SUCCESS" in done.stdout, done.stderr
        return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}

    alerts = yaml.safe_load((MANIFESTS.parent / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    own = rules("several.yaml")
    assert own.keys() == {rule["alert"] for rule in alerts} - {"JetcaptureRedelivered"}
    for rule in own.values():
        assert rule["expr"].count("jetcapture_") == rule["expr"].count('{namespace="archive",pod=~"orders-jetcapture-')
        assert "runbook_url" not in rule["annotations"]
    others = rules("azure.yaml")
    assert others["JetcaptureGone"]["expr"] == 'absent(jetcapture_info{job="archive"})'
    assert (
        others["JetcaptureGone"]["annotations"]["runbook_url"] == "https://wiki.example.com/jetcapture#jetcapturegone"
    )


def test_the_chart_has_the_settings_of_the_model_and_the_files_for_monitoring() -> None:
    generate = generator()
    assert generate.chart_schema() == (CHART / "values.schema.json").read_text(), "run `make docs`"
    assert generate.dashboard() == (generate.MONITORING / "grafana.json").read_text(), "run `make docs`"
    for name in generate.COPIED:
        assert (generate.MONITORING / name).read_text() == (CHART / "files" / name).read_text(), "run `make docs`"


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


def test_the_values_of_the_page_give_releases() -> None:
    (release,) = (yaml.safe_load(shown.text) for shown in blocks("docs/kubernetes.md", "yaml"))
    openshift = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    maintenance = {"config": {"maintain": {"compact": {}}}, "maintain": {"enabled": True}}
    rendered = Release(render(release))
    check_schemas(rendered.objects)
    assert len(rendered.configs) == 1
    objects = render(release, maintenance)
    check_schemas(objects)
    assert sum(each["kind"] == "Deployment" for each in objects) == 2, "the captures, and maintenance"
    assert (
        pod(deployment(release))["containers"][0]["image"] == f"registry.example.com/jetcapture:{version('jetcapture')}"
    )
    for workload in render(release, openshift, maintenance, {"jobs": {"compact": {"enabled": True}}}):
        if workload["kind"] in ("Deployment", "CronJob"):
            assert pod(workload)["securityContext"] == {
                "runAsNonRoot": True,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }


def test_any_user_in_group_0_can_run_the_image() -> None:
    owned = re.findall(r"install -d (.+) /var/lib/jetcapture", (REPOSITORY / "Dockerfile").read_text())
    assert owned == ["-o 10001 -g 0 -m 775"]
