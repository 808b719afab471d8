"""The check of the chaos runs finds what it is there to find."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.layout import ObjectName
from tests.chaos.archive import WATERMARK, LocalArchive, objects
from tests.chaos.check import Verdict, Watermarks, check
from tests.chaos.ledger import Ledger, digest
from tests.support.nats_server import NatsServer
from tests.support.running import STREAM, publish_and_capture

COUNT = 60
PROMISED = "the watermark promised what was not stored"


class Case:
    """A small archive of two keys, what the server had acknowledged of it, and the watermark that was seen."""

    def __init__(self, url: str, directory: Path) -> None:
        self.archive = LocalArchive(directory / "archive")
        self.root = directory / "archive.real"
        self.ledger = Ledger()
        messages = [(f"orders.{number % 2}", b"%d" % number) for number in range(COUNT)]
        for seq, (subject, payload) in enumerate(messages, 1):
            self.ledger.add(seq, digest(subject.encode(), b"%d" % seq, payload))
        drafts = [(subject, payload, [("Nats-Msg-Id", str(seq))]) for seq, (subject, payload) in enumerate(messages, 1)]
        publish_and_capture(url, self.root, drafts)
        self.marks = Watermarks(self.archive)
        self.marks.look()
        self.created = [json.loads((self.root / WATERMARK).read_text())["stream_created"]]

    def names(self) -> list[ObjectName]:
        return sorted(objects(self.archive)[0], key=lambda name: name.path)

    def table(self, name: ObjectName) -> pa.Table:
        return pq.read_table(pa.BufferReader((self.root / name.path).read_bytes()))

    def write(self, name: ObjectName, table: pa.Table) -> None:
        path = self.root / name.path
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)

    def split(self, name: ObjectName, seq: int) -> tuple[ObjectName, ObjectName]:
        table = self.table(name)
        seqs = table[layout.SEQ].to_numpy()
        (self.root / name.path).unlink()
        names = []
        for part in (table.filter(pa.array(seqs <= seq)), table.filter(pa.array(seqs > seq))):
            bounds = pc.min_max(part[layout.SEQ]).as_py()
            names.append(replace(name, rows=len(part), first_seq=bounds["min"], last_seq=bounds["max"]))
            self.write(names[-1], part)
        return names[0], names[1]

    def marks_beside_all_but(self, late: ObjectName) -> Watermarks:
        """The watermark, seen while one object was not there yet."""
        marks = Watermarks(self.archive)
        hidden = self.root / f".{STREAM}"
        (self.root / late.path).rename(hidden)
        marks.look()
        hidden.rename(self.root / late.path)
        return marks

    def problems_if_late(self, late: ObjectName) -> list[str]:
        """What is wrong if one object was stored after the watermark was seen."""
        self.marks = self.marks_beside_all_but(late)
        return self.verdict().problems

    def verdict(self) -> Verdict:
        return check(self.archive, self.ledger, self.marks, self.created)


@pytest.fixture
def case(nats_server: Callable[..., NatsServer], tmp_path: Path) -> Case:
    return Case(nats_server().url, tmp_path)


def test_what_is_lost_changed_read_twice_or_damaged_is_found_and_nothing_else(case: Case) -> None:
    verdict = case.verdict()
    assert verdict.problems == []
    assert (verdict.acknowledged, verdict.rows, verdict.copies, verdict.watermarks) == (COUNT, COUNT, 0, 1)
    name = case.names()[0]
    path, table = case.root / name.path, case.table(name)
    seqs = table[layout.SEQ].to_pylist()

    at = table.schema.get_field_index(layout.PAYLOAD)
    case.write(name, table.set_column(at, layout.PAYLOAD, pa.array([b"other"] * len(table))))
    changed, unknown = case.verdict().problems
    assert changed.startswith(f"{len(table)} messages have another content: ")
    assert unknown.startswith(f"{len(table)} rows were never published: ")
    case.write(name, table)

    copy = replace(name, rows=5, first_seq=min(seqs[:5]), last_seq=max(seqs[:5]), digest="0123456789abcdef")
    case.write(copy, table.slice(0, 5))
    verdict = case.verdict()
    assert (verdict.problems, verdict.copies) == ([], 5)
    case.write(replace(copy, key="elsewhere"), table.slice(0, 5))
    assert case.verdict().problems == [f"5 messages are read twice: {', '.join(map(str, seqs[:5]))}"]
    for each in (copy, replace(copy, key="elsewhere")):
        (case.root / each.path).unlink()

    foreign = path.with_name("backup.parquet")
    shutil.copy(path, foreign)
    path.write_bytes(path.read_bytes()[:-20])
    first, second, *_ = case.verdict().problems
    assert first.endswith("/backup.parquet")
    assert second.startswith(f"damaged: {name.path}")

    foreign.unlink()
    path.unlink()
    case.marks.seen.clear()
    listed = ", ".join(map(str, seqs[:10]))
    assert case.verdict().problems == [f"{len(seqs)} messages are lost: {listed}, … {seqs[-1]}"]
    assert case.ledger.excuse(set(seqs)) == len(seqs)
    assert case.verdict().problems == [], "the stream lost them first"


def test_a_watermark_that_goes_back_or_promises_too_much_is_a_problem(case: Case) -> None:
    path = case.root / WATERMARK
    mark = json.loads(path.read_text())
    assert mark["seq"] == COUNT
    path.write_text(json.dumps({**mark, "seq": COUNT - 1}))
    case.marks.look()
    assert [problem[:31] for problem in case.verdict().problems] == ["the watermark moved backward: f"]
    path.write_text(json.dumps(mark))
    assert [problem[: len(PROMISED)] for problem in case.problems_if_late(case.names()[-1])] == [PROMISED]


def test_a_watermark_after_a_purge_does_not_promise_what_was_purged(case: Case) -> None:
    """The ack floor passes purged messages at once; a capture that holds some stores them a moment later."""
    middle = COUNT // 2
    case.ledger.removing(range(1, middle + 1))
    parts = [case.split(name, middle) for name in case.names()]
    purged, kept = zip(*parts, strict=True)
    assert case.problems_if_late(purged[0]) == []
    assert [problem[: len(PROMISED)] for problem in case.problems_if_late(kept[0])] == [PROMISED]
    case.created.append("2100-01-01T00:00:00Z")
    case.ledger.removals[0] = replace(case.ledger.removals[0], era=1)  # the other stream was purged
    assert len(case.problems_if_late(purged[0])) == 1


@pytest.mark.parametrize(
    ("purged", "start", "broken"), [(40, 40, False), (40, 39, True), (40, 41, True), (0, 40, True), (40, 0, False)]
)
def test_a_watermark_starts_over_at_the_end_of_a_purge_and_nowhere_else(
    case: Case, purged: int, start: int, broken: bool
) -> None:
    if purged:
        case.ledger.removing(range(1, purged + 1))
    mark = json.loads((case.root / WATERMARK).read_text())
    (case.root / WATERMARK).write_text(json.dumps({**mark, "seq": start, "time": "1970-01-01T00:00:00Z"}))
    case.marks.look()
    assert len(case.verdict().problems) == broken


def test_a_recreated_stream_may_have_the_same_sequences(case: Case) -> None:
    case.ledger.new_era()
    assert case.ledger.excuse({1, 2}) == 0
    case.ledger.add(1, 7)
    assert case.verdict().problems == ["1 messages have another content: 1"]
