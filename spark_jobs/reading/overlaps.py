"""Which rows of objects that may share messages are first copies, found out before Spark reads them.

Names say which objects may share messages; the sequences and timestamps in them say which do. For a few objects these
are read here, and Spark then reads every object natively with at most a filter on its sequences: no shuffle. What is
too much for that, or cannot be said by sequences alone, is left to `dropDuplicates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetcapture_py.archive.layout import ObjectName, clusters

MOST_OBJECTS = 200
MOST_ROWS = 2_000_000
"""Above these, reading the identities on one machine takes longer than having Spark compare the rows."""
MOST_RANGES = 16
"""Ranges of one object; above, a filter of them costs more than it saves."""

Identities = tuple[Any, Any]
"""Sequences and timestamps of an object's rows, as int64 arrays of equal length."""
Range = tuple[int, int]


@dataclass(slots=True)
class Resolved:
    """Objects to read whole; objects of which only rows within ranges of sequences, both ends inclusive, are to be
    read; and objects that are to be compared row by row. Those that hold second copies only are in none of them."""

    whole: list[ObjectName] = field(default_factory=list)
    parts: dict[ObjectName, list[Range]] = field(default_factory=dict)
    unresolved: list[ObjectName] = field(default_factory=list)


def resolve(shared: Iterable[ObjectName], identities: Callable[[Sequence[ObjectName]], list[Identities]]) -> Resolved:
    """Divide objects that may share messages; `identities` reads those of some objects."""
    names = list(shared)
    if len(names) > MOST_OBJECTS or sum(name.rows for name in names) > MOST_ROWS:
        return Resolved(unresolved=names)
    known = dict(zip(names, identities(names), strict=True))
    resolved = Resolved()
    for cluster in clusters(names):
        cluster.sort(key=lambda name: name.rows, reverse=True)  # the largest stay whole, so that there are fewer parts
        kept = _first_copies([known[name] for name in cluster])
        if kept is None:
            resolved.unresolved += cluster
            continue
        for name, ranges in zip(cluster, kept, strict=True):
            if ranges is None:
                resolved.whole.append(name)
            elif ranges:
                resolved.parts[name] = ranges
    return resolved


def _first_copies(objects: Sequence[Identities]) -> list[list[Range] | None] | None:
    """For each object the ranges of sequences that earlier ones do not have; None for all of it.

    None instead of the list when ranges cannot say it: a sequence has two timestamps, an object holds a message twice
    or in several rows, or there would be too many ranges.
    """
    counts = [len(seqs) for seqs, _ in objects]
    seqs = np.concatenate([seqs for seqs, _ in objects])
    times = np.concatenate([times for _, times in objects])
    owners = np.repeat(np.arange(len(objects)), counts)
    order = np.lexsort((owners, seqs))
    seqs, times, owners = seqs[order], times[order], owners[order]
    again = seqs[1:] == seqs[:-1]
    if (again & ((times[1:] != times[:-1]) | (owners[1:] == owners[:-1]))).any():
        return None
    first = np.ones(len(seqs), bool)
    first[1:] = ~again
    found: list[list[Range] | None] = []
    for owner, count in enumerate(counts):
        own = owners == owner
        ranges = _ranges(seqs[own], first[own])
        if len(ranges) > MOST_RANGES:
            return None
        found.append(None if first[own].sum() == count else ranges)
    return found


def _ranges(seqs: Any, kept: Any) -> list[Range]:
    """The runs of kept sequences among an object's own, which are sorted."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    return [(int(seqs[start]), int(seqs[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)]
