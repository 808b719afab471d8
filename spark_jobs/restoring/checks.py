"""Check a restore before it starts: what the new stream will have, and what keeps it from being complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jetcapture_py import text
from jetcapture_py.config.units import format_duration, format_size, format_time, moment_of
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import span_text
from spark_jobs.restoring.config import limits_of
from spark_jobs.restoring.part import MAX_SHOWN, PartSurvey, gaps_in

_SURE = 0.9
"""Share of the estimated bytes from which on `max_bytes` is certainly exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSurvey(PartSurvey):
    """The ranges' surveys added up."""

    missing: int = 0
    """Number of sequences in the gaps."""
    before: int = 0
    """Requested sequences before the first stored one that are missing."""
    after: int = 0
    """Requested sequences after the last stored one."""
    removed_before: int = 0
    """Requested sequences before the first stored one that have expired or were erased."""

    @classmethod
    def of(
        cls, parts: Iterable[PartSurvey], begins: int, ends: int, removed: Sequence[tuple[int, int]] = ()
    ) -> RestoreSurvey:
        """Add up the ranges, which are in order; sequences from `begins` to `ends` are wanted.

        The sequences `removed` have expired or were erased.
        """
        stored = [part for part in parts if part.messages or part.schedules]
        if not stored:
            return cls()
        first, last = stored[0].first, stored[-1].last
        messages, schedules = (sum(getattr(part, name) for part in stored) for name in ("messages", "schedules"))
        edges = [gaps_in(np.array([left.last, right.first]), removed) for left, right in pairwise(stored)]
        between = [pair for starts, ends, _ in edges for pair in zip(starts.tolist(), ends.tolist(), strict=True)]
        gone = sum(part.removed for part in stored) + sum(count for *_, count in edges)
        before = gaps_in(np.array([min(begins, first) - 1, first]), removed)
        subjects: Counter[str] = Counter()
        for part in stored:
            subjects.update(part.subjects)
        return cls(
            messages=messages,
            schedules=schedules,
            quarantined=sum(part.quarantined for part in stored),
            copies=sum(part.copies for part in stored),
            first=first,
            last=last,
            gaps=len(between) + sum(part.gaps for part in stored),
            shown=tuple(sorted([*between, *(gap for part in stored for gap in part.shown)])[:MAX_SHOWN]),
            oldest=min(part.oldest for part in stored),
            newest=max(part.newest for part in stored),
            later=sum(part.later for part in stored),
            subjects=subjects,
            largest=max(part.largest for part in stored),
            missing=last + 1 - first - messages - schedules - gone,
            removed=gone,
            before=max(0, first - begins) - before[2],
            removed_before=before[2],
            after=max(0, ends - last),
        )


def notes(found: RestoreSurvey) -> Iterator[str]:
    """Yield a line each about schedules that are left out, and about messages after `--to-time`."""
    if found.schedules:
        count = plural(found.schedules, "schedule", grouped=True)
        yield f"{count} left out, because the server would fire schedules again (--with-schedules restores them)"
    if found.later:
        count = plural(found.later, "message", grouped=True)
        yield (
            f"{count} with a sequence below {found.last} and a time after --to-time: "
            "the servers' clocks differ, or the server rewound the stream and the archive lacks the earlier messages"
        )


def holes(found: RestoreSurvey, stream: str) -> str | None:
    """Describe missing sequences, in one line; None if there are none."""
    lacking = [line for line, _ in _absent(found)]
    if not lacking:
        return None
    return (
        f"the archive of stream {stream} lacks {'; '.join(lacking)}. If the stream did not have them either (they were "
        "deleted, expired or replaced before they were captured), restore with --allow-holes"
    )


def drops(found: RestoreSurvey, config: Mapping[str, Any], size: int, *, consumers: bool) -> Iterator[str]:
    """Yield one line for each setting of the new stream with which it would not keep all messages.

    `size` is an estimate of their bytes.
    """
    limits = limits_of(config)
    if (age := limits.get("max_age")) and time.time_ns() - found.oldest > age:
        yield (
            f"it keeps messages for {format_duration(age / 1e9)} (max_age), but the oldest is of {_time(found.oldest)}"
        )
    if (most := limits.get("max_msgs")) and found.messages > most:
        yield f"it keeps {plural(most, 'message', grouped=True)} (max_msgs), not {found.messages:,}"
    if (most := limits.get("max_bytes")) and size * _SURE > most:
        yield f"it keeps {format_size(most)} (max_bytes), not about {text.size(size)}"
    frequent = max(found.subjects.values(), default=0)
    if (most := limits.get("max_msgs_per_subject")) and frequent > most:
        yield f"it keeps {most:,} messages per subject (max_msgs_per_subject), not {frequent:,}"
    if config.get("retention") == "interest" and not consumers:
        yield "it keeps only messages that a consumer waits for (retention: interest); name one with --consumer"


def describe(found: RestoreSurvey) -> Iterator[str]:
    """Yield lines about what will be restored."""
    yield (
        f"{plural(found.messages, 'message', grouped=True)}, sequences {found.first} to {found.last}, "
        f"from {_time(found.oldest)} to {_time(found.newest)}"
    )
    if gone := found.removed_before + found.removed:
        effect = "the stream begins later" if found.removed_before else "they become deleted messages"
        yield f"{plural(gone, 'sequence', grouped=True)} have expired or were erased; {effect}"
    for what, effect in _absent(found):
        yield f"missing: {what}; {effect}"
    if found.quarantined:
        yield f"{plural(found.quarantined, 'message', grouped=True)} from the quarantine, with their original bytes"
    if found.copies:
        yield f"{plural(found.copies, 'copy', 'copies', grouped=True)} left out"


def _absent(found: RestoreSurvey) -> Iterator[tuple[str, str]]:
    """Yield which sequences are missing, and with which effect."""
    if found.missing:
        shown = ", ".join(span_text(first, last) for first, last in found.shown)
        more = ", …" if found.gaps > len(found.shown) else ""
        count = plural(found.missing, "sequence", grouped=True)
        yield f"{count} between {found.first} and {found.last}: {shown}{more}", "they become deleted messages"
    if found.before:
        count, end = plural(found.before, "sequence", grouped=True), found.first - 1
        where = "" if found.removed_before else f": {span_text(end + 1 - found.before, end)}"
        yield f"{count} at the beginning{where}", "the stream begins later"
    if found.after:
        after = span_text(found.last + 1, found.last + found.after)
        count = plural(found.after, "sequence", grouped=True)
        yield f"{count} at the end: {after}", f"the next message gets sequence {found.last + 1}"


def _time(nanoseconds: int) -> str:
    return format_time(moment_of(nanoseconds // 1000))
