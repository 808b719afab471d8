"""Find messages of an object store in the objects of its archive, reading only the row groups that may have them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.footer import bounds, group_bounds
from jetcapture_py.config.units import microseconds_of, parse_time
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File

_ROWS = 64
"""Rows that are read at once: chunks have 128 KiB by default."""
_BUFFER = 1 << 20
_LAST = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMessage:
    """A message: the rest of its subject, its sequence, its timestamp in microseconds, and its payload."""

    subject: str
    seq: int
    time: int
    payload: bytes


@dataclass(slots=True, kw_only=True)
class ObjectPart:
    """The row groups of an object with rows of one subject, and their sequences, ascending.

    The rows are not `in_order` in a bundle if their keys differ.
    """

    file: File
    groups: list[int] = field(default_factory=list)
    seqs: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    in_order: bool = True


class StoreObjects:
    """The objects of one stream in `storage`. Raises JetcaptureError where reading fails."""

    def __init__(self, storage: ArchiveFiles, stream: str) -> None:
        self._storage, self._stream = storage, stream
        found = [file for file in storage.files(stream) if file.name is not None]
        self._files = [file for file in found if file.name is not None and file.name.parquet]
        if not found:
            raise JetcaptureError(f"the archive has no objects of stream {stream}")
        if len(found) > len(self._files):
            raise JetcaptureError(f"the archive of stream {stream} has objects in other formats than Parquet")

    def rows(self, prefix: str) -> Iterator[StoreMessage]:
        """Yield the messages whose subject starts with `prefix`, copies included, in any order."""
        with ThreadPoolExecutor(self._storage.threads, "read") as threads:
            for found in threads.map(lambda file: list(self._rows(file, prefix)), self._files):
                yield from found

    def _rows(self, file: File, prefix: str) -> Iterator[StoreMessage]:
        with self._opened(file) as parquet:
            groups = _groups(parquet, prefix, prefix + _LAST)
            for batch in _batches(parquet, groups, (layout.SUBJECT, layout.SEQ, layout.TIMESTAMP, layout.PAYLOAD)):
                found = batch.filter(pc.starts_with(batch.column(layout.SUBJECT), prefix))
                times = found.column(layout.TIMESTAMP).cast(pa.int64()).to_pylist()
                columns = (found.column(name).to_pylist() for name in (layout.SUBJECT, layout.SEQ, layout.PAYLOAD))
                for subject, seq, payload, time in zip(*columns, times, strict=True):
                    yield StoreMessage(subject=subject[len(prefix) :], seq=seq, time=time, payload=payload or b"")

    def payloads(self, subject: str, before: int, count: int) -> Iterator[bytes]:
        """Yield the payloads of a subject's messages with sequences below `before`, in order, each once.

        Objects are searched from there backwards until `count` messages are found; there may be fewer.
        """
        parts: list[ObjectPart] = []
        found = np.zeros(0, np.int64)
        for file in sorted(self._files, key=lambda file: (_name(file).last_seq, file.path), reverse=True):
            if _name(file).first_seq < before and len(found) < count:
                part = self._part(file, subject, before)
                if len(part.seqs):
                    parts.append(part)
                    found = np.union1d(found, part.seqs)
        for cluster in _clusters(parts):
            last = -1
            copies = (self._in_order(part, subject, before) for part in cluster)
            for seq, payload in heapq.merge(*copies, key=itemgetter(0)):
                if seq != last:
                    last = seq
                    yield payload

    def _part(self, file: File, subject: str, before: int) -> ObjectPart:
        """Find the rows of a subject without reading payloads."""
        part = ObjectPart(file=file)
        with self._opened(file) as parquet:
            for group in _groups(parquet, subject, subject):
                for batch in _batches(parquet, [group], (layout.SUBJECT, layout.SEQ), 1 << 16):
                    seqs = batch.column(layout.SEQ).to_numpy()[_mask(batch, subject, before)]
                    if len(seqs):
                        part.seqs = np.concatenate([part.seqs, seqs])
                        part.groups += [] if part.groups[-1:] == [group] else [group]
        part.in_order = bool((np.diff(part.seqs) >= 0).all())
        part.seqs.sort()
        return part

    def _in_order(self, part: ObjectPart, subject: str, before: int) -> Iterable[tuple[int, bytes]]:
        chunks = self._chunks(part, subject, before)
        return chunks if part.in_order else sorted(chunks, key=itemgetter(0))

    def _chunks(self, part: ObjectPart, subject: str, before: int) -> Iterator[tuple[int, bytes]]:
        with self._opened(part.file) as parquet:
            for batch in _batches(parquet, part.groups, (layout.SUBJECT, layout.SEQ, layout.PAYLOAD)):
                found = batch.filter(pa.array(_mask(batch, subject, before)))
                payloads = found.column(layout.PAYLOAD).to_pylist()
                yield from zip(found.column(layout.SEQ).to_pylist(), (each or b"" for each in payloads), strict=True)

    def start_of(self, until: int | None) -> int:
        """Return when the store was created that existed at a time; 0 for the first one. Microseconds since 1970.

        A store that was created again starts its sequences again. A mirror that was created again and a restored store
        continue theirs, and so all older messages belong to them.
        """
        later = [each for each in sorted(self._incarnations())[1:] if until is None or each[0] <= until]
        anew = max((start for start, continues in later if not continues), default=0)
        for start, _ in reversed(later):
            if start > anew and not self._ascends(anew, start):
                return start
        return anew

    def _incarnations(self) -> Iterator[tuple[int, bool]]:
        """Yield when each incarnation of the stream was created (microseconds), and whether it may continue another."""
        for path in self._storage.notes(stream_config.directory(self._stream)):
            data = self._storage.read_note(path) if stream_config.is_path(path) else None
            if data is not None:
                found = stream_config.decode(data, self._stream, path)
                yield microseconds_of(parse_time(found.created)), found.continues

    def _ascends(self, anew: int, start: int) -> bool:
        """Whether all sequences since `start` are above those between `anew` and `start`."""
        newest, oldest = 0, 1 << 63
        for file in self._files:
            before, after = self._around(file, anew, start)
            newest, oldest = max(newest, before), min(oldest, after)
        return oldest > newest

    def _around(self, file: File, anew: int, start: int) -> tuple[int, int]:
        """Return the last sequence between two times, and the first one from the second time on, of an object."""
        name = _name(file)
        with self._opened(file) as parquet:
            known = bounds(parquet.metadata, layout.TIMESTAMP)
            if known is not None:
                low, high = map(microseconds_of, known)
                if low >= start:
                    return 0, name.first_seq
                if high < anew:
                    return 0, 1 << 63
                if low >= anew and high < start:
                    return name.last_seq, 1 << 63
            table = parquet.read([layout.SEQ, layout.TIMESTAMP], use_threads=False)
        seqs, times = table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
        before, after = seqs[(times >= anew) & (times < start)], seqs[times >= start]
        return int(before.max(initial=0)), int(after.min(initial=(1 << 63) - 1))

    def _opened(self, file: File) -> AbstractContextManager[pq.ParquetFile]:
        return self._storage.parquet(file, buffer=_BUFFER)


def _name(file: File) -> layout.ObjectName:
    assert file.name is not None  # noqa: S101 - all files have one
    return file.name


def _groups(parquet: pq.ParquetFile, low: str, high: str) -> list[int]:
    """Return the row groups that may have subjects from `low` to `high`."""
    found = []
    for number in range(parquet.metadata.num_row_groups):
        known = group_bounds(parquet.metadata.row_group(number), layout.SUBJECT)
        if known is None or (known[0] <= high and low <= known[1]):
            found.append(number)
    return found


def _batches(
    parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: int = _ROWS
) -> Iterator[pa.RecordBatch]:
    if groups:
        yield from parquet.iter_batches(rows, row_groups=list(groups), columns=list(columns), use_threads=False)


def _mask(batch: pa.RecordBatch, subject: str, before: int) -> Any:
    same = pc.equal(batch.column(layout.SUBJECT), subject).to_numpy(zero_copy_only=False)
    return same & (batch.column(layout.SEQ).to_numpy() < before)


def _clusters(parts: Iterable[ObjectPart]) -> Iterator[list[ObjectPart]]:
    """Yield the parts in order, those together whose sequences overlap."""
    cluster: list[ObjectPart] = []
    end = -1
    for part in sorted(parts, key=lambda part: int(part.seqs[0])):
        if cluster and int(part.seqs[0]) > end:
            yield cluster
            cluster = []
        cluster.append(part)
        end = max(end, int(part.seqs[-1]))
    if cluster:
        yield cluster
