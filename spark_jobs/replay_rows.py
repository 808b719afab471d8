"""What a replay publishes, as columns: target subject, payload, and what a row's message id and headers come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from jetcapture_py import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.publish_frames import check_subject
from jetcapture_py.route import Part, parse_template
from spark_jobs.columns import quoted
from spark_jobs.replay_task import RAW_HEADERS, ROW, SEQ, STREAM, TIMESTAMP
from spark_jobs.row_json import check_names, is_nested, json_of, row_of

_MOST_TASKS = 8
"""A server queues 10,000 messages of a stream before it drops some; so many windows are below that."""
_NO_HEADERS = "cast(map() AS map<string, array<string>>)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`frame` has the columns that `replay_task` reads, `pattern` matches all its subjects.

    `messages`: the rows have an identity, so they get message ids and provenance; `ordered`: and a timestamp, by which
    they are ordered; `stored`: and their own payload, so what their headers hold is what NATS has taken before.
    `apart`: several rows of a message are messages of their own, because more than the message itself is in them.
    """

    frame: DataFrame
    pattern: str
    messages: bool
    ordered: bool
    stored: bool
    apart: bool

    def in_order(self, tasks: int | None) -> DataFrame:
        """The rows for `tasks` tasks that work side by side: all rows of a subject in one of them, in their order.

        Rows that are ordered by nothing stay as they are.
        """
        if not self.ordered:
            return self.frame
        if tasks == 1 or (tasks is None and _partitions(self.frame) == 1):
            parts = self.frame.coalesce(1)
        else:
            parts = self.frame.repartition(tasks or _parallelism(self.frame), "subject")
        order = [TIMESTAMP, SEQ, *([ROW] if ROW in self.frame.columns else [])]
        return parts.sortWithinPartitions(*order)


def rows_of(frame: DataFrame, template: str, payload: str | None) -> Rows:
    """The rows of `frame`; see `replay` for `template` and `payload`. Raises JetcaptureError."""
    check_names(frame.columns, "columns")
    parts = _parts(template)
    name = _payload_column(frame, payload)
    messages = layout.STREAM in frame.columns and layout.SEQ in frame.columns
    columns = {"subject": _subject(frame, parts, template), "payload": _payload(frame, name, messages)}
    headers = _column(layout.HEADERS) if layout.HEADERS in frame.columns else None
    if headers is not None:
        # a null map costs Spark ten times what an empty one does; a message with provenance has headers anyhow
        columns["headers"] = sf.coalesce(headers, sf.expr(_NO_HEADERS)) if messages else headers
    if messages:
        columns |= {STREAM: _column(layout.STREAM), SEQ: _column(layout.SEQ).cast("long")}
        if layout.TIMESTAMP in frame.columns:
            columns[TIMESTAMP] = sf.unix_micros(_column(layout.TIMESTAMP).cast("timestamp"))
        if layout.ROW in frame.columns:
            columns[ROW] = _column(layout.ROW).cast("int")
        if layout.RAW_HEADERS in frame.columns and name == layout.PAYLOAD:
            columns[RAW_HEADERS] = _column(layout.RAW_HEADERS)
    return Rows(
        frame=frame.select(*(column.alias(name) for name, column in columns.items())),
        pattern=_pattern(parts),
        messages=messages,
        ordered=messages and TIMESTAMP in columns,
        stored=messages and name == layout.PAYLOAD,
        apart=ROW in columns and not (name == layout.PAYLOAD and all(map(_is_of_the_message, parts))),
    )


def _column(name: str) -> Column:
    return sf.col(quoted(name))


def _parts(template: str) -> tuple[Part, ...]:
    try:
        parts = parse_template(template)
    except ValueError as error:
        raise JetcaptureError(f"subject {template}: {error}") from error
    check_subject("".join(str(part.value) if part.kind == "text" else "x" for part in parts))
    return parts


def _is_of_the_message(part: Part) -> bool:
    """Whether the part is the same for all rows of a message."""
    return part.kind != "field" or part.value in (*layout.ENVELOPE, *layout.PARTITIONS)


def _subject(frame: DataFrame, parts: tuple[Part, ...], template: str) -> Column:
    """The subject of each row, null where a part of it is missing."""
    return reduce(lambda left, right: sf.concat(left, right), [_part(frame, part, template) for part in parts])


def _pattern(parts: tuple[Part, ...]) -> str:
    """A pattern that all subjects match. A column may hold several tokens: all is open from the first one on."""
    text = str(parts[0].value) if parts[0].kind == "text" else ""
    if len(parts) == 1 and text:
        return text
    head, dot, _ = text.rpartition(".")
    return f"{head}{dot}>"


def _part(frame: DataFrame, part: Part, template: str) -> Column:
    if part.kind == "text":
        return sf.lit(part.value)
    if part.kind == "header":
        return sf.get(_existing(frame, layout.HEADERS, template)[str(part.value)], sf.lit(0))
    if part.kind == "field":
        return _existing(frame, str(part.value), template).cast("string")
    own = _existing(frame, "subject" if "subject" in frame.columns else layout.SUBJECT, template).cast("string")
    return own if part.kind == "subject" else sf.get(sf.split(own, r"\."), sf.lit(part.value))


def _existing(frame: DataFrame, name: str, template: str) -> Column:
    if name not in frame.columns:
        raise JetcaptureError(f"subject {template}: there is no column {name}; there are {', '.join(frame.columns)}")
    return _column(name)


def _payload_column(frame: DataFrame, payload: str | None) -> str | None:
    """The name of the column that holds the payloads; None for the row as JSON."""
    if payload is not None and payload not in frame.columns:
        raise JetcaptureError(f"there is no column {payload}; there are {', '.join(frame.columns)}")
    return payload or next((name for name in (layout.PAYLOAD, "payload") if name in frame.columns), None)


def _payload(frame: DataFrame, name: str | None, messages: bool) -> Column:
    if name is not None:
        kind = frame.schema[name].dataType
        if is_nested(kind):
            return json_of(_column(name), kind).cast("binary")
        return _column(name).cast("binary" if isinstance(kind, st.BinaryType) else "string").cast("binary")
    own = [*layout.ENVELOPE, layout.ROW, *(layout.PARTITIONS if messages else ())]
    fields = [(field.name, _column(field.name), field.dataType) for field in frame.schema if field.name not in own]
    if not fields:
        raise JetcaptureError("the rows have nothing to publish: no payload, and no columns but the archive's own")
    return row_of(fields).cast("binary")


def _partitions(frame: DataFrame) -> int | None:
    """How many partitions the rows are in, where that is known without computing anything."""
    plan = getattr(frame, "_jdf", None)
    if plan is None or "AdaptiveSparkPlan" in plan.queryExecution().executedPlan().getClass().getName():
        return None
    return frame.rdd.getNumPartitions()


def _parallelism(frame: DataFrame) -> int:
    """How many tasks publish side by side: as many as Spark has room for, but no more than a server copes with."""
    session = frame.sparkSession
    if hasattr(frame, "_jdf"):
        return min(_MOST_TASKS, session.sparkContext.defaultParallelism)
    return min(_MOST_TASKS, int(session.conf.get("spark.sql.shuffle.partitions") or _MOST_TASKS))
