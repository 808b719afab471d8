"""What `verify` says of a server that has lost messages, and of one whose messages are gone for a good reason."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture import side_tasks
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config
from jetcapture_py.jetstream import pulls, source
from jetcapture_py.rewriting.erase import erase
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.verify.findings import LOSSES, Finding, Kind, Report
from jetcapture_py.verify.proof import verify
from tests.support.losses import HISTORIES, INJURIES, Subject, api, plain, remove_inside, remove_last, wipe
from tests.support.nats_server import NatsServer
from tests.support.proofs import losses_of, spans, unchecked
from tests.support.publishing import Publisher
from tests.support.restores import main as restore
from tests.support.rewinds import rewound
from tests.support.running import Message, capture_all, config, connection, objects, publish, rows, until

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
    """Create, fill and capture these streams."""
    async with connection(server.url) as client:
        for each in subjects:
            await each.create(client)
            if each.config.get("retention") in ("workqueue", "interest"):
                consumer = {"name": "archive", "durable_name": "archive", "ack_policy": "explicit"}
                body = {"stream_name": each.name, "config": consumer, "action": "create"}
                await api(client, f"CONSUMER.CREATE.{each.name}.archive", body)
            await each.publish(client)
            each.published = await each.held() if "retention" not in each.config else {}
    await asyncio.gather(*(each.capture() for each in subjects))


async def one(start: Start, directory: Path) -> tuple[NatsServer, Subject]:
    """A server with one stream, which is captured."""
    server = start()
    subject = plain(1, server, directory)
    await captured(server, [subject])
    return server, subject


async def rewind(subject: Subject) -> int:
    """Kill the server, and take the newest messages from it; the stream's last sequence then."""
    await asyncio.to_thread(subject.server.kill)
    remove_last(subject, random.Random(1))
    await asyncio.to_thread(subject.server.start)
    return (await stream_info(subject))["state"]["last_seq"]


# ------------------------------------------------------------------ injuries


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_an_injured_server_lost_is_named(nats_server: Start, tmp_path: Path, seed: int) -> None:
    """Compared with what the server delivers afterwards: each archived message is unchanged, or in one finding."""

    chance, server = random.Random(seed), nats_server()
    subjects = [plain(number, server, tmp_path) for number in range(TOGETHER)]
    await captured(server, subjects)
    injuries = [INJURIES[number % len(INJURIES)] for number in range(TOGETHER)]

    def injure() -> None:
        for each, injury in zip(subjects, injuries, strict=True):
            injury(each, chance)

    killed = await restart(server, chance, injure)
    async with connection(server.url) as client:
        for each, injury in zip(subjects, injuries, strict=True):
            if injury is wipe and chance.random() < 0.5:
                await each.create(client)
                await each.publish(client, 20, mark=b"b")
    counts: Counter[str] = Counter()
    for each, injury in zip(subjects, injuries, strict=True):
        report = await verify(each.settings, content=True)
        kind = await judged(each, report, injury)
        counts[f"{injury.__name__} {'kill' if killed else 'stop'}: {kind}"] += 1
    print(dict(sorted(counts.items())))


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
    last = await rewind(subject)
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


async def test_a_fork_whose_messages_are_stored_in_different_formats_is_no_differing_content(
    nats_server: Start, tmp_path: Path
) -> None:
    server, subject = await one(nats_server, tmp_path)
    last = await rewind(subject)
    async with connection(server.url) as client:
        await subject.publish(client, 401 - last, mark=b"new")
    block = subject.settings.block.model_copy(update={"format": "ndjson"})
    await capture_all(subject.settings.model_copy(update={"block": block}))
    report = await verify(subject.settings, content=True)
    assert named(report, Kind.FORK) == set(range(last + 1, 401))
    assert {each.kind for each in losses_of(report)} == {Kind.FORK}
    assert any("not Parquet" in each for each in unchecked(report))


async def test_a_flipped_bit_that_the_server_does_not_notice_is_found_in_the_content(
    nats_server: Start, tmp_path: Path
) -> None:
    """Only a server that was stopped properly trusts its files."""

    server, subject = await one(nats_server, tmp_path)
    await asyncio.to_thread(server.stop)
    path = subject.blocks[0]
    data = path.read_bytes()
    place = data.index(b"a 000100 a 000100") + random.Random(7).randrange(9)
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    await asyncio.to_thread(server.start)
    assert losses_of(await verify(subject.settings)) == ()
    report = await verify(subject.settings, content=True)
    assert 101 in named(report, Kind.CONTENT, Kind.LATE_HOLE), report.as_text()
    assert report.exit_code() == 1


async def test_messages_that_the_server_reports_as_lost_are_a_late_hole_until_its_next_start(
    nats_server: Start, tmp_path: Path
) -> None:
    """Then they are removed messages: the server keeps no record of its losses."""

    server, subject = await one(nats_server, tmp_path)
    await asyncio.to_thread(server.stop)
    remove_inside(subject, random.Random(2))
    await asyncio.to_thread(server.start)
    gone = set(subject.published) - set(await subject.held())
    report = await verify(subject.settings)
    assert named(report, Kind.LATE_HOLE) == gone
    assert "the server reports them as lost" in only(report, Kind.LATE_HOLE).summary
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    report = await verify(subject.settings)
    assert named(report, Kind.REMOVED) == gone
    assert "does not record whether they were deleted or lost" in only(report, Kind.REMOVED).summary
    assert report.exit_code() == 0


# ------------------------------------------------------------------ harmless histories


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_harmless_history_raises_an_alarm(nats_server: Start, tmp_path: Path, seed: int) -> None:
    chance, server = random.Random(1000 + seed), nats_server()
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
            assert {loss.kind for loss in losses_of(report)} <= {Kind.REMOVED}, (history, changes, report.as_text())
            # a server that is killed may bring back messages that were gone before they could be captured
            holes = {seq for hole in report.ranges(Kind.HOLES) for seq in range(hole.first, hole.last + 1)}
            assert not holes or "max_msgs_per_subject" in changes, report.as_text()
            assert not holes & set(each.published), report.as_text()
            assert report.exit_code() == (1 if holes else 0), (history, changes, report.as_text())


async def test_deleted_messages_of_mirrors_and_of_what_they_mirror_raise_no_alarm(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    origin = plain(1, server, tmp_path)
    mirror = Subject(2, server, tmp_path, {"mirror": {"name": origin.name}})
    both = Subject(3, server, tmp_path, {"sources": [{"name": origin.name}], "subjects": ["S3.>"]})
    await captured(server, [origin])
    async with connection(server.url) as client:
        for each in (mirror, both):
            await each.create(client)
        for each in (mirror, both):
            while (await stream_info(each))["state"]["messages"] < 400:
                await asyncio.sleep(0.05)
        await asyncio.gather(mirror.capture(), both.capture())
        for each in (origin, mirror):
            for seq in (3, 4, 5, 400):
                await api(client, f"STREAM.MSG.DELETE.{each.name}", {"seq": seq})
        await api(client, f"STREAM.PURGE.{origin.name}", {"filter": "S1.1"})
    for each in (origin, mirror, both):
        report = await verify(each.settings, content=True)
        assert report.exit_code() == 0, report.as_text()
        assert {loss.kind for loss in losses_of(report)} <= {Kind.REMOVED}
    assert named(report) == set()


async def test_messages_that_the_filters_no_longer_select_raise_no_alarm(nats_server: Start, tmp_path: Path) -> None:
    server, subject = await one(nats_server, tmp_path)
    async with connection(server.url) as client:
        info = await api(client, f"CONSUMER.INFO.{subject.name}.archive")
        changed = {**info["config"], "filter_subject": "S1.1"}
        body = {"stream_name": subject.name, "config": changed, "action": "update"}
        await api(client, f"CONSUMER.CREATE.{subject.name}.archive.S1.1", body)
    report = await verify(subject.settings, content=True)
    assert (losses_of(report), report.compared, report.exit_code()) == ((), 400, 0)


@pytest.mark.parametrize("sections", [{}, {"decode": {"format": "json", "rows": "lines"}}], ids=["raw", "lines"])
async def test_the_content_of_unusual_messages_is_as_archived(
    nats_server: Start, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Headers that are none or repeated, subjects that are not ASCII, several rows, and the quarantine."""

    server = nats_server()
    messages: list[Message] = [("orders.a", b'{"a":1}', None), ("orders.a", b'{"a":1}\n{"a":2}', [("X", "ü")])]
    messages += [("orders.ü", b"", [("A", "1"), ("B", ""), ("A", "2")]), ("orders.b", b"\xff" * 900_000, None)]
    await publish(server.url, messages * 3)
    async with connection(server.url) as client:
        for block in (b"NATS/1.0\r\nbroken\r\n\r\n", b"NATS/1.0\r\nA:\xff\r\n\r\n", b"NATS/1.0\r\n\r\n"):
            frame = b"HPUB orders.c %d %d\r\n%s{}\r\n" % (len(block), len(block) + 2, block)
            await client._send_command(frame)
        await client.flush()
    settings = config(server.url, tmp_path / "a", **sections)
    await capture_all(settings)
    report = await verify(settings, content=True)
    assert (losses_of(report), report.compared, report.exit_code()) == ((), report.stored, 0)


async def retaining(server: NatsServer, retention: str) -> None:
    """Create the stream with this retention, and its consumer."""
    async with connection(server.url) as client:
        stream = {"name": "ORDERS", "subjects": ["orders.>"], "retention": retention}
        await api(client, "STREAM.CREATE.ORDERS", stream)
        consumer = {"name": "archive", "durable_name": "archive", "ack_policy": "explicit"}
        body = {"stream_name": "ORDERS", "config": consumer, "action": "create"}
        await api(client, "CONSUMER.CREATE.ORDERS.archive", body)


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
    ],
)
def test_content_that_was_not_compared_fails_a_strict_proof(
    nats_server: Start, tmp_path: Path, retention: str, sections: dict[str, Any], reason: str
) -> None:
    async def scenario() -> Report:
        server = nats_server()
        settings = config(server.url, tmp_path / "archive", **sections)
        await retaining(server, retention)
        await send(server, b'{"a":1}', 3)
        await capture_all(settings)
        return await verify(settings, content=True)

    report = asyncio.run(scenario())
    assert any(reason in line for line in unchecked(report)), report.as_text()
    assert [report.exit_code(strict=strict) for strict in (False, True)] == [0, 1]


def test_the_content_of_a_stream_with_retention_interest_is_not_compared(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    settings = config(server.url, tmp_path / "archive", key="")
    asyncio.run(retaining(server, "interest"))
    asyncio.run(send(server, b"new", 1))
    asyncio.run(capture_all(settings))
    asyncio.run(send(server, b"new", 1))
    report = asyncio.run(verify(settings, content=True))
    assert any("with retention interest, reading deletes messages" in line for line in unchecked(report))


def test_nothing_is_advised_that_would_destroy_messages_which_came_after_a_rewind(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
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


def test_a_lost_message_is_not_taken_for_the_erased_one_of_its_sequence(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    settings = config(server.url, root, key="")
    asyncio.run(retaining(server, "limits"))
    with rewound(server):
        asyncio.run(send(server, b"old", 5))
        asyncio.run(capture_all(settings))
        asyncio.run(erase(settings, Condition(seqs=(3, 3)), "request 4711"))
    before = {*objects(root)}
    asyncio.run(send(server, b"new", 5))
    asyncio.run(capture_all(settings))
    assert asyncio.run(verify(settings)).missing == 0
    for name in {*objects(root)} - before:
        (root / name.path).unlink()
    report = asyncio.run(verify(settings))
    assert spans(report.ranges(Kind.HOLES)) == ((3, 3),)


def test_a_stream_that_was_restored_is_not_to_be_restored_again(nats_server: Start, tmp_path: Path) -> None:
    server, root = nats_server(), tmp_path / "archive"
    asyncio.run(publish(server.url, [("orders.a", b"x", None)] * 20))
    settings = config(server.url, root, key="")
    asyncio.run(capture_all(settings))

    async def delete() -> None:
        async with connection(server.url) as client:
            await api(client, "STREAM.DELETE.ORDERS")

    asyncio.run(delete())
    assert only(asyncio.run(verify(settings)), Kind.LOST_STREAM).count == 20
    assert restore([str(root), "ORDERS", "--servers", server.url]) == 0
    report = asyncio.run(verify(settings))  # it has no consumer yet
    assert (losses_of(report), report.proven) == ((), False)


async def test_headers_that_a_server_adds_for_a_pinned_client_are_no_content(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody pins the consumer of a capture that shares it."""
    monkeypatch.setattr(side_tasks, "POLL", 600)  # nobody looks at the consumer while it is pinned
    monkeypatch.setattr(source, "FRESH_S", 600)
    monkeypatch.setattr(pulls, "TIMING", pulls.PullTiming(expires=600))  # a new pull would be refused

    async def captured_while_pinned(server: NatsServer, settings: Config) -> None:
        name, groups = settings.source.consumer, {"priority_policy": "pinned_client", "priority_groups": ["g"]}
        capture = Capture(settings)
        task = asyncio.create_task(capture.run(asyncio.Event()))
        async with connection(server.url) as client:
            await until(lambda: capture.stats.acked > 0, "what there was is stored")
            acked = capture.stats.acked
            original = (await api(client, f"CONSUMER.INFO.ORDERS.{name}"))["config"]
            update = {"stream_name": "ORDERS", "action": "update"}
            await api(client, f"CONSUMER.CREATE.ORDERS.{name}", {**update, "config": {**original, **groups}})
            await publish(server.url, [("orders.a", b"2", None), ("orders.b", b"2", [("A", "1")])] * 50)
            await until(lambda: capture.stats.acked == acked + 100, "they are stored")
            await api(client, f"CONSUMER.CREATE.ORDERS.{name}", {**update, "config": original})
        task.cancel()  # a drain would wait for the open pulls
        await asyncio.gather(task, return_exceptions=True)

    server = nats_server()
    await publish(server.url, [("orders.a", b"1", None)] * 100)
    settings = config(server.url, tmp_path / "archive", block={"max_age": "0.2s"})
    await captured_while_pinned(server, settings)
    assert sum("Nats-Pin-Id" in str(row[layout.HEADERS]) for row in rows(tmp_path / "archive")) == 100
    report = await verify(settings, content=True)
    assert (losses_of(report), report.compared, report.exit_code(strict=True)) == ((), report.stored, 0)


def test_a_rewind_that_messages_of_other_subjects_have_overtaken_is_not_only_called_damage(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    source = {"stream": "ORDERS", "consumer": "archive", "filter_subjects": ["orders.a"]}
    settings = config(server.url, tmp_path / "archive", source=source, key="")

    def publish_and_capture(*subjects: str) -> None:
        asyncio.run(publish(server.url, [(f"orders.{each}", b"x", None) for each in subjects]))
        asyncio.run(capture_all(settings))

    publish_and_capture("a", "b", "a")
    with rewound(server):
        publish_and_capture("b", "a", "b", "b")
    publish_and_capture("a", "b", "b", "a")
    report = asyncio.run(verify(settings, content=True))
    assert named(report, Kind.LATE_HOLE) == {5}
    assert only(report, Kind.LATE_HOLE).summary.endswith(
        "or it gave their sequences to messages of other subjects after a rewind"
    )


async def test_a_stream_that_grows_during_the_proof_has_no_rewind(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is listed after the server was asked, and may have later messages."""

    server, subject = await one(nats_server, tmp_path)
    from jetcapture_py.verify import proof

    scan = proof._survey

    async def late(*args: object, **options: object) -> object:
        async with connection(server.url) as client:
            await subject.publish(client, 50, mark=b"b")
        await subject.capture()
        return await scan(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "_survey", late)
    for content in (False, True):
        report = await verify(subject.settings, content=content)
        assert (losses_of(report), report.exit_code()) == ((), 0)
