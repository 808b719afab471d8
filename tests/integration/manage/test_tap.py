"""`jetcapture tap` shows what a capture would store, and leaves the stream and its consumers as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from jetcapture_py.manage.many import show_one
from jetcapture_py.manage.tap import run, tap
from tests.integration.manage.api import create
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, consumer, publish, rows

JSON = {"format": "json", "columns": {"id": "int64", "region": "string"}}


def order(number: int) -> bytes:
    return b"{broken" if number % 10 == 9 else json.dumps({"id": number, "region": "eu"}).encode()


async def fill(url: str, count: int = 100) -> None:
    await publish(url, [(f"orders.{'ab'[number % 2]}", order(number), None) for number in range(count)])


async def test_the_newest_messages_are_shown_as_they_would_be_stored_and_nothing_is_left_behind(
    server: NatsServer, archive: Path
) -> None:
    configuration = config(server.url, archive, decode=JSON, key="{region}")
    await fill(server.url)

    async def consumers() -> list[str]:
        async with connection(server.url) as client:
            return [each.name for each in await client.jetstream().consumers_info(STREAM)]

    found = await tap(configuration, 20)
    assert [outcome.seq for outcome in found] == list(range(81, 101))
    assert (await consumers(), archive.exists()) == ([], False)
    await capture_all(configuration)
    stored = {row["_nats_seq"]: row for row in rows(archive)}
    refused = {row["_nats_seq"]: row for row in rows(archive, quarantine=True)}
    for outcome in found:
        row = stored[outcome.seq] if outcome.quarantine is None else refused[outcome.seq]
        if outcome.quarantine is None:
            assert (outcome.key, outcome.rows) == (row["key"], [{"id": row["id"], "region": row["region"]}])
        else:
            assert outcome.quarantine == (row["stage"], row["error"])
        assert (outcome.payload, outcome.timestamp) == (row["_nats_payload"], row["_nats_timestamp"])
    before = await consumer(server.url)
    assert len(await tap(configuration, 5)) == 5
    after = await consumer(server.url)
    assert (after.num_ack_pending, after.delivered, after.ack_floor) == (0, before.delivered, before.ack_floor)
    assert await consumers() == [CONSUMER]


async def test_filters_and_gaps_are_passed_over(server: NatsServer, tmp_path: Path) -> None:
    subjects = ("orders.rare" if number % 500 == 3 else "orders.all" for number in range(3000))
    await publish(server.url, [(subject, b"", None) for subject in subjects])
    async with connection(server.url) as client:
        for seq in range(2990, 3001):
            await client.jetstream().delete_msg(STREAM, seq)
    configuration = config(server.url, tmp_path, source={"filter_subjects": ["orders.rare"]})
    assert [outcome.seq for outcome in await tap(configuration, 3)] == [1504, 2004, 2504]
    assert len(await tap(configuration, 100)) == 6
    assert [outcome.seq for outcome in await tap(config(server.url, tmp_path), 2)] == [2988, 2989]


async def test_a_work_queue_is_looked_at_without_a_consumer(server: NatsServer, tmp_path: Path) -> None:
    await create(server.url, {"name": STREAM, "subjects": ["orders.>"], "retention": "workqueue"})
    async with connection(server.url) as client:
        for n in range(10):
            await client.jetstream().publish(f"orders.{'ab'[n % 2]}", order(n), headers={"N": str(n)})
    found = await tap(config(server.url, tmp_path, source={"filter_subjects": ["orders.a"]}), 3)
    assert [(outcome.seq, outcome.headers) for outcome in found] == [(n + 1, {"N": [str(n)]}) for n in (4, 6, 8)]


def test_text_and_json_show_key_columns_and_reason(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = config(server.url, tmp_path, decode=JSON, key="{region}")
    asyncio.run(publish(server.url, []))
    assert show_one(run(configuration, 20)) == 0
    assert capsys.readouterr().out == "stream ORDERS has no message that the filters match\n"
    asyncio.run(fill(server.url, 10))
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
