"""The Helm chart: Kubernetes accepts what it renders, and jetcapture finds everything where its configuration says."""

from __future__ import annotations

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
    check_schemas,
    helm,
    pod,
    render,
)
from tests.support.tools import PROMTOOL, tool

CASES = sorted(MANIFESTS.glob("values/*.yaml"))
NATS, SOURCE = {"servers": ["nats://nats:4222"]}, {"stream": "ORDERS", "consumer": "archive"}
CAPTURE = {"config": {"nats": NATS, "source": SOURCE, "store": {"url": "s3://archive/nats"}}}


@dataclass(frozen=True)
class Release:
    objects: list[Object]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        return next(each for each in self.of_kind(kind) if each["metadata"]["name"] == name)

    @cached_property
    def files(self) -> dict[str, str]:
        (found,) = (each["data"] for each in self.of_kind("ConfigMap") if "jetcapture.json" not in each["data"])
        return dict(found)

    @cached_property
    def capture(self) -> Object:
        return next(each for each in self.of_kind("Deployment") if not each["metadata"]["name"].endswith("-maintain"))

    @property
    def checksum(self) -> str:
        return str(self.capture["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    @cached_property
    def container(self) -> Object:
        (found,) = pod(self.capture)["containers"]
        return dict(found)

    @cached_property
    def configs(self) -> list[Config]:
        environment = {each["name"]: each.get("value", "secret") for each in self.container.get("env", ())}
        return [model.loads(text, environment) for text in self.files.values()]


def released(**values: Any) -> Release:
    return Release(render(CAPTURE, values))


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


def test_kubernetes_accepts_every_plain_manifest() -> None:
    for path in MANIFESTS.glob("*.yaml"):
        objects = list(yaml.safe_load_all(path.read_text()))
        assert objects, path
        check_schemas(objects)


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
        assert [(each["port"], each["path"]) for each in monitors[0]["spec"]["endpoints"]] == [("http", "/metrics")]
        assert "prometheus.io/scrape" not in annotations
        selected = monitors[0]["spec"]["selector"]["matchLabels"]
        assert all(selected.items() <= service["metadata"]["labels"].items() for service in services)
    else:
        assert annotations["prometheus.io/port"] == str(port["containerPort"])


def selects_its_own_pods(release: Release) -> None:
    selectors = [release.capture["spec"]["selector"]["matchLabels"]]
    selectors += [
        each["spec"]["selector"]
        for each in release.of_kind("Service")
        if not each["metadata"]["name"].endswith("-maintain")
    ]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in release.of_kind("PodDisruptionBudget")]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in release.of_kind("NetworkPolicy")]
    spread = pod(release.capture).get("topologySpreadConstraints", ())
    selectors += [constraint["labelSelector"]["matchLabels"] for constraint in spread]
    labels = release.capture["spec"]["template"]["metadata"]["labels"]
    assert all(selector.items() <= labels.items() for selector in selectors)
    for job in release.of_kind("CronJob"):  # its pod is no replica
        assert not selectors[0].items() <= job["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"].items()


def quantity(of_kubernetes: str) -> int:
    return parse_size(f"{of_kubernetes}B")


def volumes(release: Release) -> dict[str, Object]:
    return {each["name"]: each for each in pod(release.capture)["volumes"]}


def memory(container: Object) -> int:
    return quantity(container["resources"]["limits"]["memory"])


def test_a_pod_has_the_time_the_memory_and_the_disk_that_its_configuration_needs() -> None:
    for drain in ("1h30m", "500ms", "90", 45.5):
        spec = pod(released(config={"drain_timeout": drain}).capture)
        assert spec["terminationGracePeriodSeconds"] == math.ceil(parse_duration(drain)) + 30, drain
    for limit in ("1.5GiB", "500MB", 268_435_456):
        container = released(config={"limits": {"memory": limit}}).container
        assert memory(container) == (400 + 2 * math.ceil(parse_size(limit) / (1 << 20))) << 20, limit
    limits = {"memory": "256MiB", "spool": {"path": "/spool", "size": "1GB"}}
    release = released(config={"limits": limits, "block": {"max_messages": 123_456_789}})
    spool = volumes(release)["spool"]["emptyDir"]
    assert quantity(spool["sizeLimit"]) >= parse_size("1GB") + MAX_FILES * 4096, "or the pod is evicted"
    assert release.configs[0].block.max_messages == 123_456_789, "large numbers stay numbers"
    release = release_of("volumes.yaml")
    (claim,) = release.of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert volumes(release)["archive"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    asked = volumes(release)["spool"]["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
    assert quantity(asked) >= parse_size("8GiB") + MAX_FILES * 4096


def test_an_upgrade_waits_for_no_claim_and_follows_a_change_of_the_configuration() -> None:
    scaled = {"claim": "archive", "replicas": 1, "autoscaling": {"enabled": True}}
    for values, strategy in (
        ({"claim": "archive", "replicas": 1}, "Recreate"),  # only one node can mount it
        ({"claim": "archive", "replicas": 2}, "RollingUpdate"),
        (scaled, "RollingUpdate"),
        ({"replicas": 1}, "RollingUpdate"),
    ):
        assert released(**values).capture["spec"]["strategy"]["type"] == strategy, values
    same, other, before = {"replicas": 7}, {"config": {"block": {"interval": "1h"}}}, released()
    replaced = [released(**values).checksum != before.checksum for values in (same, other)]
    assert replaced == [False, True]


def test_keda_scales_on_lag_beyond_that_of_a_waiting_block() -> None:
    release = release_of("autoscaling.yaml")
    spec = release.of_kind("ScaledObject")[0]["spec"]
    assert "replicas" not in release.capture["spec"]
    assert spec["scaleTargetRef"]["name"] == release.capture["metadata"]["name"]
    lag, cpu = spec["triggers"]
    assert (lag["type"], cpu["type"], lag["metadata"]["threshold"]) == ("prometheus", "cpu", "600")
    query = r'max\(jetcapture_lag_seconds\{namespace="archive",pod=~"(.+)"\}\)'
    match = re.fullmatch(query, lag["metadata"]["query"])
    assert match is not None
    assert re.fullmatch(match[1], "orders-jetcapture-7d9f8b6c5-x2x4z")
    assert not re.fullmatch(match[1], "orders-jetcapture-eu-7d9f8b6c5-x2x4z")
    # scale-in leaves one pod at a time the time to drain
    policies = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"]
    assert policies == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


TWO: dict[str, Any] = {"a": {}, "b": {"source": {"consumer": "b"}}}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"config": {"nats": None}}, "nats"),
    ({"config": {"nats": {"password": "hunter2"}}}, "at '/config/nats/password': "),
    ({"config": {"source": {"stream": None}}}, "stream"),
    ({"config": {"source": {"ack_waitt": "30s"}}}, "at '/config/source': additional properties 'ack_waitt' not allow"),
    ({"config": {"source": {"mode": "other"}}}, "at '/config/source/mode': value must be one of 'shared', 'ordered'"),
    ({"config": {"source": {"consumer": ""}}}, "config.source.consumer: required, but not set"),
    ({"config": {"source": {"stream": ""}}}, "config.source: expected stream, streams, bucket"),
    ({"config": {"http": {"listen": "127.0.0.1:8080"}}}, "at '/config/http/listen': "),
    ({"config": {"drain_timeout": "soon"}}, "at '/config/drain_timeout': 'soon' does not match pattern '^([0-9]"),
    ({"config": {"limits": {"memory": "1G"}}}, "at '/config/limits/memory': '1G' does not match pattern '^[0-9]"),
    ({"config": {"store": {"url": "file:///data"}}}, "config.store.url: /data is in no volume; set claim or persis"),
    ({"secrets": [{"name": "nats", "mountPath": "etc"}]}, "at '/secrets/0/mountPath': "),
    ({"jobs": {"Compact": {"enabled": True, "schedule": "30 1 * * *", "args": ["compact"]}}}, "Compact"),
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
    for values, reason in REFUSED:
        with pytest.raises(RefusedError, match=re.escape(reason)):
            render(CAPTURE, values)
    release = released(config={"nats": {"user": "a", "password": "${PASSWORD}"}})
    assert model.loads(release.files["jetcapture.yaml"], {"PASSWORD": "hunter2"}).nats.password is not None


def test_jobs_have_arguments_that_they_understand(tmp_path: Path) -> None:
    release = release_of("jobs.yaml")
    (tmp_path / "jetcapture.yaml").write_text(release.files["jetcapture.yaml"])
    jobs = {each["metadata"]["name"].rpartition("-")[2]: pod(each)["containers"] for each in release.of_kind("CronJob")}
    assert list(jobs) == ["compact", "report", "totals"]
    for (container,) in jobs.values():
        assert container["image"].startswith("jetcapture-spark:" if container["args"][0] == "spark" else "jetcapture:")
        check_jetcapture([word.replace("/etc/jetcapture", str(tmp_path)) for word in container["args"]])
    assert jobs["report"][0]["args"][0] == "report"
    assert {"name": "output", "mountPath": "/output"} in jobs["report"][0]["volumeMounts"]


def test_maintenance_is_one_pod_with_the_configuration_of_the_captures() -> None:
    config = {"maintain": {"compact": {}}, "limits": {"memory": "512MiB"}}
    release = released(config=config, maintain={"enabled": True})
    check_schemas(release.objects)
    selects_its_own_pods(release)
    workload, service = (release.named(kind, "orders-jetcapture-maintain") for kind in ("Deployment", "Service"))
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["replicas"] == 1
    selectors = (workload["spec"]["selector"]["matchLabels"], service["spec"]["selector"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert not release.capture["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod(workload)["containers"]
    assert container["args"] == ["maintain", "/etc/jetcapture/jetcapture.yaml", "--every=5m"]
    check_jetcapture(container["args"])
    assert memory(container) == (200 + 512) << 20


def test_several_captures_share_a_process_and_its_limits() -> None:
    release = release_of("several.yaml")
    spec, container = pod(release.capture), release.container
    check_jetcapture(container["args"])
    assert container["args"][-1] == "--keep-going"
    assert memory(container) == (400 + 2 * (512 + 128 + 128)) << 20
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


def test_alerts_of_a_release_are_about_its_own_pods_and_can_be_chosen(tmp_path: Path) -> None:
    def rules(case: str) -> dict[str, dict[str, Any]]:
        (found,) = release_of(case).of_kind("PrometheusRule")
        (tmp_path / case).write_text(yaml.safe_dump(found["spec"]))
        words = [tool(PROMTOOL), "check", "rules", str(tmp_path / case)]
        assert "SUCCESS" in subprocess.run(words, capture_output=True, text=True, check=False).stdout
        return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}

    alerts = yaml.safe_load((MANIFESTS.parent / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    own, others = rules("several.yaml"), rules("azure.yaml")
    assert own.keys() == {rule["alert"] for rule in alerts} - {"JetcaptureRedelivered"}
    for rule in own.values():
        assert rule["expr"].count("jetcapture_") == rule["expr"].count('{namespace="archive",pod=~"orders-jetcapture-')
        assert "runbook_url" not in rule["annotations"]
    gone = others["JetcaptureGone"]
    assert gone["expr"] == 'absent(jetcapture_info{job="archive"})'
    assert gone["annotations"]["runbook_url"] == "https://wiki.example.com/jetcapture#jetcapturegone"


def test_the_chart_is_of_the_packages_version_and_model_and_its_oldest_kubernetes_is_checked() -> None:
    chart, generate = yaml.safe_load((CHART / "Chart.yaml").read_text()), generator()
    assert chart["appVersion"] == chart["version"] == version("jetcapture")
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    assert generate.chart_schema() == (CHART / "values.schema.json").read_text(), "run `make docs`"
    assert generate.dashboard() == (generate.MONITORING / "grafana.json").read_text(), "run `make docs`"
    for name in generate.COPIED:
        assert (generate.MONITORING / name).read_text() == (CHART / "files" / name).read_text(), "run `make docs`"


def test_the_values_of_the_page_give_releases() -> None:
    (release,) = (yaml.safe_load(shown.text) for shown in blocks("docs/kubernetes.md", "yaml"))
    openshift = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    maintenance = {"config": {"maintain": {"compact": {}}}, "maintain": {"enabled": True}}
    rendered = Release(render(release))
    check_schemas(rendered.objects)
    assert len(rendered.configs) == 1
    maintained = Release(render(release, maintenance))
    check_schemas(maintained.objects)
    assert len(maintained.of_kind("Deployment")) == 2, "the captures, and maintenance"
    assert maintained.container["image"] == f"registry.example.com/jetcapture:{version('jetcapture')}"
    owned = re.findall(r"install -d (.+) /var/lib/jetcapture", (REPOSITORY / "Dockerfile").read_text())
    assert owned == ["-o 10001 -g 0 -m 775"], "any user in group 0, as on OpenShift"
    everything = Release(render(release, openshift, maintenance, {"jobs": {"compact": {"enabled": True}}}))
    for workload in everything.of_kind("Deployment", "CronJob"):
        security = {"runAsNonRoot": True, "fsGroupChangePolicy": "OnRootMismatch"}
        assert pod(workload)["securityContext"] == {**security, "seccompProfile": {"type": "RuntimeDefault"}}
