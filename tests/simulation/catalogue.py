"""Small archives: what a capture, or a command that was killed, may leave behind."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.archive.writer import EncodedBlock, Encoder
from tests.simulation.store import StoredFile
from tests.support.archives import encoded, lay_out

STREAM = "ORDERS"
CREATED, AGAIN = "2023-01-01T00:00:00Z", "2023-11-14T22:20:00Z"
"""When the stream was created, and created again."""
GRACE = 10
INTERVAL = 900
FIRST, LAST, NEWEST = 1, 5, 9
"""Up to `LAST`, messages have been acknowledged; captures get the others."""
BUCKET = 1_700_000_100
DAY = 86_400
BEGIN = BUCKET + DAY
"""When the archives begin to change."""
KEEP = 30 * DAY
SECOND = (BUCKET + 300) * 1_000_000
"""`AGAIN` in microseconds: later messages are of the stream's second life."""
Identity = tuple[int, int]


def identity(seq: int, *, life: int = 0, bucket: int = BUCKET) -> Identity:
    return seq, (bucket + life * 600) * 1_000_000 + seq


@cache
def block(seqs: Sequence[int], *, life: int = 0, bucket: int = BUCKET, key: str = "a") -> EncodedBlock:
    created = AGAIN if life else CREATED
    return encoded([identity(seq, life=life, bucket=bucket) for seq in seqs], bucket=bucket, key=key, created=created)


def batch(seqs: Sequence[int], *, bucket: int = BUCKET, quarantine: bool = False) -> pa.RecordBatch:
    count = len(seqs)
    columns = {
        layout.SEQ: pa.array(seqs, pa.int64()),
        layout.TIMESTAMP: pa.array([identity(seq, bucket=bucket)[1] for seq in seqs], pa.timestamp("us", "UTC")),
        layout.PAYLOAD: pa.array([b"%d" % seq for seq in seqs], pa.binary()),
        layout.SUBJECT: pa.array(["orders"] * count),
        layout.DELIVERED: pa.array([1] * count, pa.int32()),
        layout.STAGE: pa.array(["decode"] * count),
        layout.ERROR: pa.array(["wrong"] * count),
        layout.RAW_HEADERS: pa.array([b"?" if seq == UNREADABLE else None for seq in seqs], pa.binary()),
    }
    schema = pa.schema([*ENVELOPE, *(REASON if quarantine else ())])
    arrays = [columns.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


UNREADABLE = 5
"""The sequence whose headers nobody can read. All others can be decoded by now."""
REASON = pa.schema([(layout.STAGE, pa.string()), (layout.ERROR, pa.string()), (layout.RAW_HEADERS, pa.binary())])


def encoder(batches: Sequence[pa.RecordBatch], *, bucket: int = BUCKET, quarantine: bool = False) -> EncodedBlock:
    made = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", stream_created=CREATED, consumer="archive")
    block = BlockId(key=None if quarantine else "a", bucket=bucket, quarantine=quarantine)
    return made.encode(block, "age", list(batches))


@cache
def quarantined(seqs: Sequence[int], bucket: int = BUCKET) -> EncodedBlock:
    return encoder([batch(seqs, bucket=bucket, quarantine=True)], bucket=bucket, quarantine=True)


@cache
def damaged(data: bytes) -> bytes:
    """The bytes of an object with one that is wrong, so that its rows cannot be read."""
    for at in range(40, len(data)):  # in the first pages
        wrong = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            pq.ParquetFile(pa.BufferReader(wrong), page_checksum_verification=True).read(use_threads=False)
        except (OSError, pa.ArrowException):
            DAMAGED.add(wrong)
            return wrong
    raise AssertionError("every byte may be wrong")


DAMAGED: set[bytes] = set()


def _bundles() -> list[EncodedBlock] | dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        keys = {identity(seq): "ab"[seq % 2] for seq in range(FIRST, LAST + 1)}
        lay_out(root, keys, 1)
        lay_out(root, {each: key for each, key in keys.items() if each[0] in (2, 3)}, 1)
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.parquet")}


EXPIRED = BUCKET - 60 * DAY
ARCHIVES = {
    "one": [block((1, 2, 3, 4, 5))],
    "two": [block((1, 2, 3)), block((3, 4, 5))],
    "three": [block((1, 2, 3)), block((2, 3, 4)), block((4, 5))],
    "keys": [block((1, 3, 4), key="a"), block((3,), key="a"), block((2, 5), key="b")],
    "bundles": _bundles(),
    "lives": [block((1, 2, 3, 4)), block((1, 2), life=1), block((2, 5), life=1)],
    "pair": [block((3, 4)), block((1, 2, 5), key="b")],
    "copy": [block((3, 4)), block((4,)), block((1, 2, 5), key="b")],
    "old": [block((1, 2), bucket=EXPIRED), block((2,), bucket=EXPIRED), block((3, 4, 5))],
    "quarantine": [block((1, 2)), quarantined((2, 3, 5)), quarantined((3, 4))],
    "unreadable": [quarantined((3, 4, 5)), quarantined((5,))],
    "aside": [quarantined((1, 2), EXPIRED), quarantined((2,), EXPIRED), quarantined((3, 4)), quarantined((4, 5))],
    "hole": [block((1, 3)), block((3, 5))],
    "trimmed": [block((3, 4)), block((5,))],
    "damaged": [block((1, 3)), block((2, 4, 5))],
    "covered": [block((1, 2)), block((1, 2, 3)), block((4, 5))],
    "past": [block((2,), bucket=EXPIRED), block((3, 4))],
}
"""In all but `bundles`, 3 and 4 have the key `a`, and a capture gets them again."""
QUARANTINES = ("quarantine", "unreadable", "aside")
"""Those with a quarantine."""
EXPIRING = ("old", "aside", "past")
"""Those with something to expire."""
FLAWED = ("hole", "trimmed", "damaged", "covered", "past")
"""Those that lack something; in `damaged` and `covered`, the first object is damaged."""


class Stream(NamedTuple):
    """What a server says: its messages, up to which one all are acknowledged, and since when it has the stream."""

    messages: tuple[Identity, ...]
    floor: int
    created: str


@cache
def messages(archive: str) -> tuple[Identity, ...]:
    """What the stream has, in its last life."""
    life, objects = int(archive == "lives"), ARCHIVES[archive]
    found = dict(identity(seq, life=life) for seq in range(2 if archive == "trimmed" else FIRST, NEWEST + 1))
    for each in objects if isinstance(objects, list) else ():
        rows = pq.ParquetFile(pa.BufferReader(each.data)).read(["_nats_seq", "_nats_timestamp"], use_threads=False)
        for seq, time in zip(*(column.cast(pa.int64()).to_pylist() for column in rows.columns), strict=True):
            if seq in found and (time >= SECOND) == life:
                found[seq] = time
    return tuple(found.items())


def files(name: str) -> dict[str, StoredFile]:
    objects = ARCHIVES[name]
    plain = objects if isinstance(objects, dict) else {each.name.path: each.data.to_pybytes() for each in objects}
    if name in ("damaged", "covered"):
        path = next(iter(plain))
        plain = plain | {path: damaged(plain[path])}
    settings = (StreamConfig(stream=STREAM, created=created, config={}) for created in (CREATED, AGAIN))
    plain = plain | {stream_config.path(STREAM, setting.created): setting.encode() for setting in settings}
    return {f"archive/{path}": StoredFile(content, float(BEGIN - 3600)) for path, content in plain.items()}
