from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE, HEADERS_TYPE
from jetcapture_py.config.template import TemplatePart, parse_template
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.keys import TemplateKey, group, make_key
from tests.support.batches import Declared, batch_of, decode_settings

NO_FIELDS = pa.RecordBatch.from_arrays([], names=[])


def batch(*subjects: str, headers: list[dict[str, list[str]] | None] | None = None) -> MessageBatch:
    count = len(subjects)
    given_ = {
        layout.SUBJECT: pa.array(subjects, pa.string()),
        layout.HEADERS: pa.array(
            [None if each is None else list(each.items()) for each in headers or [None] * count], HEADERS_TYPE
        ),
    }
    arrays = [given_.get(field.name, pa.nulls(count, field.type)) for field in ENVELOPE]
    return MessageBatch(stream="S", rows=pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE))


def keys(template: str, messages: MessageBatch, fields: pa.RecordBatch = NO_FIELDS) -> list[str | None]:
    """The keys of a batch; each message alone, and slices of the batch, must give the same."""
    key = TemplateKey(template)
    found = key(messages, fields)
    assert found.type == pa.string()
    assert len(found) == len(messages)
    for size in (1, 2):
        apart: list[str | None] = []
        for start in range(0, len(messages), size):
            part = messages.slice(start, min(size, len(messages) - start))
            piece = fields.slice(start, len(part)) if fields.num_columns else fields
            apart += key(part, piece).to_pylist()
        assert apart == found.to_pylist()
    return list(found.to_pylist())


def field_keys(template: str, **columns: Any) -> list[str | None]:
    fields = pa.RecordBatch.from_pydict(columns)
    return keys(template, batch(*["s"] * fields.num_rows), fields)


TEMPLATES: list[tuple[str, tuple[TemplatePart, ...]]] = [
    *(("", ()), ("plain", (TemplatePart("text", "plain"),)), ("{subject}", (TemplatePart("subject"),))),
    *((f"{{subject[{number}]}}", (TemplatePart("token", number),)) for number in (0, 12)),
    *((f"{{header.{name}}}", (TemplatePart("header", name),)) for name in ("X-Tenant", "a.b")),
    *((f"{{{name}}}", (TemplatePart("field", name),)) for name in ("region", "a.b.c", "größe", "subjects", "headers")),
    ("a-{region}", (TemplatePart("text", "a-"), TemplatePart("field", "region"))),
    ("{subject[1]}/!", (TemplatePart("token", 1), TemplatePart("text", "/!"))),
]


def test_a_template_is_read_part_by_part() -> None:
    for template, parts in TEMPLATES:
        assert parse_template(template) == parts


UNREADABLE = ["{", "}", "{}", "a{b", "a}b", "{{subject}}", "{subject[}", "{subject[]}", "{subject[-1]}", "{subject[1}"]
UNREADABLE += ["{subject[x]}", "{subject[12345]}", "{a b}", "{ subject }", "{header.}{", "{header.A B}", "{a[0]}"]


def test_a_template_that_cannot_be_read_is_refused_in_one_line() -> None:
    for template in UNREADABLE:
        with pytest.raises(ValueError, match=r"cannot read|unbalanced braces") as caught:
            parse_template(template)
        assert "\n" not in str(caught.value)


def test_tokens_of_the_subject_and_headers_are_the_key_and_without_one_of_them_there_is_none() -> None:
    headers: list[dict[str, list[str]] | None] = [{"a": ["x"], "A": ["1", "2"]}, None, {"A": []}, {"A": ["3"]}]
    messages = batch("orders.eu", "orders.us", "orders.a.b", "orders", headers=headers)
    assert keys("{subject}", messages) == ["orders.eu", "orders.us", "orders.a.b", "orders"]
    assert keys("{subject[1]}", messages) == ["eu", "us", "a", None]
    assert keys("{header.A}", messages) == ["1", None, None, "3"]
    assert keys("{subject[1]}-{header.A}/", messages) == ["eu-1/", None, None, None]
    assert keys("", messages) == [None] * 4


def test_a_path_leads_through_structs() -> None:
    column = pa.array([{"b": {"c": 1}}, {"b": {"c": None}}, {"b": None}, None])
    assert field_keys("{a.b.c}", a=column) == ["1", None, None, None]
    for template in ("{a.b}", "{a.x}", "{a.b.c.d}", "{x.b.c}"):
        assert field_keys(template, a=column) == [None] * 4
    assert field_keys("{a.b}", **{"a.b": ["column", None], "a": [{"b": "path"}] * 2}) == ["column", None]


def test_a_decoded_field_is_the_key_as_text() -> None:
    noon = pa.array([datetime(2024, 1, 2, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    for values, texts in (
        *((["a", None, "", "ü"], ["a", None, "", "ü"]), ([1, None, -(1 << 63)], ["1", None, "-9223372036854775808"])),
        *(([True, False, None], ["true", "false", None]), ([1.5, -0.25, None], ["1.5", "-0.25", None])),
        *(([date(2024, 2, 29)], ["2024-02-29"]), (noon, ["2024-01-02 00:00:00.000000Z"]), (pa.nulls(2), [None, None])),
        (pa.array(["a", "b", None, "a"]).dictionary_encode(), ["a", "b", None, "a"]),
        *((nested, [None, None]) for nested in ([["a"], []], [{"a": 1}, None], [b"a", b"b"])),
    ):
        assert field_keys("{x}", x=values) == texts


def test_a_declared_field_is_its_column_and_a_field_of_an_own_decoder_is_its_column() -> None:
    fields = pa.RecordBatch.from_pydict({"x": [1.0]})
    for config in (
        None,
        decode_settings(format="json", columns={"x": Declared("float64")}),
        decode_settings(format="own:decoder", columns={}),
    ):
        assert make_key("{x}", config)(batch_of([b'{"x": 1.00}']), fields).to_pylist() == ["1"]


def test_a_template_that_is_no_text_is_refused() -> None:
    for template in ["\ud800", "a-{subject}\udfff", "{\ud800}"]:
        with pytest.raises(ValueError, match="not valid text") as caught:
            make_key(template)
        assert str(caught.value).isprintable()


rows = st.lists(
    st.tuples(
        st.one_of(st.none(), st.sampled_from(["", "a", "b", "ü", "None", "\x00"])), st.sampled_from([-900, 0, 900])
    ),
    max_size=40,
)


@given(rows)
def test_grouping_gives_what_going_row_by_row_gives(places: list[tuple[str | None, int]]) -> None:
    expected: defaultdict[tuple[str | None, int], list[int]] = defaultdict(list)
    for number, (key, bucket) in enumerate(places):
        expected[key or None, bucket].append(number)
    table = pa.RecordBatch.from_pydict({"n": pa.array(range(len(places)), pa.int64()), "p": [[p[1]] for p in places]})
    names = pa.array([key for key, _ in places], pa.string())
    grouped, runs = group(table, names, np.array([bucket for _, bucket in places], np.int64))
    found = {(run.key, run.bucket): grouped.column("n").slice(run.start, run.length).to_pylist() for run in runs}
    assert found == expected
    assert len(runs) == len(expected)
    assert grouped.num_rows == len(places) == sum(run.length for run in runs)
    assert all(before.start + before.length == after.start for before, after in pairwise(runs))
    assert [value[0] for value in grouped.column("p").to_pylist()] == [
        places[number][1] for number in grouped.column("n").to_pylist()
    ]


def test_rows_that_lie_together_already_are_not_copied() -> None:
    table = pa.RecordBatch.from_pydict({"n": [1, 2, 3]})
    grouped, runs = group(table, pa.array(["a", "a", "b"]), np.array([0, 900, 0]))
    assert grouped is table
    found = [(run.key, run.bucket, run.start, run.length) for run in runs]
    assert found == [("a", 0, 0, 1), ("a", 900, 1, 1), ("b", 0, 2, 1)]
