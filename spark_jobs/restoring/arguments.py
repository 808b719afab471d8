"""Command line arguments of `restore`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from jetcapture_py.config.units import microseconds_of, parse_time, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.frames import check_subject
from jetcapture_py.store.archive import ArchiveFiles
from spark_jobs import arguments
from spark_jobs.arguments import LoginArguments, Parsed, StoreArguments
from spark_jobs.reading.location import ArchiveLocation

_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]+")
_NANOSECONDS = re.compile(r"[.,]\d{6}(\d{1,3})")
_MAX_SEQ = 1 << 62


def _seq(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= _MAX_SEQ:
        raise ValueError(f"expected a sequence from 1, got {quoted(text)}")
    return int(text)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"expected a name without spaces, '.', '*', '>', '/' and '\\', got {quoted(text)}")
    return text


def _consumer(text: str) -> tuple[str, int]:
    name, equals, seq = text.partition("=")
    if not equals:
        raise ValueError(f"expected NAME=SEQ, got {quoted(text)}")
    return _name(name), 0 if seq == "0" else _seq(seq)


def _prefix(text: str) -> str:
    prefix = text.removesuffix(".")
    try:
        check_subject(prefix)
    except JetcaptureError as error:
        raise ValueError(str(error)) from error
    return f"{prefix}."


def _nanoseconds(text: str) -> int:
    """Return a time in nanoseconds since the epoch, which datetimes cannot express."""
    below = _NANOSECONDS.search(text)
    return microseconds_of(parse_time(text)) * 1000 + (int(below[1].ljust(3, "0")) if below else 0)


@dataclass(kw_only=True)
class RestoreCommand(LoginArguments, StoreArguments):
    """Create a stream from its archive, as it was: sequences, timestamps, subjects, headers, payloads.

    Needs nats-server 2.15 or later. STREAM may be left out if the archive has one stream. The stream must not exist.
    """

    target: Annotated[
        str, Option("--as", metavar="NAME", help="Name of the new stream. [default: STREAM]"), Parsed(_name)
    ] = ""
    first: Annotated[int, Option("--from-seq", metavar="N", help="First sequence to restore."), Parsed(_seq)] = 1
    last: Annotated[int | None, Option("--to-seq", metavar="N", help="Last sequence to restore."), Parsed(_seq)] = None
    until: Annotated[
        int | None,
        Option("--to-time", metavar="TIME", help="Restore the stream as it was at this time; RFC 3339, inclusive."),
        Parsed(_nanoseconds),
    ] = None
    created: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="If the stream was recreated, which incarnation to restore, by a prefix of its creation time. By "
            "default the latest.",
        ),
    ] = None
    stream_config: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Settings that replace those of the archived stream: a file with a section `stream`, as in a "
            "configuration, and as jetcapture export prints it.",
        ),
    ] = None
    prefix: Annotated[
        str,
        Option("--subject-prefix", metavar="PREFIX", help="Tokens to put in front of every subject."),
        Parsed(_prefix),
    ] = ""
    consumers: Annotated[
        list[tuple[str, int]],
        Option(
            "--consumer",
            metavar="NAME=SEQ",
            help="Create a durable pull consumer that has acknowledged everything up to SEQ; repeatable. The capture's "
            "own consumer gets the settings of --config.",
        ),
        Parsed(_consumer),
    ] = field(default_factory=list)
    allow_holes: Annotated[
        bool,
        Option("--allow-holes", help="Restore although sequences are missing, which become deleted messages."),
    ] = False
    without_limits: Annotated[
        bool,
        Option(
            "--without-limits",
            help="Create the stream without max_age, max_msgs, max_bytes, max_msgs_per_subject and max_msg_size.",
        ),
    ] = False
    allow_drops: Annotated[
        bool, Option("--allow-drops", help="Restore although the stream's limits drop some of the messages.")
    ] = False
    with_schedules: Annotated[
        bool,
        Option(
            "--with-schedules",
            help="Restore schedules as well: the server fires them again. By default they are left out and counted.",
        ),
    ] = False
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be restored without restoring.")] = False

    def __post_init__(self) -> None:
        """Find the stream, and reject options that cannot be combined."""
        if self.config is None and self.url and not self.stream:
            self.stream = _only_stream(ArchiveLocation.open(self.url, dict(self.given)).files, self.target)
        super().__post_init__()
        self.target = self.target or _name(self.stream)
        if self.last is not None and self.last < self.first:
            raise BadParameter("--to-seq is less than --from-seq")
        if len(dict(self.consumers)) < len(self.consumers):
            raise BadParameter("--consumer: a name is given twice")
        if self.without_limits and self.allow_drops:
            raise BadParameter("--without-limits cannot be combined with --allow-drops")
        if self.with_schedules and (self.target != self.stream or self.prefix):
            raise BadParameter("--with-schedules cannot be combined with another name or prefix: they would fire twice")


def parse(words: Sequence[str] | None) -> RestoreCommand:
    """Parse the command line; exit on wrong arguments."""
    return arguments.parse("restore", RestoreCommand, words)


def _only_stream(files: ArchiveFiles, target: str) -> str:
    """Return the only stream of an archive, or the one with the new stream's name. Raises JetcaptureError."""
    streams = sorted(name for name in files.names() if not name.startswith(("_", ".")))
    if target in streams:
        return target
    if len(streams) != 1:
        raise JetcaptureError(f"{files.shown} has {len(streams)} streams: name one{files.known_streams()}")
    return streams[0]
