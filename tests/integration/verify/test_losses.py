"""What `verify` says of a server that has lost messages, and of one whose messages are gone for a good reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.verify import proof
from jetcapture_py.verify.findings import LOSSES, Finding, Kind, Report
from jetcapture_py.verify.proof import verify
from tests.support.losses import HISTORIES, INJURIES, Subject, api, plain, remove_last, wipe
from tests.support.nats_server import NatsServer
from tests.support.proofs import losses_of, spans, unchecked
from tests.support.publishing import Publisher
from tests.support.replays import ask
from tests.support.restores import main as restore
from tests.support.rewinds import rewound
from tests.support.running import Message, capture_all, config, connection, publish, publish_and_capture, rows

Start = Callable[..., NatsServer]
TOGETHER = 10
"""Streams that share a server."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 6))]
"""Not 6: there, a flipped bit in a sequence has nats-server 2.15.1 allocate memory without end when it starts."""


def named(report: Report, *kinds: str) -> set[int]:
    """The sequences in the report's losses of these kinds."""
    wanted = [each for each in losses_of(report) if each.kind in kinds]
    found = {seq for each in wanted for first, last in spans(each.ranges) for seq in range(first, last + 1)}
    assert all(each.summary and each.action and each.range_count == len(each.ranges) for each in wanted)
    return found


def only(report: Report, kind: str) -> Finding:
    (found,) = [each for each in losses_of(report) if each.kind == kind]
    return found


async def restart(server: NatsServer, chance: random.Random, change: Callable[[], None] = lambda: None) -> bool:
    """Restart the server with a change while it is down; whether it was killed."""
    killed = chance.random() < 0.6
    await asyncio.to_thread(server.kill if killed else server.stop)
    change()
    await asyncio.to_thread(server.start)
    return killed


async def captured(server: NatsServer, subjects: Iterable[Subject]) -> None:
    async with connection(server.url) as client:
        for each in subjects:
            await each.create(client)
            if each.config.get("retention") in ("workqueue", "interest"):
                await create_consumer(client, each.name)
            await each.publish(client)
            each.published = await each.held() if "retention" not in each.config else {}
    await asyncio.gather(*(each.capture() for each in subjects))


async def one(start: Start, directory: Path) -> tuple[NatsServer, Subject]:
    server = start()
    subject = plain(1, server, directory)
    await captured(server, [subject])
    return server, subject


# ------------------------------------------------------------------ injuries


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_an_injured_server_lost_is_named(server: NatsServer, tmp_path: Path, seed: int) -> None:
    """Compared with what the server delivers afterwards: each archived message is unchanged, or in one finding."""
    chance = random.Random(seed)
    injured = [(plain(number, server, tmp_path), INJURIES[number % len(INJURIES)]) for number in range(TOGETHER)]
    await captured(server, [subject for subject, _ in injured])

    def injure() -> None:
        for subject, injury in injured:
            injury(subject, chance)

    killed = await restart(server, chance, injure)
    async with connection(server.url) as client:
        for subject, injury in injured:
            if injury is wipe and chance.random() < 0.5:
                await subject.create(client)
                await subject.publish(client, 20, mark=b"b")
    for subject, injury in injured:
        kind = await judged(subject, await verify(subject.settings, content=True), injury)
        print(f"{injury.__name__} {'kill' if killed else 'stop'}: {kind}")


async def judged(subject: Subject, report: Report, injury: object) -> str:
    """Compare the report with the stream as it is; how the injury was named."""
    kinds = {each.kind for each in losses_of(report)}
    if injury is wipe:
        assert only(report, Kind.LOST_STREAM).count == len(subject.published), report.as_text()
        return "lost_stream"
    now = await subject.held()
    gone = {seq for seq, was in subject.published.items() if now.get(seq) != was}
    failing = named(report, *LOSSES)
    removed = named(report, Kind.REMOVED)
    assert failing | removed == gone, (injury, report.as_text())
    assert not failing & removed, report.as_text()
    assert report.exit_code() == (1 if failing else 0), report.as_text()
    last = (await stream_info(subject))["state"]["last_seq"]
    beyond = {seq for seq in gone if seq > last}
    assert named(report, Kind.REWIND) == beyond
    return ", ".join(sorted(kinds)) or "unharmed"


async def stream_info(subject: Subject) -> dict[str, dict[str, int]]:
    async with connection(subject.server.url) as client:
        return await api(client, f"STREAM.INFO.{subject.name}")


async def test_a_rewind_is_named_and_later_a_fork_of_which_the_archive_has_both_messages(
    nats_server: Start, tmp_path: Path
) -> None:
    server, subject = await one(nats_server, tmp_path)
    await asyncio.to_thread(server.kill)
    remove_last(subject, random.Random(1))
    await asyncio.to_thread(server.start)
    last = (await stream_info(subject))["state"]["last_seq"]
    report = await verify(subject.settings)
    assert named(report, Kind.REWIND) == set(range(last + 1, 401))
    assert report.exit_code() == 1
    assert f"rewind: the stream ends at {last}, but the archive has " in report.as_text()
    async with connection(server.url) as client:
        await subject.publish(client, 401 - last, mark=b"new")
    await subject.capture()
    for report in (await verify(subject.settings), await verify(subject.settings, content=True)):
        assert named(report, Kind.FORK) == set(range(last + 1, 401))
        assert {each.kind for each in losses_of(report)} == {Kind.FORK}
        assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)
    # a killed server may deliver again what was acknowledged just before
    stored = {(row[layout.SEQ], row[layout.PAYLOAD][:3]) for row in rows(tmp_path / subject.name)}
    assert len(stored) == 400 + 401 - last
    assert {(400, b"a 0"), (400, b"new")} <= stored


async def test_a_flipped_bit_that_the_server_does_not_notice_is_found_in_the_content(
    nats_server: Start, tmp_path: Path
) -> None:
    """Only a server that was stopped properly trusts its files."""
    server, subject = await one(nats_server, tmp_path)
    await asyncio.to_thread(server.stop)
    path = subject.blocks[0]
    data = bytearray(path.read_bytes())
    data[data.index(b"a 000100 a 000100") + random.Random(7).randrange(9)] ^= 1
    path.write_bytes(data)
    await asyncio.to_thread(server.start)
    assert losses_of(await verify(subject.settings)) == ()
    report = await verify(subject.settings, content=True)
    assert 101 in named(report, Kind.CONTENT, Kind.LATE_HOLE), report.as_text()
    assert report.exit_code() == 1


# ------------------------------------------------------------------ harmless histories


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_harmless_history_raises_an_alarm(server: NatsServer, tmp_path: Path, seed: int) -> None:
    chance = random.Random(1000 + seed)
    chosen = [HISTORIES[(seed * TOGETHER + number) % len(HISTORIES)] for number in range(TOGETHER)]
    subjects = [
        plain(number, server, tmp_path, **{"allow_direct": True, **changes})
        for number, (_, changes) in enumerate(chosen)
    ]
    await captured(server, subjects)
    async with connection(server.url) as client:
        for each, (history, _) in zip(subjects, chosen, strict=True):
            await history(each, client, chance)
    await restart(server, chance)
    async with connection(server.url) as client:
        for each in subjects:
            await each.publish(client, chance.randrange(20), mark=b"c")
    await asyncio.gather(*(each.capture() for each in subjects))
    for each, (history, changes) in zip(subjects, chosen, strict=True):
        for content in (False, True):
            report = await verify(each.settings, content=content)
            about = (history, changes, report.as_text())
            assert {loss.kind for loss in losses_of(report)} <= {Kind.REMOVED}, about
            # a server that is killed may bring back messages that were gone before they could be captured
            holes = {seq for hole in report.ranges(Kind.HOLES) for seq in range(hole.first, hole.last + 1)}
            assert not holes or "max_msgs_per_subject" in changes, about
            assert not holes & set(each.published), about
            assert report.exit_code() == (1 if holes else 0), about


@pytest.mark.parametrize("decode", [{"format": "raw"}, {"format": "json", "rows": "lines"}], ids=["raw", "lines"])
async def test_the_content_of_unusual_messages_is_as_archived(
    server: NatsServer, tmp_path: Path, decode: dict[str, Any]
) -> None:
    """Headers that are none or repeated, subjects that are not ASCII, several rows, and the quarantine."""
    messages: list[Message] = [("orders.a", b'{"a":1}', None), ("orders.a", b'{"a":1}\n{"a":2}', [("X", "ü")])]
    messages += [("orders.ü", b"", [("A", "1"), ("B", ""), ("A", "2")]), ("orders.b", b"\xff" * 900_000, None)]
    await publish(server.url, messages * 3)
    async with connection(server.url) as client:
        for block in (b"NATS/1.0\r\nbroken\r\n\r\n", b"NATS/1.0\r\nA:\xff\r\n\r\n", b"NATS/1.0\r\n\r\n"):
            frame = b"HPUB orders.c %d %d\r\n%s{}\r\n" % (len(block), len(block) + 2, block)
            await client._send_command(frame)
        await client.flush()
    settings = config(server.url, tmp_path / "a", decode=decode)
    await capture_all(settings)
    report = await verify(settings, content=True)
    assert (losses_of(report), report.compared, report.exit_code()) == ((), report.stored, 0)


async def retaining(server: NatsServer, retention: str) -> None:
    async with connection(server.url) as client:
        stream = {"name": "ORDERS", "subjects": ["orders.>"], "retention": retention}
        await api(client, "STREAM.CREATE.ORDERS", stream)
        await create_consumer(client, "ORDERS")


async def create_consumer(client: Any, stream: str) -> None:
    consumer = {"name": "archive", "durable_name": "archive", "ack_policy": "explicit"}
    body = {"stream_name": stream, "config": consumer, "action": "create"}
    await api(client, f"CONSUMER.CREATE.{stream}.archive", body)


async def send(server: NatsServer, payload: bytes, count: int) -> None:
    async with connection(server.url) as client, Publisher(client) as publisher:
        for _ in range(count):
            await publisher.publish("orders.a", payload)
        await publisher.flush()


@pytest.mark.parametrize(
    ("retention", "sections", "reason"),
    [
        (
            "limits",
            {"block": {"format": "ndjson"}, "decode": {"format": "json"}},
            "not Parquet, removed, or unreadable",
        ),
        ("limits", {"decode": {"format": "json", "keep_payload": False}}, "the payloads of 3 messages"),
        ("workqueue", {}, "the content of any message"),
        ("interest", {}, "with retention interest, reading deletes messages"),
    ],
)
def test_content_that_was_not_compared_fails_a_strict_proof(
    server: NatsServer, tmp_path: Path, retention: str, sections: dict[str, Any], reason: str
) -> None:
    settings = config(server.url, tmp_path / "archive", **sections)
    asyncio.run(retaining(server, retention))
    asyncio.run(send(server, b'{"a":1}', 3))
    asyncio.run(capture_all(settings))
    if retention == "interest":
        asyncio.run(send(server, b'{"a":1}', 1))
    report = asyncio.run(verify(settings, content=True))
    assert any(reason in line for line in unchecked(report)), report.as_text()
    assert [report.exit_code(strict=strict) for strict in (False, True)] == [0, 1]


def test_nothing_is_advised_that_would_destroy_messages_which_came_after_a_rewind(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = config(server.url, tmp_path / "archive", key="")
    asyncio.run(retaining(server, "limits"))
    with rewound(server):
        asyncio.run(send(server, b"old", 5))
        asyncio.run(capture_all(settings))
    asyncio.run(send(server, b"new", 5))
    (other,) = asyncio.run(verify(settings, content=True)).of(Kind.CONTENT)
    assert [(part.first, part.last) for part in other.ranges] == [(1, 5)]
    assert "restore" not in other.action
    assert "source.start_sequence: 1" in other.action
    asyncio.run(capture_all(settings))
    assert {finding.kind for finding in losses_of(asyncio.run(verify(settings, content=True)))} == {Kind.FORK}


def test_a_stream_that_was_restored_is_not_to_be_restored_again(server: NatsServer, archive: Path) -> None:
    settings = publish_and_capture(server.url, archive, [("orders.a", b"x", None)] * 20, key="")
    ask(server.url, "STREAM.DELETE.ORDERS")
    assert only(asyncio.run(verify(settings)), Kind.LOST_STREAM).count == 20
    assert restore([str(archive), "ORDERS", "--servers", server.url]) == 0
    report = asyncio.run(verify(settings))  # it has no consumer yet
    assert (losses_of(report), report.proven) == ((), False)


async def test_a_stream_that_grows_during_the_proof_has_no_rewind(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is listed after the server was asked, and may have later messages."""
    server, subject = await one(nats_server, tmp_path)
    scan = proof._survey

    async def late(*args: Any, **options: Any) -> object:
        async with connection(server.url) as client:
            await subject.publish(client, 50, mark=b"b")
        await subject.capture()
        return await scan(*args, **options)

    monkeypatch.setattr(proof, "_survey", late)
    for content in (False, True):
        report = await verify(subject.settings, content=content)
        assert (losses_of(report), report.exit_code()) == ((), 0)
