"""A large archive is read in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from tests.support.archives import write_parquet

READ = """
import sys
from jetcapture_py import read_archive
from tests.support.memory import peak_resident
print(sum(batch.num_rows for batch in read_archive(sys.argv[1], "ORDERS", dedupe=sys.argv[2])))
print(peak_resident())
"""


@pytest.mark.exhaustive
def test_five_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    objects, rows = 100, 50_000
    noise = np.random.default_rng(0)
    payloads = pa.py_buffer(noise.bytes(100 * rows))
    for number in range(objects):
        seqs = np.arange(number * rows + 1, (number + 1) * rows + 1)
        bucket = 900 * (number // 10)
        table = pa.table(
            {
                layout.STREAM: ["ORDERS"] * rows,
                layout.SEQ: seqs,
                layout.TIMESTAMP: pa.array(bucket * 1_000_000 + seqs, pa.timestamp("us", "UTC")),
                layout.NANOS: pa.nulls(rows, pa.int16()),
                layout.PAYLOAD: pa.Array.from_buffers(pa.binary(100), rows, [None, payloads]).cast(pa.binary()),
                layout.KEY: ["ab"[number % 2]] * rows,
                "amount": noise.random(rows),
            }
        ).replace_schema_metadata({"jetcapture.interval": "86400"})
        name = ObjectName(
            stream="ORDERS",
            key="ab"[number % 2],
            bucket=bucket,
            first_seq=int(seqs[0]),
            last_seq=int(seqs[-1]),
            rows=rows,
            digest=f"{number:016x}",
        )
        (tmp_path / name.directory).mkdir(parents=True, exist_ok=True)
        write_parquet(table, tmp_path / name.path)
    for dedupe in ("auto", "full"):
        done = subprocess.run([sys.executable, "-c", READ, str(tmp_path), dedupe], capture_output=True, check=True)
        count, peak = map(int, done.stdout.split())
        assert count == objects * rows
        assert peak < 500 << 20
        print(dedupe, peak >> 20, "MiB")
