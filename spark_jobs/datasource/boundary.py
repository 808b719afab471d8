"""Find up to which sequence a stream's archive is complete: messages before are archived, the others in the stream.

The watermark says it, of one incarnation of the stream. If that was created again, the archive has nothing of the
present one, unless it was restored: then the archive has its messages as far as it was restored. A stream that was
restored to an earlier sequence and then took other messages is a fork: what the archive has beyond that sequence from
before the restore is no message of the stream. The archive's notes of the stream's configuration list its incarnations,
and which of them continue earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.incarnations import Link, Origin, are_of, moment
from jetcapture_py.archive.metadata import is_path
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Bound, Objects, list_objects
from jetcapture_py.reading.selection import Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, restored_to
from spark_jobs.datasource.archived import ArchivedMessages
from spark_jobs.datasource.offsets import check_there
from spark_jobs.datasource.session import Session

_MICROSECOND = timedelta(microseconds=1)
_EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMessages:
    """Chooses the messages of a stream's present incarnation, and those that it continues; no erased ones."""

    oldest: int | None = None
    """When the first of these incarnations was created, in microseconds; None if there is no other in the archive."""
    links: tuple[Link, ...] = ()
    """The incarnations that continue others: of what was stored before, only messages up to a sequence are theirs."""
    erased: Erased = field(default_factory=Erased)

    def __call__(self, seqs: Any, times: Any) -> Any:
        """Return a mask of messages: sequences, and timestamps in microseconds, as int64 arrays."""
        oldest = -_EVERYTHING if self.oldest is None else self.oldest
        own = are_of(oldest, self.links, seqs, times)
        return own & ~self.erased.contains(seqs, times) if self.erased else own

    def __bool__(self) -> bool:
        return self.oldest is not None or bool(self.erased)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A stream's state, and how much of it is archived."""

    stream: str
    state: StreamState
    archived: int
    """Everything up to this sequence is in the archive."""
    created: tuple[str, ...]
    """Creation times of the incarnation that the stream is and those that it continues."""
    own: OwnMessages
    """Chooses the stream's messages in the archive."""
    filters: tuple[tuple[int, tuple[str, ...]], ...]
    """After which sequence the capture selects which subjects, in order; none for all."""

    @property
    def end(self) -> int:
        """The sequence after the last message."""
        return max(self.archived, self.state.last) + 1

    @property
    def origin(self) -> Origin:
        return self.state.origin

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


class BoundaryFinder:
    """Finds the boundary of a stream, again and again; `subjects` are the capture's, if no watermark says them."""

    def __init__(self, files: ArchiveFiles, stream: str, subjects: tuple[str, ...] = ()) -> None:
        self._files, self._stream, self._subjects = files, stream, subjects
        self._known: tuple[Any, tuple[tuple[str, int], ...], OwnMessages] | None = None

    def find(self, session: Session) -> Boundary:
        """Find it as of now.

        Raises JetcaptureError, also for a stream whose acknowledged messages are gone: some that are stored already
        leave it before the watermark says so.
        """
        files, stream = self._files, self._stream
        mark = files.watermark(stream)  # before the stream's state, which is then beyond it
        if mark is not None:
            session.reads.know(stream, mark.origin)
        state: StreamState = session.run(session.reads.state(stream))
        if state.retention in GONE_ONCE_ACKED:
            raise SourceError(
                f"stream {stream} has retention {state.retention}: acknowledged messages are gone from it before the "
                "watermark says that they are archived, so archive and stream cannot be read as one; read_archive has "
                "what is archived"
            )
        notes = [path for path in files.notes(stream_config.directory(stream)) if is_path(path)]
        basis = state.created, tuple(notes)
        if self._known is None or self._known[0] != basis:
            self._known = basis, *session.run(self._lineage(session.reads, state))
        _, incarnations, own = self._known
        own = OwnMessages(oldest=own.oldest, links=own.links, erased=files.erased(stream, own.erased))
        self._known = basis, incarnations, own
        same = mark is not None and _is_of(mark, state)
        filters = (mark.filters if mark is not None and same else ()) or [(0, self._subjects)]
        if len(incarnations) > 1 and state.first_time < datetime.fromisoformat(state.created):
            # what the stream was restored with, and still has, had been selected before
            restored = incarnations[1][1]
            filters = [(0, ()), *((max(after, restored), subjects) for after, subjects in filters)]
        archived = 0
        if mark is not None:
            limit = _EVERYTHING if same else dict(incarnations).get(mark.created, 0)
            archived = session.run(_archived(session.reads, mark, state, limit)) if limit else 0
        return Boundary(
            stream=stream,
            state=state,
            archived=archived,
            created=tuple(created for created, _ in incarnations),
            own=own,
            filters=tuple(filters),
        )

    async def _lineage(self, reads: ReadSession, state: StreamState) -> tuple[tuple[tuple[str, int], ...], OwnMessages]:
        """Return the incarnations that the stream consists of, and what chooses their messages."""
        known = {config.created: config for config in self._files.stream_configs(self._stream)}
        created = state.created
        others = sorted((each for each in known if moment(each) < moment(created)), key=moment, reverse=True)
        if state.mirror or not (others or not known):
            return ((created, _EVERYTHING),), OwnMessages()
        restored = await restored_to(reads, self._stream, state)
        continuing = restored > 0 or (created in known and known[created].continues)
        incarnations: list[tuple[str, int]] = [(created, _EVERYTHING)]
        links: list[Link] = []
        lowest, listing = _EVERYTHING, None
        while continuing:
            if not restored:  # none of these messages is in the stream any more
                listing = listing or list_objects(self._files, self._stream)
                began = first_archived(self._files, listing, datetime.fromisoformat(created))
                restored = lowest if began is None else began - 1
                restored = min(restored, state.first - 1) if created == state.created else restored
            lowest = min(lowest, restored)
            links.append((moment(created), restored))
            if not others or not lowest:
                break
            created, restored = others.pop(0), 0
            incarnations.append((created, lowest))
            continuing = known[created].continues
        oldest = 0 if continuing else moment(created)
        return tuple(incarnations), OwnMessages(oldest=oldest, links=tuple(links))


def is_same(files: ArchiveFiles, session: Session, boundary: Boundary, origin: Origin) -> bool:
    """Whether a stream is that of `origin`, by its messages in the stream or in its archive. Raises JetcaptureError."""
    stream, sample = boundary.stream, origin.sample
    if origin.created == boundary.state.created or session.run(session.reads.is_same(stream, origin, boundary.state)):
        return True
    if sample is None or sample.seq > boundary.archived:
        return False
    columns = [layout.SEQ, layout.TIMESTAMP]
    types = pa.schema([(layout.SEQ, pa.int64()), (layout.TIMESTAMP, pa.timestamp("us", "UTC"))])
    table = Table([types], False, None)  # noqa: FBT003
    archived = ArchivedMessages(files=files, stream=stream, table=table, columns=columns, selection=Selection())
    rows = archived.read(sample.seq, sample.seq, boundary.own or None)
    return any(sample.time in batch.column(1).cast(pa.int64()).to_pylist() for batch in rows)


def first_archived(files: ArchiveFiles, listing: Objects, moment: datetime, until: int = _EVERYTHING) -> int | None:
    """Return the first archived sequence up to `until` with a message from `moment` on; None without one.

    Raises JetcaptureError.
    """
    selection = Selection(start=moment)
    names = [name for name in listing if name.parquet and selection.may_hold_name(name)]
    table = Table([pa.schema([(layout.SEQ, pa.int64())])], False, None)  # noqa: FBT003
    reader = PlanReader(
        files=files, table=table, columns=[layout.SEQ], bounds=[Bound((layout.TIMESTAMP,), moment, None)], keys=None
    )

    def first() -> int:
        best = until + 1
        for name in sorted(names, key=lambda name: name.first_seq):
            if name.first_seq >= best:
                break
            for batch in reader.batches(listing[name], name):
                best = min(best, int(batch.column(layout.SEQ).to_numpy().min()))
        return best

    found = retried(first)
    return found if found <= until else None


def _is_of(mark: Watermark, state: StreamState) -> bool:
    """Whether the watermark is of the stream's present incarnation."""
    return mark.created == state.created or (not mark.created and mark.time >= datetime.fromisoformat(state.created))


async def _archived(reads: ReadSession, mark: Watermark, state: StreamState, limit: int) -> int:
    """Return the last sequence, at most `limit`, up to which the archive has everything.

    The position of a watermark stays where nothing more matches the capture's filters, and its time goes on: with it,
    what is gone from the beginning of the stream is known to be archived, or not to be selected.
    """
    known = mark.seq
    if state.first > known + 1 and not state.mirror:
        if state.last_time <= mark.time:
            known = max(known, state.last)
        elif (later := await reads.first_at(mark.stream, mark.time + _MICROSECOND)) > state.first:
            known = max(known, later - 1)
    return min(known, limit)
