"""Summarize a compaction or its dry run, for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jetcapture_py.compaction.unit import Failed, Merged, Outcome, Skipped
from jetcapture_py.text import escaped, plural, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Effect on one unit: its objects, their bytes, and the number of removed duplicate rows. `bundle` is "" for the
    objects of one key."""

    key: str | None
    bundle: str
    bucket: str
    objects_before: int
    objects_after: int
    bytes_before: int
    bytes_after: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A unit that would be merged: the objects to read, and their bytes."""

    key: str | None
    bundle: str
    bucket: str
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Effect on all selected objects; a dry run has only `planned` units.

    `left` counts the groups that were not compacted, by reason; `errors` are failures, which another run may fix.
    """

    dry_run: bool
    objects_before: int
    objects_after: int
    bytes_before: int
    bytes_after: int
    duplicates: int
    changes: tuple[Change, ...]
    planned: tuple[Planned, ...]
    left: Mapping[str, int]
    errors: tuple[str, ...]


def summarize(
    objects: int,
    size: int,
    outcomes: Sequence[Outcome],
    removed: Collection[str],
    errors: Sequence[str],
    dry_run: bool,
) -> Summary:
    """Summarize the outcomes for `objects` chosen objects of `size` bytes in total.

    `removed` are paths, `errors` are failures to remove.
    """
    changes, planned = [], []
    for merged in (outcome for outcome in outcomes if isinstance(outcome, Merged)):
        bucket = f"{datetime.fromtimestamp(merged.bucket, UTC):%Y-%m-%dT%H:%M:%SZ}"
        gone = [removal.target.size for removal in merged.removals if removal.target.path in removed]
        if dry_run:
            unit = Planned(
                key=merged.key, bundle=merged.bundle, bucket=bucket, objects=merged.objects, bytes=merged.size
            )
            planned.append(unit)
        elif gone or merged.written:
            change = Change(
                key=merged.key,
                bundle=merged.bundle,
                bucket=bucket,
                objects_before=merged.objects,
                objects_after=merged.objects + len(merged.written) - len(gone),
                bytes_before=merged.size,
                bytes_after=merged.size + sum(size for _, size in merged.written) - sum(gone),
                duplicates=merged.duplicates if gone else 0,
            )
            changes.append(change)
    changes.sort(key=_place)
    planned.sort(key=_place)
    return Summary(
        dry_run=dry_run,
        objects_before=objects,
        objects_after=objects + sum(change.objects_after - change.objects_before for change in changes),
        bytes_before=size,
        bytes_after=size + sum(change.bytes_after - change.bytes_before for change in changes),
        duplicates=sum(change.duplicates for change in changes),
        changes=tuple(changes),
        planned=tuple(planned),
        left=dict(Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Skipped))),
        errors=(*(outcome.reason for outcome in outcomes if isinstance(outcome, Failed)), *errors),
    )


def _place(of: Change | Planned) -> tuple[str, str, str]:
    return of.key or "", of.bundle, of.bucket


def report(stream: str, summary: Summary) -> Iterator[str]:
    """Yield the summary as lines of text; for a dry run also one line per unit."""
    for unit in summary.planned:
        key = "no key" if unit.key is None else f'key "{escaped(unit.key)}"'
        key = f"bundle {unit.bundle}" if unit.bundle else key
        yield f"{key}, {unit.bucket}: {plural(unit.objects, 'object')}, {size(unit.bytes)}"
    yield f"{stream}: {total(summary)}"
    for reason, count in summary.left.items():
        yield f"{plural(count, 'group')} skipped: {reason}"


def total(summary: Summary) -> str:
    """Return the effect on all objects in one line."""
    before, after = map(size, (summary.bytes_before, summary.bytes_after))
    old, new = (plural(count, "object") for count in (summary.objects_before, summary.objects_after))
    if summary.dry_run:
        count = sum(unit.objects for unit in summary.planned)
        bytes_ = size(sum(unit.bytes for unit in summary.planned))
        to_merge = f"{plural(count, 'object')}, {bytes_}, in {plural(len(summary.planned), 'unit')}"
        return f"{old}, {before}: would read {to_merge}"
    duplicates = plural(summary.duplicates, "duplicate row")
    return f"{old}, {before} → {new}, {after}; {duplicates} removed"


def waiting_line(objects: int) -> str:
    """Say that replaced objects still exist."""
    return f"{plural(objects, 'replaced object')} left for readers until a later run"


def failure(errors: Sequence[str]) -> str:
    """Return the failures in one line; "" without any."""
    more = f" (and {plural(len(errors) - 1, 'more failure')})" if len(errors) > 1 else ""
    return f"{errors[0]}{more}" if errors else ""
