"""A KV bucket on a real server, what happened in it, and what it held, for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a bucket; times in microseconds. `clears`: all older entries of its key are gone."""

    seq: int
    time: int
    key: str
    put: bool
    value: bytes
    ttl: int | None = None
    clears: bool = False

    @property
    def ends(self) -> int | None:
        """When the entry expires."""
        return None if self.ttl is None else self.time + self.ttl


def held(entries: Iterable[Entry], moment: int, per_key: int) -> dict[str, tuple[int, bytes]]:
    """Revision and value of every key at a moment, by the rules of the server."""
    stored: dict[str, list[Entry]] = defaultdict(list)
    for new in sorted(entries, key=lambda entry: entry.seq):
        if new.time > moment:
            continue
        there = [] if new.clears else [old for old in stored[new.key] if old.ends is None or old.ends > new.time]
        stored[new.key] = [*there, new][-per_key:]
    found = {}
    for key, there in stored.items():
        left = [old for old in there if old.ends is None or old.ends > moment]
        if left and left[-1].put:
            found[key] = (left[-1].seq, left[-1].value)
    return found
