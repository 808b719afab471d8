"""Reasons of a quarantine with counts, times, subjects and an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask
from jetcapture_py.config.units import format_time
from jetcapture_py.text import escaped, one_line, plural

_QUOTED, _NUMBERS = r"\"[^\"]*\"|'[^']*'", "[0-9]+"
"""Parts in which errors of one kind differ."""
COLUMNS = (layout.SEQ, layout.TIMESTAMP, layout.SUBJECT, layout.STAGE, layout.ERROR)
"""Columns to read of each message."""

_MAX_SUBJECTS = 10_000
"""Maximum distinct subjects counted per reason."""
_MAX_SHOWN = 5
"""Maximum subjects shown per reason."""


def alike(errors: pa.Array) -> pa.Array:
    """Normalize errors: quoted text becomes "…", and numbers N."""
    return pc.replace_substring_regex(pc.replace_substring_regex(errors, _QUOTED, '"…"'), _NUMBERS, "N")


def matching(rows: pa.Table, texts: Sequence[str]) -> Mask:
    """Return a mask of the rows whose reason, `stage: error` as stored or normalized, contains a text."""
    stages, errors = (rows[name].combine_chunks() for name in (layout.STAGE, layout.ERROR))
    matched = pa.array([not texts] * rows.num_rows, pa.bool_())
    for reasons in (errors, alike(errors)) if texts else ():
        reasons = pc.binary_join_element_wise(stages, reasons, ": ")
        for text in texts:
            matched = pc.or_(matched, pc.fill_null(pc.match_substring(reasons, text), False))  # noqa: FBT003
    mask: Mask = matched.to_numpy(zero_copy_only=False)
    return mask


@dataclass(slots=True, kw_only=True)
class ReasonSummary:
    """Messages with the same reason: errors that differ only in numbers or quoted text count as one."""

    stage: str
    error: str
    """The normalized error."""
    messages: int = 0
    first: datetime = field(default=datetime.max)
    """The earliest timestamp, UTC."""
    last: datetime = field(default=datetime.min)
    """The latest timestamp, UTC."""
    subjects: Counter[str] = field(default_factory=Counter)
    """Messages by subject; of too many subjects, only some."""
    seq: int = 0
    """Sequence of the example: the lowest one."""
    example: str = ""
    """The example's error."""

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values, with the most frequent subjects."""
        return {
            "stage": self.stage,
            "error": self.error,
            "messages": self.messages,
            "first": format_time(self.first),
            "last": format_time(self.last),
            "subjects": dict(self.subjects.most_common(_MAX_SHOWN)),
            "subject_count": len(self.subjects),
            "example": {"sequence": self.seq, "error": self.example},
        }

    def lines(self) -> Iterator[str]:
        yield f"{plural(self.messages, 'message')}: {one_line(self.stage)}: {one_line(self.error)}"
        yield f"    {format_time(self.first)} to {format_time(self.last)}"
        shown = [f"{escaped(name)} {count:,}" for name, count in self.subjects.most_common(_MAX_SHOWN)]
        more = len(self.subjects) - len(shown)
        shown += [f"{plural(more, 'other subject')}"] if more else []
        yield f"    {', '.join(shown)}"
        yield f"    such as {self.seq}: {one_line(self.example)}"


class ReasonCounter:
    """Counts messages by reason."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], ReasonSummary] = {}

    def add(self, rows: pa.Table) -> None:
        """Add messages with `COLUMNS`."""
        texts = {name: pc.fill_null(rows[name].cast(pa.string()), "") for name in COLUMNS[2:]}
        table = pa.table({name: rows[name] for name in COLUMNS[:2]} | texts).sort_by(layout.SEQ)
        table = table.append_column("reason", alike(table[layout.ERROR]))
        time = layout.TIMESTAMP
        grouped = table.group_by([layout.STAGE, "reason", layout.SUBJECT], use_threads=False).aggregate(
            [(layout.SEQ, "count"), (layout.SEQ, "first"), (layout.ERROR, "first"), (time, "min"), (time, "max")]
        )
        for row in grouped.to_pylist():
            place = row[layout.STAGE], row["reason"]
            reason = self._reasons.setdefault(place, ReasonSummary(stage=place[0], error=place[1]))
            count, seq, subject = row[f"{layout.SEQ}_count"], row[f"{layout.SEQ}_first"], row[layout.SUBJECT]
            if not reason.messages or seq < reason.seq:
                reason.seq, reason.example = seq, row[f"{layout.ERROR}_first"]
            times = [row[f"{time}_{end}"] for end in ("min", "max")]
            if reason.messages:
                times += [reason.first, reason.last]
            reason.first, reason.last = min(times), max(times)
            reason.messages += count
            if subject in reason.subjects or len(reason.subjects) < _MAX_SUBJECTS:
                reason.subjects[subject] += count

    def summaries(self) -> list[ReasonSummary]:
        """Return the reasons, the most frequent first."""
        return sorted(self._reasons.values(), key=lambda reason: (-reason.messages, reason.stage, reason.error))
