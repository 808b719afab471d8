"""The commands `files` and `get`: list the files of an archived object store, and write one."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time, parse_time
from jetcapture_py.errors import ConfigError
from jetcapture_py.files import ArchivedFile, list_files, save_file
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.text import aligned, escaped, plural

STDOUT = Path("-")


def moment(text: str) -> datetime | int:
    """Parse the option --as-of: digits are a revision. Raises ValueError."""
    try:
        return int(text) if text.isdecimal() else parse_time(text)
    except ValueError as error:
        raise ValueError(f"{error}; or a revision") from error


def run_list(config: Config, as_of: datetime | int | None) -> CommandResult:
    """List the files. Raises ConfigError, JetcaptureError."""
    files = list_files(config.store.url, _store(config), as_of=as_of, options=config.store.options)
    return CommandResult(summary=_total(files), lines=_lines(files), records=_records(files))


def run_get(config: Config, name: str, output: Path | None, *, as_of: datetime | int | None) -> int:
    """Write a file to `output`, by default its last name in the working directory. Raises ConfigError, JetcaptureError.

    Nothing is overwritten unless `output` names it.
    """
    store, target = _store(config), output
    if target is None:
        target = Path(PurePosixPath(name).name)
        if not _is_free(target):
            raise ConfigError(f"--output: required: {escaped(target.name)} exists, or cannot be a file's name")
    to = sys.stdout.buffer if output == STDOUT else target
    file = save_file(config.store.url, store, name, to, as_of=as_of, options=config.store.options)
    sys.stdout.flush()
    if output != STDOUT:
        sys.stdout.write(f"{escaped(str(target))}: {plural(file.size, 'byte')}\n")
    return 0


def _is_free(target: Path) -> bool:
    """Whether the name is valid for a file and unused, even by a broken link."""
    try:
        target.lstat()
    except OSError as error:
        return error.errno == errno.ENOENT and target.name.isprintable()
    except ValueError:
        return False
    return False


def _store(config: Config) -> str:
    kind, name = bucket_of(config.source.stream) or ("", "")
    if kind != "object_store":
        raise ConfigError("source.object_store: required for this command, but not set")
    return name


def _records(files: Sequence[ArchivedFile]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield {
            "name": file.name,
            "bytes": file.size,
            "chunks": file.chunks,
            "digest": file.digest,
            "modified": format_time(file.modified),
            "revision": file.revision,
            "description": file.description,
            "headers": file.headers,
            "metadata": file.metadata,
            "link": None if file.link is None else dict(zip(("bucket", "name"), file.link, strict=True)),
            "problem": file.problem,
        }


def _lines(files: Sequence[ArchivedFile]) -> Iterator[str]:
    rows = [("bytes", "revision", "modified", "name")]
    for file in files:
        link = "" if file.link is None else f" -> {escaped('/'.join(part for part in file.link if part))}"
        problem = "" if file.problem is None else f" ({escaped(file.problem)})"
        modified = f"{file.modified:%Y-%m-%d %H:%M:%S}"
        rows.append((f"{file.size:,}", str(file.revision), modified, f"{escaped(file.name)}{link}{problem}"))
    if files:
        yield from aligned(rows, right=(0, 1))
    yield _total(files)


def _total(files: Sequence[ArchivedFile]) -> str:
    total = sum(file.size for file in files)
    return f"{plural(len(files), 'file')}, {plural(total, 'byte')}"
