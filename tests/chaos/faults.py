"""What can go wrong. A fault breaks one thing, holds it for a while that it draws from the seed, and mends it.

Faults of one group run one after another, those of different groups at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.world import World

Inject = Callable[[World, random.Random], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault by its name, `group.what`."""

    name: str
    inject: Inject
    needs: Callable[[World], bool]

    @property
    def group(self) -> str:
        """Which other faults it cannot meet."""
        return self.name.partition(".")[0]


FAULTS: dict[str, Fault] = {}


def fault(name: str, needs: Callable[[World], bool] = lambda _: True) -> Callable[[Inject], Inject]:
    """Register a fault; `needs` says in which worlds it can happen."""

    def register(inject: Inject) -> Inject:
        FAULTS[name] = Fault(name=name, inject=inject, needs=needs)
        return inject

    return register


from tests.chaos import faults_jetstream, faults_places, faults_processes  # noqa: E402  they register theirs

__all__ = ["FAULTS", "Fault", "fault", "faults_jetstream", "faults_places", "faults_processes"]
