"""What a proof has found, as people and programs are told it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace as changed

from jetcapture_py.archive.watermark import NEVER, ConsumerWatermark
from jetcapture_py.verify.findings import (
    MAX_SHOWN,
    FilePath,
    Finding,
    Kind,
    Report,
    SequenceRange,
    Severity,
    Verdict,
    not_checked,
)

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOTE, WARNING, FAILURE = Severity.NOTE, Severity.WARNING, Severity.FAILURE
MISSING = "messages in the stream that are missing from the archive"
MARK = ConsumerWatermark(stream="ORDERS", consumer="archive", created="2026-01-01T00:00:00Z", seq=1_234_567, time=NOON)
COUNTS = {"ack_floor": 1_234_567, "up_to": 1_234_567, "stored": 1_234_567, "quarantined": 0, "older": 0, "objects": 3}
NAMES: dict[str, Any] = {"stream": "ORDERS", "consumer": "archive", "stream_created": "2026-01-01T00:00:00Z"}
COMPLETE = Report(**NAMES, **COUNTS, bytes=4096, deep=False, up_to_time=NOON, watermark=MARK)


def hole(first: int, last: int, messages: int | None = None) -> SequenceRange:
    first_time, last_time = NOON + timedelta(seconds=first), NOON + timedelta(seconds=last)
    count = last - first + 1 if messages is None else messages
    return SequenceRange(first=first, last=last, messages=count, first_time=first_time, last_time=last_time)


def finding(kind: Kind, severity: Severity, summary: str = "it is so", **further: Any) -> Finding:
    return Finding(kind=kind, severity=severity, summary=summary, **further)


def with_holes(*holes: SequenceRange, ranges: int | None = None, more: tuple[Finding, ...] = ()) -> Report:
    action = "objects were removed, or another capture of this consumer stores what it receives elsewhere; "
    action += "jetcapture verify --repair stores them again"
    count, ranges = sum(each.messages or 0 for each in holes), len(holes) if ranges is None else ranges
    missing = finding(Kind.HOLES, FAILURE, MISSING, action=action, count=count, ranges=holes, range_count=ranges)
    return replace(COMPLETE, findings=(missing, *more))


def lines(report: Report) -> list[str]:
    return report.as_text().splitlines()


def test_a_complete_archive_is_three_lines() -> None:
    first, *others = lines(COMPLETE)
    assert first == "complete: every one of 1,234,567 messages up to sequence 1234567 (2026-05-01T12:00:00Z) is stored"
    assert others == ["archive: 3 objects, 4 KiB, every footer read", "watermark: 1234567 (2026-05-01T12:00:00Z)"]


def test_each_fault_is_in_the_first_line() -> None:
    paths = (FilePath(path="a", reason="cut"), FilePath(path="b", reason="cut"))
    damaged = finding(Kind.DAMAGED, FAILURE, count=2, paths=paths)
    report = with_holes(hole(1, 5), hole(9, 9), more=(damaged,))
    assert lines(report)[0].startswith("NOT complete: 6 messages in 2 holes and 2 damaged objects, up to")
    assert lines(report)[-3:] == ["damaged: it is so", "  a: cut", "  b: cut"]
    away = replace(COMPLETE, findings=(not_checked("the stream: away", FAILURE),))
    assert (away.verdict, away.proven) == (Verdict.UNPROVEN, False)
    assert lines(away)[0].startswith("NOT proven: 1,234,567 messages up to")
    lies = replace(COMPLETE, findings=(finding(Kind.WATERMARK, FAILURE, "it lies"),))
    assert lines(lies)[0].startswith("NOT complete: the watermark promises")
    assert "watermark: it lies" in lines(lies)
    skipped = replace(COMPLETE, findings=(finding(Kind.FILTERS, WARNING, count=3),))
    assert (skipped.verdict, skipped.proven) == (Verdict.UNPROVEN, True)
    assert lines(skipped)[0].endswith("are stored; 3 others may be missing, or skipped by a change of filters")
    lost = replace(COMPLETE, findings=(finding(Kind.REWIND, FAILURE), finding(Kind.UNKNOWN_FILTERS, WARNING)))
    but = "the server has lost messages and the consumer's earlier filters are unknown"
    assert lines(lost)[0].startswith(f"complete, but {but}: every one of")
    nothing = replace(COMPLETE, stored=0, up_to=0, up_to_time=None)
    assert lines(nothing)[0] == "complete: nothing to store up to sequence 0"


def test_few_holes_are_shown_each_and_many_together_so_that_every_message_is_in_a_line() -> None:
    few = lines(with_holes(hole(1, 5), hole(9, 9)))
    first = "  1 to 5, 5 messages, 2026-05-01T12:00:01Z to 2026-05-01T12:00:05Z"
    assert few[3:6] == [f"holes: {MISSING}", first, "  9, 1 message, 2026-05-01T12:00:09Z"]
    assert few[6].startswith("  objects were removed, or another capture of this consumer stores")
    many = [hole(seq, seq) for start in (0, 5000, 7000) for seq in range(start + 1, start + 300, 3)]
    together = "  7001 to 7298, 100 messages in 100 holes, 2026-05-01T13:56:41Z to 2026-05-01T14:01:38Z"
    assert lines(with_holes(*many))[6] == together
    for count in [MAX_SHOWN - 1, MAX_SHOWN, MAX_SHOWN + 1, 500]:
        holes = [hole(seq * seq, seq * seq + 2) for seq in range(3, 3 + count)]
        shown = [line for line in lines(with_holes(*holes)) if " messages" in line and line[:3].strip().isdigit()]
        assert len(shown) == min(count, MAX_SHOWN)
        assert sum(int(line.split(", ")[1].split()[0].replace(",", "")) for line in shown) == 3 * count
        assert shown[0].startswith("  9 to ")
    assert "  and 990 more holes beyond" in lines(with_holes(*(hole(seq, seq) for seq in range(1, 20, 2)), ranges=1000))


def test_copies_are_in_the_first_line_and_as_examples_in_others() -> None:
    paths = ("a/1.parquet", "b/1.parquet")
    copies = tuple(SequenceRange(first=n, last=n, first_time=NOON, paths=paths) for n in range(1, MAX_SHOWN + 3))
    twice = finding(Kind.READ_TWICE, FAILURE, count=5000, ranges=copies, range_count=5000)
    text = lines(replace(COMPLETE, findings=(twice,)))
    assert text[0].startswith("complete, but 5,000 messages are read twice: every one of 1,234,567 messages")
    assert text[3:5] == ["read twice: it is so", "  1 (2026-05-01T12:00:00Z): a/1.parquet, b/1.parquet"]
    assert text[4 + MAX_SHOWN] == f"  and {5000 - MAX_SHOWN:,} more"


def test_the_worst_finding_is_the_exit_code() -> None:
    assert (COMPLETE.exit_code(), COMPLETE.exit_code(strict=True)) == (0, 0)
    codes = {NOTE: (0, 0), WARNING: (0, 1), FAILURE: (1, 1)}
    for kind in Kind:
        for severity, (lenient, strict) in codes.items():
            report = replace(COMPLETE, findings=(not_checked("x"), finding(kind, severity), not_checked("y")))
            assert (report.exit_code(), report.exit_code(strict=True)) == (lenient, strict)
            shown = [json.loads(report.as_json(strict=option))["exit_code"] for option in (False, True)]
            assert shown == [lenient, strict]


HOSTILE = "\x1b]0;x\x07\r\n\u202e\x7f\x9b31m"


def test_no_text_in_it_reaches_a_terminal_as_it_is() -> None:
    copy = SequenceRange(first=1, last=1, first_time=NOON, paths=(HOSTILE, HOSTILE))
    findings = (
        finding(Kind.DAMAGED, FAILURE, count=1, paths=(FilePath(path=HOSTILE, reason=HOSTILE),)),
        finding(Kind.FOREIGN, WARNING, count=1, paths=(FilePath(path=HOSTILE),)),
        finding(Kind.READ_TWICE, FAILURE, count=1, ranges=(copy,), range_count=1),
        finding(Kind.WATERMARK, WARNING, HOSTILE),
        not_checked(HOSTILE),
    )
    report = replace(COMPLETE, findings=findings, filters=(HOSTILE,))
    text, data = report.as_text(), report.as_json()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text.splitlines()) == 13
    assert data.isascii()
    assert data.isprintable()
    assert json.loads(data)["findings"][1]["paths"] == [{"path": HOSTILE}]


def test_json_has_what_programs_read_by_these_names() -> None:
    damaged = finding(Kind.DAMAGED, FAILURE, count=2, paths=(FilePath(path="a", reason="cut"),), action="repair it")
    data = json.loads(with_holes(hole(1, 5), more=(damaged,)).as_json(repair={"messages": 1}))
    assert list(data) == [
        *("verdict", "exit_code", "stream", "consumer", "stream_created", "deep", "ack_floor", "up_to", "up_to_time"),
        *("counts", "layouts", "filters", "watermark", "findings", "repair"),
    ]
    assert (data["verdict"], data["exit_code"]) == ("incomplete", 1)
    assert data["watermark"] == {"seq": 1_234_567, "time": "2026-05-01T12:00:00Z"}
    counts = {"stored": 1_234_567, "missing": 5, "compared": None, "objects": 3, "damaged_objects": 2, "bytes": 4096}
    assert data["counts"] == counts | dict.fromkeys(
        ("duplicates", "quarantined", "older", "rescued", "expired", "erased"), 0
    )
    holes, damage = data["findings"]
    times = {"first_time": "2026-05-01T12:00:01Z", "last_time": "2026-05-01T12:00:05Z"}
    assert holes["ranges"] == [{"first": 1, "last": 5, "messages": 5, **times}]
    assert (holes["count"], holes["range_count"], holes["paths"]) == (5, 1, [])
    said = {"kind": "damaged", "severity": "failure", "summary": "it is so", "action": "repair it"}
    assert damage == said | {"count": 2, "ranges": [], "range_count": 0, "paths": [{"path": "a", "reason": "cut"}]}
    report = replace(COMPLETE, watermark=changed(MARK, time=NEVER))  # which promises nothing by time yet
    assert "watermark: 1234567" in lines(report)
    assert json.loads(report.as_json())["watermark"] == {"seq": 1_234_567, "time": None}
