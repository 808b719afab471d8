"""The proof of completeness, of archives that a real capture has made of real streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest
from nats.js.api import StreamConfig

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.jetstream import range_reader
from jetcapture_py.verify import scan
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import verify
from tests.support import s3
from tests.support.archives import merge
from tests.support.nats_server import NatsServer
from tests.support.proofs import named_files, unchecked, watermark_problems
from tests.support.running import (
    CONSUMER,
    STREAM,
    Message,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    publish,
    rows,
)

Start = Callable[..., NatsServer]
KEYED: dict[str, Any] = {"key": "{subject[1]}", "block": {"max_messages": 50}}


@pytest.fixture(params=[0, 4], ids=["keys", "bundles"])
def each_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with objects under keys, and with objects in bundles."""
    monkeypatch.setitem(KEYED, "block", {"max_messages": 50, "bundles": request.param})


def orders(count: int, keys: str = "abc") -> list[Message]:
    return [(f"orders.{keys[index % len(keys)]}", b"%d" % index, None) for index in range(count)]


def sequences(root: Path, names: Iterable[ObjectName] | None = None) -> set[int]:
    """What the archive, or these objects of it, hold."""
    if names is None:
        return {row[layout.SEQ] for quarantine in (False, True) for row in rows(root, quarantine=quarantine)}
    tables = [pq.ParquetFile(root / name.path).read([layout.SEQ]) for name in names]
    return {seq for table in tables for seq in table.column(0).to_pylist()}


def remove(root: Path, *names: ObjectName) -> set[int]:
    """Remove these objects; what they held."""
    lost = sequences(root, names)
    for name in names:
        (root / name.path).unlink()
    return lost


def holes(report: Report) -> set[int]:
    """The sequences in the report's holes, when they are whole ranges."""
    found = {seq for hole in report.ranges(Kind.HOLES) for seq in range(hole.first, hole.last + 1)}
    assert len(found) == report.missing == sum(hole.messages or 0 for hole in report.ranges(Kind.HOLES))
    return found


def gaps(report: Report) -> set[int]:
    found = {seq for gap in report.ranges(Kind.GAPS) for seq in range(gap.first, gap.last + 1)}
    assert len(found) == report.count(Kind.GAPS)
    return found


@contextlib.asynccontextmanager
async def captured(
    nats_server: Start, root: Path, messages: list[Message], **sections: Any
) -> AsyncIterator[tuple[NatsServer, Config]]:
    server = nats_server()
    await publish(server.url, messages)
    settings = config(server.url, root, **{**KEYED, **sections})
    await capture_all(settings)
    yield server, settings


# ------------------------------------------------------------------ complete, and not


async def test_a_whole_archive_is_proven_complete(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(1000)) as (_, settings):
        report = await verify(settings)
        last = max(rows(tmp_path / "a"), key=lambda row: int(row[layout.SEQ]))
    assert report.complete
    assert (report.stored, report.ack_floor, report.up_to) == (1000, 1000, 1000)
    assert report.up_to_time == last[layout.TIMESTAMP]
    assert (
        report.missing,
        report.count(Kind.DUPLICATES),
        report.paths(Kind.DAMAGED),
        report.paths(Kind.FOREIGN),
    ) == (0, 0, (), ())
    assert (report.ranges(Kind.HOLES), report.ranges(Kind.GAPS), unchecked(report), report.older) == ((), (), [], 0)
    assert report.objects == len(objects(tmp_path / "a")) > 20
    assert report.watermark is not None
    assert (report.watermark.seq, watermark_problems(report)) == (1000, "")
    assert report.as_text().startswith("complete: every one of 1,000 messages up to sequence 1000 (20")


async def test_an_object_that_was_removed_is_a_hole_with_its_times(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(600, "a")) as (_, settings):
        victim = objects(tmp_path / "a")[3]
        times = {row[layout.SEQ]: row[layout.TIMESTAMP] for row in rows(tmp_path / "a")}
        lost = remove(tmp_path / "a", victim)
        report = await verify(settings)
    assert holes(report) == lost
    for hole in report.ranges(Kind.HOLES):
        assert (hole.first_time, hole.last_time) == (times[hole.first], times[hole.last])
        assert not {hole.first - 1, hole.last + 1} & lost
    assert not report.complete
    assert report.proven
    assert report.missing == victim.rows
    assert report.watermark is not None
    assert f"{victim.first_seq} is not" in watermark_problems(report)


async def test_messages_that_another_capture_of_the_consumer_stored_elsewhere_are_holes_with_their_cause(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    for store in ("here", "elsewhere", "here"):
        await publish(server.url, orders(30))
        await capture_all(config(server.url, tmp_path / store))
    report = await verify(config(server.url, tmp_path / "here"))
    assert holes(report) == set(range(31, 61))
    assert "another capture of this consumer stores what it receives elsewhere" in report.as_text()


@pytest.mark.usefixtures("each_layout")
async def test_quarantined_messages_are_stored_messages(nats_server: Start, tmp_path: Path) -> None:
    messages: list[Message] = [
        ("orders.a", b'{"n":%d}' % index if index % 10 else b"{half", None) for index in range(200)
    ]
    json = {"decode": {"format": "json", "columns": {"n": "int64"}}}
    async with captured(nats_server, tmp_path / "a", messages, **json) as (_, settings):
        report = await verify(settings)
        assert report.complete
        assert (report.stored, report.quarantined) == (200, 20)
        lost = remove(tmp_path / "a", *(name for name in objects(tmp_path / "a") if name.quarantine))
        assert holes(await verify(settings)) == lost == set(range(1, 200, 10))


async def test_objects_that_compaction_moves_meanwhile_are_found_again(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with captured(nats_server, tmp_path / "a", orders(400, "a")) as (_, settings):
        names = objects(tmp_path / "a")
        examined, first, merged = scan.examined, threading.Lock(), list[Path]()

        def compacting(*arguments: Any, **named: Any) -> Any:
            with first:
                if not merged:
                    merged.append(merge(tmp_path / "a", names[2:]))
            return examined(*arguments, **named)

        monkeypatch.setattr(scan, "examined", compacting)
        report = await verify(settings)
    assert len(names) > 4
    assert report.complete
    assert report.objects == 3
    assert (report.stored, report.count(Kind.DUPLICATES)) == (400, 0)


# ------------------------------------------------------------------ lives


async def recreate(url: str, messages: list[Message]) -> None:
    async with connection(url) as client:
        await client.jetstream().delete_stream(STREAM)
    await publish(url, messages)


async def test_objects_of_a_recreated_streams_earlier_life_do_not_count(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(300, "a")) as (server, settings):
        before = set(objects(tmp_path / "a"))
        await recreate(server.url, orders(200, "a"))
        await capture_all(settings)
        report = await verify(settings)
        assert report.complete
        assert (report.stored, report.older, report.count(Kind.DUPLICATES)) == (200, 300, 0)
        assert "300 messages of earlier incarnations" in report.as_text()
        lost = remove(tmp_path / "a", min(set(objects(tmp_path / "a")) - before, key=lambda name: name.path))
        assert holes(await verify(settings)) == lost


# ------------------------------------------------------------------ what cannot be proven


async def test_below_the_streams_first_message_there_are_only_gaps(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(200, "a")) as (server, settings):
        for _ in range(2):
            await publish(server.url, orders(200, "a"))
            await capture_all(settings)
        async with connection(server.url) as client:
            await client.jetstream().purge_stream(STREAM, seq=440)
        report = await verify(settings)
        assert report.complete
        assert report.ranges(Kind.GAPS) == ()
        names = objects(tmp_path / "a")
        lost = remove(tmp_path / "a", next(name for name in names if name.first_seq == 201))
        report = await verify(settings)
        assert (report.complete, report.exit_code(), report.exit_code(strict=True)) == (True, 0, 1)
        assert gaps(report) == lost
        lost |= remove(tmp_path / "a", *(name for name in names if 400 < name.first_seq < 440))
        report = await verify(settings)
        assert holes(report) == {seq for seq in lost if seq >= 440} != set()
        assert gaps(report) == {seq for seq in lost if seq < 440}
        begin = remove(tmp_path / "a", *(name for name in names if name.first_seq < 200))
        report = await verify(settings)
        assert gaps(report) == {seq for seq in lost if max(begin) < min(sequences(tmp_path / "a")) < seq < 440}
        first = min(sequences(tmp_path / "a"))
        assert f"sequences 1 to {first - 1}: the stream no longer has them" in report.as_text()


async def test_an_empty_stream_and_an_empty_archive_prove_nothing(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(60, "a")) as (server, settings):
        async with connection(server.url) as client:
            await client.jetstream().purge_stream(STREAM)
        assert (await verify(settings)).complete
        remove(tmp_path / "a", *objects(tmp_path / "a"))
        report = await verify(settings)
    assert (report.complete, report.proven, report.exit_code()) == (False, False, 1)
    assert report.as_text().startswith("NOT proven")


async def test_a_work_queue_is_checked_for_continuity(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    async with connection(server.url) as client:
        queue = StreamConfig(name=STREAM, subjects=["orders.>"], retention="workqueue")  # type: ignore[arg-type]
        await client.jetstream().add_stream(queue)
        for _, payload, _ in orders(300):
            await client.jetstream().publish("orders.a", payload)
    settings = config(server.url, tmp_path / "a", **KEYED)
    await capture_all(settings)
    report = await verify(settings)
    assert report.complete
    assert any("retention workqueue" in note for note in unchecked(report))
    lost = remove(tmp_path / "a", objects(tmp_path / "a")[2])
    report = await verify(settings)
    assert gaps(report) == lost
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)


async def test_without_the_stream_only_the_archives_own_gaps_are_known(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(300, "a")) as (server, settings):
        lost = remove(tmp_path / "a", objects(tmp_path / "a")[2])
        for gone in ("consumer", "stream", "server"):
            async with connection(server.url) as client:
                if gone == "consumer":
                    await client.jetstream().delete_consumer(STREAM, CONSUMER)
                elif gone == "stream":
                    await client.jetstream().delete_stream(STREAM)
            if gone == "server":
                server.kill()
            report = await verify(settings)
            assert (report.complete, report.proven, report.exit_code()) == (False, False, 1), gone
            assert (report.ranges(Kind.HOLES), report.missing) == ((), 0)
            assert gaps(report) == lost
            assert report.as_text().startswith("NOT proven: 250 messages")
            assert any(note.startswith("the stream: ") for note in unchecked(report))


# ------------------------------------------------------------------ where a consumer starts


async def test_a_consumer_that_starts_at_a_time_owes_nothing_before_it(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    await publish(server.url, orders(100, "a"))
    async with connection(server.url) as client:
        last = (await client.jetstream().get_msg(STREAM, 100)).time
    assert last is not None
    start = last + timedelta(microseconds=1)
    await publish(server.url, orders(100, "a"))
    late = {"deliver_policy": "by_start_time", "start_time": start}
    settings = config(server.url, tmp_path / "a", **{**KEYED, "source": late})
    await capture_all(settings)
    report = await verify(settings)
    assert report.complete
    assert report.stored == 100
    lost = remove(tmp_path / "a", next(name for name in objects(tmp_path / "a") if name.first_seq == 101))
    assert holes(await verify(settings)) == lost


@pytest.mark.parametrize("policy", ["new", "last_per_subject"])
async def test_of_a_consumer_that_starts_with_new_messages_the_first_one_stored_is_the_first_one_owed(
    nats_server: Start, tmp_path: Path, policy: str
) -> None:
    server = nats_server()
    await publish(server.url, orders(100, "a"))
    source = {"deliver_policy": policy, "filter_subjects": ["orders.>"]}  # which the server wants for the last one
    new = config(server.url, tmp_path / "a", **{**KEYED, "source": source})
    await capture_all(new)
    for count in (20, 180):
        await publish(server.url, orders(count, "a"))
        await capture_all(new)
    report = await verify(new)
    assert report.complete
    assert report.missing == 0
    assert any(policy in note for note in unchecked(report))
    assert {seq for seq in sequences(tmp_path / "a") if seq > 100} == set(range(101, 301))
    lost = remove(tmp_path / "a", max(objects(tmp_path / "a"), key=lambda name: name.last_seq))
    assert holes(await verify(new)) == lost
    remove(tmp_path / "a", *(name for name in objects(tmp_path / "a") if 100 < name.first_seq <= 120))
    began = min(seq for seq in sequences(tmp_path / "a") if seq > 100)
    assert began > 120
    report = await verify(new)
    assert holes(report) == {seq for seq in lost if seq > began}
    assert not any("no longer has" in note for note in unchecked(report))


# ------------------------------------------------------------------ places


async def test_every_root_of_an_archive_with_the_key_in_its_url_is_found(nats_server: Start, tmp_path: Path) -> None:
    template = f"{tmp_path}/a/for-{{key}}/nats"
    async with captured(nats_server, Path(template), orders(300)) as (_, settings):
        report = await verify(settings)
        assert report.complete
        assert (report.stored, report.watermark) == (300, None)
        (victim, *others) = sorted((tmp_path / "a").rglob("*.parquet"))
        moved = tmp_path / "a" / "for-b" / victim.relative_to(tmp_path / "a" / "for-a")
        moved.parent.mkdir(parents=True)
        victim.rename(moved)
        report = await verify(settings)
        assert named_files(report, Kind.FOREIGN) == (moved.relative_to(tmp_path / "a").as_posix(),)
        assert report.objects == len(others)
        assert len(holes(report)) == report.missing == 300 - report.stored > 0


def test_an_archive_in_s3_is_proven_as_one_on_disk(nats_server: Start, tmp_path: Path) -> None:
    with s3.serve() as endpoint:
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="dummy",
            aws_secret_access_key="dummy-secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="archive")
        options = {**s3.CREDENTIALS, "client_kwargs": {"endpoint_url": endpoint}}

        async def scenario() -> None:
            server = nats_server()
            await publish(server.url, orders(300))
            settings = config(server.url, "s3://archive/nats", **KEYED, store={"options": options})
            await capture_all(settings)
            for deep in (False, True):
                report = await verify(settings, deep=deep)
                assert report.complete
                assert report.stored == 300
            names = [name for name in s3.names(endpoint, "s3://archive/nats") if name.endswith(".parquet")]
            client.delete_object(Bucket="archive", Key=names[0])
            client.put_object(Bucket="archive", Key=names[1], Body=b"PAR1 no more PAR1")
            client.put_object(Bucket="archive", Key=f"nats/{STREAM}/README", Body=b"hello")
            gone = [layout.parse_path(name.removeprefix("nats/")) for name in names[:2]]
            report = await verify(settings)
            assert [problem.path for problem in report.paths(Kind.DAMAGED)] == [names[1].removeprefix("nats/")]
            assert named_files(report, Kind.FOREIGN) == (f"{STREAM}/README",)
            assert report.missing == sum(name.rows for name in gone if name is not None)

        asyncio.run(scenario())
        client.close()


# ------------------------------------------------------------------ reading the stream


async def test_a_server_that_is_killed_while_the_stream_is_read_costs_nothing(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "BATCH", 500)
    monkeypatch.setattr(range_reader, "ENOUGH", 100)

    async with captured(nats_server, tmp_path / "a", orders(6000, "a")) as (server, settings):
        for name in objects(tmp_path / "a"):
            (tmp_path / "a" / name.path).unlink()
        killed: list[int] = []

        def kill_once(stage: str, done: int, total: int) -> None:
            if stage == "stream" and not killed:
                killed.append(done)
                server.kill()
                server.start()

        report = await verify(settings, progress=kill_once)
    assert 0 < killed[0] < 6000
    assert holes(report) == set(range(1, 6001))
    assert len(report.ranges(Kind.HOLES)) == 1


async def test_it_leaves_nothing_behind_on_the_server(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(200, "a")) as (server, settings):
        remove(tmp_path / "a", objects(tmp_path / "a")[0])
        before = await consumer(server.url)
        await verify(settings)
        async with connection(server.url) as client:
            names = [each.name for each in await client.jetstream().consumers_info(STREAM)]
        after = await consumer(server.url)
    assert names == [CONSUMER]
    assert (after.delivered, after.ack_floor, after.num_pending) == (
        before.delivered,
        before.ack_floor,
        before.num_pending,
    )


@pytest.mark.usefixtures("each_layout")
async def test_a_random_loss_is_told_exactly(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    monkeypatch.setattr("jetcapture_py.verify.proof.MAX_READ_ON", 8)  # so that it is read in many ranges

    server = nats_server()
    await publish(server.url, [(f"orders.{chance.choice('aabcd')}", b"x", None) for _ in range(3000)])
    filters = ["orders.a", "orders.b", "orders.c"]
    settings = config(server.url, tmp_path / "a", **{**KEYED, "source": {"filter_subjects": filters}})
    await capture_all(settings)
    captured_all = sequences(tmp_path / "a")
    deleted = set(chance.sample(range(1, 3001), 100))
    async with connection(server.url) as client:
        for seq in deleted:
            await client.jetstream().delete_msg(STREAM, seq)
        await client.jetstream().purge_stream(STREAM, seq=200)
    remove(tmp_path / "a", *chance.sample(objects(tmp_path / "a"), 15))
    left = sequences(tmp_path / "a")
    report = await verify(settings)
    expected = {seq for seq in captured_all - left - deleted if seq >= 200}
    assert report.missing == len(expected) > 100
    assert report.stored == len(left)
    inside = {seq for seq in expected for hole in report.ranges(Kind.HOLES) if hole.first <= seq <= hole.last}
    assert inside == expected
    there = left - deleted - set(range(200))
    assert not any(hole.first < seq < hole.last for seq in there for hole in report.ranges(Kind.HOLES))
    ends = {hole.first for hole in report.ranges(Kind.HOLES)} | {hole.last for hole in report.ranges(Kind.HOLES)}
    assert ends <= expected
    assert gaps(report) == {seq for seq in range(min(left), min(200, 3000)) if seq not in left}


async def test_a_proof_that_is_cancelled_ends_soon(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with captured(nats_server, tmp_path / "a", orders(3000), block={"max_messages": 5}) as (_, settings):
        examined: list[Any] = []
        real = scan.examined

        def slowly(*arguments: Any, **named: Any) -> Any:
            examined.append(arguments)
            if len(examined) == 10:
                loop.call_soon_threadsafe(task.cancel)
            time.sleep(0.01)
            return real(*arguments, **named)

        monkeypatch.setattr(scan, "examined", slowly)
        loop, task = asyncio.get_running_loop(), asyncio.create_task(verify(settings))
        with pytest.raises(asyncio.CancelledError):
            await task
    await loop.shutdown_default_executor()
    assert len(examined) < 100 < len(objects(tmp_path / "a"))
