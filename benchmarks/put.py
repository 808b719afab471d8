"""How fast a store takes objects through each driver: puts per second, CPU of the client, and its peak memory.

Against a real S3 server on loopback (versitygw, which must be on the PATH), alternating between the drivers; medians
over the rounds. Only objects are stored: the work is that of `store.put` in `store.concurrency` threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.others import row
from tests.support.drivers import options_for
from tests.support.memory import peak_resident
from tests.support.versity import Versity, options

BUCKET = "bench"
DRIVERS = ("fsspec", "obstore")


def put_for(driver: str, endpoint: str, size: int, threads: int, seconds: float) -> dict[str, float]:
    """Store objects of random bytes for that long."""
    import pyarrow as pa

    from jetcapture_py.archive.layout import ObjectName
    from jetcapture_py.store import open_store

    data, numbers, done = pa.py_buffer(os.urandom(size)), count(1), []
    began = time.perf_counter()
    store = open_store(f"s3://{BUCKET}/{os.getpid()}", options_for(driver, options(endpoint)))
    store.probe()
    opened = time.perf_counter() - began

    def work() -> None:
        while time.perf_counter() < until:
            number = next(numbers)
            name = ObjectName(
                stream="S",
                key="k",
                bucket=0,
                first_seq=number,
                last_seq=number,
                rows=1,
                digest=f"{number:016x}",
                quarantine=False,
            )
            store.put(name, data)
            done.append(number)

    started, cpu = time.perf_counter(), time.process_time()
    until = started + seconds
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed, used = time.perf_counter() - started, time.process_time() - cpu
    return {
        "puts per second": len(done) / elapsed,
        "ms of CPU per put": used / len(done) * 1000,
        "MiB at most": peak_resident() / (1 << 20),
        "s to open and probe": opened,
    }


def main() -> None:
    """Run all rounds and print the medians; with `--child`, one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 1 << 20, 16 << 20], help="bytes of an object")
    parser.add_argument("--threads", type=int, default=4, help="as store.concurrency")
    parser.add_argument("--seconds", type=float, default=3, help="of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(put_for(**json.loads(chosen.child))))
        return
    with tempfile.TemporaryDirectory() as directory, Versity(Path(directory)) as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        for size in chosen.sizes:
            found: dict[str, list[dict[str, float]]] = {driver: [] for driver in DRIVERS}
            for _ in range(chosen.rounds):
                for driver in DRIVERS:
                    work: dict[str, Any] = {
                        "driver": driver,
                        "endpoint": server.endpoint,
                        "size": size,
                        "threads": chosen.threads,
                        "seconds": chosen.seconds,
                    }
                    command = [sys.executable, "-m", "benchmarks.put", "--child", json.dumps(work)]
                    found[driver].append(json.loads(subprocess.check_output(command)))
                    for path in (server.objects / BUCKET).iterdir():
                        subprocess.run(["rm", "-rf", str(path)], check=True)
            for driver, rounds in found.items():
                puts, cpu, peak, opened = (statistics.median(figures[name] for figures in rounds) for name in rounds[0])
                more = f"{cpu:.2f} ms of CPU each, at most {peak:,.0f} MiB, opened in {opened:.2f} s"
                row(f"{size:,} B, {driver}", f"{puts:,.1f} puts/s", more)


if __name__ == "__main__":
    main()
