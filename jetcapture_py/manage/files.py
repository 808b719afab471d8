"""The commands `files` and `get`: list the files of an archived object store, and give one back."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath

from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time, parse_time
from jetcapture_py.errors import ConfigError
from jetcapture_py.files import ArchivedFile, list_files, save_file
from jetcapture_py.text import escaped, plural

STDOUT = Path("-")


def moment(text: str | None) -> datetime | int | None:
    """Parse the option --as-of: digits are a revision. Raises ConfigError."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return parse_time(text)
    except ValueError as error:
        raise ConfigError(f"--as-of: {error}; or a revision") from error


def run_list(config: Config, *, as_of: datetime | int | None, as_json: bool) -> int:
    """Print the files; return the exit code. Raises ConfigError, JetcaptureError."""
    found = list_files(config.store.url, _store(config), as_of=as_of, options=config.store.options)
    sys.stdout.writelines(f"{line}\n" for line in (_json_lines(found) if as_json else _lines(found)))
    return 0


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
    found = save_file(config.store.url, store, name, to, as_of=as_of, options=config.store.options)
    sys.stdout.flush()
    if output != STDOUT:
        sys.stdout.write(f"{escaped(str(target))}: {plural(found.size, 'byte', grouped=True)}\n")
    return 0


def _is_free(target: Path) -> bool:
    """Whether nothing has this name, not even a broken link, and a file can have it."""
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


def _json_lines(found: Sequence[ArchivedFile]) -> Iterator[str]:
    for each in found:
        fields = {
            "name": each.name,
            "bytes": each.size,
            "chunks": each.chunks,
            "digest": each.digest,
            "modified": format_time(each.modified),
            "revision": each.revision,
            "description": each.description,
            "headers": each.headers,
            "metadata": each.metadata,
            "link": None if each.link is None else dict(zip(("bucket", "name"), each.link, strict=True)),
            "problem": each.problem,
        }
        yield json.dumps(fields)


def _lines(found: Sequence[ArchivedFile]) -> Iterator[str]:
    cells = [("bytes", "revision", "modified", "name")]
    for each in found:
        link = "" if each.link is None else f" -> {escaped('/'.join(part for part in each.link if part))}"
        problem = "" if each.problem is None else f" ({escaped(each.problem)})"
        modified = f"{each.modified:%Y-%m-%d %H:%M:%S}"
        cells.append((f"{each.size:,}", str(each.revision), modified, f"{escaped(each.name)}{link}{problem}"))
    if found:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for size, revision, modified, name in cells:
            yield "  ".join([size.rjust(widths[0]), revision.rjust(widths[1]), modified.ljust(widths[2]), name])
    total = sum(each.size for each in found)
    yield f"{plural(len(found), 'file', grouped=True)}, {plural(total, 'byte', grouped=True)}"
