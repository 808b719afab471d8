"""The proof of completeness, and what it finds beside holes, of archives that real captures made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout, watermark
from jetcapture_py.archive.bundles import bundle_text
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.jetstream import range_reader
from jetcapture_py.store import LocalStore
from jetcapture_py.verify import scan
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import prove, verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.support.archives import copy_to
from tests.support.nats_server import NatsServer
from tests.support.proofs import losses_of, named_files, spans, unchecked, watermark_problems
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
    running,
    until,
)

Start = Callable[..., NatsServer]
KEYED: dict[str, Any] = {"key": "{subject[1]}", "block": {"max_messages": 50}}
BUNDLED: dict[str, Any] = {"block": {"max_messages": 50, "bundles": 4}}


def orders(count: int, keys: str = "abc") -> list[Message]:
    return [(f"orders.{keys[index % len(keys)]}", b"%d" % index, None) for index in range(count)]


def sequences(root: Path, names: Iterable[ObjectName] | None = None) -> set[int]:
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
    assert (report.complete, report.findings) == (True, ())
    assert (report.stored, report.ack_floor, report.up_to, report.older) == (1000, 1000, 1000, 0)
    assert report.up_to_time == last[layout.TIMESTAMP]
    assert report.objects == len(objects(tmp_path / "a")) > 20
    assert report.watermark is not None
    assert report.watermark.seq == 1000
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


async def test_quarantined_messages_are_stored_messages(nats_server: Start, tmp_path: Path) -> None:
    messages: list[Message] = [("orders.a", b'{"n":%d}' % n if n % 10 else b"{half", None) for n in range(200)]
    sections = {"decode": {"format": "json", "columns": {"n": "int64"}}, **BUNDLED}
    async with captured(nats_server, tmp_path / "a", messages, **sections) as (_, settings):
        report = await verify(settings)
        assert (report.complete, report.stored, report.quarantined) == (True, 200, 20)
        lost = remove(tmp_path / "a", *(name for name in objects(tmp_path / "a") if name.quarantine))
        assert holes(await verify(settings)) == lost == set(range(1, 200, 10))


# ------------------------------------------------------------------ lives


async def test_objects_of_a_recreated_streams_earlier_life_do_not_count(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(300, "a")) as (server, settings):
        before = set(objects(tmp_path / "a"))
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(server.url, orders(200, "a"))
        await capture_all(settings)
        report = await verify(settings)
        assert (report.complete, report.stored, report.older) == (True, 200, 300)
        assert report.count(Kind.DUPLICATES, Kind.READ_TWICE) == 0
        assert "300 messages of earlier incarnations" in report.as_text()
        lost = remove(tmp_path / "a", min(set(objects(tmp_path / "a")) - before, key=lambda name: name.path))
        assert holes(await verify(settings)) == lost


# ------------------------------------------------------------------ what cannot be proven


async def test_below_the_streams_first_message_there_are_only_gaps(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(200, "a")) as (server, settings):
        for _ in range(2):
            await publish(server.url, orders(200, "a"))
            await capture_all(settings)
        async with connection(server.url) as client:
            await client.jetstream().purge_stream(STREAM, seq=440)
        report = await verify(settings)
        assert (report.complete, report.ranges(Kind.GAPS)) == (True, ())
        names = objects(root)
        lost = remove(root, next(name for name in names if name.first_seq == 201))
        report = await verify(settings)
        assert (report.complete, report.exit_code(), report.exit_code(strict=True)) == (True, 0, 1)
        assert gaps(report) == lost
        lost |= remove(root, *(name for name in names if 400 < name.first_seq < 440))
        report = await verify(settings)
        assert holes(report) == {seq for seq in lost if seq >= 440} != set()
        assert gaps(report) == {seq for seq in lost if seq < 440}
        remove(root, *(name for name in names if name.first_seq < 200))
        report, first = await verify(settings), min(sequences(root))
        assert gaps(report) == {seq for seq in lost if first < seq < 440}
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
            assert (report.ranges(Kind.HOLES), report.missing, gaps(report)) == ((), 0, lost)
            assert report.as_text().startswith("NOT proven: 250 messages")
            assert any(note.startswith("the stream: ") for note in unchecked(report))


# ------------------------------------------------------------------ where a consumer starts


@pytest.mark.parametrize("policy", ["new", "last_per_subject", "by_start_time"])
async def test_a_consumer_that_starts_late_owes_nothing_before_the_first_one_stored(
    server: NatsServer, tmp_path: Path, policy: str
) -> None:
    root = tmp_path / "a"
    await publish(server.url, orders(100, "a"))
    source: dict[str, Any] = {"deliver_policy": policy}
    if policy == "last_per_subject":
        source["filter_subjects"] = ["orders.>"]  # which the server wants for it
    if policy == "by_start_time":
        async with connection(server.url) as client:
            last = (await client.jetstream().get_msg(STREAM, 100)).time
        assert last is not None
        source["start_time"] = last + timedelta(microseconds=1)
    settings = config(server.url, root, **{**KEYED, "source": source})
    await capture_all(settings)
    for count in (20, 180):
        await publish(server.url, orders(count, "a"))
        await capture_all(settings)
    report = await verify(settings)
    assert (report.complete, report.missing) == (True, 0)
    assert any(policy in note for note in unchecked(report)) is (policy != "by_start_time")
    assert {seq for seq in sequences(root) if seq > 100} == set(range(101, 301))
    lost = remove(root, max(objects(root), key=lambda name: name.last_seq))
    assert holes(await verify(settings)) == lost
    lost |= remove(root, *(name for name in objects(root) if 100 < name.first_seq <= 120))
    began = min(seq for seq in sequences(root) if seq > 100)
    assert began > 120
    report = await verify(settings)
    assert holes(report) == (lost if policy == "by_start_time" else {seq for seq in lost if seq > began})
    assert not any("no longer has" in note for note in unchecked(report))


# ------------------------------------------------------------------ places


async def test_every_root_of_an_archive_with_the_key_in_its_url_is_found(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root / "for-{key}" / "nats", orders(300)) as (_, settings):
        report = await verify(settings)
        assert (report.complete, report.stored, report.watermark) == (True, 300, None)
        (victim, *others) = sorted(root.rglob("*.parquet"))
        moved = root / "for-b" / victim.relative_to(root / "for-a")
        moved.parent.mkdir(parents=True)
        victim.rename(moved)
        report = await verify(settings)
        assert named_files(report, Kind.FOREIGN) == (moved.relative_to(root).as_posix(),)
        assert report.objects == len(others)
        assert len(holes(report)) == report.missing == 300 - report.stored > 0


# ------------------------------------------------------------------ reading the stream


async def test_a_server_that_is_killed_while_the_stream_is_read_costs_nothing_and_keeps_nothing_of_it(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "BATCH", 500)
    monkeypatch.setattr(range_reader, "ENOUGH", 100)
    async with captured(nats_server, tmp_path / "a", orders(6000, "a")) as (server, settings):
        remove(tmp_path / "a", *objects(tmp_path / "a"))
        before, killed = await consumer(server.url), list[int]()

        def kill_once(stage: str, done: int, total: int) -> None:
            if stage == "stream" and not killed:
                killed.append(done)
                server.kill()
                server.start()

        report = await verify(settings, progress=kill_once)
        async with connection(server.url) as client:
            names = [each.name for each in await client.jetstream().consumers_info(STREAM)]
        after = await consumer(server.url)
    assert 0 < killed[0] < 6000
    assert holes(report) == set(range(1, 6001))
    assert len(report.ranges(Kind.HOLES)) == 1
    assert names == [CONSUMER]
    assert (after.ack_floor.stream_seq, after.num_pending) == (before.ack_floor.stream_seq, before.num_pending)


@pytest.mark.parametrize("layout_", [KEYED, KEYED | BUNDLED], ids=["keys", "bundles"])
async def test_a_random_loss_is_told_exactly(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout_: dict[str, Any]
) -> None:
    chance = random.Random(4)
    monkeypatch.setattr("jetcapture_py.verify.proof.MAX_READ_ON", 8)  # so that it is read in many ranges
    await publish(server.url, [(f"orders.{chance.choice('aabcd')}", b"x", None) for _ in range(3000)])
    filters = ["orders.a", "orders.b", "orders.c"]
    settings = config(server.url, tmp_path / "a", **layout_, source={"filter_subjects": filters})
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
        loop, real, examined = asyncio.get_running_loop(), scan.examined, list[Any]()

        def slowly(*arguments: Any, **named: Any) -> Any:
            examined.append(arguments)
            if len(examined) == 10:
                loop.call_soon_threadsafe(task.cancel)
            time.sleep(0.01)
            return real(*arguments, **named)

        monkeypatch.setattr(scan, "examined", slowly)
        task = asyncio.create_task(verify(settings))
        with pytest.raises(asyncio.CancelledError):
            await task
    await loop.shutdown_default_executor()
    assert len(examined) < 100 < len(objects(tmp_path / "a"))


# ------------------------------------------------------------------ beside holes


def lines(report: Report, beginning: str) -> list[str]:
    return [line for line in report.as_text().splitlines() if line.startswith(beginning)]


# ------------------------------------------------------------------ copies in different groups


async def test_a_message_in_archive_and_quarantine_counts_as_archived(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(300)) as (_, settings):
        name = objects(root)[0]
        copy_to(root, name, key=None, quarantine=True)
        report = await verify(settings)
        assert (report.quarantined, report.count(Kind.READ_TWICE, Kind.DUPLICATES)) == (0, 0)
        assert (report.count(Kind.QUARANTINE), report.exit_code(strict=True)) == (name.rows, 0)
        assert lines(report, f"quarantine: {name.rows} messages are also in the archive")
        copy_to(root, name, key=None, quarantine=True, bucket=name.bucket + 900)
        report = await verify(settings)
        assert (report.count(Kind.READ_TWICE), report.exit_code(), report.quarantined) == (name.rows, 1, 0)


# ------------------------------------------------------------------ the watermark


NEVER, LATER = datetime.max.replace(tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


async def test_a_watermark_promises_what_the_archive_has_or_fails(nats_server: Start, tmp_path: Path) -> None:
    """Of 300 messages that are stored, and 100 more that are delivered and not stored."""
    root, path = tmp_path / "a", watermark.path(STREAM, CONSUMER)
    async with captured(nats_server, root, orders(300, "a")) as (server, settings):
        store = LocalStore(str(root))
        data = store.read_note(path)
        assert data is not None
        original = watermark.ConsumerWatermark.decode(data, STREAM, "")
        async with running(config(server.url, root, key="")):
            await publish(server.url, orders(100))

            async def delivered() -> bool:
                return bool((await consumer(server.url)).num_ack_pending == 100)

            await until(delivered, "they are delivered")
            async with connection(server.url) as client:
                first = (await client.jetstream().get_msg(STREAM, 301)).time
            assert first is not None
            owed = "but 100 earlier messages of the stream are not stored, starting with 301"
            for written, problem, code, strict in (
                (original, "", 0, 0),
                (replace(original, seq=340), "40 messages after the ack floor 300 are not stored", 1, 1),
                (replace(original, seq=10_000), "the stream ends at 400", 1, 1),
                (replace(original, time=first - timedelta(microseconds=1)), "", 0, 0),
                (
                    replace(original, time=first),
                    "1 earlier message of the stream is not stored, starting with 301",
                    1,
                    1,
                ),
                (replace(original, time=datetime.now(UTC)), owed, 1, 1),
                (replace(original, time=LATER), "its time, 2100-01-01T00:00:00Z, is in the future", 1, 1),
                (replace(original, time=NEVER), "in the future", 1, 1),
                (replace(original, stream="PAYMENTS"), f"{path} belongs to stream PAYMENTS, not {STREAM}", 0, 1),
                (None, "damaged", 0, 1),
            ):
                store.write_note(path, b"{half" if written is None else written.encode())
                report = await verify(settings)
                found = watermark_problems(report)
                assert problem in found if problem else not found, found
                assert (report.missing, report.complete, report.exit_code()) == (0, not code, code)
                assert report.exit_code(strict=True) == strict


async def test_a_bucket_in_three_layouts_is_complete_and_each_message_counts_once(
    server: NatsServer, tmp_path: Path
) -> None:
    """Keys, then 4 bundles, then 8, whose names have as many digits, then 16: each has copies of all messages."""
    root, numbers = tmp_path / "archive", (0, 4, 8, 16)
    await publish(server.url, [(f"orders.{number % 40}", b"", None) for number in range(400)])
    for number in numbers:
        sections = {"block": {"bundles": number, "interval": "1d"}, "source": {"consumer": f"archive{number}"}}
        settings = config(server.url, root, key="{subject[1]}", **sections)
        await capture_all(settings)
    report = await verify(settings, deep=True)
    assert (report.complete, report.exit_code()) == (True, 0)
    assert (report.stored, report.missing, report.count(Kind.READ_TWICE)) == (400, 0, 0)
    assert report.count(Kind.DUPLICATES) == 3 * 400
    counts = {number: report.layouts[f"in {number} bundles" if number else "under keys"] for number in numbers}
    assert len(report.layouts) == len(numbers)
    assert sum(counts.values()) == len(objects(root)) == report.objects
    (line,) = (line for line in report.as_text().splitlines() if line.startswith("layouts: "))
    assert line.startswith(f"layouts: {counts[0]} objects under keys, ")
    assert f"{counts[16]} objects in 16 bundles" in line
    assert json.loads(report.as_json())["layouts"]["in 16 bundles"] == counts[16]
    name = next(name for name in objects(root) if len(name.bundle) == 1)
    moved = root / name.path.replace(f"bundle={name.bundle}", f"bundle={bundle_text(3, 16)}")
    moved.parent.mkdir(parents=True, exist_ok=True)
    (root / name.path).rename(moved)
    (damaged,) = (await verify(settings)).paths(Kind.DAMAGED)
    assert damaged.reason.startswith("its footer says bundles '")


# ------------------------------------------------------------------ filters that change


async def filtered(url: str, *subjects: str) -> None:
    async with connection(url) as client:
        settings = (await client.jetstream().consumer_info(STREAM, CONSUMER)).config
        settings.filter_subject, settings.filter_subjects = None, list(subjects)
        await client.jetstream().add_consumer(STREAM, settings)


async def test_what_earlier_filters_selected_is_missing_when_its_objects_are_gone(
    nats_server: Start, tmp_path: Path
) -> None:
    root, sections = tmp_path / "a", {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(200, "a"), **sections) as (server, settings):
        await filtered(server.url, "orders.b")
        await publish(server.url, orders(200, "b"))
        await capture_all(settings)
        report = await verify(settings, deep=True)
        assert report.complete, report.as_text()
        assert report.exit_code(strict=True) == 0
        gone = remove(root, *(name for name in objects(root) if name.key == "a"))
        assert gone == set(range(1, 201))
        report = await verify(settings, deep=True)
        assert (holes(report), report.exit_code()) == (gone, 1)
        assert report.as_text().startswith("NOT complete: 200 messages in 1 hole")
        assert report.filters == ("1 to 200: orders.a", "201 to 400: orders.b, or skipped", "from 401: orders.b")
        after, repair = await verify_and_repair(settings, content=True)
        assert (repair.messages, after.complete, after.exit_code(strict=True)) == (200, True, 0)
    assert {row["key"] for row in rows(root) if row[layout.SEQ] <= 200} == {"a"}


async def test_messages_that_a_change_of_filters_may_have_skipped_fail_a_strict_proof(
    nats_server: Start, tmp_path: Path
) -> None:
    both = ["orders.a", "orders.b"]
    sections = {"source": {"filter_subjects": both}}
    async with captured(nats_server, tmp_path / "a", orders(10, "ab"), **sections) as (server, settings):
        for subjects in (both[:1], both):
            await filtered(server.url, *subjects)
            await publish(server.url, orders(10, "ab"))
            await capture_all(settings)
        report = await verify(settings)
        (loss,) = losses_of(report)
        assert (report.missing, loss.kind, spans(loss.ranges)) == (0, Kind.FILTERS, ((20, 20),))
        assert "filters: near a change of filters: 1 message may have been skipped\n" in report.as_text()
        assert report.as_text().startswith("NOT proven: 25 messages up to sequence 30 (")
        assert (report.complete, report.exit_code(), report.exit_code(strict=True)) == (False, 0, 1)
        after, repair = await verify_and_repair(settings)
        assert (repair.messages, after.complete, after.exit_code(strict=True)) == (1, True, 0)


async def test_a_consumer_that_was_created_again_owes_what_both_selected(nats_server: Start, tmp_path: Path) -> None:
    root, sections = tmp_path / "a", {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(40, "abc"), **sections) as (server, settings):
        async with connection(server.url) as client:
            await client.jetstream().delete_consumer(STREAM, CONSUMER)
        source = settings.source.model_copy(update={"filter_subjects": ("orders.b",)})
        settings = settings.model_copy(update={"source": source})
        await capture_all(settings)
        assert (await verify(settings)).exit_code(strict=True) == 0
        gone = remove(root, *objects(root))
        evidence = await prove(settings)
    assert len(gone) == 27
    # the watermark starts over, and its position has not got to the last message yet
    missing = set(evidence.missing.within(1, 40).tolist())
    assert (missing, evidence.report.ack_floor) == (gone - {40}, 38)


async def test_without_a_watermark_earlier_filters_are_said_to_be_unknown(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    sections: dict[str, Any] = {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(20, "a"), **sections) as (_, settings):
        (root / watermark.path(STREAM, CONSUMER)).unlink()
        report = await verify(settings)
    (loss,) = losses_of(report)
    assert (loss.kind, spans(loss.ranges)) == (Kind.UNKNOWN_FILTERS, ((1, 20),))
    assert report.as_text().startswith("complete, but the consumer's earlier filters are unknown: every one of 20")
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)
