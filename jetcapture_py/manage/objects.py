"""The `objects` command: list the archive's objects by key and time, from their names.

The footers of objects in bundles say which of them may hold a key that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.archive import footer, layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import VanishedError
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import escaped, plural, size


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSelection:
    """The objects to list: those that may hold some of `keys` ("": no key; empty: all) and overlap [start, end)."""

    keys: Sequence[str] = ()
    start: datetime | None = None
    end: datetime | None = None

    def holds(self, name: ObjectName, interval: float) -> bool:
        """Whether an object with buckets of `interval` seconds is selected."""
        if self.keys and not name.bundle and (name.quarantine or (name.key or "") not in self.keys):
            return False
        if self.start is not None and name.bucket + interval <= self.start.timestamp():
            return False
        return self.end is None or name.bucket < self.end.timestamp()


def run(config: Config, selection: ObjectSelection) -> CommandResult:
    """List the objects. Raises StoreError."""
    objects = listed(config, selection)
    return CommandResult(summary=_total(objects), lines=_lines(objects), records=_records(objects))


def listed(config: Config, selection: ObjectSelection) -> list[tuple[ObjectName, File]]:
    """Return the selected objects of the stream, by key, time and sequence; the quarantine comes last."""
    storage = ArchiveFiles(config.store.url, config.store.options)
    files = ((file.name, file) for file in storage.files(config.source.stream))
    objects = [
        (name, file) for name, file in files if name is not None and selection.holds(name, config.block.interval)
    ]
    if selection.keys:
        with ThreadPoolExecutor(storage.threads, "objects") as threads:
            hits = threads.map(lambda item: _may_hold(storage, item[0], item[1], selection.keys), objects)
            objects = [item for item, held in zip(objects, hits, strict=True) if held]

    def order(item: tuple[ObjectName, File]) -> tuple[Any, ...]:
        name, key = item[0], item[0].key
        place = name.quarantine, key is None, name.bundle, key or ""
        return *place, name.bucket, name.first_seq, name.last_seq, name.digest

    return sorted(objects, key=order)


def _may_hold(storage: ArchiveFiles, name: ObjectName, file: File, keys: Sequence[str]) -> bool:
    """Whether a selected object may hold one of these keys: by its footer, if it is in a bundle and in Parquet."""
    if not (name.bundle and name.parquet):
        return True
    try:
        bundles = int(footer.read(lambda size: storage.read(file, max(0, file.size - size))).get(layout.BUNDLES, 0))
    except (ValueError, VanishedError):  # without a valid footer, nothing rules it out
        return True
    return not bundles or name.bundle in {bundle_of(key, bundles) for key in keys}


def _records(objects: Iterable[tuple[ObjectName, File]]) -> Iterator[dict[str, Any]]:
    for name, file in objects:
        yield {
            "key": name.key,
            "bundle": name.bundle or None,
            "quarantine": name.quarantine,
            "bucket": format_time(datetime.fromtimestamp(name.bucket, UTC)),
            "first_seq": name.first_seq,
            "last_seq": name.last_seq,
            "rows": name.rows,
            "bytes": file.size,
            "path": file.path,
        }


def _lines(objects: Sequence[tuple[ObjectName, File]]) -> Iterator[str]:
    cells = [("key", "bucket", "first", "last", "rows", "bytes", "path")]
    for name, file in objects:
        key = "(quarantine)" if name.quarantine else "(no key)" if name.key is None else escaped(name.key)
        key = f"(bundle {name.bundle})" if name.bundle else key
        bucket = f"{datetime.fromtimestamp(name.bucket, UTC):%Y-%m-%d %H:%M:%S}"
        cells.append(
            (key, bucket, str(name.first_seq), str(name.last_seq), f"{name.rows:,}", f"{file.size:,}", file.path)
        )
    if objects:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for key, bucket, *numbers, path in cells:
            aligned = [number.rjust(width) for number, width in zip(numbers, widths[2:6], strict=True)]
            yield "  ".join([key.ljust(widths[0]), bucket.ljust(widths[1]), *aligned, escaped(path)])
    yield _total(objects)


def _total(objects: Sequence[tuple[ObjectName, File]]) -> str:
    rows, stored = sum(name.rows for name, _ in objects), sum(file.size for _, file in objects)
    return f"{plural(len(objects), 'object', grouped=True)}, {plural(rows, 'row', grouped=True)}, {size(stored)}"
