"""Remove messages from objects in NDJSON and CSV: every other line stays as it is, to the byte.

The lines are copied, not parsed and rewritten, so no value can change. They are compressed again in the same way. The
new object is read back and compared before the caller removes the old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask, Micros, Seqs
from jetcapture_py.archive.block_writer import compressed
from jetcapture_py.archive.messages import MessageSet
from jetcapture_py.compaction.checked import overwrite
from jetcapture_py.compaction.plan import Source
from jetcapture_py.compaction.rewrite import Rewritten
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.store.removal import Removal
from jetcapture_py.verify.examine import IDENTITY_TYPES, DamagedError, ObjectExaminer, text_rows

_PIECE = 8 << 20
"""Bytes of text read at once."""
_CODECS = {suffix: name for name, suffix in layout.COMPRESSED.items()}
_LF, _QUOTE = b'\n"'


def rewrite_text(archive: ArchiveFiles, file: File, dropped: MessageSet) -> Rewritten:
    """Store an object's lines again, without those of the messages `dropped`. The source stays.

    Raises VanishedError, StoreError, and JetcaptureError if the new object does not read like the source.
    """
    name = file.name
    assert name is not None  # noqa: S101  # every caller has an object
    shown, read = f"{archive.shown}/{file.path}", archive.at(file.path)
    source = Source(name, file.size)
    try:
        seqs, times = _positions(archive, file, name.suffix)
    except (pa.ArrowException, ValueError) as error:
        raise JetcaptureError(f"{shown} cannot be read: its lines are damaged") from error
    stays = ~dropped.contains(seqs, times)
    messages, rows = MessageSet(seqs[stays], times[stays]), int(stays.sum())
    if not rows:
        return Rewritten(source=source, target=None, dropped=len(seqs), removal=Removal(target=read))
    target = replace(
        name,
        first_seq=int(messages.seqs[0]),
        last_seq=int(messages.seqs[-1]),
        rows=rows,
        digest=layout.digest(messages.seqs.tobytes(), messages.times.tobytes()),
    )
    if target == name:
        return Rewritten(source=source, target=name, dropped=0, removal=None)
    format_, *end = name.suffix.removeprefix(".").split(".")
    out, expected = pa.BufferOutputStream(), hashlib.sha256()
    mask = np.concatenate([np.ones(int(format_ == "csv"), np.bool_), stays])  # including the line of column names
    with compressed(out, _CODECS[f".{end[0]}" if end else ""]) as sink:
        for text in _kept(archive, file, mask, quoted=format_ == "csv"):
            sink.write(text)
            expected.update(text)
    data = out.getvalue()
    overwrite(archive, target, data)
    again = archive.at(target.path)
    try:
        ObjectExaminer(archive, None).identities(again, target)
    except DamagedError as error:
        raise JetcaptureError(f"{archive.shown}/{target.path} {error}; its source is kept") from error
    actual = hashlib.sha256()
    for piece in pieces(archive, again):
        actual.update(piece)
    if actual.digest() != expected.digest():
        raise JetcaptureError(f"{archive.shown}/{target.path} does not match its source, which is kept")
    digest = hashlib.sha256(data).hexdigest()
    removal = Removal(target=read, holders=[again])
    return Rewritten(source=source, target=target, dropped=len(seqs) - rows, removal=removal, sha256=digest)


def _positions(archive: ArchiveFiles, file: File, suffix: str) -> tuple[Seqs, Micros]:
    """Return the sequence, and the timestamp in microseconds, of every line."""
    rows = pa.concat_tables(text_rows(archive, file, suffix, IDENTITY_TYPES))
    return rows[layout.SEQ].to_numpy(), rows[layout.TIMESTAMP].cast(pa.int64()).to_numpy()


def _kept(archive: ArchiveFiles, file: File, mask: Mask, *, quoted: bool) -> Iterator[bytes]:
    """Yield the lines of an object that are in a mask. Raises JetcaptureError if it has more or fewer lines."""
    rest, start = b"", 0
    for piece in pieces(archive, file):
        data = rest + piece
        ends = _ends(data, quoted=quoted)
        stays = mask[start : start + len(ends)]
        if len(stays) < len(ends):
            break
        begin = 0
        # runs of lines that all stay, or all go
        for edge in (*(np.flatnonzero(stays[1:] != stays[:-1]) + 1).tolist(), len(ends)):
            if edge:
                end = int(ends[edge - 1])
                if stays[edge - 1]:
                    yield data[begin:end]
                begin = end
        rest, start = data[begin:], start + len(ends)
    else:
        if start == len(mask) and not rest:
            return
    raise JetcaptureError(f"{archive.shown}/{file.path} has other lines than rows: it is left as it is")


def _ends(data: bytes, *, quoted: bool) -> npt.NDArray[np.intp]:
    """Return the end of each complete line; line ends in quotes are part of a line."""
    characters = np.frombuffer(data, np.uint8)
    ends = characters == _LF
    if quoted:
        ends &= np.bitwise_and(np.cumsum(characters == _QUOTE), 1) == 0
    return np.flatnonzero(ends) + 1


def pieces(archive: ArchiveFiles, file: File) -> Iterator[bytes]:
    """Yield an object's text."""
    _, _, *end = file.path.rpartition("/")[2].split(".")
    with archive.stream(file) as stored:
        text: Any = pa.CompressedInputStream(stored, _CODECS[f".{end[0]}"]) if end else stored
        while piece := text.read(_PIECE):
            yield piece
