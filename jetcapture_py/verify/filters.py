"""Determine which filter subjects selected which messages, from the watermark's history of the consumer's filters.

Around a change of filters, the server does not say which of them it used for a message: the earlier ones, or the later
ones. There, messages that are archived narrow down where the change was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive.watermark import Filters, Watermark, merge_filters
from jetcapture_py.config.subjects import covers, overlaps
from jetcapture_py.config.subjects import matches as selects
from jetcapture_py.jetstream.consumer import ConsumerState, filters_of

_END = 1 << 62
Subjects = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """Filters that may have been in force in a part of a stretch."""

    subjects: Subjects
    """Empty: all."""
    first: int
    """They were not in force before this sequence."""
    delivered: int = _END
    """Of the messages after this sequence, only those that later filters match as well can have been delivered."""
    low: int = 0
    """Up to this sequence, an archived message proves that earlier filters were in force."""
    high: int = _END
    """From this sequence on, an archived message proves that later ones were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A range of sequences, and the filters that may have selected its messages."""

    first: int
    last: int
    candidates: tuple[Candidate, ...]
    """In order of time. With a single one, it is certain."""
    telling: bool = True
    """Whether archived messages show which filters selected them: no other consumer and no repair stored any."""

    @property
    def subjects(self) -> Subjects:
        """Subjects that every message has that may have been selected, as a consumer can filter them; empty: all."""
        every = {subject for candidate in self.candidates for subject in candidate.subjects or (">",)}
        own = [one for one in every if not any(covers(other, one) for other in every if other != one)]
        ambiguous = any(overlaps(one, other) for one in own for other in own if one != other)
        return () if ambiguous or ">" in own else tuple(sorted(own))

    def matches(self, subjects: pa.BinaryArray) -> list[Any]:
        """Return a mask for every candidate: which messages its filters match."""
        distinct = subjects.dictionary_encode()
        names = [name.decode(errors="surrogateescape") for name in distinct.dictionary.to_pylist()]
        indices = distinct.indices.to_numpy()
        tables = (np.array([selects(name, one.subjects) for name in names], np.bool_) for one in self.candidates)
        return [table[indices] for table in tables]

    def narrow(self, seqs: Any, archived: Any, matches: Sequence[Any]) -> None:
        """Narrow down which candidates were in force where; `archived` masks the messages `seqs` that are archived."""
        stack = np.stack(matches)
        archived = archived & stack.any(0)
        seqs, stack = seqs[archived], stack[:, archived]
        earliest, latest = stack.argmax(0), len(stack) - 1 - stack[::-1].argmax(0)
        for index, candidate in enumerate(self.candidates):
            candidate.low = max(candidate.low, int(seqs[latest < index].max(initial=0)))
            candidate.high = min(candidate.high, int(seqs[earliest > index].min(initial=_END)))

    def classify(self, seqs: Any, matches: Sequence[Any]) -> tuple[Any, Any]:
        """Return two masks: the messages that were selected, and those that may have been, or may have been skipped."""
        begun = [seqs >= one.first for one in self.candidates]
        possible = [
            mask & (seqs > one.low) & (seqs < one.high) for mask, one in zip(begun, self.candidates, strict=True)
        ]
        contradictory = ~np.logical_or.reduce(possible)
        possible = [mask | (contradictory & other) for mask, other in zip(possible, begun, strict=True)]
        pairs = list(zip(possible, matches, self.candidates, strict=True))
        selected = np.logical_and.reduce([~mask | match for mask, match, _ in pairs])
        delivered = [mask & match & (seqs <= one.delivered) for mask, match, one in pairs]
        return selected, ~selected & np.logical_or.reduce(delivered)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterHistory:
    """The filters of a stream's consumers over time."""

    consumers: tuple[tuple[Stretch, ...], ...]
    """Of every consumer of the name, the current one first: its stretches, from sequence 1 on."""
    unknown: int = 0
    """Up to this sequence, nothing says which filters were in force; they are taken for the first ones known."""

    @classmethod
    def of(cls, mark: Watermark | None, consumer: ConsumerState) -> FilterHistory:
        """Read the history from the watermark of the stream's incarnation, None without one, and the consumer."""
        subjects = tuple(sorted(filters_of(consumer.config)))
        now = Filters(after=consumer.delivered, subjects=subjects, consumer=consumer.created)
        entries = [now] if mark is None else [*merge_filters(mark, now, consumer.delivered)]
        ends = [index + 1 for index, entry in enumerate(entries) if entry.until is not None]
        groups = [entries[start:end] for start, end in pairwise([0, *ends, len(entries)])]
        unknown = max(own[0].after if own[0].subjects else 0 for own in groups)
        parts = tuple(tuple(_stretches(own, telling=len(groups) == 1)) for own in groups[::-1])
        return cls(consumers=parts, unknown=unknown)

    @property
    def changed(self) -> bool:
        return len({one.subjects for own in self.consumers for part in own for one in part.candidates}) > 1

    def lines(self) -> Iterator[str]:
        """Yield which subjects were selected where."""
        for own in self.consumers[::-1]:
            for part in own:
                names = " or ".join(", ".join(one.subjects) or "all subjects" for one in part.candidates)
                yield f"{part.first} to {part.last}: {names}" if part.last < _END else f"from {part.first}: {names}"


def _stretches(entries: Sequence[Filters], *, telling: bool) -> Iterator[Stretch]:
    """Yield the stretches of one consumer."""
    ends = [*(entry.after for entry in entries[1:]), entries[-1].until or _END]
    first = 1
    before: Filters | None = None
    for sure, group in groupby(zip(entries, ends, strict=True), key=lambda pair: pair[0].sure or pair[0] is entries[0]):
        pairs = list(group)
        if sure:
            for entry, end in pairs:
                before = entry
                if first <= end:
                    yield Stretch(first=first, last=end, candidates=(Candidate(subjects=entry.subjects, first=first),))
                    first = end + 1
            continue
        candidates = [Candidate(subjects=before.subjects, first=first)] if before else []
        for subjects, same in groupby((entry for entry, _ in pairs), key=lambda entry: entry.subjects):
            own = list(same)
            if candidates:
                candidates[-1].delivered = own[-1].after
            candidates.append(Candidate(subjects=subjects, first=own[0].after + 1))
        if first <= (last := pairs[-1][1]):
            own_only = telling and not any(entry.repaired for entry, _ in pairs)
            yield Stretch(first=first, last=last, candidates=tuple(candidates), telling=own_only)
            first = last + 1
