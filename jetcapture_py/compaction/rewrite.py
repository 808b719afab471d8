"""Remove messages from objects: write a new object without them, read it back, compare, and remove the old one.

The new object has fewer rows than the old one, against the rule of `plan`. A concurrent compaction could therefore take
the new object for a copy of the old one, and each side would remove the object that the other relies on. So the new
object's footer names the objects that it replaces, and a compaction skips a unit that has both. While both exist,
readers compare their messages; afterwards the new object is like any other.

A compaction that read the old object earlier may write the removed messages into another object. Running the removal
again finds them there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from jetcapture_py.archive.bundles import MAX_ROWS
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet, RowIds
from jetcapture_py.archive.ordering import PIECE_BYTES
from jetcapture_py.archive.writer import ROW_GROUP_BYTES, EncodedBlock
from jetcapture_py.compaction.checked import (
    equal_rows,
    overwrite,
    row_groups,
    rows_to_write,
    writer_like,
)
from jetcapture_py.compaction.files import Files, plain_rows
from jetcapture_py.compaction.plan import Source
from jetcapture_py.errors import JetcaptureError, StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import Removal, remove

Change = Callable[[pa.Table], pa.Table]
"""Returns replacements for these rows: as many, of the same messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A source object and the object that replaces it."""

    source: Source
    """The object that is replaced."""
    target: ObjectName | None
    """The object with its remaining rows; None without any."""
    dropped: int
    """Number of removed rows."""
    removal: Removal | None
    """How to remove the source. None if it was replaced in place, or if the target existed without naming the source in
    its footer: a compaction may be about to remove the target in favor of the source. The next run removes the
    source."""
    sha256: str | None = None
    """SHA-256 of the target's bytes; None if an earlier run has written it."""


def rewrite(
    archive: ArchiveFiles, source: Source, dropped: MessageSet, sealed_by: str, change: Change | None = None
) -> Rewritten:
    """Store the rows of a Parquet object again, without the messages `dropped`; `change` may change the others.

    `remove_replaced` removes the source. Raises VanishedError, StoreError, and JetcaptureError if the new object does
    not read like the source.
    """
    files, read = Files(archive), archive.at(source.name.path)
    info = files.info(source)
    rows = _Rows(partial(_rows, files, info, dropped, change))
    replaces = (source.name.digest, *info.details.replaces)
    encoded = _encode(info, sealed_by, rows(), replaces)
    if encoded is None:
        return Rewritten(source=source, target=None, dropped=info.details.rows, removal=Removal(target=read))
    name, written = encoded.name, encoded.data
    new = files.at(name.path) is None
    if new:
        files.put(name, written)  # a capture's object of the same name stays
    expected: Callable[[], Iterator[pa.Table]] = rows
    known = files.info_at(name.path)
    before = () if known is None else known.details.replaces
    if known and not (source.name.digest in before and (new or equal_rows(rows(), row_groups(files, known)))):
        every = dict.fromkeys((*replaces, *before))
        whole = _encode(info, sealed_by, rows(), [digest for digest in every if digest != name.digest])
        written = (whole or encoded).data
        if name == source.name:  # its rows cannot be read again after that
            expected = partial(_rows_in, files, name, written)
            if not equal_rows(rows(), expected()):
                raise JetcaptureError(f"{files.shown}/{name.path} cannot be written again with the same messages")
        overwrite(archive, name, written)
    elif not new:
        written = None  # it has been written before
    again = Files(archive)  # with an empty cache, unlike the other
    holder, stored = again.at(name.path), again.info_at(name.path)
    if (
        holder is None
        or stored is None
        or stored.details.rows != name.rows
        or not equal_rows(expected(), row_groups(again, stored))
    ):
        raise JetcaptureError(f"{files.shown}/{name.path} does not match its source, which is kept")
    replaced = name != source.name and source.name.digest in before
    return Rewritten(
        source=source,
        target=name,
        dropped=info.details.rows - name.rows,
        removal=Removal(target=read, holders=[holder]) if replaced else None,
        sha256=None if written is None else hashlib.sha256(written).hexdigest(),
    )


def _rows_in(files: Files, name: ObjectName, data: pa.Buffer) -> Iterator[pa.Table]:
    """Yield the rows of an object that is not yet stored."""
    with files.archive.parquet(files.archive.at(name.path, data.size), data.to_pybytes()) as file:
        for index in range(file.metadata.num_row_groups):
            yield plain_rows(file.read_row_group(index, use_threads=False))


def remove_replaced(archive: ArchiveFiles, done: Sequence[Rewritten]) -> tuple[int, list[str]]:
    """Remove sources; return their number and the failures. An object that has changed meanwhile stays.

    The caller first makes sure that the dropped messages are stored where they belong.
    """
    results = remove(archive, [rewritten.removal for rewritten in done if rewritten.removal is not None])
    failed = [result for result in results if isinstance(result, StoreError)]
    errors = [str(error) for error in failed if not isinstance(error, VanishedError)]
    return sum(result is True for result in results), errors


class _Rows:
    """Reads the remaining rows, each time it is called; caches up to `ROW_GROUP_BYTES` of them."""

    def __init__(self, read: Callable[[], Iterator[pa.Table]]) -> None:
        self._read = read
        self._kept: list[pa.Table] | None = None

    def __call__(self) -> Iterator[pa.Table]:
        """Yield the remaining rows in batches."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[pa.Table] = []
        size = 0
        for piece in self._read():
            size += piece.nbytes
            if size <= ROW_GROUP_BYTES:
                kept.append(piece)
            else:
                kept.clear()
            yield piece
        if size <= ROW_GROUP_BYTES:
            self._kept = kept


def _rows(files: Files, info: ObjectInfo, dropped: MessageSet, change: Change | None) -> Iterator[pa.Table]:
    """Yield the remaining rows in order, in batches with the new object's columns."""
    schema = info.schema
    held: list[pa.Table] = []
    for group in row_groups(files, info):
        table = rows_to_write(group, schema)
        ids = RowIds.of(table)
        gone = dropped.contains(ids.seqs, ids.times)
        table = table if not gone.any() else table.filter(pa.array(~gone))
        table = table if change is None else change(table)
        for start in range(0, table.num_rows, MAX_ROWS):
            part = table.slice(start, MAX_ROWS)
            rows = sum(piece.num_rows for piece in held) + part.num_rows
            if held and (rows > MAX_ROWS or sum(piece.nbytes for piece in (*held, part)) > PIECE_BYTES):
                yield pa.concat_tables(held)
                held = []
            held.append(part)
    if held:
        yield pa.concat_tables(held)


def _encode(info: ObjectInfo, sealed_by: str, rows: Iterable[pa.Table], replaces: Sequence[str]) -> EncodedBlock | None:
    """Return an object with these rows; None without any."""
    empty = True
    with writer_like([info], info.schema, replaces)() as writer:
        for piece in rows:
            writer.write(piece)
            empty = False
        return None if empty else writer.finish(sealed_by)
