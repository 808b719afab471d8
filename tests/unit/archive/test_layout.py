from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName

BUCKET, DIGEST = int(datetime(2024, 2, 29, 13, 45, tzinfo=UTC).timestamp()), "0123456789abcdef"
NAME = ObjectName(stream="ORDERS", key="eu/west", bucket=BUCKET, first_seq=17, last_seq=4211, rows=3000, digest=DIGEST)
FILE = "20240229T134500Z-00000000000000000017-00000000000000004211-3000-0123456789abcdef.parquet"
PATH = f"ORDERS/key=eu%2Fwest/date=2024-02-29/hour=13/{FILE}"


def test_an_object_lies_where_the_format_says() -> None:
    assert NAME.path == PATH
    assert NAME.directory == "ORDERS/key=eu%2Fwest/date=2024-02-29/hour=13"
    assert layout.parse_path(PATH) == NAME
    other = replace(NAME, event_time=True, suffix=".csv.gz")
    assert other.path == PATH.replace("134500Z", "134500E").replace(".parquet", ".csv.gz")
    assert layout.parse_path(other.path) == other
    assert other.group == NAME.group
    assert (NAME.parquet, other.parquet) == (True, False)


def test_the_quarantine_has_its_own_tree_without_keys_and_in_parquet_only() -> None:
    name = ObjectName(stream="S", key=None, bucket=0, first_seq=1, last_seq=2, rows=2, digest="f" * 16, quarantine=True)
    assert name.path == (
        f"_quarantine/S/date=1970-01-01/hour=00/19700101T000000Z-{1:020}-{2:020}-2-ffffffffffffffff.parquet"
    )
    assert layout.parse_path(name.path) == name
    assert layout.parse_path(name.path.replace(".parquet", layout.TEXT_SUFFIXES[0])) is None


def test_no_key_and_the_empty_key_are_the_default_partition() -> None:
    assert layout.escape_key(None) == layout.escape_key("") == "__HIVE_DEFAULT_PARTITION__"
    assert layout.unescape_key("__HIVE_DEFAULT_PARTITION__") is None
    assert layout.escape_key("__HIVE_DEFAULT_PARTITION__") == "%5F_HIVE_DEFAULT_PARTITION__"


def test_the_longest_name_with_its_temporary_suffix_fits_a_file_system() -> None:
    name = replace(NAME, first_seq=(1 << 64) - 1, last_seq=(1 << 64) - 1, rows=1 << 62)
    assert len(name.path.split("/")[-1]) + len("..") + 32 + len(".tmp") <= 255


def test_a_path_that_the_archive_did_not_make_is_nobodys() -> None:
    changes = {
        "key=eu%2Fwest": ("eu%2Fwest", "key=eu%2fwest", "key=", "key=a=b", "key=%", "key=%41", "Key=eu"),
        "date=2024-02-29": ("date=2024-02-28", "date=2024-02-29/extra"),
        "hour=13": ("hour=14",),
        "20240229T134500Z": ("20240230T134500Z", "20240229T134560Z", "20240229T134500"),
        "-3000-": ("-03000-", "--3000-"),
        "00000000000000000017": ("17", "\u06600000000000000000017"),
        "abcdef": ("ABCDEF", "abcde"),
        ".parquet": (".csv.bz2", ".CSV", ".csv.gz.tmp", ".tmp", ".a.b.c", "", ".parquet.crc", ".parquet\n"),
        FILE: (f".{FILE}.0.tmp", "_SUCCESS", "part-00000-2f1c.c000.snappy.parquet"),
    }
    paths = [PATH.replace(part, other) for part, others in changes.items() for other in others]
    paths += ["", "/", "ORDERS", FILE, f"/{PATH}", f"{PATH}/", f"x/{PATH}", f"_quarantine/{PATH}"]
    paths += [f"_quarantine/ORDERS/{FILE}", "_watermark/ORDERS.json", "_streams/ORDERS/20240101T000000Z.json"]
    assert [path for path in paths if layout.parse_path(path) is not None] == []


@given(st.one_of(st.text(), st.lists(st.sampled_from([*PATH.split("/"), "..", "", "key=", "x"])).map("/".join)))
def test_only_paths_that_names_make_are_understood(path: str) -> None:
    name = layout.parse_path(path)
    assert name is None or name.path == path


def test_a_field_that_would_hide_a_column_of_the_archive_is_renamed() -> None:
    renamed = ("key", "DATE", "hour", "bundle", "_nats_seq", "_NATS_anything", "_nats_", "_file", "_POS", "")
    assert {name: layout.field_name(name) for name in renamed} == {name: f"{name}_" for name in renamed}
    others = ("key_", "keys", "file", "minute", "_nats", "nats_seq", "größe")
    assert [name for name in others if layout.field_name(name) != name] == []


def may_share(one: ObjectName, other: ObjectName) -> bool:
    group, others = ((name.stream, name.quarantine, name.key, name.bucket) for name in (one, other))
    return group == others and one.first_seq <= other.last_seq and other.first_seq <= one.last_seq


@st.composite
def names(draw: st.DrawFn) -> ObjectName:
    """Names in few groups, whose ranges often overlap."""
    first, quarantine = draw(st.integers(0, 40)), draw(st.booleans())
    stream, bucket = draw(st.sampled_from(["S", "T"])), draw(st.sampled_from([0, 900]))
    key = None if quarantine else draw(st.sampled_from([None, "a", "b", "None"]))
    last, rows = first + draw(st.integers(0, 12)), draw(st.integers(1, 3))
    where = replace(NAME, stream=stream, key=key, bucket=bucket, quarantine=quarantine)
    return replace(where, first_seq=first, last_seq=last, rows=rows)


@given(st.lists(names(), max_size=25))
def test_objects_are_read_as_they_are_only_if_no_other_may_share_a_message(objects: list[ObjectName]) -> None:
    alone, shared = layout.split_overlapping(objects)
    expected: dict[bool, list[str]] = {True: [], False: []}
    for at, one in enumerate(objects):
        expected[any(may_share(one, other) for other in objects[:at] + objects[at + 1 :])].append(repr(one))
    assert sorted(map(repr, shared)) == sorted(expected[True])
    assert sorted(map(repr, alone)) == sorted(expected[False])


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


def test_a_bucket_whose_bundles_cannot_be_of_one_number_is_one_group() -> None:
    for one, other in (("3", "04"), ("03", "004")):
        objects = [in_bundle(1, 9, one), in_bundle(5, 6, other)]
        assert layout.split_overlapping(objects) == ([], objects)
    objects = [in_bundle(1, 9, "3"), in_bundle(5, 6, "7")]
    assert layout.split_overlapping(objects, dict.fromkeys(objects, 8)) == (objects, [])
    assert layout.split_overlapping(objects, dict(zip(objects, (4, 8), strict=True))) == ([], objects)
