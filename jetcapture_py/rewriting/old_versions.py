"""Delete old versions of files in a versioned bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jetcapture_py.errors import StoreError
from jetcapture_py.store.archive import ArchiveFiles, OldVersion
from jetcapture_py.verify.examine import DamagedError

HasErased = Callable[[OldVersion], bool]
"""Returns whether a version has erased messages. Raises DamagedError, StoreError."""


def delete_old_versions(
    archive: ArchiveFiles, directories: Sequence[str], has_erased: HasErased, *, dry_run: bool = False
) -> tuple[int, list[str]]:
    """Delete old versions below directories, and the delete markers of files without a remaining version.

    A marker has a file's name, and so its key; a killed run may have deleted only the versions. Returns the number of
    versions, and one line per failed deletion. With `dry_run`, only counts.
    """
    count, problems = 0, list[str]()
    kept: set[str] = set()

    def delete(version: OldVersion) -> bool | str:
        try:
            if not has_erased(version):
                return False
            if not dry_run:
                version.remove()
        except (StoreError, DamagedError) as error:
            return f"{version.file.path}, an old version: {error}"
        return True

    try:
        versions = list(archive.old_versions(*directories))
        markers = [version for version in versions if version.marker]
        versions = [version for version in versions if not version.marker]
        for version, deleted in zip(versions, archive.map(delete, versions), strict=True):
            count += deleted is True
            if deleted is not True:
                kept.add(version.file.path)
            if isinstance(deleted, str):
                problems.append(deleted)
        for marker in markers if not dry_run else ():
            if marker.file.path not in kept:
                try:
                    marker.remove()
                except StoreError as error:
                    problems.append(f"{marker.file.path}, its delete marker: {error}")
    except StoreError as error:
        problems.append(f"old versions of objects: {error}")
    return count, problems
