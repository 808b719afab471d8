"""Remove objects, most of them in favor of replacements that hold their messages. No other module removes an object.

Whatever else runs, every message stays in some object:

- No put replaces an existing object (see `store`), so a footer that names replaced objects keeps naming them.
- Right before an object is removed, it and its holders must be unchanged since they were read.
- In a local archive, this check and the removal are one step, under a lock. If two programs would each remove the
  object that the other relies on, the second one finds its holder gone, and keeps its object. Remote stores have no
  lock; there, the order of `compaction.plan` and the grace keep programs apart, and an object is only removed if it
  still has the tag that it had at this check. For stores that ignore this condition, docs/configuration.md says what
  must not run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetcapture_py.errors import StoreError, VanishedError
from jetcapture_py.store.archive import ArchiveFiles, File


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """An object to be removed, and the objects that together hold its messages, in the state in which they were
    read."""

    target: File
    holders: Sequence[File] = ()


def remove(archive: ArchiveFiles, removals: Sequence[Removal]) -> list[bool | StoreError]:
    """Remove objects; return for each whether it existed, or the error that keeps it.

    The error is a VanishedError if the object or one of its holders has changed since it was read.
    """

    def attempt(removal: Removal) -> bool | StoreError:
        try:
            return _remove(archive, removal)
        except StoreError as error:
            return error

    return list(archive.map(attempt, removals))


def _remove(archive: ArchiveFiles, removal: Removal) -> bool:
    with archive.removing():
        for holder in removal.holders:
            _refuse_other(archive, holder, archive.again(holder))
        try:
            now = archive.again(removal.target)
        except VanishedError:
            return False
        _refuse_other(archive, removal.target, now)
        archive.remove(now)
    return True


def move_aside(archive: ArchiveFiles, file: File) -> str:
    """Rename a damaged object so that it is no longer taken for one; return its new path.

    Raises StoreError, also if it was stored again since it was listed: others may rely on it now.
    """
    with archive.removing():
        now = archive.again(file)
        _refuse_other(archive, file, now)
        return archive.move_aside(now)


def _refuse_other(archive: ArchiveFiles, before: File, now: File) -> None:
    """Raise VanishedError if a file has been rewritten. Listings may have whole seconds only, or no time."""
    times = int(now.modified or 0), int(before.modified or now.modified or 0)
    if now.size != before.size or times[0] != times[1] or len({now.tag, before.tag} - {None}) > 1:
        raise archive.stored_again(now)
