"""The metadata of an object store's files: messages on `$O.<store>.M.<name>`, of which the newest counts."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from jetcapture_py.text import escaped

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """A file of an object store as its metadata describes it.

    `modified` is when the metadata was stored, `revision` its sequence. `digest` is as stored, such as `SHA-256=…`.
    `link` is the store and the file that a link refers to, without a file for a link to a whole store. `renamed` is the
    file's new name. `problem` says why the metadata cannot be used.
    """

    store: str
    name: str
    revision: int
    modified: datetime
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    description: str = ""
    headers: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    link: tuple[str, str | None] | None = None
    deleted: bool = False
    renamed: str | None = None
    problem: str | None = None

    @property
    def present(self) -> bool:
        """Whether the file is in the store: neither deleted nor renamed."""
        return not self.deleted and self.renamed is None


class _Link(msgspec.Struct):
    bucket: str = ""
    name: str | None = None


class _Options(msgspec.Struct):
    link: _Link | None = None


class _Info(msgspec.Struct):
    """The JSON of a file's metadata; fields that clients leave out or write as null."""

    nuid: str | None = None
    size: int | None = None
    chunks: int | None = None
    digest: str | None = None
    description: str | None = None
    headers: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    options: _Options | None = None
    deleted: bool | None = None


_decode = msgspec.json.Decoder(_Info).decode


def subject(store: str, nuid: str) -> str:
    """Return the subject of a file's chunks."""
    return f"$O.{store}.C.{nuid}"


def prefix(store: str) -> str:
    """Return what the subjects of metadata start with."""
    return f"$O.{store}.M."


def parsed(store: str, token: str, seq: int, microseconds: int, payload: bytes) -> ArchivedFile:
    """Read a message with metadata; `token` is the end of its subject, the name in Base64."""
    common: dict[str, Any] = {
        "store": store,
        "name": _name(token),
        "revision": seq,
        "modified": _EPOCH + timedelta(microseconds=microseconds),
    }
    try:
        info = _decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return ArchivedFile(**common, problem=f"its metadata cannot be read: {error}")
    link = info.options.link if info.options is not None else None
    return ArchivedFile(
        **common,
        nuid=info.nuid or "",
        size=info.size or 0,
        chunks=info.chunks or 0,
        digest=info.digest or "",
        description=info.description or "",
        headers=info.headers or None,
        metadata=info.metadata or None,
        link=None if link is None else (link.bucket, link.name or None),
        deleted=bool(info.deleted),
    )


def _name(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except (binascii.Error, ValueError):
        return token


def newest(found: Iterable[ArchivedFile]) -> dict[str, ArchivedFile]:
    """Return the newest metadata of each name.

    A renamed file has newer metadata under another name, with the same NUID; nothing says so under the old name.
    """
    files: dict[str, ArchivedFile] = {}
    places: dict[str, ArchivedFile] = {}
    for each in sorted(found, key=lambda file: file.revision):
        files[each.name] = each
        if each.nuid:
            places[each.nuid] = each
    for name, each in files.items():
        place = places.get(each.nuid, each)
        if place.name != name and place.revision > each.revision:
            files[name] = replace(each, renamed=place.name)
    return files


def expected_digest(file: ArchivedFile) -> bytes:
    """Return the SHA-256 that the contents must have. Raises ValueError without one, and for another algorithm."""
    kind, _, text = file.digest.partition("=")
    if not file.digest:
        raise ValueError("its metadata has no digest")
    if kind.upper() != "SHA-256":
        raise ValueError(f"unknown digest {escaped(file.digest)}")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
