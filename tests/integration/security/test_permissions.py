"""The permissions of `examples/nats-permissions.conf` are enough, each is needed, and one that is missing is named."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import NatsConfig, parse_for_apply
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage import export, tap
from jetcapture_py.manage.apply import apply
from jetcapture_py.manage.check import check
from jetcapture_py.manage.check_server import Findings
from jetcapture_py.manage.many import show_one
from jetcapture_py.rewriting.erase import erase
from jetcapture_py.rewriting.select import Condition
from spark_jobs.datasource.columns import MessageColumns
from spark_jobs.datasource.offsets import Positions, StreamPartition
from spark_jobs.datasource.options import ReadOptions, parse
from spark_jobs.datasource.read import fetch
from spark_jobs.datasource.session import Session
from spark_jobs.publishing.publish import publish_batches
from spark_jobs.replaying.target import Origin, Target
from tests.integration.security import leaves
from tests.integration.spark.live import ENVELOPE
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, Command, capture_all, config, rows, running, settings, status_of

EXAMPLE = (Path(__file__).parents[3] / "examples" / "nats-permissions.conf").read_text()
ADMIN = "      { user: admin, password: admin }\n"
# FC_V2 makes a 2.15 server put domain and account hash into ack subjects
LONG_ACKS = "jetstream: { domain: hub }\nfeature_flags: { js_ack_fc_v2: true }\n"
MESSAGES = 50

Start = Callable[..., NatsServer]


def section(name: str) -> str:
    """The permissions that the example calls `name`."""
    found = re.search(rf"^{name}: {{.*?^}}", EXAMPLE, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[0]


def listed(name: str, *, optional: bool) -> list[str]:
    """The subjects that the section allows, one a line, and of which the example says that they may be left out."""
    found = re.findall(r'^    "([^"]+)"(.*)$', section(name), re.MULTILINE)
    return [subject for subject, remark in found if ("may be left out" in remark) is optional]


def without(*subjects: str, of: str) -> str:
    """The example, but for these subjects in one of its sections."""
    part = section(of)
    less = part
    for subject in subjects:
        assert f'"{subject}"' in less, subject
        less = less.replace(f'"{subject}"', '"not.used"')
    return EXAMPLE.replace(part, less)


@pytest.fixture
def start(nats_server: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    for user in re.findall(r"\$(\w+)_PASSWORD", EXAMPLE):
        monkeypatch.setenv(f"{user}_PASSWORD", f"{user.lower()}-password")

    def started(text: str = EXAMPLE, extra: str = "", *, consumer: bool = True) -> NatsServer:
        server = nats_server(extra + text.replace("    users: [\n", f"    users: [\n{ADMIN}"))
        asyncio.run(fill(server, consumer=consumer))
        return server

    return started


async def fill(server: NatsServer, *, consumer: bool) -> None:
    """The streams of the example, with messages, as their owner makes them."""
    client = await login(server, "admin", password="admin")
    stream = client.jetstream()
    await stream.add_stream(name=STREAM, subjects=["orders.>"])
    await stream.add_stream(name="SUMS", subjects=["sums.>"])
    if consumer:
        await stream.add_consumer(STREAM, ConsumerConfig(durable_name=CONSUMER, ack_policy=AckPolicy.EXPLICIT))
    for number in range(MESSAGES):
        await stream.publish("orders.new", b"%d" % number)
    await client.close()


async def login(server: NatsServer, user: str, *, password: str = "", **options: Any) -> Client:
    async def ignore(_: Exception) -> None:
        """The test asks for what it wants to know."""

    password = password or os.environ[f"{user.upper()}_PASSWORD"]
    return await nats.connect(server.url, user=user, password=password, error_cb=ignore, **options)


def as_user(server: NatsServer, name: str) -> dict[str, Any]:
    """The login of one of the example's users."""
    password = os.environ[f"{name.upper()}_PASSWORD"]
    return {"servers": [server.url], "user": name, "password": password, "inbox_prefix": f"_INBOX_{name}"}


@pytest.mark.parametrize("allowed", [True, False])
def test_a_status_needs_little_and_says_what_it_may_not_know(start: Start, tmp_path: Path, allowed: bool) -> None:
    lag = "$JS.API.STREAM.MSG.GET.ORDERS"
    server = start(EXAMPLE if allowed else without(lag, of="VERIFIER"))

    found = asyncio.run(status_of(config(server.url, tmp_path / "archive", nats=as_user(server, "verifier"))))
    assert found.state is not None
    assert found.state.pending == MESSAGES
    if allowed:
        assert found.problems == ()
        assert found.lag is not None
        assert found.lag > 0
    else:
        assert found.lag is None
        assert [lag.lower() in problem.lower() for problem in found.problems] == [True]


# ------------------------------------------------------------------ apply and check

SMALLER: dict[str, Any] = {"stream": {"compression": "s2"}, "source": {"stream": STREAM, "consumer": CONSUMER}}
PAUSED = {"source": {**SMALLER["source"], "consumer_config": {"pause_until": "2100-01-01T00:00:00Z"}}}
NEW: dict[str, Any] = {**SMALLER, "stream": {"subjects": ["orders.>"]}}


def applied(server: NatsServer, sections: dict[str, Any]) -> list[str]:
    """Apply as the example's user; what was done."""
    managed = parse_for_apply({"nats": as_user(server, "applier"), **sections})
    return [each.plan.action for each in asyncio.run(apply(managed, dry_run=False))]


async def remove_stream(server: NatsServer) -> None:
    client = await login(server, "admin", password="admin")
    await client.jetstream().delete_stream(STREAM)
    await client.close()


def test_what_the_example_allows_is_enough_to_apply(start: Start) -> None:
    server = start(consumer=False)
    assert applied(server, SMALLER) == ["update", "create"]
    asyncio.run(remove_stream(server))
    assert applied(server, NEW) == ["create", "create"]
    assert applied(server, NEW) == ["none", "none"]
    assert [applied(server, PAUSED) for _ in range(2)] == [["update"], ["none"]]
    assert "Violation" not in server.log


@pytest.mark.parametrize("subject", [each for kind in (False, True) for each in listed("APPLIER", optional=kind)])
def test_apply_without_a_permission_ends_at_once_and_names_it(start: Start, subject: str) -> None:
    pauses, creates = (part in subject for part in (".PAUSE.", ".STREAM.CREATE."))
    server = start(without(subject, of="APPLIER"), consumer=pauses)
    if creates:
        asyncio.run(remove_stream(server))
    with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {subject}")):
        applied(server, PAUSED if pauses else NEW if creates else SMALLER)


@pytest.mark.parametrize("denied", [None, *listed("ERASER", optional=False), *listed("ERASER", optional=True)])
def test_erasing_in_the_stream_needs_what_the_example_allows(start: Start, tmp_path: Path, denied: str | None) -> None:
    server = start(EXAMPLE if denied is None else without(denied, of="ERASER"))
    admin = {"servers": [server.url], "user": "admin", "password": "admin"}
    asyncio.run(capture_all(config(server.url, tmp_path / "archive", nats=admin)))
    own = config(server.url, tmp_path / "archive", nats=as_user(server, "eraser"))
    done = asyncio.run(erase(own, Condition(seqs=(3, 5)), "a test", in_stream=True))
    named = [
        text for text in (*done.remaining, *(done.in_stream.notes if done.in_stream else ())) if str(denied) in text
    ]
    assert len(named) == (denied is not None)
    assert bool(done.remaining) is (denied in listed("ERASER", optional=False))
    assert ("Violation" in server.log) is (denied is not None)


def checked(server: NatsServer, archive: Path) -> Findings:
    """Check as the example's user."""
    return asyncio.run(check(config(server.url, archive, nats=as_user(server, "checker"))))


@pytest.mark.parametrize("consumer", [True, False])
def test_what_the_example_allows_is_enough_to_check_everything(start: Start, tmp_path: Path, consumer: bool) -> None:
    server = start(consumer=consumer)
    found = checked(server, tmp_path / "archive").items
    assert {each.about for each in found} >= {
        "clock",
        "consumer",
        "permission",
        "decode",
        "objects",
        "retention",
        "store",
    }
    assert [each for each in found if each.level in ("problem", "skipped")] == []
    assert "Violation" not in server.log


def test_what_the_example_allows_to_check_is_enough_to_tap_and_export(start: Start, tmp_path: Path) -> None:
    server = start()
    settings = config(server.url, tmp_path / "archive", nats=as_user(server, "checker"))
    assert show_one(tap.run(settings, 5), as_json=True) == 0
    assert export.run(settings.nats, "ORDERS", "archive") == 0
    assert "Violation" not in server.log


def test_check_says_what_it_could_not_check_for_lack_of_a_permission(start: Start, tmp_path: Path) -> None:
    server = start(without(*listed("CHECKER", optional=True), of="CHECKER"))
    found = checked(server, tmp_path / "archive")
    assert found.problems == []
    assert {each.about for each in found.items if each.level == "skipped"} == {"account", "stream"}


@pytest.mark.parametrize("subject", listed("CHECKER", optional=False))
def test_a_permission_that_a_capture_needs_and_the_checking_user_lacks_is_a_problem(
    start: Start, tmp_path: Path, subject: str
) -> None:
    wider = [each for each in listed("CHECKER", optional=True) if each.endswith("ORDERS.*")]  # which include it
    server = start(without(subject, *wider, of="CHECKER"), consumer=".CREATE." not in subject)
    problems = checked(server, tmp_path / "archive").problems
    assert [subject.removesuffix(">") in each.text for each in problems] == [True]


# ------------------------------------------------------------------ the capture


def capture(server: NatsServer, archive: Path, domain: str | None = None, **sections: Any) -> None:
    """Capture all there is as the example's user `archive`, with what it is allowed; raise what it meets."""
    found = config(server.url, archive, nats=as_user(server, "archive") | {"domain": domain}, **sections)
    with leaves():
        asyncio.run(asyncio.wait_for(Capture(found).run(asyncio.Event(), until_caught_up=True), 60))


@pytest.mark.parametrize("consumer", [True, False])
def test_what_the_example_allows_is_enough_to_capture(start: Start, tmp_path: Path, consumer: bool) -> None:
    server = start(consumer=consumer)
    capture(server, tmp_path / "archive")
    assert len(rows(tmp_path / "archive")) == MESSAGES
    assert "Violation" not in server.log


def test_the_longer_ack_subjects_are_allowed_too(start: Start, tmp_path: Path) -> None:
    server = start(without("$JS.ACK.ORDERS.archive.>", of="CAPTURE"), LONG_ACKS)
    capture(server, tmp_path / "archive")
    assert len(rows(tmp_path / "archive")) == MESSAGES
    server = start(without("$JS.ACK.*.*.ORDERS.archive.>", of="CAPTURE"), LONG_ACKS)
    with pytest.raises(JetcaptureError, match=re.escape("this user may not publish to $JS.ACK.*.*.ORDERS.archive.>")):
        capture(server, tmp_path / "other")


def test_a_domains_own_server_checks_subjects_without_it(start: Start, tmp_path: Path) -> None:
    server = start(EXAMPLE, LONG_ACKS)
    capture(server, tmp_path / "archive", domain="hub")
    assert len(rows(tmp_path / "archive")) == MESSAGES
    assert "Violation" not in server.log
    for subject in ("$JS.API.CONSUMER.INFO.ORDERS.archive", "$JS.API.CONSUMER.MSG.NEXT.ORDERS.archive"):
        server = start(without(subject, of="CAPTURE"), LONG_ACKS)
        with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {subject}")):
            capture(server, tmp_path / "other", domain="hub")


def test_what_may_be_left_out_is_not_needed(start: Start, tmp_path: Path) -> None:
    optional = listed("CAPTURE", optional=True)
    assert len(optional) == 5
    server = start(without(*optional, of="CAPTURE"))
    capture(server, tmp_path / "archive", source={"create": False})
    assert len(rows(tmp_path / "archive")) == MESSAGES


def test_a_message_that_may_not_be_read_is_asked_for_once(start: Start, tmp_path: Path) -> None:
    server = start(without("$JS.API.STREAM.MSG.GET.ORDERS", of="CAPTURE"))

    async def asked() -> list[bool]:
        async with running(config(server.url, tmp_path / "archive", nats=as_user(server, "archive"))) as state:
            return [await state.source.consumer.delivered_all() for _ in range(3)]

    assert asyncio.run(asked()) == [False] * 3
    assert server.log.count("Violation") == 1


async def deny_removals(server: NatsServer) -> None:
    client = await login(server, "admin", password="admin")
    await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], deny_delete=True, deny_purge=True)
    await client.close()


def test_with_one_active_replica_two_more_permissions_are_needed_and_one_is_useful(
    start: Start, tmp_path: Path
) -> None:
    api, ordered = "$JS.API.", {"source": {"mode": "ordered"}}
    for lacking in (None, "CONSUMER.UNPIN.ORDERS.archive"):
        server = start(EXAMPLE if lacking is None else without(api + lacking, of="CAPTURE"), consumer=False)
        asyncio.run(deny_removals(server))
        capture(server, tmp_path / str(lacking), **ordered)
        assert len(rows(tmp_path / str(lacking))) == MESSAGES
        assert ("Violation" in server.log) is (lacking is not None)
    for needed in ("CONSUMER.RESET.ORDERS.archive", "STREAM.INFO.ORDERS"):
        server = start(without(api + needed, of="CAPTURE"), consumer=False)
        asyncio.run(deny_removals(server))
        with pytest.raises(JetcaptureError, match=re.escape(api + needed)):
            capture(server, tmp_path / "refused", **ordered)


@pytest.mark.parametrize("subject", [each for each in listed("CAPTURE", optional=False) if "*" not in each])
def test_a_capture_that_lacks_a_permission_ends_at_once_and_names_it(
    start: Start, tmp_path: Path, subject: str
) -> None:
    server = start(without(subject, of="CAPTURE"))
    with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {subject}")) as caught:
        capture(server, tmp_path / "archive")
    assert "\n" not in str(caught.value)


def test_a_capture_that_may_not_have_an_inbox_ends_at_once(start: Start, tmp_path: Path) -> None:
    server = start(without("_INBOX_archive.>", of="CAPTURE"))
    with pytest.raises(JetcaptureError, match=r"this user may not subscribe to _INBOX_archive\.>"):
        capture(server, tmp_path / "archive")


def test_a_consumer_that_may_not_be_created_is_named(start: Start, tmp_path: Path) -> None:
    server = start(without("$JS.API.CONSUMER.CREATE.ORDERS.archive", of="CAPTURE"), consumer=False)
    with pytest.raises(JetcaptureError, match=r"may not publish to \$JS\.API\.CONSUMER\.CREATE\.ORDERS\.archive$"):
        capture(server, tmp_path / "archive")


def test_the_command_says_it_in_one_line_and_exits_1(start: Start, tmp_path: Path) -> None:
    server = start(without("$JS.ACK.ORDERS.archive.>", of="CAPTURE"))
    nats_section = as_user(server, "archive")
    with Command(tmp_path, settings(server.url, tmp_path / "archive", nats=nats_section)) as replica:
        assert replica.start("--until-caught-up").wait() == 1
    (failed,) = replica.events("capture.failed")
    assert failed["error"] == "NATS refused: this user may not publish to $JS.ACK.ORDERS.archive.>"
    about = [line for line in replica.log.splitlines() if "this user may not" in line]
    assert len(about) == 1, replica.log
    assert len(rows(tmp_path / "archive")) == MESSAGES, "what was received is stored before it ends"


def test_another_user_neither_reads_the_inbox_nor_writes_to_it(start: Start, tmp_path: Path) -> None:
    server = start()

    async def spy() -> list[bytes]:
        seen: list[bytes] = []

        async def note(message: Any) -> None:
            seen.append(message.data)

        other = await login(server, "app")
        for subject in ("_INBOX_archive.>", "_INBOX_archive.*.*", "*.>", ">", "orders.>"):
            await other.subscribe(subject, cb=note)
        await other.publish("_INBOX_archive.x.1", b"forged", reply=f"$JS.ACK.{STREAM}.{CONSUMER}.1.1.1.1.0")
        await other.publish("orders.seen", b"seen")  # what the spy may see
        await other.flush()
        found = config(server.url, tmp_path / "archive", nats=as_user(server, "archive"))
        await asyncio.wait_for(Capture(found).run(asyncio.Event(), until_caught_up=True), 60)
        await other.flush()
        await other.close()
        return seen

    seen = asyncio.run(spy())
    stored = rows(tmp_path / "archive")
    assert len(stored) == MESSAGES + 1
    assert set(seen) == {b"seen"}, "what the stream stored before was delivered to the capture alone"
    assert b"forged" not in {row["_nats_payload"] for row in stored}
    assert "Publish Violation" in server.log
    assert "Subscription Violation" in server.log


# ------------------------------------------------------------------ Spark's jobs, without Spark


def read(server: NatsServer) -> int:
    """What the data source does to read a stream, in its driver and in its tasks."""
    options = as_user(server, "reader") | {"servers": server.url, "stream": STREAM, "timeout": "3s"}
    reading = parse(ReadOptions, {**options, "subjects": "orders.*", "startingTimestamp": "2020-01-01T00:00:00Z"})
    with Session(reading, "test") as session:
        positions = Positions(session, reading)
        state = positions.state()
        positions.last_match(state)
        positions.first(state)
        part = StreamPartition(state.first, state.last + 1, state.origin)
        chunks = MessageColumns(reading, ENVELOPE).batches(fetch(session, reading, part, bare=False), part)
        return sum(batch.num_rows for batch in chunks)


def write(server: NatsServer, user: str = "writer") -> None:
    """What a task does to publish."""
    columns = {"subject": ["sums.eu"] * 3, "payload": [b"1", b"2", b"3"], "headers": pa.nulls(3, pa.binary())}
    batch = pa.RecordBatch.from_pydict(columns)
    published, _ = publish_batches([batch], NatsConfig.model_validate(as_user(server, user)))
    assert published == 3


def replay(server: NatsServer, *, resume: bool) -> None:
    """What a replay asks its target, and a task's work."""
    target = Target(NatsConfig.model_validate(as_user(server, "replayer")))
    (stream,) = target.streams("sums.>")
    origin = Origin(stream=STREAM, consumers=(CONSUMER,), created=())
    assert target.ingested([], origin) == {}
    write(server, "replayer")
    if resume:
        assert target.replayed([stream], "sums.>", "r1").num_rows == 0


def test_what_the_example_allows_is_enough_for_spark(start: Start) -> None:
    server = start()
    assert read(server) == MESSAGES
    write(server)
    replay(server, resume=True)
    assert "Violation" not in server.log


def test_reading_a_stream_that_nothing_is_deleted_from_needs_less(start: Start) -> None:
    assert read(start(without(*listed("READER", optional=True), of="READER"))) == MESSAGES


def test_a_replay_that_is_not_resumed_needs_less(start: Start) -> None:
    server = start(without(*listed("REPLAYER", optional=True), of="REPLAYER"))
    replay(server, resume=False)
    assert "Violation" not in server.log


@pytest.mark.parametrize("subject", listed("READER", optional=False))
def test_reading_without_a_permission_ends_at_once_and_names_it(start: Start, subject: str) -> None:
    server = start(without(subject, of="READER"))
    with pytest.raises(JetcaptureError, match=f"(?i){re.escape(subject.removesuffix('*'))}"):
        read(server)


def test_writing_without_a_permission_ends_at_once_and_names_it(start: Start) -> None:
    with pytest.raises(JetcaptureError, match=r"this user may not publish to sums\.eu"):
        write(start(without("sums.>", of="WRITER")))
    with pytest.raises(JetcaptureError, match=r"this user may not subscribe to _inbox_writer\."):
        write(start(without("_INBOX_writer.>", of="WRITER")))


@pytest.mark.parametrize("subject", listed("REPLAYER", optional=False))
def test_a_replay_without_a_permission_ends_at_once_and_names_it(start: Start, subject: str) -> None:
    server = start(without(subject, of="REPLAYER"))
    with pytest.raises(JetcaptureError, match=f"may not publish to {re.escape(subject.removesuffix('>'))}"):
        replay(server, resume=False)
