"""Write the rows of objects as new objects: encode alike, put, read back, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import BlockId, ObjectName
from jetcapture_py.archive.messages import RowIds
from jetcapture_py.archive.schema import conform, with_key_column
from jetcapture_py.archive.writer import EncodedBlock, Encoder, ObjectWriter
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import Source
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.store import change_note
from jetcapture_py.store.archive import ArchiveFiles

NewWriter = Callable[[], ObjectWriter]


def columns_to_write(name: ObjectName, schema: pa.Schema) -> pa.Schema:
    """Return the columns of a rewritten object."""
    return schema if name.quarantine else with_key_column(schema)


def rows_to_write(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of an object with the columns of `schema`."""
    return pa.Table.from_batches([conform(batch, schema) for batch in table.to_batches()], schema)


def writer_like(infos: Sequence[ObjectInfo], schema: pa.Schema, replaces: Iterable[str] = ()) -> NewWriter:
    """Return an encoder that writes rows of these objects, which are in one directory, in the same way.

    `replaces` are digests of objects that the new ones replace despite having fewer rows (see `rewrite`).
    """
    name, details = infos[0].name, [info.details for info in infos]
    encoder = Encoder(
        stream=name.stream,
        bundles=infos[0].bundles,
        interval=max(info.interval for info in infos),
        compression=details[0].codec,
        compatible=all(detail.compatible for detail in details),
        stream_created=_joined(detail.created for detail in details),
        consumer=_joined(detail.consumers for detail in details),
        key_rule=_agreed(detail.key_rule for detail in details),
        time="; ".join(dict.fromkeys(filter(None, (detail.event_time for detail in details)))),
        replaces=tuple(replaces),
    )
    block = BlockId(key=name.key, bucket=name.bucket, quarantine=name.quarantine, bundle=name.bundle)
    return partial(ObjectWriter, encoder, block, schema)


def _agreed(rules: Iterable[str | None]) -> str | None:
    """Return the value that all objects share; None if they differ or one lacks it."""
    distinct = set(rules)
    return distinct.pop() if len(distinct) == 1 else None


def _joined(names: Iterable[Sequence[str]]) -> str:
    """Join distinct names, several for recreated streams and renamed consumers; "" if an object has none."""
    by_object = list(names)
    return ",".join(dict.fromkeys(chain.from_iterable(by_object))) if all(by_object) else ""


def put(files: Files, encoded: EncodedBlock) -> Source:
    """Store an object and check it; return the stored file. Raises JetcaptureError if it is damaged."""
    files.put(encoded.name, encoded.data)
    file = files.archive.at(encoded.name.path)
    stored = Source(encoded.name, file.size)
    if not _has_bytes(files, stored, encoded.data):  # damaged, or another process wrote the same rows
        files.read_through(stored)
    return stored


def _has_bytes(files: Files, source: Source, data: pa.Buffer) -> bool:
    start = 0
    if source.size != data.size:
        return False
    for piece in files.archive.pieces(files.archive.at(source.name.path)):
        if not pa.py_buffer(piece).equals(data.slice(start, len(piece))):
            return False
        start += len(piece)
    return bool(start == data.size)


def overwrite(archive: ArchiveFiles, name: ObjectName, data: pa.Buffer) -> None:
    """Replace the object of the same name atomically."""
    content = data.to_pybytes()
    change_note(archive.store, name.path, lambda _: content)


def check(files: Files, stored: Source, rows: int, hashes: int) -> None:
    """Read an object back. Raises JetcaptureError unless its rows match its name, this number, and this sum of the
    identities' hashes."""
    name = stored.name
    ids = RowIds.of(files.rows(stored, columns=(layout.SEQ, layout.TIMESTAMP, layout.ROW)))
    ids = ids.take(ids.order(np.zeros(len(ids), np.int64)))  # those of bundles are sorted by key
    messages = ids.messages
    if (
        (files.info(stored).details.rows, len(ids), rows) != (name.rows, name.rows, name.rows)
        or ids.repeated().any()
        or layout.digest(messages.seqs.tobytes(), messages.times.tobytes()) != name.digest
        or int(ids.hashes().sum()) != hashes
    ):
        raise JetcaptureError(f"{files.shown}/{name.path} does not match its sources, which are kept")


def equal_rows(expected: Iterable[pa.Table], actual: Iterable[pa.Table]) -> bool:
    """Whether two sequences of tables have the same rows in the same order; NaN equals NaN."""
    others, other = iter(actual), pa.table({})
    for table in expected:
        while table.num_rows:
            while not other.num_rows:
                following = next(others, None)
                if following is None:
                    return False
                other = following
            count = min(table.num_rows, other.num_rows)
            if not _same(table.slice(0, count), other.slice(0, count)):
                return False
            table, other = table.slice(count), other.slice(count)
    return not other.num_rows and not any(table.num_rows for table in others)


def _same(one: pa.Table, other: pa.Table) -> bool:
    if not one.schema.equals(other.schema):
        return False
    pairs = zip(one.columns, other.columns, strict=True)
    return all(left.equals(right) or repr(left.to_pylist()) == repr(right.to_pylist()) for left, right in pairs)


def row_groups(files: Files, info: ObjectInfo, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield an object's rows, or some columns of them."""
    for group in info.details.groups:
        yield files.rows(info, group.index, columns)
