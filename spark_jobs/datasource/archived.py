"""Read ranges of an archive's sequences for streaming queries: in order from batch to batch, each message once.

A batch is read from the objects whose names overlap its range. Copies are dropped within each task, which has a part of
the range. If objects vanish, a task plans its part again, or fails once it has returned rows; the next attempt plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.weights import reached
from jetcapture_py.errors import VanishedError
from jetcapture_py.reading.arrow import PlanReader, read_planned
from jetcapture_py.reading.columns import Table
from jetcapture_py.reading.plan import Keep, Objects, ReadPlan, ReadRequest, list_objects
from jetcapture_py.reading.selection import Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles

_ROWS_PER_TASK = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedPartition(InputPartition):
    """A part of a batch: a range of sequences and its `plan`."""

    plan: ReadPlan


@dataclass(slots=True, kw_only=True)
class ArchivedMessages:
    """Plans and reads ranges of a stream's archive with the columns of `table`; `columns` are the result's."""

    files: ArchiveFiles
    stream: str
    table: Table
    columns: Sequence[str]
    selection: Selection
    listing: Objects | None = None
    """The last listing, which is complete up to `listed_to`."""
    listed_to: int = 0

    def partitions(self, first: int, last: int, keep: Keep | None, parts: int) -> list[ArchivedPartition]:
        """Divide the messages from `first` to `last` among up to about `parts` tasks. Raises JetcaptureError."""
        listing = self._listed(last)
        whole = self.planned(first, last, keep, listing)
        if any(name not in listing for name in whole.names):  # from a new listing, because objects have been compacted
            self.listing = None
        return [ArchivedPartition(plan=_within(whole, *span)) for span in _spans(whole.names, first, last, parts)]

    def planned(self, first: int, last: int, keep: Keep | None, listing: Objects | None = None) -> ReadPlan:
        """Plan a read of the messages from `first` to `last`. Raises JetcaptureError."""
        selection = replace(self.selection, seqs=(first, last))
        request = ReadRequest(files=self.files, stream=self.stream, selection=selection, columns=self.columns)
        return replace(request.plan(listing, table=self.table), keep=keep)

    def read(self, first: int, last: int, keep: Keep | None, made: ReadPlan | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the messages from `first` to `last`; `made` is their plan. Raises JetcaptureError."""
        plans = [] if made is None else [made]
        yield from read_planned(lambda: plans.pop() if plans else self.planned(first, last, keep))

    def end(self, first: int, last: int, messages: int | None, size: int | None) -> int:
        """Return the exclusive end of a batch from `first` on, at most `last` + 1.

        By names and sizes, it has at most `messages` messages, and objects of about `size` bytes. It uses the last
        listing if that covers `first`, so that a large archive is not listed for every batch. Raises JetcaptureError.
        """
        if messages is None and size is None:
            return last + 1
        if self.listing is not None and first <= self.listed_to:
            last = min(last, self.listed_to)
        listing = self._listed(last)
        names = _reaching(listing, first, last)
        if not names:
            return last + 1
        firsts = np.array([max(first, name.first_seq) for name in names], np.int64)
        lasts = np.array([min(last, name.last_seq) for name in names], np.int64)
        end, inside = last + 1, (lasts + 1 - firsts) / [name.last_seq + 1 - name.first_seq for name in names]
        if size is not None:
            end = min(end, reached(firsts, lasts, inside * [listing[name].size for name in names], size))
        if messages is not None:
            sparse = reached(firsts, lasts, inside * [name.rows for name in names], messages)
            end = min(end, max(sparse, int(firsts.min()) + messages))
            if end - firsts.min() > messages:
                end = retried(partial(self._counted, first, end - 1, messages))
        return max(end, int(firsts.min()) + 1)

    def _counted(self, first: int, last: int, messages: int) -> int:
        """Return the sequence after at most this many messages from `first` on, by reading their sequences.

        Raises VanishedError after a compaction; the caller then lists the archive again.
        """
        reader = PlanReader(
            files=self.files, table=self.table, columns=[layout.SEQ], bounds=(), keys=None, seqs=(first, last)
        )
        listing = self._listed(last)
        names = _reaching(listing, first, last)
        try:
            parts = [batch.column(0).to_numpy() for name in names for batch in reader.batches(listing[name], name)]
        except VanishedError:
            self.listing = None
            raise
        seqs = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
        return last + 1 if len(seqs) <= messages else int(seqs[messages])

    def _listed(self, last: int) -> Objects:
        """Return the objects, from the last listing while it is complete up to `last`."""
        if self.listing is None or self.listed_to < last:
            self.listing = list_objects(self.files, self.stream, self.selection)
            self.listed_to = last
        return self.listing


def _reaching(listing: Objects, first: int, last: int) -> list[ObjectName]:
    """Return the Parquet objects that may have messages from `first` to `last`."""
    selection = Selection(seqs=(first, last))
    return [name for name in listing if name.parquet and selection.may_hold_name(name)]


def _spans(names: Sequence[ObjectName], first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Divide a range, at sequences that no object spans, into parts with about equal numbers of rows."""
    rows = sum(name.rows for name in names)
    target = max(_ROWS_PER_TASK, -(-rows // max(1, parts)))
    spans, begin, end, count = [], first, first - 1, 0
    for name in sorted(names, key=lambda name: name.first_seq):
        if count >= target and name.first_seq > end:
            spans.append((begin, name.first_seq - 1))
            begin, count = name.first_seq, 0
        count += name.rows
        end = max(end, name.last_seq)
    return [*spans, (begin, last)] if names else []


def _within(plan: ReadPlan, first: int, last: int) -> ReadPlan:
    """Return the part of a plan for these sequences."""
    selection = replace(plan.selection, seqs=(first, last))
    objects = {name: file for name, file in plan.objects.items() if selection.may_hold_name(name)}
    return replace(
        plan,
        selection=selection,
        objects=objects,
        schema_of=dict.fromkeys(objects, 0),
        whole=[name for name in plan.whole if name in objects],
        parts={name: ranges for name, ranges in plan.parts.items() if name in objects},
        shared=[name for name in plan.shared if name in objects],
    )
