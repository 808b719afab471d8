"""`check` finds every broken set-up in one line, and predicts how long blocks will be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError
from jetcapture_py.manage.check import check, messages_per_object, run
from jetcapture_py.manage.check_server import CheckFinding, skips_messages
from jetcapture_py.manage.many import show_one
from tests.chaos.clock import Clock
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, config, publish, settings

SECOND = 10**9
EXPLICIT = {"name": CONSUMER, "durable_name": CONSUMER, "ack_policy": "explicit", "ack_wait": 120 * SECOND}


def problems(configuration: Config, **options: Any) -> list[CheckFinding]:
    return asyncio.run(check(configuration, **options)).problems


def stream_of(server: NatsServer, **settings: Any) -> None:
    asyncio.run(create(server.url, {"name": STREAM, "subjects": ["orders.>"], **settings}))


def consumer_of(server: NatsServer, **settings: Any) -> None:
    body = {"stream_name": STREAM, "config": {**EXPLICIT, "max_ack_pending": 50_000, **settings}, "action": "create"}
    asyncio.run(ask(server.url, f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", body))


def test_a_set_up_that_works_has_no_problem_and_exit_code_0(
    server: NatsServer, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(publish(server.url, [(f"orders.{n % 3}", b"x", None) for n in range(100)]))
    configuration = config(server.url, archive, block={"interval": "1m"})
    assert problems(configuration) == []
    assert show_one(run(configuration)) == 0
    text = capsys.readouterr().out
    for part in ("JetStream", "clock", "consumer", "permission", "decode", "objects", "retention", "store"):
        assert f"ok       {part}" in text
    assert asyncio.run(ask(server.url, f"STREAM.INFO.{STREAM}"))["state"]["consumer_count"] == 0
    assert f"ok       store        {archive} is empty or missing: a new archive\n" in text
    assert not archive.exists()
    (line,) = [line for line in text.splitlines() if line.startswith("ok       objects")]
    assert re.search(r"objects will have about .* messages? \(.*\); `jetcapture maintain` merges them$", line)
    assert show_one(run(configuration, outage=None), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["figures"]["keys"], found["findings"][0].keys()) == (True, 3, {"about", "level", "text"})
    assert found["figures"]["messages_per_object"] >= 1


BRIEF = {"max_age": 600 * SECOND, "duplicate_window": 60 * SECOND}
NO_ACKS = {"ack_policy": "none", "max_ack_pending": -1, "ack_wait": 0}
MISSING = f"stream {STREAM} does not exist"
FOUND: list[tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any], str, str]] = [
    ({}, None, {"source": {"ack_wait": "2s"}}, "ack_wait", "set it to 30s"),
    ({}, {"ack_wait": SECOND}, {}, "ack_wait", ""),
    ({}, {"deliver_subject": "push.here"}, {}, "consumer", "is a push consumer"),
    ({}, NO_ACKS, {}, "consumer", "has ack_policy none"),
    ({}, {"headers_only": True}, {}, "consumer", "has headers_only set"),
    ({}, None, {"source": {"filter_subjects": ["a.*"]}}, "", "a.* matches none of the stream's subjects (orders.>)"),
    ({}, None, {"store": {"url": "/dev/null/archive"}}, "store", ""),
    (BRIEF, None, {}, "retention", "keeps messages for 10m (max_age)"),
    (None, None, {"stream": {"subjects": ["orders.>"]}}, "", f"{MISSING}; `jetcapture apply` creates it"),
    (None, None, {}, "", MISSING),
]


def test_what_keeps_a_capture_from_working_is_found(server: NatsServer, tmp_path: Path) -> None:
    for stream, consumer, sections, about, text in FOUND:
        if stream is not None:
            stream_of(server, **stream)
        if consumer is not None:
            consumer_of(server, **consumer)
        found = problems(config(server.url, tmp_path, **sections))
        if about == "consumer":  # of another kind, it may have other problems as well
            found = [problem for problem in found if problem.about == about]
        (problem,) = found
        assert text in problem.text
        assert about in ("", problem.about)
        if stream is not None:
            asyncio.run(ask(server.url, f"STREAM.DELETE.{STREAM}"))
    stream_of(server, max_age=12 * 3600 * SECOND)
    assert problems(config(server.url, tmp_path)) == []
    (problem,) = problems(config(server.url, tmp_path), outage=2 * 86_400.0)
    assert "raise max_age to keep 2d or more" in problem.text


USERS = """
authorization {
  users: [
    { user: a, password: a }
    { user: capture, password: c, permissions: { subscribe: "_INBOX.>", publish: %s } }
  ]
}
"""
ACCOUNTS = """
accounts {
  A {
    jetstream: enabled, users: [{ user: a, password: a }], exports: [{ service: "$JS.API.>", response_type: stream }]
  }
  DEAF {
    users: [{ user: capture, password: c }]
    imports: [{ service: { account: A, subject: "$JS.API.>" }, to: "JS.owner.API.>" }]
  }
}
"""
NO_PULLS = '["$JS.API.INFO", "$JS.API.STREAM.>", "$JS.API.CONSUMER.*.ORDERS.*", "$JS.ACK.>"]'
NO_ACK = f"$JS.ACK.{STREAM}.{CONSUMER}.>"


@pytest.mark.parametrize(
    ("servers", "login", "missing"),
    [
        (USERS % '["$JS.API.>"]', {}, NO_ACK),
        (USERS % NO_PULLS, {}, "CONSUMER.MSG.NEXT"),
        (ACCOUNTS, {"api_prefix": "JS.owner.API"}, f"nobody receives acknowledgements to {NO_ACK}; import $JS.ACK.>"),
    ],
    ids=["acknowledgements", "pulls", "import"],
)
def test_a_missing_permission_or_import_is_found(
    nats_server: Callable[..., NatsServer], tmp_path: Path, servers: str, login: dict[str, str], missing: str
) -> None:
    server = nats_server(f"{servers}\nno_auth_user: a")
    stream_of(server)
    consumer_of(server)
    (found,) = problems(config(server.url, tmp_path, nats={"user": "capture", "password": "c", **login}))
    assert missing in found.text


def test_limits_of_the_account_and_no_jetstream_and_no_server_are_found(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    account = "accounts { A { %s users: [{ user: a, password: a }] } }\nno_auth_user: a"
    server = nats_server(account % "jetstream: { max_ack_pending: 1000, max_consumers: 1 }\n")
    asyncio.run(create(server.url, {"name": STREAM, "subjects": ["orders.>"]}))
    other = {"stream_name": STREAM, "config": {"name": "other", "durable_name": "other", "ack_policy": "explicit"}}
    asyncio.run(ask(server.url, f"CONSUMER.CREATE.{STREAM}.other", other))
    first, second = problems(config(server.url, tmp_path))
    assert (first.about, second.about) == ("account", "account")
    assert "a max_ack_pending of 1000" in first.text
    assert "1 consumers and has 1" in second.text
    (found,) = problems(config(nats_server(account % "").url, tmp_path))
    assert (found.about, "enable" in found.text) == ("JetStream", True)
    (found,) = problems(config("nats://127.0.0.1:9", tmp_path))
    assert found.about == "connection"


def test_an_object_of_the_users_that_is_missing_is_the_same_error_as_of_a_start(tmp_path: Path) -> None:
    for sections in (
        {"block": {"format": "jetcapture_py.text:Writer"}},
        {"decode": {"format": "jetcapture_py.text:Decoder"}},
        {"key": "jetcapture_py.text:key"},
        {"on_stored": {"call": "jetcapture_py.text:call"}},
    ):
        configuration = config("nats://127.0.0.1:9", tmp_path, **sections)
        with pytest.raises(ConfigError) as of_a_start:
            Capture(configuration)
        with pytest.raises(ConfigError) as of_a_check:
            run(configuration)
        assert of_a_check.value.problems == of_a_start.value.problems
        assert "cannot import jetcapture_py.text:" in str(of_a_check.value)


def warnings(configuration: Config) -> dict[str, list[str]]:
    """The warnings of a check, by what they are about."""
    texts: dict[str, list[str]] = {}
    for finding in asyncio.run(check(configuration)).items:
        if finding.level == "warning":
            texts.setdefault(finding.about, []).append(finding.text)
    return texts


def reading(number: int) -> bytes:
    if number % 10 == 9:
        return b"[" * (number + 1)
    row = {"id": "text" if number % 10 == 8 else number, "device": {"id": "d1"}, "readings": [{"value": 1}]}
    return json.dumps(row).encode()


def test_keys_columns_and_times_that_no_message_has_are_found_and_every_reason_of_quarantine(
    server: NatsServer, tmp_path: Path
) -> None:
    asyncio.run(publish(server.url, [("orders.a", reading(number), None) for number in range(100)]))

    def decoded(path: str, key: str, **sections: Any) -> dict[str, list[str]]:
        columns = {"id": "int64", "device": {"type": "string", "path": path}}
        columns |= {"value": {"type": "float64", "path": "readings[0].value"}} if path == "device.idd" else {}
        decode = {"format": "json", "columns": columns}
        return warnings(config(server.url, tmp_path, key=key, decode=decode, **sections))

    found = decoded("device.idd", "{region}-{id}")
    malformed, wrong = found["decode"]
    assert malformed.startswith("10 of the newest 100 messages go to quarantine (decode): ")
    assert wrong.startswith("10 of the newest 100 messages go to quarantine (decode): ")
    assert malformed.partition("): ")[2] != wrong.partition("): ")[2]
    (key,) = found["key"]
    assert key == (
        "no message of the newest 100 messages has {region}, so none has a key: correct key ({region}-{id}); "
        "columns with values are id"
    )
    (columns,) = found["columns"]
    assert columns.startswith(
        "null in all rows of the newest 100 messages: device (path: device.idd), value (path: readings[0].value); "
    )
    (small,) = warnings(config(server.url, tmp_path, source={"max_ack_pending": 1_000}))["objects"]
    assert small.endswith("reads are slow until then: set maintain.compact")
    merged = config(server.url, tmp_path, source={"max_ack_pending": 1_000}, maintain={"compact": {}})
    assert "objects" not in warnings(merged)
    assert {"key", "columns", "time"}.isdisjoint(decoded("device.id", "{device}"))
    for column, levels in (("id", {"warning"}), ("device", {"problem", "skipped"})):  # 20 and 100 of 100 messages
        decode = {"format": "json", "columns": {column: "int64"}}
        items = asyncio.run(check(config(server.url, tmp_path, decode=decode, source={"max_ack_pending": 1_000}))).items
        assert {item.level for item in items if item.about in {"decode", "objects"}} == levels
        assert any("about 267 messages" in item.text for item in items) == (column == "id")  # not 333

    inferred = config(server.url, tmp_path, key="{subject[3]}", decode={"format": "json"})
    assert "has {subject[3]}, so none has a key" in warnings(inferred)["key"][0]
    (time,) = decoded("device.id", "{device}", block={"time": "header.Time", "time_fallback": "timestamp"})["time"]
    assert "no message of the newest 100 messages has block.time (header.Time), so all take the stream's time" in time


def test_a_wrong_clock_is_found(server: NatsServer, tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    if not clock.can_jump:
        pytest.skip("needs a C compiler")
    clock.shift(3600)
    stream_of(server)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(server.url, tmp_path / "archive")))
    command = [sys.executable, "-m", "jetcapture_py", "check", str(path)]
    done = subprocess.run(command, env={**os.environ, **clock.environment}, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "clock" in line
    assert "ahead of the server's; synchronize both with NTP" in line


def test_servers_whose_consumers_skip_messages_are_known_by_their_versions() -> None:
    versions = ("2.10.26", "2.14.7", "2.14.8", "2.14.12", "2.15.0", "2.15.1", "2.15.1-RC.1", "2.16.0", "3.0.0-dev")
    assert [version for version in versions if skips_messages(version)] == ["2.10.26", "2.14.7", "2.15.0"]


LIMITS: list[tuple[float, int, float, dict[str, Any], tuple[float, str]]] = [
    (10, 1, 100, {}, (9_000, "block.max_age")),
    (10, 4, 100, {}, (2_250, "block.max_age")),
    (10, 1, 100, {"block": {"interval": "1m"}}, (600, "block.interval")),
    (1_000, 1, 100, {}, (10_000, "source.max_ack_pending")),
    (1_000, 4, 100, {}, (4_000, "source.max_ack_pending")),
    (1_000, 1, 1 << 20, {}, (128, "block.max_bytes")),
    (1_000, 1, 1 << 20, {"limits": {"memory": "256MiB"}}, (64, "limits.memory")),
    (1_000, 1, 100, {"block": {"max_messages": 50}}, (50, "block.max_messages")),
]


def test_messages_in_an_object_follow_from_the_first_limit() -> None:
    for rate, keys, message_bytes, sections, expected in LIMITS:
        configuration = config("nats://127.0.0.1:4222", "/archive", **sections)
        assert messages_per_object(configuration, rate, keys, message_bytes, 30_000) == expected
    configuration = config("nats://127.0.0.1:4222", "/archive")
    for rate, messages in ((10, 4_500), (1_000, 5_000)):
        assert messages_per_object(configuration, rate, 1, 100, 30_000, archived=0.5)[0] == messages
