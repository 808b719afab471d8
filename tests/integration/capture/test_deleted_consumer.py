"""A consumer that the server deletes during a stop: `check`, `run` and `verify` say it before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.config.model import Config
from jetcapture_py.manage.check import check
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import verify
from tests.integration.manage.api import ask_with, create
from tests.support.nats_server import NatsServer
from tests.support.proofs import spans
from tests.support.running import CONSUMER, STREAM, capture_all, config, connection

HOUR = 3600 * 10**9
LIMITED = {"name": STREAM, "subjects": ["orders.>"], "consumer_limits": {"inactive_threshold": HOUR}}


async def warnings(configuration: Config) -> list[str]:
    return [finding.text for finding in (await check(configuration)).items if finding.about == "consumer"]


@pytest.mark.parametrize(
    ("retention", "begins", "lost"),
    [
        ("interest", {"begins": 9, "archived": 5, "skips": "6 to 8", "advice": "run jetcapture verify"}, ((6, 8),)),
        ("limits", {"begins": 1, "archived": 5, "fetches_again": "1 to 5"}, ()),
    ],
)
async def test_run_and_verify_say_where_a_consumer_began_again_and_what_is_lost(
    server: NatsServer, tmp_path: Path, logged: Any, retention: str, begins: dict[str, Any], lost: tuple[Any, ...]
) -> None:
    await create(server.url, {**LIMITED, "retention": retention})
    configuration, reports = config(server.url, tmp_path), list[Report]()
    await capture_all(configuration)
    async with connection(server.url) as client:
        for count in (5, 3, 2):  # before the consumer is deleted, while it does not exist, and after
            for _ in range(count):
                await client.jetstream().publish("orders.a", b"x")
            await capture_all(configuration)
            reports.append(await verify(configuration))
            if count == 5:
                await ask_with(client, f"CONSUMER.DELETE.{STREAM}.{CONSUMER}")
                deleted = "it was deleted: the archive has its messages up to sequence 5;"
                assert any(deleted in text for text in await warnings(configuration))
    (recreated,) = logged("consumer.recreated")
    assert begins.items() <= recreated.items()
    assert "if no replica pulls for 1h" in logged("consumer.inactive_threshold")[0]["reason"]
    first, *_, last = reports
    (idle,) = first.of(Kind.CONSUMER)
    assert "if no replica pulls for 1h" in idle.summary
    assert first.as_text().startswith("complete: ")
    assert tuple(span for finding in last.of(Kind.CONSUMER) for span in spans(finding.ranges)) == lost
    assert last.as_text().startswith("complete, but the consumer was deleted meanwhile: ") == bool(lost)
