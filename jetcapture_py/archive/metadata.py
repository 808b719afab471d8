"""The archive's metadata files: JSON objects with a `format` and a `stream`, and without secrets.

Fields with their default are left out, unknown ones are ignored, and times are RFC 3339 in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Self

import msgspec

from jetcapture_py.errors import JetcaptureError

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with its zone."""


class SmallFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=1):
    """Base of the metadata files; subclasses declare their fields.

    A field of a custom class is converted to JSON and back by that class's `encoded` and `decoded`.
    """

    stream: str

    def encode(self) -> bytes:
        """Encode deterministically: equal values give equal bytes."""
        return msgspec.json.encode(self, order="deterministic", enc_hook=lambda value: value.encoded()) + b"\n"

    @classmethod
    def decode(cls, data: bytes, stream: str, path: str) -> Self:
        """Read the content of the file at `path`. Raises JetcaptureError if damaged, or of another stream."""
        try:
            file = msgspec.json.decode(data, type=cls, dec_hook=_decoded)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise damaged(path, error) from error
        if file.stream != stream:
            raise JetcaptureError(f"{path} belongs to stream {file.stream}, not {stream}")
        return file


def _decoded(type_: Any, value: object) -> Any:
    return type_.decoded(value)


def damaged(path: str, error: Exception) -> JetcaptureError:
    """Return the error for a file that cannot be read."""
    return JetcaptureError(f"{path} is damaged: {error}")


def present(paths: Iterable[str], read: Callable[[list[str]], Iterable[bytes | None]]) -> Iterator[tuple[str, bytes]]:
    """Yield the metadata files among `paths` with their contents, in order. `read` returns None for a removed one."""
    names = sorted(filter(is_path, paths))
    yield from ((path, data) for path, data in zip(names, read(names), strict=True) if data is not None)


def is_path(path: str) -> bool:
    """Whether the path is a metadata file's, rather than a temporary file's left by a crash."""
    name = path.rpartition("/")[2]
    return name.endswith(".json") and not name.startswith(".")
