"""Messages of a stream that was restored from a backup, or recreated, are told from those of the stream before it."""

from __future__ import annotations

import numpy as np

from jetcapture_py.config.units import microseconds_of, parse_time
from jetcapture_py.verify.scope import Incarnation

BEFORE, CREATED = "2026-05-01T11:00:00Z", "2026-05-01T12:00:00Z"
OLDEST, SINCE = (microseconds_of(parse_time(text)) for text in (BEFORE, CREATED))
RESTORED = Incarnation.of(CREATED, mirror=False, restored=3, oldest=OLDEST)
RECREATED = Incarnation.of(CREATED, mirror=False)


def included(life: Incarnation, *messages: tuple[int, int]) -> list[bool]:
    seqs, times = np.array(messages, np.int64).T
    found: list[bool] = life.includes(seqs, times).tolist()
    return found


def test_a_recreated_stream_has_only_messages_that_are_as_young() -> None:
    assert included(RECREATED, (1, SINCE - 1), (1, SINCE)) == [False, True]
    assert RECREATED.holds("", OLDEST, SINCE - 1) is False
    assert RECREATED.holds("", SINCE, SINCE + 5) is True
    assert RECREATED.holds("", OLDEST, SINCE) is None


def test_a_restored_stream_also_has_those_that_were_in_the_backup() -> None:
    assert included(RESTORED, (1, OLDEST), (3, SINCE - 1), (4, SINCE)) == [True, True, True]
    assert RESTORED.holds(BEFORE, OLDEST, SINCE - 1) is None, "its rows decide"


def test_what_the_earlier_stream_received_after_the_backup_was_made_is_not_in_the_restored_one() -> None:
    assert included(RESTORED, (4, SINCE - 1)) == [False]


def test_a_stream_before_the_one_that_was_backed_up_does_not_count() -> None:
    assert included(RESTORED, (1, OLDEST - 1)) == [False]
    assert RESTORED.holds(BEFORE, OLDEST - 9, OLDEST - 1) is False


def test_an_objects_footer_decides_where_it_names_the_stream() -> None:
    assert RESTORED.holds(CREATED, OLDEST - 9, OLDEST - 1) is True
    mirror = Incarnation.of(CREATED, mirror=True)
    assert [mirror.holds(created, OLDEST, SINCE) for created in (CREATED, "", BEFORE)] == [True, True, False]


def test_what_compaction_has_merged_belongs_to_a_mirror_that_was_created_again() -> None:
    mirror, merged = Incarnation.of(CREATED, mirror=True), f"{BEFORE},{CREATED}"
    assert mirror.holds(merged, OLDEST, SINCE) is True
    assert mirror.holds(f"{BEFORE},2026-05-01T11:30:00Z", OLDEST, SINCE) is False
    assert RECREATED.holds(merged, OLDEST, SINCE) is None, "its rows decide"
