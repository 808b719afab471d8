"""Maintenance of an archive with many objects: seconds and memory to plan what to compact, to plan its table, to
commit it, and for a later pass.

    python -m benchmarks.table [--objects 10000 100000 1000000] [--keys 100] [--together 10]
                               [--directory /tmp] [--archive DIRECTORY] [--steps plan commit]

All objects are links to a few that hold one message, under names of their own: nothing here reads more of an object
than its footer. Every step runs in a process of its own, whose largest resident memory is shown; the first only lists,
the second also finds what to merge.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.config.model import Config, parse
from jetcapture_py.maintain.compact import Compaction, CompactionSettings
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.table.commit import commit
from jetcapture_py.table.plan import CommitRequest
from tests.support.archives import put
from tests.support.memory import peak_resident
from tests.support.running import STREAM

INTERVAL = 3600
START = 1_700_000_000 // INTERVAL * INTERVAL
LINKS = 50_000
"""Links to one file; file systems have a limit."""
STEPS = ("list", "compaction", "plan", "commit", "next pass")


def config(root: Path) -> Config:
    """The configuration of an archive and its table."""
    catalog = {"type": "sql", "uri": f"sqlite:///{root.parent}/catalog.db"}
    return parse(
        {
            "source": {"stream": STREAM, "consumer": "archive"},
            "store": {"url": str(root)},
            "maintain": {"table": {"name": "bench.orders", "catalog": catalog}},
        }
    )


def stored(root: Path, number: int) -> Path:
    """Store an object with one message, and return its path."""
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", consumer="archive")
    values = {
        "_nats_subject": ["orders.new"],
        "_nats_seq": [number + 1],
        "_nats_timestamp": [START * 1_000_000],
        "_nats_delivered": [1],
        "_nats_payload": [b'{"order": 1}'],
    }
    arrays = [pa.array(values.get(field.name, [None]), field.type) for field in ENVELOPE]
    batch = pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE).append_column("order", pa.array([1], pa.int64()))
    encoded = encoder.encode(BlockId(key=None, bucket=START), "age", [batch])
    put(root, encoded)
    return root / encoded.name.path


def fill(root: Path, objects: int, keys: int, together: int) -> None:
    """Make so many names, `together` for each key and hour."""
    own = root.parent / "own"
    own.mkdir()
    sources = [stored(own, number) for number in range(-(-objects // LINKS))]
    parsed = [name for file in ArchiveFiles(str(own), {}).files(STREAM) if (name := file.name) is not None]
    known: set[Path] = set()
    for index in range(objects):
        group, number = divmod(index, together)
        hour, key = divmod(group, keys)
        seq = hour * keys * together + number * keys + key + 1
        name = replace(parsed[0], key=f"key{key:03}", bucket=START + hour * INTERVAL, first_seq=seq, last_seq=seq)
        path = root / name.path
        if path.parent not in known:
            path.parent.mkdir(parents=True, exist_ok=True)
            known.add(path.parent)
        os.link(sources[index // LINKS], path)


def step(name: str, root: Path) -> None:
    """Do one step in this process, and print what it took."""
    settings = config(root)
    archive = open_archive(settings.store.url, settings.store.options)
    started, cpu, opened = time.monotonic(), time.process_time(), 0
    if name == "list":
        count = sum(1 for _ in archive.below(STREAM))
    elif name == "compaction":
        compaction = Compaction(archive, STREAM, CompactionSettings(target=256 << 20, after=0, grace=0))
        count = sum(map(len, compaction.work()))
    else:
        result = commit(settings, archive, CommitRequest(after=0, dry_run=name == "plan")).result
        count, opened = result.files, result.opened
    took = {
        "files": count,
        "opened": opened,
        "seconds": time.monotonic() - started,
        "cpu": time.process_time() - cpu,
        "peak": peak_resident(),
    }
    sys.stdout.write(json.dumps(took))


def main() -> None:
    """Make archives, and measure each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--together", type=int, default=10)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--archive", type=Path, help="keep the archive here, or take the one that is here")
    parser.add_argument("--step", nargs=2, metavar=("NAME", "ROOT"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        step(chosen.step[0], Path(chosen.step[1]))
        return
    for objects in chosen.objects:
        with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
            root = (chosen.archive or Path(directory)) / "archive"
            if not root.exists():
                root.parent.mkdir(exist_ok=True)
                fill(root, objects, chosen.keys, chosen.together)
            for name in chosen.steps:
                words = [sys.executable, "-m", "benchmarks.table", "--step", name, str(root)]
                took = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
                print(
                    f"{objects:>9,} objects  {name:10} {took['seconds']:>7.1f} s {took['cpu']:>7.1f} CPU s"
                    f" {took['peak'] >> 20:>6,} MiB, {took['files']:,} files, {took['opened']:,} footers",
                    flush=True,
                )


if __name__ == "__main__":
    main()
