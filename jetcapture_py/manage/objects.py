"""The `objects` command: list the archive's objects by key and time, from their names.

For bundles, footers decide which objects may hold a requested key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.reading.selection import Selection
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import ArchiveFiles, File
from jetcapture_py.text import aligned, escaped, plural, size


def run(config: Config, selection: Selection) -> CommandResult:
    """List the objects that may hold messages of a selection. Raises JetcaptureError."""
    objects = listed(config, selection)
    return CommandResult(summary=_total(objects), lines=_lines(objects), records=_records(objects))


def listed(config: Config, selection: Selection) -> list[tuple[ObjectName, File]]:
    """Return the selected objects of the stream, by key, time and sequence; the quarantine comes last."""
    archive = ArchiveFiles(config.store.url, config.store.options)
    objects = retried(partial(_selected, archive, config, selection))

    def order(item: tuple[ObjectName, File]) -> tuple[Any, ...]:
        name, key = item[0], item[0].key
        group = name.quarantine, key is None, name.bundle, key or ""
        return *group, name.bucket, name.first_seq, name.last_seq, name.digest

    return sorted(objects, key=order)


def _selected(archive: ArchiveFiles, config: Config, selection: Selection) -> list[tuple[ObjectName, File]]:
    """Return the selected objects: by name and, for bundles in Parquet, by the keys in their footers."""
    objects = {
        file.name: file
        for file in archive.files(config.source.stream)
        if file.name is not None and selection.may_hold_name(file.name, config.block.interval)
    }
    if selection.keys is not None:
        bundled = [file for name, file in objects.items() if name.bundle and name.parquet]
        for info in archive.infos(bundled):  # without a footer, no object can be excluded
            if isinstance(info, ObjectInfo) and not selection.may_hold(info):
                del objects[info.name]
    return list(objects.items())


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
    rows = [("key", "time slice", "first", "last", "rows", "bytes", "path")]
    for name, file in objects:
        key = "(quarantine)" if name.quarantine else "(no key)" if name.key is None else escaped(name.key)
        key = f"(bundle {name.bundle})" if name.bundle else key
        time_slice = f"{datetime.fromtimestamp(name.bucket, UTC):%Y-%m-%d %H:%M:%S}"
        first, last, path = str(name.first_seq), str(name.last_seq), escaped(file.path)
        rows.append((key, time_slice, first, last, f"{name.rows:,}", f"{file.size:,}", path))
    if objects:
        yield from aligned(rows, right=range(2, 6))
    yield _total(objects)


def _total(objects: Sequence[tuple[ObjectName, File]]) -> str:
    rows, stored = sum(name.rows for name, _ in objects), sum(file.size for _, file in objects)
    return f"{plural(len(objects), 'object')}, {plural(rows, 'row')}, {size(stored)}"
