"""Check that an object matches its name and footer, and return its contents. Raises DamagedError otherwise.

Reads as little as possible: the footer; the sequences if they do not follow from the footer; everything with `deep`,
which detects any flipped bit. Objects without a footer are checked by their rows, a piece at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.json as pc_json

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.arrays import Micros, Seqs
from jetcapture_py.archive.block_writer import NULL
from jetcapture_py.archive.bundles import bundle_numbers, bundle_of
from jetcapture_py.archive.incarnations import Incarnation
from jetcapture_py.archive.info import BadObject, Details, InfoReader, ObjectInfo, details_of
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import first_of_each
from jetcapture_py.archive.removed import Erased
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.store.object_file import open_parquet
from jetcapture_py.text import one_line
from jetcapture_py.verify.ranges import Sequences

TAIL_BYTES = footer.USUAL
"""Bytes read first from an object's end; most footers fit."""
WHOLE_BYTES = 32 << 20
"""Maximum size of an object that is read into memory at once."""
PIECE_BYTES = 8 << 20

_MAX_ROWS = 1 << 31
_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, KeyError, IndexError, OverflowError)
"""Errors that Arrow raises for damaged files."""
_READ_AHEAD = 8 << 20
_BLOCKS = (8 << 20, 128 << 20, 1 << 30)
"""Bytes of text parsed at once. A row must fit, so larger sizes are tried if it does not."""
_TOO_SMALL = "straddl"
_CONTENT = re.compile(r"(?<= columns), got .*")
"""Arrow's excerpt of a row with too few fields, which does not belong in a report."""
IDENTITY_TYPES: Mapping[str, pa.DataType] = {layout.SEQ: pa.int64(), layout.TIMESTAMP: pa.timestamp("us", "UTC")}
"""The columns that identify a message within its stream."""
_CODECS = {end: codec for codec, end in layout.COMPRESSED.items() if end}
_NONE = np.zeros(0, np.int64)


class DamagedError(Exception):
    """The object has changed since it was stored, or was not written by jetcapture; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectContents:
    """An object's messages of the current incarnation."""

    name: ObjectName
    size: int
    """Bytes."""
    range: tuple[int, int] | None = None
    """First and last sequence of an object with every one in between."""
    seqs: Seqs = field(default_factory=lambda: _NONE)
    """The sequences of another object."""
    messages: int
    """Number of the messages."""
    older: int = 0
    """Number of its messages of earlier incarnations."""
    newest: int = 0
    """Latest timestamp in microseconds, 0 without one."""
    by_name: bool = False
    """Whether its format cannot be read, so that only its name is known."""
    bundles: int | None = None
    """The number of bundles in its footer, if it is in one."""
    interval: int = 0
    """Length of its bucket in seconds; 0 if unknown."""
    details: Details | None = None
    """Footer metadata of all its messages; None without a footer."""
    erased: int = 0
    """Number of its messages that should have been erased."""

    def add_to(self, sequences: Sequences) -> Seqs:
        """Add its messages to a set; return those already in it."""
        return sequences.add(self.seqs) if self.range is None else sequences.add_range(*self.range)


@dataclass(frozen=True, slots=True)
class ObjectExaminer:
    """Reads the objects of an archive. Methods raise DamagedError, VanishedError and StoreError."""

    storage: ArchiveFiles
    incarnation: Incarnation | None
    """The stream's current incarnation; None if unknown, so that all messages count."""
    erased: Erased = field(default_factory=Erased)
    """Messages that no object should have any more."""

    def examine(self, file: File, name: ObjectName, *, deep: bool) -> ObjectContents:
        """Check an object and return its contents."""
        if not (name.parquet or name.text):
            # times are unknown: everything counts for the current incarnation
            complete = 0 < name.rows == name.last_seq - name.first_seq + 1 <= _MAX_ROWS
            seqs, messages = (None, name.rows) if complete else (_NONE, 0)
            return _contents(file, name, seqs, 0, messages, by_name=True)
        if name.text:
            seqs, times = self._rows(file, name)
            messages, erased = len(seqs), self._erased(seqs, times)
            seqs, times = self._current(seqs, times, {}, int(times.min()), int(times.max()))
            return _contents(file, name, seqs, int(times.max(initial=0)), messages, erased=erased)
        item = _ParquetObject(self.storage, file, name)
        messages = item.compared()
        item.check_keys()
        if deep:
            item.check_bytes()
        low, high = item.times()
        bundles = int(item.entries[layout.BUNDLES]) if name.bundle else None
        present = self._present(item.entries, low, high)
        partial = present and messages != name.last_seq - name.first_seq + 1
        if deep or present is None or partial or self.erased.near(name.first_seq, name.last_seq):
            seqs, times = item.identities()
            check_identities(name, seqs, times, messages)
            erased = self._erased(seqs, times)
            seqs, times = self._current(seqs, times, item.entries, low, high)
            newest = int(times.max(initial=0))
        else:
            seqs, newest, erased = None if present else _NONE, high, 0
        interval, details = int(item.entries.get(layout.INTERVAL, 0)), item.details
        return _contents(
            file, name, seqs, newest, messages, bundles=bundles, erased=erased, interval=interval, details=details
        )

    def positions(self, file: File, name: ObjectName) -> tuple[Seqs, Micros]:
        """Return sequences and timestamps in microseconds of the current incarnation's messages, in order."""
        if not name.parquet:
            seqs, times = self._rows(file, name)
            return self._current(seqs, times, {}, int(times.min()), int(times.max()))
        item = _ParquetObject(self.storage, file, name)
        item.compared()
        return self._current(*item.identities(), item.entries, *item.times())

    def identities(self, file: File, name: ObjectName) -> tuple[ObjectInfo | None, Seqs, Micros]:
        """Return an object's footer metadata, None without a footer, and the positions of all of its messages."""
        if not name.parquet:
            return None, *self._rows(file, name)
        item = _ParquetObject(self.storage, file, name)
        messages = item.compared()
        seqs, times = item.identities()
        check_identities(name, seqs, times, messages)
        return item.info(), seqs, times

    def _erased(self, seqs: Seqs, times: Micros) -> int:
        """Count the erased messages."""
        return int(self.erased.contains(seqs, times).sum())

    def _rows(self, file: File, name: ObjectName) -> tuple[Seqs, Micros]:
        """Read the messages of an object without a footer, and compare them with its name."""
        if not name.text:
            raise DamagedError("it is in a format of your own")
        seqs, times = [_NONE], [_NONE]
        with _readable():
            for table in text_rows(self.storage, file, name.suffix, IDENTITY_TYPES):
                if table.column(layout.SEQ).null_count or table.column(layout.TIMESTAMP).null_count:
                    raise DamagedError("it has rows without a sequence and a timestamp")
                seqs.append(table.column(layout.SEQ).cast(pa.int64()).to_numpy())
                times.append(
                    table.column(layout.TIMESTAMP).cast(IDENTITY_TYPES[layout.TIMESTAMP]).cast(pa.int64()).to_numpy()
                )
        seq, time = np.concatenate(seqs), np.concatenate(times)
        if len(seq) != name.rows or not name.rows:
            raise DamagedError(f"it has {len(seq)} rows, and its name says {name.rows}")
        seq, time = _once(name, seq, time)
        check_identities(name, seq, time, len(seq))
        return seq, time

    def _present(self, entries: Mapping[str, str], low: int, high: int) -> bool | None:
        """Whether all (True) or none (False) of an object's messages are current; None: some or unknown.

        `entries` are those of its footer, `low` and `high` its earliest and latest timestamp.
        """
        created = entries.get("stream_created", "")
        if self.incarnation is None:
            return None if "," in created else True  # several may share a sequence
        return self.incarnation.holds(created, low, high)

    def _current(
        self, seqs: Seqs, times: Micros, entries: Mapping[str, str], low: int, high: int
    ) -> tuple[Seqs, Micros]:
        """Return the messages of the current incarnation."""
        present = self._present(entries, low, high)
        if self.incarnation is None or present:
            return seqs, times
        included = self.incarnation.includes(seqs, times) if present is None else slice(0)
        return seqs[included], times[included]


def _contents(
    file: File, name: ObjectName, seqs: Seqs | None, newest: int, messages: int, **further: Any
) -> ObjectContents:
    """Return the contents of an object with these current sequences, None for all, among all its `messages`."""
    count = messages if seqs is None else len(seqs)
    every = seqs is None or (count == name.last_seq - name.first_seq + 1 and bool((np.diff(seqs) == 1).all()))
    return ObjectContents(
        name=name,
        size=file.size,
        range=(name.first_seq, name.last_seq) if every else None,
        seqs=_NONE if seqs is None or every else seqs,
        messages=count,
        older=messages - count,
        newest=newest,
        **further,
    )


@contextmanager
def _readable(what: str = "it") -> Iterator[None]:
    """Turn errors of Arrow into DamagedError."""
    try:
        yield
    except _UNREADABLE as error:
        raise DamagedError(f"{what} cannot be read: {_CONTENT.sub('', one_line(error))}") from error


def _once(name: ObjectName, seqs: Seqs, times: Micros) -> tuple[Seqs, Micros]:
    """Return each message once. The rows of a message are consecutive; a bundle is sorted by key."""
    if name.bundle:
        order = np.lexsort((times, seqs))
        seqs, times = seqs[order], times[order]
    first = first_of_each(seqs, times)
    return seqs[first], times[first]


def check_identities(name: ObjectName, seqs: Seqs, times: Micros, messages: int) -> None:
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


class _ParquetObject:
    """An object whose footer has been read."""

    def __init__(self, storage: ArchiveFiles, file: File, name: ObjectName) -> None:
        self._storage, self._file, self._name = storage, file, name
        if file.size < len(footer.MAGIC) * 3:
            raise DamagedError(f"it has only {file.size} bytes")
        tail = storage.read(file, max(0, file.size - TAIL_BYTES))
        self._data = tail if len(tail) == file.size else None
        length = footer.length(tail)
        if not length or (len(tail) == file.size and tail[:4] != footer.MAGIC):
            raise DamagedError("it does not start and end like a Parquet file")
        if length > file.size - len(footer.MAGIC):
            raise DamagedError("its footer is truncated")
        self._start = file.size - length
        self._footer = tail[-length:] if length <= len(tail) else storage.read(file, self._start)
        if not footer.is_proven(self._footer):  # Arrow must not parse it: a damaged one may abort the process
            raise DamagedError(footer.UNPROVEN)
        with _readable("its footer"):
            source = pa.BufferReader(self._footer if self._data is None else self._data)
            parquet = open_parquet(source, page_checksum_verification=True)
            self._metadata = parquet.metadata
            self.entries = footer.entries(self._metadata.metadata)
            self._paths = self._metadata.schema.to_arrow_schema().names
        self._content = parquet if self._data is not None else None

    def info(self) -> ObjectInfo:
        """Return the footer's metadata. Raises DamagedError."""
        info = InfoReader().read(self._name, self._footer, size=self._file.size, detailed=True)
        if isinstance(info, BadObject):
            raise DamagedError(info.reason)
        return info

    def compared(self) -> int:
        """Compare the name with the footer; return the footer's message count."""
        name, entries = self._name, self.entries
        if entries.get("format") != layout.FORMAT:
            raise DamagedError(f"its format is {entries.get('format')}, not {layout.FORMAT}")
        said = {
            "stream": name.stream,
            "key": name.key or "",
            "bucket": str(name.bucket),
            "first_seq": str(name.first_seq),
            "last_seq": str(name.last_seq),
            "rows": str(name.rows),
            "digest": name.digest,
            "quarantine": "true" if name.quarantine else "",
        }
        if name.event_time != ("time" in entries):
            raise DamagedError("its name and its footer disagree about the source of its time slice")
        if not layout.is_one_of(name.bundle, entries.get(layout.BUNDLES, "")):
            raise DamagedError(f"its footer says bundles {entries.get(layout.BUNDLES, '')!r}, its name {name.bundle!r}")
        for entry, value in said.items():
            if entries.get(entry, "") != value:
                raise DamagedError(f"its footer says {entry} {entries.get(entry, '')!r}, its name {value!r}")
        messages = entries.get("messages", "")
        if not (messages.isascii() and messages.isdigit() and 0 < int(messages) <= name.rows):
            raise DamagedError(f"its footer says messages {messages!r}")
        if not name.first_seq <= name.last_seq or self._metadata.num_rows != name.rows or name.rows > _MAX_ROWS:
            raise DamagedError(f"it has {self._metadata.num_rows} rows, but its name says {name.rows}")
        if not {layout.SEQ, layout.TIMESTAMP} <= set(self._paths):
            raise DamagedError("it has no sequences and timestamps")
        self._check_offsets()
        return int(messages)

    def _check_offsets(self) -> None:
        """Detect bytes missing in the middle, which shift later offsets."""
        groups = [self._metadata.row_group(index) for index in range(self._metadata.num_row_groups)]
        last = groups[-1].column(groups[-1].num_columns - 1)
        offset = last.data_page_offset
        if last.has_dictionary_page:
            offset = min(offset, last.dictionary_page_offset or offset)
        if offset + last.total_compressed_size > self._start:
            raise DamagedError("its column chunks are not where its footer says")

    def times(self) -> tuple[int, int]:
        """Return the earliest and latest timestamp in microseconds. Raises DamagedError."""
        if self.details.times is None:
            raise DamagedError("its footer lacks the times of its messages")
        return self.details.times

    @cached_property
    def details(self) -> Details:
        """Return the decoded footer's metadata. Raises DamagedError."""
        with _readable("its footer"):
            return details_of(self._name, self._metadata)

    def check_bytes(self) -> None:
        """Check the object's checksum, and read every page, which checks the page checksums."""
        size = self._file.size
        if size <= WHOLE_BYTES and self._data is None:
            self._data = self._storage.read(self._file)
            if len(self._data) != size:
                raise DamagedError(f"it has {len(self._data)} bytes, not {size}")
        digits = self.entries[layout.CHECKSUM]
        (both,), (of_entry,) = (
            layout.checksum_offsets(self._footer, entry, self.entries[entry])
            for entry in (layout.CHECKSUM, layout.FOOTER_CHECKSUM)
        )
        if layout.checksum(self._pieces(), [self._start + both, self._start + of_entry]) != digits:
            raise DamagedError("its checksum does not match its bytes")
        with _readable():
            for table in self._tables(None):
                self._check_keys(table)

    def check_keys(self) -> None:
        """Check the lowest and highest key of every row group, and all keys of the first one without statistics."""
        if self._name.quarantine:
            return
        if layout.KEY not in self._paths:
            raise DamagedError("it has no keys")
        groups = [self._metadata.row_group(index) for index in range(self._metadata.num_row_groups)]
        bounds = [footer.group_bounds(group, layout.KEY) for group in groups]
        self._compare_keys(pa.array([key for pair in bounds if pair for key in pair], pa.string()))
        if None in bounds:  # all are null, or too long for statistics
            with _readable():
                self._check_keys(next(self._tables([layout.KEY], first=bounds.index(None))))

    def _check_keys(self, table: pa.Table) -> None:
        if layout.KEY in table.schema.names:
            self._compare_keys(pc.unique(table.column(layout.KEY)).cast(pa.string()))

    def _compare_keys(self, keys: pa.StringArray) -> None:
        """Compare the keys of rows with the bundle or key in the name, where readers look for them."""
        if self._name.bundle:
            bundles = int(self.entries[layout.BUNDLES])
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
        yield from self._storage.pieces(self._file, PIECE_BYTES)

    def identities(self) -> tuple[Seqs, Micros]:
        """Return sequence and timestamp in microseconds of each distinct message, as int64 arrays in file order."""
        with _readable():
            table = pa.concat_tables(self._tables([layout.SEQ, layout.TIMESTAMP]))
            seq, time = table[layout.SEQ].to_numpy(), table[layout.TIMESTAMP].cast(pa.int64()).to_numpy()
        if seq.dtype != np.int64 or time.dtype != np.int64 or not len(seq):
            raise DamagedError("its sequences and timestamps are invalid")
        return _once(self._name, seq, time)

    def _tables(self, columns: list[str] | None, *, first: int = 0) -> Iterator[pa.Table]:
        """Read the row groups from `first` on."""
        file = self._content
        if file is None:
            source = self._storage.open(self._file) if self._data is None else pa.BufferReader(self._data)
            file = open_parquet(source, metadata=self._metadata, page_checksum_verification=True)
        for index in range(first, self._metadata.num_row_groups):
            yield file.read_row_group(index, columns=columns, use_threads=False)


def text_rows(storage: ArchiveFiles, file: File, suffix: str, types: Mapping[str, pa.DataType]) -> list[pa.Table]:
    """Return the rows of an object in NDJSON or CSV, in their order: columns of these types.

    Raises VanishedError, StoreError, pa.ArrowInvalid if it is damaged.
    """
    for size in _BLOCKS:
        try:
            return list(_parsed(storage, file, suffix, size, types))
        except pa.ArrowInvalid as error:
            if _TOO_SMALL not in str(error) or size == _BLOCKS[-1]:
                raise
    raise AssertionError("the last size has returned or raised")


def _parsed(
    storage: ArchiveFiles, file: File, suffix: str, size: int, types: Mapping[str, pa.DataType]
) -> Iterator[pa.Table]:
    _, kind, *end = suffix.split(".")
    stream: Any = pa.BufferedInputStream(storage.stream(file), _READ_AHEAD)
    if end:
        stream = pa.CompressedInputStream(stream, _CODECS[f".{end[0]}"])
    if kind == "csv":
        reader = pc_csv.open_csv(
            stream,
            read_options=pc_csv.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_csv.ParseOptions(newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(
                include_columns=list(types),
                column_types=types,
                null_values=[NULL],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    else:
        reader = pc_json.open_json(
            stream,
            read_options=pc_json.ReadOptions(block_size=size, use_threads=False),
            parse_options=pc_json.ParseOptions(
                explicit_schema=pa.schema(list(types.items())),
                unexpected_field_behavior="ignore",
            ),
        )
    for batch in reader:
        yield pa.Table.from_batches([batch])
