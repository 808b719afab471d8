"""No command reads a stream that would store every delivery again, or that is past its last sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.captures import WORK_QUEUE, CaptureFiles
from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.streams import MISSING, on_server
from jetcapture_py.manage.check import check
from jetcapture_py.manage.tap import tap
from jetcapture_py.supervisor import Supervisor
from jetcapture_py.verify.proof import verify
from spark_jobs.datasource.offsets import Positions
from spark_jobs.datasource.options import ReadOptions, parse
from spark_jobs.datasource.session import Session
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer
from tests.support.running import CONSUMER, STREAM, config, connection, running, settings, until

EVERYTHING = {"name": STREAM, "subjects": ["orders.>", "_INBOX.>"]}
SELF = "so it would store every delivery again, without end"


def many(server: NatsServer, directory: Path, **source: Any) -> CaptureFiles:
    """A configuration of many streams."""
    sections = settings(server.url, directory / "archive")
    (directory / "all.yaml").write_text(yaml.safe_dump({**sections, "source": {**source, "consumer": "c"}}))
    return CaptureFiles([directory / "all.yaml"], find=on_server)


async def spark(configuration: Config) -> None:
    def state() -> None:
        options = parse(ReadOptions, {"servers": configuration.nats.servers[0], "stream": STREAM})
        with Session(options, "test") as session:
            Positions(session, options).state()

    await asyncio.to_thread(state)


async def reasons(configuration: Config) -> list[str]:
    """What each command says, instead of reading the stream."""
    said = [finding.text for finding in (await check(configuration)).problems]
    for work in (
        lambda: tap(configuration, 1),
        lambda: spark(configuration),
        lambda: Capture(configuration).run(asyncio.Event(), until_caught_up=True),
    ):
        with pytest.raises(SourceError) as caught:
            await asyncio.wait_for(work(), 60)
        said.append(str(caught.value))
    body = {"stream_name": STREAM, "config": {"durable_name": CONSUMER, "ack_policy": "explicit"}}
    await ask(configuration.nats.servers[0], f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", body)
    report = await verify(configuration)
    assert not report.complete
    return [*said, *(finding.summary for finding in report.findings)]


@pytest.mark.parametrize(
    ("streams", "text"),
    [
        pytest.param([EVERYTHING], SELF, id="own deliveries"),
        pytest.param(
            [{**EVERYTHING, "name": "ORIGIN"}, {"name": STREAM, "mirror": {"name": "ORIGIN"}}],
            f"stream ORIGIN, from which stream {STREAM} copies, takes _INBOX.>, which overlaps _INBOX.*.>, {SELF}",
            id="mirror",
        ),
        pytest.param(
            [{"name": STREAM, "subjects": ["orders.>"], "first_seq": (1 << 62) - 1}],
            "deliver nothing from sequence 4611686018427387904 on",
            id="sequences",
        ),
    ],
)
async def test_every_command_refuses_it_in_one_line(
    server: NatsServer, archive: Path, streams: list[dict[str, Any]], text: str
) -> None:
    for stream in streams:
        await create(server.url, stream)
    async with connection(server.url) as client:
        await client.jetstream().publish("orders.a", b"x")
    said = await reasons(config(server.url, archive))
    assert len(said) >= 5
    assert all(text in line and "\n" not in line for line in said)


def test_a_configuration_of_many_leaves_it_out_and_a_running_capture_ends(server: NatsServer, tmp_path: Path) -> None:
    asyncio.run(create(server.url, {"name": STREAM, "subjects": ["orders.>"]}))

    async def edited() -> None:
        async with running(config(server.url, tmp_path / "archive")) as state:
            await ask(server.url, f"STREAM.UPDATE.{STREAM}", EVERYTHING)
            await state.source.consumer.stream_info()
            await until(lambda: state.source.failure is not None, "it has ended")

    with pytest.raises(SourceError, match=SELF):
        asyncio.run(edited())
    found = many(server, tmp_path, streams=["*"]).select()
    assert found.configs == {}
    assert [SELF in reason for reason in found.left_out.values()] == [True]


def test_captures_whose_notifications_feed_each_other_are_refused(server: NatsServer, tmp_path: Path) -> None:
    files = {}
    for name, other in (("A", "b"), ("B", "a")):
        asyncio.run(create(server.url, {"name": name, "subjects": [f"{name.lower()}.>"]}))
        sections = settings(server.url, tmp_path / "archive", on_stored={"subject": f"{other}.stored"})
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**sections, "source": {"stream": name, "consumer": CONSUMER}}))
    both = CaptureFiles([*files.values()])
    selected = both.select()
    one, another = selected.configs.values()
    found = asyncio.run(check(one, [one, another]))
    text = "stream A takes a.stored, notifications of stream B that follow from its own, so that every object"
    assert [text in finding.text for finding in found.problems] == [True]
    assert asyncio.run(check(one)).problems == []
    supervisor = Supervisor(both)
    asyncio.run(asyncio.wait_for(supervisor.run(selected), 60))
    assert supervisor.code == 2


@pytest.mark.parametrize(
    ("source", "left_out", "code"),
    [
        ({"streams": ["ORDERS"], "buckets": ["cfg"]}, {}, 0),
        ({"streams": ["ORDERS", "ODRERS"], "buckets": ["cgf", "*"]}, {"ODRERS": MISSING, "KV_cgf": MISSING}, 1),
        ({"streams": ["*"], "buckets": []}, {"JOBS": WORK_QUEUE}, 1),
        ({"streams": ["*", "!JOBS"], "buckets": ["cfg"], "max_streams": 1}, {}, 1),
    ],
    ids=["exact", "mistyped", "work queue", "too many"],
)
def test_a_run_until_caught_up_fails_if_a_selected_stream_is_not_captured(
    server: NatsServer, tmp_path: Path, source: dict[str, Any], left_out: dict[str, str], code: int
) -> None:
    asyncio.run(create(server.url, {"name": STREAM, "subjects": ["orders.>"]}))
    asyncio.run(create(server.url, {"name": "JOBS", "subjects": ["jobs.>"], "retention": "workqueue"}))
    asyncio.run(create(server.url, {"name": "KV_cfg", "subjects": ["$KV.cfg.>"]}))
    files = many(server, tmp_path, **source)
    selected = files.select()
    assert {capture.stream: reason for capture, reason in selected.left_out.items()} == left_out
    supervisor = Supervisor(files, until_caught_up=True)
    asyncio.run(asyncio.wait_for(supervisor.run(selected), 60))
    assert supervisor.code == code
