"""The archive as the harness sees it: what lies where, since when; and how to break the place it lies in."""

from __future__ import annotations

import errno
import os
import subprocess
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

import boto3  # type: ignore[import-untyped]

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from tests.support import s3
from tests.support.running import CONSUMER, STREAM

WATERMARK = f"_watermark/{STREAM}/{CONSUMER}.json"
_KNOWN = ("_watermark/", "_streams/", "_columns/", "_probe/")


class Archive(Protocol):
    """A place with an archive in it. `files` gives every path and when it was written, in seconds since the epoch."""

    url: str

    def files(self) -> Iterator[tuple[str, float]]: ...

    def read(self, path: str) -> bytes: ...

    def heal(self) -> None: ...

    def close(self) -> None: ...


def objects(archive: Archive) -> tuple[dict[ObjectName, float], list[str]]:
    """Its objects and when each was stored; and the files that no reader would know what to do with."""
    found: dict[ObjectName, float] = {}
    foreign = []
    for path, written in archive.files():
        name = layout.parse_path(path)
        if name is not None:
            found[name] = written
        elif not path.startswith(_KNOWN):
            foreign.append(path)
    return found, foreign


class LocalArchive:
    """A directory behind a link, which can lead somewhere else from one moment to the next; or a disk of its own."""

    def __init__(self, place: Path, disk: int = 0) -> None:
        self.url = str(place)
        self.disk = disk
        self._link = place
        self._real = place.with_name("archive.real")
        self._file = place.with_name("archive.file")
        self._ballast = self._real / ".ballast"
        self._real.mkdir()
        self._file.touch()
        if disk:
            mount(self._real, disk)
        self._point(self._real)

    def _point(self, target: Path) -> None:
        new = self._link.with_name(f"link-{uuid.uuid4().hex}")
        new.symlink_to(target)
        new.replace(self._link)

    def make_unwritable(self) -> None:
        """A file stands where the directory was."""
        self._point(self._file)

    def fill(self, left: int) -> None:
        """Only `left` bytes are free."""
        with self._ballast.open("wb") as file:
            while True:
                space = os.statvfs(self._real)
                try:
                    os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - left))
                    return
                except OSError as error:
                    if error.errno != errno.ENOSPC:  # an object has been written meanwhile
                        raise

    def heal(self) -> None:
        """It is a directory with room again."""
        self._point(self._real)
        self._ballast.unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[str, float]]:
        """Every file but the unfinished ones that killed processes leave behind, hidden."""
        for directory, _, names in os.walk(self._real):
            for name in names:
                path = Path(directory, name)
                if not name.startswith("."):
                    yield path.relative_to(self._real).as_posix(), path.stat().st_mtime

    def read(self, path: str) -> bytes:
        """A file's content."""
        return (self._real / path).read_bytes()

    def close(self) -> None:
        """Give the disk back."""
        if self.disk:
            unmount(self._real)


def mount(place: Path, size: int) -> None:
    """A file system of `size` bytes. Raises OSError where that is not allowed."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        raise OSError(done.stderr.decode().strip() or "mount failed")


def unmount(place: Path) -> None:
    """Undo `mount`, also under processes that are about to be ended."""
    subprocess.run(["umount", "--lazy", str(place)], check=True)


class S3Archive:
    """A bucket, reached past the proxy that spoils the daemons' requests."""

    def __init__(self, endpoint: str) -> None:
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=s3.CREDENTIALS["key"],
            aws_secret_access_key=s3.CREDENTIALS["secret"],
            region_name="us-east-1",
        )
        self._bucket = f"bucket-{uuid.uuid4().hex}"
        self._client.create_bucket(Bucket=self._bucket)
        self.url = f"s3://{self._bucket}/archive"

    def heal(self) -> None:
        """It is the proxy that is broken, never this."""

    def files(self) -> Iterator[tuple[str, float]]:
        """Every object."""
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix="archive/"):
            for entry in page.get("Contents", ()):
                written: datetime = entry["LastModified"]
                yield entry["Key"].removeprefix("archive/"), written.timestamp() + 1  # whole seconds, cut off

    def read(self, path: str) -> bytes:
        """An object's content."""
        content: bytes = self._client.get_object(Bucket=self._bucket, Key=f"archive/{path}")["Body"].read()
        return content

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
