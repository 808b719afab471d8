"""Decode the messages of a quarantine again, with the current configuration.

Decoded messages are stored as by a capture, under their own sequence, timestamp, key and bucket. Then they leave the
quarantine: its objects are rewritten without them (see `compaction.rewrite`). Other messages stay, with the new reason.
Until the end, a message may be in both; it counts as archived, and after a killed run the next one finds it there.
Right before a quarantine object is removed, every message that left it is looked up in the archive, and the objects
that hold these messages are read in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Mask
from jetcapture_py.archive.info import ObjectInfo
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.messages import MessageSet, RowIds
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.recapture import Recapture, Rows
from jetcapture_py.compaction.checked import row_groups
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.memory import MemoryBudget, searching
from jetcapture_py.compaction.plan import Source, batches
from jetcapture_py.compaction.rewrite import Rewritten, remove_replaced, rewrite
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError, StoreError, VanishedError
from jetcapture_py.reading.plan import ReadRequest
from jetcapture_py.reading.reasons import COLUMNS, ReasonCounter, ReasonSummary, matching
from jetcapture_py.retry import retried
from jetcapture_py.store.archive import File, open_archive
from jetcapture_py.store.object_file import open_parquet
from jetcapture_py.table.commit import drop_quarantined
from jetcapture_py.transform.frames import received_of
from jetcapture_py.transform.keys import Run
from jetcapture_py.verify.examine import DamagedError, ObjectExaminer
from jetcapture_py.verify.findings import Progress, ignore
from jetcapture_py.verify.proof import own_suffix

_SEALED_BY: Final = "redecode"
_MESSAGE_BYTES = 2 << 10
"""Memory for the position, subject and reason of a message, until it has left the quarantine or has a new reason. Once
the memory is used up, the messages decoded so far are stored."""
_ATTEMPTS = 10
"""Attempts to read a batch of objects while a compaction removes some of them."""
_NONE = MessageSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineSelection:
    """A selection of a quarantine's messages."""

    reasons: Sequence[str] = ()
    """Only those with one of these texts in `stage: error`; empty for all."""
    start: datetime | None = None
    """Only those with this timestamp or a later one."""
    end: datetime | None = None
    """Only those with an earlier timestamp."""

    def mask(self, rows: pa.Table) -> Mask:
        """Return a mask of the selected rows."""
        times = rows[layout.TIMESTAMP]
        mask: Mask = matching(rows, self.reasons)
        if self.start is not None:
            mask &= pc.greater_equal(times, pa.scalar(self.start, times.type)).to_numpy()
        if self.end is not None:
            mask &= pc.less(times, pa.scalar(self.end, times.type)).to_numpy()
        return mask


@dataclass(slots=True, kw_only=True)
class Redecoded:
    """The effect of redecoding or its dry run."""

    dry_run: bool
    messages: int = 0
    """Selected messages of the quarantine."""
    decoded: int = 0
    """Messages newly archived."""
    archived: int = 0
    """Messages that were already archived and only left the quarantine."""
    failed: int = 0
    """Messages that stay, because they cannot be decoded."""
    without_payload: int = 0
    """Messages that stay, because they were stored without their payload."""
    objects: int = 0
    """New objects of the archive."""
    removed: int = 0
    """Removed quarantine objects, perhaps replaced by others."""
    changed: int = 0
    """Quarantine objects that were compacted meanwhile; the next run decodes their messages."""
    waiting: int = 0
    """Quarantine objects that only the next run may remove, because of a compaction."""
    errors: Sequence[str] = ()
    """Failures to remove objects."""
    reasons: Sequence[ReasonSummary] = ()
    """Reasons why messages could not be decoded."""


async def redecode(
    config: Config,
    selection: QuarantineSelection,
    *,
    dry_run: bool = False,
    progress: Progress = ignore,
) -> Redecoded:
    """Decode selected messages of the quarantine again; with `dry_run`, store nothing.

    `progress` is called with a stage and its progress. Raises ConfigError, JetcaptureError; finished work stays, and
    another run continues.
    """
    if own_suffix(config):
        raise ConfigError(f"block.format: {config.block.format} cannot be read back, which redecode needs")
    redecoder = _Redecoder(config, selection, dry_run=dry_run)
    with redecoder.recapture:
        return await redecoder.run(progress)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a batch."""

    decoded: list[MessageSet] = field(default_factory=list)
    failures: list[pa.RecordBatch] = field(default_factory=list)
    """Identities and new reasons of messages that were not decoded."""


class _Redecoder:
    """Decodes the quarantine's messages, batch by batch."""

    def __init__(self, config: Config, selection: QuarantineSelection, *, dry_run: bool) -> None:
        self.recapture = Recapture(config, _SEALED_BY, self._choose, self._put)
        self._config, self._selection = config, selection
        self._archive = open_archive(config.store.url, config.store.options)
        self._files = Files(self._archive)
        self._budget = MemoryBudget(config.limits.memory)
        self._done = Redecoded(dry_run=dry_run)
        self._erased = Erased()
        self._reasons = ReasonCounter()
        self._origin = "", ""
        """The stream's creation time and the consumer for footers."""
        self._stored = _NONE
        """Messages of the batch that were stored before one of its objects vanished."""
        self._outcome = _Outcome()

    async def run(self, progress: Progress) -> Redecoded:
        """Decode everything. Raises JetcaptureError."""
        stream, done = self._config.source.stream, self._done
        sources = self._files.find([f"{layout.QUARANTINE}/{stream}"])
        if not sources:
            # raises an error if there is no such archive either
            ReadRequest(files=self._archive, stream=stream, quarantine=True).plan()
        if done.dry_run:
            archiver = self.recapture.archiver
            await archiver.uploads.call(archiver.types.read)
        elif sources:
            await self.recapture.check_store()
        rows, total = 0, sum(source.name.rows for source in sources)
        ordered = sorted(sources, key=lambda source: (source.name.first_seq, source.name.path))
        for batch in batches(ordered, lambda source: source.name.rows, self._budget.size // _MESSAGE_BYTES):
            self._stored = _NONE
            for attempt in range(_ATTEMPTS):
                try:
                    await self._redecode([source.name.path for source in batch])
                    break
                except VanishedError:
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    self._stored = MessageSet.union([self._stored, *self._outcome.decoded])
            rows += sum(source.name.rows for source in batch)
            progress("messages", rows, total)
        done.reasons = self._reasons.summaries()
        return done

    async def _redecode(self, paths: Sequence[str]) -> None:
        """Decode the messages of the objects that still exist; a compaction may replace some."""
        done = self._done
        self._outcome = outcome = _Outcome()
        self._erased = self._archive.erased(self._config.source.stream, self._erased)
        self._files = Files(self._archive)
        infos = [info for info in map(self._files.info_at, paths) if info is not None]
        selected = MessageSet.union(map(self._messages, infos))
        before = self._find(selected)
        seen = await self._decode(infos, before)
        failed = _messages(outcome.failures)
        decoded = MessageSet.union(outcome.decoded).without(failed)
        gone, reasons = MessageSet.union([before, decoded]), _Reasons(outcome.failures)
        rewritten: list[Rewritten] = []
        if not done.dry_run:
            changes = [info for info in infos if self._changes(info, gone, reasons)]
            rewritten = [self._rewrite(info.name, gone, reasons) for info in changes]
            if len(self._find(gone, in_full=True)) < len(gone):
                raise StoreError(
                    "messages that were stored are not in the archive; none was removed from the quarantine"
                )
        done.messages += len(selected)
        done.changed += len(paths) - len(infos)
        done.archived += len(before.without(self._stored))
        done.decoded += len(decoded) + len(before) - len(before.without(self._stored))
        done.failed += len(failed)
        done.without_payload += len(selected) - len(before) - len(seen)
        for failures in outcome.failures:
            self._reasons.add(pa.Table.from_batches([failures]))
        if rewritten:
            drop_quarantined(
                self._config, self._archive, [others.source.name.path for others in rewritten if others.removal]
            )
        removed, errors = remove_replaced(self._archive, rewritten)
        done.removed += removed
        done.errors = (*done.errors, *errors)
        done.waiting += sum(others.removal is None and others.target != others.source.name for others in rewritten)

    def _messages(self, info: ObjectInfo) -> MessageSet:
        """Return the selected messages of an object."""
        selected = map(self._select, row_groups(self._files, info, COLUMNS))
        return MessageSet.union(ids.take(mask).messages for ids, mask in selected)

    def _select(self, table: pa.Table) -> tuple[RowIds, Mask]:
        """Return the messages of rows, and a mask of the selected ones, without erased ones."""
        ids = RowIds.of(table)
        return ids, self._selection.mask(table) & ~self._erased.contains(ids.seqs, ids.times)

    async def _decode(self, infos: Sequence[ObjectInfo], before: MessageSet) -> MessageSet:
        """Decode and store selected messages, except those in the archive `before`. Return all with a payload."""
        seen, end, consumer = [before], -1, self._config.source.consumer
        for info in infos:
            every = MessageSet.union(seen) if info.name.first_seq <= end else before
            origin = ",".join(info.details.created), ",".join(info.details.consumers)
            if origin != self._origin:
                await self.recapture.flush()
                self.recapture.set_source(*origin)
                self._origin = origin
            for table in row_groups(self._files, info):
                if layout.PAYLOAD not in table.schema.names:
                    continue
                ids, mask = self._select(table)
                mask &= table[layout.PAYLOAD].is_valid().to_numpy() & ~every.contains(ids.seqs, ids.times)
                seen.append(ids.take(mask).messages)
                for batch in table.filter(pa.array(mask)).combine_chunks().to_batches():
                    await self.recapture.add(consumer, received_of(batch, consumer))
            end = max(end, info.name.last_seq)
        await self.recapture.flush()
        return MessageSet.union(seen[1:])

    def _choose(self, rows: pa.RecordBatch, runs: Sequence[Run], quarantine: bool) -> Rows:
        """Return the decoded rows to store; record successes and failures."""
        if rows.num_rows and quarantine:
            self._outcome.failures.append(pa.RecordBatch.from_arrays(rows.select(COLUMNS).columns, COLUMNS))
        elif rows.num_rows:
            self._outcome.decoded.append(_messages([rows]))
        return (rows.slice(0, 0), ()) if quarantine or self._done.dry_run else (rows, runs)

    async def _put(self, encoded: EncodedBlock) -> None:
        """Store decoded rows; rows that the encoder rejects stay in quarantine with its error."""
        if encoded.name.quarantine:
            table = open_parquet(pa.BufferReader(encoded.data)).read(list(COLUMNS), use_threads=False)
            plain = pa.table(dict(zip(COLUMNS, table.select(COLUMNS).columns, strict=True)))
            self._outcome.failures.extend(plain.to_batches())
            return
        await self.recapture.put(encoded)
        self._done.objects += 1

    def _find(self, messages: MessageSet, *, in_full: bool = False) -> MessageSet:
        """Return the messages that are in archive objects. With `in_full`, read these objects in full; raise StoreError
        if one is damaged."""
        examiner = ObjectExaminer(self._archive, None)

        def held(file: File) -> MessageSet:
            if file.name is None:
                return _NONE
            source = Source(file.name, file.size)
            try:
                with self._budget.taken(searching(source, local=self._archive.local)):
                    seqs, times = examiner.positions(file, file.name)
                    mask = messages.contains(seqs, times)
                    if in_full and mask.any() and file.name.parquet:
                        Files(self._archive).read_through(source)
            except DamagedError:
                return _NONE
            return MessageSet(seqs[mask], times[mask])

        def stored() -> MessageSet:
            files = self._archive.below(self._config.source.stream)
            candidates = [
                file
                for file in files
                if file.name is not None and messages.near(file.name.first_seq, file.name.last_seq)
            ]
            return MessageSet.union(self._archive.map(held, candidates))

        return retried(stored) if len(messages) else _NONE

    def _changes(self, info: ObjectInfo, gone: MessageSet, reasons: _Reasons) -> bool:
        """Whether messages leave an object, or have another reason."""
        for table in row_groups(self._files, info, COLUMNS):
            ids = RowIds.of(table)
            if gone.contains(ids.seqs, ids.times).any() or not reasons.applied(table).equals(table):
                return True
        return False

    def _rewrite(self, name: ObjectName, gone: MessageSet, reasons: _Reasons) -> Rewritten:
        source = Source(name, self._archive.at(name.path).size)  # an earlier rewrite may have added rows
        return rewrite(self._archive, source, gone, _SEALED_BY, reasons.applied)


class _Reasons:
    """The new reasons of messages."""

    def __init__(self, failures: Sequence[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(failures) if failures else None
        self._messages = _messages(failures)
        self._texts: dict[str, pa.Array] = {}
        if table is not None:
            ids = RowIds.of(table)
            first = np.unique(self._messages.positions(ids.seqs, ids.times), return_index=True)[1]
            for name in (layout.STAGE, layout.ERROR):
                self._texts[name] = table[name].combine_chunks().take(pa.array(first))

    def applied(self, table: pa.Table) -> pa.Table:
        """Return rows of the quarantine with the new reasons of those that have one."""
        ids = RowIds.of(table)
        mask = self._messages.contains(ids.seqs, ids.times)
        if not mask.any():
            return table
        positions = pa.array(self._messages.positions(ids.seqs[mask], ids.times[mask]))
        for name, texts in self._texts.items():
            column = pc.replace_with_mask(table[name].combine_chunks(), pa.array(mask), texts.take(positions))
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        return table


def _messages(batches: Iterable[pa.RecordBatch]) -> MessageSet:
    return RowIds.concat([RowIds.of(pa.Table.from_batches([batch])) for batch in batches]).messages
