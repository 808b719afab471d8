"""Validate messages and encode them in NATS's protocol, as columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive.arrow_bytes import byte_strings
from jetcapture_py.errors import SourceError

MESSAGE_ID = "Nats-Msg-Id"
MAX_SUBJECT_BYTES = 3840
"""Maximum length of a subject: servers close the connection after a command line of more than 4096 bytes."""
PLAIN_SUBJECT = r"^[\w-]+(\.[\w-]+)*\z"
"""Matches most subjects: ASCII words. Arrow and Java interpret it alike."""

_SLICE_ROWS = 4096
_SLICE_BYTES = 8 * 1024 * 1024
_VERSION = "NATS/1.0\r\n"
_SUBJECT = re.compile(r"[^\s\x00-\x1f\x7f.]+(\.[^\s\x00-\x1f\x7f.]+)*")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_STORED_NAME = re.compile(r"(?:(?!\r\n)[^:])+")
_BREAKS, _STORED_BREAKS = r"[\r\n\x00]", r"\r\n"


def check_subject(subject: str) -> None:
    """Raise SourceError unless a message can be published to `subject`.

    Wildcards, empty tokens, white space and the server's own `$JS.` and `$SYS.` are rejected: a subject may be built
    from data, which must not be able to call the API.
    """
    if not _SUBJECT.fullmatch(subject):
        raise SourceError(f"invalid subject {subject!r}: expected tokens without white space, separated by single dots")
    if not {"*", ">"}.isdisjoint(subject.split(".")):
        raise SourceError(f"invalid subject {subject!r}: a message cannot be published to a wildcard")
    if subject.startswith(("$JS.", "$SYS.")):
        raise SourceError(f"invalid subject {subject!r}: it is reserved for the server")
    if (size := len(subject.encode(errors="surrogateescape"))) > MAX_SUBJECT_BYTES:
        raise SourceError(f"invalid subject {subject[:40]!r}…: {size} bytes exceed the protocol's limit")


def unusual_subjects(subjects: pa.Array) -> list[str]:
    """Return the distinct subjects, strings or binary, that need `check_subject`: all but short and plain ones."""
    plain = pc.and_(
        pc.match_substring_regex(subjects, PLAIN_SUBJECT), pc.less_equal(pc.binary_length(subjects), MAX_SUBJECT_BYTES)
    )
    unusual = pc.unique(subjects.filter(pc.invert(plain))).cast(pa.binary()).to_pylist()
    return [subject.decode(errors="surrogateescape") for subject in unusual]


def _check_name(name: str, allowed: re.Pattern[str]) -> None:
    if not allowed.fullmatch(name):
        raise SourceError(f"invalid header name {name!r}: expected printable ASCII without spaces and colons")


def header_blocks(
    headers: pa.MapArray | None,
    extra: Mapping[str, pa.Array],
    rows: int,
    *,
    lines: pa.BinaryArray | None = None,
    stored: bool = False,
) -> pa.BinaryArray | None:
    """Encode the header block of every row, "" for a row without headers; None if no row has any.

    `headers` is map<string, list<string>>; null lists and values in it are skipped. `extra` has more headers by name,
    null for none; they follow the others and replace headers of that name. `lines` are raw lines with line ends, null
    for none; they are not validated.

    `stored` also allows headers that NATS has accepted: anything except line breaks, and colons in names. Raises
    SourceError for invalid headers.
    """
    parts = []
    has: Any = None
    for name, values in extra.items():
        _check_name(name, _HEADER_NAME)
        _check_values(values, _BREAKS, lambda _, name=name: name)  # type: ignore[misc]
        parts.append(_lines(_text(name), values))
        has = values.is_valid() if has is None else pc.or_(has, values.is_valid())
    if headers is not None and headers.null_count < rows:
        has = headers.is_valid() if has is None else pc.or_(has, headers.is_valid())
        if any(name in extra for name in distinct_names(headers)):
            headers = without(headers, extra.__contains__)
        parts.insert(0, _map_lines(headers, stored))
    if lines is not None and lines.null_count < rows:
        has = lines.is_valid() if has is None else pc.or_(has, lines.is_valid())
        parts.insert(0, pc.fill_null(lines, b""))
    if has is None or not pc.any(has).as_py():
        return None
    body = pc.binary_join_element_wise(_text(_VERSION), *parts, _text("\r\n"), _text(""))
    return pc.if_else(has, body, _text(""))


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text.encode(), pa.binary())


def _lines(names: pa.Array | pa.Scalar, values: pa.Array) -> pa.BinaryArray:
    """Return `name: value` lines; "" for null values."""
    lines = pc.binary_join_element_wise(names, _text(": "), values.cast(pa.binary()), _text("\r\n"), _text(""))
    return pc.fill_null(lines, _text("")) if values.null_count else lines


def _check_values(values: pa.Array, breaks: str, name: Callable[[int], str]) -> None:
    # as binary, because the text may not be valid UTF-8
    broken = pc.fill_null(pc.match_substring_regex(values.cast(pa.binary()), breaks), False)  # noqa: FBT003
    if pc.any(broken).as_py():
        raise SourceError(
            f"invalid value of header {name(pc.index(broken, True).as_py())}: it contains a line break or NUL"
        )


def _map_lines(headers: pa.MapArray, stored: bool) -> pa.BinaryArray:
    """Return the joined header lines of every row."""
    rows, names, lists = _entries(headers)
    for name in pc.unique(names).to_pylist():
        _check_name(name, _STORED_NAME if stored else _HEADER_NAME)
    values = pc.list_flatten(lists)
    entries = pc.list_parent_indices(lists)
    if values.null_count:
        values, entries = values.drop_null(), entries.filter(values.is_valid())
    _check_values(values, _STORED_BREAKS if stored else _BREAKS, lambda at: names[entries[at].as_py()].as_py())
    lines = _lines(names.take(entries).cast(pa.binary()), values)
    ends = np.zeros(len(headers) + 1, np.int32)
    np.cumsum(np.bincount(rows[entries.to_numpy()], minlength=len(headers)), out=ends[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), lines), _text(""))


def _entries(headers: pa.MapArray) -> tuple[Any, pa.Array, pa.Array]:
    """Return row number (a numpy array), name and list of values of every entry, in order."""
    offsets = headers.offsets.to_numpy()
    sizes = np.diff(offsets)
    if headers.null_count:
        sizes = np.where(headers.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
    rows = np.repeat(np.arange(len(headers)), sizes)
    indexes = np.arange(len(rows)) + np.repeat(offsets[:-1] - (np.cumsum(sizes) - sizes), sizes)
    at = pa.array(indexes)
    return rows, headers.keys.take(at), headers.items.take(at)


def distinct_names(headers: pa.MapArray) -> list[str]:
    """Return the distinct header names."""
    names: list[str] = pc.unique(_entries(headers)[1]).to_pylist()
    return names


def without(headers: pa.MapArray, refused: Callable[[str], bool]) -> pa.MapArray:
    """Remove headers with a refused name. Maps without entries stay empty, not null."""
    if not (names := [name for name in distinct_names(headers) if refused(name)]):
        return headers
    rows, keys, items = _entries(headers)
    kept = pc.invert(pc.is_in(keys, pa.array(names, keys.type)))
    ends = np.zeros(len(headers) + 1, np.int32)
    left = rows[kept.to_numpy(zero_copy_only=False)]
    np.cumsum(np.bincount(left, minlength=len(headers)), out=ends[1:])
    return pa.MapArray.from_arrays(
        pa.array(ends), keys.filter(kept), items.filter(kept), type=headers.type, mask=headers.is_null()
    )


def frames(subjects: pa.Array, replies: pa.Array, blocks: pa.Array | None, payloads: pa.Array) -> list[bytes]:
    """Encode the commands that publish messages: binary columns without nulls, less than 2 GiB in total.

    An empty block means no headers.
    """
    sizes = pc.binary_length(payloads)
    space, end = _text(" "), _text("\r\n")
    plain: list[Any] = [_text("PUB "), subjects, space, replies, space, _digits(sizes), end, payloads, end]
    if blocks is None:
        return byte_strings(pc.binary_join_element_wise(*plain, _text("")))
    block_sizes = pc.binary_length(blocks)
    total = _digits(pc.add(block_sizes, sizes))
    full = [_text("HPUB "), subjects, space, replies, space, _digits(block_sizes), space, total, end]
    joined = pc.binary_join_element_wise(*full, blocks, payloads, end, _text(""))
    bare = pc.equal(block_sizes, 0)
    if pc.any(bare).as_py():
        joined = pc.if_else(bare, pc.binary_join_element_wise(*plain, _text("")), joined)
    return byte_strings(joined)


def _digits(numbers: pa.Array) -> pa.BinaryArray:
    return numbers.cast(pa.string()).cast(pa.binary())


def slices(payloads: pa.Array) -> Iterator[tuple[int, int]]:
    """Yield start and length of slices with a limited number of rows and bytes; one row may exceed the latter."""
    ends = np.cumsum(pc.fill_null(pc.binary_length(payloads), 0).to_numpy(), dtype=np.int64)
    start = 0
    while start < len(payloads):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + _SLICE_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + _SLICE_ROWS, len(payloads))
        yield start, stop - start
        start = stop


def fitting(messages: list[bytes], room: int) -> int:
    """Return how many of the first messages fit in `room` bytes, at least one."""
    fitting = int(np.searchsorted(np.cumsum(list(map(len, messages))), room, side="right"))
    return max(1, fitting)


def has_id(message: bytes) -> bool:
    """Whether a frame has a message id header."""
    line, _, rest = message.partition(b"\r\n")
    if not line.startswith(b"HPUB "):
        return False
    return f"\r\n{MESSAGE_ID}:".encode() in rest[: int(line.split(b" ")[3])]
