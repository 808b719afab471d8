"""A consumer that the server deletes during a stop: `check`, `run` and `verify` say it before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py import log
from jetcapture_py.config.model import Config, parse
from jetcapture_py.manage.apply import apply
from jetcapture_py.manage.check import check
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import verify
from tests.integration.manage.api import ask, create
from tests.support.nats_server import NatsServer
from tests.support.proofs import spans
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection, settings

Start = Callable[..., NatsServer]
HOUR = 3600 * 10**9
DELETES = "the server deletes the consumer, with the messages that only it needs, if no replica pulls for 1h; "


async def warnings(configuration: Config) -> list[str]:
    return [finding.text for finding in (await check(configuration)).items if finding.about == "consumer"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "existing"])
def test_check_warns_of_the_limit_of_the_stream_and_its_advice_works(
    nats_server: Start, tmp_path: Path, there: bool
) -> None:
    server = nats_server()
    limits = {"consumer_limits": {"inactive_threshold": HOUR}}

    async def scenario() -> dict[str, Any]:
        await create(server.url, {"name": STREAM, "subjects": ["orders.>"], "retention": "interest", **limits})
        configuration = config(server.url, tmp_path)
        if there:
            body = {"name": CONSUMER, "durable_name": CONSUMER, "ack_policy": "explicit", "max_ack_pending": 50_000}
            await ask(server.url, f"CONSUMER.CREATE.{STREAM}.{CONSUMER}", {"stream_name": STREAM, "config": body})
        assert [text for text in await warnings(configuration) if text.startswith(DELETES)]
        advised = settings(server.url, tmp_path, source={"consumer_config": {"inactive_threshold": "36500d"}})
        advised["stream"] = {"consumer_limits": {"inactive_threshold": "36500d", "max_ack_pending": 100_000}}
        results = await apply(parse(advised), dry_run=False)
        assert all(applied.plan.possible and not applied.ignored for applied in results)
        assert not [text for text in await warnings(config(server.url, tmp_path)) if "deletes" in text]
        return await ask(server.url, f"CONSUMER.INFO.{STREAM}.{CONSUMER}")

    assert asyncio.run(scenario())["config"]["inactive_threshold"] == 36500 * 24 * HOUR


async def captured_before_and_after(server: NatsServer, archive: Path, retention: str) -> list[Report]:
    """Capture sequences 1 to 5; delete the consumer, publish 6 to 8, capture again, and capture 9 and 10."""
    limits = {"consumer_limits": {"inactive_threshold": HOUR}}
    await create(server.url, {"name": STREAM, "subjects": ["orders.>"], "retention": retention, **limits})
    configuration, reports = config(server.url, archive), []
    await capture_all(configuration)
    async with connection(server.url) as client:
        for count, deleted in ((5, True), (3, False), (2, False)):
            for _ in range(count):
                await client.jetstream().publish("orders.a", b"x")
            await capture_all(configuration)
            reports.append(await verify(configuration))
            if deleted:
                await ask(server.url, f"CONSUMER.DELETE.{STREAM}.{CONSUMER}")
                assert any(
                    "it was deleted: the archive has its messages up to sequence 5;" in text
                    for text in await warnings(configuration)
                )
    return reports


@pytest.mark.parametrize(
    ("retention", "begins", "lost"),
    [
        ("interest", {"begins": 9, "archived": 5, "skips": "6 to 8", "advice": "run jetcapture verify"}, ((6, 8),)),
        ("limits", {"begins": 1, "archived": 5, "fetches_again": "1 to 5"}, ()),
    ],
)
def test_run_and_verify_say_where_a_consumer_began_again_and_what_is_lost(
    nats_server: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    retention: str,
    begins: dict[str, Any],
    lost: tuple[tuple[int, int], ...],
) -> None:
    first, *_, last = asyncio.run(captured_before_and_after(nats_server(), tmp_path, retention))
    said = {record.msg: getattr(record, log.FIELDS) for record in caplog.records if record.msg.startswith("consumer.")}
    assert said["consumer.recreated"] == begins
    assert "if no replica pulls for 1h" in said["consumer.inactive_threshold"]["reason"]
    (idle,) = first.of(Kind.CONSUMER)
    assert "if no replica pulls for 1h" in idle.summary
    assert first.as_text().startswith("complete: ")
    assert tuple(span for finding in last.of(Kind.CONSUMER) for span in spans(finding.ranges)) == lost
    assert last.as_text().startswith("complete, but the consumer was deleted meanwhile: ") == bool(lost)
