"""Erasing one customer of a thousand, who has messages in every object, beside compaction of the same archive.

    python -m benchmarks.erase [--objects 16000] [--keys 40] [--together 50] [--directory /tmp]
    python -m benchmarks.erase --archive /tmp/large --fill-only --objects 40000, then --archive /tmp/large

The archive is that of `benchmarks.maintain`: objects of 500 JSON messages of 1 KB. First it is compacted, then a
thousandth of the rows of what compaction has made is erased. Rates are the bytes of the objects before, in a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.maintain import COLUMNS, INTERVAL, ROWS, START, TARGET, payloads, run
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.archives import put
from tests.support.running import STREAM

CUSTOMERS = 1000


def fill(root: Path, objects: int, keys: int, together: int) -> None:
    """Store so many small objects, in which each customer has every thousandth message of a key."""
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", consumer="archive")
    columns = [payloads(seed) for seed in range(COLUMNS)]
    names = np.array([f"orders.c{number:03}" for number in range(CUSTOMERS)])
    for index in range(objects):
        row, key = divmod(index, keys)
        bucket = START + row // together * INTERVAL
        positions = row * ROWS + np.arange(ROWS)
        values = {
            "_nats_subject": pa.array(names[positions % CUSTOMERS]),
            "_nats_seq": pa.array(positions * keys + key + 1),
            "_nats_timestamp": pa.array(
                bucket * 1_000_000 + (row % together * ROWS + np.arange(ROWS)) * 1_000, pa.timestamp("us", "UTC")
            ),
            "_nats_payload": columns[index % COLUMNS],
            "_nats_delivered": pa.repeat(pa.scalar(1, pa.int32()), ROWS),
        }
        arrays = [values.get(field.name, pa.nulls(ROWS, field.type)) for field in ENVELOPE]
        block = BlockId(key=f"key{key:03}", bucket=bucket)
        put(root, encoder.encode(block, "pressure", [pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE)]))


def main() -> None:
    """Make the archive, compact it, and erase from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=16_000)
    parser.add_argument("--keys", type=int, default=40)
    parser.add_argument("--together", type=int, default=50)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--archive", type=Path, help="An archive that --fill-only has made; it is changed.")
    parser.add_argument("--fill-only", action="store_true", help="Make the archive at --archive, and measure nothing.")
    chosen = parser.parse_args()
    if chosen.fill_only:
        fill(chosen.archive, chosen.objects, chosen.keys, chosen.together)
        return
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        root, config = chosen.archive or Path(directory, "archive"), Path(directory, "config.yaml")
        if chosen.archive is None:
            fill(root, chosen.objects, chosen.keys, chosen.together)
        compact = f"{{target: {TARGET}, after: 0s, grace: 0s}}"
        config.write_text(
            f"source: {{stream: {STREAM}, consumer: archive}}\nstore: {{url: {root}}}\n"
            f"maintain: {{compact: {compact}}}\n"
        )
        rates: list[tuple[float, float]] = []
        for words in (
            ["compact", str(config)],
            ["erase", str(config), "--subject", "orders.c007", "--reason", "benchmark"],
        ):
            files = list(ArchiveFiles(str(root), {}).files(STREAM))
            size = sum(file.size for file in files)
            seconds, cpu, peak = run([sys.executable, "-m", "jetcapture_py", *words])
            rates.append((size / seconds, size / cpu))
            print(
                f"{words[0]:8} {len(files):>7,} objects {size / 1e9:>6.2f} GB {seconds:>7.1f} s {cpu:>7.1f} CPU s"
                f" {size / seconds / 1e6:>7.1f} MB/s {peak >> 20:>6,} MiB",
                flush=True,
            )
        (by_time, by_cpu), (erased, erased_cpu) = rates
        print(f"erase: {erased / by_time:.2f} of compaction's rate, {erased_cpu / by_cpu:.2f} by CPU seconds")


if __name__ == "__main__":
    main()
