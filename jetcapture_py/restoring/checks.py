"""Check a restore before it starts: what the new stream will have, and what keeps it from being complete."""

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
"""Maximum gaps that are listed; all are counted."""
_SURE = 0.9
"""Share of the estimated bytes from which on `max_bytes` is certainly exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSurvey:
    """What will be restored, and what is missing."""

    messages: int = 0
    """Number of distinct messages to restore."""
    schedules: int = 0
    """Number of schedules that are left out."""
    quarantined: int = 0
    """Messages that are only in the quarantine."""
    copies: int = 0
    """Rows left out because another one has the same message."""
    later: int = 0
    """Number of messages with a timestamp after the requested time."""
    first: int = 0
    """First stored sequence."""
    last: int = 0
    """Last stored sequence."""
    removed: int = 0
    """Sequences between them that are not stored, and have expired or were erased."""
    gaps: int = 0
    """Number of other gaps between them."""
    missing: int = 0
    """Number of sequences in the gaps."""
    shown: tuple[tuple[int, int], ...] = ()
    """First and last sequence of the first gaps."""
    before: int = 0
    """Requested sequences before the first stored one that are missing."""
    removed_before: int = 0
    """Requested sequences before the first stored one that have expired or were erased."""
    after: int = 0
    """Requested sequences after the last stored one."""
    oldest: int = 0
    """Earliest timestamp in nanoseconds."""
    newest: int = 0
    """Latest timestamp in nanoseconds."""
    largest: int = 0
    """Bytes of the largest message with its headers, if it was sought."""
    subjects: Mapping[str, int] = field(default_factory=dict)
    """Number of messages by subject, if they were counted."""

    @classmethod
    def of(
        cls, ranges: Iterable[RangeContents | None], begins: int, ends: int, removed: Sequence[tuple[int, int]] = ()
    ) -> RestoreSurvey:
        """Add up the contents of ranges, in order; sequences from `begins` to `ends` are wanted.

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
        begins, here = min(begins, first), len(stored)
        for low, high in removed:
            if low <= last and high >= begins:
                stored.add_range(max(low, begins), min(high, last))
        removed_before = stored.count(begins, first - 1)
        gaps = missing = 0
        shown: list[tuple[int, int]] = []
        for firsts, lasts in stored.gaps(first, last):
            gaps, missing = gaps + len(firsts), missing + int((lasts - firsts + 1).sum())
            more = _MAX_SHOWN - len(shown)
            shown += zip(firsts[:more].tolist(), lasts[:more].tolist(), strict=True)
        return cls(
            **counts,
            first=first,
            last=last,
            removed=len(stored) - here - removed_before,
            gaps=gaps,
            missing=missing,
            shown=tuple(shown),
            before=first - begins - removed_before,
            removed_before=removed_before,
            after=max(0, ends - last),
            oldest=min(oldest),
            newest=max(newest),
            largest=max(largest),
            subjects=subjects,
        )


def notes(survey: RestoreSurvey) -> Iterator[str]:
    """Yield a line each about schedules that are left out, and about messages after `--to-time`."""
    if survey.schedules:
        count = plural(survey.schedules, "schedule", grouped=True)
        yield f"{count} left out, because the server would fire schedules again (--with-schedules restores them)"
    if survey.later:
        count = plural(survey.later, "message", grouped=True)
        yield (
            f"{count} with a sequence below {survey.last} and a time after --to-time: "
            "the servers' clocks differ, or the server rewound the stream and the archive lacks the earlier messages"
        )


def holes(survey: RestoreSurvey, stream: str) -> str | None:
    """Describe missing sequences, in one line; None if there are none."""
    lacking = [line for line, _ in _absent(survey)]
    if not lacking:
        return None
    return (
        f"the archive of stream {stream} lacks {'; '.join(lacking)}. If the stream did not have them either (they were "
        "deleted, expired or replaced before they were captured), restore with --allow-holes"
    )


def drops(survey: RestoreSurvey, config: Mapping[str, Any], size: int, *, consumers: bool) -> Iterator[str]:
    """Yield one line for each setting of the new stream with which it would not keep all messages.

    `size` is an estimate of their bytes.
    """
    limits = limits_of(config)
    if (age := limits.get("max_age")) and time.time_ns() - survey.oldest > age:
        yield (
            f"it keeps messages for {format_duration(age / 1e9)} (max_age), but the oldest is of {_time(survey.oldest)}"
        )
    if (most := limits.get("max_msgs")) and survey.messages > most:
        yield f"it keeps {plural(most, 'message', grouped=True)} (max_msgs), not {survey.messages:,}"
    if (most := limits.get("max_bytes")) and size * _SURE > most:
        yield f"it keeps {format_size(most)} (max_bytes), not about {text.size(size)}"
    frequent = max(survey.subjects.values(), default=0)
    if (most := limits.get("max_msgs_per_subject")) and frequent > most:
        yield f"it keeps {most:,} messages per subject (max_msgs_per_subject), not {frequent:,}"
    if config.get("retention") == "interest" and not consumers:
        yield "it keeps only messages that a consumer waits for (retention: interest); name one with --consumer"


def describe(survey: RestoreSurvey) -> Iterator[str]:
    """Yield lines about what will be restored."""
    yield (
        f"{plural(survey.messages, 'message', grouped=True)}, sequences {survey.first} to {survey.last}, "
        f"from {_time(survey.oldest)} to {_time(survey.newest)}"
    )
    if gone := survey.removed_before + survey.removed:
        effect = "the stream begins later" if survey.removed_before else "they become deleted messages"
        yield f"{plural(gone, 'sequence', grouped=True)} have expired or were erased; {effect}"
    for what, effect in _absent(survey):
        yield f"missing: {what}; {effect}"
    if survey.quarantined:
        yield f"{plural(survey.quarantined, 'message', grouped=True)} from the quarantine, with their original bytes"
    if survey.copies:
        yield f"{plural(survey.copies, 'copy', 'copies', grouped=True)} left out"


def _absent(survey: RestoreSurvey) -> Iterator[tuple[str, str]]:
    """Yield which sequences are missing, and with which effect."""
    if survey.missing:
        shown = ", ".join(span_text(first, last) for first, last in survey.shown)
        more = ", …" if survey.gaps > len(survey.shown) else ""
        count = plural(survey.missing, "sequence", grouped=True)
        yield f"{count} between {survey.first} and {survey.last}: {shown}{more}", "they become deleted messages"
    if survey.before:
        count, end = plural(survey.before, "sequence", grouped=True), survey.first - 1
        where = "" if survey.removed_before else f": {span_text(end + 1 - survey.before, end)}"
        yield f"{count} at the beginning{where}", "the stream begins later"
    if survey.after:
        after = span_text(survey.last + 1, survey.last + survey.after)
        count = plural(survey.after, "sequence", grouped=True)
        yield f"{count} at the end: {after}", f"the next message gets sequence {survey.last + 1}"


def _time(nanoseconds: int) -> str:
    return format_time(moment_of(nanoseconds // 1000))
