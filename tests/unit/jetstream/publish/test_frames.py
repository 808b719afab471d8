"""The columnar way builds the same bytes as the plain one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetcapture_py.archive.arrow_bytes import byte_strings
from jetcapture_py.archive.schema import HEADERS_TYPE
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.publish.frames import check_subject, frames, header_blocks, unusual_subjects, without
from tests.support.publishing import frame, header_block

names = st.sampled_from(["A", "B", "X-Y", "Nats-Msg-Id", "!~"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=6)
lists = st.none() | st.lists(st.none() | texts, max_size=3)
maps = st.none() | st.lists(st.tuples(names, lists), max_size=3, unique_by=lambda entry: entry[0])
rows = st.lists(st.tuples(maps, st.none() | texts, st.none() | texts), min_size=1, max_size=12)
Entry = list[tuple[str, list[str | None] | None]] | None


def expected(headers: Entry, extra: dict[str, str | None]) -> bytes:
    given_ = [(name, value) for name, value in extra.items() if value is not None]
    if headers is None and not given_:
        return b""
    entries = [(name, value) for name, values in headers or () if name not in extra for value in values or ()]
    return header_block([*((name, value) for name, value in entries if value is not None), *given_])


@given(rows, st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_blocks_of_columns_are_those_of_their_rows(
    drawn: list[tuple[Entry, str | None, str | None]], start: int, length: int, several: bool
) -> None:
    headers = pa.array([row[0] for row in drawn], HEADERS_TYPE).slice(start, length)
    extra = {"X-Y": pa.array([row[1] for row in drawn], pa.string()).slice(start, length)}
    if several:
        extra["Nats-Msg-Id"] = pa.array([row[2] for row in drawn], pa.string()).slice(start, length)
    part = drawn[start : start + length]
    wanted = [expected(row[0], {"X-Y": row[1], **({"Nats-Msg-Id": row[2]} if several else {})}) for row in part]
    found = header_blocks(headers, extra, len(part))
    assert (found.to_pylist() if found is not None else [b""] * len(part)) == wanted


@given(rows, st.integers(0, 12), st.sets(names))
def test_headers_are_taken_out_by_name(
    drawn: list[tuple[Entry, str | None, str | None]], start: int, refused: set[str]
) -> None:
    headers = pa.array([row[0] for row in drawn], HEADERS_TYPE).slice(start)
    wanted = [row[0] and [entry for entry in row[0] if entry[0] not in refused] for row in drawn[start:]]
    assert without(headers, refused.__contains__).to_pylist() == wanted


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a.b", "é"]), st.binary(max_size=40), st.sampled_from([b"", b"H", b"NATS"])),
        min_size=1,
        max_size=9,
    ),
    st.booleans(),
)
def test_frames_of_columns_are_those_of_their_rows(messages: list[tuple[str, bytes, bytes]], bare: bool) -> None:
    replies = [b"_INBOX.%d" % number for number in range(len(messages))]
    blocks = None if bare else pa.array([block for _, _, block in messages], pa.binary())
    found = frames(
        pa.array([subject.encode() for subject, _, _ in messages], pa.binary()),
        pa.array(replies, pa.binary()),
        blocks,
        pa.array([payload for _, payload, _ in messages], pa.binary()),
    )
    assert found == [
        frame(subject, reply, b"" if bare else block, payload)
        for (subject, payload, block), reply in zip(messages, replies, strict=True)
    ]


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 9))
def test_byte_strings_are_the_elements(values: list[bytes], start: int) -> None:
    assert byte_strings(pa.array(values, pa.binary()).slice(start)) == values[start:]


@given(st.lists(st.text(max_size=8) | st.sampled_from(["a.b", "a..b", "$JS.x", "a.*", "x" * 4000]), max_size=9))
def test_a_subject_that_is_not_looked_at_is_a_valid_one(subjects: list[str]) -> None:
    for subject in set(subjects) - set(unusual_subjects(pa.array(subjects, pa.string()))):
        check_subject(subject)


def test_only_subjects_that_may_be_refused_are_looked_at_one_by_one() -> None:
    assert unusual_subjects(pa.array([f"orders.EU-1_x.{number}" for number in range(100)])) == []
    for subject in ("a b", "a\n", "a.*", ">", ".", "$SYS.x", "y" * 4000, "é\u2028"):
        assert unusual_subjects(pa.array(["ok", subject, subject])) == [subject]
        with pytest.raises(SourceError):
            check_subject(subject)
