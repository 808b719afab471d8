"""`apply` makes stream and consumer as configured and deletes nothing; `export` is its inverse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config import yaml_text
from jetcapture_py.config.model import Managed, NatsConfig, load_managed
from jetcapture_py.errors import ConfigError, SourceError
from jetcapture_py.manage.apply import Applied, apply, run
from jetcapture_py.manage.export import export
from jetcapture_py.manage.many import show_one
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer, older_servers
from tests.support.streams import read_stream

Start = Callable[..., NatsServer]
SECOND = 10**9
DAY = 86_400 * SECOND
BASE: dict[str, Any] = {"num_replicas": 1, "storage": "file", "retention": "limits"}
STREAMS: list[dict[str, Any]] = [
    {},
    {"description": "orders: ${all} of $$ them #1"},
    {"max_age": 7 * DAY},
    {"max_age": 100_000_001, "duplicate_window": 100_000_001},
    {"max_bytes": 1 << 30},
    {"max_bytes": 1_000_003},
    {"max_msgs": 1000},
    {"max_msgs_per_subject": 5},
    {"max_msgs_per_subject": 5, "discard": "new", "discard_new_per_subject": True},
    {"max_msg_size": 1 << 20},
    {"max_consumers": 10},
    {"discard": "new", "max_msgs": 100},
    {"storage": "memory"},
    {"retention": "interest"},
    {"retention": "workqueue"},
    {"no_ack": True},
    {"duplicate_window": 30 * SECOND},
    {"compression": "s2"},
    {"first_seq": 1000},
    {"subject_transform": {"src": ">", "dest": "t.>"}},
    {"republish": {"src": ">", "dest": "again.>", "headers_only": True}},
    {"deny_delete": True, "deny_purge": True},
    {"allow_rollup_hdrs": True},
    {"allow_direct": True},
    {"consumer_limits": {"inactive_threshold": 3600 * SECOND, "max_ack_pending": 100}},
    {"metadata": {"team": "orders", "1e3": "0o17", "empty": "yes"}},
    {"sources": [{"name": "ORIGIN", "filter_subject": "origin.>", "opt_start_seq": 7}], "subjects": []},
    {"mirror": {"name": "ORIGIN", "opt_start_time": "2026-05-01T12:00:00.123456789Z"}, "subjects": []},
]
CONSUMERS: list[dict[str, Any]] = [
    {},
    {"ack_wait": 2_300_000_000, "max_ack_pending": 5},
    {"filter_subject": "s.a"},
    {"filter_subjects": ["s.a", "s.b.*"]},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    {"deliver_policy": "by_start_time", "opt_start_time": "2026-05-01T12:00:00.123456789Z"},
    {"deliver_policy": "last_per_subject", "filter_subject": ">"},
    {"deliver_policy": "new", "replay_policy": "original"},
    {"max_deliver": 5, "backoff": [SECOND, 5 * SECOND], "description": "slow"},
    {"max_waiting": 8, "max_batch": 100, "max_expires": 30 * SECOND, "max_bytes": 1 << 20},
    {"inactive_threshold": DAY, "sample_freq": "50", "mem_storage": True, "metadata": {"a": "b"}},
    {"max_ack_pending": 400_000, "num_replicas": 1},
]
LATER: list[dict[str, Any]] = [
    {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60 * SECOND, "allow_rollup_hdrs": True},
    {"allow_msg_counter": True},
    {"allow_atomic": True, "allow_msg_schedules": True},
    {"persist_mode": "async"},
]
CASES = [(stream, None) for stream in (*STREAMS, *LATER)] + [({}, consumer) for consumer in CONSUMERS]


def managed(tmp_path: Path, url: str, text: dict[str, Any]) -> Managed:
    path = tmp_path / "config.yaml"
    path.write_text(yaml_text.write({"nats": {"servers": [url]}, **text}))
    return load_managed(path)


def applied(tmp_path: Path, url: str, text: dict[str, Any], *, dry_run: bool = False) -> list[Applied]:
    return asyncio.run(apply(managed(tmp_path, url, text), dry_run=dry_run))


def shown(
    tmp_path: Path, url: str, text: dict[str, Any], capsys: pytest.CaptureFixture[str], *, dry_run: bool = True
) -> tuple[int, list[str]]:
    code = show_one(run(managed(tmp_path, url, text), dry_run=dry_run))
    return code, capsys.readouterr().out.splitlines()


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


async def all_exported(url: str, cases: Any, tmp_path: Path) -> list[str]:
    await create(url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE})
    return [
        line
        for number, (stream, consumer) in enumerate(cases)
        for line in await exported_and_planned(url, number, stream, consumer, tmp_path)
    ]


def test_applying_what_was_exported_changes_nothing(nats_server: Start, tmp_path: Path) -> None:
    assert len(CASES) >= 40
    assert asyncio.run(all_exported(nats_server().url, CASES, tmp_path)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "command"), list(older_servers()))
def test_applying_what_was_exported_changes_nothing_on_older_servers(
    nats_server: Start, tmp_path: Path, version: str, command: str
) -> None:
    cases = [(stream, consumer) for stream, consumer in CASES if stream not in LATER]
    assert asyncio.run(all_exported(nats_server(command=command).url, cases, tmp_path)) == []


SINGLE: list[tuple[dict[str, Any], str]] = [
    ({"description": "new text"}, '  description  -"text" +"new text"'),
    ({"subjects": ["s.>", "t.>"]}, '  subjects  -["s.>"] +["s.>", "t.>"]'),
    ({"max_consumers": 7}, "  max_consumers  -unlimited +7"),
    ({"max_msgs": 5000}, "  max_msgs  -1000 +5000"),
    ({"max_msgs": "unlimited"}, "  max_msgs  -1000 +unlimited"),
    ({"max_bytes": "2GiB"}, "  max_bytes  -1GiB +2GiB"),
    ({"max_bytes": "unlimited"}, "  max_bytes  -1GiB +unlimited"),
    ({"max_age": "30d"}, "  max_age  -7d +30d"),
    ({"max_age": "1h30m"}, "  max_age  -7d +1h30m"),
    ({"max_age": "unlimited"}, "  max_age  -7d +unlimited"),
    ({"max_msgs_per_subject": 50}, "  max_msgs_per_subject  -unlimited +50"),
    ({"max_msg_size": "1MiB"}, "  max_msg_size  -unlimited +1MiB"),
    ({"discard": "new"}, "  discard  -old +new"),
    ({"no_ack": True}, "  no_ack  +true"),
    ({"duplicate_window": "5m"}, "  duplicate_window  -2m +5m"),
    ({"compression": "s2"}, "  compression  -none +s2"),
    ({"allow_rollup_hdrs": True}, "  allow_rollup_hdrs  +true"),
    ({"allow_direct": True}, "  allow_direct  +true"),
    ({"deny_delete": True}, "  deny_delete  +true"),
    ({"deny_purge": True}, "  deny_purge  +true"),
    ({"allow_msg_ttl": True}, "  allow_msg_ttl  +true"),
    ({"allow_atomic": True}, "  allow_atomic  +true"),
    ({"allow_msg_schedules": True}, "  allow_msg_schedules  +true"),
    ({"metadata": {"team": "b"}}, '  metadata.team  -"a" +"b"'),
    ({"metadata": {"team": "a", "more": "c"}}, '  metadata.more  +"c"'),
    ({"consumer_limits": {"max_ack_pending": 60000}}, '  consumer_limits  +{"max_ack_pending": 60000}'),
    ({"subject_transform": {"dest": "x.>"}}, '  subject_transform  +{"dest": "x.>"}'),
    ({"republish": {"dest": "y.>"}}, '  republish  +{"dest": "y.>"}'),
    ({"sources": [{"name": "ORIGIN"}]}, '  sources  +[{"name": "ORIGIN"}]'),
]
SINGLE_CONSUMER: list[tuple[dict[str, Any], str]] = [
    ({"ack_wait": "1m"}, "  ack_wait  -2m +1m"),
    ({"max_ack_pending": 70}, "  max_ack_pending  -50000 +70"),
    ({"filter_subjects": ["s.a"]}, '  filter_subjects  +["s.a"]'),
    ({"consumer_config": {"max_deliver": 9}}, "  max_deliver  -unlimited +9"),
    ({"consumer_config": {"inactive_threshold": "1d"}}, "  inactive_threshold  +1d"),
]


def squeezed(line: str) -> str:
    """The line with one space where several align it."""
    return "  " + " ".join(line.split())


def test_every_single_change_is_shown_as_exactly_its_line_and_is_then_made(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    assert len(SINGLE) + len(SINGLE_CONSUMER) >= 30
    before = {
        **BASE,
        "name": "S",
        "subjects": ["s.>"],
        "description": "text",
        "max_msgs": 1000,
        "max_bytes": 1 << 30,
        "max_age": 7 * DAY,
        "metadata": {"team": "a"},
    }
    consumer = {"ack_wait": 120 * SECOND, "max_ack_pending": 50_000, "max_deliver": -1}
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE}))
    for number, (change, line) in enumerate((*SINGLE, *SINGLE_CONSUMER)):
        name = f"S{number}"  # a server may still be removing the files of the one before
        asyncio.run(create(server.url, {**before, "name": name}, consumer, messages=20))
        text: dict[str, Any] = {"stream": {"name": name}, "source": {"stream": name, "consumer": "archive"}}
        text["source" if (change, line) in SINGLE_CONSUMER else "stream"] |= change
        code, found = shown(tmp_path, server.url, text, capsys)
        assert (code, [squeezed(each) for each in found if each.startswith("  ")]) == (3, [squeezed(line)])
        code, _ = shown(tmp_path, server.url, text, capsys, dry_run=False)
        assert code == 0, change
        assert shown(tmp_path, server.url, text, capsys)[0] == 0, change
        state = asyncio.run(ask(server.url, f"STREAM.INFO.{name}"))["state"]
        assert (state["messages"], state.get("num_deleted", 0)) == (20, 0), (change, state)
        asyncio.run(ask(server.url, f"STREAM.DELETE.{name}"))


IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"storage": "memory"}, "storage"),
    ({}, {"retention": "workqueue"}, "retention"),
    ({"retention": "workqueue"}, {"retention": "limits"}, "retention"),
    ({}, {"mirror": {"name": "ORIGIN"}}, "mirror"),
    ({"mirror": {"name": "ORIGIN"}, "subjects": []}, {"mirror": {"name": "OTHER"}}, "mirror"),
    ({"sealed_later": True}, {"sealed": False}, "sealed"),
    ({"deny_delete": True}, {"deny_delete": False}, "deny_delete"),
    ({"deny_purge": True}, {"deny_purge": False}, "deny_purge"),
    ({"allow_msg_ttl": True}, {"allow_msg_ttl": False}, "allow_msg_ttl"),
    ({"allow_msg_schedules": True}, {"allow_msg_schedules": False}, "allow_msg_schedules"),
    ({}, {"allow_msg_counter": True}, "allow_msg_counter"),
    ({}, {"persist_mode": "async"}, "persist_mode"),
    ({}, {"num_replicas": 3}, "num_replicas"),
]


def test_what_cannot_be_changed_is_named_and_the_server_would_refuse_it_too(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE}))
    for before, change, setting in IMPOSSIBLE:
        sealed = "sealed_later" in before
        config = {"name": "S", "subjects": ["s.>"], **BASE, **{k: v for k, v in before.items() if k != "sealed_later"}}
        asyncio.run(create(server.url, config))
        if sealed:
            asyncio.run(ask(server.url, "STREAM.UPDATE.S", {**config, "sealed": True}))
        code, found = shown(tmp_path, server.url, {"stream": {"name": "S", **change}}, capsys, dry_run=False)
        assert code == 1, change
        assert found[0] == "stream S: cannot be configured like this"
        (line,) = found[1:]
        assert line.split()[0] == setting
        assert "cannot be changed: " in line
        actual = asyncio.run(ask(server.url, "STREAM.INFO.S"))["config"]
        with pytest.raises(AssertionError):
            asyncio.run(ask(server.url, "STREAM.UPDATE.S", {**actual, **change}))
        asyncio.run(ask(server.url, "STREAM.DELETE.S"))


@pytest.mark.parametrize(
    "change",
    [
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "start_sequence": 3},
        {"replay_policy": "original"},
        {"consumer_config": {"max_waiting": 7}},
        {"consumer_config": {"mem_storage": True}},
    ],
)
def test_what_a_consumer_cannot_change_is_named(nats_server: Start, tmp_path: Path, change: dict[str, Any]) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}, {"ack_wait": 120 * SECOND}))
    (found,) = applied(tmp_path, server.url, {"source": {"stream": "S", "consumer": "archive", **change}})
    assert not found.plan.possible
    assert found.answer is None
    refused = {each.name for each in found.plan.changes if each.refusal}
    assert refused <= {"deliver_policy", "opt_start_seq", "replay_policy", "max_waiting", "mem_storage"}
    assert refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_age": "1s", "duplicate_window": "1s"}, "messages that are older"),
        ({"max_msgs": 15}, "delete 5 messages"),
        ({"max_bytes": "1KiB"}, "its oldest messages"),
        ({"max_msgs_per_subject": 3}, "the oldest messages of some subjects"),
        ({"retention": "interest"}, "messages that no consumer still needs"),
    ],
)
def test_a_change_that_would_delete_messages_is_refused(
    nats_server: Start, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    server = nats_server()

    async def fill() -> None:
        await create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}, messages=20)
        while (await applied_once()).plan.possible:  # until the messages are old enough
            await asyncio.sleep(0.1)

    async def applied_once() -> Applied:
        text = {"stream": {"name": "S", **change}}
        (found,) = await apply(managed(tmp_path, server.url, text), dry_run=True)
        return found

    asyncio.run(asyncio.wait_for(fill(), 60))
    (found,) = applied(tmp_path, server.url, {"stream": {"name": "S", **change}})
    assert any(each.refusal is not None and reason in each.refusal for each in found.plan.changes)
    assert asyncio.run(ask(server.url, "STREAM.INFO.S"))["state"]["messages"] == 20


def test_a_limit_that_only_refuses_new_messages_may_be_lowered_but_not_be_made_to_delete(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    config = {"name": "S", "subjects": ["s.>"], "discard": "new", "max_msgs": 100, **BASE}
    asyncio.run(create(server.url, config, messages=20))
    (found,) = applied(tmp_path, server.url, {"stream": {"name": "S", "max_msgs": 15}})
    assert found.plan.possible
    (found,) = applied(tmp_path, server.url, {"stream": {"name": "S", "discard": "old"}})
    assert [each.refusal is None for each in found.plan.changes] == [False]
    assert asyncio.run(ask(server.url, "STREAM.INFO.S"))["state"]["messages"] == 20


def test_replicas_that_a_lone_server_cannot_hold_are_refused_for_a_new_consumer_too(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}, messages=1))
    source = {"stream": "S", "consumer": "c", "consumer_config": {"num_replicas": 3}}
    (found,) = applied(tmp_path, server.url, {"source": source})
    refusals = {each.name: each.refusal for each in found.plan.changes if each.refusal}
    assert refusals == {"num_replicas": "this server is not part of a cluster"}


def test_a_stream_that_apply_touched_has_every_message_it_had(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}, messages=200))
    before = asyncio.run(read_stream(server.url, "S"))
    changes = {"max_age": "30d", "max_msgs": 200, "max_bytes": "1GiB", "compression": "s2", "subjects": ["t.>"]}
    found = applied(tmp_path, server.url, {"stream": {"name": "S", **changes}})
    assert [each.plan.action for each in found] == ["update"]
    assert asyncio.run(read_stream(server.url, "S")) == before


def test_stream_and_consumer_are_created_and_a_second_time_nothing_is_done(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    text = {
        "stream": {"subjects": ["s.>"], "max_age": "7d"},
        "source": {"stream": "S", "consumer": "archive", "create": False},
        "store": {"url": "/archive"},
        "key": "{subject[1]}",
    }
    code, found = shown(tmp_path, server.url, text, capsys)
    assert code == 3
    assert found[:3] == ["stream S: will be created", '  subjects  +["s.>"]', "  max_age   +7d"]
    assert "consumer archive: will be created" in found
    assert shown(tmp_path, server.url, text, capsys, dry_run=False)[0] == 0
    assert shown(tmp_path, server.url, text, capsys, dry_run=False) == (
        0,
        ["stream S: is as configured", "consumer archive: is as configured"],
    )
    info = asyncio.run(ask(server.url, "CONSUMER.INFO.S.archive"))["config"]
    assert (info["ack_policy"], info["max_ack_pending"], info["ack_wait"]) == ("explicit", 50_000, 120 * SECOND)


def test_json_holds_the_values_of_the_api(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}))
    text = {"stream": {"name": "S", "max_age": "7d"}}
    assert show_one(run(managed(tmp_path, server.url, text), dry_run=False), as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["changes"] == [{"setting": "max_age", "old": 0, "new": 7 * DAY, "refusal": None}]
    assert found["request"]["max_age"] == found["answer"]["max_age"] == 7 * DAY


def test_settings_that_the_file_does_not_name_stay_as_they_are(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    before = {"name": "S", "subjects": ["s.>"], "description": "mine", "metadata": {"a": "b"}, **BASE}
    consumer = {"description": "kept", "filter_subject": "s.a", "max_batch": 10}
    asyncio.run(create(server.url, before, consumer))
    applied(tmp_path, server.url, {"stream": {"max_msgs": 10}, "source": {"stream": "S", "consumer": "archive"}})
    stream = asyncio.run(ask(server.url, "STREAM.INFO.S"))["config"]
    assert (stream["description"], stream["metadata"]["a"], stream["max_msgs"]) == ("mine", "b", 10)
    changed = asyncio.run(ask(server.url, "CONSUMER.INFO.S.archive"))["config"]
    assert (changed["description"], changed["max_batch"], changed.get("filter_subject")) == ("kept", 10, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "command"), list(older_servers()))
def test_what_an_older_server_does_not_know_is_said_in_one_line(
    nats_server: Start, tmp_path: Path, version: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server(command=command)
    number = tuple(map(int, version.split(".")[:2]))
    for since, change in (
        ((2, 11), {"allow_msg_ttl": True}),
        ((2, 12), {"allow_atomic": True}),
        ((2, 14), {"allow_batched": True}),
    ):
        code, found = shown(
            tmp_path, server.url, {"stream": {"name": "S", "subjects": ["s.>"], **change}}, capsys, dry_run=False
        )
        if number < since:
            assert code == 1
            (line,) = [each for each in found if "nats-server" in each]
            assert f"nats-server {version} does not support it; {'.'.join(map(str, since))} does" in line
        else:
            assert code == 0, found
            asyncio.run(ask(server.url, "STREAM.DELETE.S"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("version", "command"), list(older_servers()))
def test_what_only_newer_servers_change_in_place_is_named(
    nats_server: Start, tmp_path: Path, version: str, command: str
) -> None:
    server = nats_server(command=command)
    asyncio.run(create(server.url, {"name": "ORIGIN", "subjects": ["origin.>"], **BASE}))
    asyncio.run(create(server.url, {"name": "M", "mirror": {"name": "ORIGIN"}, **BASE}))
    newer = tuple(map(int, version.split(".")[:2])) >= (2, 12)
    for name, change in (("M", {"mirror": None}), ("ORIGIN", {"max_consumers": 7})):
        (found,) = applied(tmp_path, server.url, {"stream": {"name": name, **change}})
        assert (found.plan.possible, found.answer is not None) == (newer, newer)
        assert newer or f"nats-server {version}" in str(found.plan.changes[0].refusal)


def test_an_existing_consumer_is_paused_and_resumed(nats_server: Start, tmp_path: Path) -> None:
    url = nats_server().url
    asyncio.run(create(url, {"name": "S", "subjects": ["s.>"], **BASE}, {}))

    def paused(until: str) -> bool:
        source = {"stream": "S", "consumer": "archive", "consumer_config": {"pause_until": until}}
        (found,) = applied(tmp_path, url, {"source": source})
        assert not found.ignored
        return bool(asyncio.run(ask(url, "CONSUMER.INFO.S.archive")).get("paused"))

    assert [paused(f"{year}-01-01T00:00:00Z") for year in (2100, 2020)] == [True, False]


def test_a_change_after_a_restart_of_the_server_is_not_reported_as_ignored(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    text: dict[str, Any] = {"stream": {"subjects": ["s"]}, "source": {"stream": "S", "consumer": "archive"}}
    applied(tmp_path, server.url, text)
    server.stop()
    server.start()
    text["source"]["ack_wait"] = "45s"
    *_, consumer = applied(tmp_path, server.url, text)
    assert (consumer.summary, consumer.ignored) == ("consumer updated (1 setting)", [])


@pytest.mark.exhaustive
def test_a_setting_that_the_server_ignores_is_reported(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = dict(older_servers())
    if "2.10.26" not in older:
        pytest.skip("needs nats-server 2.10.26")
    server = nats_server(command=older["2.10.26"])
    asyncio.run(create(server.url, {"name": "S", "subjects": ["s.>"], **BASE}))
    text = {"stream": {"name": "S", "placement": {"preferred": "n1"}}}
    code, found = shown(tmp_path, server.url, text, capsys, dry_run=False)
    assert code == 1
    assert any("the server ignored" in line for line in found)


def test_a_consumer_that_cannot_be_captured_from_is_not_exported(nats_server: Start) -> None:
    server = nats_server()
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
        ("stream: {max_agee: 1d, name: S}", "stream.max_agee: unknown setting; did you mean max_age?"),
        ("stream: {name: S, max_age: 1x}", "stream.max_age: expected a duration such as 15m"),
        ("stream: {name: S, max_bytes: 1k}", "stream.max_bytes: expected 1KiB (1024s) or 1KB (1000s)"),
        ("stream: {name: S, storage: disk}", "stream.storage: expected file or memory"),
        ("stream: {max_age: 1d}", "stream: its name is required without source"),
        ("stream: {name: S}\nsource: {stream: T, consumer: c}", "stream: expected the name T, as in source.stream"),
        ("stream: {name: S, sources: [{nam: A}]}", "stream.sources[0].nam: unknown setting"),
        ("nats: {servers: ['nats://a']}", "stream: required, but not set (or set source)"),
    ],
)
def test_a_section_that_is_wrong_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_managed(path)
    assert problem in str(raised.value)


def test_exported_text_is_read_back_the_same() -> None:
    values = {"a": "${HOME} $$ $JS.hub.API", "b": "0o17", "c": "1e3", "d": "true", "e": ["~", "-1", 7, True]}
    assert yaml_text.read(yaml_text.write(values), {}) == values
    assert yaml.safe_load(yaml_text.write({"a": "7d"})) == {"a": "7d"}
