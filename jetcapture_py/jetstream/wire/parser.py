"""Find MSG and HMSG frames of our own subscriptions, many at once, without an object for each."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from jetcapture_py.archive.arrays import Bytes, Int32s, Int64s, Mask
from jetcapture_py.archive.arrow_bytes import between, text_of
from jetcapture_py.jetstream.wire.inbox import OFFSETS, Inbox
from jetcapture_py.jetstream.wire.transport import ReceiveBuffer
from jetcapture_py.log import event

log = logging.getLogger("jetcapture.wire")

MANY = 64
"""Minimum number of frames to parse together."""
LARGE = 2048
"""Frame size in bytes from which on frames are parsed one by one: parsing together scans payloads as well."""
_END = re.compile(rb"\r\n")
_MAX_CONTROL_LINE = 1 << 20
_MAX_DIGITS = 12
_MAX_DIGITS_TOGETHER = 9


def receive_failed(error: Exception) -> ProtocolError:
    """Log the error and return one that makes nats-py reconnect; any other would silently end its read loop."""
    event(log, logging.ERROR, "receive.failed", error=error)
    return ProtocolError()


class FrameParser(Parser):
    """Parses frames of registered subscriptions and passes all others to the stock parser, one at a time.

    Received bytes are in a `ReceiveBuffer`, and messages become offsets in it. Many frames are parsed together
    (`_many`), few one by one (`_few`), with the same result.
    """

    def __init__(self, nc: Client, inboxes: Mapping[int, Inbox]) -> None:
        self.reads = 0  # from the socket, partial messages included
        self._inboxes = inboxes
        self._epoch = 0
        super().__init__(nc)

    def reset(self) -> None:
        """Clear the buffer after a lost connection."""
        super().reset()
        self._epoch += 1
        self._memory = ReceiveBuffer()
        self._typical = 0  # bytes of a frame

    async def parse(self, data: bytes | ReceiveBuffer = b"") -> None:
        """Parse received bytes; keep those of an incomplete frame for the next call."""
        self.reads += 1
        if isinstance(data, ReceiveBuffer):
            self._memory = data
        else:
            self._memory.append(data)
        memory = self._memory
        if len(memory) < memory.needed:
            return  # wait until a large payload is complete
        epoch = self._epoch
        while len(memory):
            try:
                frame = self._take(memory)
            except Exception as error:
                raise receive_failed(error) from error
            if not frame:
                break
            await self._delegate(frame)
            if self._epoch != epoch:
                return  # that frame ended the connection
        if len(memory) > _MAX_CONTROL_LINE and not memory.needed:
            raise ProtocolError

    async def _delegate(self, frame: bytes) -> None:
        epoch = self._epoch
        try:
            await super().parse(frame)
        except ProtocolError:
            raise
        except Exception as error:
            raise receive_failed(error) from error
        if self._epoch == epoch and (self.buf or self.state != AWAITING_CONTROL_LINE):
            raise ProtocolError  # the frame was complete, so the stock parser would wait forever

    def _take(self, memory: ReceiveBuffer) -> bytes:
        """Parse frames up to one that is not ours and return that; b"" if there is no further complete frame."""
        memory.needed = 0
        while True:
            if self._inboxes and self._typical < LARGE and len(memory) >= MANY * self._typical:
                self._many(memory)
            taken, frame = self._few(memory)
            if frame or taken < MANY:
                return frame

    def _few(self, memory: ReceiveBuffer) -> tuple[int, bytes]:
        """Parse up to `MANY` frames one by one, up to one that is not ours; return their number, and that frame if it
        is complete."""
        segment, position, stop = memory.segment, memory.start, memory.stop
        rows_by_inbox: defaultdict[Inbox, list[tuple[int, ...]]] = defaultdict(list)
        taken, frame = 0, b""
        while position < stop and taken < MANY:
            eol = _END.search(segment, position, stop)
            if eol is None:
                break
            line = bytes(segment[position : eol.start()])
            args = line.split(b" ")
            start = eol.end()
            headers = args[0] == b"HMSG"
            bare = len(args) == 4 + headers
            sid, headers_size, end = None, 0, start
            try:
                if args[0] in (b"MSG", b"HMSG") and (bare or len(args) == 5 + headers) and b"" not in args:
                    headers_size = int(args[-2]) if headers else 0
                    end = start + int(args[-1])
                    sid = self._ours(args[2], bare)
            except ValueError:
                sid = None
            if sid is None or not 0 <= headers_size <= end - start:
                length = _frame_length(line, position, start)
                if position + length > stop:
                    memory.needed = length
                else:
                    frame = bytes(segment[position : position + length])
                    position += length
                break
            if end + 2 > stop:
                memory.needed = end + 2 - position
                break
            subject = position + len(args[0]) + 1
            subject_end = subject + len(args[1])
            reply = subject_end + len(args[2]) + 2
            reply_end = reply if bare else reply + len(args[3])
            row = (subject, subject_end, reply, reply_end, start, start + headers_size, end)
            rows_by_inbox[self._inboxes[sid]].append((*row, sid))
            position = end + 2
            taken += 1
        if taken:
            self._typical = (position - len(frame) - memory.start) // taken
        memory.start = position
        for inbox, rows_of_it in rows_by_inbox.items():
            rows = np.array(rows_of_it, np.int64)
            inbox.add(segment, rows[:, :-1].astype(np.int32), rows[:, -1])
        return taken, frame

    def _ours(self, text: bytes, bare: bool) -> int | None:
        """Parse the subscription id; None if it is not ours, or the frame is a status."""
        sid = int(text)
        inbox = self._inboxes.get(sid)
        return None if inbox is None or b"%d" % sid != text or (bare and inbox.statuses) else sid

    def _many(self, memory: ReceiveBuffer) -> None:
        """Parse frames together, up to the first that is incomplete, not ours or unusual.

        Every line that looks like a control line is parsed as one. A message's length leads to the next control line:
        as long as the frames follow each other without a gap from the first one, which is known to start a frame, they
        are real, whatever payloads contain.
        """
        base = memory.start
        region = np.frombuffer(memory.segment, np.uint8, len(memory), base)
        returns = _indexes(region == _RETURN)
        if len(returns) < MANY:
            return
        behind = returns[:-1] + 2
        initial = region.take(behind, mode="clip")
        starting = np.flatnonzero(((initial == _M) | (initial == _H)) & (behind <= returns[1:]))
        starts = np.concatenate(([0], behind[starting]))
        eols = returns[np.concatenate(([0], starting + 1))]
        edges, lines = text_of(between(region, starts, eols))
        spaces = np.flatnonzero(lines == _SPACE)
        if not len(spaces):
            return
        first = np.arange(0, len(spaces), _WORDS)  # the usual case: `_WORDS` spaces in every line
        if len(spaces) != _WORDS * len(starts) or not (
            (spaces[first] >= edges[:-1]).all() and (spaces[first + _WORDS - 1] < edges[1:]).all()
        ):
            first = np.searchsorted(spaces, edges[:-1])
        beyond = np.append(first[1:], len(spaces))

        def space(index: Int64s) -> Int64s:
            return spaces.take(index, mode="clip")

        headers = lines.take(edges[:-1], mode="clip") == _H
        words = beyond - first - headers
        bare = words == _WORDS - 1
        subject, subject_end, behind_sid, last = space(first) + 1, space(first + 1), space(first + 2), space(beyond - 1)
        reply, reply_end = behind_sid + 1, np.where(bare, behind_sid + 1, space(first + 3))
        numbers, canonical = _decimals(
            lines, np.concatenate((subject_end, last)) + 1, np.concatenate((behind_sid, edges[1:]))
        )
        (sids, sizes), canonical = numbers.reshape(2, -1), canonical.reshape(2, -1)
        right = ((words == _WORDS) | bare) & canonical[0] & canonical[1]
        right &= (subject < subject_end) & (bare | (reply < reply_end))
        headers_sizes = np.zeros(len(starts), np.int64)
        if headers.any():
            numbers_of_headers, headers_right = _decimals(lines, space(beyond - 2) + 1, last)
            headers_sizes[headers] = numbers_of_headers[headers]
            right &= ~headers | (headers_right & (numbers_of_headers <= sizes))
        contents = eols + 2
        ends = contents + sizes
        right &= (ends + 2 <= len(region)) & (region.take(eols + 1, mode="clip") == _NEWLINE)
        right[1:] &= starts[1:] == ends[:-1] + 2
        count = len(right) if right.all() else int(right.argmin())
        to_segment = starts - edges[:-1] + base
        rows = np.empty((count, OFFSETS), np.int32)
        for index, column in enumerate(
            (
                subject + to_segment,
                subject_end + to_segment,
                reply + to_segment,
                reply_end + to_segment,
                contents + base,
                contents + headers_sizes + base,
                ends + base,
            )
        ):
            rows[:, index] = column[:count]
        self._give(memory, sids[:count], bare[:count], rows)

    def _give(self, memory: ReceiveBuffer, sids: Int64s, bare: Mask, rows: Int32s) -> None:
        """Deliver messages to their inboxes, up to the first status or message without an inbox."""
        inboxes = list(dict.fromkeys(self._inboxes.values()))
        numbers = np.full(max(self._inboxes, default=0) + 2, -1)  # inbox number by sid; the last element is -1
        for sid, inbox in self._inboxes.items():
            numbers[sid] = inboxes.index(inbox)
        owners = numbers.take(sids, mode="clip")
        ours = owners >= 0
        if bare.any():
            ours &= ~bare | ~np.array([inbox.statuses for inbox in inboxes])[owners]
        count = len(sids) if ours.all() else int(ours.argmin())
        if not count:
            return
        memory.start, before = int(rows[count - 1, -1]) + 2, memory.start
        self._typical = (memory.start - before) // count
        for number, inbox in enumerate(inboxes):
            some = owners[:count] == number
            if some.all():
                inbox.add(memory.segment, rows[:count], sids[:count])
            elif some.any():
                inbox.add(memory.segment, rows[:count][some], sids[:count][some])


_RETURN, _NEWLINE, _SPACE, _H, _M = b"\r\n HM"
_WORDS = 4
"""Spaces in the control line of a message with a reply subject; headers have one more."""


def _indexes(where: Mask) -> Int64s:
    """Return the indexes of True values, which must be rare."""
    bits = np.packbits(where)
    some = np.flatnonzero(bits != 0)  # numpy scans booleans eight at a time, but integers one by one
    bit_offsets = np.flatnonzero(np.unpackbits(bits[some]).view(bool))
    indexes: Int64s = some[bit_offsets >> 3] * 8 + (bit_offsets & 7)
    return indexes


def _decimals(text: Bytes, starts: Int64s, ends: Int64s) -> tuple[Int64s, Mask]:
    """Parse decimals between these offsets; also return a mask of valid ones: canonical and not too long."""
    widths = ends - starts
    width = int(min(widths.max(initial=1), _MAX_DIGITS_TOGETHER))
    right = (widths > 0) & (widths <= width) & ((widths == 1) | (text.take(starts, mode="clip") != ord("0")))
    values = np.zeros(len(starts), np.int64)
    for power in range(width):  # from the last digit
        digits = text.take(ends - 1 - power, mode="clip") - np.uint8(ord("0"))
        digits *= widths > power
        right &= digits < 10
        values += digits * np.int64(10**power)
    return values, right


def _frame_length(line: bytes, position: int, start: int) -> int:
    """Return the length in bytes of the frame with this control line, including the payload and its line end."""
    args: list[Any] = line.split()
    if args and args[0] in (b"MSG", b"HMSG") and args[-1].isdigit() and len(args[-1]) <= _MAX_DIGITS:
        return start - position + int(args[-1]) + 2
    return start - position
