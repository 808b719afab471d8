"""`apply` makes stream and consumer as configured, and deletes only with `--may-delete`; `export` is its inverse."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config import yaml_text
from jetcapture_py.config.model import Config, NatsConfig, load_for_apply
from jetcapture_py.errors import ConfigError, SourceError
from jetcapture_py.jetstream.connection import Api
from jetcapture_py.manage.apply import apply, run
from jetcapture_py.manage.export import export
from jetcapture_py.manage.many import show_one
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer, older_servers

SECOND = 10**9
DAY = 86_400 * SECOND
BASE: dict[str, Any] = {"num_replicas": 1, "storage": "file", "retention": "limits"}
LABELS = {"description": "orders: ${all} of $$ them #1", "metadata": {"team": "orders", "1e3": "0o17", "empty": "yes"}}
LIMITS = {"max_age": 7 * DAY, "max_bytes": 1 << 30, "max_msgs": 1000, "max_msg_size": 1 << 20, "max_consumers": 10}
FLAGS = {"no_ack": True, "deny_delete": True, "deny_purge": True, "allow_rollup_hdrs": False, "allow_direct": True}
OTHERS = {"duplicate_window": 30 * SECOND, "compression": "s2", "first_seq": 1000}
OTHERS |= {"consumer_limits": {"inactive_threshold": 3600 * SECOND, "max_ack_pending": 100}}
REPUBLISH = {"src": ">", "dest": "again.>", "headers_only": True}
SOURCE = {"name": "ORIGIN", "filter_subject": "origin.>", "opt_start_seq": 7}
MOMENT = "2026-05-01T12:00:00.123456789Z"
STREAMS: list[dict[str, Any]] = [
    {},
    {**LABELS, **LIMITS, **FLAGS, **OTHERS},
    {"max_age": 100_000_001, "duplicate_window": 100_000_001, "max_bytes": 1_000_003, "storage": "memory"},
    {"max_msgs_per_subject": 5, "discard": "new", "discard_new_per_subject": True, "retention": "workqueue"},
    {"max_msgs": 100, "discard": "new", "retention": "interest", "allow_rollup_hdrs": True},
    {"subject_transform": {"src": ">", "dest": "t.>"}, "republish": REPUBLISH},
    {"sources": [SOURCE], "subjects": []},
    {"mirror": {"name": "ORIGIN", "opt_start_time": MOMENT}, "subjects": []},
]
BOUNDS = {"max_waiting": 8, "max_batch": 100, "max_expires": 30 * SECOND, "max_bytes": 1 << 20}
TEXTS = {"sample_freq": "50", "metadata": {"a": "b"}, "description": "slow"}
CONSUMERS: list[dict[str, Any]] = [
    {},
    {"ack_wait": 2_300_000_000, "max_ack_pending": 5, "filter_subject": "s.a"},
    {"filter_subjects": ["s.a", "s.b.*"], "deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    {"deliver_policy": "by_start_time", "opt_start_time": MOMENT, "num_replicas": 1},
    {"deliver_policy": "last_per_subject", "filter_subject": ">", "max_ack_pending": 400_000},
    {"deliver_policy": "new", "replay_policy": "original", "max_deliver": 5, "backoff": [SECOND, 5 * SECOND]},
    {**BOUNDS, **TEXTS, "mem_storage": True, "inactive_threshold": DAY},
]
LATER: list[dict[str, Any]] = [
    {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60 * SECOND, "allow_rollup_hdrs": True},
    {"allow_msg_counter": True},
    {"allow_atomic": True, "allow_msg_schedules": True},
    {"persist_mode": "async"},
]
CASES = [(stream, None) for stream in (*STREAMS, *LATER)] + [({}, consumer) for consumer in CONSUMERS]


def managed(tmp_path: Path, url: str, text: dict[str, Any]) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(yaml_text.write({"nats": {"servers": [url]}, **text}))
    return load_for_apply(path)


@pytest.fixture
def applied(server: NatsServer, tmp_path: Path) -> Any:
    """Apply these sections; the results."""
    return lambda text: asyncio.run(apply(managed(tmp_path, server.url, text), dry_run=False))


@pytest.fixture
def shown(server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Apply these sections; the exit code and the lines."""

    def show(text: dict[str, Any], *, dry_run: bool = True, may_delete: bool = False) -> tuple[int, list[str]]:
        code = show_one(run(managed(tmp_path, server.url, text), dry_run=dry_run, may_delete=may_delete))
        return code, capsys.readouterr().out.splitlines()

    return show


def messages(url: str, name: str) -> int:
    return int(asyncio.run(ask(url, f"STREAM.INFO.{name}"))["state"]["messages"])


async def exported_and_planned(
    url: str, number: int, stream: dict[str, Any], consumer: dict[str, Any] | None, tmp_path: Path
) -> list[str]:
    """What `apply` would change after `export`."""
    name = f"S{number}"
    subjects = [f"s{number}.>", *(["s.>"] if consumer is not None else [])]
    await create(url, {"name": name, "subjects": subjects, **BASE, **stream}, consumer)
    nats = NatsConfig(servers=(url,))
    sections = await export(nats, name, None if consumer is None else "archive")
    found = await apply(managed(tmp_path, url, {**sections}), dry_run=True)
    lines = [f"{name} {sections}: {each.fields()['changes']}" for each in found if each.plan.action != "none"]
    if consumer is not None:
        await ask(url, f"STREAM.DELETE.{name}")  # the next one has the same subjects
    return lines


@pytest.mark.parametrize(
    "older", [None, *(pytest.param(command, marks=pytest.mark.exhaustive) for _, command in older_servers())]
)
async def test_applying_what_was_exported_changes_nothing(
    nats_server: Callable[..., NatsServer], tmp_path: Path, older: str | None
) -> None:
    url = nats_server(command=older).url
    await create(url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE})
    for number, (stream, consumer) in enumerate(CASES):
        if older is None or stream not in LATER:
            assert await exported_and_planned(url, number, stream, consumer, tmp_path) == []


SHOWN: list[tuple[dict[str, Any], str]] = [
    ({"description": "new text"}, '  description  -"text" +"new text"'),
    ({"subjects": ["s.>", "t.>"]}, '  subjects  -["s.>"] +["s.>", "t.>"]'),
    ({"max_msgs": "unlimited"}, "  max_msgs  -1000 +unlimited"),
    ({"max_bytes": "2GiB"}, "  max_bytes  -1GiB +2GiB"),
    ({"max_age": "30d"}, "  max_age  -7d +30d"),
    ({"duplicate_window": "90s"}, "  duplicate_window  -2m +1m30s"),
    ({"compression": "s2"}, "  compression  -none +s2"),
    ({"allow_direct": True}, "  allow_direct  +true"),
    ({"metadata": {"team": "b"}}, '  metadata.team  -"a" +"b"'),
    ({"republish": {"dest": "y.>"}}, '  republish  +{"dest": "y.>"}'),
    ({"ack_wait": "1m"}, "  ack_wait  -2m +1m"),
    ({"filter_subjects": ["s.a"]}, '  filter_subjects  +["s.a"]'),
]


def test_a_change_is_shown_as_one_line_and_is_then_made(server: NatsServer, shown: Any) -> None:
    before = {"description": "text", "max_msgs": 1000, "max_bytes": 1 << 30, "max_age": 7 * DAY}
    before |= {**BASE, "subjects": ["s.>"], "metadata": {"team": "a"}}
    for number, (change, line) in enumerate(SHOWN):
        name = f"S{number}"  # a server may still be removing the files of the one before
        asyncio.run(create(server.url, {**before, "name": name}, {"ack_wait": 120 * SECOND, "max_ack_pending": 50_000}))
        text: dict[str, Any] = {"stream": {"name": name}, "source": {"stream": name, "consumer": "archive"}}
        text["source" if change.keys() & {"ack_wait", "filter_subjects"} else "stream"] |= change
        code, found = shown(text)
        assert (code, [each.split() for each in found if each.startswith("  ")]) == (3, [line.split()])
        assert shown(text, dry_run=False)[0] == 0, change
        assert shown(text)[0] == 0, change
        asyncio.run(ask(server.url, f"STREAM.DELETE.{name}"))


IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"storage": "memory"}, "storage"),
    ({}, {"retention": "workqueue"}, "retention"),
    ({"retention": "workqueue"}, {"retention": "limits"}, "retention"),
    ({"mirror": {"name": "ORIGIN"}, "subjects": []}, {"mirror": {"name": "OTHER"}}, "mirror"),
    *(({name: True}, {name: False}, name) for name in ("deny_delete", "deny_purge", "allow_msg_ttl")),
    ({"allow_msg_schedules": True}, {"allow_msg_schedules": False}, "allow_msg_schedules"),
    ({}, {"allow_msg_counter": True}, "allow_msg_counter"),
    ({}, {"persist_mode": "async"}, "persist_mode"),
]


def test_what_cannot_be_changed_is_named_and_the_server_would_refuse_it_too(server: NatsServer, shown: Any) -> None:
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE}))
    for before, change, setting in IMPOSSIBLE:
        asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE, **before}))
        text = {"stream": {"name": "S", "description": "not made either", **change}}
        code, found = shown(text, dry_run=False, may_delete=True)
        assert code == 1, change
        assert found[0] == "stream S: cannot be configured like this"
        assert [line.split()[0] for line in found[1:] if "cannot be changed: " in line] == [setting]
        actual = asyncio.run(ask(server.url, "STREAM.INFO.S"))["config"]
        assert "description" not in actual
        with pytest.raises(AssertionError):
            asyncio.run(ask(server.url, "STREAM.UPDATE.S", {**actual, **change}))
        asyncio.run(ask(server.url, "STREAM.DELETE.S"))


def test_what_only_the_server_refuses_is_an_error_with_its_reason(server: NatsServer, applied: Any) -> None:
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}))
    with pytest.raises(SourceError, match=r"stream S was not updated: .*replicas"):
        applied({"stream": {"name": "S", "num_replicas": 3}})


CHANGES: list[dict[str, Any]] = [
    {"stream": {"description": "new", "metadata": {"a": "b"}}},
    {"stream": {"subjects": ["NAME.>", "more.NAME.>"]}},
    {"stream": {"subjects": ["NAME.0"]}},
    {"stream": {"retention": "interest"}},
    {"stream": {"retention": "limits"}},
    {"stream": {"max_consumers": 1}},
    {"stream": {"max_msgs": 5}},
    {"stream": {"max_msgs": 5000, "max_bytes": "1KiB"}},
    {"stream": {"max_age": "100ms", "duplicate_window": "100ms"}},
    {"stream": {"max_age": "unlimited", "max_msgs_per_subject": 2}},
    {"stream": {"max_msg_size": 10}},
    {"stream": {"discard": "new", "max_msgs_per_subject": 2, "discard_new_per_subject": True}},
    {"stream": {"no_ack": True}},
    {"stream": {"sources": [{"name": "ORIGIN"}]}},
    {"stream": {"compression": "s2", "republish": {"dest": "again.NAME.>"}}},
    {"stream": {"subject_transform": {"dest": "x.>"}}},
    {"stream": {"sealed": True}},
    {"stream": {"deny_delete": True, "deny_purge": True, "allow_direct": True}},
    {"stream": {"allow_msg_ttl": True, "subject_delete_marker_ttl": "1s", "allow_rollup_hdrs": True}},
    {"stream": {"allow_atomic": True, "allow_msg_schedules": True}},
    {"stream": {"consumer_limits": {"inactive_threshold": "1s", "max_ack_pending": 60_000}}},
    {"source": {"filter_subjects": ["NAME.0"]}},
    {"source": {"filter_subjects": ["NAME.>", "new.NAME"]}},
    {"source": {"ack_wait": "1s", "max_ack_pending": 1}},
    {"source": {"consumer_config": {"max_deliver": 1, "backoff": []}}},
    {"source": {"consumer_config": {"inactive_threshold": "1s"}}},
    {"source": {"consumer_config": {"pause_until": "2100-01-01T00:00:00Z", "max_batch": 10, "sample_freq": "50"}}},
]


def test_what_is_made_without_may_delete_keeps_every_message(server: NatsServer, applied: Any) -> None:
    kept = {}
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE}))
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for number, change in enumerate(CHANGES):
        name, retention = f"S{number}", chance.choice(["limits", "interest", "workqueue"])
        stream = {**BASE, "name": name, "subjects": [f"{name}.>"], "retention": retention, "max_msgs": 1000}
        consumer = {"ack_wait": 120 * SECOND, "max_ack_pending": 50_000, "filter_subjects": [f"{name}.0", f"{name}.1"]}
        asyncio.run(create(server.url, stream, consumer, messages=20))
        kept[name] = messages(server.url, name)
        sections = json.loads(json.dumps(change).replace("NAME", name))
        source = {"stream": name, "consumer": "archive", "filter_subjects": consumer["filter_subjects"]}
        text = {"stream": {"name": name, **sections.get("stream", {})}, "source": source | sections.get("source", {})}
        results = applied(text)
        assert not any(result.ignored for result in results), (seed, change)
    server.stop()  # some settings take effect when a server starts
    server.start()
    assert {name: messages(server.url, name) for name in kept} == kept, seed


def test_the_rest_is_listed_and_made_with_may_delete(server: NatsServer, tmp_path: Path, shown: Any) -> None:
    url = server.url
    asyncio.run(create(url, {"name": "S", "subjects": ["s.>"], **BASE}, {"ack_wait": 120 * SECOND}, messages=20))
    text = {"stream": {"name": "S", "description": "new", "max_msgs": 15, "max_age": "7d"}}
    listed = [
        "stream S: will be changed",
        '  description  +"new"',
        "  max_msgs     -unlimited +15  needs --may-delete: the oldest messages are deleted",
        "  max_age      -unlimited +7d  needs --may-delete: older messages are deleted",
    ]
    assert shown(text) == (3, listed)
    assert shown(text, dry_run=False) == (3, ["stream S: changed", *listed[1:]])
    left = ["stream S: left as it is", *(line.replace("   -", "-") for line in listed[2:])]
    assert shown(text, dry_run=False) == (3, left)
    assert run(managed(tmp_path, url, text), dry_run=False).summary == "stream: 2 settings left (needs --may-delete)"
    assert messages(url, "S") == 20
    all_made = [line.replace("needs --may-delete: ", "") for line in left[1:]]
    code, found = shown(text, may_delete=True)
    assert (code, found) == (3, ["stream S: will be changed", *all_made])
    code, found = shown(text, dry_run=False, may_delete=True)
    assert (code, found) == (0, ["stream S: changed", *all_made])
    assert messages(url, "S") == 15
    assert shown(text) == (0, ["stream S: is as configured"])


def test_stream_and_consumer_are_created_and_a_second_time_nothing_is_done(server: NatsServer, shown: Any) -> None:
    text = {
        "stream": {"subjects": ["s.>"], "max_age": "7d"},
        "source": {"stream": "S", "consumer": "archive", "create": False},
        "store": {"url": "/archive"},
        "key": "{subject[1]}",
    }
    code, found = shown(text)
    assert code == 3
    assert found[:3] == ["stream S: will be created", '  subjects  +["s.>"]', "  max_age   +7d"]
    assert "consumer archive: will be created" in found
    assert shown(text, dry_run=False)[0] == 0
    assert shown(text, dry_run=False) == (0, ["stream S: is as configured", "consumer archive: is as configured"])
    info = asyncio.run(ask(server.url, "CONSUMER.INFO.S.archive"))["config"]
    assert (info["ack_policy"], info["max_ack_pending"], info["ack_wait"]) == ("explicit", 50_000, 120 * SECOND)


def test_json_holds_the_values_of_the_api(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], "max_age": 7 * DAY, **BASE}))
    text = {"stream": {"name": "S", "max_age": "30d"}}
    assert show_one(run(managed(tmp_path, server.url, text), dry_run=False), as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    change = {"setting": "max_age", "old": 7 * DAY, "new": 30 * DAY, "refusal": None, "may_delete": None, "left": False}
    assert found["changes"] == [change]
    assert found["request"]["max_age"] == found["answer"]["max_age"] == 30 * DAY


def test_settings_that_the_file_does_not_name_stay_as_they_are(server: NatsServer, applied: Any) -> None:
    before = {"name": "S", "subjects": ["s.>"], "description": "mine", "metadata": {"a": "b"}, **BASE}
    consumer = {"description": "kept", "filter_subject": "s.a", "max_batch": 10}
    asyncio.run(create(server.url, before, consumer))
    applied({"stream": {"compression": "s2"}, "source": {"stream": "S", "consumer": "archive"}})
    stream = asyncio.run(ask(server.url, "STREAM.INFO.S"))["config"]
    assert (stream["description"], stream["metadata"]["a"], stream["compression"]) == ("mine", "b", "s2")
    changed = asyncio.run(ask(server.url, "CONSUMER.INFO.S.archive"))["config"]
    assert (changed["description"], changed["max_batch"], changed.get("filter_subject")) == ("kept", 10, None)


def test_a_setting_that_the_server_ignores_is_reported(
    server: NatsServer, shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}))
    request = Api.request

    async def forgetful(api: Api, subject: str, body: Any = None) -> dict[str, Any]:
        answer = await request(api, subject, body)
        answer.get("config", {}).pop("description", None)
        return answer

    monkeypatch.setattr(Api, "request", forgetful)
    code, found = shown({"stream": {"name": "S", "description": "new"}}, dry_run=False)
    assert (code, any("the server ignored" in line for line in found)) == (1, True)


def test_a_consumer_that_cannot_be_captured_from_is_not_exported(server: NatsServer) -> None:
    for consumer, reason in (
        ({"deliver_subject": "push.here"}, "is a push consumer"),
        ({"ack_policy": "none"}, "has ack_policy none"),
        ({"max_ack_pending": -1}, "has no max_ack_pending"),
    ):
        asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}, consumer))
        with pytest.raises(SourceError, match=reason):
            asyncio.run(export(NatsConfig(servers=(server.url,)), "S", "archive"))
        asyncio.run(ask(server.url, "STREAM.DELETE.S"))
    with pytest.raises(SourceError, match="stream S does not exist"):
        asyncio.run(export(NatsConfig(servers=(server.url,)), "S", None))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stream: {name: S, storage: disk}", "stream.storage: expected file or memory"),
        ("stream: {max_age: 1d}", "source: required, but not set (or set stream.name"),
        ("stream: {name: S}\nsource: {stream: T, consumer: c}", "stream.name: expected T, as in source.stream"),
        ("stream: {name: S, sources: [{nam: A}]}", "stream.sources[0].nam: unknown setting"),
    ],
)
def test_a_section_that_is_wrong_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_for_apply(path)
    assert problem in str(raised.value)


def test_exported_text_is_read_back_the_same() -> None:
    values = {"a": "${HOME} $$ $JS.hub.API", "b": "0o17", "c": "1e3", "d": "true", "e": ["~", "-1", 7, True]}
    assert yaml_text.read(yaml_text.write(values), {}) == values
    assert yaml.safe_load(yaml_text.write({"a": "7d"})) == {"a": "7d"}
