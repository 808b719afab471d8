"""Command line arguments of `replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from typer import BadParameter, Option

from jetcapture_py.archive import layout
from jetcapture_py.config.units import parse_duration, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.publisher import WINDOW
from spark_jobs import arguments
from spark_jobs.arguments import LoginArguments, Parsed, QueryArguments, SurveyArguments
from spark_jobs.publishing.instructions import keepable
from spark_jobs.publishing.subjects import check_pattern, matching
from spark_jobs.replaying.task import Pace

N = TypeVar("N", int, float)


def _pattern(text: str) -> str:
    try:
        return check_pattern(text)
    except JetcaptureError as error:
        raise ValueError(str(error)) from error


def _positive(text: str) -> float:
    number = _number(float, text)
    if number is None or not 0 < number < float("inf"):
        raise ValueError(f"expected a number above 0, got {quoted(text)}")
    return number


def _count(text: str) -> int:
    number = _number(int, text)
    if number is None or number < 1:
        raise ValueError(f"expected a whole number from 1, got {quoted(text)}")
    return number


def _number(kind: Callable[[str], N], text: str) -> N | None:
    try:
        return kind(text)
    except ValueError:
        return None


@dataclass(kw_only=True)
class ReplayCommand(LoginArguments, SurveyArguments, QueryArguments):
    """Publish an archive's messages, or the rows of a query, to JetStream.

    Publishes messages that match all of --from, --to, --key, --filter-subject, --from-seq and --to-seq, or the rows of
    --sql.

    Login files are read on every executor.
    """

    filters: Annotated[
        list[str],
        Option("--filter-subject", metavar="PATTERN", help="Original subjects: orders.*.new or orders.>; repeatable."),
        Parsed(_pattern),
    ] = field(default_factory=list)
    from_seq: Annotated[int | None, Option(metavar="N", help="First stream sequence.")] = None
    to_seq: Annotated[int | None, Option(metavar="N", help="Last stream sequence.")] = None
    quarantine: Annotated[
        bool, Option("--quarantine", help="Replay the quarantine: messages that could not be decoded, as raw bytes.")
    ] = False
    sql: Annotated[str, Option(metavar="SQL", help="A query over the views archive and quarantine.")] = ""
    subject: Annotated[
        str,
        Option(
            metavar="TEMPLATE",
            help='Target subject, such as "replay.{key}"; columns, {subject[1]} and {header.NAME} are replaced. '
            "By default the original subject.",
        ),
    ] = "{subject}"
    payload: Annotated[
        str | None,
        Option(metavar="COLUMN", help="Column to publish. By default the original payload, else the row as JSON."),
    ] = None
    policy: Annotated[
        Literal["instant", "original"], Option(help="original: keep the original pauses between messages.")
    ] = "instant"
    speed: Annotated[
        float | None, Option(metavar="X", help="With --policy original: 10 is ten times as fast."), Parsed(_positive)
    ] = None
    max_gap: Annotated[
        float | None,
        Option(metavar="DURATION", help="With --policy original: the longest pause, after --speed, such as 5s."),
        Parsed(parse_duration),
    ] = None
    rate: Annotated[float | None, Option(metavar="N", help="Maximum messages per second."), Parsed(_positive)] = None
    window: Annotated[
        int, Option(metavar="N", help=f"Unacknowledged messages per task. [default: {WINDOW}]"), Parsed(_count)
    ] = WINDOW
    tasks: Annotated[
        int | None, Option(metavar="N", help="Tasks that publish in parallel. By default at most 8."), Parsed(_count)
    ] = None
    missing: Annotated[
        bool,
        Option(
            "--missing",
            help="Publish to the archived stream itself what its server has lost, such as after a rewind; each message "
            "once, in order.",
        ),
    ] = False
    keep_headers: Annotated[
        list[str],
        Option(
            "--keep-header",
            metavar="NAME",
            help="Publish this header although it is an instruction to a server: Nats-TTL, Nats-Rollup, …; repeatable.",
        ),
        Parsed(keepable),
    ] = field(default_factory=list)
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be published without publishing.")] = False
    allow_loop: Annotated[
        bool, Option("--allow-loop", help="Publish even to subjects that the archive's capture consumes.")
    ] = False
    replay_id: Annotated[
        str | None, Option(metavar="ID", help="Name of this replay in message ids and provenance headers.")
    ] = None
    resume: Annotated[
        str | None, Option(metavar="ID", help="Continue this replay: publish what the target does not have yet.")
    ] = None

    def __post_init__(self) -> None:
        """Reject options that cannot be combined."""
        super().__post_init__()
        if self.sql and (self.filters or self.from_seq or self.to_seq or self.quarantine):
            raise BadParameter("--sql cannot be combined with --filter-subject, --from-seq, --to-seq or --quarantine")
        if self.quarantine and self.keys:
            raise BadParameter("--quarantine cannot be combined with --key: the quarantine has no keys")
        if self.policy == "instant" and (self.speed is not None or self.max_gap is not None):
            raise BadParameter("--speed and --max-gap need --policy original")
        if self.replay_id is not None and self.resume is not None:
            raise BadParameter("--resume cannot be combined with --replay-id")
        if self.missing and (others := [name for name, given in self._choices().items() if given]):
            raise BadParameter(f"--missing cannot be combined with {others[0]}")
        self.sql = self.sql or ("SELECT * FROM quarantine" if self.quarantine else "SELECT * FROM archive")

    def _choices(self) -> dict[str, bool]:
        """Return which options are given that choose other messages, other subjects, another order or another id."""
        return {
            "--sql": bool(self.sql),
            "--quarantine": self.quarantine,
            "--filter-subject": bool(self.filters),
            "--key": self.keys is not None,
            "--from": self.start is not None,
            "--to": self.end is not None,
            "--event-from": self.event_start is not None,
            "--event-to": self.event_end is not None,
            "--complete-only": self.complete_only,
            "--subject": self.subject != "{subject}",
            "--payload": self.payload is not None,
            "--policy": self.policy != "instant",
            "--tasks": self.tasks is not None,
            "--replay-id": self.replay_id is not None,
            "--resume": self.resume is not None,
            "--allow-loop": self.allow_loop,
        }


def parse(words: Sequence[str] | None) -> ReplayCommand:
    """Parse the command line; exit on wrong arguments."""
    return arguments.parse("replay", ReplayCommand, words)


def pace_of(chosen: ReplayCommand) -> Pace | None:
    """Return the requested pace; None for no limit."""
    if chosen.policy == "original":
        return Pace(speed=chosen.speed or 1.0, max_gap=chosen.max_gap, rate=chosen.rate)
    return None if chosen.rate is None else Pace(rate=chosen.rate)


def selected(frame: DataFrame, chosen: ReplayCommand) -> DataFrame:
    """Filter rows by --filter-subject, --from-seq and --to-seq."""
    if chosen.filters:
        frame = frame.where(matching(sf.col(layout.SUBJECT), chosen.filters))
    if chosen.from_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) >= chosen.from_seq)
    if chosen.to_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) <= chosen.to_seq)
    return frame
