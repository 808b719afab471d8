"""Received messages as offsets into the memory they were received into, without Python objects per message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrays import Int32s, Int64s, Mask
from jetcapture_py.archive.arrow_bytes import between
from jetcapture_py.jetstream.wire.transport import ReceiveBuffer

MESSAGE_OVERHEAD = 192
"""Bytes of memory per message besides its content: its control line and its row of offsets."""

SUBJECT, REPLY, HEADERS, PAYLOAD, OFFSETS = 0, 2, 4, 5, 7
"""Columns of a message's row of offsets, and their number: subject start, end; reply start, end; headers start; payload
start, end. They increase, so consecutive rows are the offsets of an Arrow array whose every seventh element is a
subject."""

_SIZE_HEADER = r"\r\nNats-Msg-Size: *[1-9]"
"""Header that a consumer with `headers_only` adds in place of a non-empty payload."""


@dataclass(slots=True)
class Segment:
    """Messages in one block of memory: rows of int32 offsets, in parts, not necessarily in order."""

    memory: Any
    rows: list[Int32s]
    by_subject: bool = False
    """Whether the rows are in the order of their subjects, not of their offsets."""

    def ordered(self) -> Int32s:
        """Return all rows, in the order of their offsets or of their subjects."""
        rows = np.concatenate(self.rows) if len(self.rows) > 1 else self.rows[0]
        if self.by_subject or not (rows[1:, 0] < rows[:-1, 0]).any():
            return rows
        return rows[np.argsort(rows[:, 0], kind="stable")]

    def columns(self, which: Sequence[int]) -> list[pa.BinaryArray]:
        """See `Received.columns`; copies."""
        rows = self.ordered()
        return [between(self.memory, rows[:, column], rows[:, column + 1]) for column in which]


@dataclass(slots=True)
class Received:
    """Received messages; `size` is the bytes of headers and payloads.

    Columns are built on request. Header blocks are as received, b"" for none. `numbers` are arrays of numbers parsed
    from the reply subjects, in the order of `columns`.
    """

    parts: list[Segment] = field(default_factory=list)
    count: int = 0
    size: int = 0
    numbers: tuple[Int64s, ...] | None = None

    @classmethod
    def of(
        cls, subjects: Sequence[bytes], replies: Sequence[bytes], headers: Sequence[bytes], payloads: Sequence[bytes]
    ) -> Received:
        received, memory = cls(), ReceiveBuffer()
        for message in zip(subjects, replies, headers, payloads, strict=True):
            received.append(memory, *message)
        return received

    @property
    def memory(self) -> int:
        """Bytes of memory, including the overhead per message."""
        return self.size + self.count * MESSAGE_OVERHEAD

    @property
    def replies(self) -> pa.BinaryArray:
        return self.columns(REPLY)[0]

    def __len__(self) -> int:
        return self.count

    def columns(self, *which: int) -> list[pa.BinaryArray]:
        """Return `SUBJECT`, `REPLY`, `HEADERS` and `PAYLOAD`, or only the columns named, in order of arrival."""
        which = which or (SUBJECT, REPLY, HEADERS, PAYLOAD)
        if not self.parts:
            return [pa.array([], pa.binary())] * len(which)
        parts = [part.columns(which) for part in self.parts]
        return parts[0] if len(parts) == 1 else [pa.concat_arrays(chunks) for chunks in zip(*parts, strict=True)]

    def last_reply(self) -> bytes:
        """Return the reply subject of the last message received; there must be one."""
        return self._last(REPLY)

    def last_headers(self) -> bytes:
        """Return the header block of the last message received; there must be one."""
        return self._last(HEADERS)

    def _last(self, column: int) -> bytes:
        part = self.parts[-1]
        row = part.rows[-1][-1]
        return bytes(part.memory[row[column] : row[column + 1]])

    def add(self, memory: Any, rows: Int32s, size: int) -> None:
        """Append messages at the offsets `rows` in `memory`."""
        if self.parts and self.parts[-1].memory is memory:
            self.parts[-1].rows.append(rows)
        else:
            self.parts.append(Segment(memory, [rows]))
        self.count += len(rows)
        self.size += size

    def append(self, memory: ReceiveBuffer, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Copy one message into `memory` and append it; segments of earlier messages are never resized."""
        message = b"".join((subject, reply, headers, payload))
        memory.append(message)
        start, memory.start = memory.stop - len(message), memory.stop
        ends = list(accumulate(map(len, (subject, reply, headers, payload)), initial=start))
        rows = np.array([[*ends[:2], *ends[1:3], ends[2], *ends[3:]]], np.int32)
        self.add(memory.segment, rows, len(headers) + len(payload))

    def lacks_payload(self) -> bool:
        """Whether a message is empty and has a size header, as from a consumer with `headers_only`.

        It may also have been published so.
        """
        for part in self.parts:
            for rows in part.rows:
                bare = rows[(rows[:, PAYLOAD] == rows[:, -1]) & (rows[:, HEADERS] < rows[:, PAYLOAD])]
                if len(bare):
                    blocks = between(part.memory, bare[:, HEADERS], bare[:, PAYLOAD])
                    if pc.any(pc.match_substring_regex(blocks, _SIZE_HEADER)).as_py():
                        return True
        return False

    def where(self, mask: Mask) -> Received:
        """Select messages by a mask in the order of `columns`."""
        selected, start = Received(), 0
        for part in self.parts:
            rows = part.ordered()
            selected._add_rows(part.memory, rows[mask[start : start + len(rows)]])
            start += len(rows)
        selected.numbers = self.numbers and tuple(numbers[mask] for numbers in self.numbers)
        return selected

    def _add_rows(self, memory: Any, rows: Int32s) -> None:
        if len(rows):
            self.add(memory, rows, int((rows[:, -1] - rows[:, HEADERS]).sum()))

    def by_subject(self) -> Received:
        """Sort the messages by subject (stable), if that is cheap.

        Most keys follow from the subject: then columns are made in the order of routing, with one copy.
        """
        if len(self.parts) != 1:
            return self
        part, (subjects,) = self.parts[0], self.columns(SUBJECT)
        codes = subjects.dictionary_encode().indices.to_numpy()
        codes = codes.astype(np.min_scalar_type(int(codes.max(initial=0))))  # a radix sort of small integers
        order = np.argsort(codes, kind="stable")
        numbers = self.numbers and tuple(numbers[order] for numbers in self.numbers)
        rows = part.ordered()[order]
        return Received([Segment(part.memory, [rows], by_subject=True)], self.count, self.size, numbers)

    def split(self, count: int) -> tuple[Received, Received]:
        """Return the first `count` messages in the order of `columns`, and the others."""
        if count >= len(self):
            return self, Received()
        first, others = Received(), Received()
        for part in self.parts:
            rows, left = part.ordered(), count - len(first)
            first._add_rows(part.memory, rows[:left])
            others._add_rows(part.memory, rows[left:])
        if self.numbers is not None:
            first.numbers = tuple(numbers[:count] for numbers in self.numbers)
            others.numbers = tuple(numbers[count:] for numbers in self.numbers)
        return first, others


class Inbox:
    """Messages received by one or several subscriptions, and not yet taken.

    `on_data()` is called when messages have been added. `on_status(subject, header_block)` is called immediately for
    frames without a reply subject, which are the server's statuses; with `statuses=False` they are messages.
    `total` and `total_bytes` count everything received, `by_sid` messages and bytes per subscription, and `largest` is
    the size of the largest message since the caller last set it to 0. `by_sid` and `largest` are sizes as the server
    counts them against a pull's `max_bytes`: subject, reply subject, headers and payload. `empty` are the subscriptions
    that received a message without headers and payload since the caller last cleared it.
    """

    __slots__ = (
        "_memory",
        "by_sid",
        "empty",
        "largest",
        "on_data",
        "on_status",
        "rows",
        "statuses",
        "total",
        "total_bytes",
    )

    def __init__(self, on_data: Callable[[], None], *, statuses: bool = True) -> None:
        self.on_data = on_data
        self.statuses = statuses
        self.on_status: Callable[[bytes, bytes], None] = lambda _subject, _headers: None
        self.rows = Received()
        self._memory = ReceiveBuffer()
        self.total = self.total_bytes = self.largest = 0
        self.by_sid: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.empty: set[int] = set()

    def take(self, memory: int) -> Received:
        """Take messages of about `memory` bytes, oldest first."""
        return self._take(self.rows.count, memory)

    def take_run(self, memory: int) -> Received:
        """Like `take`, but only from one block of memory, which makes columns cheaper."""
        parts = self.rows.parts
        return self._take(sum(map(len, parts[0].rows)) if parts else 0, memory)

    def _take(self, count: int, memory: int) -> Received:
        if self.rows.memory > memory and count > 1:
            count = max(1, min(count, len(self.rows) * memory // self.rows.memory))
        if count == len(self.rows):
            taken, self.rows = self.rows, Received()
        else:
            taken, self.rows = self.rows.split(count)
        return taken

    def add(self, memory: Any, rows: Int32s, sids: Int64s) -> None:
        """Append messages; `sids` is an array with the subscription of each. See `Received.add`."""
        sizes = rows[:, -1] - rows[:, HEADERS]
        size = int(sizes.sum())
        self.rows.add(memory, rows, size)
        self.total_bytes += size
        if not sizes.all():
            self.empty.update(sids[sizes == 0].tolist())
        sizes += rows[:, SUBJECT + 1] - rows[:, SUBJECT] + rows[:, REPLY + 1] - rows[:, REPLY]
        self.largest = max(self.largest, int(sizes.max(initial=0)))
        messages, bytes_ = np.bincount(sids), np.bincount(sids, sizes)
        for sid in np.flatnonzero(messages).tolist():
            self._count(sid, int(messages[sid]), int(bytes_[sid]))
        self.on_data()

    def accept(self, sid: int, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Receive one message or status from the stock parser."""
        if not reply and self.statuses:
            self.on_status(subject, headers or b"")
            return
        self.rows.append(self._memory, subject, reply, headers or b"", payload)
        size = len(headers or b"") + len(payload)
        self.total_bytes += size
        if not size:
            self.empty.add(sid)
        size += len(subject) + len(reply)
        self.largest = max(self.largest, size)
        self._count(sid, 1, size)
        self.on_data()

    def _count(self, sid: int, messages: int, size: int) -> None:
        self.total += messages
        before = self.by_sid[sid]
        self.by_sid[sid] = before[0] + messages, before[1] + size
