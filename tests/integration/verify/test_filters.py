"""Proofs of captures whose consumer had other filter subjects over time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetcapture_py.archive import layout, watermark
from jetcapture_py.verify.findings import Kind, Report
from jetcapture_py.verify.proof import prove, verify
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.repair import verify_and_repair
from tests.integration.verify.test_proof import captured, holes, orders, remove
from tests.support import losses
from tests.support.losses import Filtered
from tests.support.nats_server import NatsServer
from tests.support.proofs import losses_of, spans
from tests.support.running import CONSUMER, STREAM, capture_all, connection, objects, publish, rows

Start = Callable[..., NatsServer]


Histories = Callable[[int], list[tuple[Filtered, random.Random]]]


def everything(seqs: Sequences) -> set[int]:
    return set(seqs.within(seqs.first or 0, seqs.last or 0).tolist())


def doubtful(report: Report) -> set[int]:
    """Messages that a change of filters may have skipped."""
    ranges = [pair for loss in losses_of(report) if loss.kind == Kind.FILTERS for pair in spans(loss.ranges)]
    return {seq for first, last in ranges for seq in range(first, last + 1)}


async def filtered(url: str, *subjects: str) -> None:
    """The consumer selects these subjects from now on."""
    async with connection(url) as client:
        settings = (await client.jetstream().consumer_info(STREAM, CONSUMER)).config
        settings.filter_subject, settings.filter_subjects = None, list(subjects)
        await client.jetstream().add_consumer(STREAM, settings)


async def test_what_earlier_filters_selected_is_missing_when_its_objects_are_gone(
    nats_server: Start, tmp_path: Path
) -> None:
    root, sections = tmp_path / "a", {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(200, "a"), **sections) as (server, settings):
        await filtered(server.url, "orders.b")
        await publish(server.url, orders(200, "b"))
        await capture_all(settings)
        report = await verify(settings, deep=True)
        assert report.complete, report.as_text()
        assert report.exit_code(strict=True) == 0
        gone = remove(root, *(name for name in objects(root) if name.key == "a"))
        assert gone == set(range(1, 201))
        report = await verify(settings, deep=True)
        assert (holes(report), report.exit_code()) == (gone, 1)
        assert report.as_text().startswith("NOT complete: 200 messages in 1 hole")
        assert report.filters == (
            "1 to 200: orders.a",
            "201 to 400: orders.b, or skipped",
            "from 401: orders.b",
        )
        after, repair = await verify_and_repair(settings, content=True)
        assert (repair.messages, after.complete, after.exit_code(strict=True)) == (200, True, 0)
    assert {row["key"] for row in rows(root) if row[layout.SEQ] <= 200} == {"a"}


async def test_messages_that_a_change_of_filters_may_have_skipped_fail_a_strict_proof(
    nats_server: Start, tmp_path: Path
) -> None:
    both = ["orders.a", "orders.b"]
    sections = {"source": {"filter_subjects": both}}
    async with captured(nats_server, tmp_path / "a", orders(10, "ab"), **sections) as (server, settings):
        for subjects in (both[:1], both):
            await filtered(server.url, *subjects)
            await publish(server.url, orders(10, "ab"))
            await capture_all(settings)
        report = await verify(settings)
        assert (report.missing, doubtful(report)) == (0, {20}), report.as_text()
        assert "filters: near a change of filters: 1 message may have been skipped\n" in report.as_text()
        assert report.as_text().startswith("NOT proven: 25 messages up to sequence 30 (")
        assert (report.complete, report.exit_code(), report.exit_code(strict=True)) == (False, 0, 1)
        after, repair = await verify_and_repair(settings)
        assert (repair.messages, after.complete, after.exit_code(strict=True)) == (1, True, 0)


async def test_a_consumer_that_was_created_again_owes_what_both_selected(nats_server: Start, tmp_path: Path) -> None:
    root, sections = tmp_path / "a", {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(40, "abc"), **sections) as (server, settings):
        async with connection(server.url) as client:
            await client.jetstream().delete_consumer(STREAM, CONSUMER)
        source = settings.source.model_copy(update={"filter_subjects": ("orders.b",)})
        settings = settings.model_copy(update={"source": source})
        await capture_all(settings)
        assert (await verify(settings)).exit_code(strict=True) == 0
        gone = remove(root, *objects(root))
        evidence = await prove(settings)
        report = evidence.report
    assert len(gone) == 27
    # the watermark starts over, and its position has not got to the last message yet
    assert (everything(evidence.missing), report.ack_floor) == (gone - {40}, 38)


async def test_without_a_watermark_earlier_filters_are_said_to_be_unknown(nats_server: Start, tmp_path: Path) -> None:
    root = tmp_path / "a"
    sections: dict[str, Any] = {"source": {"filter_subjects": ["orders.a"]}}
    async with captured(nats_server, root, orders(20, "a"), **sections) as (_, settings):
        (root / watermark.path(STREAM, CONSUMER)).unlink()
        report = await verify(settings)
    (loss,) = losses_of(report)
    assert (loss.kind, spans(loss.ranges)) == (Kind.UNKNOWN_FILTERS, ((1, 20),))
    assert report.as_text().startswith("complete, but the consumer's earlier filters are unknown: every one of 20")
    assert (report.exit_code(), report.exit_code(strict=True)) == (0, 1)


# ------------------------------------------------------------------ random histories

TOGETHER = 10
"""Streams that share a server."""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 7))]


@pytest.fixture
def histories(nats_server: Start, tmp_path: Path) -> Callable[[int], list[tuple[Filtered, random.Random]]]:
    """Lets streams have random histories of filters and bundles, which end with everything captured."""

    async def live(seed: int) -> list[tuple[Filtered, random.Random]]:
        server = nats_server()
        pairs = [
            (losses.filtered(number, server, tmp_path), random.Random(f"{seed} {number}")) for number in range(TOGETHER)
        ]
        async with connection(server.url) as client:
            await asyncio.gather(*(subject.live_through(client, chance) for subject, chance in pairs))
        return pairs

    return lambda seed: asyncio.run(live(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_history_of_filters_and_bundles_raises_an_alarm(histories: Histories, seed: int) -> None:
    for subject, _ in histories(seed):
        report = asyncio.run(verify(subject.settings, deep=True))
        assert (report.exit_code(), report.missing, report.paths(Kind.DAMAGED)) == (0, 0, ()), report.as_text()
        assert report.proven
        assert report.complete is not bool(report.of(Kind.FILTERS)), report.as_text()
        assert {loss.kind for loss in losses_of(report)} <= {Kind.FILTERS}, report.as_text()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_of_lost_objects_is_named_whatever_filters_and_bundles_there_were(
    histories: Histories, seed: int
) -> None:
    for subject, chance in histories(1000 + seed):
        if not objects(subject.archive):
            continue
        gone = subject.lose(chance)
        evidence = asyncio.run(prove(subject.settings, deep=chance.random() < 0.5))
        report = evidence.report
        assert gone <= {*everything(evidence.missing), *everything(evidence.doubtful)}, report.as_text()
        if gone:
            assert not report.complete
            assert not report.as_text().startswith("complete"), report.as_text()
            assert report.exit_code(strict=True) == 1
        asyncio.run(verify_and_repair(subject.settings))
        for damaged in report.paths(Kind.DAMAGED):
            (subject.archive / damaged.path).unlink(missing_ok=True)
        report = asyncio.run(verify(subject.settings))
        assert report.exit_code(strict=True) == 0, report.as_text()
        assert gone <= subject.archived
