"""Distinguish a recreated stream's incarnations, and join those that continue one another.

A stream that was restored, and a mirror that was created again, have another creation time than before, but continue
the sequences. A stream that was created again starts them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jetcapture_py.config.units import microseconds_of
from jetcapture_py.errors import JetcaptureError

Bounds = Mapping[str, tuple[int, int]]
"""The first and the last sequence of each incarnation, by its creation time."""


def moment(created: str) -> datetime:
    """Parse a creation time."""
    return datetime.fromisoformat(created)


def choose(incarnations: Sequence[str], wanted: str | None, stream: str) -> str:
    """Return the only incarnation whose creation time begins with `wanted`; the last one for None, "" without any.

    Raises JetcaptureError.
    """
    if wanted is None:
        return incarnations[-1] if incarnations else ""
    found = [each for each in incarnations if each.startswith(wanted)]
    if len(found) != 1:
        known = ", ".join(incarnations) or "none is known"
        raise JetcaptureError(
            f"--created {wanted}: {len(found)} incarnations of stream {stream} were created then; there are: {known}"
        )
    return found[0]


def divide(created: Sequence[str], seqs: Any, times: Any) -> Bounds:
    """Return the bounds in an object with messages of several incarnations; `times` in microseconds."""
    found, until = {}, 1 << 62
    for each in sorted(created, key=moment, reverse=True):
        since = microseconds_of(moment(each))
        if len(own := seqs[(times >= since) & (times < until)]):
            found[each] = int(np.min(own)), int(np.max(own))
        until = since
    return found


def unite(objects: Iterable[Bounds], chosen: str) -> tuple[tuple[str, ...], int]:
    """Return the incarnation `chosen` and those that it continues, oldest first, and the first sequence of all older
    ones: one that begins after all sequences of the previous one continues it."""
    known: dict[str, tuple[int, int]] = {}
    for bounds in objects:
        for each, (low, high) in bounds.items():
            lowest, highest = known.get(each, (low, high))
            known[each] = min(low, lowest), max(high, highest)
    if chosen not in known:
        return (chosen,), 1 << 62
    ordered = sorted((each for each in known if moment(each) <= moment(chosen)), key=moment)
    start = len(ordered) - 1
    while start and known[ordered[start - 1]][1] < known[ordered[start]][0]:
        start -= 1
    return tuple(ordered[start:]), min(known[each][0] for each in ordered)


def span(created: Sequence[str], own: Sequence[str]) -> tuple[int, int] | None:
    """Return the time of the incarnations `own` in microseconds, for an object that also has messages of others."""
    if set(created) <= set(own):
        return None
    began, ended = moment(own[0]), moment(own[-1])
    later = [each for each in map(moment, created) if each > ended]
    return microseconds_of(began), microseconds_of(min(later)) if later else 1 << 62
