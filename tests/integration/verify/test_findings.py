"""What a proof finds beside holes: copies that are read twice, a watermark that cannot be true, unsigned objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout, watermark
from jetcapture_py.store import LocalStore
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import verify
from jetcapture_py.verify.repair import verify_and_repair
from tests.integration.verify.test_proof import KEYED, captured, each_layout, orders  # noqa: F401 - a fixture
from tests.support.archives import by_place, copy_to, merge, strip
from tests.support.nats_server import NatsServer
from tests.support.proofs import watermark_problems
from tests.support.running import (
    CONSUMER,
    STREAM,
    capture_all,
    config,
    connection,
    consumer,
    objects,
    publish,
    running,
    until,
)

Start = Callable[..., NatsServer]


def lines(report: Report, beginning: str) -> list[str]:
    return [line for line in report.as_text().splitlines() if line.startswith(beginning)]


# ------------------------------------------------------------------ copies in different groups


async def test_copies_under_another_key_are_named_and_fail(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(300)) as (_, settings):
        name = objects(root)[1]
        other = copy_to(root, name, key="elsewhere")
        report = await verify(settings)
    assert (report.complete, report.missing) == (True, 0)
    assert (report.count(Kind.READ_TWICE), report.count(Kind.DUPLICATES)) == (name.rows, name.rows)
    assert (report.exit_code(), report.exit_code(strict=True)) == (1, 1)
    assert [each.first for each in report.ranges(Kind.READ_TWICE)] == pq.ParquetFile(root / name.path).read(
        [layout.SEQ]
    )[0].to_pylist()
    assert {each.paths for each in report.ranges(Kind.READ_TWICE)} == {tuple(sorted((name.path, other.path)))}
    assert report.as_text().startswith(f"complete, but {name.rows} messages are read twice: every one of 300 ")
    assert len(lines(report, "read twice: ")) == 1
    assert len(lines(report, '  read_archive(dedupe="full") reads them once')) == 1
    (finding,) = report.of(Kind.READ_TWICE)
    time = finding.ranges[0].first_time
    assert time is not None
    seq, text = finding.ranges[0].first, time.isoformat().replace("+00:00", "Z")
    listed = json.loads(report.as_json())["findings"][0]
    assert (listed["kind"], listed["severity"], listed["count"]) == ("read_twice", "failure", name.rows)
    assert listed["ranges"][0] == {
        "first": seq,
        "last": seq,
        "messages": 1,
        "first_time": text,
        "last_time": text,
        "paths": sorted((name.path, other.path)),
    }


@pytest.mark.usefixtures("each_layout")
async def test_copies_in_one_key_and_bucket_are_not_read_twice(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(900)) as (_, settings):
        for names in by_place(objects(root)):
            merge(root, names, keep=True)
        report = await verify(settings)
    assert (report.count(Kind.DUPLICATES), report.count(Kind.READ_TWICE), report.exit_code()) == (900, 0, 0)


async def test_a_message_in_archive_and_quarantine_counts_as_archived(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(300)) as (_, settings):
        name = objects(root)[0]
        copy_to(root, name, key=None, quarantine=True)
        report = await verify(settings)
        assert (report.count(Kind.READ_TWICE), report.count(Kind.QUARANTINE), report.exit_code(strict=True)) == (
            0,
            name.rows,
            0,
        )
        assert lines(report, f"quarantine: {name.rows} messages are also in the archive")
        assert (report.quarantined, report.count(Kind.DUPLICATES)) == (0, 0)
        copy_to(root, name, key=None, quarantine=True, bucket=name.bucket + 900)
        report = await verify(settings)
        assert (report.count(Kind.READ_TWICE), report.exit_code()) == (name.rows, 1)
        assert report.quarantined == 0


async def test_messages_of_an_earlier_life_with_the_same_sequences_are_no_copies(
    nats_server: Start, tmp_path: Path
) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(300, "a")) as (server, settings):
        async with connection(server.url) as client:
            await client.jetstream().delete_stream(STREAM)
        await publish(server.url, orders(300, "b"))
        await capture_all(settings)
        assert (await verify(settings)).count(Kind.READ_TWICE) == 0
        (root / watermark.path(STREAM, CONSUMER)).unlink()
        server.kill()
        report = await verify(settings)  # and now nothing tells the lives apart but the timestamps
    assert (report.count(Kind.DUPLICATES), report.count(Kind.READ_TWICE)) == (300, 0)


# ------------------------------------------------------------------ the watermark


@contextlib.asynccontextmanager
async def with_pending(
    nats_server: Start, root: Path, **sections: Any
) -> AsyncIterator[tuple[Any, LocalStore, watermark.ConsumerWatermark]]:
    """A capture of 300 messages, of which 100 more are delivered and not stored; the watermark before them."""
    async with captured(nats_server, root, orders(300, "a"), **sections) as (server, settings):
        store = LocalStore(str(root))
        data = store.read_note(watermark.path(STREAM, CONSUMER))
        assert data is not None
        async with running(config(server.url, root, key="", **sections)):
            await publish(server.url, orders(100))

            async def delivered() -> bool:
                return bool((await consumer(server.url)).num_ack_pending == 100)

            await until(delivered, "they are delivered")
            yield settings, store, watermark.ConsumerWatermark.decode(data, STREAM, "")


async def test_a_watermark_that_promises_too_much_fails(nats_server: Start, tmp_path: Path) -> None:
    async with with_pending(nats_server, tmp_path / "a") as (settings, store, original):
        report = await verify(settings)
        assert (report.ack_floor, report.stored, report.exit_code(strict=True)) == (300, 300, 0)
        for seq, problem in (
            (340, "40 messages after the ack floor 300 are not stored"),
            (10_000, "the stream ends at 400"),
        ):
            store.write_note(watermark.path(STREAM, CONSUMER), replace(original, seq=seq).encode())
            report = await verify(settings)
            assert problem in watermark_problems(report)
            assert (report.missing, report.complete) == (0, False)
        store.write_note(watermark.path(STREAM, CONSUMER), b"{half")
        report = await verify(settings)
        assert report.watermark is None
        assert "damaged" in watermark_problems(report)
        assert (report.complete, report.exit_code(), report.exit_code(strict=True)) == (True, 0, 1)


async def test_a_watermarks_time_in_the_future_fails(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(300, "a")) as (_, settings):
        store = LocalStore(str(tmp_path / "a"))
        data = store.read_note(watermark.path(STREAM, CONSUMER))
        assert data is not None
        for time in (datetime(2100, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
            wrong = replace(watermark.ConsumerWatermark.decode(data, STREAM, ""), time=time)
            store.write_note(watermark.path(STREAM, CONSUMER), wrong.encode())
            report = await verify(settings)
            (line,) = lines(report, "watermark: ")
            assert time.isoformat().replace("+00:00", "Z") in line
            assert "in the future" in line
            assert (report.missing, report.complete, report.exit_code()) == (0, False, 1)


async def test_a_watermarks_time_that_pending_messages_belie_fails(nats_server: Start, tmp_path: Path) -> None:
    async with with_pending(nats_server, tmp_path / "a") as (settings, store, found):
        report = await verify(settings)
        assert (report.complete, report.exit_code(strict=True)) == (True, 0)
        for time in (datetime.now(UTC), datetime.now(UTC) + timedelta(days=300)):
            store.write_note(watermark.path(STREAM, CONSUMER), replace(found, time=time).encode())
            report = await verify(settings)
            line = watermark_problems(report)
            assert "but 100 earlier messages of the stream are not stored, starting with 301" in line
            assert ("in the future" in line) == (time > datetime.now(UTC) + timedelta(minutes=1))
            assert (report.complete, report.missing, report.exit_code()) == (False, 0, 1)


async def test_a_watermark_with_a_time_between_messages_is_right(nats_server: Start, tmp_path: Path) -> None:
    async with with_pending(nats_server, tmp_path / "a") as (settings, store, found):
        async with connection(settings.nats.servers[0]) as client:
            first = await client.jetstream().get_msg(STREAM, 301)
        assert first.time is not None
        for micros, promised in ((-1, 0), (0, 1)):
            time = first.time.replace(microsecond=first.time.microsecond) + timedelta(microseconds=micros)
            store.write_note(watermark.path(STREAM, CONSUMER), replace(found, time=time).encode())
            report = await verify(settings)
            assert report.exit_code(strict=True) == promised


async def test_a_watermark_of_another_stream_fails(nats_server: Start, tmp_path: Path) -> None:
    async with captured(nats_server, tmp_path / "a", orders(30, "a")) as (_, settings):
        store = LocalStore(str(tmp_path / "a"))
        data = store.read_note(watermark.path(STREAM, CONSUMER))
        assert data is not None
        other = replace(watermark.ConsumerWatermark.decode(data, STREAM, ""), stream="PAYMENTS")
        store.write_note(watermark.path(STREAM, CONSUMER), other.encode())
        report = await verify(settings)
    assert lines(report, "watermark: ") == [
        f"watermark: {watermark.path(STREAM, CONSUMER)} belongs to stream PAYMENTS, not {STREAM}"
    ]
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)


# ------------------------------------------------------------------ objects that others wrote


async def test_an_object_that_another_program_wrote_again_is_named_and_stored_again_by_a_repair(
    nats_server: Start, tmp_path: Path
) -> None:
    root = tmp_path / "a"
    async with captured(nats_server, root, orders(300)) as (_, settings):
        name = objects(root)[2]
        strip(root / name.path)
        for deep in (False, True):
            report = await verify(settings, deep=deep)
            (file,) = report.paths(Kind.DAMAGED)
            assert (report.complete, report.exit_code(), file.path) == (False, 1, name.path)
            assert file.reason.endswith("it has changed, or jetcapture did not write it")
        after, _ = await verify_and_repair(settings)
        assert after.complete
