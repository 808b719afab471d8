"""A KV bucket: what happened in it, what it held, for comparison, and archives of such changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.stream_config import StreamConfig, path
from tests.support.archives import HOUR, Archive

STREAM = "KV_s"
DELETE, PURGE = {"KV-Operation": "DEL"}, {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


def expiring(ttl: str) -> dict[str, str]:
    return {"Nats-TTL": ttl}


TTLS: dict[str, int | None] = {"30": 30, "30s": 30, "1m": 60, "1m30s": 90, "1h0m0s": 3600, "1.5m": 90, "1.1h": 3960}
TTLS |= {"1.9s": 1, ".5h1s": 1801, "1500ms": 1, "2s999999999ns": 2, "1m60000000us": 120, "9223372036": 9_223_372_036}
TTLS |= dict.fromkeys(("never", "Never", "99999999999999999999", "nonsense"))
Change = tuple[str, Mapping[str, str]] | tuple[str, Mapping[str, str], int]
"""The key, the headers and, unless it follows from the sequence, the second at which it was stored."""


def store(archive: Archive, changes: Sequence[Change], *, first: int = 1, **more: Any) -> layout.ObjectName:
    """Store changes as an object; the value of sequence n is `vn`, stored n seconds after the hour."""
    seqs = range(first, first + len(changes))
    seconds = [change[2] if len(change) == 3 else seq for seq, change in zip(seqs, changes, strict=True)]
    names = [change[0] if change[0].startswith("$") else f"$KV.s.{change[0]}" for change in changes]
    return archive.write(
        list(seqs),
        None,
        stream=STREAM,
        timestamps=[(HOUR + second) * 1_000_000 for second in seconds],
        headers=[[(name, [text]) for name, text in change[1].items()] or None for change in changes],
        payloads=[b"v%d" % seq for seq in seqs],
        columns={layout.SUBJECT: pa.array(names), **more.pop("columns", {})},
        **more,
    )


def second(number: float) -> datetime:
    return datetime.fromtimestamp(HOUR, UTC) + timedelta(seconds=number)


def note(archive: Archive, created: str, *, continues: bool = False, **config: Any) -> None:
    file = archive.root / path(STREAM, created)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = StreamConfig(stream=STREAM, created=created, config={"name": STREAM, **config}, continues=continues)
    file.write_bytes(found.encode())


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a bucket; times in microseconds. `clears`: all older entries of its key are gone."""

    seq: int
    time: int
    key: str
    put: bool
    value: bytes
    ttl: int | None = None
    clears: bool = False

    @property
    def ends(self) -> int | None:
        return None if self.ttl is None else self.time + self.ttl


def held(entries: Iterable[Entry], moment: int, per_key: int) -> dict[str, tuple[int, bytes]]:
    stored: dict[str, list[Entry]] = defaultdict(list)
    for new in sorted(entries, key=lambda entry: entry.seq):
        if new.time > moment:
            continue
        there = [] if new.clears else [old for old in stored[new.key] if old.ends is None or old.ends > new.time]
        stored[new.key] = [*there, new][-per_key:]
    found = {}
    for key, there in stored.items():
        left = [old for old in there if old.ends is None or old.ends > moment]
        if left and left[-1].put:
            found[key] = (left[-1].seq, left[-1].value)
    return found
