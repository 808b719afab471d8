"""The small files of an archive: JSON objects with the `format` and the `stream` they belong to, and nothing secret.

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
    """What every small file has. A subclass declares its further fields.

    A class of its own that a field has is in JSON what its method `encoded` returns and its `decoded` reads.
    """

    stream: str

    def encode(self) -> bytes:
        """The file's content: the same for the same values."""
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
    """Yield the small files among `paths` with their contents, in order. `read` returns None for one that is gone."""
    names = sorted(filter(is_path, paths))
    yield from ((path, data) for path, data in zip(names, read(names), strict=True) if data is not None)


def is_path(path: str) -> bool:
    """Whether this can be a small file, and not a temporary one that a crash left behind."""
    name = path.rpartition("/")[2]
    return name.endswith(".json") and not name.startswith(".")
