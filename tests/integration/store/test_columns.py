"""Which bytes of a large remote object are fetched for some of its columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.store.archive import SMALL, ArchiveFiles, File
from tests.integration.store.conftest import Place
from tests.support.archives import write_parquet

ROWS, GROUPS = 60_000, 3


@pytest.mark.parametrize("driver", ["fsspec"])  # what stored it makes no difference
@pytest.mark.parametrize("kind", ["moto", "real_s3", "azure"])
def test_neighbouring_columns_of_a_row_group_are_one_request_and_others_are_not_fetched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, driver: str
) -> None:
    place: Place = request.getfixturevalue(kind)
    random = np.random.default_rng(0)
    table = pa.table(
        {
            layout.STREAM: ["ORDERS"] * ROWS,
            layout.SEQ: np.arange(ROWS),
            layout.TIMESTAMP: pa.array(np.arange(ROWS), pa.timestamp("us", "UTC")),
            layout.NANOS: pa.array(np.zeros(ROWS), pa.int16()),
            **{f"c{number}": random.random(ROWS) for number in range(10)},
            layout.PAYLOAD: pa.array([random.bytes(300) for _ in range(ROWS)], pa.binary()),
            **{f"d{number}": random.random(ROWS) for number in range(2)},
            layout.KEY: ["eu"] * ROWS,
        },
        metadata={f"{layout.METADATA_PREFIX}interval": "3600"},
    )
    name = ObjectName(stream="ORDERS", key="eu", bucket=0, first_seq=0, last_seq=ROWS - 1, rows=ROWS, digest="0" * 16)
    data = pa.BufferOutputStream()
    write_parquet(table, data, row_group_size=ROWS // GROUPS)
    place.open().put(name, data.getvalue())
    size = data.getvalue().size
    assert size > SMALL

    read, requests = ArchiveFiles.read, list[int]()

    def counted(files: ArchiveFiles, file: File, start: int = 0, end: int | None = None) -> bytes:
        fetched = read(files, file, start, end)
        requests.append(len(fetched))
        return fetched

    monkeypatch.setattr(ArchiveFiles, "read", counted)

    def fetched(*columns: str) -> tuple[int, int]:
        """Requests and bytes for these columns, footers aside."""
        totals = []
        for names in ((), columns):
            requests.clear()
            archive = read_archive(place.url, "ORDERS", columns=[layout.SEQ, *names], options=place.options)
            assert archive.read_all().equals(table.select([layout.SEQ, *names]))
            totals.append((len(requests), sum(requests)))
        return totals[1][0] - totals[0][0], totals[1][1]

    extra, amount = fetched(*(f"c{number}" for number in range(4)))
    assert (extra, amount < size / 5) == (0, True)
    extra, amount = fetched("d0", "d1")  # on the other side of the payloads
    assert (extra, amount < size / 5) == (GROUPS, True)
