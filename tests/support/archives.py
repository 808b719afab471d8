"""Archives handled from outside: objects merged as compaction does it, or written by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout, writer
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import BlockId, ObjectName
from jetcapture_py.archive.ordering import ordered
from jetcapture_py.archive.schema import ENVELOPE, REPLY
from jetcapture_py.archive.writer import EncodedBlock, Encoder, ObjectWriter

Identity = tuple[int, int]  # sequence, timestamp in microseconds
HOUR = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp())


@dataclass(frozen=True)
class Archive:
    """An archive on disk that a test fills object by object; with `bundles`, in so many bundles."""

    root: Path
    bundles: int = 0

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def write(
        self,
        seqs: Sequence[int],
        key: str | None = "a",
        *,
        bucket: int = HOUR,
        timestamps: Sequence[int] | None = None,
        stream: str = "ORDERS",
        subject: str = "orders.new",
        quarantine: bool = False,
        headers: Sequence[object] | None = None,
        payloads: Sequence[bytes | None] | None = None,
        columns: Mapping[str, pa.Array | list[object]] | None = None,
        created: str = "",
        consumer: str = "",
        interval: int = layout.MAX_INTERVAL,
        sealed_by: str = "age",
        **fields: pa.Array | list[object],
    ) -> layout.ObjectName:
        """Store one object with these messages; a timestamp, unless given, is the bucket's start plus its sequence."""
        count, bundle = len(seqs), bundle_of(key, self.bundles) if self.bundles and not quarantine else ""
        values: dict[str, Any] = {
            layout.SUBJECT: pa.array([subject] * count, pa.string()),
            layout.SEQ: pa.array(seqs, pa.int64()),
            layout.TIMESTAMP: pa.array(
                timestamps or [(bucket * 1_000_000) + seq for seq in seqs], pa.timestamp("us", "UTC")
            ),
            layout.NANOS: pa.nulls(count, pa.int16()),
            layout.DELIVERED: pa.array([1] * count, pa.int32()),
            layout.HEADERS: pa.array(headers or [None] * count, pa.map_(pa.string(), pa.list_(pa.string()))),
            layout.PAYLOAD: pa.array(payloads or [b"{}"] * count, pa.binary()),
            REPLY: pa.nulls(count, pa.binary()),
            **({layout.KEY: pa.array([key or None] * count, pa.string())} if bundle else {}),
            **fields,
            **(columns or {}),
        }
        encoder = Encoder(
            stream=stream,
            interval=interval,
            compression="zstd",
            stream_created=created,
            consumer=consumer,
            bundles=self.bundles if bundle else 0,
        )
        block = BlockId(key=None if quarantine or bundle else key, bucket=bucket, quarantine=quarantine, bundle=bundle)
        stored = encoder.encode(block, sealed_by, pa.table(values).combine_chunks().to_batches())
        put(self.root, stored)
        return stored.name


def encoded(
    identities: Iterable[Identity],
    *,
    stream: str = "ORDERS",
    created: str = "2024-01-01T00:00:00Z",
    key: str | None = "eu",
    bucket: int = 1_700_000_100,
    quarantine: bool = False,
    key_rule: str | None = None,
    customer: int | str | None = None,
    payloads: Sequence[bytes] | None = None,
) -> EncodedBlock:
    """An object of these messages; with `customer`, it has a column of that name. A payload is its sequence."""
    found = sorted(identities)
    columns = {
        layout.SEQ: pa.array([seq for seq, _ in found], pa.int64()),
        layout.TIMESTAMP: pa.array([time for _, time in found], pa.timestamp("us", "UTC")),
        layout.PAYLOAD: pa.array(payloads or [b"%d" % seq for seq, _ in found], pa.binary()),
    }
    arrays = [columns.get(field.name, pa.nulls(len(found), field.type)) for field in ENVELOPE]
    encoder = Encoder(
        stream=stream, interval=900, compression="zstd", stream_created=created, consumer="archive", key_rule=key_rule
    )
    block = BlockId(key=None if quarantine else key, bucket=bucket, quarantine=quarantine)
    batch = pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)
    if customer is not None:
        batch = batch.append_column("customer", pa.array([customer] * len(found)))
    return encoder.encode(block, "age", [batch])


def lay_out(
    root: Path, messages: Mapping[Identity, str | None], bundles: int, *, bucket: int = 1_700_000_100
) -> list[ObjectName]:
    """Store messages, of which each has its key, as a capture does: one object for each key, or for each bundle."""
    placed: defaultdict[str | None, list[Identity]] = defaultdict(list)
    for each, key in messages.items():
        placed[bundle_of(key, bundles) if bundles else key].append(each)
    names = []
    for found in map(sorted, placed.values()):
        keys = [messages[each] for each in found]
        names.append(
            Archive(root, bundles).write(
                [seq for seq, _ in found],
                keys[0],
                bucket=bucket,
                timestamps=[time for _, time in found],
                payloads=[b"%d" % seq for seq, _ in found],
                columns={layout.KEY: pa.array(keys, pa.string())} if bundles else {},
                interval=900,
                consumer="archive",
            )
        )
    return names


def put(root: Path, block: EncodedBlock) -> Path:
    """Store an object in the archive at `root`, where it appears as a whole; where it lies."""
    path = root / block.name.path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(block.data)
    return unfinished.replace(path)


def merge(root: Path, names: Sequence[ObjectName], *, keep: bool = False) -> Path:
    """Make one object of several of one key and bucket, as compaction does, and remove them unless `keep`."""
    tables, created, bundles = [], set(), 0
    for name in names:
        with pa.memory_map(str(root / name.path)) as file:
            tables.append(pq.read_table(file))
            own = pq.read_metadata(file).metadata
            created.add(own[b"jetcapture.stream_created"].decode())
            bundles = int(own.get(b"jetcapture.bundles", b"0"))
    table = pa.concat_tables(tables).sort_by([(layout.SEQ, "ascending"), (layout.TIMESTAMP, "ascending")])
    seqs, times = (table.column(column).cast(pa.int64()).to_numpy() for column in (layout.SEQ, layout.TIMESTAMP))
    distinct = np.concatenate([[True], (np.diff(seqs) != 0) | (np.diff(times) != 0)])
    table = table.filter(pa.array(distinct))
    first = names[0]
    block = BlockId(key=first.key, bucket=first.bucket, quarantine=first.quarantine, bundle=first.bundle)
    joined = "" if "" in created else ",".join(sorted(created))
    encoder = Encoder(stream=first.stream, interval=900, compression="zstd", stream_created=joined, bundles=bundles)
    with ObjectWriter(encoder, block, table.schema) as merged:
        for piece in ordered(table, by_key=True)[0] if first.bundle else [table]:
            merged.write(piece)
        path = put(root, merged.finish("compact"))
    for name in () if keep else names:
        (root / name.path).unlink()
    return path


def write_parquet(
    table: pa.Table, target: Path | pa.BufferOutputStream, *, row_group_size: int | None = None, **options: Any
) -> None:
    """Write rows, whatever they are, with the footer's entries in the table's metadata and checksums that are right."""
    unsigned = {entry: uuid4().hex[: layout.CHECKSUM_DIGITS] for entry in writer._CHECKSUMS}
    entries = {f"jetcapture.{entry}".encode(): text.encode() for entry, text in unsigned.items()}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, **options) as file:
        file.write_table(table, row_group_size)
        file.add_key_value_metadata({**(table.schema.metadata or {}), **entries})
    data = sink.getvalue()
    writer._sign(data, unsigned)
    if isinstance(target, Path):
        target.write_bytes(data)
    else:
        target.write(data)


def by_place(names: Iterable[ObjectName]) -> list[list[ObjectName]]:
    found: defaultdict[tuple[str | None, str], list[ObjectName]] = defaultdict(list)
    for name in names:
        found[name.key, name.bundle].append(name)
    return list(found.values())


def copy_to(root: Path, name: ObjectName, **changes: Any) -> ObjectName:
    """Store an object's messages once more, under another key or bucket."""
    target = replace(name, **changes)
    table = pq.ParquetFile(root / name.path).read()
    created = table.schema.metadata[b"jetcapture.stream_created"].decode()
    encoder = Encoder(stream=target.stream, interval=900, compression="zstd", stream_created=created)
    block = BlockId(key=target.key, bucket=target.bucket, quarantine=target.quarantine)
    table = table.replace_schema_metadata()
    if layout.KEY in table.schema.names:
        keys = pa.repeat(pa.scalar(target.key, pa.string()), table.num_rows)
        table = table.set_column(table.schema.get_field_index(layout.KEY), layout.KEY, keys)
    with ObjectWriter(encoder, block, table.schema) as again:
        again.write(table)
        copy = again.finish("compact")
    put(root, copy)
    return copy.name


def tangle(root: Path, key: str) -> None:
    """Move an archive's objects of one key elsewhere, with links to them, to nowhere, and in circles."""
    moved = root.parent / f"{root.name}-elsewhere"
    own = root / f"ORDERS/key={key}"
    own.rename(moved)
    own.symlink_to(moved)
    (moved / "circle").symlink_to(root / "ORDERS")
    (root / "ORDERS/key=circle").symlink_to(root / "ORDERS")
    (root / "ORDERS/nowhere").symlink_to("/nowhere/at/all")
    (root / "ORDERS/itself").symlink_to("itself")
    path = next(path for path in root.rglob("*.parquet"))
    path.with_name(f"{'0' * 16}{path.name[16:]}").symlink_to("/nowhere/at/all")


def strip(path: Path) -> None:
    table = pq.ParquetFile(path).read()
    proof = (b"jetcapture.checksum", b"jetcapture.footer_checksum", b"jetcapture.digest")
    metadata = {key: value for key, value in table.schema.metadata.items() if key not in proof}
    pq.write_table(table.replace_schema_metadata(metadata), path)
