"""Scale-in and scale-out under load; `python -m tests.scaling` does it with as many replicas as are wanted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.scaling import replaced, scaled


@pytest.mark.exhaustive
def test_a_scale_in_and_out_loses_and_delays_nothing(tmp_path: Path) -> None:
    outcome = asyncio.run(scaled(tmp_path, 10, 3, rate=500))
    assert outcome.clean, outcome
    assert outcome.published > 0


@pytest.mark.exhaustive
def test_replicas_that_are_replaced_one_by_one_lose_and_delay_nothing(tmp_path: Path) -> None:
    outcome = asyncio.run(replaced(tmp_path, 2, rate=500, other=sys.executable))
    assert outcome.clean, outcome
