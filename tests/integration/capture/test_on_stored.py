"""Announcing stored objects: after the acknowledgement, on a subject and by a call, and never at the capture's cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py import StoredObject
from jetcapture_py.archive import layout
from jetcapture_py.capture import announcing
from jetcapture_py.errors import ConfigError
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

SUBJECT = "jetcapture.stored.{stream}"
MESSAGES: list[Message] = [(f"orders.{'eu' if number % 2 else 'us'}", b"%d" % number, None) for number in range(100)]
BAD: Message = ("orders.eu", b"not JSON", None)
AS_JSON = {"format": "json"}
CALLS: list[StoredObject] = []
RELEASED = threading.Event()


def note(stored: StoredObject, location: str) -> None:
    assert os.stat(location).st_size == stored.bytes  # noqa: PTH116  before anybody awaits anything
    CALLS.append(stored)


async def note_later(stored: StoredObject, location: str) -> None:
    await asyncio.sleep(0)
    note(stored, location)


class Notes:
    """`note`, as a class."""

    def __call__(self, stored: StoredObject, location: str) -> None:
        note(stored, location)


def fail(stored: StoredObject, location: str) -> None:
    raise ConnectionError("http://user:pw-Hn4kq9-x@host refused\nreally")


def leave(stored: StoredObject, location: str) -> None:
    raise SystemExit(3)


def hang(stored: StoredObject, location: str) -> None:
    RELEASED.wait()


async def hang_later(stored: StoredObject, location: str) -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if RELEASED.is_set():
                raise


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    CALLS.clear()
    RELEASED.clear()
    yield
    RELEASED.set()


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


async def test_every_object_is_announced_on_a_subject_and_by_a_call(server: NatsServer, archive: Path) -> None:
    await publish(server.url, [*((s, b'{"n":%s}' % p, h) for s, p, h in MESSAGES), BAD])
    named = {"subject": SUBJECT, "call": f"{__name__}:note"}
    async with heard(server.url, "jetcapture.stored.ORDERS") as found:
        await capture_all(config(server.url, archive, decode=AS_JSON, on_stored=named))
        await until(lambda: len(found) == 3, "all have arrived")
    assert [stored.fields() for stored in CALLS] == found
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


async def test_an_argument_replaces_the_configured_function_and_is_called_after_the_acknowledgement(
    server: NatsServer, archive: Path
) -> None:
    calls: list[tuple[str, int]] = []

    async def ask(stored: StoredObject, location: str) -> None:
        calls.append((location, (await consumer(server.url)).num_ack_pending))

    await publish(server.url, MESSAGES)
    settings = config(server.url, archive, key="", on_stored={"call": f"{__name__}:note"})
    await capture_all(settings, on_stored=ask)
    assert calls == [(str(archive / name.path), 0) for name in objects(archive)]
    assert CALLS == []


@pytest.mark.parametrize("name", ["note_later", "Notes"])
def test_coroutine_functions_and_classes_are_called(server: NatsServer, archive: Path, name: str) -> None:
    publish_and_capture(server.url, archive, MESSAGES, on_stored={"call": f"{__name__}:{name}"})
    assert sum(stored.messages for stored in CALLS) == 100


@pytest.mark.parametrize("name", ["fail", "leave"])
async def test_a_failing_function_costs_the_capture_nothing(
    server: NatsServer, archive: Path, logged: Any, name: str
) -> None:
    await publish(server.url, MESSAGES)
    settings = config(server.url, archive, block={"max_messages": 1}, on_stored={"call": f"{__name__}:{name}"})
    capture = await capture_all(settings)
    assert len(rows(archive)) == capture.stats.acked == 100
    assert capture.announcer.failures == {"call": 100}
    failures = logged("on_stored.failed")
    assert 0 < len(failures) < 10, "not one for each"
    assert "pw-Hn4kq9-x" not in str(logged(""))
    assert failures[0]["receiver"] == "call"


@pytest.mark.parametrize("name", ["hang", "hang_later"])
async def test_a_hanging_function_delays_neither_acknowledgements_nor_messages(
    server: NatsServer, archive: Path, logged: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(announcing, "MAX_WAITING", 10)
    await publish(server.url, MESSAGES)
    named = {"subject": SUBJECT, "call": f"{__name__}:{name}"}
    settings = config(server.url, archive, block={"max_messages": 1}, on_stored=named, drain_timeout="2s")
    async with heard(server.url, "jetcapture.stored.>") as found:
        async with running(settings) as capture:
            await until(lambda: capture.stats.acked == 100, "all are acknowledged")
            assert capture.announcer.failures["call"] >= 100 - 10 - 1, "as many wait as may"
        await until(lambda: len(found) == 100 - capture.announcer.failures["subject"], "the rest has arrived")
    assert capture.announcer.failures["call"] == 100
    assert len(rows(archive)) == 100
    errors = [entry["error"] for entry in logged("on_stored.failed") if entry["receiver"] == "call"]
    assert errors[0] == "10 objects are already waiting"
    assert len(errors) < 10, "not one for each"


async def test_after_a_hanging_call_has_returned_the_next_ones_are_made(
    server: NatsServer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "TIMEOUT", 0.1)
    calls: list[str] = []

    def hang_once(stored: Any, location: str) -> None:
        calls.append(location)
        if len(calls) == 1:
            RELEASED.wait()

    await publish(server.url, MESSAGES[:2])
    settings = config(server.url, archive, block={"max_age": "100ms"})
    async with running(settings, on_stored=hang_once) as capture:
        await until(lambda: capture.announcer.failures["call"] == 2, "the second is not kept waiting")
        RELEASED.set()
        await publish(server.url, MESSAGES[2:3])
        await until(lambda: len(calls) == 2, "the third is called")
    assert capture.stats.acked == 3


async def test_without_permission_to_publish_there_is_one_clear_line(
    nats_server: Callable[..., NatsServer], archive: Path, logged: Any
) -> None:
    denied = '{user: b, password: p, permissions: {publish: {deny: "x.>"}}}'
    server = nats_server(f"authorization {{users: [{{user: a, password: p}}, {denied}]}}")
    await publish(server.url.replace("://", "://a:p@"), MESSAGES)
    sections = {"nats": {"user": "b", "password": "p"}, "on_stored": {"subject": "x.{stream}"}}
    async with running(config(server.url, archive, block={"max_messages": 5}, **sections)) as capture:
        await until(lambda: capture.stats.acked == 100, "all are acknowledged")
        await until(lambda: capture.announcer.failures["subject"] == 20, "every refusal is counted")
        assert 'jetcapture_on_stored_failures_total{receiver="subject"} 20.0' in metrics(capture)
    (entry,) = logged("on_stored.failed")
    assert entry["error"] == "this user may not publish to x.ORDERS"
    assert logged("nats.error") == []
    assert len(rows(archive)) == 100


async def test_a_subject_that_the_stream_takes_and_the_consumer_does_not_is_warned_of(
    server: NatsServer, archive: Path, logged: Any
) -> None:
    await publish(server.url, MESSAGES)
    source = {"filter_subjects": ["orders.eu", "orders.us"]}
    await capture_all(config(server.url, archive, source=source, on_stored={"subject": "orders.stored"}))
    (entry,) = logged("config.warning")
    assert "stream ORDERS takes orders.stored itself; it is not captured" in entry["warning"]
    assert {row[layout.SUBJECT] for row in rows(archive)} == {"orders.eu", "orders.us"}


async def test_a_value_that_cannot_be_called_is_a_wrong_setting(archive: Path) -> None:
    settings = config("nats://127.0.0.1:1", archive, on_stored={"call": f"{__name__}:CALLS"})
    with pytest.raises(ConfigError, match=f"on_stored.call: {__name__}:CALLS cannot be called"):
        await capture_all(settings)
