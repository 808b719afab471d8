"""The status page shows what the capture is doing, escapes what comes from messages, and needs no scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config import block
from jetcapture_py.config.model import parse
from jetcapture_py.errors import PermanentStoreError
from jetcapture_py.jetstream import consumer
from jetcapture_py.monitoring import history, http, http_server, notices
from jetcapture_py.monitoring.facts import MAX_BLOCKS
from jetcapture_py.monitoring.history import History
from jetcapture_py.pages.words import utc
from tests.integration.monitoring.test_http import MoodyStore, asked, get, ready
from tests.support.mounts import Volume
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
    (found,) = (
        each for each in page.root.all("section") if each.all("h2") and each.all("h2")[0].text.startswith(title)
    )
    return found


def cards(page: Page) -> dict[str, str]:
    """The figures by name."""
    return {str(each.one("h3").children[0]): each.one("p", "value").text for each in page.root.all("section", "card")}


def rows(element: Element) -> list[str]:
    return [row.text for body in element.all("tbody") for row in body.all("tr")]


def test_the_page_and_its_json_show_what_is_held_what_is_stored_and_what_is_in_quarantine(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        good = [(f"orders.{index % 3}", b'{"a": 1}', None) for index in range(900)]
        await publish(server.url, [*good, *[("orders.bad", b"{", None)] * 7])
        wanted = config(server.url, tmp_path / "archive", decode={"format": "json"}, block={"max_age": "1h"})
        async with running(wanted) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await until(
                    lambda: capture.stats.received == 907 and capture.archiver.blocks.open == 4, "all is in blocks"
                )
                assert await capture.source.refresh()
                page, facts = await page_of(port), await facts_of(port)
                assert cards(page)["Unacknowledged"] == "907 of 50k"
                assert facts["unacked"] == facts["consumer_state"]["unacked"] == 907
                assert facts["open_blocks"] == len(facts["oldest"]) == 4
                blocks = section(page, "Open blocks: 4")
                assert sorted(row.split()[0] for row in rows(blocks)) == [
                    "orders.0",
                    "orders.1",
                    "orders.2",
                    "quarantine",
                ]
                assert all(re.search(r" 300 [\d.]+ KiB$", row) for row in rows(blocks) if row.startswith("orders"))
                reason, last = rows(section(page, "Quarantine"))
                assert reason.startswith("decode Input data was truncated")
                assert re.search(r" 7 \d+ s ago$", reason)
                assert last == "last: sequence 907, subject orders.bad"
                assert [(each["stage"], each["messages"]) for each in facts["quarantine"]] == [("decode", 7)]
                assert "None since the process started." in section(page, "Last stored objects").text
                capture.archiver.seal_all("age")
                await until(lambda: capture.stats.acked == 907, "all is stored")
                assert await capture.source.refresh()
                page, facts = await page_of(port), await facts_of(port)
                assert cards(page)["Lag"] == "0 s"
                assert "Everything received is stored." in section(page, "Open blocks: 0").text
                stored = {str(path) for path in (tmp_path / "archive").rglob("*.parquet")}
                assert {each["location"] for each in facts["objects"]} == stored
                assert {code.text for code in section(page, "Last stored objects").all("code")} == stored
                assert not section(page, "Last stored objects").all("a"), "a browser cannot open them"
                assert "Stored up to 907" in section(page, "Stream and replicas").text
                assert facts["stored"] == 907
                assert facts["sealed_by"] == {"age": 4}

    asyncio.run(scenario())


def test_a_failing_store_is_the_first_sentence_with_its_beginning_and_what_to_do(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
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
                page, facts = await page_of(port), await facts_of(port)
                assert page.verdict.startswith("Not storing for ")
                said = page.root.one("section", "verdict").text
                assert "Access denied. Messages are held and the store is retried; nothing is lost" in said
                assert section(page, "Open blocks: 0").one("p").text == "1 message waits to be stored and acknowledged"
                assert page.root.one("head").one("title").text == f"Not storing · {STREAM} / {CONSUMER}"
                assert (facts["state"], facts["ready"]) == ("failing", False)
                store.error = None
                await ready(port, 200, "ready")
                page = await page_of(port)
                assert page.verdict.startswith("Healthy for ")
                (past,) = rows(section(page, "Earlier failures"))
                assert past.startswith("storing: access denied")

    asyncio.run(scenario())


def test_a_full_disk_and_an_unmounted_volume_are_explained_in_sentences(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server, volume = nats_server(), Volume(tmp_path)
        try:
            volume.mount_another(1)
            await publish(server.url, [("orders.eu", b"", None)])
            async with running(config(server.url, volume.point, block={"max_age": "0.1s"})) as capture:
                with serve(capture, "127.0.0.1:0") as port:
                    await until(lambda: capture.stats.acked == 1, "the first one is stored")
                    filling = volume.point / "filling"
                    with contextlib.suppress(OSError), filling.open("wb", 0) as file:
                        while True:
                            file.write(bytes(4096))
                    await publish(server.url, [("orders.eu", b"", None)])
                    await until(lambda: capture.archiver.uploads.storing.full, "it is full")
                    said = (await page_of(port)).root.one("section", "verdict").text
                    assert ": the disk is full. Messages are held and the store is retried" in said
                    assert f"Free space on the disk of {volume.point}, or enlarge it." in said
                    filling.unlink()
                    await until(lambda: capture.stats.acked == 2, "there is space again")
                    volume.mount_another(1)
                    await publish(server.url, [("orders.eu", b"", None)])
                    await ready(port, 503, "is it mounted?")
                    said = (await page_of(port)).root.one("section", "verdict").text
                    assert "; is it mounted? Messages are held and the store is retried" in said
                    assert f"Check that {volume.point} exists" in said
                    volume.unmount()
        finally:
            volume.close()

    asyncio.run(scenario())


def test_a_capture_that_starts_or_drains_is_neither_healthy_nor_failing(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        store = MoodyStore(tmp_path / "archive")
        whole = Capture(config(server.url, tmp_path / "archive"), store=store)
        capture, stop = whole, asyncio.Event()
        with serve(capture, "127.0.0.1:0") as port:
            assert (await page_of(port)).verdict.startswith("Starting for ")
            task = asyncio.create_task(whole.run(stop))
            await until(lambda: capture.archiver.blocks.open == 1, "it has started")
            store.answers.clear()
            stop.set()
            await ready(port, 503, "consuming: draining, no more pulls")
            page = await page_of(port)
            assert page.verdict.startswith("Draining for ")
            assert "for at most 1 min" in page.root.one("section", "verdict").text
            store.answers.set()
            await task

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_two_thousand_open_keys_are_a_count_and_the_oldest_and_largest_few(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server()
        many = [(f"orders.{index:04}", b"", None) for index in range(2000)]
        await publish(server.url, [*many, *[("orders.1234", bytes(500), None)] * 20])
        wanted = config(server.url, tmp_path / "archive", limits={"open_blocks": 5000})
        async with running(wanted) as capture:
            with serve(capture, "127.0.0.1:0") as port:
                await until(lambda: capture.stats.received == 2020, "all is in blocks")
                _, text = await asked(port, "/")
                page = Page.of(text)
                assert len(text) < 50_000
                blocks = section(page, "Open blocks: 2,000")
                assert [table.text for table in blocks.all("h3")] == ["The 6 oldest of 2,000", "The 6 largest"]
                oldest, largest = (rows(table) for table in blocks.all("table"))
                assert len(oldest) == len(largest) == MAX_BLOCKS
                assert oldest[0].startswith("orders.0000 ")
                assert largest[0].startswith("orders.1234 ")
                assert capture.archiver.blocks.open > block.MANY_KEYS
                assert "Set block.bundles, or use a coarser key." in page.root.one("section", "verdict").text

    asyncio.run(scenario())


def test_what_needs_attention_is_said_although_the_capture_is_ready(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY", 0.05)
    monkeypatch.setattr(notices, "LASTING", 0.2)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return super().now(tz) + timedelta(minutes=40, seconds=30)

    monkeypatch.setattr(consumer, "datetime", Ahead)

    async def scenario() -> None:
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
                    await client.jetstream()._api_request(  # type: ignore[no-untyped-call]
                        f"$JS.API.CONSUMER.PAUSE.{STREAM}.{CONSUMER}",
                        json.dumps({"pause_until": "2100-01-01T00:00:00Z"}).encode(),
                    )
                    await until(lambda: says(f"nats consumer resume {STREAM} {CONSUMER}"), "it says how to resume")
                    await client.jetstream()._api_request(  # type: ignore[no-untyped-call]
                        f"$JS.API.CONSUMER.PAUSE.{STREAM}.{CONSUMER}", b"{}"
                    )
                assert (await facts_of(port))["state"] == "attention"
                assert re.match(r"Ready for .* UTC, with (a warning|\d warnings)$", (await page_of(port)).verdict)

    asyncio.run(scenario())


def test_another_replica_is_seen_by_its_pulls_and_messages(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_page_has_no_secret_and_names_what_matters_of_the_configuration(nats_server: Start, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = nats_server("authorization { user: alice, password: hunter2 }")
        wanted = config(
            server.url,
            tmp_path / "archive",
            nats={"servers": [server.url], "user": "alice", "password": "hunter2"},
            store={"options": {"secret": "hunter2"}},
        )
        with serve(Capture(wanted), "127.0.0.1:0") as port:
            for path in ("/", "/snapshot", "/status.json"):
                assert "hunter2" not in (await asked(port, path))[1]
            settings = section(await page_of(port), "Configuration").text
            assert f"store.url {tmp_path / 'archive'}" in settings
            assert "block.max_age 15m" in settings

    asyncio.run(scenario())


def test_the_page_refreshes_itself_and_a_snapshot_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "127.0.0.1:0") as port:
            pages = {path: await page_of(port, path) for path in ("/", "/snapshot")}
            refreshing = {
                path: [each for each in page.root.all("meta") if each.attributes.get("http-equiv") == "refresh"]
                for path, page in pages.items()
            }
            assert (len(refreshing["/"]), len(refreshing["/snapshot"])) == (1, 0)
            links = {path: page.root.one("footer").all("a")[0].attributes["href"] for path, page in pages.items()}
            assert links == {"/": "snapshot", "/snapshot": "./"}

    asyncio.run(scenario())


def test_the_page_of_a_process_whose_event_loop_is_stuck_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LATE", -1.0)  # whatever was made before the question is too old

    async def scenario() -> None:
        with serve(Capture(config("nats://127.0.0.1:1", tmp_path)), "127.0.0.1:0") as port:
            answers: list[tuple[int, str]] = []
            thread = threading.Thread(target=lambda: answers.append(get(port, "/")))
            thread.start()
            thread.join()  # the loop waits here, and does nothing else
            ((status, text),) = answers
            assert status == 503
            assert Page.of(text).verdict == "Not answering"
            assert "/livez asks for a restart" in text

    asyncio.run(scenario())


# ------------------------------------------------------------------ a quarter of an hour


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def test_a_quarter_of_an_hour_is_kept_in_samples_of_what_was_received_and_stored(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)] * 50)
        clock = Clock()
        async with running(config(server.url, tmp_path / "archive", block={"max_age": "1h"})) as capture:
            found = History(capture, clock)
            before = capture.source.fetched
            await until(lambda: capture.stats.received == 50, "all is in blocks")
            observe(found, clock, history.EVERY)
            assert found.samples[-1].received == 50 - before
            assert found.samples[-1].seconds == pytest.approx(history.EVERY)
            capture.archiver.seal_all("age")
            await until(lambda: capture.stats.acked == 50, "all is stored")
            observe(found, clock, history.EVERY)
            assert (found.samples[-1].received, found.samples[-1].stored) == (0, 50)
            for _ in range(2 * history.SAMPLES):
                observe(found, clock, history.EVERY)
            assert len(found.samples) == history.SAMPLES
            assert found.samples[-1].time - found.samples[0].time == pytest.approx(
                history.EVERY * (history.SAMPLES - 1)
            )
            observe(found, clock, -3600)  # the clock is set back
            observe(found, clock, history.EVERY)
            assert found.samples[-1].time == clock.now

    asyncio.run(scenario())


def observe(found: History, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    found.observe()


def test_a_process_tells_since_when_it_has_been_ready_and_how_long_it_was_not(
    nats_server: Start, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = nats_server()
        await publish(server.url, [("orders.eu", b"", None)])
        clock = Clock()
        async with running(config(server.url, tmp_path / "archive")) as capture:
            found = History(capture, clock)
            began = clock.now + 10
            observe(found, clock, 10)
            assert (found.ready, found.since) == (True, utc(began))
            await failing(capture, fails=True)
            observe(found, clock, 60)
            assert (found.ready, found.since) == (False, utc(began + 60))
            observe(found, clock, 60)
            assert found.failing_since("storing") == utc(began + 60)
            await failing(capture, fails=False)
            observe(found, clock, 60)
            assert (found.ready, found.since) == (True, utc(began + 180))
            (past,) = found.past
            assert (past.began, past.ended, past.text) == (utc(began + 60), utc(began + 180), "storing: no space left")

    async def failing(capture: Capture, *, fails: bool) -> None:
        turn = "a turn"
        if fails:
            capture.archiver.uploads.storing.failed(turn, [PermanentStoreError("no space left")])
        else:
            capture.archiver.uploads.storing.ended(turn)

    asyncio.run(scenario())


# ------------------------------------------------------------------ in a browser


def test_the_list_of_captures_has_the_worst_first_with_rate_lag_and_quarantine(
    nats_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVERY", 0.1)

    async def scenario() -> None:
        server = nats_server()
        await fill(server.url, ("FIRST", "SECOND"), 20)
        wanted = [
            parse(of_stream(server.url, stream, tmp_path / stream, decode={"format": form}, block={"max_age": "1h"}))
            for stream, form in (("FIRST", "raw"), ("SECOND", "json"))
        ]
        async with running(wanted[0]) as first, running(wanted[1]) as second:
            site = http.Site(single=False)
            site.show({"first": first, "second": second}, {"lost": "stream LOST does not exist"})
            server_ = http_server.HttpServer("127.0.0.1:0", site)
            try:
                await until(lambda: first.stats.received == second.stats.received == 20, "all is in blocks")
                assert await first.source.refresh()
                await until(lambda: first.marks.observer.lag(first.source.state).total_seconds() > 1, "it has waited")
                site.update()
                page = await page_of(server_.port)
            finally:
                await asyncio.to_thread(server_.stop)
                site.stop()
        assert page.verdict.startswith("Failing: 1 of 3 captures")
        lost, reason, late, warning, well = rows(page.root)
        assert (lost, reason) == ("lost ✕ Failed", "stream LOST does not exist")
        assert re.fullmatch(r"second SECOND / archive ! Ready .*\b20 20 .* KiB", late), late
        assert warning == "20 messages went to the quarantine in the last quarter of an hour."
        assert re.fullmatch(r"first FIRST / archive ✓ Healthy .*\d s 20 .* KiB", well), well
        titles = [str(part.attributes["title"]) for part in page.root.all("span", "part")]
        assert [title.partition("of ")[2] for title in titles] == ["block.max_age, 1 h"] * 2

    asyncio.run(scenario())
