"""Which answers of the server are about the consumer that is captured from."""

from __future__ import annotations

from typing import Any

import pytest

from jetcapture_py.jetstream.consumer import ConsumerState, ConsumerWatch, consumer_state

CREATED = "2026-05-01T12:00:00.12860358Z"
"""Servers leave zeros at the end away."""


def state(created: str = CREATED, deliveries: int = 0, floor: int = 0) -> ConsumerState:
    info: dict[str, Any] = {
        "config": {},
        "created": created,
        "delivered": {"consumer_seq": deliveries, "stream_seq": deliveries},
        "ack_floor": {"consumer_seq": floor, "stream_seq": floor},
    }
    return consumer_state(info)


def followed() -> ConsumerWatch:
    """A watch that has seen a consumer work for a while; the next answer comes at 20 s."""
    watch = ConsumerWatch(state(), 0.0)
    for second in range(1, 20):
        assert watch.is_same(state(deliveries=second * 1000, floor=second * 1000 - 500), float(second))
    return watch


@pytest.mark.parametrize("created", ["2026-05-01T12:00:00.128929666Z", "2026-05-01T12:00:00.1285Z"])
def test_a_creation_time_that_a_restart_moves_a_little_is_the_same_consumer(created: str) -> None:
    watch = followed()
    assert watch.is_same(state(created, 20_000, 19_500), 20.0)
    assert watch.is_same(state(created, 21_000, 20_500), 21.0)


def test_what_a_killed_server_forgets_of_the_last_moments_does_not_make_it_another_consumer() -> None:
    assert followed().is_same(state("2026-05-01T12:00:00.1287Z", 18_000, 17_900), 20.0)
    assert followed().is_same(state(CREATED, 0, 0), 20.0), "with the same creation time, it may forget everything"


@pytest.mark.parametrize("created", ["2026-05-01T12:00:00.3Z", "2026-05-01T11:59:59Z", "2026-05-02T12:00:00Z", "", "x"])
def test_another_creation_time_is_another_consumer(created: str) -> None:
    assert not followed().is_same(state(created, 30_000, 29_000), 20.0)


@pytest.mark.parametrize(("deliveries", "floor"), [(0, 0), (3_000, 29_000), (30_000, 2_000)])
def test_a_consumer_that_starts_again_is_another_one_however_soon_it_was_created(deliveries: int, floor: int) -> None:
    assert not followed().is_same(state("2026-05-01T12:00:00.1287Z", deliveries, floor), 20.0)


def test_a_missing_consumer_is_gone_only_when_distinct_moments_agree() -> None:
    watch = followed()
    assert not any(watch.is_gone(20.0 + step / 100) for step in range(10)), "ten callers that ask at the same moment"
    assert not watch.is_gone(20.6)
    assert watch.is_gone(21.2)


def test_an_answer_between_takes_the_doubt_away() -> None:
    watch = followed()
    assert not any(watch.is_gone(at) for at in (20.0, 20.6))
    assert watch.is_same(state(deliveries=21_000, floor=20_000), 21.0)
    assert not any(watch.is_gone(at) for at in (21.5, 22.1))
    assert watch.is_gone(22.7)
