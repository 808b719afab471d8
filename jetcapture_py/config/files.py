"""The configuration files that a command line names: files, and directories of files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from jetcapture_py.errors import ConfigError

SUFFIXES = (".yaml", ".yml")


def is_single(arguments: Sequence[Path]) -> bool:
    """Whether the command line names one file, so that there is only ever one capture."""
    return len(arguments) == 1 and not arguments[0].is_dir()


def expand(arguments: Sequence[Path], directories: Collection[Path] | None = None) -> list[Path]:
    """Return each file once, a directory's in the order of their names.

    `directories` are those of the arguments that stand for their files, by default all that are directories now. Files
    directly in a directory count if their names end in .yaml or .yml and do not start with a dot. Raises
    ConfigError for a directory that cannot be read or has none.
    """
    found: dict[Path, None] = {}
    for path in arguments:
        expands = path.is_dir() if directories is None else path in directories
        found.update(dict.fromkeys(_files(path) if expands else [path]))
    return list(found)


def _files(directory: Path) -> list[Path]:
    try:
        files = [path for path in sorted(directory.iterdir()) if _is_configuration(path)]
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from error
    if not files:
        raise ConfigError(f"{directory}: expected files that end in {' or '.join(SUFFIXES)}, found none")
    return files


def _is_configuration(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()
