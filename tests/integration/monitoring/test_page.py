"""The status page shows what the capture is doing, escapes what comes from messages, and needs no scripts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetcapture_py.capture import storing
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import parse
from jetcapture_py.errors import FullStoreError, PermanentStoreError, StoreError
from jetcapture_py.jetstream import consumer
from jetcapture_py.monitoring import facts as facts_of_captures
from jetcapture_py.monitoring import history, http, notices
from jetcapture_py.monitoring.history import History
from jetcapture_py.pages.words import utc
from tests.integration.monitoring.test_http import MoodyStore, asked, ready, samples
from tests.support.nats_server import NatsServer
from tests.support.report_page import Element, Page
from tests.support.running import CONSUMER, STREAM, config, connection, publish, running, serve, until
from tests.support.several import fill, of_stream

Start = Callable[..., NatsServer]


async def page_of(port: int, path: str = "/") -> Page:
    status, text = await asked(port, path)
    assert status == 200
    return Page.of(text)


async def facts_of(port: int) -> dict[str, Any]:
    status, text = await asked(port, "/status.json")
    assert status == 200
    (facts,) = json.loads(text)["captures"]
    return dict(facts)


def section(page: Page, title: str) -> Element:
    sections = (each for each in page.root.all("section") if each.all("h2"))
    return next(each for each in sections if each.all("h2")[0].text.startswith(title))


def cards(page: Page) -> dict[str, str]:
    return {str(each.one("h3").children[0]): each.one("p", "value").text for each in page.root.all("section", "card")}


def counted(values: dict[tuple[str, str], float], *names: str) -> list[float]:
    """The counters of these names, which have no labels."""
    return [values[f"jetcapture_{name}_total", ""] for name in names]


def rows(element: Element) -> list[str]:
    return [row.text for body in element.all("tbody") for row in body.all("tr")]


async def test_metrics_page_and_json_show_what_is_held_and_stored(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, archive = nats_server(), tmp_path / "archive"
    good = [(f"orders.{index % 3}", b'{"a": 1}', None) for index in range(900)]
    await publish(server.url, [*good, *[("orders.bad", b"{", None)] * 7])
    store = MoodyStore(archive)
    store.error = StoreError("not today")
    secret = {"options": {"secret": "hunter2"}}
    wanted = config(server.url, archive, decode={"format": "json"}, block={"max_age": "1h"}, store=secret)
    async with running(wanted, store=store) as capture, connection(server.url) as client:
        with serve(capture, "127.0.0.1:0") as port:
            await until(lambda: capture.stats.received == 907 and capture.archiver.blocks.open == 4, "all is in blocks")
            await client.jetstream().update_stream(name=STREAM, subjects=["orders.>"], max_age=86_400)
            assert await capture.source.consumer.stream_info() is not None
            assert await capture.source.refresh()
            values = samples((await asked(port, "/metrics"))[1])
            assert counted(values, "messages_fetched", "messages_quarantined", "messages_stored") == [907, 7, 0]
            assert values["jetcapture_open_blocks", ""] == 4
            assert values["jetcapture_open_block_rows", ""] == values["jetcapture_unacked_messages", ""] == 907
            assert values["jetcapture_buffered_bytes", ""] > 907 * 8
            assert 0 < values["jetcapture_oldest_open_block_seconds", ""] < 100
            assert values["jetcapture_lag_seconds", ""] > 0
            assert values["jetcapture_block_max_age_seconds", ""] == 3600
            assert values["jetcapture_stream_max_age_seconds", ""] == 86_400
            page, facts = await page_of(port), await facts_of(port)
            assert cards(page)["Unacknowledged"] == "907 of 50k"
            assert facts["unacked"] == facts["consumer_state"]["unacked"] == 907
            assert facts["open_blocks"] == len(facts["oldest"]) == 4
            listed = rows(section(page, "Open blocks: 4"))
            assert sorted(row.split()[0] for row in listed) == ["orders.0", "orders.1", "orders.2", "quarantine"]
            assert all(re.search(r" 300 [\d.]+ KiB$", row) for row in listed if row.startswith("orders"))
            reason, last = rows(section(page, "Quarantine"))
            assert re.match(r"decode Input data was truncated.* 7 \d+ s ago$", reason)
            assert last == "last: sequence 907, subject orders.bad"
            assert [(each["stage"], each["messages"]) for each in facts["quarantine"]] == [("decode", 7)]
            assert "None since the process started." in section(page, "Last stored objects").text
            settings = section(page, "Configuration").text
            assert f"store.url {archive}" in settings
            assert "block.max_age 1h" in settings
            monkeypatch.setattr(facts_of_captures, "MAX_BLOCKS", 1)
            monkeypatch.setattr(notices, "MANY_KEYS", 3)
            page = await page_of(port)
            assert "4 blocks are open, and each becomes an object. Set block.bundles, or use a" in page.root.text
            blocks = section(page, "Open blocks: 4")
            assert [each.text for each in blocks.all("h3")] == ["The 1 oldest of 4", "The 1 largest"]
            assert [len(rows(table)) for table in blocks.all("table")] == [1, 1]
            for path in ("/", "/snapshot", "/status.json", "/metrics"):
                assert "hunter2" not in (await asked(port, path))[1]
            capture.archiver.seal_all("age")
            await until(lambda: capture.archiver.uploads.storing.retries > 0, "the store was tried again")
            store.error = None
            await until(lambda: capture.stats.acked == 907, "all is stored")
            assert await capture.source.refresh()
            page, facts = await page_of(port), await facts_of(port)
            text = (await asked(port, "/metrics"))[1]
    values, files = samples(text), [*archive.rglob("*.parquet")]
    assert counted(values, "messages_stored", "messages_acked", "messages_fetched", "stored_rows") == [907] * 4
    assert counted(values, "stored_bytes") == [sum(path.stat().st_size for path in files)]
    assert values["jetcapture_blocks_sealed_total", "age"] == 4
    assert values["jetcapture_store_errors_total", "temporary"] >= 1
    assert counted(values, "store_retries")[0] >= 1
    assert values["jetcapture_store_seconds_count", ""] == values["jetcapture_store_seconds_bucket", "+Inf"] == 4
    assert abs(time.time() - values["jetcapture_last_store_timestamp_seconds", ""]) < 100
    assert values["jetcapture_consumer_max_ack_pending", ""] == wanted.source.max_ack_pending
    assert values["jetcapture_consumer_ack_floor", ""] == 907
    assert values["jetcapture_consumer_pending_messages", ""] == values["jetcapture_lag_seconds", ""] == 0
    families = list(text_string_to_metric_families(text))
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels == {"version", "stream", "consumer", "reason", "stage", "kind", "receiver", "le"}
    assert [family.name for family in families if "stream" in family.samples[0].labels] == ["jetcapture_info"]
    assert cards(page)["Lag"] == "0 s"
    assert "Everything received is stored." in section(page, "Open blocks: 0").text
    assert {each["location"] for each in facts["objects"]} == set(map(str, files))
    stored = section(page, "Last stored objects")
    assert {code.text for code in stored.all("code")} == set(map(str, files))
    assert not stored.all("a"), "a browser cannot open them"
    assert "Stored up to 907" in section(page, "Stream and replicas").text
    assert (facts["stored"], facts["sealed_by"]) == (907, {"age": 4})


async def test_a_failing_store_is_the_first_sentence_with_its_beginning_and_what_to_do(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "SLOW", 0.3)
    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)])
    store = MoodyStore(tmp_path / "archive")
    wanted = config(server.url, tmp_path / "archive", block={"max_age": "0.1s"})
    async with running(wanted, store=store) as capture:
        with serve(capture, "127.0.0.1:0") as port:
            await until(lambda: capture.stats.acked == 1, "the first one is stored")
            await ready(port, 200, "ready")
            page = await page_of(port)
            assert page.verdict.startswith("Healthy for ")
            assert page.root.one("head").one("title").text == f"Healthy · {STREAM} / {CONSUMER}"
            store.error = PermanentStoreError("access denied")
            await publish(server.url, [("orders.eu", b"", None)])
            await ready(port, 503, "storing: access denied")
            assert samples((await asked(port, "/metrics"))[1])["jetcapture_storing", ""] == 0
            assert await asked(port, "/livez") == (200, "alive\n")
            page, facts = await page_of(port), await facts_of(port)
            assert page.verdict.startswith("Not storing for ")
            said = page.root.one("section", "verdict").text
            assert "Access denied. Messages are held and the store is retried; nothing is lost" in said
            assert f"Check that {tmp_path / 'archive'} exists" in said
            assert section(page, "Open blocks: 0").one("p").text == "1 message waits to be stored and acknowledged"
            assert page.root.one("head").one("title").text == f"Not storing · {STREAM} / {CONSUMER}"
            assert (facts["state"], facts["ready"]) == ("failing", False)
            store.error = FullStoreError("the disk is full")
            await ready(port, 503, "storing: the disk is full")
            said = (await page_of(port)).root.one("section", "verdict").text
            assert f"Free space on the disk of {tmp_path / 'archive'}, or enlarge it." in said
            store.error = None
            await ready(port, 200, "ready")
            page = await page_of(port)
            assert page.verdict.startswith("Healthy for ")
            (past,) = rows(section(page, "Earlier failures"))
            assert past.startswith("storing: the disk is full")
            store.answers.clear()
            await publish(server.url, [("orders.eu", b"", None)])
            await ready(port, 503, "storing: the store has not answered for ")
            store.answers.set()
            await ready(port, 200, "ready")
            assert samples((await asked(port, "/metrics"))[1])["jetcapture_ready", ""] == 1


async def test_a_capture_that_starts_or_drains_is_neither_healthy_nor_failing(
    nats_server: Start, tmp_path: Path
) -> None:
    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)])
    store = MoodyStore(tmp_path / "archive")
    capture, stop = Capture(config(server.url, tmp_path / "archive"), store=store), asyncio.Event()
    with serve(capture, "127.0.0.1:0") as port:
        for path, refreshing, link in (("/", 1, "snapshot"), ("/snapshot", 0, "./")):
            page = await page_of(port, path)
            assert page.verdict.startswith("Starting for ")
            metas = [each.attributes.get("http-equiv") for each in page.root.all("meta")]
            assert metas.count("refresh") == refreshing
            assert page.root.one("footer").all("a")[0].attributes["href"] == link
        task = asyncio.create_task(capture.run(stop))
        await until(lambda: capture.archiver.blocks.open == 1, "it has started")
        store.answers.clear()
        stop.set()
        await ready(port, 503, "consuming: draining, no more pulls")
        page = await page_of(port)
        assert page.verdict.startswith("Draining for ")
        assert "for at most 1 min" in page.root.one("section", "verdict").text
        store.answers.set()
        await task


async def test_what_needs_attention_is_said_although_the_capture_is_ready(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY", 0.05)
    monkeypatch.setattr(notices, "LASTING", 0.2)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return super().now(tz) + timedelta(minutes=40, seconds=30)

    monkeypatch.setattr(consumer, "datetime", Ahead)
    server = nats_server()
    await publish(server.url, [("orders.eu", b"{", None)] * 30)
    wanted = config(server.url, tmp_path / "archive", decode={"format": "json"}, source={"max_ack_pending": 20})
    async with running(wanted) as capture:
        with serve(capture, "127.0.0.1:0") as port:
            await until(lambda: capture.stats.received >= 20, "the first ones are there")

            async def says(text: str) -> bool:
                return text in (await page_of(port)).root.one("section", "verdict").text

            await until(lambda: says("went to the quarantine in the last quarter of an hour."), "it says so")
            assert await says("run jetcapture quarantine redecode")
            assert await says("This machine's clock is 40 min 30 s ahead of the NATS server's. Ages are wrong")
            async with connection(server.url) as client:
                pause = f"$JS.API.CONSUMER.PAUSE.{STREAM}.{CONSUMER}"
                await client.request(pause, b'{"pause_until": "2100-01-01T00:00:00Z"}')
                await until(lambda: says(f"nats consumer resume {STREAM} {CONSUMER}"), "it says how to resume")
                await client.request(pause, b"{}")
            assert (await facts_of(port))["state"] == "attention"
            assert re.match(r"Ready for .* UTC, with (a warning|\d warnings)$", (await page_of(port)).verdict)


async def test_another_replica_is_seen_by_its_pulls_and_messages(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)] * 10)
    wanted = config(server.url, tmp_path / "archive", block={"max_age": "1h"})
    async with running(wanted) as other:
        await until(lambda: other.stats.received == 10, "another one holds messages")
        async with running(wanted) as capture:
            with serve(capture, "127.0.0.1:0") as port:

                async def seen() -> bool:
                    await capture.source.refresh()
                    found = (await facts_of(port))["consumer_state"]
                    return bool(found["other_unacked"] == 10 and found["other_pulls"] > 0)

                await until(seen, "the other one is seen")
                text = section(await page_of(port), "Stream and replicas").text
                assert re.search(r"Other replicas 10 unacknowledged messages, \d+ open pulls", text)


async def test_history_has_samples_and_when_the_capture_was_not_ready(nats_server: Start, tmp_path: Path) -> None:
    now = time.time()
    server = nats_server()
    await publish(server.url, [("orders.eu", b"", None)] * 50)
    async with running(config(server.url, tmp_path / "archive", block={"max_age": "1h"})) as capture:
        kept, storing = History(capture, lambda: now), capture.archiver.uploads.storing

        def observe(seconds: float = history.EVERY) -> datetime:
            nonlocal now
            now += seconds
            kept.observe()
            return utc(now)

        before = capture.source.fetched
        await until(lambda: capture.stats.received == 50, "all is in blocks")
        began = observe()
        assert (kept.ready, kept.since) == (True, began)
        assert kept.samples[-1].received == 50 - before
        assert kept.samples[-1].seconds == pytest.approx(history.EVERY)
        capture.archiver.seal_all("age")
        await until(lambda: capture.stats.acked == 50, "all is stored")
        observe()
        assert (kept.samples[-1].received, kept.samples[-1].stored) == (0, 50)
        for _ in range(2 * history.SAMPLES):
            observe()
        assert len(kept.samples) == history.SAMPLES
        covered = kept.samples[-1].time - kept.samples[0].time
        assert covered == pytest.approx(history.EVERY * (history.SAMPLES - 1))
        observe(-3600)  # the clock is set back
        observe()
        assert kept.samples[-1].time == now
        storing.failed("a turn", [PermanentStoreError("no space left")])
        failed = observe()
        assert (kept.ready, kept.since) == (False, failed)
        observe()
        assert kept.failing_since("storing") == failed
        storing.ended("a turn")
        ended = observe()
        assert (kept.ready, kept.since) == (True, ended)
        (past,) = kept.past
        assert (past.began, past.ended, past.text) == (failed, ended, "storing: no space left")


async def test_the_list_of_captures_has_the_worst_first_with_rate_lag_and_quarantine(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY", 0.1)
    server = nats_server()
    await fill(server.url, ("FIRST", "SECOND"), 20)
    site, block = http.Site(single=False), {"max_age": "1h"}
    first_config, second_config = (
        parse(of_stream(server.url, stream, tmp_path / stream, decode={"format": form}, block=block))
        for stream, form in (("FIRST", "raw"), ("SECOND", "json"))
    )
    async with running(first_config) as first, running(second_config) as second:
        site.show({"first": first, "second": second}, {"lost": "stream LOST does not exist"})
        await until(lambda: first.stats.received == second.stats.received == 20, "all is in blocks")
        assert await first.source.refresh()
        await until(lambda: first.marks.observer.lag(first.source.state).total_seconds() > 1, "it has waited")
        site.update()
        page = Page.of(site.answer("/").body.decode())
        site.stop()
    assert page.verdict.startswith("Failing: 1 of 3 captures")
    lost, reason, late, warning, well = rows(page.root)
    assert (lost, reason) == ("lost ✕ Failed", "stream LOST does not exist")
    assert re.fullmatch(r"second SECOND / archive ! Ready .*\b20 20 .* KiB", late), late
    assert warning == "20 messages went to the quarantine in the last quarter of an hour."
    assert re.fullmatch(r"first FIRST / archive ✓ Healthy .*\d s 20 .* KiB", well), well
    titles = [str(part.attributes["title"]) for part in page.root.all("span", "part")]
    assert [title.partition("of ")[2] for title in titles] == ["block.max_age, 1 h"] * 2
