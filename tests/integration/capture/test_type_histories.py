"""Random histories of fields that change type: nothing is lost, columns keep their types, and engines agree."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from jetcapture_py import read_archive
from jetcapture_py.archive import layout
from jetcapture_py.log import FIELDS
from tests.support.commands import jetcapture
from tests.support.nats_server import NatsServer
from tests.support.type_histories import OWN, History, Kinds, Names, Read, at_path, check_rows, plain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORIES = 200
FIRST = (0, 5, 11, 12)
"""Those of `make test`."""


class Question(NamedTuple):
    """A column, or a field in structs, and what the model says: its number of values, where they have it their sum and
    maximum."""

    column: Names
    answers: dict[str, Any]

    def sql(self) -> list[str]:
        return [f"{function}({'.'.join(self.column)})" for function in self.answers]

    def arrow(self, table: pa.Table) -> list[Any]:
        array = table[self.column[0]]
        array = pc.struct_field(array, list(self.column[1:])) if self.column[1:] else array
        return [getattr(pc, function)(array).as_py() for function in self.answers]

    def polars(self) -> list[pl.Expr]:
        column = reduce(lambda of, name: of.struct.field(name), self.column[1:], pl.col(self.column[0]))
        return [getattr(column, function)().alias(f"{'.'.join(self.column)} {function}") for function in self.answers]


def leaves(fields: Iterable[pa.Field], path: Names = ()) -> Iterator[tuple[Names, pa.DataType]]:
    """The columns that are no lists, and the fields of structs."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from leaves(field.type, (*path, field.name))
        elif not pa.types.is_list(field.type) and field.name not in OWN:
            yield (*path, field.name), field.type


def questions(history: History, schema: pa.Schema, read: Read) -> Iterator[Question]:
    changed = Kinds(history).changed
    for column, type_ in leaves(schema):
        path = tuple(part.rstrip("_") for part in column)
        prefixes = {".".join(path[:length]) for length in range(1, len(path) + 1)}
        if prefixes & read.doubtful or path[0] in changed:
            continue
        stored = [history.sent[seq] for seq, misfits in read.rescued.items() if not prefixes & misfits.keys()]
        if pa.types.is_string(type_) and any(isinstance(at_path(one, ".".join(path)), dict | list) for one in stored):
            continue  # their texts, also of those without a value
        values = [value for document in stored if (value := plain(at_path(document, ".".join(path)))) is not None]
        answers: dict[str, Any] = {"count": len(values)}
        if values and (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
            if all(map(math.isfinite, values)):
                answers |= {"sum": sum(values), "max": max(values)}
        elif values and pa.types.is_string(type_) and all(isinstance(value, str) for value in values):
            answers["max"] = max(values)
        yield Question(column, answers)


class Join(NamedTuple):
    """A table that `id` is joined with, and how many rows have a match, and the sum of their weights."""

    weights: dict[Any, int]
    answers: list[int]

    @classmethod
    def of(cls, history: History, schema: pa.Schema, read: Read) -> Join:
        """Raises KeyError without the column, or if it has values of several types."""
        type_ = schema.field("id").type
        stored = [history.sent[seq].get("id") for seq, misfits in read.rescued.items() if "id" not in misfits]
        values = [value for value in stored if value is not None]
        keys: list[Any] = ["n/a", "7", "x"] if pa.types.is_string(type_) else [0, 1, 2, 99]
        if "id" in read.doubtful or not all(isinstance(value, type(keys[0])) for value in values):
            raise KeyError("id")
        weights = {key: 10 * number for number, key in enumerate(keys, 1)}
        matches = [weights[value] for value in values if value in weights]
        return cls(weights, [len(matches), sum(matches)])

    def sql(self) -> str:
        rows = ", ".join(f"({value!r}, {weight})" for value, weight in self.weights.items())
        joined = f"archive JOIN (VALUES {rows}) AS weights(v, weight) ON id = v"
        return f"SELECT count(*) AS n, coalesce(sum(weight), 0) AS w FROM {joined}"

    def table(self, type_: pa.DataType) -> pa.Table:
        return pa.table({"id": pa.array([*self.weights], type_), "weight": [*self.weights.values()]})


def by_arrow(table: pa.Table, asked: Sequence[Question], join: Join | None) -> list[Any]:
    answers = [value for question in asked for value in question.arrow(table)]
    if join is not None:
        joined = table.select(["id"]).join(join.table(table.schema.field("id").type), "id", join_type="inner")
        answers += [joined.num_rows, pc.sum(joined["weight"]).as_py() or 0]
    return answers


def by_polars(table: pa.Table, asked: Sequence[Question], join: Join | None) -> list[Any]:
    frame = cast("pl.DataFrame", pl.from_arrow(table))
    answers = [*frame.select(value for question in asked for value in question.polars()).row(0)]
    if join is not None:
        joined = frame.select("id").join(pl.DataFrame(join.table(table.schema.field("id").type)), on="id")
        answers += [joined.height, joined["weight"].sum()]
    return answers


def by_sql(told: Callable[[str], Iterable[Any]], asked: Sequence[Question], join: Join | None) -> list[Any]:
    texts = [text for question in asked for text in question.sql()]
    answers = [*told(f"SELECT {', '.join(f'{text} AS c{number}' for number, text in enumerate(texts))} FROM archive")]
    return answers if join is None else [*answers, *told(join.sql())]


def check_engines(history: History, archived: Read, spark: SparkSession | None) -> None:
    """What Arrow, DuckDB, Polars and Spark make of the archive is what the model says."""
    url, allowed = str(history.root), Kinds(history)
    table = read_archive(url, history.stream).read_all()
    assert sorted(table[layout.SEQ].to_pylist()) == sorted(archived.rescued)
    if history.conflict != "widen":
        allowed.check(history.schemas(), table.schema)
    # values of renamed columns are in one of two; bytes that are no UTF-8 are not whole in text
    without = allowed.renamed | (allowed.changed & {"blob"})
    read = check_rows(history, ((row[layout.SEQ], row) for row in table.to_pylist()), "text", without)
    asked, join = list(questions(history, table.schema, read)), None
    with suppress(KeyError):
        join = Join.of(history, table.schema, read)

    def told(sql: str) -> Iterable[Any]:
        done = jetcapture("query", url, history.stream, sql, "--format", "json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout)).values()

    given = {"Arrow": by_arrow(table, asked, join), "Polars": by_polars(table, asked, join)}
    given["DuckDB"] = by_sql(told, asked, join)
    if spark is not None:
        from spark_jobs.archive import archive_view

        archive_view(spark, url, history.stream, "archive")
        given["Spark"] = by_sql(lambda sql: spark.sql(sql).collect()[0], asked, join)
    expected = {text: answer for one in asked for text, answer in zip(one.sql(), one.answers.values(), strict=True)}
    expected |= {} if join is None else dict(zip(("joined", "weights"), join.answers, strict=True))
    for engine, answers in given.items():
        for (text, answer), value in zip(expected.items(), answers, strict=True):
            near = isinstance(answer, float) and value == pytest.approx(answer, rel=1e-9)
            assert near or value == answer, (engine, text, value, answer)


# ---------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def play(shared_server: NatsServer, archive: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """Play a history, and check what is in the archive then."""
    caplog.set_level("INFO", "jetcapture.capture")

    def check(seed: int, spark: SparkSession | None = None) -> None:
        history = History(seed, shared_server.url, archive)
        try:
            asyncio.run(history.run())
            history.events = [getattr(record, FIELDS) for record in caplog.records if record.msg == "column.changed"]
            archived = check_rows(history, history.rows(), history.form)
            if history.format == "parquet":
                check_engines(history, archived, spark)
        except BaseException:
            print(*history.told, sep="\n")  # in the report of a failure
            raise

    return check


@pytest.mark.parametrize("seed", FIRST)
def test_nothing_is_lost_and_columns_keep_their_types(play: Callable[..., None], seed: int) -> None:
    play(seed)


@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_four_engines_give_the_sums_maxima_and_joins_of_the_model(
    play: Callable[..., None], spark: SparkSession, seed: int
) -> None:
    play(seed, spark)
