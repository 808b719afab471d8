"""Check a restore before it starts: what the new stream will have, and what keeps it from being complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jetcapture_py.config.units import format_duration, format_size, format_time, moment_of
from jetcapture_py.text import plural
from spark_jobs.restoring.config import limits_of
from spark_jobs.restoring.part import MAX_SHOWN, PartSurvey

_SURE = 0.9
"""Share of the estimated bytes from which on `max_bytes` is certainly exceeded."""


@dataclass(slots=True)
class RestoreSurvey:
    """The ranges' surveys added up. Attributes without a description are those of `PartSurvey`."""

    messages: int = 0
    quarantined: int = 0
    copies: int = 0
    first: int = 0
    last: int = 0
    missing: int = 0
    """Number of sequences in the gaps."""
    gaps: int = 0
    before: int = 0
    """Requested sequences before the first stored one."""
    after: int = 0
    """Requested sequences after the last stored one."""
    shown: list[tuple[int, int]] = field(default_factory=list)
    oldest: int = 0
    newest: int = 0
    most_of_a_subject: int = 0
    """Messages of the subject with the most."""
    largest: int = 0

    @classmethod
    def of(cls, parts: Iterable[PartSurvey], begins: int, ends: int) -> RestoreSurvey:
        """Add up the ranges, which are in order; sequences from `begins` to `ends` are wanted."""
        found = cls()
        subjects: Counter[str] = Counter()
        for part in parts:
            if not part.messages:
                continue
            if found.messages and part.first > found.last + 1:
                found.gaps += 1
                found.shown.append((found.last + 1, part.first - 1))
            found.first = found.first or part.first
            found.oldest = min(found.oldest or part.oldest, part.oldest)
            found.newest = max(found.newest, part.newest)
            found.messages += part.messages
            found.quarantined += part.quarantined
            found.copies += part.copies
            found.gaps += part.gaps
            found.shown += part.shown
            found.last = part.last
            found.largest = max(found.largest, part.largest)
            subjects.update(part.subjects)
        found.shown = found.shown[:MAX_SHOWN]
        found.missing = found.last + 1 - found.first - found.messages
        found.before = max(0, found.first - begins)
        found.after = max(0, ends - found.last)
        found.most_of_a_subject = max(subjects.values(), default=0)
        return found


def holes(found: RestoreSurvey, stream: str) -> str | None:
    """Describe missing sequences, in one line; None if there are none."""
    lacking = [text for text, _ in _absent(found)]
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
        yield f"it keeps {format_size(most)} (max_bytes), not about {format_size(size)}"
    if (most := limits.get("max_msgs_per_subject")) and found.most_of_a_subject > most:
        yield f"it keeps {most:,} messages per subject (max_msgs_per_subject), not {found.most_of_a_subject:,}"
    if config.get("retention") == "interest" and not consumers:
        yield "it keeps only messages that a consumer waits for (retention: interest); name one with --consumer"


def describe(found: RestoreSurvey) -> Iterator[str]:
    """Yield lines about what will be restored."""
    yield (
        f"{plural(found.messages, 'message', grouped=True)}, sequences {found.first} to {found.last}, "
        f"from {_time(found.oldest)} to {_time(found.newest)}"
    )
    for text, effect in _absent(found):
        yield f"missing: {text}; {effect}"
    if found.quarantined:
        yield f"{plural(found.quarantined, 'message', grouped=True)} from the quarantine, with their original bytes"
    if found.copies:
        yield f"{plural(found.copies, 'copy', 'copies', grouped=True)} left out"


def _absent(found: RestoreSurvey) -> Iterator[tuple[str, str]]:
    """Yield which sequences are missing, and with which effect."""
    if found.missing:
        shown = ", ".join(_text(first, last) for first, last in found.shown)
        more = ", …" if found.gaps > len(found.shown) else ""
        count = plural(found.missing, "sequence", grouped=True)
        yield f"{count} between {found.first} and {found.last}: {shown}{more}", "they become deleted messages"
    if found.before:
        before = _text(found.first - found.before, found.first - 1)
        yield f"{plural(found.before, 'sequence', grouped=True)} at the beginning: {before}", "the stream begins later"
    if found.after:
        after = _text(found.last + 1, found.last + found.after)
        count = plural(found.after, "sequence", grouped=True)
        yield f"{count} at the end: {after}", f"the next message gets sequence {found.last + 1}"


def _text(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _time(nanoseconds: int) -> str:
    return format_time(moment_of(nanoseconds // 1000))
