"""Storms that a capture has to survive, and how long they last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.trial import Outcome, Storm, trial
from tests.chaos.world import Shape, World

QUICK: dict[str, Any] = {"ack_wait": 1.0, "max_age": 0.5, "hold": 0.3}
CLUSTER = ("server.kill_leader", "server.step_down", "server.lose_quorum")
S3 = tuple(name for name in FAULTS if name.startswith("store.") and name not in ("store.unwritable", "store.full"))
HISTORY = ("consumer.delete", "stream.delete_messages", "stream.purge", "stream.recreate")


def survive(directory: Path, storm: Storm, shape: Shape, seed: int = 20261121) -> Outcome:
    """The outcome of a storm, after which publishing goes on until enough is published, however slow the machine is."""

    async def long_enough(world: World) -> None:
        await storm(world)
        while world.publisher.published - int(world.ledger.excused.sum()) <= 1000:
            world.check_alive()
            await asyncio.sleep(0.1)

    outcome = asyncio.run(trial(directory, shape, seed, long_enough, settle=600))
    assert outcome.problems == []
    assert outcome.verdict.messages > 1000
    return outcome
