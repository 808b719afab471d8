"""The `erase` command: remove messages for good, take them out of tables as well, and print a certificate."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from jetcapture_py import log, text
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import ConfigError, ConflictError, JetcaptureError
from jetcapture_py.maintain.table import commit, open_table, table_path
from jetcapture_py.rewriting.erase import Erasure, erase
from jetcapture_py.rewriting.selectors import Selector, selector_of
from jetcapture_py.store.archive import ArchiveFiles, open_archive
from jetcapture_py.text import escaped, plural

_ATTEMPTS = 8
"""How often the snapshots of a table are expired again because another process was faster."""


def run(
    config: Config,
    *,
    key: str | None,
    subject: str | None,
    seqs: str | None,
    where: str | None,
    reason: str,
    in_stream: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Erase what one of the selectors selects, and print what was done; return the exit code.

    Raises ConfigError, JetcaptureError.
    """
    if sum(given is not None for given in (key, subject, seqs, where)) != 1:
        raise ConfigError("expected one of --key, --subject, --seq and --where")
    if not reason.strip():
        raise ConfigError("--reason: expected a text, which becomes part of the tombstone")
    select: Selector | str | None = where if where is not None else selector_of(key, subject, seqs, config.key)
    assert select is not None  # noqa: S101  # one of the four was given
    log.setup(config.log.format, "error")
    tables = _Tables(config, open_archive(config.store.url, config.store.options))
    tables.check()
    with text.progress_bars() as progress:
        done = asyncio.run(
            erase(config, select, reason, in_stream=in_stream, dry_run=dry_run, tables=tables, progress=progress)
        )
    lines = [json.dumps(_fields(done, tables))] if as_json else _lines(done, tables)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if done.remaining else 0


class _Tables:
    """The tables of an archive, out of which objects are taken before they are removed."""

    def __init__(self, config: Config, archive: ArchiveFiles) -> None:
        self._config, self._archive = config, archive
        given = config.maintain.table if config.maintain else None
        self.names = {} if given is None else {False: given.name, True: given.quarantine}
        self.expired = 0
        """Snapshots that were expired."""

    def check(self) -> None:
        """Open the tables, so that nothing begins that cannot end. Raises ConfigError, JetcaptureError."""
        for quarantine, name in self.names.items():
            if name is not None:
                with open_table(self._config, self._archive, quarantine=quarantine, read_only=True):
                    pass

    def __call__(self, paths: Collection[str]) -> Sequence[str]:
        """Replace objects in the tables by those that have their other messages, and expire the snapshots before."""
        problems: list[str] = []
        for quarantine, name in self.names.items():
            if name is not None:
                try:
                    problems += self._replace(name, set(paths), quarantine=quarantine)
                except JetcaptureError as error:
                    problems.append(str(error))
        return problems

    def _replace(self, name: str, paths: Collection[str], *, quarantine: bool) -> list[str]:
        """Take objects out of one table; return what still names them. Raises JetcaptureError."""
        maintain = self._config.maintain
        compact = (maintain and maintain.compact) or CompactConfig()
        config, archive = self._config, self._archive
        with open_table(config, archive, quarantine=quarantine) as table:
            if not table.exists:
                return []
        commit(config, archive, after=compact.after, quarantine=quarantine, expired=paths)
        for attempt in range(_ATTEMPTS):
            try:
                with open_table(config, archive, quarantine=quarantine) as table:
                    expired, kept = table.expire([table_path(archive, path) for path in paths])
                    self.expired += expired
                    return [f"table {name}: {each} names snapshots that have erased messages" for each in kept]
            except ConflictError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError  # the last attempt returns or raises


def _fields(done: Erasure, tables: _Tables) -> dict[str, object]:
    """Return the certificate as plain values."""
    return {
        **asdict(done),
        "started": format_time(done.started),
        "ended": format_time(datetime.now(UTC)),
        "snapshots": tables.expired,
        "remains": done.remaining,
    }


def _lines(done: Erasure, tables: _Tables) -> Iterator[str]:
    """Yield the certificate as text."""

    def count(number: int, noun: str, nouns: str | None = None) -> str:
        return plural(number, noun, nouns, grouped=True)

    would, were = ("would be ", "would be") if done.dry_run else ("", "were")
    yield f"stream {done.stream}: {count(done.messages, 'message')} {would}erased"
    if not done.dry_run:
        yield f"at {format_time(done.started)} by {escaped(done.by)}: {text.one_line(done.reason)}"
    if done.earlier:
        yield f"{count(done.earlier, 'message')} of earlier erasures {were} still stored"
    if done.tombstone:
        yield f"tombstone: {done.tombstone}"
    yield (
        f"searched: {count(done.searched, 'object')}; {count(done.copies, 'copy', 'copies')} "
        f"in {count(len(done.objects), 'object')}"
    )
    for each in done.objects:
        digest = f"  sha256 {each.sha256}" if each.sha256 else ""
        yield f"  {escaped(each.path)}: {count(each.messages, 'message')}{digest}"
        if not done.dry_run:
            after = (
                "removed" if each.after is None else f"{escaped(each.after)}  sha256 {each.sha256_after or 'compacted'}"
            )
            yield f"    now {after}"
    if done.versions:
        yield f"old versions of objects: {done.versions:,} {would}deleted"
    if tables.names and not done.dry_run:
        yield f"tables: {count(tables.expired, 'snapshot')} expired"
    if done.in_stream is not None:
        yield f"in the stream: {count(done.in_stream.deleted, 'message')} {would}deleted and overwritten"
    for title, lines in (
        ("REMAINS", done.remaining),
        ("not checked", [*done.notes, *(done.in_stream.notes if done.in_stream else ())]),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if not done.remaining and not done.dry_run:
        yield "nothing remains in the archive" + (" and the stream" if done.in_stream else "")
