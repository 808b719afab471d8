"""The stream's own configuration, so that it can be restored from the archive alone.

    {store.url}/_streams/{stream}/{created}.json

There is one file for each incarnation of a stream. Any replica may write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from jetcapture_py.config.units import microseconds_of, parse_time
from jetcapture_py.errors import JetcaptureError

DIRECTORY = "_streams"
FORMAT = 1

_CREATED = re.compile(r"[0-9TZ:.+-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """A stream's configuration as the server last had it, in the words of the JetStream API.

    `created` is when the stream was created, as the server writes it. `continues`: it may have messages from before, of
    an earlier stream of its name, because it is or was a mirror, or was restored.
    """

    stream: str
    created: str
    config: Mapping[str, Any]
    continues: bool = False

    def encode(self) -> bytes:
        """The file's content: the same for the same configuration."""
        fields = {
            "format": FORMAT,
            "stream": self.stream,
            "stream_created": self.created,
            "continues": self.continues,
            "config": self.config,
        }
        return json.dumps(fields, sort_keys=True).encode() + b"\n"


def incarnations(created: Sequence[str], times: Any) -> Any:
    """Return for each message the index of its incarnation in `created`, oldest first.

    `times` are in microseconds, an int64 array. The oldest also has all earlier messages, as those of a mirror.
    """
    begins = np.array([microseconds_of(datetime.fromisoformat(each)) for each in created], np.int64)
    return np.maximum(np.searchsorted(begins, times, "right") - 1, 0)


def is_time(created: str) -> bool:
    """Whether this can be part of a file's name."""
    return _CREATED.fullmatch(created) is not None


def directory(stream: str) -> str:
    """The directory of a stream's files, relative to the archive's root."""
    return f"{DIRECTORY}/{stream}"


def path(stream: str, created: str) -> str:
    """The file's path, relative to the archive's root, without `-` and `:`, which some file systems refuse."""
    return f"{directory(stream)}/{created.replace('-', '').replace(':', '')}.json"


def is_path(path: str) -> bool:
    """Whether this can be such a file, and not a temporary one that a crash left behind."""
    name = path.rpartition("/")[2]
    return name.endswith(".json") and not name.startswith(".")


def decode(data: bytes, stream: str, path: str) -> StreamConfig:
    """Read the content of the file at `path`. Raises JetcaptureError if damaged, or if it belongs to another stream."""
    try:
        fields = json.loads(data)
        found = StreamConfig(
            stream=str(fields["stream"]),
            created=str(fields["stream_created"]),
            config=dict(fields["config"]),
            continues=fields.get("continues") is True,
        )
        parse_time(found.created)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise JetcaptureError(f"{path}: the stream's configuration is damaged: {error!r}") from error
    if found.stream != stream:
        raise JetcaptureError(f"{path}: the configuration belongs to stream {found.stream}, not {stream}")
    return found
