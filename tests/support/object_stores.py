"""Archives of object stores, written by hand."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.stream_config import StreamConfig
from tests.support.archives import Archive

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
    contents = {"C": (f"C.N{seq}", data), "M": (f"M.{token}", json.dumps(info).encode())}
    for number, (key, (subject, payload)) in enumerate(contents.items()):
        Archive(root).write(
            [seq + number],
            key,
            stream=STREAM,
            bucket=HOUR,
            interval=3600,
            consumer="archive",
            timestamps=[time + number],
            subject=f"$O.files.{subject}",
            payloads=[payload],
        )


def record_config(root: Path, created: str, **more: Any) -> Path:
    path = root / stream_config.path(STREAM, created)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(StreamConfig(stream=STREAM, created=created, config={"name": STREAM}, **more).encode())
    return path
