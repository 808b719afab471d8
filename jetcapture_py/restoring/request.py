"""A validated request to restore a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetcapture_py.config.model import NatsConfig, SourceConfig
from jetcapture_py.config.units import got, microseconds_of, parse_time
from jetcapture_py.errors import ConfigError, JetcaptureError
from jetcapture_py.jetstream.publish.frames import check_subject
from jetcapture_py.store.archive import ArchiveFiles

_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]+")
_NAME_RULE = "expected a name without spaces, '.', '*', '>', '/' and '\\'"
_NANOSECONDS = re.compile(r"[.,]\d{6}(\d{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """A stream to create from its archive."""

    files: ArchiveFiles
    stream: str
    """Its name in the archive."""
    login: NatsConfig | None = None
    """The server to create it on; None for a dry run."""
    source: SourceConfig | None = None
    """The capture's `source`, for the settings of its consumer."""
    target: str
    """Its name on the server."""
    first: int = 1
    """First sequence."""
    last: int | None = None
    """Last sequence, inclusive; None for all."""
    until: int | None = None
    """Restore the stream's state at this time, in nanoseconds since the epoch; None for now."""
    created: str | None = None
    """The beginning of the creation time of the incarnation; None for the last one."""
    stream_config: Path | None = None
    """A file with settings that replace the archived ones."""
    prefix: str = ""
    """Prefix of all subjects; ends in a dot."""
    consumers: Sequence[tuple[str, int]] = ()
    """Consumers to create, and their ack floors."""
    allow_holes: bool = False
    allow_drops: bool = False
    without_limits: bool = False
    with_schedules: bool = False

    def __post_init__(self) -> None:
        """Refuse invalid combinations. Raises ConfigError."""
        if not _NAME.fullmatch(self.target):
            raise ConfigError(f"--as: {got(_NAME_RULE, self.target)}")
        if self.last is not None and self.last < self.first:
            raise ConfigError("--to-seq is less than --from-seq")
        if len(dict(self.consumers)) < len(self.consumers):
            raise ConfigError("--consumer: a name is given twice")
        if self.without_limits and self.allow_drops:
            raise ConfigError("--without-limits cannot be combined with --allow-drops")
        if self.with_schedules and (self.target != self.stream or self.prefix):
            raise ConfigError("--with-schedules cannot be combined with another name or prefix: they would fire twice")


def parse_consumer(text: str) -> tuple[str, int]:
    """Return the name and the sequence of --consumer. Raises ValueError."""
    name, equals, seq = text.partition("=")
    if not equals or not seq.isascii() or not seq.isdigit():
        raise ValueError("expected NAME=SEQ")
    if not _NAME.fullmatch(name):
        raise ValueError(_NAME_RULE)
    return name, int(seq)


def parse_prefix(text: str) -> str:
    """Return the text of --subject-prefix with a dot at its end. Raises ValueError."""
    prefix = text.removesuffix(".")
    try:
        check_subject(prefix)
    except JetcaptureError as error:
        raise ValueError(str(error)) from error
    return f"{prefix}."


def parse_nanoseconds(text: str) -> int:
    """Return a time in nanoseconds since the epoch, which datetimes cannot express. Raises ValueError."""
    below = _NANOSECONDS.search(text)
    return microseconds_of(parse_time(text)) * 1000 + (int(below[1].ljust(3, "0")) if below else 0)
