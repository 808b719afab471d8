"""A running capture notices that the server has lost messages of the stream, or has another stream of its name."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.capture import marks, stream_watch
from jetcapture_py.capture.pipeline import Capture
from tests.support.losses import Subject, api, plain, remove_last
from tests.support.nats_server import NatsServer
from tests.support.running import capture_all, connection, metrics, running, seqs, status_of, until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the stream often."""
    monkeypatch.setattr(marks, "MARK", 0.2)
    monkeypatch.setattr(stream_watch, "CONFIRM_EVERY", 0.05)


async def created(server: NatsServer, root: Path) -> Subject:
    subject = plain(1, server, root)
    async with connection(server.url) as client:
        await subject.create(client)
        await subject.publish(client)
    return subject


async def rewind(subject: Subject) -> int:
    """Have the server lose the stream's last messages; its last sequence then."""
    await asyncio.to_thread(subject.server.kill)
    remove_last(subject, random.Random(1))
    await asyncio.to_thread(subject.server.start)
    async with connection(subject.server.url) as client:
        return int((await api(client, f"STREAM.INFO.{subject.name}"))["state"]["last_seq"])


async def stored(state: Capture, count: int) -> None:
    def done() -> bool:
        state.archiver.seal_all("age")
        return state.stats.stored_messages >= count

    await until(done, f"{count} messages are stored")


async def test_a_rewind_is_counted_once_and_later_messages_are_stored_beside_the_lost_ones(
    server: NatsServer, tmp_path: Path, logged: Any
) -> None:
    subject = await created(server, tmp_path)
    async with running(subject.settings) as state:
        await stored(state, 400)
        await until(lambda: state.marks.stream.end == 400, "it has looked at the stream")
        last = await rewind(subject)
        await until(lambda: state.marks.stream.losses["rewind"] == 1, "the rewind is noticed")
        async with connection(subject.server.url) as client:
            await subject.publish(client, 500 - last, mark=b"new")
        await stored(state, 400 + 500 - last)
        await until(lambda: state.marks.stream.end == 500, "it has looked at the stream again")
        assert 'jetcapture_stream_losses_total{kind="rewind"} 1.0' in metrics(state)
    (found,) = logged("stream.rewound")
    assert found["level"] == "error"
    assert seqs(tmp_path / subject.name) == sorted([*range(1, 401), *range(last + 1, 501)])


async def test_a_rewind_while_no_capture_ran_is_noticed_at_the_next_start_and_by_status(
    server: NatsServer, tmp_path: Path, logged: Any
) -> None:
    subject = await created(server, tmp_path)
    assert (await capture_all(subject.settings)).marks.stream.losses.total() == 0
    last = await rewind(subject)
    (problem,) = (await status_of(subject.settings)).problems
    assert problem.startswith(f"stream: it ends at {last}, but the archive's watermark is at 400: ")
    async with running(subject.settings) as state:
        await until(lambda: state.marks.stream.losses["rewind"] == 1, "the rewind is noticed")
    assert len(logged("stream.rewound")) == 1


async def test_a_rewind_that_new_messages_have_outgrown_is_noticed(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MARK", 3600.0)
    subject = await created(server, tmp_path)
    async with running(subject.settings) as state:
        await stored(state, 400)
        last = await rewind(subject)
        async with connection(subject.server.url) as client:
            for _ in range(2):  # two batches, of which the first ends before the highest sequence seen
                await subject.publish(client, (400 - last) // 2, mark=b"b")
                before = state.stats.stored_messages
                await stored(state, before + (400 - last) // 2)
            await subject.publish(client, 200, mark=b"c")
        await stored(state, 600)
        assert state.marks.observer.overtaken is not None
        info = await state.source.consumer.stream_info()
        assert info is not None
        await state.marks.stream.watch(info)
        assert state.marks.stream.losses == {"rewind": 1}


async def test_a_stream_that_was_created_again_is_noticed_once(server: NatsServer, tmp_path: Path, logged: Any) -> None:
    subject = await created(server, tmp_path)
    await capture_all(subject.settings)
    async with connection(subject.server.url) as client:
        await api(client, f"STREAM.DELETE.{subject.name}")
        await subject.create(client)
        await subject.publish(client, 10, mark=b"b")
    with pytest.raises(Exception, match="consumer archive does not exist"):
        await status_of(subject.settings)
    for count in (1, 0):
        state = await capture_all(subject.settings)
        assert state.marks.stream.losses["recreated"] == count
    assert len(logged("stream.recreated")) == 1


async def test_purges_deletions_and_restarts_are_no_losses(server: NatsServer, tmp_path: Path) -> None:
    subject = await created(server, tmp_path)
    async with running(subject.settings) as state:
        await stored(state, 400)
        async with connection(subject.server.url) as client:
            for seq in (400, 399, 1):
                await api(client, f"STREAM.MSG.DELETE.{subject.name}", {"seq": seq})
            await api(client, f"STREAM.PURGE.{subject.name}")
        for end in (subject.server.kill, subject.server.stop):
            await asyncio.to_thread(end)
            await asyncio.to_thread(subject.server.start)
            async with connection(subject.server.url) as client:
                await subject.publish(client, 10, mark=b"b")
            await stored(state, state.stats.stored_messages + 10)
        await until(lambda: state.marks.stream.end == 420, "it has looked at the stream")
        assert state.marks.stream.losses.total() == 0
