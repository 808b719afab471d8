"""Archives written by the rules of `layout`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from tests.integration.spark.live import Live

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.support.nats_server import NatsServer


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
        first_last: tuple[int, int] | None = None,
        timestamps: Sequence[int] | None = None,
        stream: str = "ORDERS",
        subject: str = "orders.new",
        quarantine: bool = False,
        headers: Sequence[object] | None = None,
        payloads: Sequence[bytes | None] | None = None,
        columns: Mapping[str, pa.Array | list[object]] | None = None,
        metadata: Mapping[str, str] | None = None,
        **fields: pa.Array | list[object],
    ) -> layout.ObjectName:
        """Store one object with these messages; a timestamp, unless given, is the bucket's start plus its sequence."""
        times = timestamps or [(bucket * 1_000_000) + seq for seq in seqs]
        table = pa.table(
            {
                layout.STREAM: pa.array([stream] * len(seqs), pa.string()),
                layout.SUBJECT: pa.array([subject] * len(seqs), pa.string()).dictionary_encode(),
                layout.SEQ: pa.array(seqs, pa.int64()),
                layout.TIMESTAMP: pa.array(times, pa.timestamp("us", "UTC")),
                layout.DELIVERED: pa.array([1] * len(seqs), pa.int32()),
                layout.HEADERS: pa.array(headers or [None] * len(seqs), pa.map_(pa.string(), pa.list_(pa.string()))),
                layout.PAYLOAD: pa.array(payloads or [b"{}"] * len(seqs), pa.binary()),
                **fields,
                **(columns or {}),
            }
        )
        bundle = bundle_of(key, self.bundles) if self.bundles and not quarantine else ""
        if bundle:
            keys = pa.array([key or None] * len(seqs), pa.string())
            table = table.append_column(layout.KEY, keys)
            metadata = {layout.BUNDLES: str(self.bundles), **(metadata or {})}
        first, last = first_last or (min(seqs), max(seqs))
        digest = layout.digest(pa.array(seqs).buffers()[1].to_pybytes(), pa.array(times).buffers()[1].to_pybytes())
        name = layout.ObjectName(
            stream=stream,
            key=None if quarantine or bundle else key,
            bundle=bundle,
            bucket=bucket,
            first_seq=first,
            last_seq=last,
            rows=len(seqs),
            digest=digest,
            quarantine=quarantine,
        )
        path = self.root / name.path
        path.parent.mkdir(parents=True, exist_ok=True)
        footer = {f"{layout.METADATA_PREFIX}{entry}": value for entry, value in (metadata or {}).items()}
        pq.write_table(table.replace_schema_metadata(footer), path)
        return name


both_layouts = pytest.mark.parametrize("archive", [0, 4], indirect=True, ids=["keys", "bundles"])
"""Marks a test that runs with an archive of keys, and with one of bundles."""


@pytest.fixture
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", getattr(request, "param", 0))


@pytest.fixture
def live(nats_server: Callable[..., NatsServer]) -> Live:
    return Live(nats_server())
