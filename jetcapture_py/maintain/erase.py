"""The `erase` command: remove messages for good, take them out of tables as well, and print a certificate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from jetcapture_py import log, text
from jetcapture_py.archive import layout
from jetcapture_py.archive.removed import Erased
from jetcapture_py.config.maintain import CompactConfig
from jetcapture_py.config.model import Config
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import ConfigError, ConflictError, JetcaptureError, VanishedError
from jetcapture_py.maintain.inventory import root_url
from jetcapture_py.maintain.table import commit, open_table, table_path
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.rewriting.erase import Erasure, erase, unfinished
from jetcapture_py.rewriting.old_versions import delete_old_versions
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store.archive import ArchiveFiles, File, open_archive
from jetcapture_py.text import escaped, plural, without_credentials
from jetcapture_py.transform.decode.avro_schema import Header
from jetcapture_py.verify.findings import Progress, ignore

if TYPE_CHECKING:
    from jetcapture_py.maintain.iceberg import IcebergTable

_ATTEMPTS = 8
"""How often the snapshots of a table are expired again because another process was faster."""
_AVRO = ".avro"
_MAX_MANIFEST = 1 << 30
"""Maximum bytes of a manifest, decompressed."""


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
    progress: Progress = ignore,
) -> CommandResult:
    """Erase what one of the selectors selects. Raises ConfigError, JetcaptureError."""
    condition = Condition.parse(key, subject, seqs, where)
    if not reason.strip():
        raise ConfigError("--reason: expected a text, which becomes part of the tombstone")
    log.setup(config.log.format, "error")
    tables = _Tables(config, open_archive(config.store.url, config.store.options))
    tables.check()
    done = asyncio.run(
        erase(config, condition, reason, in_stream=in_stream, dry_run=dry_run, tables=tables, progress=progress)
    )
    would = "would be " if done.dry_run else ""
    erased = f"{plural(done.messages, 'message', grouped=True)} {would}erased"
    return CommandResult(
        summary="; ".join([erased, *(f"REMAINS: {line}" for line in done.remaining)]),
        lines=_lines(done, tables),
        records=[_fields(done, tables)],
        code=1 if done.remaining else 0,
    )


class _Tables:
    """The tables of an archive, out of which objects are taken before they are removed."""

    def __init__(self, config: Config, archive: ArchiveFiles) -> None:
        self._config, self._archive = config, archive
        given = config.maintain.table if config.maintain else None
        self.names = {} if given is None else {False: given.name, True: given.quarantine}
        self.expired = 0
        """Snapshots that were expired."""
        self.versions = 0
        """Old versions of manifests that were deleted, in a bucket that keeps such."""
        self.notes: list[str] = []
        """What was not searched."""

    def check(self) -> None:
        """Open the tables, so that nothing begins that cannot end. Raises ConfigError, JetcaptureError."""
        for quarantine, name in self.names.items():
            if name is not None:
                with open_table(self._config, self._archive, quarantine=quarantine, read_only=True):
                    pass

    def drop(self, paths: Collection[str]) -> Sequence[str]:
        """Replace objects in the tables by those that have their other messages, and expire the snapshots before."""
        places = {table_path(self._archive, path) for path in paths}
        return self._each(lambda name, quarantine: self._dropped(name, quarantine, paths, lambda: places.__contains__))

    def finish(self, erased: Erased, left: Collection[str]) -> Sequence[str]:
        """Expire all that names objects which are gone and may have had erased messages, and delete what nothing names.

        Objects that maintenance has put back into a table before they were removed are taken out of it first, and those
        at the paths `left`.
        """

        def finished(name: str, quarantine: bool) -> list[str]:
            present: Collection[str] = ()

            def gone(path: str) -> bool:
                return self._is_gone(path, present, erased)

            def listed() -> Callable[[str], bool]:
                nonlocal present
                present = self._present(quarantine)
                return gone

            problems = self._dropped(name, quarantine, left, listed)
            with open_table(self._config, self._archive, quarantine=quarantine) as table:
                # the listing may be older than an object: ask for it
                unnamed = self._delete_unnamed(table, lambda path: gone(path) and not self._exists(path))
                return problems + [f"table {name}: {each}" for each in unnamed]

        return self._each(finished)

    def _each(self, work: Callable[[str, bool], list[str]]) -> list[str]:
        """Do the work for the table of the messages and that of the quarantine, and return the problems."""
        problems: list[str] = []
        for quarantine, name in self.names.items():
            if name is not None:
                try:
                    problems += work(name, quarantine)
                except JetcaptureError as error:
                    problems.append(str(error))
        return problems

    def _dropped(
        self, name: str, quarantine: bool, paths: Collection[str], removed: Callable[[], Callable[[str], bool]]
    ) -> list[str]:
        """Take objects out of one table; return what still names them. Raises JetcaptureError.

        `removed` is called when the table has been loaded, and returns whether a file of it is one of them.
        """
        maintain = self._config.maintain
        compact = (maintain and maintain.compact) or CompactConfig()
        config, archive = self._config, self._archive
        with open_table(config, archive, quarantine=quarantine) as table:
            if not table.exists:
                return []
        for attempt in range(_ATTEMPTS):
            commit(config, archive, after=compact.after, quarantine=quarantine, expired=paths)
            try:
                with open_table(config, archive, quarantine=quarantine) as table:
                    expired, kept = table.forget(removed())
                    self.expired += expired
                    return [f"table {name}: {each}" for each in kept]
            except ConflictError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError  # the last attempt returns or raises

    def _present(self, quarantine: bool) -> frozenset[str]:
        """Return the paths of the objects that exist."""
        stream = self._config.source.stream
        return frozenset(
            file.path for file in self._archive.below(f"{layout.QUARANTINE}/{stream}" if quarantine else stream)
        )

    def _exists(self, place: str) -> bool:
        """Whether there is an object at a table's path. Raises StoreError."""
        try:
            self._archive.at(place.removeprefix(root_url(self._archive)))
        except VanishedError:
            return False
        return True

    def _is_gone(self, place: str, present: Collection[str], erased: Erased) -> bool:
        """Whether a table's path is that of an object which is not present, and may have had erased messages."""
        path = place.removeprefix(root_url(self._archive))
        name = layout.parse_path(path)
        return name is not None and path not in present and erased.near(name.first_seq, name.last_seq)

    def _delete_unnamed(self, table: IcebergTable, is_gone: Callable[[str], bool]) -> list[str]:
        """Delete manifests that no snapshot names, as killed commits leave them; return what remains, or may.

        They have the paths of objects, and lists of them the lowest and highest keys.
        """
        archive, place = self._archive, table.metadata_directory
        directory = (place or "").removeprefix(root_url(archive))
        if place is None:
            return []
        if directory == place:
            self.notes.append(f"manifests below {without_credentials(place)} that no snapshot names")
            return []
        problems: list[str] = []
        named = {path.removeprefix(root_url(archive)) for path in table.metadata_files()}

        def concerns(archive: ArchiveFiles, file: File) -> bool:
            return file.path.endswith(_AVRO) and _names(archive.read(file), root_url(self._archive), is_gone)

        for file in archive.below(directory):
            if file.path in named or not concerns(archive, file):
                continue
            if reason := unfinished(file):
                problems.append(reason)
            else:
                archive.remove(file)
        versions, kept = delete_old_versions(archive, [directory], lambda each: concerns(each.archive, each.file))
        self.versions += versions
        return problems + kept


def _names(manifest: bytes, root: str, is_gone: Callable[[str], bool]) -> bool:
    """Whether a manifest names such an object; lists of manifests only have keys, and always count."""
    try:
        blocks = b"".join(data for _, data in Header(manifest).blocks(_MAX_MANIFEST))
    except ValueError:  # it was cut off
        return True
    # a key may have ".parquet" in it, so a path ends with the digest of a name
    paths = re.findall(re.escape(root.encode()) + rb"[^\x00-\x1f\x7f]*?-[0-9a-f]{16}\.parquet", blocks)
    return not paths or any(is_gone(path.decode(errors="replace")) for path in paths)


def _fields(done: Erasure, tables: _Tables) -> dict[str, object]:
    """Return the certificate as plain values."""
    return {
        **asdict(done),
        "started": format_time(done.started),
        "ended": format_time(datetime.now(UTC)),
        "snapshots": tables.expired,
        "versions": done.versions + tables.versions,
        "notes": [*done.notes, *tables.notes],
        "remains": done.remaining,
    }


def _lines(done: Erasure, tables: _Tables) -> Iterator[str]:
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
    if versions := done.versions + tables.versions:
        yield f"old versions of objects: {versions:,} {would}deleted"
    if tables.names and not done.dry_run:
        yield f"tables: {count(tables.expired, 'snapshot')} expired"
    if done.in_stream is not None:
        yield f"in the stream: {count(done.in_stream.deleted, 'message')} {would}deleted and overwritten"
    for title, lines in (
        ("REMAINS", done.remaining),
        ("not checked", [*done.notes, *tables.notes, *(done.in_stream.notes if done.in_stream else ())]),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if not done.remaining and not done.dry_run:
        where = "the archive and the stream" if done.in_stream else "the archive"
        known = "(no watermark says up to which sequence)" if done.up_to is None else f"up to sequence {done.up_to}"
        yield f"nothing remains in {where} of what was stored {known}"
