"""`jetcapture tap` shows what a capture would store, and leaves the stream and its consumers as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from nats.js.api import RetentionPolicy

from jetcapture_py.manage.check import check
from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.tap import run, tap
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer, older_servers
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, consumer, publish, rows

Start = Callable[..., NatsServer]
JSON = {"format": "json", "columns": {"id": "int64", "region": "string"}}


def order(number: int) -> bytes:
    return b"{broken" if number % 10 == 9 else json.dumps({"id": number, "region": "eu"}).encode()


async def fill(url: str, count: int = 100) -> None:
    await publish(url, [(f"orders.{'ab'[number % 2]}", order(number), None) for number in range(count)])


def test_the_newest_messages_are_shown_as_they_would_be_stored(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    configuration = config(server.url, tmp_path / "archive", decode=JSON, key="{region}")
    asyncio.run(fill(server.url))
    found = asyncio.run(tap(configuration, 20))
    assert [outcome.seq for outcome in found] == list(range(81, 101))
    asyncio.run(capture_all(configuration))
    stored = {row["_nats_seq"]: row for row in rows(tmp_path / "archive")}
    refused = {row["_nats_seq"]: row for row in rows(tmp_path / "archive", quarantine=True)}
    for outcome in found:
        if outcome.quarantine is None:
            row = stored[outcome.seq]
            assert (outcome.key, outcome.rows) == (row["key"], [{"id": row["id"], "region": row["region"]}])
        else:
            row = refused[outcome.seq]
            assert outcome.quarantine == (row["stage"], row["error"])
        assert (outcome.payload, outcome.timestamp) == (row["_nats_payload"], row["_nats_timestamp"])


def test_nothing_is_stored_acknowledged_or_left_behind(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    asyncio.run(fill(server.url))

    async def consumers() -> list[str]:
        async with connection(server.url) as client:
            return [each.name for each in await client.jetstream().consumers_info(STREAM)]

    configuration = config(server.url, tmp_path / "archive", decode=JSON)
    assert len(asyncio.run(tap(configuration, 5))) == 5
    assert asyncio.run(consumers()) == []
    assert not (tmp_path / "archive").exists()
    asyncio.run(capture_all(configuration))
    before = asyncio.run(consumer(server.url))
    assert len(asyncio.run(tap(configuration, 5))) == 5
    after = asyncio.run(consumer(server.url))
    assert (after.num_ack_pending, after.delivered, after.ack_floor) == (0, before.delivered, before.ack_floor)
    assert asyncio.run(consumers()) == [CONSUMER]


def test_filters_and_gaps_are_passed_over(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()

    async def sparse() -> None:
        subjects = ("orders.rare" if number % 500 == 3 else "orders.all" for number in range(3000))
        await publish(server.url, [(subject, b"", None) for subject in subjects])
        async with connection(server.url) as client:
            for seq in range(2990, 3001):
                await client.jetstream().delete_msg(STREAM, seq)

    asyncio.run(sparse())
    configuration = config(server.url, tmp_path, source={"filter_subjects": ["orders.rare"]})
    assert [outcome.seq for outcome in asyncio.run(tap(configuration, 3))] == [1504, 2004, 2504]
    assert len(asyncio.run(tap(configuration, 100))) == 6
    assert [outcome.seq for outcome in asyncio.run(tap(config(server.url, tmp_path), 2))] == [2988, 2989]


def test_a_work_queue_is_looked_at_without_a_consumer(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()

    async def fill_queue() -> None:
        async with connection(server.url) as client:
            retention = RetentionPolicy.WORK_QUEUE
            await client.jetstream().add_stream(name=STREAM, subjects=["orders.>"], retention=retention)
            for number in range(10):
                headers = {"N": str(number)}
                await client.jetstream().publish(f"orders.{'ab'[number % 2]}", order(number), headers=headers)

    asyncio.run(fill_queue())
    found = asyncio.run(tap(config(server.url, tmp_path, source={"filter_subjects": ["orders.a"]}), 3))
    assert [(outcome.seq, outcome.headers) for outcome in found] == [
        (5, {"N": ["4"]}),
        (7, {"N": ["6"]}),
        (9, {"N": ["8"]}),
    ]


@pytest.mark.parametrize(("version", "command"), list(older_servers())[-1:])
def test_messages_of_an_interest_stream_that_no_consumer_needs_survive_being_looked_at(
    nats_server: Start, tmp_path: Path, version: str, command: str
) -> None:
    """Servers before 2.15 keep such messages when a stream's retention changes, until some consumer ends."""
    url = nats_server(command=command).url

    async def scenario() -> None:
        stream = {"name": STREAM, "subjects": ["orders.>"]}
        await create(url, stream, messages=20)
        await ask(url, f"STREAM.UPDATE.{STREAM}", {**stream, "retention": "interest"})
        configuration = config(url, tmp_path)
        assert [outcome.seq for outcome in await tap(configuration, 5)] == [16, 17, 18, 19, 20]
        findings = await check(configuration)
        assert "the newest messages (20) have 5 keys" in str(findings.items)
        assert f"nats-server {version} can skip messages of a consumer" in str(findings.items)
        assert (await ask(url, f"STREAM.INFO.{STREAM}"))["state"]["messages"] == 20

    asyncio.run(scenario())


def test_an_empty_stream_is_no_error(nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = nats_server()
    asyncio.run(publish(server.url, []))
    assert show_one(run(config(server.url, tmp_path), 20)) == 0
    assert capsys.readouterr().out == "stream ORDERS has no message that the filters match\n"


def test_text_and_json_show_key_columns_and_reason(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    asyncio.run(fill(server.url, 10))
    configuration = config(server.url, tmp_path, decode=JSON, key="{region}")
    assert show_one(run(configuration, 2)) == 0
    first, columns, second, payload = capsys.readouterr().out.splitlines()
    assert first.startswith("9  ")
    assert 'orders.a  key "eu"  time slice ' in first
    assert columns == "    id=8  region=eu"
    assert "orders.b  quarantine (decode): " in second
    assert payload == "    7 bytes: {broken"
    typo = {"id": "int64", "region": {"type": "string", "path": "regoin"}}
    wrong = config(server.url, tmp_path, decode={"format": "json", "columns": typo})
    assert show_one(run(wrong, 2)) == 0
    assert capsys.readouterr().out.splitlines()[1] == "    id=8  region=null"
    assert show_one(run(configuration, 2), as_json=True) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (shown[0]["key"], shown[0]["columns"], shown[0]["sequence"]) == ("eu", {"id": 8, "region": "eu"}, 9)
    assert (shown[1]["quarantine"]["stage"], shown[1]["payload"]) == ("decode", "{broken")
