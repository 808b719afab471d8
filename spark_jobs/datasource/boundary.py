"""Find the sequence up to which a stream's archive is complete; later messages are read from the stream.

The watermark records it for one incarnation of the stream. The archive has nothing of a recreated stream, unless that
was restored: then it has the restored messages. The archived stream configurations list the incarnations, and which of
them continue earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pyarrow as pa

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.archive.incarnations import LineageEntry, Link, Origin, are_of, lineage, moment
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.read_session import ReadSession, StreamState
from jetcapture_py.reading.arrow import PlanReader
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Bound, list_objects, read_identities
from jetcapture_py.reading.selection import Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.verify.scope import GONE_ONCE_ACKED, restored_to
from spark_jobs.datasource.offsets import check_there
from spark_jobs.datasource.session import Session

_MICROSECOND = timedelta(microseconds=1)
_EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMessages:
    """Selects a stream's messages, by the links between its incarnations, without erased ones."""

    links: tuple[Link, ...] = ()
    erased: Erased = field(default_factory=Erased)

    def __call__(self, seqs: Seqs, times: Micros) -> Mask:
        own = are_of(self.links, seqs, times)
        return own & ~self.erased.contains(seqs, times) if self.erased else own

    def __bool__(self) -> bool:
        return bool(self.links or self.erased)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A stream's state, and the boundary of its archive."""

    stream: str
    state: StreamState
    archived: int
    """Everything up to this sequence is in the archive."""
    created: tuple[str, ...]
    """Creation times of the current incarnation and those that it continues."""
    own: OwnMessages
    """Selects the stream's messages in the archive."""
    filters: tuple[tuple[int, tuple[str, ...]], ...]
    """The capture's subjects after each sequence, in order; none for all."""

    @property
    def end(self) -> int:
        """The sequence after the last message."""
        return max(self.archived, self.state.last) + 1

    @property
    def origin(self) -> Origin:
        return self.state.origin

    def first_live(self, first: int, *, watched: bool) -> int:
        """Return the first sequence from `first` on to read from the stream.

        Raises SourceError if `watched` and the stream lacks messages after `archived`.
        """
        first = max(first, self.archived + 1)
        if watched:
            check_there(self.stream, first, self.state)
        return max(first, self.state.first)

    def segments(self, first: int, end: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """Yield ranges of sequences, ends exclusive, with the same selected subjects."""
        ends = [after + 1 for after, _ in self.filters[1:]]
        for (_, subjects), until in zip(self.filters, [*ends, end], strict=True):
            until = max(first, min(until, end))
            if first < until:
                yield first, until, subjects
            first = until


class BoundaryFinder:
    """Finds the boundary of a stream, repeatedly; `subjects` are the capture's, if no watermark records them."""

    def __init__(self, files: ArchiveFiles, stream: str, subjects: tuple[str, ...] = ()) -> None:
        self._files, self._stream, self._subjects = files, stream, subjects
        self._noted: tuple[str, list[str]] | None = None  # the inputs of `_entries`
        self._entries: tuple[LineageEntry, ...] = ()
        self._erased = Erased()

    def find(self, session: Session) -> Boundary:
        """Find the current boundary.

        Raises JetcaptureError, also for a stream that deletes acknowledged messages: stored ones leave it before the
        watermark covers them.
        """
        files, stream = self._files, self._stream
        mark = files.watermark(stream)  # read before the stream's state, which is then beyond it
        if mark is not None:
            session.reads.know(stream, mark.origin)
        state: StreamState = session.run(session.reads.state(stream))
        if state.retention in GONE_ONCE_ACKED:
            raise SourceError(
                f"stream {stream} has retention {state.retention}: acknowledged messages are gone from it before the "
                "watermark says that they are archived, so archive and stream cannot be read as one; read_archive has "
                "what is archived"
            )
        noted = state.created, files.notes(stream_config.directory(stream))
        if self._noted != noted:
            self._noted, self._entries = noted, self._lineage(session, state)
        entries, self._erased = self._entries, files.erased(stream, self._erased)
        links = tuple((moment(entry.created), entry.restored) for entry in entries if entry.restored < _EVERYTHING)
        same = mark is not None and _is_of(mark, state)
        filters = (mark.filters if mark is not None and same else ()) or [(0, self._subjects)]
        if len(entries) > 1 and state.first_time < datetime.fromisoformat(state.created):
            # restored messages were selected earlier
            filters = [(0, ()), *((max(after, entries[0].restored), subjects) for after, subjects in filters)]
        archived = 0
        if mark is not None:
            limit = {entry.created: entry.last for entry in entries}.get(state.created if same else mark.created, 0)
            archived = min(limit, session.run(_archived(session.reads, mark, state))) if limit else 0
        return Boundary(
            stream=stream,
            state=state,
            archived=archived,
            created=tuple(entry.created for entry in entries),
            own=OwnMessages(links=links, erased=self._erased),
            filters=tuple(filters),
        )

    def _lineage(self, session: Session, state: StreamState) -> tuple[LineageEntry, ...]:
        """Return the incarnations of the stream's messages, newest first."""
        configs, present = self._files.stream_configs(self._stream), state.created
        older = [config.created for config in reversed(configs) if moment(config.created) < moment(present)]
        if state.mirror or (configs and not older):
            return (LineageEntry(present, _EVERYTHING, _EVERYTHING),)
        still_there = session.run(restored_to(session.reads, self._stream, state))
        continuing = {config.created for config in configs if config.continues}

        def restored(created: str) -> int:
            if created == present and still_there:
                return still_there
            if created not in continuing:
                return 0
            selection = Selection(start=datetime.fromisoformat(created))
            last = (first_archived(self._files, self._stream, selection) or _EVERYTHING) - 1
            return min(last, state.first - 1) if created == present else last

        return lineage([present, *older], restored)


def is_same(files: ArchiveFiles, session: Session, boundary: Boundary, origin: Origin) -> bool:
    """Whether a stream is that of `origin`, by messages in the stream or the archive. Raises JetcaptureError."""
    stream, sample = boundary.stream, origin.sample
    if origin.created == boundary.state.created or session.run(session.reads.is_same(stream, origin, boundary.state)):
        return True
    if sample is None or sample.seq > boundary.archived:
        return False
    selection = Selection(seqs=(sample.seq, sample.seq))

    def has_sample() -> bool:
        objects = list_objects(files, stream, selection)
        names = [name for name in objects if name.parquet and selection.may_hold_name(name)]
        return any(
            bool(((seqs == sample.seq) & (times == sample.time) & boundary.own(seqs, times)).any())
            for seqs, times in read_identities(files, objects, names)
        )

    return retried(has_sample)


def first_archived(files: ArchiveFiles, stream: str, selection: Selection, until: int = _EVERYTHING) -> int | None:
    """Return the first archived sequence up to `until` of a message after the selection's start; None without one.

    Raises JetcaptureError.
    """
    bounds = [Bound((layout.TIMESTAMP,), selection.start, None)]
    table = Table([pa.schema([(layout.SEQ, pa.int64())])], False, None)  # noqa: FBT003
    reader = PlanReader(files=files, table=table, columns=[layout.SEQ], bounds=bounds, keys=None)

    def first() -> int:
        best, objects = until + 1, list_objects(files, stream, selection)
        names = [name for name in objects if name.parquet and selection.may_hold_name(name)]
        for name in sorted(names, key=lambda name: name.first_seq):
            if name.first_seq >= best:
                break
            for batch in reader.batches(objects[name], name):
                best = min(best, int(batch.column(0).to_numpy().min()))
        return best

    seq = retried(first)
    return seq if seq <= until else None


def _is_of(mark: Watermark, state: StreamState) -> bool:
    """Whether the watermark is of the stream's current incarnation."""
    return mark.created == state.created or (not mark.created and mark.time >= datetime.fromisoformat(state.created))


async def _archived(reads: ReadSession, mark: Watermark, state: StreamState) -> int:
    """Return the sequence up to which the archive is complete.

    Without matching messages, a watermark's position stays and its time advances. The time shows that messages removed
    from the beginning of the stream are archived or were not selected.
    """
    if state.mirror or state.first <= mark.seq + 1:
        return mark.seq
    if state.last_time <= mark.time:
        return state.last
    later = await reads.first_at(mark.stream, mark.time + _MICROSECOND)
    return later - 1 if later > state.first else mark.seq
