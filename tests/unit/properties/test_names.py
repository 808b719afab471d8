"""Names, keys and buckets: whatever a key is, it is one directory, and comes back; buckets are those of a clock."""

from __future__ import annotations

import datetime as dt
import posixpath
from typing import Any
from urllib.parse import unquote

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
from hypothesis import example, given

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.schema import ENVELOPE, HEADERS_TYPE
from jetcapture_py.store.objects import root_of
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.keys import TemplateKey, buckets

unicode = st.characters(exclude_categories=["Cs"])
keys = st.one_of(
    st.none(),
    st.text(unicode, max_size=40),
    st.text(st.sampled_from("./%\\\0\n=:*2Ee5F_"), max_size=12),
    st.sampled_from(["..", "../..", "%2E%2E", "%2e%2e/", layout.DEFAULT_PARTITION, "%5F_HIVE_DEFAULT_PARTITION__"]),
)


def normal(key: str | None) -> str | None:
    """No key and the empty key are one."""
    return key or None


@given(st.one_of(st.binary(max_size=12), st.lists(st.sampled_from([*rb"\x5cf.", 0xC3, 0xFF]), max_size=12).map(bytes)))
@example(rb"orders.\xff." + b"\xff")
@example(rb"\x5cxff" + b"\xff")
def test_a_subject_that_is_not_utf_8_comes_back(subject: bytes) -> None:
    assert layout.unescape_subject(layout.escape_subject(subject).encode()) == subject


@given(keys)
@example("..")
def test_a_key_comes_back_as_it_was_here_and_at_any_hive_reader(key: str | None) -> None:
    name = layout.escape_key(key)
    assert layout.unescape_key(name) == normal(key)
    assert not set(name) & set("/\\\0\n:*?\"<>|{}[]'#=")
    if key != layout.DEFAULT_PARTITION:
        assert unquote(name) == (key or layout.DEFAULT_PARTITION)
    parts = pads.HivePartitioning(pa.schema([("key", pa.string())]), segment_encoding="uri").parse(f"key={name}/x")
    expected = "" if normal(key) in (None, layout.DEFAULT_PARTITION) else f'(key == "{key}")'
    assert bool(expected) == str(parts).startswith("(key ==")
    if key and key.isalnum():
        assert str(parts) == expected


@given(keys, st.sampled_from(["/data/{key}", "/data/.{key}", "/data/{key}.", "/data/a{key}b/x", "/data/{key}/{key}/x"]))
def test_a_root_made_of_a_key_is_below_the_directory_that_the_address_names(key: str | None, template: str) -> None:
    root = root_of(template, key)
    assert posixpath.normpath(root) == root
    assert root.startswith("/data/")
    assert root.count("/") == template.count("/")
    assert "\0" not in root


@given(keys, keys)
def test_two_keys_never_share_a_directory_or_a_root(one: str | None, other: str | None) -> None:
    same = normal(one) == normal(other)
    assert (layout.escape_key(one) == layout.escape_key(other)) == same
    assert (root_of("/data/{key}", one) == root_of("/data/{key}", other)) == same


@given(
    st.builds(
        ObjectName,
        stream=st.sampled_from(["S", "größe", "a=b", "key=x", "date=2026-01-01", ".", "..", "%2E"]),
        key=keys.map(normal),
        bucket=st.integers(-62_135_596_800, 253_402_300_799),
        first_seq=st.integers(0, 10**20 - 1),
        last_seq=st.integers(0, 10**20 - 1),
        rows=st.integers(0, 10**12),
        digest=st.binary(min_size=8, max_size=8).map(bytes.hex),
    )
)
def test_every_name_is_read_back_from_its_path(name: ObjectName) -> None:
    if dt.datetime.fromtimestamp(name.bucket, dt.UTC).year < 1000:
        return  # strftime writes fewer than four digits
    assert layout.parse_path(name.path) == name
    assert layout.parse_path(f"{name.path}.tmp") is None
    assert layout.parse_path(f"x/{name.path}") is None
    assert name.path.startswith(f"{name.directory}/")


# ------------------------------------------------------------------ templates

parts = st.one_of(
    st.sampled_from(["{subject}", "{header.A}", "{header.B-b}", "{region}", "{key}", "{n}", "{nested.a}", "{none}"]),
    st.integers(0, 5).map(lambda n: f"{{subject[{n}]}}"),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=4),
)
messages = st.fixed_dictionaries(
    {
        "subject": st.lists(st.sampled_from(["orders", "eu", "größe", "1", "*"]), min_size=1, max_size=5).map(".".join),
        "headers": st.none()
        | st.dictionaries(st.sampled_from(["A", "a", "B-b"]), st.lists(st.text("xy", max_size=2), max_size=2)),
        "region": st.none() | st.text("eu/.", max_size=3),
        "key_": st.none() | st.text("kl", max_size=2),
        "n": st.none() | st.integers(-5, 5),
        "nested": st.none() | st.fixed_dictionaries({"a": st.none() | st.text("z", max_size=1)}),
    }
)


def reference(template: list[str], message: dict[str, Any]) -> str | None:
    """The key of one message: its parts one after another, and none when one of them is missing."""
    found = []
    for part in template:
        inner = part[1:-1]
        value: Any = None
        if not part.startswith("{"):
            value = part
        elif inner == "subject":
            value = message["subject"]
        elif inner.startswith("subject["):
            tokens, place = message["subject"].split("."), int(inner[8:-1])
            value = tokens[place] if place < len(tokens) else None
        elif inner.startswith("header."):
            values = (message["headers"] or {}).get(inner[7:])
            value = values[0] if values else None
        elif inner == "nested.a":
            value = (message["nested"] or {}).get("a")
        elif inner == "key":
            value = message["key_"]
        elif inner != "none":
            value = message[inner]
        if value is None:
            return None
        found.append(str(value))
    return "".join(found)


@given(st.lists(parts, max_size=4), st.lists(messages, max_size=6))
def test_a_template_gives_each_message_what_its_own_parts_give(
    template: list[str], batch: list[dict[str, Any]]
) -> None:
    headers = [None if m["headers"] is None else list(m["headers"].items()) for m in batch]
    known = {
        layout.SUBJECT: pa.array([m["subject"] for m in batch], pa.string()),
        layout.HEADERS: pa.array(headers, HEADERS_TYPE),
    }
    arrays = [known.get(field.name, pa.nulls(len(batch), field.type)) for field in ENVELOPE]
    rows = MessageBatch(stream="S", rows=pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE))
    fields = pa.RecordBatch.from_pydict(
        {
            "region": pa.array([m["region"] for m in batch], pa.string()),
            "key_": pa.array([m["key_"] for m in batch], pa.string()),
            "n": pa.array([m["n"] for m in batch], pa.int64()),
            "nested": pa.array([m["nested"] for m in batch], pa.struct([("a", pa.string())])),
        }
    )
    found = TemplateKey("".join(template))(rows, fields).to_pylist()
    expected = [reference(template, message) for message in batch]
    assert list(map(normal, found)) == list(map(normal, expected))


# ------------------------------------------------------------------ buckets

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
intervals = st.sampled_from([seconds for seconds in range(1, 86_401) if 86_400 % seconds == 0])
moments = st.integers(-62_135_596_800 * 10**6, 253_402_300_799 * 10**6 + 999_999)


@given(st.lists(moments, min_size=1, max_size=5), intervals)
def test_a_bucket_begins_where_a_clock_would_say_and_within_one_day(times: list[int], interval: int) -> None:
    starts = buckets(pa.array(times, pa.timestamp("us", "UTC")), interval)
    assert starts.dtype == np.int64
    for micros, start in zip(times, starts.tolist(), strict=True):
        at = EPOCH + dt.timedelta(microseconds=micros)
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
        whole = (at - midnight) // dt.timedelta(seconds=interval)
        assert EPOCH + dt.timedelta(seconds=start) == midnight + whole * dt.timedelta(seconds=interval)
