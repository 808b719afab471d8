"""What the report's page is built from: text that cannot break it, figures as people read them, axes, verdicts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from jetcapture_py.archive.layout import ObjectName
from jetcapture_py.archive.watermark import Watermark
from jetcapture_py.pages.environment import environment
from jetcapture_py.report.facts import Coverage, Facts, Hole, Scope, StoredObject
from jetcapture_py.report.figures import strip, waits
from jetcapture_py.report.page import findings, verdict
from jetcapture_py.verify.ranges import Sequences
from tests.support.report_page import Page

UNDECODED = "could not be decoded and are in quarantine"
MAY = int(datetime(2026, 5, 1, tzinfo=UTC).timestamp())


def stored(bucket: int = MAY, *, key: str | None = "a", bad: bool = False, seq: int = 1, **other: Any) -> StoredObject:
    where: dict[str, Any] = {"stream": "S", "key": key, "bucket": bucket, "digest": "0" * 16, "quarantine": bad}
    name = ObjectName(**where, first_seq=seq, last_seq=seq, rows=1)
    known: dict[str, Any] = {"size": 1000, "modified": bucket + 60.0, "messages": 1, "created": (), "interval": 900}
    known |= {"sealed_by": "age", "oldest": bucket * 1_000_000, "newest": bucket * 1_000_000}
    return StoredObject(name=name, **{**known, **other})


def test_complete_buckets_end_before_the_watermark_and_are_not_of_event_time() -> None:
    ended, later = stored(), stored(MAY + 900)
    late = replace(ended, name=replace(ended.name, event_time=True))
    mark = Watermark(stream="S", created="", seq=9, time=datetime.fromtimestamp(MAY + 1000, UTC))
    assert [Scope(complete=True).has(each, mark) for each in (ended, later, late)] == [True, False, False]
    assert all(Scope().has(each, mark) for each in (ended, later, late))
    assert not Scope(complete=True).has(ended, None)


def life(*holes: Hole, last: int = 10, settled: int | None = None) -> Coverage:
    absent, accounted = {seq for hole in holes for seq in range(hole.first, hole.last + 1)}, Sequences()
    accounted.add(np.array([seq for seq in range(1, last + 1) if seq not in absent]))
    missing = sum(hole.missing for hole in holes if hole.open)
    known: dict[str, Any] = {"created": "", "first": 1, "oldest": None, "newest": None, "removed": 0, "forked": 0}
    known |= {"holes": len(holes), "open_holes": sum(hole.open for hole in holes), "open_missing": missing}
    known |= {"last": last, "settled": settled, "present": last - len(absent), "largest": holes}
    return Coverage(**known, accounted=accounted)


def hole(first: int, last: int, *, beyond: bool = False) -> Hole:
    return Hole(first=first, last=last, after=None, before=None, open=beyond)


def facts(*incarnations: Coverage, objects: int = 1, bad: int = 0, **other: Any) -> Facts:
    known: dict[str, Any] = {"stream": "S", "url": "/archive", "generated": datetime(2026, 5, 2, tzinfo=UTC)}
    known |= {"scope": Scope(), "copies": {}, "mark": None, "older_incarnations": 0, "reasons": ()}
    known["objects"] = [stored(seq=number + 1) for number in range(objects)]
    known["quarantine"] = [stored(bad=True, seq=number + 1) for number in range(bad)]
    return Facts(incarnations=incarnations or (life(),), **{**known, **other})


def rendered(template: str, **values: Any) -> str:
    parts = environment("jetcapture_py.report").from_string('{% import "parts.html" as parts %}' + template)
    return parts.render(**values)


class TestText:
    def test_characters_that_show_nothing_or_turn_text_around_are_made_visible(self) -> None:
        assert rendered("{{ parts.key(none) }}{{ text }}", text="<") == '<span class="none">no key</span>&lt;'
        assert rendered("<p>{{ text }}</p>", text="a\u202eb\x00\x1b") == "<p>a\ufffdb\ufffd\ufffd</p>"
        assert rendered("<p>{{ text }}</p>", text="日本 é") == "<p>日本 é</p>"


class TestCharts:
    def strip(self, given: Coverage) -> Page:
        return Page(rendered("{{ parts.strip(chart) }}", chart=strip(given)))

    def test_a_hole_is_seen_however_small_its_part_is(self) -> None:
        page = self.strip(life(hole(5, 5), hole(2391, 2400), last=2400))
        gaps = [float(each.attributes["height"] or 0) for each in page.root.all("rect", "gap")]
        assert gaps == [70, 220, 700, 220]
        assert len(page.root.all("rect", "stored")) == 2
        assert page.root.one("desc").text == "240 parts of 10 sequences each; 2 of them with holes."


class TestFigures:
    def test_waits_count_messages_and_not_objects(self) -> None:
        few = stored(modified=MAY + 1000.0, messages=4)
        many = stored(modified=MAY + 10.0, messages=96)
        found = waits([few, many], lambda _: 0)[0]
        assert (found.half, found.most, found.all, found.closed) == (10, 10, 1000, 100)
        assert waits([replace(few, messages=6), replace(many, messages=94)], lambda _: 0)[0].most == 1000
        assert waits([stored(modified=MAY - 5.0)], lambda _: 0)[0].all == 0, "a clock that is behind"
        silent = [stored(modified=None), stored(oldest=None), stored(sealed_by="compact")]
        assert waits(silent, lambda _: 0) == {}


VERDICTS: list[tuple[Facts, bool, str]] = [
    (facts(life()), False, "Complete: every sequence from 1 to 10 is stored, and nothing is in quarantine."),
    (facts(life(hole(3, 3))), True, "1 of 10 sequences, in 1 hole, is not stored."),
    (
        facts(life(hole(3, 4), hole(6, 6)), bad=2),
        True,
        f"3 of 10 sequences, in 2 holes, are not stored, and 2 messages {UNDECODED}.",
    ),
    (facts(life(), bad=1), True, "No sequence is missing, but 1 message could not be decoded and is in quarantine."),
    (facts(life(), life()), False, "Complete: no sequence is missing, and nothing is in quarantine."),
    (
        facts(life(hole(8, 9, beyond=True), settled=7)),
        False,
        "Complete: no sequence is missing, and nothing is in quarantine.",
    ),
    (facts(life(), objects=0), True, "The selected part of this archive is empty."),
]


class TestVerdict:
    def test_it_is_one_sentence_that_fits(self) -> None:
        for given, look, sentence in VERDICTS:
            assert verdict(given)[:2] == (look, sentence)

    def test_holes_of_a_filter_are_recognised_by_their_number(self) -> None:
        small = tuple(hole(n, n) for n in range(1, 4000, 2))
        assert "typical of a filter" in verdict(facts(life(*small, last=5000)))[2]
        assert "typical of a filter" not in verdict(facts(life(hole(1, 4000), last=5000)))[2]

    def test_what_needs_a_hand_comes_first(self) -> None:
        given = facts(life(hole(3, 5)), objects=200)
        late = replace(given.objects[0], newest=(given.objects[0].end + 60) * 1_000_000)
        given = replace(given, objects=[late, *given.objects[1:]], copies={late.name: 7}, unread=1)
        chapters = [(True, "coverage"), (True, "coverage"), (True, "objects"), (False, "objects"), (False, "lateness")]
        assert [(each.action, each.chapter) for each in findings(given)] == chapters
