"""The command line of `replay`: which messages, where to, and how."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from jetcapture_py.archive import layout
from jetcapture_py.config.units import parse_duration, quoted
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.publisher import WINDOW
from spark_jobs.job import query_arguments, reading, survey_argument
from spark_jobs.publishing.login import login_arguments
from spark_jobs.publishing.subjects import check_pattern, matching
from spark_jobs.replaying.task import Pace

N = TypeVar("N", int, float)

_duration = reading(parse_duration)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked as far as they can be without asking anybody; ends the process when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="replay", description="Publishes an archive's messages, or the rows of a query, to JetStream."
    )
    query_arguments(parser, arguments)
    _messages(parser)
    _publishing(parser)
    survey_argument(parser)
    login_arguments(parser)
    chosen = parser.parse_args(arguments)
    if chosen.sql is not None and (chosen.filters or chosen.from_seq or chosen.to_seq or chosen.quarantine):
        parser.error("--sql goes with neither --filter-subject, --from-seq, --to-seq nor --quarantine")
    if chosen.quarantine and chosen.keys:
        parser.error("--quarantine goes without --key: what could not be decoded has none")
    if chosen.policy == "instant" and (chosen.speed is not None or chosen.max_gap is not None):
        parser.error("--speed and --max-gap go with --policy original")
    chosen.sql = chosen.sql or ("SELECT * FROM quarantine" if chosen.quarantine else "SELECT * FROM archive")
    return chosen


def _messages(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("messages", "All of these, and --from, --to and --key; or --sql.")
    group.add_argument(
        "--filter-subject",
        dest="filters",
        metavar="PATTERN",
        action="append",
        type=_pattern,
        help="original subjects, as orders.*.new or orders.>; may be repeated",
    )
    group.add_argument("--from-seq", type=int, metavar="N", help="first stream sequence")
    group.add_argument("--to-seq", type=int, metavar="N", help="last stream sequence")
    group.add_argument("--quarantine", action="store_true", help="what could not be decoded, with its raw bytes")
    group.add_argument("--sql", help="a query over the views archive and quarantine")


def _publishing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("publishing")
    group.add_argument(
        "--subject",
        default="{subject}",
        metavar="TEMPLATE",
        help='columns in braces, {subject[1]}, {header.NAME}: "replay.{key}"; default: as it was',
    )
    group.add_argument("--payload", metavar="COLUMN", help="default: the message's own bytes, else the row as JSON")
    group.add_argument(
        "--policy", choices=("instant", "original"), default="instant", help="original: with the pauses that there were"
    )
    group.add_argument("--speed", type=_positive, metavar="X", help="of --policy original: 10 is ten times as fast")
    group.add_argument("--max-gap", type=_duration, metavar="TIME", help="the longest pause as it passes now: 5s")
    group.add_argument("--rate", type=_positive, metavar="N", help="at most so many messages a second")
    group.add_argument(
        "--window", type=_count, default=WINDOW, metavar="N", help="messages under way at once, per task"
    )
    group.add_argument("--tasks", type=_count, metavar="N", help="how many publish side by side; default: at most 8")
    group.add_argument("--dry-run", action="store_true", help="say what would be published, and publish nothing")
    group.add_argument(
        "--allow-loop", action="store_true", help="publish even where the archive's capture takes its messages from"
    )
    again = group.add_mutually_exclusive_group()
    again.add_argument("--replay-id", metavar="ID", help="a word of your own, for message ids and provenance")
    again.add_argument("--resume", metavar="ID", help="publish what the target does not have yet of this replay")


def pace_of(chosen: argparse.Namespace) -> Pace | None:
    """The pace that the arguments ask for."""
    if chosen.policy == "original":
        return Pace(speed=chosen.speed or 1.0, max_gap=chosen.max_gap, rate=chosen.rate)
    return None if chosen.rate is None else Pace(rate=chosen.rate)


def selected(frame: DataFrame, chosen: argparse.Namespace) -> DataFrame:
    """The rows with the subjects and sequences that the arguments ask for."""
    if chosen.filters:
        frame = frame.where(matching(sf.col(layout.SUBJECT), chosen.filters))
    if chosen.from_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) >= chosen.from_seq)
    if chosen.to_seq is not None:
        frame = frame.where(sf.col(layout.SEQ) <= chosen.to_seq)
    return frame


def _pattern(text: str) -> str:
    try:
        return check_pattern(text)
    except JetcaptureError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@reading
def _positive(text: str) -> float:
    number = _number(float, text)
    if number is None or not 0 < number < float("inf"):
        raise ValueError(f"expected a number above 0, got {quoted(text)}")
    return number


@reading
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
