"""Check a restore before it starts: the contents of the new stream, and the obstacles to completeness."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetcapture_py import text
from jetcapture_py.config.units import format_duration, format_size, format_time, moment_of
from jetcapture_py.restoring.config import limits_of
from jetcapture_py.restoring.part import RangeContents
from jetcapture_py.text import plural
from jetcapture_py.verify.findings import span_text
from jetcapture_py.verify.ranges import Sequences

_MAX_SHOWN = 5
"""Maximum gaps listed; all are counted."""
_SURE = 0.9
"""Share of the estimated bytes from which on `max_bytes` is certainly exceeded."""
_DELETED, _LATER = "the stream has deleted messages there", "the stream begins later"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSurvey:
    """The messages to restore, and the missing ones."""

    messages: int = 0
    """Number of distinct messages to restore."""
    schedules: int = 0
    """Number of left-out schedules."""
    quarantined: int = 0
    """Messages that are only in the quarantine."""
    copies: int = 0
    """Number of left-out copies."""
    later: int = 0
    """Number of messages with a timestamp after the requested time."""
    first: int = 0
    """First stored sequence."""
    last: int = 0
    """Last stored sequence."""
    gone: int = 0
    """Requested sequences that have expired or were erased."""
    begins_later: bool = False
    """Whether some `gone` sequences are before the first stored one."""
    absent: tuple[tuple[str, str], ...] = ()
    """Other missing sequences and the effect, for each part of the range."""
    oldest: int = 0
    """Earliest timestamp in nanoseconds."""
    newest: int = 0
    """Latest timestamp in nanoseconds."""
    largest: int = 0
    """Size of the largest message with its headers, if requested."""
    subjects: Mapping[str, int] = field(default_factory=dict)
    """Number of messages by subject, if requested."""

    @classmethod
    def of(
        cls, ranges: Iterable[RangeContents | None], begins: int, ends: int, removed: Sequence[tuple[int, int]] = ()
    ) -> RestoreSurvey:
        """Add up the contents of ranges, in order; `begins` to `ends` are requested.

        The sequences `removed` have expired or were erased.
        """
        stored, counts, subjects = Sequences(), Counter[str](), Counter[str]()
        bounds: list[tuple[int, int, int]] = []
        for contents in filter(None, ranges):
            stored.add(contents.seqs)
            counts.update(contents.counts)
            subjects.update(contents.subjects)
            bounds.append((contents.oldest, contents.newest, contents.largest))
        first, last = stored.first, stored.last
        if first is None or last is None:
            return cls()
        oldest, newest, largest = zip(*bounds, strict=True)
        begins, present = min(begins, first), len(stored)
        for low, high in removed:
            if low <= last and high >= begins:
                stored.add_range(max(low, begins), min(high, last))
        return cls(
            **counts,
            first=first,
            last=last,
            gone=len(stored) - present,
            begins_later=stored.count(begins, first - 1) > 0,
            absent=tuple(_absent(stored, (begins, first, last, ends))),
            oldest=min(oldest),
            newest=max(newest),
            largest=max(largest),
            subjects=subjects,
        )


def notes(survey: RestoreSurvey) -> Iterator[str]:
    """Yield one line about left-out schedules, and one about messages after `--to-time`."""
    if survey.schedules:
        count = plural(survey.schedules, "schedule")
        yield f"{count} left out, because the server would fire schedules again (--with-schedules restores them)"
    if survey.later:
        count = plural(survey.later, "message")
        yield (
            f"{count} with a sequence below {survey.last} and a time after --to-time: "
            "the servers' clocks differ, or the server rewound the stream and the archive lacks the earlier messages"
        )


def holes(survey: RestoreSurvey, stream: str) -> str | None:
    """Describe missing sequences in one line; None without any."""
    if not survey.absent:
        return None
    lacking = "; ".join(sequences for sequences, _ in survey.absent)
    return (
        f"the archive of stream {stream} lacks {lacking}. If the stream did not have them either (they were "
        "deleted, expired or replaced before they were captured), restore with --allow-holes"
    )


def drops(survey: RestoreSurvey, config: Mapping[str, Any], size: int, *, consumers: bool) -> Iterator[str]:
    """Yield one line per setting of the new stream that would drop messages.

    `size` is the estimated size of the messages in bytes.
    """
    limits = limits_of(config)
    if (age := limits.get("max_age")) and time.time_ns() - survey.oldest > age:
        yield (
            f"it keeps messages for {format_duration(age / 1e9)} (max_age), but the oldest is of {_time(survey.oldest)}"
        )
    if (limit := limits.get("max_msgs")) and survey.messages > limit:
        yield f"it keeps {plural(limit, 'message')} (max_msgs), not {survey.messages:,}"
    if (limit := limits.get("max_bytes")) and size * _SURE > limit:
        yield f"it keeps {format_size(limit)} (max_bytes), not about {text.size(size)}"
    frequent = max(survey.subjects.values(), default=0)
    if (limit := limits.get("max_msgs_per_subject")) and frequent > limit:
        yield f"it keeps {limit:,} messages per subject (max_msgs_per_subject), not {frequent:,}"
    if config.get("retention") == "interest" and not consumers:
        yield "it keeps only messages that a consumer waits for (retention: interest); name one with --consumer"


def describe(survey: RestoreSurvey) -> Iterator[str]:
    """Yield lines about the messages to restore."""
    yield (
        f"{plural(survey.messages, 'message')}, sequences {survey.first} to {survey.last}, "
        f"from {_time(survey.oldest)} to {_time(survey.newest)}"
    )
    if survey.gone:
        effect = _LATER if survey.begins_later else _DELETED
        gone = plural(survey.gone, "sequence has expired or was erased", "sequences have expired or were erased")
        yield f"{gone}; {effect}"
    yield from (f"missing: {sequences}; {effect}" for sequences, effect in survey.absent)
    if survey.quarantined:
        yield f"{plural(survey.quarantined, 'message')} from the quarantine, with the original bytes"
    if survey.copies:
        yield f"{plural(survey.copies, 'copy', 'copies')} left out"


def _absent(stored: Sequences, span: tuple[int, int, int, int]) -> Iterator[tuple[str, str]]:
    """Yield missing sequences and the effect.

    `span` has the first requested, the first stored, the last stored and the last requested sequence.
    """
    begins, first, last, ends = span
    gaps = missing = 0
    shown: list[str] = []
    for firsts, lasts in stored.gaps(first, last):
        gaps, missing = gaps + len(firsts), missing + int((lasts - firsts + 1).sum())
        more = _MAX_SHOWN - len(shown)
        shown += map(span_text, firsts[:more].tolist(), lasts[:more].tolist())
    if missing:
        listed = ", ".join(shown) + (", …" if gaps > len(shown) else "")
        yield f"{plural(missing, 'sequence')} between {first} and {last}: {listed}", _DELETED
    removed = stored.count(begins, first - 1)
    if before := first - begins - removed:
        where = "" if removed else f": {span_text(begins, first - 1)}"
        yield f"{plural(before, 'sequence')} at the beginning{where}", _LATER
    if ends > last:
        count = plural(ends - last, "sequence")
        yield f"{count} at the end: {span_text(last + 1, ends)}", f"the next message gets sequence {last + 1}"


def _time(nanoseconds: int) -> str:
    return format_time(moment_of(nanoseconds // 1000))
