"""Announcing stored objects: after the acknowledgement, on a subject and by a call, and never at the capture's cost."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py import StoredObject, log
from jetcapture_py.archive import layout
from jetcapture_py.capture import announcing
from jetcapture_py.errors import ConfigError
from tests.support import hooks
from tests.support.nats_server import NatsServer
from tests.support.running import (
    Message,
    capture_all,
    config,
    connection,
    consumer,
    metrics,
    objects,
    publish,
    publish_and_capture,
    rows,
    running,
    until,
)

Start = Callable[..., NatsServer]
SUBJECT = "jetcapture.stored.{stream}"
MESSAGES: list[Message] = [(f"orders.{'eu' if number % 2 else 'us'}", b"%d" % number, None) for number in range(100)]
BAD: Message = ("orders.eu", b"not JSON", None)
AS_JSON = {"format": "json"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    hooks.CALLS.clear()
    hooks.RELEASED.clear()
    yield
    hooks.RELEASED.set()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    text = io.StringIO()
    log.setup("json", "debug", text)
    yield text
    log.setup("json", "info")


def events(said: io.StringIO, name: str = "on_stored.failed") -> list[dict[str, Any]]:
    return [entry for entry in map(json.loads, said.getvalue().splitlines()) if entry["event"] == name]


@contextlib.asynccontextmanager
async def heard(url: str, subject: str) -> AsyncIterator[list[dict[str, Any]]]:
    """The JSON messages that arrive on a subject."""
    found: list[dict[str, Any]] = []

    async def note(message: Any) -> None:
        found.append(json.loads(message.data))

    async with connection(url) as client:
        await client.subscribe(subject, cb=note)
        await client.flush()
        yield found


def test_every_object_is_announced_on_a_subject_and_by_a_call(nats_server: Start, archive: Path) -> None:
    async def scenario() -> list[dict[str, Any]]:
        server = nats_server()
        await publish(server.url, [*((s, b'{"n":%s}' % p, h) for s, p, h in MESSAGES), BAD])
        named = {"subject": SUBJECT, "call": "tests.support.hooks:note"}
        settings = config(server.url, archive, decode=AS_JSON, on_stored=named)
        async with heard(server.url, "jetcapture.stored.ORDERS") as found:
            await capture_all(settings)
            await until(lambda: len(found) == 3, "all have arrived")
            return found

    found = asyncio.run(scenario())
    assert [stored.fields() for stored in hooks.CALLS] == found
    stored = {name.path: name for name in objects(archive)}
    assert {each["path"] for each in found} == stored.keys()
    for each in found:
        name = stored[each["path"]]
        assert each.pop("seconds") > 0
        assert each == {
            "path": name.path,
            "stream": "ORDERS",
            "key": name.key,
            "bundle": name.bundle or None,
            "bucket": Path(name.path).name.split("-")[0],
            "rows": name.rows,
            "messages": name.rows,
            "bytes": (archive / name.path).stat().st_size,
            "first_seq": name.first_seq,
            "last_seq": name.last_seq,
            "quarantine": name.quarantine,
            "location": str(archive / name.path),
        }
    assert [each["quarantine"] for each in found].count(True) == 1


@pytest.mark.parametrize("name", ["note_later", "Notes"])
def test_coroutine_functions_and_classes_are_called(nats_server: Start, archive: Path, name: str) -> None:
    server = nats_server()
    publish_and_capture(server.url, archive, MESSAGES, on_stored={"call": f"tests.support.hooks:{name}"})
    assert sum(stored.messages for stored in hooks.CALLS) == 100


def test_an_argument_replaces_the_configured_function(nats_server: Start, archive: Path) -> None:
    server, locations = nats_server(), list[str]()

    def note(stored: StoredObject, location: str) -> None:
        locations.append(location)

    asyncio.run(publish(server.url, MESSAGES))
    settings = config(server.url, archive, on_stored={"call": "tests.support.hooks:note"})
    asyncio.run(capture_all(settings, on_stored=note))
    assert sorted(locations) == [str(archive / name.path) for name in objects(archive)]
    assert hooks.CALLS == []


def test_nothing_is_announced_before_it_is_acknowledged(nats_server: Start, archive: Path) -> None:
    unacked: list[int] = []
    server = nats_server()

    async def ask(stored: Any, location: str) -> None:
        unacked.append((await consumer(server.url)).num_ack_pending)

    asyncio.run(publish(server.url, MESSAGES))
    asyncio.run(capture_all(config(server.url, archive, key=""), on_stored=ask))
    assert unacked == [0]


@pytest.mark.parametrize("name", ["fail", "leave"])
def test_a_failing_function_costs_the_capture_nothing(
    nats_server: Start, archive: Path, said: io.StringIO, name: str
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, MESSAGES))
    settings = config(server.url, archive, block={"max_messages": 1}, on_stored={"call": f"tests.support.hooks:{name}"})
    capture = asyncio.run(capture_all(settings))
    assert len(rows(archive)) == capture.stats.acked == 100
    assert capture.announcer.failures == {"call": 100}
    failures = events(said)
    assert 0 < len(failures) < 10, "not one for each"
    assert "pw-Hn4kq9-x" not in said.getvalue()
    assert failures[0]["receiver"] == "call"


@pytest.mark.parametrize("name", ["hang", "hang_later"])
def test_a_hanging_function_delays_neither_acknowledgements_nor_messages(
    nats_server: Start, archive: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(announcing, "MAX_WAITING", 10)

    async def scenario() -> Any:
        server = nats_server()
        await publish(server.url, MESSAGES)
        named = {"subject": SUBJECT, "call": f"tests.support.hooks:{name}"}
        settings = config(server.url, archive, block={"max_messages": 1}, on_stored=named, drain_timeout="2s")
        async with heard(server.url, "jetcapture.stored.>") as found:
            async with running(settings) as capture:
                await until(lambda: capture.stats.acked == 100, "all are acknowledged")
                assert capture.announcer.failures["call"] >= 100 - 10 - 1, "as many wait as may"
            await until(lambda: len(found) == 100 - capture.announcer.failures["subject"], "the rest has arrived")
        return capture

    capture = asyncio.run(scenario())
    assert capture.announcer.failures["call"] == 100
    assert len(rows(archive)) == 100
    errors = [entry["error"] for entry in events(said) if entry["receiver"] == "call"]
    assert errors[0] == "10 objects are already waiting"
    assert len(errors) < 10, "not one for each"


def test_after_a_hanging_call_has_returned_the_next_ones_are_made(
    nats_server: Start, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "TIMEOUT", 0.1)
    calls: list[str] = []

    def hang_once(stored: Any, location: str) -> None:
        calls.append(location)
        if len(calls) == 1:
            hooks.RELEASED.wait()

    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, MESSAGES[:2])
        settings = config(server.url, archive, block={"max_age": "100ms"})
        async with running(settings, on_stored=hang_once) as capture:
            await until(lambda: capture.announcer.failures["call"] == 2, "the second is not kept waiting")
            hooks.RELEASED.set()
            await publish(server.url, MESSAGES[2:3])
            await until(lambda: len(calls) == 2, "the third is called")
        assert capture.stats.acked == 3

    asyncio.run(scenario())


def test_without_permission_to_publish_there_is_one_clear_line(
    nats_server: Start, archive: Path, said: io.StringIO
) -> None:
    server = nats_server(
        'authorization {users: [{user: a, password: p}, {user: b, password: p, permissions: {publish: {deny: "x.>"}}}]}'
    )

    async def scenario() -> Any:
        await publish(server.url.replace("://", "://a:p@"), MESSAGES)
        settings = config(
            server.url,
            archive,
            nats={"user": "b", "password": "p"},
            block={"max_messages": 5},
            on_stored={"subject": "x.{stream}"},
        )
        async with running(settings) as capture:
            await until(lambda: capture.stats.acked == 100, "all are acknowledged")
            await until(lambda: capture.announcer.failures["subject"] == 20, "every refusal is counted")
            assert 'jetcapture_on_stored_failures_total{receiver="subject"} 20.0' in metrics(capture)
        return capture

    asyncio.run(scenario())
    (entry,) = events(said)
    assert entry["error"] == "this user may not publish to x.ORDERS"
    assert events(said, "nats.error") == []
    assert len(rows(archive)) == 100


def test_a_subject_that_the_stream_takes_and_the_consumer_does_not_is_warned_of(
    nats_server: Start, archive: Path, said: io.StringIO
) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, MESSAGES))
    source = {"filter_subjects": ["orders.eu", "orders.us"]}
    asyncio.run(capture_all(config(server.url, archive, source=source, on_stored={"subject": "orders.stored"})))
    (entry,) = events(said, "config.warning")
    assert "stream ORDERS takes orders.stored itself; it is not captured" in entry["warning"]
    assert {row[layout.SUBJECT] for row in rows(archive)} == {"orders.eu", "orders.us"}


def test_a_restart_of_the_server_costs_no_announcement_of_what_is_acknowledged_later(
    nats_server: Start, archive: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, MESSAGES[:10])
        settings = config(server.url, archive, key="", block={"max_age": "100ms"}, on_stored={"subject": SUBJECT})
        async with heard(server.url, "jetcapture.stored.*") as found, running(settings) as capture:
            await until(lambda: len(found) == 1, "the first has arrived")
            server.stop()
            server.start()
            await until(lambda: capture.source.reconnects > 0, "it is back")
            await publish(server.url, MESSAGES[10:20])
            await until(lambda: capture.stats.acked == 20, "all are acknowledged")
        assert capture.announcer.failures["subject"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("tests.support.nothing:here", "on_stored.call: cannot import tests.support.nothing:here: ModuleNotFoundError"),
        ("tests.support.hooks:CALLS", "on_stored.call: tests.support.hooks:CALLS cannot be called"),
    ],
)
def test_a_function_that_cannot_be_called_is_a_wrong_setting(archive: Path, call: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(capture_all(config("nats://127.0.0.1:1", archive, on_stored={"call": call})))
