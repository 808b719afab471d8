"""Read an open Parquet object: in the calling thread only, and a remote one in few requests."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import get_ident
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PIECE = 32 << 20
"""Maximum bytes per request of a larger object, for a stream or for several columns."""
_GAP = 1 << 20
"""Maximum gap between two columns that are fetched in one request."""
_PART_THREADS = 4
"""Concurrent requests for one object."""
_Part = tuple[int, bytes]
"""Offset and bytes of a part of an object."""


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """Open Parquet so that only the calling thread reads it; also pass `use_threads=False` to the file's methods.

    If one of Arrow's threads still holds a Python file when the interpreter exits, the process ends with SIGABRT:
    https://github.com/apache/arrow/issues/34314.
    """
    return pq.ParquetFile(source, pre_buffer=False, **options)


class ObjectFile(pq.ParquetFile):  # type: ignore[misc]  # pyarrow has no types
    """An object opened by `open_parquet`."""

    def __init__(self, source: Any, parts: ObjectParts | None, **options: Any) -> None:
        """`parts` is the file that `source` reads, if each read is a request."""
        super().__init__(source, pre_buffer=False, **options)
        self._parts = parts

    def batches(self, rows: int, groups: Sequence[int], columns: Collection[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of row groups, in batches of up to `rows` rows.

        No batch has rows of two row groups, which bounds its size: a repeated text is stored once in a row group. If
        each read is a request, neighboring columns are fetched together, and the next row group is fetched ahead.
        """
        wanted, parts = list(columns), self._parts
        if parts is None:
            for group in groups:
                yield from self.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)
            return
        with ThreadPoolExecutor(_PART_THREADS, "fetch") as threads:
            ahead: deque[list[Future[_Part]]] = deque()
            following = iter(groups)
            for group in groups:
                for later in islice(following, 2 - len(ahead)):
                    ahead.append([threads.submit(parts.fetch, *span) for span in self._spans(later, set(wanted))])
                parts.fetched = [part.result() for part in ahead.popleft()]
                yield from self.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)

    def _spans(self, group: int, columns: Collection[str]) -> list[tuple[int, int]]:
        """Return the byte ranges of a row group's columns; ranges with small gaps are joined."""
        metadata = self.metadata.row_group(group)
        chunks = (metadata.column(number) for number in range(metadata.num_columns))
        spans: list[tuple[int, int]] = []
        for chunk in sorted(
            (_begin(chunk), chunk.total_compressed_size) for chunk in chunks if belongs(chunk, columns)
        ):
            start, end = chunk[0], sum(chunk)
            if spans and start - spans[-1][1] <= _GAP and end - spans[-1][0] <= PIECE:
                start = spans.pop()[0]
            spans.append((start, end))
        return spans


def belongs(chunk: Any, columns: Collection[str]) -> bool:
    """Whether a column chunk belongs to one of these columns, whose names may have dots."""
    parts = chunk.path_in_schema.split(".")
    return any(".".join(parts[:length]) in columns for length in range(1, len(parts) + 1))


def _begin(chunk: Any) -> int:
    begin: int = chunk.data_page_offset
    return min(begin, chunk.dictionary_page_offset) if chunk.has_dictionary_page else begin


class ObjectParts(io.RawIOBase):
    """A file-like object. Each read outside the `fetched` part is one request, without read-ahead.

    Threads may share it: each has its own position.
    """

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        """`read_range` reads a byte range (end exclusive) of an object of `size` bytes."""
        self._size, self._read_range = size, read_range
        self._positions: dict[int, int] = defaultdict(int)
        self.fetched: Sequence[_Part] = ()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._positions[get_ident()]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._positions[get_ident()] = base + offset
        return base + offset

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, or the rest."""
        start = self.tell()
        end = self._size if size < 0 else min(start + size, self._size)
        data = self._bytes(start, end) if end > start else b""
        self._positions[get_ident()] = start + len(data)
        return data

    def _bytes(self, start: int, end: int) -> bytes:
        for begin, data in self.fetched:
            if begin <= start and end <= begin + len(data):
                return data[start - begin : end - begin]
        return self._read_range(start, end)

    def fetch(self, start: int, end: int) -> _Part:
        """Read bytes from `start` to `end` (exclusive)."""
        return start, self._read_range(start, end)
