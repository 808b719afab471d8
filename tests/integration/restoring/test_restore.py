"""A stream comes back from its archive on another server: for every sequence, the two servers give the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.config.units import format_time
from jetcapture_py.restoring import plan
from jetcapture_py.restoring.checks import RestoreSurvey
from jetcapture_py.restoring.command import PreparedRestore, prepare, restore
from jetcapture_py.restoring.request import RestoreRequest
from tests.support.archives import encoded, merge, put
from tests.support.nats_server import NatsServer
from tests.support.restores import (
    api,
    capture,
    compact_all,
    compare,
    fill,
    main,
    next_sequence,
    opened,
    request,
    state_of,
)
from tests.support.running import CONSUMER, STREAM, capture_all, config, objects, publish_and_capture

COUNT = 10_000
Start = Callable[..., NatsServer]


class Origin(NamedTuple):
    """A server with the stream, and the stream's archive."""

    url: str
    root: Path

    def wanted(self, **changes: Any) -> RestoreRequest:
        return request(self.root, **changes)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """Captured by two replicas that are killed, and compacted."""
    directory = tmp_path_factory.mktemp("origin")
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(directory / "nats"))
        asyncio.run(fill(server.url, COUNT))
        capture(server.url, directory / "replicas", directory / "archive", kills=2)
        assert {name.quarantine for name in objects(directory / "archive")} == {False, True}
        compact_all(directory / "archive", directory)
        yield Origin(server.url, directory / "archive")


@pytest.fixture(autouse=True)
def many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of ranges are where mistakes would be."""
    monkeypatch.setattr(plan, "PART_BYTES", 200_000)
    monkeypatch.setattr(plan, "LARGEST_PART_BYTES", 200_000)


def done(prepared: PreparedRestore, url: str) -> RestoreSurvey:
    """Restore into another server, which keeps every message; what was restored."""
    assert restore(prepared, NatsConfig(servers=(url,))) == prepared.survey.messages
    return prepared.survey


def test_every_answer_of_the_restored_stream_is_that_of_the_original(nats_server: Start, origin: Origin) -> None:
    other = nats_server()
    prepared = prepare(origin.wanted())
    assert len(prepared.plan.parts) > 5
    assert prepared.survey.quarantined > 100
    assert prepared.drops == ()
    found = done(prepared, other.url)
    state = asyncio.run(state_of(origin.url, STREAM))
    assert state["num_deleted"] > 200
    assert asyncio.run(state_of(other.url, STREAM)) == state
    assert asyncio.run(_config(other.url, STREAM)) == asyncio.run(_config(origin.url, STREAM))
    assert found.messages == state["messages"]
    assert asyncio.run(compare(origin.url, other.url, STREAM)) == state["last_seq"] + 1 - state["first_seq"]
    assert asyncio.run(next_sequence(other.url, STREAM, "orders.next")) == state["last_seq"] + 1


async def _config(url: str, stream: str) -> Any:
    async with opened(url) as client:
        return (await api(client, f"STREAM.INFO.{stream}"))["config"]


def test_a_stream_comes_back_up_to_a_sequence_and_from_one(nats_server: Start, origin: Origin) -> None:
    other, first, last = nats_server(), COUNT // 3, 2 * COUNT // 3
    found = done(prepare(origin.wanted(first=first, last=last)), other.url)
    assert first <= found.first < found.last <= last
    asyncio.run(compare(origin.url, other.url, STREAM, first=found.first, last=found.last))
    state = asyncio.run(state_of(other.url, STREAM))
    assert (state["first_seq"], state["last_seq"], state["messages"]) == (found.first, found.last, found.messages)
    assert asyncio.run(next_sequence(other.url, STREAM, "orders.next")) == found.last + 1


def test_a_stream_comes_back_as_it_was_at_a_time(nats_server: Start, origin: Origin) -> None:
    other = nats_server()

    async def nanoseconds(seq: int) -> tuple[int, int]:
        """The first message from this sequence on, and its timestamp."""
        async with opened(origin.url) as client:
            found = await api(client, f"STREAM.MSG.GET.{STREAM}", {"seq": seq, "next_by_subj": ">"})
        text = found["message"]["time"]
        whole, _, digits = text.removesuffix("Z").partition(".")
        seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
        return found["message"]["seq"], seconds * 10**9 + int(digits.ljust(9, "0"))

    seq, until = asyncio.run(nanoseconds(COUNT // 2))
    found = done(prepare(origin.wanted(until=until)), other.url)
    assert found.last == seq
    asyncio.run(compare(origin.url, other.url, STREAM, last=seq))
    assert prepare(origin.wanted(until=until - 1)).survey.last < seq


def test_a_stream_comes_back_under_another_name_and_prefix_beside_the_original(
    nats_server: Start, origin: Origin
) -> None:
    wanted = origin.wanted(target="COPY", prefix="copy.", consumers=[("reader", COUNT // 2)])
    done(prepare(wanted), origin.url)
    try:
        asyncio.run(compare(origin.url, origin.url, "COPY", subject=lambda subject: f"copy.{subject}"))

        async def consumer() -> dict[str, Any]:
            async with opened(origin.url) as client:
                return dict(await api(client, "CONSUMER.INFO.COPY.reader"))

        info = asyncio.run(consumer())
        state = asyncio.run(state_of(origin.url, "COPY"))
        assert info["ack_floor"]["stream_seq"] == COUNT // 2
        assert 0 < info["num_pending"] < state["messages"]
    finally:
        asyncio.run(_delete(origin.url, "COPY"))


async def _delete(url: str, stream: str) -> None:
    async with opened(url) as client:
        await api(client, f"STREAM.DELETE.{stream}")


def test_an_archive_of_bundles_comes_back(nats_server: Start, tmp_path: Path) -> None:
    one, other = nats_server(), nats_server()
    asyncio.run(fill(one.url, 3000))
    bundled = config(one.url, tmp_path / "a", key="{subject}", block={"bundles": 4})
    asyncio.run(capture_all(bundled))
    found = done(prepare(Origin(one.url, tmp_path / "a").wanted()), other.url)
    assert len(list(tmp_path.glob("a/*/bundle=*"))) == 4
    assert asyncio.run(state_of(other.url, STREAM)) == asyncio.run(state_of(one.url, STREAM))
    assert asyncio.run(compare(one.url, other.url, STREAM)) == found.last + 1 - found.first


def test_a_stream_that_was_restored_and_captured_again_comes_back_as_a_whole(
    nats_server: Start, tmp_path: Path
) -> None:
    one, two, three = nats_server(), nats_server(), nats_server()
    publish_and_capture(one.url, tmp_path / "a", [("orders.one", b"%d" % number, None) for number in range(5)])
    wanted = Origin(one.url, tmp_path / "a").wanted
    done(prepare(wanted(consumers=[(CONSUMER, 5)])), two.url)
    assert [asyncio.run(next_sequence(two.url, STREAM, "orders.two")) for _ in range(3)] == [6, 7, 8]
    asyncio.run(capture_all(config(two.url, tmp_path / "a")))
    assert {(name.first_seq, name.last_seq) for name in objects(tmp_path / "a")} == {(1, 5), (6, 8)}
    prepared = prepare(wanted())
    assert not prepared.survey.absent
    done(prepared, three.url)
    assert asyncio.run(state_of(three.url, STREAM)) == asyncio.run(state_of(two.url, STREAM))
    assert asyncio.run(compare(two.url, three.url, STREAM)) == 8


def test_a_stream_that_was_created_again_at_its_next_sequence_comes_back_as_a_whole(
    nats_server: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = nats_server(), nats_server()
    publish_and_capture(one.url, tmp_path / "a", [("orders.one", b"%d" % number, None) for number in range(5)])
    before = asyncio.run(_config(one.url, STREAM))
    asyncio.run(_delete(one.url, STREAM))
    asyncio.run(_create(one.url, {**before, "first_seq": 6}))
    assert [asyncio.run(next_sequence(one.url, STREAM, "orders.two")) for _ in range(3)] == [6, 7, 8]
    asyncio.run(capture_all(config(one.url, tmp_path / "a")))
    archive = f"file://{tmp_path / 'a'}"
    capfd.readouterr()
    assert main([archive, STREAM, "--dry-run"]) == 0
    assert "8 messages, sequences 1 to 8, " in capfd.readouterr().out
    assert main([archive, STREAM, "--servers", two.url]) == 0
    assert asyncio.run(compare(one.url, two.url, STREAM, first=6)) == 3
    assert asyncio.run(state_of(two.url, STREAM))["messages"] == 8
    assert (
        main([archive, STREAM, "--servers", two.url, "--as", "LATE", "--subject-prefix", "p", "--from-seq", "6"]) == 0
    )
    assert asyncio.run(_config(two.url, "LATE"))["first_seq"] == 6


def test_messages_older_than_their_stream_come_back_from_merged_objects(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a mirror, or of a stream that was restored into an archive of its own."""
    bucket = 1_700_000_100
    begun = [format_time(datetime.fromtimestamp(bucket + after, UTC)) for after in (300, 600, 800)]
    blocks = [
        encoded([(seq, (bucket + after) * 1_000_000 + seq) for seq in range(first, last + 1)], created=created)
        for created, first, last, after in zip(begun, (1, 101, 1), (100, 150, 10), (0, 660, 810), strict=True)
    ]
    stream = tmp_path / "stream.yaml"
    stream.write_text(json.dumps({"stream": {"name": STREAM, "subjects": ["orders.>"]}}))
    whole = "150 messages, sequences 1 to 150, "
    for count, chosen, found in (
        (2, [], whole),
        (3, ["--created", begun[1]], whole),
        (3, [], "10 messages, sequences 1 to 10, "),
    ):
        root = tmp_path / str(count)
        for block in blocks[:count]:
            put(root, block)
        merge(root, [block.name for block in blocks[:count]])
        assert main([f"file://{root}", STREAM, "--stream-config", str(stream), "--dry-run", *chosen]) == 0
        assert f"\n{found}" in capfd.readouterr().out


async def _create(url: str, config: dict[str, Any]) -> None:
    async with opened(url) as client:
        await api(client, f"STREAM.CREATE.{config['name']}", config)


def test_the_command_restores_an_archive_with_holes_only_where_that_is_allowed(
    nats_server: Start, origin: Origin, capfd: pytest.CaptureFixture[str]
) -> None:
    other = nats_server()
    command = [f"file://{origin.root}", STREAM, "--servers", other.url]
    assert main([*command[:2], "--dry-run"]) == 0
    output = capfd.readouterr().out.splitlines()
    assert output[0].startswith(f"stream {STREAM} as {STREAM}, from ")
    assert [line.split(", ")[1].split()[0] for line in output if " messages, " in line] == ["sequences"]
    assert [
        line.endswith("; the stream has deleted messages there") for line in output if line.startswith("missing: ")
    ] == [True]
    assert "needs --allow-holes, because sequences are missing" in output
    assert main(command) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"jetcapture: the archive of stream {STREAM} lacks ")
    assert line.endswith("restore with --allow-holes")
    assert main([*command, "--allow-holes"]) == 0
    captured = capfd.readouterr()
    assert captured.err.rstrip().endswith(f"nats stream rm {STREAM}")
    assert captured.out.startswith("restored ")
    assert main([*command, "--allow-holes"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"jetcapture: stream {STREAM} already exists: restore under another name with --as")
    assert asyncio.run(state_of(other.url, STREAM)) == asyncio.run(state_of(origin.url, STREAM))
