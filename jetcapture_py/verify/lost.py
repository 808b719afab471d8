"""Find archived messages that the server has lost, and distinguish them from those removed on purpose.

Messages also leave a stream for good reasons: limits, purges, deletions, TTLs, rollups, acknowledgements. The server
remembers a deleted sequence without the reason, and lists lost sequences among the deleted ones. So a gap inside the
stream counts as a loss only if the server itself reports damaged data; other gaps are reported without alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from jetcapture_py.archive.arrays import Seqs
from jetcapture_py.archive.messages import bounds_of
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import MissingStreamError, SourceError
from jetcapture_py.jetstream.consumer import deleted_when_idle
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.text import plural
from jetcapture_py.verify.content import PARTS, Differences
from jetcapture_py.verify.filters import FilterHistory
from jetcapture_py.verify.findings import MAX_LISTED, Finding, Kind, SequenceRange, Severity, are, not_checked
from jetcapture_py.verify.holes import find_gaps
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import ArchiveScan
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, Scope, ServerState, restored_to

MAX_DELETED = 2_000_000
"""Maximum deleted sequences to request in one answer."""
_RESTORE = "jetcapture restore --as NAME recreates the stream from the archive, under another name"
_REASONS = (
    ("max_msgs_per_subject", "max_msgs_per_subject"),
    ("allow_msg_ttl", "per-message TTLs"),
    ("allow_rollup_hdrs", "rollups"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamContents:
    """The sequences of a stream."""

    created: str
    """Creation time as in `ReadSession.state`."""
    first: int
    last: int
    deleted: Seqs | None
    """Sequences in between without a message, a sorted int64 array; None if there are too many to list."""
    lost: Seqs
    """Sequences that the server reports as lost since its last start, a sorted int64 array."""
    lost_bytes: int
    """Bytes of damaged data, perhaps without known sequences."""
    config: Mapping[str, Any]
    """The stream's API configuration."""

    @classmethod
    def of(cls, answer: Mapping[str, Any], *, listed: bool = True) -> StreamContents:
        """Read the server's answer to STREAM.INFO; `listed`: deleted sequences were requested."""
        state = answer["state"]
        lost = state.get("lost") or {}
        deleted = np.unique(np.array(state.get("deleted") or [], np.int64)) if listed else None
        return cls(
            created=str(answer["created"]),
            first=max(1, int(state["first_seq"])),
            last=int(state["last_seq"]),
            deleted=deleted,
            lost=np.unique(np.array(lost.get("msgs") or [], np.int64)),
            lost_bytes=int(lost.get("bytes") or 0),
            config=answer["config"],
        )


async def contents(session: ReadSession, stream: str) -> StreamContents:
    """Request the stream's sequences. Raises SourceError."""
    subject = f"STREAM.INFO.{stream}"
    answer = await session.request(subject)
    if listed := answer["state"].get("num_deleted", 0) <= MAX_DELETED:
        answer = await session.request(subject, {"deleted_details": True})
    created = (await session.identified(stream, answer)).created
    return StreamContents.of({**answer, "created": created}, listed=listed)


async def find_losses(
    session: ReadSession | None,
    stream: str,
    scope: Scope,
    scan: ArchiveScan,
    mark: ConsumerWatermark | None,
    differences: Differences | None = None,
) -> list[Finding]:
    """Compare the archive with the current stream. `differences` are those of the content, if compared."""
    archived, server = scan.sequences, scope.server
    forks = [_fork(scan.forked)] if len(scan.forked) else []
    if session is None:
        return forks
    missing = Severity.NOTE if differences is None else Severity.WARNING
    if differences is not None:
        forks += _differing(differences)
    if scan.totals.by_name:  # they may be of an earlier incarnation with higher sequences
        reason = "what the server has lost: of some objects, only the names could be checked"
        return [*forks, not_checked(reason, missing)]
    try:
        now = await contents(session, stream)
        restored = await _restored(session, stream) if server is None else 0
    except MissingStreamError:
        return [*forks, *_lost_stream(len(archived), "")]
    except SourceError as error:
        return [*forks, not_checked(f"what the server has lost: {error}", missing)]
    if now.deleted is None:
        text = f"messages that are gone from inside the stream: more than {MAX_DELETED:,} are deleted"
        forks.append(not_checked(text))
    if server is not None and server.state.created == now.created:
        forks += _deleted_with_consumer(archived, server, now.config)
        lost = [*forks, *_rewind(archived, now), *_inside(archived, now), *_lost_stream(scan.totals.older, now.created)]
        return lost if differences is None else [*lost, *_undelivered(archived, now, server.state.last, differences)]
    if mark is not None and mark.created not in ("", now.created):
        return [*forks, *_lost_stream(len(archived) - archived.count(1, restored), now.created)]
    return forks


async def _restored(session: ReadSession, stream: str) -> int:
    """Return the last sequence that the stream may have been restored with; 0 if none. Raises SourceError."""
    state = await session.state(stream)
    older = state.first_time < datetime.fromisoformat(state.created)
    return state.last if older and state.retention in GONE_ONCE_ACKED else await restored_to(session, stream, state)


def _deleted_with_consumer(archived: Sequences, server: ServerState, stream: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield losses by the deletion of an earlier consumer of this name, and the risk of another deletion."""
    if text := deleted_when_idle(server.consumer.config, stream):
        yield Finding(kind=Kind.CONSUMER, severity=Severity.NOTE, summary=text)
    filters = server.mark.filters if server.mark is not None and stream.get("retention") == "interest" else ()
    for before, after in pairwise(filters):
        if before.consumer != after.consumer and after.doubtful is not None:
            first, last = after.doubtful[0], after.certain_after
            for gap in find_gaps(archived, first, last):
                yield replace(
                    gap,
                    kind=Kind.CONSUMER,
                    summary=f"the consumer was deleted after sequence {first - 1} and created again before {last + 1}: "
                    "the server deleted messages in between that no other consumer needed",
                )


def unselected(doubtful: Sequences, history: FilterHistory, first: int, last: int) -> Iterator[Finding]:
    """Yield findings about unknown filters between the sequences `first` and `last`.

    `doubtful` are messages of the stream that the archive lacks.
    """
    if count := len(doubtful):
        yield Finding(
            kind=Kind.FILTERS,
            severity=Severity.WARNING,
            count=count,
            **_ranges(doubtful.all()),
            summary=f"near a change of filters: {plural(count, 'message')} may have been skipped",
            action="jetcapture verify --repair stores them",
        )
    if (unknown := min(history.unknown, last)) >= first:
        subjects = ", ".join(history.parts[0].candidates[0])
        yield Finding(
            kind=Kind.UNKNOWN_FILTERS,
            severity=Severity.WARNING,
            ranges=(SequenceRange(first=first, last=unknown),),
            range_count=1,
            summary=f"up to sequence {unknown}, no watermark says which subjects the consumer selected; only those of "
            f"{subjects} were checked",
            action="messages of other subjects may be missing there",
        )


def _lost_stream(messages: int, created: str) -> Iterator[Finding]:
    """Yield the finding of `messages` from lost streams of this name, if any.

    `created` is the creation time of the current stream; "" without one.
    """
    if not messages:
        return
    now = (
        f"the stream was created again at {format_time(datetime.fromisoformat(created))}"
        if created
        else "the stream does not exist"
    )
    yield Finding(
        kind=Kind.LOST_STREAM,
        severity=Severity.NOTE,
        count=messages,
        summary=f"{now}; the archive has {plural(messages, 'message')} of an earlier stream of its name",
        action="if nobody deleted it on purpose: jetcapture restore recreates it from the archive, "
        "with --as under another name",
    )


def _rewind(archived: Sequences, stream: StreamContents) -> Iterator[Finding]:
    """Yield archived messages beyond the stream's end, if any. The archive was scanned before the stream was asked."""
    last = archived.last
    if last is None or last <= stream.last:
        return
    seqs = archived.within(stream.last + 1, last)
    memory = " (its storage is memory)" if stream.config.get("storage") == "memory" else ""
    yield Finding(
        kind=Kind.REWIND,
        severity=Severity.FAILURE,
        count=len(seqs),
        **_ranges(seqs),
        summary=f"the stream ends at {stream.last}{memory}, but the archive has {plural(len(seqs), 'message')} after "
        f"that, up to {last}: the server lost them, and gives their sequences to new messages",
        action=_give_back(stream),
    )


def _fork(forked: Sequences) -> Finding:
    seqs = forked.all()
    return Finding(
        kind=Kind.FORK,
        severity=Severity.WARNING,
        count=len(seqs),
        **_ranges(seqs),
        summary=f"{plural(len(seqs), 'sequence')} of one stream had two different messages each: after a "
        "rewind, the server gave them to new messages; the archive has both, by timestamp",
        action="jetcapture spark replay --missing publishes the earlier ones again, with new sequences",
    )


def _inside(archived: Sequences, stream: StreamContents) -> Iterator[Finding]:
    """Yield losses at or before the stream's last message."""
    lost = stream.lost[archived.contains(stream.lost) & (stream.lost <= stream.last)]
    gone, expected = np.zeros(0, np.int64), _expected(stream.config)
    if stream.deleted is not None:
        lost = lost[(lost < stream.first) | np.isin(lost, stream.deleted)]
        gone = stream.deleted[archived.contains(stream.deleted) & ~np.isin(stream.deleted, lost)]
    limits = (stream.config.get(name, -1) for name in ("max_age", "max_msgs", "max_bytes"))
    trims = bool(expected) or any(limit > 0 for limit in limits)  # limits remove the oldest messages
    front, end = 0, 0 if trims else min(stream.first - 1, stream.last)
    if len(lost) and lost[0] <= end:
        before = archived.within(1, end)
        gone = np.concatenate([before[~np.isin(before, lost)], gone])
    else:
        front = archived.count(1, end)
    rest = _ranges(gone, (archived.first or 1, end) if front else None)
    count = len(gone) + front
    if len(lost):
        yield _late_hole(len(lost), _ranges(lost), stream, listed=True)
    elif stream.lost_bytes and count and not expected:
        yield _late_hole(count, rest, stream, listed=False)
        return
    if count and (stream.lost_bytes or not expected):
        yield _removed(count, rest, stream)


def _late_hole(messages: int, ranges: dict[str, Any], stream: StreamContents, *, listed: bool) -> Finding:
    size = f"{plural(stream.lost_bytes, 'byte')} of damaged data"
    cause = f"the server reports them as lost ({size})"
    if not listed:
        cause = f"the server reports {size} without saying which sequences; no limit explains the gap, "
        cause += "client deletions might"
    return Finding(
        kind=Kind.LATE_HOLE,
        severity=Severity.FAILURE,
        count=messages,
        **ranges,
        summary=f"{plural(messages, 'message')} {are(messages)} archived and gone from the stream: {cause}",
        action=f"{_give_back(stream)}; check the server's disk",
    )


def _removed(messages: int, ranges: dict[str, Any], stream: StreamContents) -> Finding:
    config, expected = stream.config, _expected(stream.config)
    possible = [*expected]
    if not config.get("deny_delete"):
        possible.append("deletions")
    if not config.get("deny_purge"):
        possible.append("purges")
    why = f"{' or '.join(possible)} explain that" if possible else "no setting that the stream has now explains that"
    doubt = "" if expected else "; the server does not record whether they were deleted or lost"
    if stream.lost_bytes:
        doubt += f"; it also reports {plural(stream.lost_bytes, 'byte')} of damaged data"
    return Finding(
        kind=Kind.REMOVED,
        severity=Severity.NOTE,
        count=messages,
        **ranges,
        summary=f"{plural(messages, 'message')} {are(messages)} archived and gone from the stream; {why}{doubt}",
        action="if they were removed on purpose, do nothing: the archive still has them",
    )


def _give_back(stream: StreamContents) -> str:
    """Return how to restore lost messages without harm to the stream's current messages."""
    if stream.config.get("mirror") or stream.config.get("retention") in GONE_ONCE_ACKED:
        return _RESTORE  # replay --missing refuses these
    return f"jetcapture spark replay --missing publishes them again, with new sequences; {_RESTORE}"


def _differing(result: Differences) -> Iterator[Finding]:
    """Yield other messages at archived sequences, and messages with different content."""
    other = result.differing["timestamp"].all()
    if len(other):
        yield Finding(
            kind=Kind.CONTENT,
            severity=Severity.FAILURE,
            count=len(other),
            **_ranges(other),
            summary=f"{plural(len(other), 'sequence')} with another message than in the archive: after a "
            "rewind, the server gave them to new messages, which are not archived",
            action="keep the stream, which has the only copy of them, and run the capture; if the consumer does not "
            f"deliver them, use another source.consumer with source.start_sequence: {other[0]}",
        )
    parts = [f"{part} {len(seqs):,}" for part, seqs in result.differing.items() if len(seqs) and part != "timestamp"]
    if parts:
        seqs = Sequences.union(*(result.differing[part] for part in PARTS)).all()
        yield Finding(
            kind=Kind.CONTENT,
            severity=Severity.FAILURE,
            count=len(seqs),
            **_ranges(seqs),
            summary=f"{plural(len(seqs), 'message')} {are(len(seqs))} not as archived: differing {', '.join(parts)}",
            action=f"if verify --deep finds the archive undamaged, the server changed them: {_RESTORE}",
        )


def _undelivered(archived: Sequences, stream: StreamContents, last: int, result: Differences) -> Iterator[Finding]:
    """Yield archived messages up to `last` that the stream counts but does not deliver."""
    if stream.deleted is None:
        return
    unread = [np.zeros(0, np.int64)]
    for start, end in archived.windows():
        seqs = archived.within(max(start, stream.first), min(end, stream.last, last))
        unread.append(seqs[~result.readable.contains(seqs) & ~np.isin(seqs, stream.deleted)])
    if len(seqs := np.concatenate(unread)):
        other = ", or it gave their sequences to messages of other subjects after a rewind" if result.filtered else ""
        yield Finding(
            kind=Kind.LATE_HOLE,
            severity=Severity.FAILURE,
            count=len(seqs),
            **_ranges(seqs),
            summary=f"{plural(len(seqs), 'message')} {are(len(seqs))} archived and counted by the stream, but not "
            f"delivered: the server's data is damaged{other}",
            action=f"{_give_back(stream)}; check the server's disk",
        )


def _expected(config: Mapping[str, Any]) -> list[str]:
    """Return the settings by which the server itself removes messages from inside the stream."""
    reasons = [name for setting, name in _REASONS if config.get(setting, -1) not in (-1, 0, False)]
    return reasons if config.get("retention", "limits") == "limits" else [*reasons, "acknowledgements"]


def _ranges(seqs: Seqs, front: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the ranges of sorted sequences, up to the listed maximum; `front` is a range before them."""
    bounds, head = bounds_of(seqs), [] if front is None else [front]
    pairs = [*head, *bounds[:MAX_LISTED].tolist()][:MAX_LISTED]
    listed = [SequenceRange(first=first, last=last) for first, last in pairs]
    return {"ranges": tuple(listed), "range_count": len(bounds) + len(head)}
