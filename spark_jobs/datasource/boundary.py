"""Find up to which sequence a stream's archive is complete: messages before are archived, the others in the stream.

The watermark says it, of one incarnation of the stream. If that was created again, the archive has nothing of the
present one, unless it was restored: then the archive has its messages as far as it was restored. A stream that was
restored to an earlier sequence and then took other messages is a fork: what the archive has beyond that sequence from
before the restore belongs to no message of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, Incarnation, current_incarnation
from spark_jobs.datasource.offsets import check_there
from spark_jobs.datasource.session import Session

_MICROSECOND = timedelta(microseconds=1)
_EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMessages:
    """Chooses the messages of a stream's present incarnation, and those that it continues; no erased ones."""

    incarnation: Incarnation | None
    """None if the archive has no other one."""
    erased: Erased = field(default_factory=Erased)

    def __call__(self, seqs: Any, times: Any) -> Any:
        """Return a mask of messages: sequences, and timestamps in microseconds, as int64 arrays."""
        own = np.ones(len(seqs), np.bool_) if self.incarnation is None else self.incarnation.includes(seqs, times)
        return own & ~self.erased.contains(seqs, times) if self.erased else own


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A stream's state, and how much of it is archived."""

    stream: str
    state: StreamState
    archived: int
    """Everything up to this sequence is in the archive."""
    incarnation: Incarnation
    alone: bool
    """Whether the archive has no other incarnation."""
    filters: tuple[tuple[int, tuple[str, ...]], ...]
    """After which sequence the capture selects which subjects, in order; none for all."""

    @property
    def end(self) -> int:
        """The sequence after the last message."""
        return max(self.archived, self.state.last) + 1

    def own(self, erased: Erased) -> OwnMessages | None:
        """Return what chooses the stream's messages in the archive; None if all are."""
        if self.alone and not erased:
            return None
        return OwnMessages(incarnation=None if self.alone else self.incarnation, erased=erased)

    def first_live(self, first: int, *, watched: bool) -> int:
        """Return the first sequence from `first` on to read from the stream, which has everything after `archived`.

        Raises SourceError if it does not, unless it is not `watched`.
        """
        first = max(first, self.archived + 1)
        if watched:
            check_there(self.stream, first, self.state)
        return max(first, self.state.first)

    def segments(self, first: int, end: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """Yield ranges of sequences, ends exclusive, of which the capture selects different subjects."""
        ends = [after + 1 for after, _ in self.filters[1:]]
        for (_, subjects), until in zip(self.filters, [*ends, end], strict=True):
            until = max(first, min(until, end))
            if first < until:
                yield first, until, subjects
            first = until


def find_boundary(session: Session, files: ArchiveFiles, stream: str, subjects: tuple[str, ...] = ()) -> Boundary:
    """Find the boundary of a stream as of now; `subjects` are the capture's, if the watermark does not say them.

    Raises JetcaptureError, also for a stream whose acknowledged messages are gone: some that are stored already leave
    it before the watermark says so.
    """
    mark = files.watermark(stream)  # before the stream's state, which is then beyond it
    return session.run(_find(session.reads, files, stream, mark, subjects))


async def _find(
    reads: ReadSession, files: ArchiveFiles, stream: str, mark: Watermark | None, subjects: tuple[str, ...]
) -> Boundary:
    state = await reads.state(stream)
    if state.retention in GONE_ONCE_ACKED:
        raise SourceError(
            f"stream {stream} has retention {state.retention}: acknowledged messages are gone from it before the "
            "watermark says that they are archived, so archive and stream cannot be read as one; read_archive has what "
            "is archived"
        )
    incarnation = await current_incarnation(reads, stream, state)
    same = mark is not None and _is_of(mark, state)
    history = [] if mark is None or not same else [(entry.after, entry.subjects) for entry in mark.filters]
    notes = files.notes(stream_config.directory(stream))
    own = stream_config.path(stream, state.created)
    return Boundary(
        stream=stream,
        state=state,
        archived=0 if mark is None else await _archived(reads, mark, state, incarnation, same=same),
        incarnation=incarnation,
        alone=state.mirror or (own in notes and all(path == own or not stream_config.is_path(path) for path in notes)),
        filters=tuple(history or [(0, subjects)]),
    )


def _is_of(mark: Watermark, state: StreamState) -> bool:
    """Whether the watermark is of the stream's present incarnation."""
    return mark.created == state.created or (not mark.created and mark.time >= datetime.fromisoformat(state.created))


async def _archived(
    reads: ReadSession, mark: Watermark, state: StreamState, incarnation: Incarnation, *, same: bool
) -> int:
    """Return the last sequence up to which the archive has everything; 0 if it has nothing of the stream."""
    limit = _EVERYTHING
    if not same:
        limit = incarnation.restored
        if not limit or not mark.created:
            return 0
        began = await reads.first_at(mark.stream, datetime.fromisoformat(mark.created))
        if began > limit:  # it was restored from an earlier incarnation than the watermark's
            return 0
    return min(max(mark.seq, 0 if state.mirror else await _aged(reads, mark, state)), limit)


async def _aged(reads: ReadSession, mark: Watermark, state: StreamState) -> int:
    """Return a sequence up to which everything is archived by the watermark's time, which goes on where nothing more
    matches the capture's filters; 0 if it is not known to include what is gone from the beginning of the stream."""
    if state.last_time <= mark.time:
        return state.last
    later = await reads.first_at(mark.stream, mark.time + _MICROSECOND)
    return later - 1 if later > state.first else 0
