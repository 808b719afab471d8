"""Alert rules fire when they should, and ask like the dashboard only for metrics and labels that there are."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import defaultdict
from typing import Any

import yaml

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config import model
from jetcapture_py.monitoring.facts import (
    MaintenanceState,
    TableState,
    capture_metrics,
    gather,
    maintenance_metrics,
    this_process,
)
from jetcapture_py.monitoring.history import History
from tests.support.documents import REPOSITORY
from tests.support.tools import PROMTOOL, tool

MONITORING = REPOSITORY / "examples" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
OF_PROMETHEUS = {"job", "instance", "namespace", "pod"}
"""Labels that a scrape adds."""
LATER = (
    *("lag_seconds", "consumer_unacked_messages", "consumer_max_ack_pending", "consumer_pending_messages"),
    *("block_max_age_seconds", "stream_max_age_seconds", "watermark_timestamp_seconds"),
)
"""Metrics that a capture has once it knows its consumer."""


def promtool(*words: str) -> str:
    done = subprocess.run([tool(PROMTOOL), *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_every_alert_as_its_tests_say() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(MONITORING / "alerts.yaml"))
    assert "SUCCESS" in promtool("test", "rules", str(MONITORING / "alerts_test.yaml"))


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]:
        checks: dict[str, bool] = defaultdict(bool)
        for check in case["alert_rule_test"]:
            checks[check["alertname"]] |= bool(check["exp_alerts"])
        for name, fired in checks.items():
            fires[name].add(fired)
    assert fires == {rule["alert"]: {True, False} for rule in RULES}


async def known() -> tuple[dict[str, set[str]], set[str]]:
    observed = Capture(model.loads((REPOSITORY / "examples" / "minimal.yaml").read_text()))
    values = {f"jetcapture_{name}": set[str]() for name in LATER}
    table = TableState(name="nats.orders", snapshot=None, files=0, waiting=0, renamed=0, complete_to=None)
    maintained = maintenance_metrics({"orders": MaintenanceState(stream="ORDERS", tables=(table,))})
    captured = capture_metrics({"orders": gather(History(observed), this_process())}, 0)
    samples = [each for metrics in (captured, maintained) for metric in metrics.collect() for each in metric.samples]
    for sample in samples:
        values.setdefault(sample.name, set()).update(sample.labels.values())
    return values, {label for sample in samples for label in sample.labels}


def test_rules_and_dashboard_ask_for_metrics_and_labels_that_there_are() -> None:
    metrics, labels = asyncio.run(known())
    board = json.loads((MONITORING / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert min(len(RULES), len(queries) // 5) >= 8
    for expression in (*(rule["expr"] for rule in RULES), *queries):
        assert metrics.keys() >= set(re.findall(r"jetcapture_\w+", expression)), expression
        grouped = ", ".join(re.findall(r"\b(?:by|on|group_left|without) \(([\w, ]+)\)", expression))
        matched = [label for found in re.findall(r"{(.+?)}", expression) for label in re.findall(r"(\w+)=", found)]
        assert {*grouped.split(", "), *matched} <= labels | OF_PROMETHEUS | {""}, expression
        for name, reason in re.findall(r'(jetcapture_\w+)\{reason="(\w+)"\}', expression):
            assert reason in metrics[name]
    assert {rule["labels"]["severity"] for rule in RULES} == {"page", "ticket"}


def test_the_variables_of_the_dashboard_are_labels_of_the_metrics_they_ask() -> None:
    metrics, labels = asyncio.run(known())
    board: Any = json.loads((MONITORING / "grafana.json").read_text())
    asked = {each["name"]: each["definition"] for each in board["templating"]["list"] if each["type"] == "query"}
    assert list(asked) == ["namespace", "stream", "capture", "replica"]
    for definition in asked.values():
        match = re.fullmatch(r"label_values\((jetcapture_\w+).*, (\w+)\)", definition)
        assert match is not None, definition
        assert match[1] in metrics
        assert match[2] in labels | OF_PROMETHEUS
