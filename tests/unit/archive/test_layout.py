from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName

keys = st.one_of(
    st.none(),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    st.text(st.sampled_from("/.%\\=:*?\0 ~-_%2F"), min_size=1, max_size=20),
    st.sampled_from([".", "..", "../..", "/", layout.DEFAULT_PARTITION, "%5F", "key=x", "007", " ", "a/b", "ü%日"]),
)
seqs = st.integers(0, (1 << 63) - 1)


@st.composite
def names(draw: st.DrawFn, /, **fixed: Any) -> ObjectName:
    first, last = sorted((draw(seqs), draw(seqs)))
    quarantine = draw(st.booleans())
    values: dict[str, Any] = {
        "stream": draw(st.sampled_from(["S", "ORDERS_eu", "größe", "a-b"])),
        "key": None if quarantine else draw(keys),
        "bucket": draw(st.integers(-30_000_000_000, 200_000_000_000)),
        "first_seq": first,
        "last_seq": last,
        "rows": draw(st.integers(1, 1 << 40)),
        "digest": f"{draw(st.integers(0, (1 << 64) - 1)):016x}",
        "quarantine": quarantine,
        "event_time": draw(st.booleans()),
        "suffix": ".parquet"
        if quarantine
        else draw(st.sampled_from([".parquet", *layout.TEXT_SUFFIXES, ".arrow", ".a1.b2"])),
    }
    values |= {} if quarantine or draw(st.booleans()) else {"key": None, "bundle": draw(st.sampled_from(["0", "03"]))}
    return ObjectName(**(values | fixed))


NAME = ObjectName(
    stream="ORDERS",
    key="eu/west",
    bucket=int(datetime(2024, 2, 29, 13, 45, tzinfo=UTC).timestamp()),
    first_seq=17,
    last_seq=4211,
    rows=3000,
    digest="0123456789abcdef",
)
FILE = "20240229T134500Z-00000000000000000017-00000000000000004211-3000-0123456789abcdef.parquet"
PATH = f"ORDERS/key=eu%2Fwest/date=2024-02-29/hour=13/{FILE}"


def test_an_object_lies_where_the_format_says() -> None:
    assert NAME.path == PATH
    assert NAME.directory == "ORDERS/key=eu%2Fwest/date=2024-02-29/hour=13"
    assert layout.parse_path(PATH) == NAME


def test_a_name_says_the_format_and_what_its_bucket_is_made_of() -> None:
    other = replace(NAME, event_time=True, suffix=".csv.gz")
    assert other.path == PATH.replace("134500Z", "134500E").replace(".parquet", ".csv.gz")
    assert layout.parse_path(other.path) == other
    assert other.group == NAME.group
    assert (NAME.parquet, other.parquet) == (True, False)


@pytest.mark.parametrize("suffix", layout.TEXT_SUFFIXES)
def test_the_quarantine_is_parquet_only(suffix: str) -> None:
    quarantined = replace(NAME, key=None, quarantine=True)
    assert layout.parse_path(quarantined.path) == quarantined
    assert layout.parse_path(quarantined.path.replace(".parquet", suffix)) is None


def test_the_quarantine_has_a_tree_of_its_own_without_keys() -> None:
    name = ObjectName(stream="S", key=None, bucket=0, first_seq=1, last_seq=2, rows=2, digest="f" * 16, quarantine=True)
    assert name.path == (
        f"_quarantine/S/date=1970-01-01/hour=00/19700101T000000Z-{1:020}-{2:020}-2-ffffffffffffffff.parquet"
    )
    assert layout.parse_path(name.path) == name


def test_no_key_and_the_empty_key_are_the_default_partition() -> None:
    assert layout.escape_key(None) == layout.escape_key("") == "__HIVE_DEFAULT_PARTITION__"
    assert layout.unescape_key("__HIVE_DEFAULT_PARTITION__") is None


def test_a_key_that_is_called_like_the_default_partition_is_not_taken_for_it() -> None:
    assert layout.escape_key(layout.DEFAULT_PARTITION) != layout.DEFAULT_PARTITION


def test_the_longest_name_with_its_temporary_suffix_fits_a_file_system() -> None:
    name = ObjectName(
        stream="S", key="k", bucket=0, first_seq=(1 << 64) - 1, last_seq=(1 << 64) - 1, rows=1 << 62, digest="0" * 16
    )
    assert len(name.path.split("/")[-1]) + len("..") + 32 + len(".tmp") <= 255


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "ORDERS",
        FILE,
        f"/{PATH}",
        f"{PATH}/",
        f"x/{PATH}",
        f"_quarantine/{PATH}",
        PATH.replace("key=eu%2Fwest", "eu%2Fwest"),
        PATH.replace("key=eu%2Fwest", "key=eu%2fwest"),
        PATH.replace("key=eu%2Fwest", "key="),
        PATH.replace("key=eu%2Fwest", "key=a=b"),
        PATH.replace("key=eu%2Fwest", "key=%"),
        PATH.replace("key=eu%2Fwest", "key=%41"),
        PATH.replace("key=", "Key="),
        PATH.replace("date=2024-02-29", "date=2024-02-28"),
        PATH.replace("hour=13", "hour=14"),
        PATH.replace("hour=13", "hour=13/extra"),
        PATH.replace("20240229T", "20240230T"),
        PATH.replace("20240229T134500Z", "20240229T134560Z"),
        PATH.replace("20240229T134500Z", "20240229T134500"),
        PATH.replace("-3000-", "-03000-"),
        PATH.replace("-3000-", "--3000-"),
        PATH.replace("00000000000000000017", "17"),
        PATH.replace("00000000000000000017", "\u06600000000000000000017"),
        PATH.replace("abcdef", "ABCDEF"),
        PATH.replace("abcdef", "abcde"),
        PATH.replace(".parquet", ".csv.bz2"),
        PATH.replace(".parquet", ".CSV"),
        PATH.replace(".parquet", ".csv.gz.tmp"),
        PATH.replace(".parquet", ".tmp"),
        PATH.replace(".parquet", ".a.b.c"),
        PATH.replace(".parquet", ""),
        PATH + ".crc",
        PATH.replace(FILE, f".{FILE}.0.tmp"),
        PATH.replace(FILE, "_SUCCESS"),
        PATH.replace(FILE, "part-00000-2f1c.c000.snappy.parquet"),
        "_watermark/ORDERS.json",
        "_streams/ORDERS/20240101T000000Z.json",
        "_probe/0123456789abcdef",
        f"_quarantine/ORDERS/{FILE}",
        PATH + "\n",
    ],
)
def test_a_path_that_the_archive_did_not_make_is_nobodys(path: str) -> None:
    assert layout.parse_path(path) is None


@given(st.one_of(st.text(), st.lists(st.sampled_from([*PATH.split("/"), "..", "", "key=", "x"])).map("/".join)))
def test_only_paths_that_names_make_are_understood(path: str) -> None:
    name = layout.parse_path(path)
    assert name is None or name.path == path


# ------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("key", "key_"),
        ("Key", "Key_"),
        ("DATE", "DATE_"),
        ("hour", "hour_"),
        ("_nats_seq", "_nats_seq_"),
        ("_NATS_anything", "_NATS_anything_"),
        ("_nats_", "_nats__"),
        ("", "_"),
        ("key_", "key_"),
        ("keys", "keys"),
        ("bundle", "bundle_"),
        ("BUNDLE", "BUNDLE_"),
        ("bundle_", "bundle_"),
        ("_file", "_file_"),
        ("_POS", "_POS_"),
        ("_last_updated_sequence_number", "_last_updated_sequence_number_"),
        ("file", "file"),
        ("minute", "minute"),
        ("_nats", "_nats"),
        ("nats_seq", "nats_seq"),
        ("größe", "größe"),
    ],
)
def test_a_field_that_would_hide_a_column_of_ours_is_renamed(name: str, column: str) -> None:
    assert layout.field_name(name) == column


@given(st.text(max_size=12))
def test_no_field_name_is_one_of_ours(name: str) -> None:
    column = layout.field_name(name)
    assert column
    assert column.lower() not in (*layout.RESERVED, *layout.ENVELOPE, layout.ROW)


# ------------------------------------------------------------------ overlaps


def may_share(one: ObjectName, other: ObjectName) -> bool:
    same = (one.stream, one.quarantine, one.key, one.bucket) == (
        other.stream,
        other.quarantine,
        other.key,
        other.bucket,
    )
    return same and one.first_seq <= other.last_seq and other.first_seq <= one.last_seq


@st.composite
def crowded(draw: st.DrawFn) -> ObjectName:
    first = draw(st.integers(0, 40))
    return draw(
        names(
            stream=draw(st.sampled_from(["S", "T"])),
            key=draw(st.sampled_from([None, "a", "b", "None"])),
            bucket=draw(st.sampled_from([0, 900])),
            first_seq=first,
            last_seq=first + draw(st.integers(0, 12)),
            quarantine=draw(st.booleans()),
            bundle="",
        )
    )


@given(st.lists(crowded(), max_size=25))
def test_objects_are_read_as_they_are_only_if_no_other_may_share_a_message(objects: list[ObjectName]) -> None:
    alone, shared = layout.split_overlapping(objects)
    expected = [
        any(may_share(one, other) for place, other in enumerate(objects) if place != at)
        for at, one in enumerate(objects)
    ]

    def sort(these: list[ObjectName]) -> list[str]:
        return sorted(map(repr, these))

    assert sort(shared) == sort([name for name, shares in zip(objects, expected, strict=True) if shares])
    assert sort(alone) == sort([name for name, shares in zip(objects, expected, strict=True) if not shares])


def in_bundle(first: int, last: int, bundle: str, bucket: int = 0) -> ObjectName:
    return replace(NAME, key=None, bundle=bundle, first_seq=first, last_seq=last, bucket=bucket)


def test_objects_of_different_bundles_share_no_message() -> None:
    one, other, same = in_bundle(1, 9, "03"), in_bundle(5, 6, "04"), in_bundle(9, 10, "03")
    assert layout.split_overlapping([one, other]) == ([one, other], [])
    assert layout.split_overlapping([one, other, same]) == ([other], [one, same])


def test_a_bucket_with_objects_under_keys_and_in_bundles_is_one_group() -> None:
    keyed = replace(NAME, first_seq=5, last_seq=6, bucket=0)
    bundles = [in_bundle(1, 9, "03"), in_bundle(5, 6, "04")]
    elsewhere = [in_bundle(1, 9, "03", bucket=900), in_bundle(5, 6, "04", bucket=900)]
    alone, shared = layout.split_overlapping([keyed, *bundles, *elsewhere])
    assert alone == elsewhere
    assert set(shared) == {keyed, *bundles}


@pytest.mark.parametrize(("one", "other"), [("3", "04"), ("03", "004")])
def test_a_bucket_with_bundles_of_as_many_digits_as_no_one_number_has_is_one_group(one: str, other: str) -> None:
    objects = [in_bundle(1, 9, one), in_bundle(5, 6, other)]
    assert layout.split_overlapping(objects) == ([], objects)


def test_a_bucket_whose_footers_have_two_numbers_of_bundles_is_one_group() -> None:
    objects = [in_bundle(1, 9, "3"), in_bundle(5, 6, "7")]
    assert layout.split_overlapping(objects, dict.fromkeys(objects, 8)) == (objects, [])
    assert layout.split_overlapping(objects, dict(zip(objects, (4, 8), strict=True))) == ([], objects)


@pytest.mark.parametrize(("second", "shares"), [((10, 20), True), ((11, 20), False), ((1, 1), True), ((0, 99), True)])
def test_ranges_are_inclusive(second: tuple[int, int], shares: bool) -> None:
    def name(first: int, last: int) -> ObjectName:
        return ObjectName(stream="S", key="k", bucket=0, first_seq=first, last_seq=last, rows=1, digest="0" * 16)

    alone, shared = layout.split_overlapping([name(*second), name(1, 10)])
    assert (len(alone), len(shared)) == ((0, 2) if shares else (2, 0))


def test_an_object_within_a_longer_one_does_not_end_its_range() -> None:
    ranges = [(1, 100), (2, 3), (50, 60), (101, 102)]
    objects = [
        ObjectName(stream="S", key=None, bucket=0, first_seq=first, last_seq=last, rows=1, digest="0" * 16)
        for first, last in ranges
    ]
    alone, shared = layout.split_overlapping(objects)
    assert [(name.first_seq, name.last_seq) for name in alone] == [(101, 102)]
    assert len(shared) == 3


# ------------------------------------------------------------------ digests


def test_digests_tell_sequences_from_timestamps_and_schemas_apart() -> None:
    assert layout.digest(b"ab", b"c") != layout.digest(b"ab", b"d")
    assert layout.digest(b"a" * 8, b"b" * 8) != layout.digest(b"b" * 8, b"a" * 8)
    assert len(layout.digest(b"", b"")) == 16
    assert layout.schema_id(["a:int64", "b:string"]) != layout.schema_id(["b:string", "a:int64"])
