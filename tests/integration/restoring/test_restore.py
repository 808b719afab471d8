"""A stream comes back from its archive: for every sequence, two servers give the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.config.model import NatsConfig, load_for_apply
from jetcapture_py.config.units import format_time
from jetcapture_py.manage.apply import apply
from jetcapture_py.restoring import command, plan
from jetcapture_py.restoring.checks import RestoreSurvey
from jetcapture_py.restoring.command import PreparedRestore, prepare, restore
from jetcapture_py.restoring.request import RestoreRequest
from jetcapture_py.store import LocalStore
from tests.integration.restoring.test_refusals import CREATED, error, kept
from tests.support.archives import HOUR, Archive
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.replays import ask
from tests.support.restores import capture, compact_all, compare, fill, main, next_sequence, opened, request, state_of
from tests.support.rewinds import Setting, orders, rewound
from tests.support.running import CONSUMER, STREAM, capture_all, config, objects, publish_and_capture, rows, settings

COUNT = 10_000
Start = Callable[..., NatsServer]


class Origin(NamedTuple):
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
        assert {(name.quarantine, bool(name.bundle)) for name in objects(directory / "archive")} == {
            (False, True), (True, False)
        }  # fmt: skip
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
    assert ask(other.url, f"STREAM.INFO.{STREAM}")["config"] == ask(origin.url, f"STREAM.INFO.{STREAM}")["config"]
    assert found.messages == state["messages"]
    assert asyncio.run(compare(origin.url, other.url, STREAM)) == state["last_seq"] + 1 - state["first_seq"]
    assert asyncio.run(next_sequence(other.url, STREAM, "orders.next")) == state["last_seq"] + 1


def test_a_part_of_a_stream_comes_back_as_it_was_at_a_time_under_another_name_and_prefix(origin: Origin) -> None:
    """From a sequence to a time, beside the original, with a consumer."""
    message = ask(origin.url, f"STREAM.MSG.GET.{STREAM}", {"seq": 2 * COUNT // 3, "next_by_subj": ">"})["message"]
    whole, _, digits = message["time"].removesuffix("Z").partition(".")
    until = int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 10**9 + int(digits.ljust(9, "0"))
    assert prepare(origin.wanted(until=until - 1)).survey.last < message["seq"]
    wanted = origin.wanted(first=COUNT // 3, until=until, target="COPY", prefix="copy.", consumers=[("r", COUNT // 2)])
    found = done(prepare(wanted), origin.url)
    try:
        state, info = asyncio.run(state_of(origin.url, "COPY")), ask(origin.url, "CONSUMER.INFO.COPY.r")
        assert (state["first_seq"], state["last_seq"], state["messages"]) == (found.first, found.last, found.messages)
        assert COUNT // 3 <= found.first < found.last == message["seq"]
        assert info["ack_floor"]["stream_seq"] == COUNT // 2
        assert 0 < info["num_pending"] < state["messages"]
        span = {"first": found.first, "last": found.last}
        asyncio.run(compare(origin.url, origin.url, "COPY", subject=lambda subject: f"copy.{subject}", **span))
        assert asyncio.run(next_sequence(origin.url, "COPY", "copy.orders.next")) == found.last + 1
    finally:
        ask(origin.url, "STREAM.DELETE.COPY")


def test_a_stream_that_was_restored_and_captured_again_comes_back_as_a_whole(
    nats_server: Start, tmp_path: Path
) -> None:
    one, two, three = nats_server(), nats_server(), nats_server()
    publish_and_capture(one.url, tmp_path / "a", [("orders.one", b"%d" % number, None) for number in range(5)])
    done(prepare(request(tmp_path / "a", consumers=[(CONSUMER, 5)])), two.url)
    assert [asyncio.run(next_sequence(two.url, STREAM, "orders.two")) for _ in range(3)] == [6, 7, 8]
    asyncio.run(capture_all(config(two.url, tmp_path / "a")))
    assert {(name.first_seq, name.last_seq) for name in objects(tmp_path / "a")} == {(1, 5), (6, 8)}
    prepared = prepare(request(tmp_path / "a"))
    assert not prepared.survey.absent
    done(prepared, three.url)
    assert asyncio.run(state_of(three.url, STREAM)) == asyncio.run(state_of(two.url, STREAM))
    assert asyncio.run(compare(two.url, three.url, STREAM)) == 8


def test_the_command_restores_an_archive_with_holes_only_where_that_is_allowed(
    nats_server: Start, origin: Origin, capfd: pytest.CaptureFixture[str]
) -> None:
    other = nats_server()
    command = [f"file://{origin.root}", STREAM, "--servers", other.url]
    assert main([*command[:2], "--dry-run"]) == 0
    output = capfd.readouterr().out.splitlines()
    assert output[0].startswith(f"stream {STREAM} as {STREAM}, from ")
    assert [line.split(", ")[1].split()[0] for line in output if " messages, " in line] == ["sequences"]
    (missing,) = (line for line in output if line.startswith("missing: "))
    assert missing.endswith("; the stream has deleted messages there")
    assert "needs --allow-holes, because sequences are missing" in output
    assert main(command) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"jetcapture: the archive of stream {STREAM} lacks ")
    assert line.endswith("restore with --allow-holes")
    assert main([*command, "--allow-holes"]) == 0
    captured = capfd.readouterr()
    assert captured.err.rstrip().endswith(f"nats stream rm {STREAM}")
    assert captured.out.startswith("restored ")
    assert asyncio.run(state_of(other.url, STREAM)) == asyncio.run(state_of(origin.url, STREAM))


# ------------------------------------------------------------------ what a restored stream does


def create(url: str, name: str, **settings: Any) -> None:
    assert "error" not in ask(url, f"STREAM.CREATE.{name}", {"name": name, **settings})


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
    create(one.url, "ORDERS", subjects=["orders.>", "plan.>"], allow_msg_schedules=True)
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
    create(one.url, "ORIGIN", subjects=["orders.>"])
    asyncio.run(publish(one.url, *[("orders.a", None)] * 3))
    create(one.url, "ORDERS", sources=[{"name": "ORIGIN"}])
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

    found = ask(two.url, "STREAM.INFO.ORDERS")["config"]
    found["sources"] = [{"name": "ORIGIN", "opt_start_seq": 4}]
    ask(two.url, "STREAM.UPDATE.ORDERS", found)
    asyncio.run(publish(two.url, ("orders.new", None)))
    for stream in ("ORDERS", "AGAIN"):
        asyncio.run(until_stored(two.url, stream, 4))
        assert ask(two.url, f"STREAM.MSG.GET.{stream}", {"seq": 4})["message"]["subject"] == "orders.new"


@pytest.mark.parametrize("mode", ["shared", "ordered"])
def test_the_captures_consumer_is_the_one_that_apply_would_create(
    nats_server: Start, tmp_path: Path, mode: str
) -> None:
    one, two = nats_server(), nats_server()
    source = {"filter_subjects": ["orders.a", "orders.c.*"], "max_ack_pending": 77, "mode": mode}
    create(one.url, "ORDERS", subjects=["orders.>"], deny_delete=True, deny_purge=True)
    asyncio.run(publish(one.url, ("orders.a", None), ("orders.b", None), ("orders.a", None)))
    asyncio.run(capture_all(config(one.url, tmp_path / "a", source=source)))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings(two.url, tmp_path / "a", source=source)))
    command = [str(file), "--consumer", "archive=1", "--consumer", "other=3", "--allow-holes"]
    assert main(command) == 0
    (plan,) = asyncio.run(apply(load_for_apply(file), dry_run=True))
    assert (plan.plan.kind, plan.plan.action) == ("consumer", "none")
    assert "filter_subjects" not in ask(two.url, "CONSUMER.INFO.ORDERS.other")["config"]
    asyncio.run(publish(two.url, ("orders.b", None), ("orders.a", None)))
    asyncio.run(capture_all(config(two.url, tmp_path / "b", source=source)))
    assert {(name.first_seq, name.last_seq) for name in objects(tmp_path / "b")} == {(3, 5)}
    assert main([*command, "--as", "COPY", "--subject-prefix", "copy"]) == 0
    copied = ask(two.url, "CONSUMER.INFO.COPY.archive")["config"]
    assert copied["filter_subjects"] == ["copy.orders.a", "copy.orders.c.*"]


# ------------------------------------------------------------------ rewound streams


def answers(setting: Setting, stream: str, last: int) -> list[dict[str, Any]]:
    return [ask(setting.server.url, f"STREAM.MSG.GET.{stream}", {"seq": seq})["message"] for seq in range(1, last + 1)]


def test_a_stream_with_new_messages_after_a_rewind_is_restored_as_it_was_before(
    nats_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(nats_server(), tmp_path)
    setting.publish(*orders(1, 60))
    setting.capture()
    with rewound(setting.server):
        setting.publish(*orders(61, 120))
        setting.capture()
        before = answers(setting, STREAM, 120)
    setting.publish(*orders(61, 90, "new"))
    setting.capture()
    arguments = [str(setting.path), "--as", "BEFORE", "--subject-prefix", "before"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "sequence 61 has two messages: either the server rewound the stream" in error
    every = rows(setting.root) + rows(setting.root, quarantine=True)
    last = max(row[layout.TIMESTAMP] for row in every if row[layout.SEQ] == 120)
    assert main([*arguments, "--to-time", f"{format_time(last)[:-1]}999Z"]) == 0
    found = answers(setting, "BEFORE", 120)
    assert found == [{**message, "subject": f"before.{message['subject']}"} for message in before]
    assert ask(setting.server.url, "STREAM.INFO.BEFORE")["state"]["last_seq"] == 120


# ------------------------------------------------------------------ what was removed on purpose


__all__ = ["kept"]
MAY = datetime(2026, 5, 1, 13, tzinfo=UTC)


@pytest.fixture
def shortened(kept: Archive) -> Archive:
    """Messages 1 to 10 of the archive have expired; of 11 to 30, 13 and 17 were erased, 17 not yet from its object."""
    (name,) = kept.root.glob("ORDERS/**/*.parquet")
    name.unlink()
    for seqs in ([*range(11, 16), 17], [*range(18, 31)]):
        kept.write([seq for seq in seqs if seq != 13], created=CREATED)
    kept.write([16], created=CREATED, quarantine=False, key="b")
    expired = Expired(stream="ORDERS", until=MAY).with_messages(CREATED, np.arange(1, 11), MAY, MAY)
    LocalStore(str(kept.root)).write_note(expired_path("ORDERS"), expired.encode())
    times = {seq: datetime.fromtimestamp(HOUR, UTC).replace(microsecond=seq) for seq in (13, 17)}
    bury(kept.root, [{"_nats_seq": seq, "_nats_timestamp": time} for seq, time in times.items()])
    return kept


def test_what_was_removed_on_purpose_is_no_hole_and_does_not_come_back_and_other_gaps_are(
    server: NatsServer, shortened: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([shortened.url, "ORDERS", "--servers", server.url, "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "12 sequences have expired or were erased; the stream begins later" in lines
    assert not [line for line in lines if "missing" in line]
    assert error(capfd, shortened, server.url, "--to-seq", "9") == (
        "the archive of stream ORDERS has no messages in this range; 10 messages up to 2026-05-01T13:00:00Z expired"
    )
    assert main([shortened.url, "ORDERS", "--servers", server.url]) == 0
    state = asyncio.run(state_of(server.url, "ORDERS"))
    assert (state["first_seq"], state["last_seq"], state["messages"]) == (11, 30, 18)
    assert sorted(state["deleted"]) == [13, 17]
    next(shortened.root.glob("ORDERS/key=b/**/*.parquet")).unlink()
    (shortened.root / expired_path("ORDERS")).unlink()
    text = error(capfd, shortened, server.url, "--as", "COPY", "--subject-prefix", "copy", "--from-seq", "9")
    assert text.startswith("the archive of stream ORDERS lacks 1 sequence between 11 and 30: 16; 2 sequences at the ")
    assert "at the beginning: 9 to 10" in text


@pytest.mark.parametrize("continues", [True, False])
def test_an_erased_message_of_a_mirror_that_was_created_again_is_no_hole(kept: Archive, *, continues: bool) -> None:
    """It is older than the mirror, and than the mirror of that name before."""
    again = "2026-06-01T00:00:00Z"
    kept.write([1, 2, 4], created=again)
    bury(kept.root, [{"_nats_seq": 3, "_nats_timestamp": datetime.fromtimestamp(HOUR, UTC).replace(microsecond=3)}])
    config = StreamConfig(stream="ORDERS", created=again, config={"subjects": ["orders.>"]}, continues=continues)
    (kept.root / stream_config.path("ORDERS", again)).write_bytes(config.encode())
    prepared = command.prepare(request(kept.url))
    survey = prepared.survey
    assert (prepared.plan.created, survey.messages, bool(survey.absent)) == (again, 3, not continues)
