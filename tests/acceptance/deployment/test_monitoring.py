"""Alert rules fire when they should, and every query of the dashboard and of the chart gets data from real replicas."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documents import REPOSITORY
from tests.support.kubernetes import MANIFESTS, by_kind, render
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.prometheus import RULES, Prometheus
from tests.support.running import Command, publish, settings
from tests.support.tools import PROMETHEUS, PROMTOOL, tool

MONITORING = REPOSITORY / "examples" / "monitoring"
TESTS = MONITORING / "alerts_test.yaml"
BOARD = json.loads((MONITORING / "grafana.json").read_text())
LABELS = {"namespace": "archive", "pod": "orders-jetcapture-7d9f8b6c5-x2x4z"}
TIMEOUT = 240.0


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def promtool(*words: str) -> str:
    done = subprocess.run([tool(PROMTOOL), *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_every_alert_as_its_tests_say() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            assert check["alertname"] in rules()
        for name in {check["alertname"] for check in case["alert_rule_test"]}:
            checks = [check for check in case["alert_rule_test"] if check["alertname"] == name]
            fires[name].add(any(check["exp_alerts"] for check in checks))
    assert fires == {name: {True, False} for name in rules()}


@pytest.mark.parametrize(
    ("alert", "wrong"), [("JetcaptureBehind", "> 36000"), ("JetcaptureRedelivered", "> 0 * rate(")], ids=str
)
@pytest.mark.exhaustive
def test_a_wrong_rule_fails_its_tests(alert: str, wrong: str, tmp_path: Path) -> None:
    right = {"> 36000": "> 3600", "> 0 * rate(": "> 0.01 * rate("}[wrong]
    shutil.copy(TESTS, tmp_path)
    text = RULES.read_text()
    assert text.count(right) == 1
    (tmp_path / RULES.name).write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError, match=alert):
        promtool("test", "rules", str(tmp_path / TESTS.name))


# ------------------------------------------------------------------ real metrics


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a capture of a stream to which messages are published."""
    tool(PROMETHEUS)
    directory = tmp_path_factory.mktemp("monitoring")
    address = f"127.0.0.1:{free_port()}"
    with NatsServer(directory / "nats") as server:
        asyncio.run(publish(server.url, [("orders.eu", b"0", None)]))
        block = {"max_age": "500ms"}
        config = settings(server.url, directory / "archive", block=block, http={"listen": address})
        with (
            Command(directory, config).start(),
            published(server.url),
            Prometheus(directory / "home", [address], LABELS) as found,
        ):
            yield found


@contextmanager
def published(url: str) -> Iterator[None]:
    """Publish some messages again and again."""
    stop = threading.Event()

    def load() -> None:
        while not stop.wait(0.2):
            asyncio.run(publish(url, [("orders.eu", b"%d" % number, None) for number in range(20)]))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def answered(ask: Callable[[], Any], what: str) -> Any:
    """Ask until there is an answer."""
    deadline = time.monotonic() + TIMEOUT
    while not (found := ask()):
        assert time.monotonic() < deadline, f"no data: {what}"
        time.sleep(0.5)
    return found


@pytest.mark.parametrize(
    "expression",
    [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]],
)
def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus, expression: str) -> None:
    assert answered(lambda: prometheus.query(expression), expression)


def test_prometheus_can_evaluate_every_alert_rule(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        found = prometheus.rules()
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = answered(evaluated, "alert rules")
    assert {rule["name"]: rule.get("lastError", "") for rule in found} == dict.fromkeys(rules(), "")


def test_the_query_that_keda_scales_by_returns_the_lag(prometheus: Prometheus) -> None:
    scaled = by_kind(render(MANIFESTS / "values" / "autoscaling.yaml"))["ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    (lag,) = answered(lambda: prometheus.query(query), query)
    assert 0 <= lag < TIMEOUT
