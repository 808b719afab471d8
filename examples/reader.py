"""Read a local archive without jetcapture: check its Parquet objects, and print the number of distinct messages.

    python examples/reader.py /var/lib/jetcapture ORDERS

It checks names, footers, checksums and digests, and applies the rule of deduplication of docs/archive-format.md, for
time slices with one layout.
"""

import hashlib
import re
import sys
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq

root, stream = Path(sys.argv[1]), sys.argv[2]
name = re.compile(
    r"((?:key|bundle)=[^/]+)/date=[^/]+/hour=[^/]+/(\w+)[ZE]-(\d{20})-(\d{20})-(\d+)-([0-9a-f]{16})\.parquet"
)


def blake2b(*parts):
    """Return the digits of a digest or checksum."""
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def check(right, problem):
    """End the program with what is wrong."""
    if not right:
        sys.exit(problem)


def zeroed(data, entry):
    """Return the bytes with the digits of a checksum as zeros, and the digits."""
    at = data.rindex(b"jetcapture." + entry + b"\x18\x10") + len(b"jetcapture." + entry) + 2
    return data[:at] + b"0" * 16 + data[at + 16 :], data[at : at + 16].decode()


def identities(path):
    """Return the messages of an object, after checking it."""
    data = path.read_bytes()
    footer = data[-int.from_bytes(data[-8:-4], "little") - 8 :]
    bare, digits = zeroed(footer, b"footer_checksum")
    check(blake2b(bare) == digits, f"{path}: the footer is damaged")
    both, _ = zeroed(data, b"footer_checksum")
    both, digits = zeroed(both, b"checksum")
    check(blake2b(both) == digits, f"{path}: the object is damaged")
    table = pq.read_table(path, columns=["_nats_seq", "_nats_timestamp"], partitioning=None)
    seqs, times = (column.cast("int64").to_pylist() for column in table.columns)
    pairs = sorted(set(zip(seqs, times, strict=True)))
    packed = [b"".join(pair[i].to_bytes(8, "little", signed=True) for pair in pairs) for i in (0, 1)]
    check(blake2b(*packed) == name.search(path.as_posix())[6], f"{path}: the digest is wrong")
    return pairs


objects = [(name.search(path.as_posix()), path) for path in (root / stream).rglob("*.parquet")]
messages = 0
for _, group in groupby(sorted(objects, key=lambda item: item[0].groups()), key=lambda item: item[0].groups()[:2]):
    end, seen = -1, set()
    for match, path in group:
        if int(match[3]) > end:  # it does not overlap those before
            messages += len(seen)
            seen = set()
        seen.update(identities(path))
        end = max(end, int(match[4]))
    messages += len(seen)
print(messages)
