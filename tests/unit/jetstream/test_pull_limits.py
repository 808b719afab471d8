"""How many bytes pulls ask for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.config.shares import MAX_PULLED_BYTES, MIN_PULLED_BYTES
from jetcapture_py.jetstream.pulls import RECOVERY_S, REMEMBERED_S, Ask, PullLimits

MEMORY = 1 << 30
SLOTS = 10
MB = 1_000_000
LARGEST = 64 * MB


def limits(memory: int = MEMORY) -> PullLimits:
    return PullLimits(memory, SLOTS)


def ask(of: PullLimits, **given: Any) -> Ask | None:
    usual: dict[str, Any] = {"free": MEMORY, "held": False, "in_flight": 0, "ceiling": 0, "largest": LARGEST}
    return of.next(**{**usual, "now": 0.0, **given})


def met(of: PullLimits, size: int, ceiling: int = 0, now: float = 0.0) -> list[Ask]:
    """What is asked for until a message of `size` bytes comes, as the server answers."""
    asked = []
    while True:
        pull = ask(of, ceiling=ceiling)
        assert pull is not None
        asked.append(pull)
        if not pull.limited or pull.max_bytes >= size:
            of.received(size, now)
            return asked
        of.alone = True


def test_all_pulls_together_ask_for_no_more_than_the_limit() -> None:
    of, in_flight, count = limits(), 0, 0
    while (pull := ask(of, held=True, in_flight=in_flight)) is not None:
        in_flight += pull.max_bytes
        count += 1
    assert count == SLOTS
    assert MAX_PULLED_BYTES - SLOTS <= in_flight <= MAX_PULLED_BYTES


def test_a_pull_fits_into_the_memory_that_is_left_unless_nothing_is_held() -> None:
    of = limits()
    assert ask(of, free=1000, held=True) is None
    assert ask(of, free=1000, held=False) is not None


def test_a_larger_message_is_pulled_alone_with_no_limit_once_no_pull_is_open() -> None:
    of = limits()
    usual, single = met(of, 100 * MB)
    assert (usual.batch, single) == (0, Ask(max_bytes=LARGEST, batch=1, limited=False))
    of.alone = True
    assert ask(of, in_flight=1) is None
    assert ask(of, free=LARGEST - 1, held=True) is None, "what it may bring has to fit"
    assert ask(of, free=LARGEST, held=True) == single


def test_pulls_are_sized_for_the_largest_message_of_late_and_fewer_of_them_are_made() -> None:
    of = limits()
    met(of, 8 * MB)
    pull = ask(of)
    assert pull == Ask(max_bytes=8 * MB)
    assert ask(of, held=True, in_flight=2 * 8 * MB) == pull
    assert ask(of, held=True, in_flight=3 * 8 * MB) is None
    assert ask(of, in_flight=0, free=MB, held=True) is None
    for period in range(1, 4):
        of.received(1000, period * REMEMBERED_S + 1)
    assert ask(of) == Ask(max_bytes=MAX_PULLED_BYTES // SLOTS)


def test_a_lost_connection_halves_what_is_asked_for_until_a_while_has_passed_without() -> None:
    of = limits()
    for _ in range(10):
        of.broken(0.0)
    assert ask(of) == Ask(max_bytes=MIN_PULLED_BYTES // SLOTS)
    assert ask(of, now=RECOVERY_S) == Ask(max_bytes=2 * MIN_PULLED_BYTES // SLOTS)
    assert ask(of, now=20 * RECOVERY_S) == Ask(max_bytes=MAX_PULLED_BYTES // SLOTS)


@given(
    st.lists(st.integers(1, 200 * MB), min_size=1, max_size=30),
    st.one_of(st.just(0), st.integers(1, 4 * MB)),
    st.integers(16 << 20, 4 << 30),
)
def test_every_message_is_met_after_a_few_pulls(sizes: list[int], ceiling: int, memory: int) -> None:
    of = PullLimits(memory, SLOTS)
    for number, size in enumerate(sizes):
        asked = met(of, size, ceiling, float(number))
        assert len(asked) <= 2
        assert all(not ceiling or not pull.limited or pull.max_bytes <= ceiling for pull in asked)
