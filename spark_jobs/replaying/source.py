"""The rows of a replay in Spark: their columns, the ones already published, and their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_type

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import HEADERS_TYPE
from spark_jobs.publishing.prepare import ARCHIVED, ROW, SCHEMA, SEQ, SUBJECT, TIME, Archived, Rows
from spark_jobs.reading.columns import find, quoted
from spark_jobs.replaying.target import STREAM

_MAX_TASKS = 8
"""A server queues 10,000 messages per stream before it drops some; so many publish windows stay below that."""
_BROADCAST = 5_000_000
"""Maximum number of identities of a resumed replay to broadcast; Spark chooses the join for more."""
_TYPES = {layout.SEQ: "long", layout.TIMESTAMP: "timestamp", layout.ROW: "int"}
_HEADERS = from_arrow_type(HEADERS_TYPE)
_OWN = (*layout.IDENTITY, layout.ROW, layout.STAGE, layout.RAW_HEADERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows to publish.

    `archived`: they have a stream and a sequence, so that they get message ids and provenance. `ordered`: they also
    have a timestamp to sort by. `apart`: every row of a message is published, because rows have more than the message;
    otherwise only the first row is published.
    """

    frame: DataFrame
    rows: Rows
    archived: bool
    ordered: bool
    apart: bool

    @classmethod
    def of(cls, frame: DataFrame, template: str, payload: str | None = None) -> Source:
        """Raises JetcaptureError for rows that cannot be published."""
        names = frame.columns
        archived = all(find(name, names) for name in (layout.STREAM, layout.SEQ))
        columns = ARCHIVED
        if archived:
            types = {
                name: sf.col(quoted(name)).cast(kind)
                for column, kind in _TYPES.items()
                if (name := find(column, names))
            }
            if (number := find(layout.ROW, names)) is not None:  # null counts as 0, and copies may differ in it
                types[number] = sf.coalesce(types[number], sf.lit(0))
            headers = find(layout.HEADERS, names)
            if headers is not None and frame.schema[headers].dataType == _HEADERS:
                # Spark hands an empty map to Python several times faster than null, and provenance is in headers anyway
                types[headers] = sf.coalesce(sf.col(quoted(headers)), sf.create_map().cast(_HEADERS))
            frame = frame.withColumns(types)
            columns = columns._replace(own=(*columns.own, *layout.PARTITIONS))
        rows = Rows(frame.schema, template, columns, payload)
        if archived:
            needed = {*rows.needed, *filter(None, (find(name, names) for name in _OWN))}
            frame = frame.select(*(quoted(name) for name in names if name in needed))
            rows = Rows(frame.schema, template, columns, payload)
        original = rows.payload is not None and rows.payload == rows.find(layout.PAYLOAD)
        wide = (*layout.ENVELOPE, layout.TIME, *layout.PARTITIONS)  # equal in all rows of a message
        whole = original and all(part.kind != "field" or part.value in wide for part in rows.template.parts)
        return cls(
            frame=frame,
            rows=rows,
            archived=archived,
            ordered=archived and rows.find(layout.TIMESTAMP) is not None,
            apart=archived and rows.find(layout.ROW) is not None and not whole,
        )

    def without(self, published: pa.Table) -> tuple[Source, int]:
        """Remove rows already in the target, by the columns of `Target.replayed`; also return their number."""
        columns: dict[str, Column] = {STREAM: self._column(layout.STREAM), SEQ: self._column(layout.SEQ)}
        if self.ordered:
            columns[TIME] = sf.unix_micros(self._column(layout.TIMESTAMP))
        if self.apart:
            columns[ROW] = self._column(layout.ROW)
        published = published.select(list(columns)).group_by(list(columns)).aggregate([])
        if not published.num_rows:
            return self, 0
        done = self.frame.sparkSession.createDataFrame(published)
        done = done.fillna(0, [ROW]) if self.apart else done  # from a replay before messages had several rows
        done = sf.broadcast(done) if published.num_rows <= _BROADCAST else done
        same = reduce(and_, (column == done[name] for name, column in columns.items()))
        return replace(self, frame=self.frame.join(done, same, "left_anti")), published.num_rows

    def _column(self, name: str) -> Column:
        return self.frame[quoted(self.rows.find(name) or name)]

    def prepared(self, prepare: Archived) -> DataFrame:
        """Return the messages, with the columns of `publishing.prepare.SCHEMA`."""
        return self.frame.mapInArrow(prepare, SCHEMA)

    def in_order(self, messages: DataFrame, tasks: int | None) -> DataFrame:
        """Partition prepared messages for `tasks` parallel tasks, each subject in one task and in order.

        Rows without a timestamp stay in the order of their partitions, which one task publishes one after another.
        """
        if self.ordered and tasks != 1:
            messages = messages.repartition(tasks or _parallelism(messages), SUBJECT)
        parts = messages.coalesce(1) if tasks == 1 else messages
        return parts.sortWithinPartitions(TIME, SEQ, ROW) if self.ordered else parts


def _parallelism(frame: DataFrame) -> int:
    """Return the number of publishing tasks: Spark's parallelism, limited to `_MAX_TASKS`."""
    session = frame.sparkSession
    if hasattr(frame, "_jdf"):
        return min(_MAX_TASKS, session.sparkContext.defaultParallelism)
    return min(_MAX_TASKS, int(session.conf.get("spark.sql.shuffle.partitions") or _MAX_TASKS))
