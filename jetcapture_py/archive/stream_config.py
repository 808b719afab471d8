"""The stream's own configuration, so that it can be restored from the archive alone.

    {store.url}/_streams/{stream}/{created}.json

There is one file for each incarnation of a stream. Any replica may write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jetcapture_py.archive.incarnations import moment
from jetcapture_py.archive.metadata import SmallFile, present

DIRECTORY = "_streams"

_CREATED = re.compile(r"[0-9TZ:.+-]{1,64}")


class StreamConfig(SmallFile, frozen=True, kw_only=True, rename={"created": "stream_created"}):
    """A stream's last configuration on the server, as JSON of the JetStream API.

    `created` is the server's creation time. `continues`: the stream may have messages from before it, because it is or
    was a mirror, or was restored.
    """

    created: str
    config: dict[str, Any]
    continues: bool = False

    def __post_init__(self) -> None:
        moment(self.created)


def is_time(created: str) -> bool:
    """Whether `created` has only characters allowed in a file name."""
    return _CREATED.fullmatch(created) is not None


def directory(stream: str) -> str:
    """The directory of a stream's files, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}"


def path(stream: str, created: str) -> str:
    """The file's path, relative to the archive's root, without `-` and `:`, which some file systems refuse."""
    return f"{directory(stream)}/{created.replace('-', '').replace(':', '')}.json"


def read(
    stream: str,
    list_notes: Callable[[str], Iterable[str]],
    read_notes: Callable[[list[str]], Iterable[bytes | None]],
) -> list[StreamConfig]:
    """Read a stream's files, oldest incarnation first. Raises JetcaptureError if one is damaged.

    `list_notes` lists a directory, and `read_notes` reads files, None for a removed one.
    """
    files = present(list_notes(directory(stream)), read_notes)
    configs = [StreamConfig.decode(data, stream, path) for path, data in files]
    return sorted(configs, key=lambda config: moment(config.created))
