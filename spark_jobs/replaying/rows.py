"""Compute the columns that a replay publishes: subject, payload, and the sources of message id and headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py.archive import layout
from jetcapture_py.config.template import TemplatePart, parse_template, part_name
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.jetstream.publish.frames import check_subject
from jetcapture_py.reading.output import check_names
from spark_jobs.publishing.instructions import names_of
from spark_jobs.publishing.subjects import is_odd
from spark_jobs.reading.columns import find, quoted
from spark_jobs.reading.row_json import is_nested, json_of, row_of
from spark_jobs.replaying.task import ESCAPED, MISSING, RAW_HEADERS, ROW, SEQ, STREAM, TIMESTAMP

_MAX_TASKS = 8
"""A server queues 10,000 messages per stream before it drops some; this many publish windows stay below that."""
_NO_HEADERS = "cast(map() AS map<string, array<string>>)"
ODD = "odd"
_ROW_SHOWN = 300
"""Maximum characters of a row in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRows:
    """`frame` has the columns that `replaying.task` reads; `pattern` matches all its subjects.

    `messages`: rows have a stream and sequence, so they get message ids and provenance. `ordered`: they also have a
    timestamp to sort by. `stored`: the payload is the original one, so NATS has accepted these headers before.
    `apart`: every row of a message is published, because rows contain more than the message itself.
    `examined` has the columns for the preview: `subject`, `payload`, the timestamp, the part of the subject that is
    `missing`, and the row's description if its subject may be invalid (`odd`).
    """

    frame: DataFrame
    examined: DataFrame
    pattern: str
    messages: bool
    ordered: bool
    stored: bool
    apart: bool

    def surveyed(self) -> Self:
        """Drop the column `missing`, which the preview has checked."""
        return replace(self, frame=self.frame.drop(MISSING))

    def removed(self, keep_headers: Collection[str] = ()) -> dict[str, int]:
        """Count the messages with each header that is not published. Runs a job."""
        rows, columns = self.frame, self.frame.columns
        if ROW in columns and not self.apart:
            rows = rows.where(sf.col(ROW) == 0)
        headers, raw = (sf.col(name) if name in columns else None for name in ("headers", RAW_HEADERS))
        names = rows.select(sf.explode(names_of(headers, raw, keep_headers)).alias("name"))
        return {row[0]: row[1] for row in names.groupBy("name").count().collect()}

    def in_order(self, tasks: int | None) -> DataFrame:
        """Partition the rows for `tasks` parallel tasks, each subject in one task and in order.

        Rows without a timestamp stay as they are.
        """
        if not self.ordered:
            return self.frame
        if tasks == 1 or (tasks is None and _partitions(self.frame) == 1):
            parts = self.frame.coalesce(1)
        else:
            parts = self.frame.repartition(tasks or _parallelism(self.frame), "subject")
        order = [TIMESTAMP, SEQ, *([ROW] if ROW in self.frame.columns else [])]
        return parts.sortWithinPartitions(*order)


class _Columns:
    """Looks up a frame's columns by name in any case."""

    def __init__(self, frame: DataFrame) -> None:
        self.fields = list(frame.schema)
        self.names = frame.columns
        check_names(self.names, "columns")

    def find(self, *names: str) -> str | None:
        """Return the name of the first of these columns that exists; None without one."""
        found = (find(name, self.names) for name in names)
        return next(filter(None, found), None)

    def get(self, *names: str) -> Column | None:
        """Like `find`, but return a column."""
        name = self.find(*names)
        return None if name is None else sf.col(quoted(name))

    def existing(self, name: str, context: str) -> str:
        """Find the column `name`; raise JetcaptureError, starting with `context`, if it is missing."""
        found = self.find(name)
        if found is None:
            raise JetcaptureError(f"{context}there is no column {name}; there are {', '.join(self.names)}")
        return found


def rows_of(frame: DataFrame, template: str, payload: str | None) -> ReplayRows:
    """Compute the columns to publish from `frame`; `template` and `payload` as in `replay`. Raises JetcaptureError."""
    known = _Columns(frame)
    parts = _parts(template)
    name = known.find(layout.PAYLOAD, "payload") if payload is None else known.existing(payload, "")
    is_original = name is not None and name == known.find(layout.PAYLOAD)
    stream, seq, timestamp = (known.get(column) for column in layout.IDENTITY)
    messages = stream is not None and seq is not None
    subject = _Subject(known, parts, template)
    columns = {"subject": subject.value, "payload": _payload(known, name, messages)}
    stage = known.get(layout.STAGE)
    if stage is not None and any(part.kind in ("subject", "token") for part in parts):
        columns[ESCAPED] = sf.coalesce(stage == layout.NOT_UTF8, sf.lit(False))  # noqa: FBT003
    headers = known.get(layout.HEADERS)
    if headers is not None:
        # Spark handles an empty map ten times faster than null; a message with provenance has headers anyway
        columns["headers"] = sf.coalesce(headers, sf.expr(_NO_HEADERS)) if messages else headers
    if stream is not None and seq is not None:
        columns |= {STREAM: stream, SEQ: seq.cast("long")}
        if timestamp is not None:
            columns[TIMESTAMP] = sf.unix_micros(timestamp.cast("timestamp"))
        if (number := known.get(layout.ROW)) is not None:
            columns[ROW] = sf.coalesce(number.cast("int"), sf.lit(0))  # null counts as 0, and copies may differ in it
        if is_original and (raw := known.get(layout.RAW_HEADERS)) is not None:
            columns[RAW_HEADERS] = raw
    row = _row(known, columns)
    columns[MISSING] = subject.missing(row)
    examined = {name: columns[name] for name in ("subject", "payload", TIMESTAMP, MISSING) if name in columns}
    examined[ODD] = sf.when(is_odd(subject.value), row)
    return ReplayRows(
        frame=_select(frame, columns),
        examined=_select(frame, examined),
        pattern=_pattern(parts),
        messages=messages,
        ordered=TIMESTAMP in columns,
        stored=messages and is_original,
        apart=ROW in columns and not (is_original and all(map(_is_message_wide, parts))),
    )


def _select(frame: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    return frame.select(*(column.alias(name) for name, column in columns.items()))


def _row(known: _Columns, columns: Mapping[str, Column]) -> Column:
    """Describe a row for an error message."""
    if STREAM in columns:
        return sf.concat(sf.lit("message "), columns[SEQ].cast("string"), sf.lit(" of stream "), columns[STREAM])
    fields = [field for field in known.fields if not is_nested(field.dataType)]
    text = row_of([(field.name, sf.col(quoted(field.name)), field.dataType) for field in fields])
    return sf.when(sf.length(text) <= _ROW_SHOWN, text).otherwise(
        sf.concat(sf.substring(text, 1, _ROW_SHOWN), sf.lit("…"))
    )


def _parts(template: str) -> tuple[TemplatePart, ...]:
    try:
        parts = parse_template(template)
    except ValueError as error:
        raise JetcaptureError(f"subject {template}: {error}") from error
    check_subject("".join(str(part.value) if part.kind == "text" else "x" for part in parts))
    return parts


def _is_message_wide(part: TemplatePart) -> bool:
    """Whether the part is the same in all rows of a message."""
    return part.kind != "field" or part.value in (*layout.ENVELOPE, layout.TIME, *layout.PARTITIONS)


def _pattern(parts: tuple[TemplatePart, ...]) -> str:
    """Return a pattern that matches all subjects: `>` from the first column on, which may have several tokens."""
    text = str(parts[0].value) if parts[0].kind == "text" else ""
    if len(parts) == 1 and text:
        return text
    head, dot, _ = text.rpartition(".")
    return f"{head}{dot}>"


class _Subject:
    """The subject column of a template."""

    def __init__(self, known: _Columns, parts: tuple[TemplatePart, ...], template: str) -> None:
        self._known, self._context = known, f"subject {template}: "
        self._parts = [(part_name(part), self._part(part)) for part in parts]
        self.value = reduce(lambda left, right: sf.concat(left, right), (column for _, column in self._parts))
        """The subject; null if a part is null."""

    def missing(self, row: Column) -> Column:
        """Name the part that is null and the row; null if no part is."""
        null = (sf.when(column.isNull(), sf.lit(name)) for name, column in self._parts if name)
        part = sf.coalesce(*null, sf.lit(""))
        return sf.when(self.value.isNull(), sf.concat(part, sf.lit(" is null in "), row))

    def _part(self, part: TemplatePart) -> Column:
        if part.kind == "text":
            return sf.lit(part.value)
        if part.kind == "header":
            return sf.get(self._column(layout.HEADERS)[str(part.value)], sf.lit(0))
        if part.kind == "field":
            return self._column(str(part.value)).cast("string")
        own = self._column(self._known.find("subject") or layout.SUBJECT).cast("string")
        return own if part.kind == "subject" else sf.get(sf.split(own, r"\."), sf.lit(part.value))

    def _column(self, name: str) -> Column:
        return sf.col(quoted(self._known.existing(name, self._context)))


def _payload(known: _Columns, name: str | None, messages: bool) -> Column:
    if name is not None:
        kind = next(field.dataType for field in known.fields if field.name == name)
        column = sf.col(quoted(name))
        if is_nested(kind):
            return json_of(column, kind).cast("binary")
        return column.cast("binary" if isinstance(kind, st.BinaryType) else "string").cast("binary")
    own = {known.find(each) for each in (*layout.ENVELOPE, *layout.OPTIONAL, *(layout.PARTITIONS if messages else ()))}
    fields = [
        (field.name, sf.col(quoted(field.name)), field.dataType) for field in known.fields if field.name not in own
    ]
    if not fields:
        raise JetcaptureError("the rows have nothing to publish: no payload, and no columns besides the archive's own")
    return row_of(fields).cast("binary")


def _partitions(frame: DataFrame) -> int | None:
    """Return the number of partitions if it is known without running a job, else None."""
    plan = getattr(frame, "_jdf", None)
    if plan is None or "AdaptiveSparkPlan" in plan.queryExecution().executedPlan().getClass().getName():
        return None
    return frame.rdd.getNumPartitions()


def _parallelism(frame: DataFrame) -> int:
    """Return the number of publishing tasks: Spark's parallelism, limited to `_MAX_TASKS`."""
    session = frame.sparkSession
    if hasattr(frame, "_jdf"):
        return min(_MAX_TASKS, session.sparkContext.defaultParallelism)
    return min(_MAX_TASKS, int(session.conf.get("spark.sql.shuffle.partitions") or _MAX_TASKS))
