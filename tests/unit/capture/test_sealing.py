"""How much is sealed when open blocks take too much of a budget."""

from __future__ import annotations

from jetcapture_py.capture.sealing import Amount, SealRules, excess, room
from jetcapture_py.config.model import LimitsConfig
from jetcapture_py.config.shares import LARGE_BLOCKS_WAITING, SMALL_BLOCK_BYTES, SMALL_BLOCKS

LIMITS = LimitsConfig(memory=64 << 20, open_blocks=80)
OPEN_BYTES = 32 << 20


def sealed(messages: int = 0, size: int = 0, blocks: int = 0, *, everything: bool = False) -> Amount:
    return excess(Amount(messages, size, blocks), LIMITS, 3200, max_bytes=OPEN_BYTES, everything=everything)


def test_nothing_is_sealed_within_the_budgets_and_a_part_more_than_needed_beyond_them() -> None:
    assert sealed(3200 // 3, OPEN_BYTES, 80) == Amount()
    assert sealed(3200 // 3 + 1) == Amount(messages=1 + 100)
    assert sealed(size=OPEN_BYTES + 1) == Amount(bytes=1 + (8 << 20))
    assert sealed(blocks=81) == Amount(blocks=1 + 10)
    assert sealed(size=5, everything=True) == Amount(bytes=5 + (8 << 20))
    assert sealed(everything=True) == Amount()


def test_more_small_blocks_than_large_ones_may_wait_for_a_worker() -> None:
    large = 2 * SMALL_BLOCKS * SMALL_BLOCK_BYTES
    assert room(2, 5, large - 1) == 2 * SMALL_BLOCKS - 5
    assert room(2, 5, large) == 2 * LARGE_BLOCKS_WAITING - 5


def test_a_block_is_full_at_its_rows_or_bytes_and_rows_fit_up_to_its_bytes() -> None:
    rules = SealRules(max_age=1, max_bytes=100, max_rows=10)
    assert [rules.full(*block) for block in ((9, 99), (10, 0), (0, 100), (10, 100))] == [
        "",
        "messages",
        "bytes",
        "messages",
    ]
    before = [0, 40, 80, 101]
    assert [rules.fitting(size, before, 0, 3) for size in (0, 20, 21, 60, 100)] == [2, 2, 1, 1, 0]
    assert rules.fitting(0, before, 1, 3) == 3
