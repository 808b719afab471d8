"""A real Prometheus that scrapes processes of a test; skipped where there is none."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.support.ports import free_port
from tests.support.tools import PROMETHEUS, tool

RULES = Path(__file__).parents[2] / "examples" / "monitoring" / "alerts.yaml"
START_TIMEOUT = 120.0


class Prometheus:
    """A Prometheus with its data in `home`, which scrapes each second and evaluates the alert rules.

    `targets` are the labels of each address; `rules` are evaluated besides those of examples/monitoring.
    """

    def __init__(self, home: Path, targets: Mapping[str, Mapping[str, str]], rules: Sequence[Path] = ()) -> None:
        self._binary = tool(PROMETHEUS)
        self._home = home
        home.mkdir()
        static = [{"targets": [address], "labels": dict(labels)} for address, labels in targets.items()]
        scrape = {"job_name": "jetcapture", "static_configs": static}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES), *map(str, rules)],
            "scrape_configs": [scrape],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def query(self, expression: str) -> list[float]:
        found = self._get("query", query=expression)["result"]
        values = [float(value) for _, value in (each["value"] for each in found)]
        return [value for value in values if not math.isnan(value)]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def __enter__(self) -> Self:
        words = [self._binary, f"--config.file={self._home / 'prometheus.yml'}"]
        words += [f"--storage.tsdb.path={self._home / 'data'}", f"--web.listen-address={self._address}"]
        log = self._home / "prometheus.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(words, stdout=output, stderr=output)
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                urlopen(f"http://{self._address}/-/ready", timeout=10).close()
                return self
            except OSError:
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, f"Prometheus does not answer:\n{log.read_text()}"
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
