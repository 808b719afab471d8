"""Alert rules fire when they should, and every query of the dashboard and of the chart gets data from real replicas."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.integration.maintain.test_commands import fill as fill_old
from tests.integration.maintain.test_commands import service
from tests.support.archives import Archive
from tests.support.documents import REPOSITORY
from tests.support.kubernetes import MANIFESTS, by_kind, render
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.prometheus import RULES, Prometheus
from tests.support.publishing import Publisher
from tests.support.running import connection
from tests.support.several import fill, of_stream, process, subject, write
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


# ------------------------------------------------------------------ real metrics

STREAMS = ("AUDIT", "ORDERS", "PAYMENTS")
ALONE = "EVENTS"
"""The stream of a process with one capture, whose metrics have no labels `capture` and `stream`."""


@dataclass
class Monitored:
    """A Prometheus, and the address of each process that it scrapes."""

    prometheus: Prometheus
    several: str
    alone: str


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A process with three captures, one with a fourth, and one that maintains another archive with a table."""
    tool(PROMETHEUS)
    directory = tmp_path_factory.mktemp("monitoring")
    several, alone, maintained = (f"127.0.0.1:{free_port()}" for _ in range(3))
    captures, archive = directory / "captures", Archive(directory / "old")
    fill_old(archive)
    catalog = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db"}
    section = {"compact": {"after": "0s", "grace": "0s"}, "table": {"name": "nats.old", "catalog": catalog}}
    old = write(
        directory / "old-captures", "old", of_stream("nats://127.0.0.1:1", "ORDERS", archive.root, maintain=section)
    )
    (rule,) = (each for each in render(MANIFESTS / "values" / "several.yaml") if each["kind"] == "PrometheusRule")
    (directory / "release.yaml").write_text(yaml.safe_dump(rule["spec"]))
    with NatsServer(directory / "nats") as server:
        asyncio.run(fill(server.url, [*STREAMS, ALONE], 1))
        own = {"decode": {"format": "json"}, "block": {"max_age": "500ms"}, "source": {"consumer": "archive"}}
        for stream in (*STREAMS, ALONE):
            where = captures if stream != ALONE else directory / "alone"
            found = of_stream(server.url, stream, directory / "archive", **own, http={"listen": several})
            write(where, stream.lower(), found | ({} if stream != ALONE else {"http": {"listen": alone}}))
        pods = {
            several: LABELS,
            alone: {**LABELS, "pod": "orders-jetcapture-7d9f8b6c5-abcde"},
            maintained: {**LABELS, "pod": "orders-jetcapture-maintain-6c5d4f-q8w9e"},
        }
        with (
            process(captures).start(),
            process(directory / "alone").start(),
            service(old, "--every", "1s", "--http", maintained, log=directory / "maintain.log"),
            published(server.url),
            Prometheus(directory / "home", pods, [directory / "release.yaml"]) as found,
        ):
            yield Monitored(found, several, alone)


@contextmanager
def published(url: str) -> Iterator[None]:
    """Publish some messages again and again, one of which cannot be decoded."""
    stop = threading.Event()

    async def once() -> None:
        async with connection(url) as client, Publisher(client) as publisher:
            for stream in (*STREAMS, ALONE):
                for number in range(20):
                    await publisher.publish(subject(stream), b'{"n": %d}' % number if number else b"?", None)
            await publisher.flush()

    def load() -> None:
        while not stop.wait(0.2):
            asyncio.run(once())

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


def chosen(expression: str, **variables: str) -> str:
    """A query of the dashboard, with what Grafana puts in place of its variables."""
    for name, value in {"__rate_interval": "15s", "__range": "1m", **variables}.items():
        expression = expression.replace(f"${name}", value)
    return re.sub(r"\$\w+", ".*", expression)


def queries() -> list[tuple[str, str]]:
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    return [(f"{panel['title']} {target['refId']}", target["expr"]) for panel in panels for target in panel["targets"]]


def test_every_query_of_the_dashboard_returns_data(monitored: Monitored) -> None:
    for name, expression in queries():
        assert answered(lambda: monitored.prometheus.query(chosen(expression)), name)  # noqa: B023


def test_the_dashboard_shows_what_was_chosen_of_every_kind_of_process(monitored: Monitored) -> None:
    found = dict(queries())
    lag, ready = found["Lag, by stream A"], found["Captures A"]

    def count(expression: str, **variables: str) -> int:
        return len(monitored.prometheus.query(chosen(expression, **variables)))

    answered(lambda: count(lag) == len(STREAMS) + 1, "the lag of every stream")
    assert count(ready) == len(STREAMS) + 1
    for stream in (*STREAMS, ALONE):
        assert count(lag, stream=stream) == 1
    assert count(lag, stream=f"(AUDIT|{ALONE})") == 2
    assert count(lag, capture="orders") == 1
    assert count(lag, replica=re.escape(monitored.alone).replace("\\", "\\\\")) == 1
    assert count(lag, replica=re.escape(monitored.several).replace("\\", "\\\\")) == len(STREAMS)
    assert count(lag, namespace="archive") == len(STREAMS) + 1
    assert count(lag, namespace="other") == 0


def test_the_variables_of_the_dashboard_have_values(monitored: Monitored) -> None:
    asked = {each["name"]: each["definition"] for each in BOARD["templating"]["list"] if each["type"] == "query"}
    assert list(asked) == ["namespace", "stream", "capture", "replica"]
    for definition in asked.values():
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", definition)
        assert match is not None
        query = f"count by ({match[2]}) ({chosen(match[1])})"
        assert answered(lambda: monitored.prometheus.query(query), query)  # noqa: B023


def test_prometheus_can_evaluate_every_alert_rule(monitored: Monitored) -> None:
    def evaluated() -> list[dict[str, Any]]:
        found = monitored.prometheus.rules()
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = answered(evaluated, "alert rules")
    assert {rule["name"]: rule.get("lastError", "") for rule in found} == dict.fromkeys(rules(), "")
    assert len(found) == 2 * len(rules()) - 1, "those of the release too, but for the one that its values leave out"

    def found_alive() -> bool:
        gone = [rule for rule in monitored.prometheus.rules() if rule["name"] == "JetcaptureGone"]
        return [rule["state"] for rule in gone] == ["inactive"] * 2

    answered(found_alive, "a release's rules select the metrics of its pods")


def test_the_query_that_keda_scales_by_returns_the_lag(monitored: Monitored) -> None:
    scaled = by_kind(render(MANIFESTS / "values" / "autoscaling.yaml"))["ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    (lag,) = answered(lambda: monitored.prometheus.query(query), query)
    assert 0 <= lag < TIMEOUT
