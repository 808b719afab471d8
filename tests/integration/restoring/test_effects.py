"""A restored stream does nothing again that the original did: it fires no schedule, and copies nothing again. The
capture goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.config.model import load_for_apply
from jetcapture_py.manage.apply import apply
from tests.support.nats_server import NatsServer
from tests.support.restores import api, main, opened, state_of
from tests.support.running import capture_all, config, objects, settings

Start = Callable[..., NatsServer]


async def create(url: str, name: str, **settings: Any) -> None:
    async with opened(url) as client:
        await api(client, f"STREAM.CREATE.{name}", {"name": name, **settings})


async def until_stored(url: str, stream: str, messages: int) -> None:
    async with asyncio.timeout(120):
        while (await state_of(url, stream))["messages"] < messages:
            await asyncio.sleep(0.05)


async def publish(url: str, *messages: tuple[str, dict[str, str] | None]) -> None:
    async with opened(url) as client:
        for subject, headers in messages:
            await client.jetstream().publish(subject, b"", headers=headers)


def test_schedules_fire_again_only_on_request_and_never_in_another_stream(
    nats_server: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, three = nats_server(), nats_server(), nats_server()
    schedule = {"Nats-Schedule": "@at 2100-01-01T00:00:00Z", "Nats-Schedule-Target": "orders.paid"}
    asyncio.run(create(one.url, "ORDERS", subjects=["orders.>", "plan.>"], allow_msg_schedules=True))
    asyncio.run(publish(one.url, ("plan.1", schedule), ("orders.a", None), ("plan.2", schedule), ("orders.b", None)))
    asyncio.run(publish(one.url, ("plan.3", schedule)))
    asyncio.run(capture_all(config(one.url, tmp_path / "a")))
    command = [f"file://{tmp_path / 'a'}", "ORDERS"]
    said = "3 schedules left out, because the server would fire schedules again (--with-schedules restores them)"
    assert main([*command, "--dry-run"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == said
    for options, name in (([], "ORDERS"), (["--as", "COPY", "--subject-prefix", "copy"], "COPY")):
        assert main([*command, "--servers", two.url, *options]) == 0
        assert said in capfd.readouterr().err
        state = asyncio.run(state_of(two.url, name))
        assert (state["first_seq"], state["last_seq"], state["messages"]) == (2, 5, 2)
    assert main([*command, "--servers", two.url, "--as", "X", "--subject-prefix", "x", "--to-seq", "1"]) == 1
    assert capfd.readouterr().err.endswith("has no messages in this range except schedules (--with-schedules)\n")
    assert main([*command, "--servers", three.url, "--with-schedules"]) == 0
    assert asyncio.run(state_of(three.url, "ORDERS")) == asyncio.run(state_of(one.url, "ORDERS"))


def test_a_stream_with_sources_does_not_copy_what_it_has(
    nats_server: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = nats_server(), nats_server()
    asyncio.run(create(one.url, "ORIGIN", subjects=["orders.>"]))
    asyncio.run(publish(one.url, *[("orders.a", None)] * 3))
    asyncio.run(create(one.url, "ORDERS", sources=[{"name": "ORIGIN"}]))
    asyncio.run(until_stored(one.url, "ORDERS", 3))
    for stream in ("ORIGIN", "ORDERS"):
        asyncio.run(capture_all(config(one.url, tmp_path / "a", source={"stream": stream})))
    command = [f"file://{tmp_path / 'a'}", "--servers", two.url]
    assert main([command[0], "ORIGIN", *command[1:]]) == 0
    capfd.readouterr()
    assert main([command[0], "ORDERS", *command[1:]]) == 0
    assert "jetcapture: stream ORDERS is created without its sources (ORIGIN), of which " in capfd.readouterr().err
    changes = tmp_path / "stream.yaml"
    changes.write_text("stream: {name: ORDERS, sources: [{name: ORIGIN}]}")
    again = [command[0], "ORDERS", *command[1:], "--as", "AGAIN", "--stream-config", str(changes)]
    assert main(again) == 2
    assert "stream.sources: ORIGIN: set opt_start_seq to the first sequence to copy" in capfd.readouterr().err
    changes.write_text("stream: {name: AGAIN, sources: [{name: ORIGIN, opt_start_seq: 4}]}")
    assert main(again) == 0
    assert "without its sources" not in capfd.readouterr().err

    async def add_source() -> None:
        async with opened(two.url) as client:
            settings = (await api(client, "STREAM.INFO.ORDERS"))["config"]
            await api(client, "STREAM.UPDATE.ORDERS", {**settings, "sources": [{"name": "ORIGIN", "opt_start_seq": 4}]})

    asyncio.run(add_source())
    asyncio.run(publish(two.url, ("orders.new", None)))
    for stream in ("ORDERS", "AGAIN"):
        asyncio.run(until_stored(two.url, stream, 4))
        assert asyncio.run(subject_at(two.url, stream, 4)) == "orders.new"


async def subject_at(url: str, stream: str, seq: int) -> str:
    async with opened(url) as client:
        return str((await api(client, f"STREAM.MSG.GET.{stream}", {"seq": seq}))["message"]["subject"])


@pytest.mark.parametrize("mode", ["shared", "ordered"])
def test_the_captures_consumer_is_the_one_that_apply_would_create(
    nats_server: Start, tmp_path: Path, mode: str
) -> None:
    one, two = nats_server(), nats_server()
    source = {"filter_subjects": ["orders.a", "orders.c.*"], "max_ack_pending": 77, "mode": mode}
    asyncio.run(create(one.url, "ORDERS", subjects=["orders.>"], deny_delete=True, deny_purge=True))
    asyncio.run(publish(one.url, ("orders.a", None), ("orders.b", None), ("orders.a", None)))
    asyncio.run(capture_all(config(one.url, tmp_path / "a", source=source)))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings(two.url, tmp_path / "a", source=source)))
    command = [str(file), "--consumer", "archive=1", "--consumer", "other=3", "--allow-holes"]
    assert main(command) == 0
    (plan,) = asyncio.run(apply(load_for_apply(file), dry_run=True))
    assert (plan.plan.kind, plan.plan.action) == ("consumer", "none")
    assert "filter_subjects" not in asyncio.run(consumer_of(two.url, "ORDERS", "other"))
    asyncio.run(publish(two.url, ("orders.b", None), ("orders.a", None)))
    asyncio.run(capture_all(config(two.url, tmp_path / "b", source=source)))
    assert {(name.first_seq, name.last_seq) for name in objects(tmp_path / "b")} == {(3, 5)}
    assert main([*command, "--as", "COPY", "--subject-prefix", "copy"]) == 0
    filters = asyncio.run(consumer_of(two.url, "COPY", "archive"))["filter_subjects"]
    assert filters == ["copy.orders.a", "copy.orders.c.*"]


async def consumer_of(url: str, stream: str, name: str) -> dict[str, Any]:
    async with opened(url) as client:
        return dict((await api(client, f"CONSUMER.INFO.{stream}.{name}"))["config"])
