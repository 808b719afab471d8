"""What a proof has found, as people and programs are told it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from jetcapture_py.verify.report import SHOWN, Copy, Report, SequenceRange, WatermarkFinding
from jetcapture_py.verify.scan import Problem

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
COMPLETE = Report(
    stream="ORDERS",
    consumer="archive",
    stream_created="2026-01-01T00:00:00Z",
    deep=False,
    complete=True,
    proven=True,
    ack_floor=1_234_567,
    up_to=1_234_567,
    up_to_time=NOON,
    stored=1_234_567,
    missing=0,
    holes=(),
    hole_ranges=0,
    gaps=(),
    gap_ranges=0,
    gap_sequences=0,
    duplicates=0,
    read_twice=0,
    copies=(),
    also_quarantined=0,
    damaged=(),
    damaged_objects=0,
    foreign=(),
    foreign_files=0,
    unsigned=(),
    unsigned_objects=0,
    objects=3,
    bytes=4096,
    quarantined=0,
    older=0,
    watermark=WatermarkFinding(seq=1_234_567, time=NOON, problem=""),
    unchecked=(),
)


def hole(first: int, last: int, messages: int | None = None) -> SequenceRange:
    first_time, last_time = NOON + timedelta(seconds=first), NOON + timedelta(seconds=last)
    count = last - first + 1 if messages is None else messages
    return SequenceRange(first=first, last=last, messages=count, first_time=first_time, last_time=last_time)


def with_holes(*holes: SequenceRange, ranges: int | None = None, **changes: Any) -> Report:
    missing = sum(each.messages or 0 for each in holes)
    count = len(holes) if ranges is None else ranges
    return replace(COMPLETE, complete=False, missing=missing, holes=holes, hole_ranges=count, **changes)


def lines(report: Report) -> list[str]:
    return report.as_text().splitlines()


def test_a_complete_archive_is_three_lines() -> None:
    assert lines(COMPLETE) == [
        "complete: every one of 1,234,567 messages up to sequence 1234567 (2026-05-01T12:00:00Z) is stored",
        "archive: 3 objects, 4,096 bytes, every footer read",
        "watermark: 1234567 (2026-05-01T12:00:00Z)",
    ]


def test_each_fault_is_in_the_first_line() -> None:
    damaged = (Problem(path="a", reason="cut"), Problem(path="b", reason="cut"))
    first = lines(with_holes(hole(1, 5), hole(9, 9), damaged=damaged, damaged_objects=2))[0]
    assert first.startswith("NOT complete: 6 messages in 2 holes and 2 damaged objects, up to")
    assert lines(replace(COMPLETE, complete=False, proven=False))[0].startswith("NOT proven: 1,234,567 messages up to")
    promised = replace(COMPLETE, complete=False, watermark=WatermarkFinding(seq=9, time=NOON, problem="it lies"))
    assert lines(promised)[0].startswith("NOT complete: the watermark promises")
    assert lines(replace(COMPLETE, stored=0, up_to=0, up_to_time=None))[0] == (
        "complete: nothing to store up to sequence 0"
    )


def test_few_holes_are_shown_each_and_many_as_those_that_lie_together() -> None:
    few = lines(with_holes(hole(1, 5), hole(9, 9)))
    assert few[2:5] == [
        "holes: messages in the stream that are missing from the archive",
        "  1 to 5, 5 messages, 2026-05-01T12:00:01Z to 2026-05-01T12:00:05Z",
        "  9, 1 message, 2026-05-01T12:00:09Z",
    ]
    assert few[5].startswith("cause: objects were removed, or another capture of this consumer stores")
    many = [hole(seq, seq) for start in (0, 5000, 7000) for seq in range(start + 1, start + 300, 3)]
    assert lines(with_holes(*many))[3:6] == [
        "  1 to 298, 100 messages in 100 holes, 2026-05-01T12:00:01Z to 2026-05-01T12:04:58Z",
        "  5001 to 5298, 100 messages in 100 holes, 2026-05-01T13:23:21Z to 2026-05-01T13:28:18Z",
        "  7001 to 7298, 100 messages in 100 holes, 2026-05-01T13:56:41Z to 2026-05-01T14:01:38Z",
    ]


@pytest.mark.parametrize("count", [SHOWN - 1, SHOWN, SHOWN + 1, 500])
def test_however_many_holes_there_are_every_message_is_in_a_line(count: int) -> None:
    holes = [hole(seq * seq, seq * seq + 2) for seq in range(3, 3 + count)]
    shown = [line for line in lines(with_holes(*holes)) if "message" in line and line.startswith("  ")]
    assert len(shown) == min(count, SHOWN)
    assert sum(int(line.split(", ")[1].split()[0].replace(",", "")) for line in shown) == 3 * count
    assert shown[0].startswith("  9 to ")


def test_holes_beyond_those_that_are_listed_are_counted() -> None:
    assert "  and 990 more holes beyond" in lines(with_holes(*(hole(seq, seq) for seq in range(1, 20, 2)), ranges=1000))


def test_the_rest_is_told_with_what_it_means() -> None:
    gap = SequenceRange(first=3, last=4, messages=None, first_time=None, last_time=None)
    report = replace(
        COMPLETE,
        deep=True,
        quarantined=7,
        duplicates=1,
        gaps=(gap,),
        gap_ranges=1,
        gap_sequences=2,
        foreign=tuple(f"notes-{index}" for index in range(SHOWN)),
        foreign_files=SHOWN + 5,
        unchecked=("the stream: away",),
        watermark=None,
    )
    found = lines(report)
    assert "archive: 3 objects, 4,096 bytes, every byte read, 7 messages in quarantine" in found
    assert "duplicates: 1 further copy; readers drop them" in found
    assert "  3 to 4" in found
    assert "  and 5 more" in found
    assert found[-2:] == ["not checked:", "  the stream: away"]
    assert not any(line.startswith("watermark") for line in found)


def test_copies_and_objects_without_checksums_are_a_line_each_and_examples() -> None:
    copies = tuple(Copy(seq=seq, time=NOON, paths=("a/1.parquet", "b/1.parquet")) for seq in range(1, SHOWN + 3))
    report = replace(
        COMPLETE,
        read_twice=5000,
        copies=copies,
        duplicates=5000,
        also_quarantined=1,
        unsigned=("c/1.parquet",),
        unsigned_objects=1,
    )
    found = lines(report)
    assert found[0].startswith("complete, but 5,000 messages are read twice: every one of 1,234,567 messages")
    twice = found.index(
        "read twice: 5,000 messages with copies under different keys or buckets, which readers return separately; "
        'read_archive(dedupe="full") reads them once'
    )
    assert found[twice + 1] == "  1 (2026-05-01T12:00:00Z): a/1.parquet, b/1.parquet"
    assert found[twice + 1 + SHOWN] == f"  and {5000 - SHOWN:,} more"
    unsigned = found.index("without checksums: objects not written by jetcapture")
    assert found[unsigned + 1] == "  c/1.parquet"
    assert "quarantine: 1 message is also in the archive and read once from each" in found
    assert "duplicates: 5,000 further copies; readers drop those under one key and bucket" in found


@pytest.mark.parametrize(
    ("changes", "lenient", "strict"),
    [
        ({}, 0, 0),
        ({"complete": False}, 1, 1),
        ({"gap_ranges": 1}, 0, 1),
        ({"foreign_files": 1}, 0, 1),
        ({"unsigned_objects": 1}, 0, 1),
        ({"read_twice": 1}, 1, 1),
        ({"watermark": WatermarkFinding(seq=1, time=NOON, problem="it lies")}, 0, 1),
        ({"duplicates": 5, "also_quarantined": 2, "older": 3, "unchecked": ("x",)}, 0, 0),
    ],
)
def test_the_exit_code(changes: dict[str, Any], lenient: int, strict: int) -> None:
    report = replace(COMPLETE, **changes)
    assert (report.exit_code(), report.exit_code(strict=True)) == (lenient, strict)


HOSTILE = "\x1b]0;x\x07\r\n\u202e\x7f\x9b31m"


def test_no_text_in_it_reaches_a_terminal_as_it_is() -> None:
    report = replace(
        COMPLETE,
        damaged=(Problem(path=HOSTILE, reason=HOSTILE),),
        damaged_objects=1,
        foreign=(HOSTILE,),
        foreign_files=1,
        unsigned=(HOSTILE,),
        unsigned_objects=1,
        read_twice=1,
        copies=(Copy(seq=1, time=NOON, paths=(HOSTILE, HOSTILE)),),
        unchecked=(HOSTILE,),
        watermark=WatermarkFinding(seq=1, time=NOON, problem=HOSTILE),
    )
    text, data = report.as_text(), report.as_json()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text.splitlines()) == 13
    assert data.isascii()
    assert data.isprintable()
    assert json.loads(data)["foreign"] == [HOSTILE]


def test_json_has_what_programs_read_by_these_names() -> None:
    found = json.loads(with_holes(hole(1, 5)).as_json())
    assert (found["complete"], found["missing"], found["duplicates"]) == (False, 5, 0)
    assert (found["damaged"], found["foreign"]) == ([], [])
    assert found["holes"] == [
        {
            "first": 1,
            "last": 5,
            "messages": 5,
            "first_time": "2026-05-01T12:00:01Z",
            "last_time": "2026-05-01T12:00:05Z",
        }
    ]
