"""Durable changes to a local file system. Paths are relative to the directory descriptor `root`, if given."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

_FILE_MODE, _DIRECTORY_MODE = 0o664, 0o775
"""Reduced by the umask; never writable for everyone."""
NO_LINKS = {errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of a file system without hard links; the last two are the same on Linux."""
NO_RENAME = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of a file system that cannot rename files."""


def write_durably(path: str, data: bytes | pa.Buffer, root: int | None = None) -> None:
    """Create a new file with `data`, durable on return."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE, dir_fd=root)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: str, root: int | None = None, *, parents: bool = True) -> bool:
    """Create `directory` and its parents durably; return False if it existed."""
    parent = directory.rpartition("/")[0] or ("/" if directory.startswith("/") else ".")
    try:
        os.mkdir(directory, _DIRECTORY_MODE, dir_fd=root)
    except FileNotFoundError:
        if not parents or parent in (directory, "."):  # the parent exists, but nothing can be created in it
            raise
        make_directory(parent, root)
        return make_directory(directory, root, parents=False)
    except FileExistsError as error:
        if not stat.S_ISDIR(os.stat(directory, dir_fd=root).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from error
        return False
    sync_directory(parent, root)
    return True


def sync_directory(directory: str, root: int | None = None) -> None:
    """Sync `directory` itself, and thus its names, to disk, where its file system can."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def rename(path: str, target: str, root: int | None = None) -> bool:
    """Rename a file; replace one of that name."""
    try:
        os.replace(path, target, src_dir_fd=root, dst_dir_fd=root)
    except OSError as error:
        if error.errno not in NO_RENAME:
            raise
        text = "its file system cannot rename files; if it is an object store, name that in store.url instead"
        raise OSError(error.errno, text) from error
    return True


def link(path: str, target: str, root: int | None = None) -> bool:
    """Rename a file; if a file of that name exists and is not empty, remove the new one instead, and return False."""
    made = True
    try:
        os.link(path, target, src_dir_fd=root, dst_dir_fd=root)
    except OSError as error:
        if error.errno not in {errno.EEXIST, *NO_LINKS}:
            raise
        if not _has_content(target, root):
            return rename(path, target, root)
        made = False
    os.unlink(path, dir_fd=root)
    return made


def _has_content(path: str, root: int | None) -> bool:
    """Whether a file exists and is not empty; a crash may leave empty ones."""
    try:
        status = os.stat(path, dir_fd=root)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def files_below(directory: str, above: Collection[tuple[int, int]] = ()) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a directory, also through symbolic links, as Spark lists them.

    Broken links and links to a directory above are skipped. `above` are the directories being listed, by device and
    inode. Raises OSError.
    """
    status = Path(directory).stat()
    if (status.st_dev, status.st_ino) in above:
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    yield from files_below(entry.path, {*above, (status.st_dev, status.st_ino)})
                else:
                    yield entry.path, entry.stat()
            except FileNotFoundError:  # removed since it was listed, or a broken link
                continue
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link to itself
                    raise
