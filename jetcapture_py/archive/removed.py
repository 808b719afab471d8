"""Records of deliberate removals: expired buckets and erased messages.

    {store.url}/_expired/{stream}.json
    {store.url}/_erased/{stream}/{time}-{id}.json

Both are written before anything is removed, so that a removed message is never reported as lost. The first file only
grows. The second kind, a tombstone, is written once per erasure and never changes. Neither contains any part of a
message.
"""

from __future__ import annotations

import binascii
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import msgspec
import numpy as np
from msgspec import structs

from jetcapture_py.archive.arrays import Int64s, Mask, Seqs
from jetcapture_py.archive.incarnations import check_created
from jetcapture_py.archive.messages import MessageSet, bounds_of
from jetcapture_py.archive.metadata import SmallFile, Time, damaged, is_path, present

EXPIRED, ERASED = "_expired", "_erased"
"""Directories of the records."""
MAX_LISTED = 4096
"""Maximum sequence ranges or timestamps written as numbers; longer lists are compressed."""


def expired_path(stream: str) -> str:
    """The path of the record of expired buckets, relative to the archive's root."""
    return f"{EXPIRED}/{stream}.json"


def erased_directory(stream: str) -> str:
    """The directory of a stream's tombstones, relative to the archive's root."""
    return f"{ERASED}/{stream}"


# ------------------------------------------------------------------ files


class _ErasedFile(SmallFile, frozen=True, kw_only=True):
    time: Time
    by: str
    reason: str
    ranges: list[tuple[int, int]] | str
    times: list[int] | str
    messages: int = 0
    """For readers without this code."""


def _printable(text: str) -> str:
    """Escape bytes of a command line argument that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


# ------------------------------------------------------------------ expired buckets


class SequenceRanges(bytes):
    """Sorted ranges of sequences as int64 bounds: a stream may have millions.

    `_encoded_ranges` gives their JSON.
    """

    __slots__ = ()

    @property
    def pairs(self) -> Int64s:
        return np.frombuffer(self, np.int64).reshape(-1, 2)

    def with_seqs(self, seqs: Seqs) -> Self:
        firsts, lasts = self.pairs.T
        return type(self)(_united(np.concatenate([firsts, seqs]), np.concatenate([lasts, seqs])))

    def encoded(self) -> list[tuple[int, int]] | str:
        return _encoded_ranges(self.pairs)

    @classmethod
    def decoded(cls, listed: object) -> Self:
        """Raises ValueError."""
        return cls(_united(*_decoded_ranges(msgspec.convert(listed, list[tuple[int, int]] | str)).T))


class ExpiredMessages(
    msgspec.Struct, frozen=True, kw_only=True, rename={"created": "stream_created", "expired": "ranges"}
):
    """The expired messages of one incarnation of a stream."""

    created: str
    """The stream's creation time as in the footers' `stream_created`; "" if unknown."""
    oldest: Time
    """Timestamp of the oldest one, UTC."""
    expired: SequenceRanges = SequenceRanges()
    messages: int = 0
    """Number of messages; in the file for readers without this code."""

    def __post_init__(self) -> None:
        check_created(self.created)
        firsts, lasts = self.spans
        structs.force_setattr(self, "messages", int((lasts - firsts + 1).sum()))

    @property
    def spans(self) -> tuple[Seqs, Seqs]:
        """The ranges' first and last sequences, inclusive."""
        firsts, lasts = self.expired.pairs.T
        return firsts, lasts

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges, inclusive, in order."""
        return tuple((first, last) for first, last in self.expired.pairs.tolist())

    def contains(self, seqs: Seqs) -> Mask:
        """Return a mask of the messages among these sequences."""
        firsts, lasts = self.spans
        at = np.searchsorted(firsts, seqs, "right") - 1
        return (at >= 0) & (seqs <= lasts[at]) if len(firsts) else np.zeros(len(seqs), np.bool_)


class Expired(SmallFile, frozen=True, kw_only=True):
    """Messages of a stream that were removed with buckets older than `maintain.keep`."""

    until: Time
    """The latest end of a removed bucket, UTC."""
    incarnations: tuple[ExpiredMessages, ...] = ()
    """In the order of their creation."""

    @property
    def messages(self) -> int:
        """Number of messages, of all incarnations."""
        return sum(part.messages for part in self.incarnations)

    def with_messages(self, created: str, seqs: Seqs, oldest: datetime, until: datetime) -> Expired:
        """Add messages of the incarnation `created` in buckets that ended at `until` or before."""
        parts = {part.created: part for part in self.incarnations}
        part = parts.get(created) or ExpiredMessages(created=created, oldest=oldest)
        parts[created] = structs.replace(part, oldest=min(part.oldest, oldest), expired=part.expired.with_seqs(seqs))
        ordered = tuple(parts[item] for item in sorted(parts))
        return structs.replace(self, until=max(self.until, until), incarnations=ordered)

    def ranges(self, created: Iterable[str]) -> list[tuple[int, int]]:
        """Return these incarnations' ranges."""
        chosen = {*created}
        return [span for part in self.incarnations if part.created in chosen for span in part.ranges]

    def contains(self, seqs: Seqs) -> Mask:
        """Return a mask of the sequences that expired in any incarnation."""
        mask = np.zeros(len(seqs), np.bool_)
        for part in self.incarnations:
            mask |= part.contains(seqs)
        return mask


# ------------------------------------------------------------------ erased messages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tombstone:
    """The record of one erasure: the removed messages, when, by whom and why. It has none of their content.

    Messages have timestamps, because a rewound or recreated stream reuses sequences; later messages stay.
    """

    stream: str
    time: datetime
    """When they were erased, UTC."""
    by: str
    """Who erased them: user and host."""
    reason: str
    """Why, as given."""
    messages: MessageSet

    @property
    def path(self) -> str:
        """The file's path, relative to the archive's root; its digits distinguish erasures in the same second."""
        digits = hashlib.blake2b(self.encode(), digest_size=4).hexdigest()
        return f"{erased_directory(self.stream)}/{self.time:%Y%m%dT%H%M%SZ}-{digits}.json"

    def encode(self) -> bytes:
        return _ErasedFile(
            stream=self.stream,
            time=self.time,
            by=_printable(self.by),
            reason=_printable(self.reason),
            messages=len(self.messages),
            ranges=_encoded_ranges(bounds_of(self.messages.seqs)),
            times=_encoded_times(self.messages.times),
        ).encode()

    @classmethod
    def decode(cls, data: bytes, stream: str, path: str) -> Tombstone:
        """Read the content of the file at `path`. Raises JetcaptureError if damaged, or of another stream."""
        file = _ErasedFile.decode(data, stream, path)
        try:
            (firsts, lasts), times = _decoded_ranges(file.ranges).T, _decoded_times(file.times)
            if (firsts > lasts).any() or sum((lasts - firsts + 1).tolist()) != len(times):
                raise ValueError("its ranges and times do not fit")
        except (ValueError, OverflowError) as error:
            raise damaged(path, error) from error
        starts = np.cumsum(lasts - firsts + 1) - (lasts - firsts + 1)
        seqs = np.repeat(firsts - starts, lasts - firsts + 1) + np.arange(len(times))
        return cls(stream=stream, time=file.time, by=file.by, reason=file.reason, messages=MessageSet(seqs, times))


class Erased(MessageSet):
    """All erased messages of a stream. Without tombstones it is false."""

    def __init__(self, tombstones: Mapping[str, Tombstone] | None = None, known: Erased | None = None) -> None:
        """`tombstones` by path; `known` has the ones read earlier."""
        new = tombstones or {}
        self.tombstones: frozenset[str] = (known.tombstones if known is not None else frozenset()) | new.keys()
        """Paths of the tombstones."""
        every = MessageSet.union([*([] if known is None else [known]), *(stone.messages for stone in new.values())])
        super().__init__(every.seqs, every.times)

    @classmethod
    def read(
        cls,
        stream: str,
        list_notes: Callable[[str], Iterable[str]],
        read_notes: Callable[[Iterable[str]], Iterable[bytes | None]],
        known: Erased | None = None,
    ) -> Erased:
        """Read a stream's tombstones, except those in `known`.

        `list_notes` lists a directory, and `read_notes` reads files, None for a removed one. Raises JetcaptureError,
        also if a tombstone is damaged.
        """
        paths = {path for path in list_notes(erased_directory(stream)) if is_path(path)}
        if known is not None and not known.tombstones <= paths:  # a tombstone was removed
            known = None
        new = paths - (known.tombstones if known is not None else frozenset())
        if known is not None and not new:
            return known
        return cls({path: Tombstone.decode(data, stream, path) for path, data in present(new, read_notes)}, known)


# ------------------------------------------------------------------ ranges


def _united(firsts: Seqs, lasts: Seqs) -> bytes:
    """Join ranges, in any order, that overlap or touch; return the bounds of all. Raises ValueError."""
    if (firsts > lasts).any():
        raise ValueError("a range ends before it begins")
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    begins = np.concatenate([[True], firsts[1:] > lasts[:-1] + 1])[: len(firsts)]
    return np.stack([firsts[begins], lasts[np.roll(begins, -1)]], axis=1).astype(np.int64).tobytes()


def _encoded_ranges(pairs: Int64s) -> list[tuple[int, int]] | str:
    """Return ranges as JSON: a list of pairs if they are few, else the compressed differences of all values."""
    return pairs.tolist() if len(pairs) <= MAX_LISTED else _compressed(pairs.ravel())


def _decoded_ranges(listed: list[tuple[int, int]] | str) -> Int64s:
    """Decode the result of `_encoded_ranges`. Raises ValueError."""
    values = _decompressed(listed) if isinstance(listed, str) else np.array(listed, np.int64)
    return values.reshape(-1, 2)


def _encoded_times(times: Int64s) -> list[int] | str:
    """Return times as JSON: a list of differences if they are few, else these compressed."""
    return np.diff(times, prepend=0).tolist() if len(times) <= MAX_LISTED else _compressed(times)


def _decoded_times(listed: list[int] | str) -> Int64s:
    """Decode the result of `_encoded_times`. Raises ValueError."""
    return _decompressed(listed) if isinstance(listed, str) else np.cumsum(np.array(listed, np.int64))


def _compressed(values: Int64s) -> str:
    differences = np.diff(values, prepend=0).astype("<i8")
    return binascii.b2a_base64(zlib.compress(differences.tobytes()), newline=False).decode()


def _decompressed(text: str) -> Int64s:
    try:
        data = zlib.decompress(binascii.a2b_base64(text))
    except zlib.error as error:
        raise ValueError(error) from error
    return np.cumsum(np.frombuffer(data, "<i8")).astype(np.int64)
