"""How many bytes pulls ask for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.config.shares import MAX_PULLED, UNLIMITED_PULL_FROM
from jetcapture_py.jetstream.pulls import (
    REMEMBERED,
    STUCK_AFTER,
    Ask,
    PullLimits,
)

MEMORY = 1 << 30
SLOTS = 10
MB = 1_000_000


def limits(memory: int = MEMORY) -> PullLimits:
    return PullLimits(memory, SLOTS)


def ask(of: PullLimits, **given: Any) -> Ask | None:
    usual: dict[str, Any] = {"free": MEMORY, "held": False, "in_flight": 0, "ceiling": 0}
    return of.next(**{**usual, **given})


def met(of: PullLimits, size: int, ceiling: int = 0, now: float = 0.0) -> list[Ask]:
    """What is asked for until a message of `size` bytes comes, as the server answers."""
    asked = []
    while True:
        pull = ask(of, ceiling=ceiling)
        assert pull is not None
        asked.append(pull)
        if not pull.limited or pull.max_bytes >= size:
            of.received(size, now)
            if pull.batch == 1:
                of.single_received(size, ceiling)
            return asked
        assert of.too_small(pull.max_bytes, ceiling, now)


def test_all_pulls_together_ask_for_no_more_than_the_limit() -> None:
    of, in_flight, count = limits(), 0, 0
    while (pull := ask(of, held=True, in_flight=in_flight)) is not None:
        in_flight += pull.max_bytes
        count += 1
    assert count == SLOTS
    assert MAX_PULLED - SLOTS <= in_flight <= MAX_PULLED


def test_a_pull_fits_into_the_memory_that_is_left_unless_nothing_is_held() -> None:
    of = limits()
    assert ask(of, free=1000, held=True) is None
    assert ask(of, free=1000, held=False) is not None


def test_a_larger_message_is_pulled_alone_with_twice_the_bytes_each_time_and_in_the_end_with_no_limit() -> None:
    asked = met(limits(), 100 * MB)
    usual, *singles = asked
    assert usual.batch == 0
    assert [pull.max_bytes for pull in singles] == [usual.max_bytes << n for n in range(1, len(asked))]
    assert {pull.batch for pull in singles} == {1}
    assert [pull.limited for pull in singles] == [pull.max_bytes <= UNLIMITED_PULL_FROM for pull in singles]
    assert not singles[-1].limited


def test_pulls_are_sized_for_the_largest_message_of_late_and_fewer_of_them_are_made() -> None:
    of = limits()
    met(of, 8 * MB)
    pull = ask(of)
    assert pull == Ask(max_bytes=8 * MB)
    assert ask(of, held=True, in_flight=2 * 8 * MB) == pull
    assert ask(of, held=True, in_flight=3 * 8 * MB) is None
    assert ask(of, in_flight=0, free=MB, held=True) is None
    for period in range(1, 4):
        of.received(1000, period * REMEMBERED + 1)
    assert ask(of) == Ask(max_bytes=MAX_PULLED // SLOTS)


def test_only_one_pull_at_a_time_is_made_for_a_larger_message() -> None:
    of = limits()
    asked = [ask(of) for _ in range(SLOTS)]
    assert [of.too_small(pull.max_bytes, 0, 0.0) for pull in asked if pull] == [True] + [False] * (SLOTS - 1)
    single = ask(of)
    assert single == Ask(max_bytes=2 * (MAX_PULLED // SLOTS), batch=1)
    assert ask(of, in_flight=single.max_bytes, held=True) is None


def test_messages_beyond_what_the_consumer_allows_a_pull_are_pulled_singly_until_a_smaller_one_comes() -> None:
    of = limits()
    assert met(of, 3000, ceiling=1000) == [Ask(max_bytes=1000), Ask(max_bytes=2000, batch=1, limited=False)]
    assert met(of, 3000, ceiling=1000) == [Ask(max_bytes=2000, batch=1, limited=False)]
    assert met(of, 500, ceiling=1000) == [Ask(max_bytes=2000, batch=1, limited=False)]
    assert ask(of, ceiling=1000) == Ask(max_bytes=1000)


def test_being_stuck_is_reported_after_a_while_and_no_longer_than_it_lasts() -> None:
    of = limits()
    assert of.stuck(100.0) is None
    of.too_small(MAX_PULLED // SLOTS, 0, 100.0)
    assert of.stuck(100.0) is None
    assert "exceeds" in (of.stuck(100.0 + STUCK_AFTER) or "")
    of.single_idle(ended=False)
    assert of.stuck(200.0) is None
    of.too_small(2 * (MAX_PULLED // SLOTS), 0, 200.0)
    of.single_received(5 * MB, 0)
    assert of.stuck(300.0) is None


def test_a_single_pull_that_ends_without_a_message_is_followed_by_usual_ones() -> None:
    of = limits()
    of.too_small(MAX_PULLED // SLOTS, 0, 0.0)
    of.single_idle(ended=True)
    assert ask(of) == Ask(max_bytes=MAX_PULLED // SLOTS)


@given(
    st.lists(st.integers(1, 200 * MB), min_size=1, max_size=30),
    st.one_of(st.just(0), st.integers(1, 4 * MB)),
    st.integers(16 << 20, 4 << 30),
)
def test_every_message_is_met_after_a_few_pulls(sizes: list[int], ceiling: int, memory: int) -> None:
    of = PullLimits(memory, SLOTS)
    for number, size in enumerate(sizes):
        asked = met(of, size, ceiling, float(number))
        assert len(asked) <= 12
        assert all(not ceiling or not pull.limited or pull.max_bytes <= ceiling for pull in asked)
