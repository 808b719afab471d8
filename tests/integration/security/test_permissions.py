"""The permissions of `examples/nats-permissions.conf` are enough, each is needed, and one that is missing is named."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import NatsConfig, parse_for_apply
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.manage import export, tap
from jetcapture_py.manage.apply import apply
from jetcapture_py.manage.check import check
from jetcapture_py.manage.check_server import Findings
from jetcapture_py.manage.many import show_one
from jetcapture_py.restoring.command import prepare, restore
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
from tests.support.archives import Archive
from tests.support.nats_server import NatsServer
from tests.support.restores import api, request
from tests.support.running import CONSUMER, STREAM, Command, capture_all, config, rows, settings, status_of

EXAMPLE = (Path(__file__).parents[3] / "examples" / "nats-permissions.conf").read_text()
ADMIN = "      { user: admin, password: admin }\n"
# FC_V2 makes a 2.15 server put domain and account hash into ack subjects
LONG_ACKS = "jetstream: { domain: hub }\nfeature_flags: { js_ack_fc_v2: true }\n"
MESSAGES = 50

Start = Callable[..., NatsServer]


def section(name: str) -> str:
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


async def login(server: NatsServer, user: str, *, password: str = "") -> Client:
    async def ignore(_: Exception) -> None:
        """The test asks for what it wants to know."""

    password = password or os.environ[f"{user.upper()}_PASSWORD"]
    return await nats.connect(server.url, user=user, password=password, error_cb=ignore)


def as_user(server: NatsServer, name: str) -> dict[str, Any]:
    password = os.environ[f"{name.upper()}_PASSWORD"]
    return {"servers": [server.url], "user": name, "password": password, "inbox_prefix": f"_INBOX_{name}"}


async def asked(server: NatsServer, subject: str, body: dict[str, Any] | None = None) -> None:
    """Call the JetStream API as the owner of the streams."""
    client = await login(server, "admin", password="admin")
    await api(client, subject, body)
    await client.close()


# ------------------------------------------------------------------ what each user does, if need be with less


def capture(server: NatsServer, archive: Path, *, less: bool = False, domain: str | None = None, **source: Any) -> None:
    """Capture all there is; raise what it meets."""
    source |= {"create": False} if less else {}
    found = config(server.url, archive, nats=as_user(server, "archive") | {"domain": domain}, source=source)
    with leaves():
        asyncio.run(asyncio.wait_for(Capture(found).run(asyncio.Event(), until_caught_up=True), 60))
    assert len(rows(archive)) == MESSAGES


def read(server: NatsServer, _: Path, *, less: bool) -> None:
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
        assert sum(batch.num_rows for batch in chunks) == MESSAGES


def write(server: NatsServer, _: Path, *, less: bool, user: str = "writer") -> None:
    columns = {"subject": ["sums.eu"] * 3, "payload": [b"1", b"2", b"3"], "headers": pa.nulls(3, pa.binary())}
    batch = pa.RecordBatch.from_pydict(columns)
    published, _ = publish_batches([batch], NatsConfig.model_validate(as_user(server, user)))
    assert published == 3


def replay(server: NatsServer, directory: Path, *, less: bool) -> None:
    """What a replay asks its target, and a task's work; with less, one that is not resumed."""
    target = Target(NatsConfig.model_validate(as_user(server, "replayer")))
    (stream,) = target.streams("sums.>")
    assert target.ingested([], Origin(stream=STREAM, consumers=(CONSUMER,), created=())) == {}
    write(server, directory, less=less, user="replayer")
    assert less or target.replayed([stream], "sums.>", "r1").num_rows == 0


def restored(server: NatsServer, directory: Path, *, less: bool) -> None:
    archive, created = Archive(directory), "2026-05-01T00:00:00Z"
    archive.write(range(1, 11), created=created)
    path = directory / stream_config.path(STREAM, created)
    path.parent.mkdir(parents=True)
    kept = {"name": STREAM, "subjects": ["restored.>"], "storage": "file"}
    path.write_bytes(StreamConfig(stream=STREAM, created=created, config=kept).encode())
    prepared = prepare(request(archive.url, target="RESTORED"))
    assert restore(prepared, NatsConfig.model_validate(as_user(server, "restorer"))) == 10


WORK: dict[str, Callable[..., None]] = {
    "CAPTURE": capture, "READER": read, "WRITER": write, "REPLAYER": replay, "RESTORER": restored
}  # fmt: skip
NEEDED = [
    *((name, subject) for name in WORK for subject in listed(name, optional=False) if "*.*" not in subject),
    *[("CAPTURE", "_INBOX_archive.>"), ("WRITER", "sums.>"), ("WRITER", "_INBOX_writer.>")],
]


@pytest.mark.parametrize("name", WORK)
def test_what_the_example_allows_is_enough_and_some_of_it_may_be_left_out(
    start: Start, tmp_path: Path, name: str
) -> None:
    optional = listed(name, optional=True)
    assert len(optional) == {"CAPTURE": 5, "READER": 2, "WRITER": 0, "REPLAYER": 6, "RESTORER": 2}[name]
    for less in (False, True):
        server = start(without(*optional, of=name) if less else EXAMPLE)
        WORK[name](server, tmp_path / str(less), less=less)
        assert less or "Violation" not in server.log


@pytest.mark.parametrize(("name", "subject"), NEEDED)
def test_without_a_permission_it_ends_at_once_and_names_it(
    start: Start, tmp_path: Path, name: str, subject: str
) -> None:
    reason = rf"(?i)(publish|subscri\w+) .*{re.escape(subject.rstrip('*>'))}"
    server = start(without(subject, of=name))
    with pytest.raises(JetcaptureError, match=reason) as caught:
        WORK[name](server, tmp_path / "denied", less=False)
    assert "\n" not in str(caught.value)


def test_a_status_needs_little_and_says_what_it_may_not_know(start: Start, tmp_path: Path) -> None:
    lag = "$JS.API.STREAM.MSG.GET.ORDERS"
    for text in (EXAMPLE, without(lag, of="VERIFIER")):
        server = start(text)
        found = asyncio.run(status_of(config(server.url, tmp_path / "archive", nats=as_user(server, "verifier"))))
        assert found.state is not None
        assert found.state.pending == MESSAGES
        assert (found.lag is None) is (text != EXAMPLE)
        assert [lag.lower() in problem.lower() for problem in found.problems] == [True] * (text != EXAMPLE)


# ------------------------------------------------------------------ apply and check

SMALLER: dict[str, Any] = {"stream": {"compression": "s2"}, "source": {"stream": STREAM, "consumer": CONSUMER}}
PAUSED = {"source": {**SMALLER["source"], "consumer_config": {"pause_until": "2100-01-01T00:00:00Z"}}}
NEW: dict[str, Any] = {**SMALLER, "stream": {"subjects": ["orders.>"]}}


def applied(server: NatsServer, sections: dict[str, Any]) -> list[str]:
    managed = parse_for_apply({"nats": as_user(server, "applier"), **sections})
    return [each.plan.action for each in asyncio.run(apply(managed, dry_run=False))]


def test_what_the_example_allows_is_enough_to_apply(start: Start) -> None:
    server = start(consumer=False)
    assert applied(server, SMALLER) == ["update", "create"]
    asyncio.run(asked(server, f"STREAM.DELETE.{STREAM}"))
    assert [applied(server, NEW) for _ in range(2)] == [["create", "create"], ["none", "none"]]
    assert [applied(server, PAUSED) for _ in range(2)] == [["update"], ["none"]]
    assert "Violation" not in server.log


@pytest.mark.parametrize("subject", [each for kind in (False, True) for each in listed("APPLIER", optional=kind)])
def test_apply_without_a_permission_ends_at_once_and_names_it(start: Start, subject: str) -> None:
    pauses, creates = (part in subject for part in (".PAUSE.", ".STREAM.CREATE."))
    server = start(without(subject, of="APPLIER"), consumer=pauses)
    if creates:
        asyncio.run(asked(server, f"STREAM.DELETE.{STREAM}"))
    with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {subject}")):
        applied(server, PAUSED if pauses else NEW if creates else SMALLER)


@pytest.mark.parametrize("denied", [None, *listed("ERASER", optional=False), *listed("ERASER", optional=True)])
def test_erasing_in_the_stream_needs_what_the_example_allows(start: Start, tmp_path: Path, denied: str | None) -> None:
    server = start(EXAMPLE if denied is None else without(denied, of="ERASER"))
    admin = {"servers": [server.url], "user": "admin", "password": "admin"}
    asyncio.run(capture_all(config(server.url, tmp_path / "archive", nats=admin)))
    own = config(server.url, tmp_path / "archive", nats=as_user(server, "eraser"))
    done = asyncio.run(erase(own, Condition(seqs=(3, 5)), "a test", in_stream=True))
    said = (*done.remaining, *(done.in_stream.notes if done.in_stream else ()))
    assert sum(str(denied) in text for text in said) == (denied is not None)
    assert bool(done.remaining) is (denied in listed("ERASER", optional=False))
    assert ("Violation" in server.log) is (denied is not None)


def checked(server: NatsServer, archive: Path) -> Findings:
    return asyncio.run(check(config(server.url, archive, nats=as_user(server, "checker"))))


@pytest.mark.parametrize("consumer", [True, False])
def test_what_the_example_allows_is_enough_to_check_tap_and_export(
    start: Start, tmp_path: Path, consumer: bool
) -> None:
    server = start(consumer=consumer)
    found = checked(server, tmp_path / "archive").items
    about = {"clock", "consumer", "permission", "decode", "objects", "retention", "store"}
    assert {each.about for each in found} >= about
    assert [each for each in found if each.level in ("problem", "skipped")] == []
    if consumer:
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


def test_the_longer_ack_subjects_are_allowed_too(start: Start, tmp_path: Path) -> None:
    capture(start(without("$JS.ACK.ORDERS.archive.>", of="CAPTURE"), LONG_ACKS), tmp_path / "archive")
    longer = "$JS.ACK.*.*.ORDERS.archive.>"
    with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {longer}")):
        capture(start(without(longer, of="CAPTURE"), LONG_ACKS), tmp_path / "other")


def test_a_domains_own_server_checks_subjects_without_it(start: Start, tmp_path: Path) -> None:
    server = start(EXAMPLE, LONG_ACKS)
    capture(server, tmp_path / "archive", domain="hub")
    assert "Violation" not in server.log
    subject = "$JS.API.CONSUMER.INFO.ORDERS.archive"
    with pytest.raises(JetcaptureError, match=re.escape(f"this user may not publish to {subject}")):
        capture(start(without(subject, of="CAPTURE"), LONG_ACKS), tmp_path / "other", domain="hub")


@pytest.mark.parametrize("lacking", [None, "CONSUMER.UNPIN", "CONSUMER.RESET", "STREAM.INFO"])
def test_with_one_active_replica_two_more_permissions_are_needed_and_one_is_useful(
    start: Start, tmp_path: Path, lacking: str | None
) -> None:
    subject = f"$JS.API.{lacking}.ORDERS{'' if lacking == 'STREAM.INFO' else '.archive'}"
    server = start(without(subject, of="CAPTURE") if lacking else EXAMPLE, consumer=False)
    kept = {"name": STREAM, "subjects": ["orders.>"], "deny_delete": True, "deny_purge": True}
    asyncio.run(asked(server, f"STREAM.UPDATE.{STREAM}", kept))
    needed = lacking in ("CONSUMER.RESET", "STREAM.INFO")
    with pytest.raises(JetcaptureError, match=re.escape(subject)) if needed else nullcontext():
        capture(server, tmp_path / "archive", mode="ordered")
    assert needed or ("Violation" in server.log) is (lacking is not None)


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
