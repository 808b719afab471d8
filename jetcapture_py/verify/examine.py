"""Check that an object matches its name and footer, and return its contents. Raises DamagedError otherwise.

Reads as little as possible: the footer; the sequences if they do not follow from the footer; everything with `deep`,
which detects any flipped bit. Objects without a footer are checked by their rows, a piece at a time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.json as pc_json
import pyarrow.parquet as pq

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.block_writer import UserWriter
from jetcapture_py.archive.bundles import bundle_numbers, bundle_of
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.errors import VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File, open_parquet
from jetcapture_py.text import one_line
from jetcapture_py.verify.scope import Incarnation

TAIL = footer.USUAL
"""Bytes read first from an object's end; most footers fit."""
WHOLE = 32 << 20
"""Maximum bytes of an object that is read into memory at once."""
PIECE = 8 << 20

_MOST_ROWS = 1 << 31
_SINCE_CHECKSUMS = ("digest", layout.CHECKSUM, layout.FOOTER_CHECKSUM)
"""Entries introduced with the checksums: whichever bit is flipped, one of them remains."""
_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, KeyError, IndexError, OverflowError)
"""Errors that Arrow raises for damaged files."""
_READ_AHEAD = 8 << 20
_BLOCKS = (8 << 20, 128 << 20, 1 << 30)
"""Bytes of text that are parsed at once; a row must fit, so larger ones are tried where it does not."""
_TOO_SMALL = "straddl"
_CONTENT = re.compile(r"(?<= columns), got .*")
"""Arrow's excerpt of a row with too few fields, which does not belong in a report."""
_TYPES = {layout.SEQ: pa.int64(), layout.TIMESTAMP: pa.timestamp("us", "UTC")}
_CODECS = {end: codec for codec, end in layout.COMPRESSED.items() if end}
_AHEAD = 4
"""Maximum items per thread in progress or waiting to be taken: results take memory."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class DamagedError(Exception):
    """The object has changed since it was stored; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An object's messages of the current incarnation: every sequence of a range, or `seqs`, an int64 array.

    `messages` counts these, `older` those of earlier incarnations; `newest` is the latest timestamp in microseconds.
    `signed`: it is proven, by checksums or by its rows. `by_name`: nothing can read it. `bundles` is the number in the
    footer of an object in a bundle.
    """

    name: ObjectName
    size: int
    range: tuple[int, int] | None
    seqs: Any
    messages: int
    older: int
    newest: int
    signed: bool
    by_name: bool = False
    bundles: int | None = None


def examine(
    storage: ArchiveFiles,
    file: File,
    name: ObjectName,
    life: Incarnation | None,
    *,
    deep: bool,
    writer: UserWriter | None = None,
) -> Held:
    """Check an object and return its contents. Raises DamagedError, VanishedError, StoreError.

    `writer` writes objects in a user's format. If it cannot read them, their contents are what their names say.
    """
    if not name.parquet:
        if writer is not None and name.suffix == writer.suffix and not writer.reads:
            return _named(file, name)
        return _examine_rows(storage, file, name, life, writer)
    item = _Object(storage, file, name)
    messages = item.compared()
    item.check_keys()
    if deep:
        item.check_bytes()
    low, high = item.times()
    present = _present(item.own, life, low, high)
    span = name.last_seq - name.first_seq + 1
    if deep or present is None or (present and messages != span):
        seqs, times = item.identities()
        check_identities(name, seqs, times, messages)
        seqs, times = _of_life(seqs, times, life, present)
        newest = int(times.max()) if len(seqs) else 0
        count = len(seqs)
        known = (int(seqs[0]), int(seqs[-1])) if count == span and (np.diff(seqs) == 1).all() else None
        seqs = None if known else seqs
    else:
        known, seqs, newest, count = (name.first_seq, name.last_seq), None, high, messages
        if not present:
            known, seqs, count = None, np.zeros(0, np.int64), 0
    return Held(
        name=name,
        size=file.size,
        range=known,
        seqs=seqs,
        messages=count,
        older=messages - count,
        newest=newest,
        signed=item.signed,
        bundles=int(item.own[layout.BUNDLES]) if name.bundle else None,
    )


def _examine_rows(
    storage: ArchiveFiles, file: File, name: ObjectName, life: Incarnation | None, writer: UserWriter | None
) -> Held:
    """Check an object without a footer by its rows, and return its contents."""
    seqs, times = _read_rows(storage, file, name, writer)
    messages = len(seqs)
    seqs, times = _of_life(seqs, times, life, _present({}, life, int(times.min()), int(times.max())))
    count = len(seqs)
    whole = count == name.last_seq - name.first_seq + 1 and bool((np.diff(seqs) == 1).all())
    return Held(
        name=name,
        size=file.size,
        range=(int(seqs[0]), int(seqs[-1])) if whole else None,
        seqs=None if whole else seqs,
        messages=count,
        older=messages - count,
        newest=int(times.max()) if count else 0,
        signed=True,
    )


def _read_rows(storage: ArchiveFiles, file: File, name: ObjectName, writer: UserWriter | None) -> tuple[Any, Any]:
    """Read the messages of an object without a footer, and compare them with its name."""
    seqs, times = _row_identities(storage, file, name, writer)
    if len(seqs) != name.rows or not name.rows:
        raise DamagedError(f"it has {len(seqs)} rows, and its name says {name.rows}")
    seqs, times = _once(name, seqs, times)
    check_identities(name, seqs, times, len(seqs))
    return seqs, times


def _named(file: File, name: ObjectName) -> Held:
    """Return the contents by the name alone: every sequence of its range if there are as many rows, else none.

    Its times are unknown: all of it counts for the current incarnation.
    """
    whole = 0 < name.rows == name.last_seq - name.first_seq + 1 <= _MOST_ROWS
    return Held(
        name=name,
        size=file.size,
        range=(name.first_seq, name.last_seq) if whole else None,
        seqs=None if whole else np.zeros(0, np.int64),
        messages=name.rows if whole else 0,
        older=0,
        newest=0,
        signed=True,
        by_name=True,
    )


def _once(name: ObjectName, seqs: Any, times: Any) -> tuple[Any, Any]:
    """Return each message once; the rows of a message follow one another. Those of a bundle are sorted by key."""
    if name.bundle:
        order = np.lexsort((times, seqs))
        seqs, times = seqs[order], times[order]
    first = np.ones(len(seqs), np.bool_)
    first[1:] = (seqs[1:] != seqs[:-1]) | (times[1:] != times[:-1])
    return seqs[first], times[first]


def check_identities(name: ObjectName, seqs: Any, times: Any, messages: int) -> None:
    """Compare the messages with the name and, if there is one, the footer. Raises DamagedError."""
    if (int(seqs[0]), int(seqs[-1]), len(seqs)) != (name.first_seq, name.last_seq, messages):
        raise DamagedError(
            f"it has {len(seqs)} messages from {seqs[0]} to {seqs[-1]}, not {messages} from {name.first_seq} "
            f"to {name.last_seq}"
        )
    after, same = seqs[1:] > seqs[:-1], seqs[1:] == seqs[:-1]
    if not (after | (same & (times[1:] > times[:-1]))).all():
        raise DamagedError("its messages are out of order")
    if layout.digest(seqs.tobytes(), times.tobytes()) != name.digest:
        raise DamagedError("the digest in its name does not match its messages")


def positions(
    storage: ArchiveFiles, file: File, name: ObjectName, life: Incarnation | None, writer: UserWriter | None = None
) -> tuple[Any, Any]:
    """Return sequences and timestamps in microseconds of an object's messages of the current incarnation, in order.

    Raises DamagedError, VanishedError, StoreError.
    """
    if not name.parquet:
        seqs, times = _read_rows(storage, file, name, writer)
        return _of_life(seqs, times, life, _present({}, life, int(times.min()), int(times.max())))
    item = _Object(storage, file, name)
    item.compared()
    present = _present(item.own, life, *item.times())
    return _of_life(*item.identities(), life, present)


def _of_life(seqs: Any, times: Any, life: Incarnation | None, present: bool | None) -> tuple[Any, Any]:
    """Keep the messages of the current incarnation."""
    if present is False:
        return seqs[:0], times[:0]
    if life is None or present:
        return seqs, times
    included = life.includes(seqs, times)
    return seqs[included], times[included]


def _present(own: Mapping[str, str], life: Incarnation | None, low: int | None, high: int | None) -> bool | None:
    """Whether all (True) or none (False) of an object's messages are of the current incarnation; None: some or unknown.

    `low` and `high` are its earliest and latest timestamp.
    """
    return True if life is None else life.holds(own.get("stream_created", ""), low, high)


class _Object:
    """An object whose footer has been read."""

    def __init__(self, storage: ArchiveFiles, file: File, name: ObjectName) -> None:
        self._storage, self._file, self._name = storage, file, name
        if file.size < len(footer.MAGIC) * 3:
            raise DamagedError(f"it has only {file.size} bytes")
        tail = storage.read(file, max(0, file.size - TAIL))
        self._data = tail if len(tail) == file.size else None
        length = footer.length(tail)
        if not length or (len(tail) == file.size and tail[:4] != footer.MAGIC):
            raise DamagedError("it does not start and end like a Parquet file")
        if length > file.size - len(footer.MAGIC):
            raise DamagedError("its footer is truncated")
        self._start = file.size - length
        self._footer = tail[-length:] if length <= len(tail) else storage.read(file, self._start)
        self.signed = self._check_footer()
        try:
            source = pa.BufferReader(self._footer if self._data is None else self._data)
            parquet = open_parquet(source, page_checksum_verification=True)
            self._metadata = parquet.metadata
            self.own = footer.entries(self._metadata.metadata)
            self._paths = self._metadata.schema.to_arrow_schema().names
        except _UNREADABLE as error:
            raise DamagedError(f"its footer cannot be read: {one_line(error)}") from error
        self._content = parquet if self._data is not None else None

    # ------------------------------------------------------------------ the footer

    def _check_footer(self) -> bool:
        """Return whether the footer's checksum is valid; False if the object predates checksums. Raises DamagedError.

        Must be called before Arrow parses the footer: a damaged footer may crash the process.
        """
        if footer.is_proven(self._footer):
            return True
        prefix = layout.METADATA_PREFIX
        if any(f"{prefix}{entry}".encode() in self._footer for entry in _SINCE_CHECKSUMS):
            raise DamagedError("the checksum of its footer does not match")
        return False

    def compared(self) -> int:
        """Compare the name with the footer; return the footer's message count."""
        name, own = self._name, self.own
        if own.get("format") != layout.FORMAT:
            raise DamagedError(f"its format is {own.get('format')}, not {layout.FORMAT}")
        said = {
            "stream": name.stream,
            "key": name.key or "",
            "bucket": str(name.bucket),
            "first_seq": str(name.first_seq),
            "last_seq": str(name.last_seq),
            "rows": str(name.rows),
        }
        if "digest" in own:
            said |= {"digest": name.digest, "quarantine": "true" if name.quarantine else ""}
        if name.event_time != ("time" in own):
            raise DamagedError("its name and its footer differ in what its bucket is made of")
        if not layout.is_one_of(name.bundle, own.get(layout.BUNDLES, "")):
            raise DamagedError(f"its footer says bundles {own.get(layout.BUNDLES, '')!r}, its name {name.bundle!r}")
        for entry, value in said.items():
            if own.get(entry, "") != value:
                raise DamagedError(f"its footer says {entry} {own.get(entry, '')!r}, its name {value!r}")
        messages = own.get("messages", "")
        if not (messages.isascii() and messages.isdigit() and 0 < int(messages) <= name.rows):
            raise DamagedError(f"its footer says messages {messages!r}")
        if not name.first_seq <= name.last_seq or self._metadata.num_rows != name.rows or name.rows > _MOST_ROWS:
            raise DamagedError(f"it has {self._metadata.num_rows} rows, but its name says {name.rows}")
        if not {layout.SEQ, layout.TIMESTAMP} <= set(self._paths):
            raise DamagedError("it has no sequences and timestamps")
        if self.signed:
            self._check_place()
        return int(messages)

    def _check_place(self) -> None:
        """Detect bytes missing in the middle, which shift what follows."""
        groups = [self._metadata.row_group(index) for index in range(self._metadata.num_row_groups)]
        last = groups[-1].column(groups[-1].num_columns - 1)
        offset = last.data_page_offset
        if last.has_dictionary_page:
            offset = min(offset, last.dictionary_page_offset or offset)
        if offset + last.total_compressed_size > self._start:
            raise DamagedError("its column chunks are not where its footer says")

    def times(self) -> tuple[int | None, int]:
        """Return the earliest and latest timestamp in microseconds; None and 0 without statistics."""
        low: list[int] = []
        high: list[int] = []
        for index in range(self._metadata.num_row_groups if self.signed else 0):
            group = self._metadata.row_group(index)
            columns = (group.column(number) for number in range(group.num_columns))
            column = next(each for each in columns if each.path_in_schema == layout.TIMESTAMP)
            if column.statistics is None or not column.statistics.has_min_max:
                return None, 0
            low.append(int(column.statistics.min_raw))
            high.append(int(column.statistics.max_raw))
        return (min(low), max(high)) if low else (None, 0)

    # ------------------------------------------------------------------ the content

    def check_bytes(self) -> None:
        """Check the object's checksum, if it has one, and read every page, which checks the page checksums."""
        size = self._file.size
        if size <= WHOLE and self._data is None:
            self._data = self._storage.read(self._file)
            if len(self._data) != size:
                raise DamagedError(f"it has {len(self._data)} bytes, not {size}")
        if self.signed:
            digits = self.own[layout.CHECKSUM]
            (both,), (own,) = (
                layout.checksum_places(self._footer, entry, self.own[entry])
                for entry in (layout.CHECKSUM, layout.FOOTER_CHECKSUM)
            )
            if layout.checksum(self._pieces(), [self._start + both, self._start + own]) != digits:
                raise DamagedError("its checksum does not match its bytes")
        self._read(None, self._check_keys)

    def check_keys(self) -> None:
        """Check the lowest and highest key of every row group; without statistics, the keys of the first row group."""
        if layout.KEY not in self._paths:
            if self._name.bundle:
                raise DamagedError("it is in a bundle and has no keys")
            return
        groups = [self._metadata.row_group(index) for index in range(self._metadata.num_row_groups)]
        bounds = [footer.group_bounds(group, layout.KEY) if self.signed else None for group in groups]
        self._compare_keys(pa.array([key for pair in bounds if pair for key in pair], pa.string()))
        if None in bounds:  # all are null, or too long for statistics
            self._read([layout.KEY], self._check_keys, first=bounds.index(None), last=bounds.index(None))

    def _check_keys(self, table: pa.Table) -> None:
        if layout.KEY in table.schema.names:
            self._compare_keys(pc.unique(table.column(layout.KEY)).cast(pa.string()))

    def _compare_keys(self, keys: pa.StringArray) -> None:
        """Compare the keys of rows with the bundle or key in the name. Readers look for keys only there."""
        if self._name.bundle:
            bundles = int(self.own[layout.BUNDLES])
            wrong = bundle_numbers(keys, bundles) != int(self._name.bundle)
        else:
            wrong = pc.fill_null(pc.not_equal(keys, self._name.key or ""), bool(self._name.key)).to_numpy(
                zero_copy_only=False
            )
        if wrong.any():
            key = keys[int(wrong.argmax())].as_py()
            right = f" of bundle {bundle_of(key, bundles)}" if self._name.bundle else ""
            raise DamagedError(f"it has the key {one_line(repr(key))}{right}: it was moved or renamed")

    def _pieces(self) -> Iterator[bytes | memoryview]:
        if self._data is not None:
            yield memoryview(self._data)
            return
        for start in range(0, self._file.size, PIECE):
            yield self._storage.read(self._file, start, min(start + PIECE, self._file.size))

    def identities(self) -> tuple[Any, Any]:
        """Return sequence and timestamp in microseconds of each distinct message, as int64 arrays in file order."""
        seqs: list[Any] = []
        times: list[Any] = []

        def take(table: pa.Table) -> None:
            seqs.append(table.column(layout.SEQ).to_numpy())
            times.append(pc.cast(table.column(layout.TIMESTAMP), pa.int64()).to_numpy())

        self._read([layout.SEQ, layout.TIMESTAMP], take)
        seq, time = np.concatenate(seqs), np.concatenate(times)
        if seq.dtype != np.int64 or time.dtype != np.int64 or not len(seq):
            raise DamagedError("its sequences and timestamps are invalid")
        return _once(self._name, seq, time)

    def _read(self, columns: list[str] | None, take: Any, *, first: int = 0, last: int = _MOST_ROWS) -> None:
        """Hand the row groups from `first` to `last` (inclusive) to `take`."""
        try:
            file = self._content or self._opened()
            for index in range(first, min(last + 1, self._metadata.num_row_groups)):
                take(file.read_row_group(index, columns=columns, use_threads=False))
        except _UNREADABLE as error:
            raise DamagedError(f"it cannot be read: {one_line(error)}") from error

    def _opened(self) -> pq.ParquetFile:
        options = {"metadata": self._metadata, "page_checksum_verification": True}
        if self._data is None:
            return open_parquet(self._storage.open(self._file), **options)
        return open_parquet(pa.BufferReader(self._data), **options)


def _row_identities(storage: ArchiveFiles, file: File, name: ObjectName, writer: UserWriter | None) -> tuple[Any, Any]:
    """Sequence and timestamp in microseconds of each row, as int64 arrays, in the object's order.

    `writer` reads objects of its own format. Raises DamagedError, VanishedError, StoreError.
    """
    try:
        if name.suffix in layout.TEXT_SUFFIXES:
            tables = _text(storage, file, name.suffix)
        elif writer is not None:
            tables = [writer.read(pa.py_buffer(storage.read(file)))]
        else:
            raise DamagedError("no writer is configured that can read this format")
        seqs, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for table in tables:
            if table.column(layout.SEQ).null_count or table.column(layout.TIMESTAMP).null_count:
                raise DamagedError("it has rows without a sequence and a timestamp")
            seqs.append(table.column(layout.SEQ).cast(pa.int64()).to_numpy())
            stamps = table.column(layout.TIMESTAMP).cast(_TYPES[layout.TIMESTAMP])
            times.append(stamps.cast(pa.int64()).to_numpy())
    except VanishedError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"it cannot be read: {_CONTENT.sub('', one_line(error))}") from error
    return np.concatenate(seqs), np.concatenate(times)


def _text(storage: ArchiveFiles, file: File, suffix: str) -> list[pa.Table]:
    for size in _BLOCKS:
        try:
            return list(_parsed(storage, file, suffix, size))
        except pa.ArrowInvalid as error:
            if _TOO_SMALL not in str(error) or size == _BLOCKS[-1]:
                raise
    raise AssertionError("the last size has returned or raised")


def _parsed(storage: ArchiveFiles, file: File, suffix: str, size: int) -> Iterator[pa.Table]:
    _, kind, *end = suffix.split(".")
    stream: Any = pa.BufferedInputStream(storage.stream(file), _READ_AHEAD)
    if end:
        stream = pa.CompressedInputStream(stream, _CODECS[f".{end[0]}"])
    if kind == "csv":
        reader = pc_csv.open_csv(
            stream,
            read_options=pc_csv.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_csv.ParseOptions(newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(include_columns=list(_TYPES), column_types=_TYPES),
        )
    else:
        reader = pc_json.open_json(
            stream,
            read_options=pc_json.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_json.ParseOptions(
                explicit_schema=pa.schema(list(_TYPES.items())), unexpected_field_behavior="ignore"
            ),
        )
    for batch in reader:
        yield pa.Table.from_batches([batch])


def in_order(
    name: str, workers: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield every item with its result. A single worker runs in the caller's thread, which is faster."""
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(workers, name) as threads:
        for item in items:
            if len(pending) >= workers * _AHEAD:
                done, future = pending.popleft()
                yield done, future.result()
            pending.append((item, threads.submit(work, item)))
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
