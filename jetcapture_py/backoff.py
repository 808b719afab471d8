"""Exponential backoff."""

from __future__ import annotations

import random
from collections.abc import Iterator


def delays(first: float, longest: float) -> Iterator[float]:
    """Yield seconds to wait between attempts, endlessly: doubling from `first` to `longest`, with jitter."""
    delay = first
    while True:
        yield delay * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
        delay = min(delay * 2, longest)
