"""Names, keys and buckets: whatever a key is, it is one directory, and comes back; buckets are those of a clock."""

from __future__ import annotations

import datetime as dt
import posixpath
from urllib.parse import unquote

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
from hypothesis import example, given

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.store.objects import root_of
from jetcapture_py.transform.keys import buckets

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
