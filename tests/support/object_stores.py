"""Archives of object stores, written by hand."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout, stream_config
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.archive.writer import Encoder
from tests.support.archives import put

STREAM = "OBJ_files"
HOUR = 1_777_633_200
"""2026-05-01T11:00:00Z."""


def store_file(root: Path, name: str, data: bytes, *, seq: int, second: int = 0, **changes: Any) -> None:
    """Store a file of one chunk as messages `seq` and `seq + 1`, `second` after the hour, with changed metadata."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    info = {"name": name, "bucket": "files", "nuid": f"N{seq}", "size": len(data), "chunks": 1}
    info |= {"digest": f"SHA-256={digest}", **changes}
    token = base64.urlsafe_b64encode(name.encode()).decode()
    time = (HOUR + second) * 1_000_000
    _store(root, "C", seq, time, f"$O.files.C.N{seq}", data)
    _store(root, "M", seq + 1, time + 1, f"$O.files.M.{token}", json.dumps(info).encode())


def _store(root: Path, key: str, seq: int, time: int, subject: str, payload: bytes) -> None:
    columns = {
        layout.SEQ: pa.array([seq], pa.int64()),
        layout.TIMESTAMP: pa.array([time], pa.timestamp("us", "UTC")),
        layout.SUBJECT: pa.array([subject]),
        layout.PAYLOAD: pa.array([payload], pa.binary()),
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(1, field.type) for field in ENVELOPE
    ]
    encoder = Encoder(stream=STREAM, interval=3600, compression="zstd", consumer="archive")
    block = BlockId(key=key, bucket=HOUR)
    put(root, encoder.encode(block, "age", [pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)]))


def record_config(root: Path, created: str, **more: Any) -> Path:
    """Record the configuration of the store's stream, as a capture does; return the file."""
    path = root / stream_config.path(STREAM, created)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(StreamConfig(stream=STREAM, created=created, config={"name": STREAM}, **more).encode())
    return path
