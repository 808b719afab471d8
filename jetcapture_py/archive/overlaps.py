"""Find copies among objects that may share messages before they are read.

Names show which objects may share messages; the sequences and timestamps in them show which do. For a few objects these
are read here, and an engine then reads every object with at most a filter on its sequences: no shuffle. Of larger sets,
and of copies that sequence ranges cannot describe, it compares the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.archive.layout import Bundles, ObjectName, clusters

MAX_OBJECTS = 200
MAX_ROWS = 2_000_000
"""Above these limits, reading the identities on one machine takes longer than having Spark compare the rows."""
MAX_RANGES = 16
"""Maximum ranges of one object; with more, the filter costs more than it saves."""

Identities = tuple[Seqs, Micros]
"""Sequences and timestamps of an object's rows."""
Range = tuple[int, int]


@dataclass(slots=True)
class Resolved:
    """Objects to read completely, objects to read in sequence ranges (inclusive), and objects to compare row by row.
    Objects with nothing but copies are in none of them."""

    whole: list[ObjectName] = field(default_factory=list)
    parts: dict[ObjectName, list[Range]] = field(default_factory=dict)
    unresolved: list[ObjectName] = field(default_factory=list)


def resolve(
    shared: Iterable[ObjectName],
    identities: Callable[[Sequence[ObjectName]], list[Identities]],
    bundles: Bundles | None = None,
) -> Resolved:
    """Divide objects that may share messages; `identities` reads the objects' sequences and timestamps."""
    names = list(shared)
    if len(names) > MAX_OBJECTS or sum(name.rows for name in names) > MAX_ROWS:
        return Resolved(unresolved=names)
    rows = dict(zip(names, identities(names), strict=True))
    resolved = Resolved()
    for cluster in clusters(names, bundles):
        cluster.sort(key=lambda name: name.rows, reverse=True)  # keep the largest whole: fewer ranges
        first_copies = _first_copies([rows[name] for name in cluster])
        if first_copies is None:
            resolved.unresolved += cluster
            continue
        for name, ranges in zip(cluster, first_copies, strict=True):
            if ranges is None:
                resolved.whole.append(name)
            elif ranges:
                resolved.parts[name] = ranges
    return resolved


def _first_copies(objects: Sequence[Identities]) -> list[list[Range] | None] | None:
    """Return each object's sequence ranges that earlier objects lack; None for the whole object.

    Returns None instead of the list if ranges cannot describe the copies: a sequence has two timestamps, an object has
    a message twice or in several rows, or there would be too many ranges.
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
    parts: list[list[Range] | None] = []
    for owner, count in enumerate(counts):
        rows = owners == owner
        ranges = _ranges(seqs[rows], first[rows])
        if len(ranges) > MAX_RANGES:
            return None
        parts.append(None if first[rows].sum() == count else ranges)
    return parts


def _ranges(seqs: Seqs, kept: Mask) -> list[Range]:
    """Return the runs of `kept` sequences; `seqs` is sorted."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False])).astype(np.int8)))
    return [(int(seqs[start]), int(seqs[end - 1])) for start, end in zip(edges[::2], edges[1::2], strict=True)]
