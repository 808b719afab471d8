"""Summarize what a compaction did or would do, for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jetcapture_py.compaction.unit import Outcome
from jetcapture_py.text import escaped, plural, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Effect on one group: its objects, their bytes, and the number of copied rows removed. `bundle` is "" for the
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
class Summary:
    """Effect on all selected objects.

    `left` counts the groups that were not compacted, by reason; `errors` are failures, which another run may fix.
    """

    dry_run: bool
    objects_before: int
    objects_after: int
    bytes_before: int
    bytes_after: int
    duplicates: int
    changes: tuple[Change, ...]
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
    changes = []
    for outcome in outcomes:
        pairs = zip(outcome.removable, outcome.sizes, strict=True)
        gone = [bytes_ for path, bytes_ in pairs if dry_run or path in removed]
        if gone or outcome.written:
            change = Change(
                key=outcome.key,
                bundle=outcome.bundle,
                bucket=f"{datetime.fromtimestamp(outcome.bucket, UTC):%Y-%m-%dT%H:%M:%SZ}",
                objects_before=outcome.objects,
                objects_after=outcome.objects + len(outcome.written) - len(gone),
                bytes_before=outcome.size,
                bytes_after=outcome.size + sum(size for _, size in outcome.written) - sum(gone),
                duplicates=outcome.duplicates if gone else 0,
            )
            changes.append(change)
    changes.sort(key=lambda change: (change.key or "", change.bundle, change.bucket))
    return Summary(
        dry_run=dry_run,
        objects_before=objects,
        objects_after=objects + sum(change.objects_after - change.objects_before for change in changes),
        bytes_before=size,
        bytes_after=size + sum(change.bytes_after - change.bytes_before for change in changes),
        duplicates=sum(change.duplicates for change in changes),
        changes=tuple(changes),
        left=dict(Counter(outcome.left for outcome in outcomes if outcome.left and not outcome.failed)),
        errors=(*(outcome.left for outcome in outcomes if outcome.failed), *errors),
    )


def report(stream: str, summary: Summary) -> Iterator[str]:
    """Yield the summary as lines of text; for a dry run also one line per group."""
    if summary.dry_run:
        for change in summary.changes:
            key = "no key" if change.key is None else f'key "{escaped(change.key)}"'
            key = f"bundle {change.bundle}" if change.bundle else key
            yield f"{key}, {change.bucket}: {_difference(change)}"
    yield f"{stream}: {total(summary)}"
    for reason, count in summary.left.items():
        yield f"{plural(count, 'group', grouped=True)} skipped: {reason}"


def total(summary: Summary) -> str:
    """Return the effect on all objects in one line."""
    verb = "would be " if summary.dry_run else ""
    duplicates = plural(summary.duplicates, "duplicate row", grouped=True)
    return f"{_difference(summary)}; {duplicates} {verb}removed"


def _difference(of: Summary | Change) -> str:
    before, after = map(size, (of.bytes_before, of.bytes_after))
    old, new = (plural(count, "object", grouped=True) for count in (of.objects_before, of.objects_after))
    return f"{old}, {before} → {new}, {after}"
