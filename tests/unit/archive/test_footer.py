"""The schemas that are read from footers are the ones that Arrow reads from the files."""

from __future__ import annotations

import io
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive.footer import UNPROVEN, SchemaReader, columns_end, find
from jetcapture_py.archive.info import BadObject, InfoReader, ObjectInfo
from tests.support.archives import encoded
from tests.support.examples import examples

LEAVES = [pa.int8(), pa.int64(), pa.uint16(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.null()]
LEAVES += [pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.decimal128(12, 3), pa.binary(5)]
NAMES = some.text(some.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


def structs(inner: some.SearchStrategy[pa.DataType]) -> some.SearchStrategy[pa.DataType]:
    return some.dictionaries(NAMES, inner, min_size=1, max_size=16).map(lambda fields: pa.struct(list(fields.items())))


TYPES = some.recursive(
    some.sampled_from(LEAVES),
    lambda inner: inner.map(pa.list_) | structs(inner) | inner.map(lambda value: pa.map_(pa.string(), value)),
    max_leaves=20,
)
SCHEMAS = some.dictionaries(NAMES, TYPES, min_size=1, max_size=30).map(lambda fields: pa.schema(list(fields.items())))


def parquet(schema: pa.Schema, rows: int, **options: object) -> bytes:
    table = pa.table([pa.nulls(rows, field.type) for field in schema], schema)
    target = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"jetcapture.rows": str(rows)}), target, **options)
    return target.getvalue()


def footer(data: bytes) -> bytes:
    return find(lambda size: data[-size:], 1 << 14)


@examples(cost=4)
@given(some.lists(some.tuples(SCHEMAS, some.booleans(), some.sampled_from(["1.0", "2.6"])), min_size=1, max_size=4))
def test_every_schema_is_the_one_that_arrow_reads(files: list[tuple[pa.Schema, bool, str]]) -> None:
    reader = SchemaReader()
    written = [parquet(of, rows, store_schema=stored, version=v) for rows in (1, 1000) for of, stored, v in files]
    found = [reader.schemas[reader.number(footer(data))] for data in written]
    assert found == [pq.read_schema(pa.BufferReader(data)).remove_metadata() for data in written]
    assert len(reader.schemas) == len(set(found))


@examples(cost=4)
@given(SCHEMAS, some.integers(1, 3))
def test_columns_end_where_what_is_different_begins(schema: pa.Schema, rows: int) -> None:
    first, second = (footer(parquet(schema, count, store_schema=False)) for count in (rows, rows + 100))
    end = columns_end(first)
    assert end is not None
    assert first[:end] == second[:end]
    assert first[end] == second[end] == 0x16  # field 3, the number of rows
    assert first[end + 1] == 2 * rows


@given(some.binary(max_size=200))
def test_what_is_no_footer_has_no_end_of_columns_beyond_it(data: bytes) -> None:
    end = columns_end(data)
    assert end is None or 0 < end <= len(data)


def test_a_footer_that_is_longer_than_what_is_read_at_first_is_read_whole() -> None:
    schema = pa.schema([(f"column {number}", pa.int64()) for number in range(500)])
    data = parquet(schema, 3, store_schema=False)
    assert len(footer(data)) > 1 << 14
    reader = SchemaReader()
    assert reader.schemas[reader.number(footer(data))] == schema


def test_a_file_without_a_footer_has_none() -> None:
    for data in (b"", b"PAR1", b"half an object", b"x" * 20_000, b"PAR1\xff\xff\xff\x7fPAR1"):
        assert footer(data) == b""
    with pytest.raises((pa.ArrowException, OSError)):
        SchemaReader().number(b"no footer")


def test_footers_of_one_schema_are_decoded_once() -> None:
    reader = SchemaReader()
    schemas = [pa.schema([("a", pa.int64())]), pa.schema([("a", pa.int64()), ("b", pa.string())])]
    footers = [footer(parquet(schema, rows, store_schema=False)) for rows in range(1, 51) for schema in schemas]
    with mock.patch.object(pq, "read_schema", wraps=pq.read_schema) as read_schema:
        numbers = [reader.number(data) for data in footers]
    assert numbers == [0, 1] * 50
    assert read_schema.call_count == 2


@examples(cost=4)
@given(some.data())
def test_a_damaged_footer_is_refused_before_arrow_decodes_it(data: some.DataObject) -> None:
    """Some of these end the process in Arrow."""
    stored = encoded([(1, 1), (2, 2)])
    whole, reader = footer(stored.data.to_pybytes()), InfoReader()
    bit = data.draw(some.integers(0, 8 * (len(whole) - 8) - 1))
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    assert isinstance(reader.read(stored.name, whole, size=stored.data.size, detailed=True), ObjectInfo)
    found = reader.read(stored.name, bytes(damaged), size=stored.data.size, detailed=True)
    assert found == BadObject(stored.name, UNPROVEN)
