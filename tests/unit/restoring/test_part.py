"""Every message of a range once, in order, to the nanosecond, whatever objects it is in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from jetcapture_py.errors import JetcaptureError
from jetcapture_py.restoring import part, plan
from jetcapture_py.restoring.checks import RestoreSurvey, holes
from jetcapture_py.restoring.part import Reading, last_until, make_part, survey_part
from jetcapture_py.restoring.plan import RestorePlan, plan_restore
from jetcapture_py.store.archive import ArchiveFiles
from tests.support.archives import HOUR, Archive, write_parquet
from tests.support.backups import Entry, entries, inflated
from tests.support.examples import examples

CREATED, LATER = "2026-05-01T00:00:00.123456789Z", "2026-05-01T13:00:00Z"
START = HOUR * 1_000_000


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def archive_of(archive: Archive) -> ArchiveFiles:
    return ArchiveFiles(archive.url, {})


def nanos(seq: int) -> int:
    return seq * 37 % 1000


def write(archive: Archive, seqs: list[int], key: str = "a", *, group: int = 0, created: str = CREATED) -> None:
    """An object whose messages follow from their sequences."""
    columns = {layout.NANOS: pa.array([nanos(seq) for seq in seqs], pa.int16())}
    name = archive.write(seqs, key, payloads=[b"%d" % seq for seq in seqs], columns=columns, created=created)
    if group:
        path = archive.root / name.path
        write_parquet(pq.ParquetFile(path).read(), path, row_group_size=group)


def planned(archive: Archive, first: int = 1, last: int | None = None, created: str | None = None) -> RestorePlan:
    return plan_restore(archive_of(archive), "ORDERS", first=first, last=last, created=created)


def restored(archive: Archive, found: RestorePlan, prefix: str = "") -> list[Entry]:
    """The messages of all ranges, as they are sent."""
    reading = Reading(files=archive_of(archive), prefix=prefix)
    made = [make_part(reading, wanted) for wanted in found.parts]
    messages = [list(entries(inflated(b"".join(chunks)))) for _, chunks in made]
    assert [count for count, _ in made] == [len(each) for each in messages]
    surveys = [survey_part(reading, wanted) for wanted in found.parts]
    assert [0 if each is None else each.counts["messages"] for each in surveys] == [count for count, _ in made]
    return [entry for each in messages for entry in each]


def expected(seqs: list[int]) -> list[Entry]:
    return [Entry(b"orders.new", (START + seq) * 1000 + nanos(seq), seq, b"", b"%d" % seq) for seq in seqs]


blocks = some.lists(
    some.tuples(some.sampled_from("abc"), some.sets(some.integers(1, 60), min_size=1), some.integers(0, 9)),
    min_size=1,
    max_size=8,
)


@examples(cost=2)
@given(blocks, some.integers(1, 2000), some.integers(1, 60), some.integers(1, 60))
def test_ranges_have_every_message_once_and_in_order_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, set[int], int]], size: int, one: int, other: int
) -> None:
    archive = Archive(tmp_path_factory.mktemp("a"))
    for key, seqs, group in found:
        write(archive, sorted(seqs), key, group=group)
    first, last = min(one, other), max(one, other)
    wanted = sorted(seq for seq in set().union(*(seqs for _, seqs, _ in found)) if first <= seq <= last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PART_BYTES", size)
        patch.setattr(plan, "LARGEST_PART_BYTES", size)
        if not wanted:  # the names may still promise some
            with suppress(JetcaptureError):
                assert restored(archive, planned(archive, first, last)) == []
            return
        chosen = planned(archive, first, last)
    for before, after in zip(chosen.parts, chosen.parts[1:], strict=False):
        assert before.last < after.first
    assert restored(archive, chosen) == expected(wanted)


def test_of_copies_the_one_with_nanoseconds_counts(archive: Archive) -> None:
    archive.write([1, 2], "a", payloads=[b"1", b"2"])
    write(archive, [2, 3], "b")
    first, *others = restored(archive, planned(archive))
    assert (first.seq, first.nanoseconds) == (1, (START + 1) * 1000)
    assert others == expected([2, 3])


def test_a_message_of_several_rows_is_one_message_with_its_payload(archive: Archive) -> None:
    numbers = pa.array([None, 0, 1, 2], pa.int32())
    archive.write([1, 2, 2, 2], "a", payloads=[b"1", b"2", None, None], columns={layout.ROW: numbers})
    found = restored(archive, planned(archive))
    assert [(entry.seq, entry.payload) for entry in found] == [(1, b"1"), (2, b"2")]


def test_quarantined_messages_have_their_raw_bytes(archive: Archive) -> None:
    archive.write([1], "a", payloads=[b"good"], headers=[[("A", ["1", "2"]), ("B", [""])]])
    raw = b"NATS/1.0\r\nno colon\r\n\r\n"
    for seq, stage, subject, block in (
        *((2, "decode", "orders.x", None), (3, "headers", "orders.x", raw)),
        (4, "subject", "orders.\\xff.\\xc3", None),
    ):
        columns = {layout.STAGE: [stage], layout.ERROR: ["why"], layout.RAW_HEADERS: pa.array([block], pa.binary())}
        archive.write([seq], quarantine=True, subject=subject, payloads=[b"\xff%d" % seq], columns=columns)
    found = restored(archive, planned(archive))
    assert [entry.header for entry in found] == [b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: \r\n\r\n", b"", raw, b""]
    assert [entry.payload for entry in found] == [b"good", b"\xff2", b"\xff3", b"\xff4"]
    assert [entry.name for entry in found] == [b"orders.new", b"orders.x", b"orders.x", b"orders.\xff.\xc3"]
    assert restored(archive, planned(archive), "test.eu.")[0].name == b"test.eu.orders.new"


def test_a_survey_counts_gaps_copies_and_the_quarantine_and_finds_a_time(archive: Archive) -> None:
    write(archive, [3, 4, 7, 8, 20], "a")
    write(archive, [7, 8, 9], "b")
    archive.write([10], quarantine=True, columns={layout.STAGE: ["decode"], layout.RAW_HEADERS: pa.nulls(1)})
    (wanted,) = planned(archive).parts
    reading = Reading(files=archive_of(archive), by_subject=True, until=(START + 9) * 1000 + nanos(9))
    survey = RestoreSurvey.of([survey_part(reading, wanted)], 1, 0)
    assert (survey.messages, survey.first, survey.last, survey.copies, survey.quarantined) == (7, 3, 20, 2, 1)
    assert (survey.subjects, survey.later) == ({"orders.new": 7}, 2)
    absent = ["11 sequences between 3 and 20: 5 to 6, 11 to 19", "2 sequences at the beginning: 1 to 2"]
    assert [sequences for sequences, _ in survey.absent] == absent
    assert last_until(reading, wanted) == 9
    assert last_until(replace(reading, until=(START + 9) * 1000 + nanos(9) - 1), wanted) == 8


def test_the_largest_message_counts_with_its_headers(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_ROWS", 2)
    headers = [None, None, [("A", ["1" * 100])]]
    archive.write([1, 2, 3], payloads=[b"x" * 10, b"y" * 50, b"z"], headers=headers)
    (wanted,) = planned(archive).parts
    survey = survey_part(Reading(files=archive_of(archive), by_size=True), wanted)
    assert survey is not None
    assert survey.largest == len(b"NATS/1.0\r\nA: \r\n\r\n") + 100 + 1


def test_schedules_are_left_out_and_are_no_gaps(archive: Archive) -> None:
    schedule, fired = [("nats-Schedule", ["@every 1s"])], [("Nats-Schedule-Next", ["purge"])]
    archive.write([1, 2, 3, 4], headers=[schedule, None, [("A", ["1"]), *schedule], fired])
    raw = {layout.RAW_HEADERS: pa.array([b"NATS/1.0\r\nodd\r\nNats-Schedule: @every 1s\r\n\r\n"], pa.binary())}
    archive.write([5], quarantine=True, columns={layout.STAGE: ["headers"], **raw})
    (wanted,) = planned(archive).parts
    reading = Reading(files=archive_of(archive), by_subject=True)
    assert RestoreSurvey.of([survey_part(reading, wanted)], 1, 5).messages == 5
    for by_size in (False, True):
        without = replace(reading, without_schedules=True, by_size=by_size)
        survey = RestoreSurvey.of([survey_part(without, wanted)], 1, 5)
        assert (survey.messages, survey.schedules, survey.first, survey.last) == (2, 3, 1, 5)
        assert (survey.subjects, holes(survey, "ORDERS")) == ({"orders.new": 2}, None)
        alone = RestoreSurvey.of([survey_part(without, replace(wanted, last=1))], 1, 0)
        assert (alone.messages, alone.schedules, alone.last) == (0, 1, 1)
    count, chunks = make_part(without, wanted)
    assert (count, [entry.seq for entry in entries(inflated(b"".join(chunks)))]) == (2, [2, 4])


def test_a_stream_that_was_created_again_is_restored_by_incarnation(archive: Archive) -> None:
    write(archive, [1, 2, 3], "a")
    later = [START + 4_000_000_000 + seq for seq in (1, 2)]
    archive.write([1, 2], "a", timestamps=later, payloads=[b"one", b"two"], created=LATER)
    found = planned(archive)
    assert (found.created, found.others) == (LATER, (CREATED,))
    assert [entry.payload for entry in restored(archive, found)] == [b"one", b"two"]
    assert restored(archive, planned(archive, created="2026-05-01T00")) == expected([1, 2, 3])
    with pytest.raises(JetcaptureError, match="2 incarnations of stream ORDERS"):
        planned(archive, created="2026-05-01")


def test_an_object_of_two_incarnations_is_divided_by_time(archive: Archive) -> None:
    later = START + 4_000_000_000
    both = f"{CREATED},{LATER}"
    archive.write([1, 1, 2, 2], "a", timestamps=[START + 1, later, START + 2, later + 1], created=both)
    assert [entry.nanoseconds for entry in restored(archive, planned(archive))] == [later * 1000, (later + 1) * 1000]
    older = restored(archive, planned(archive, created=CREATED))
    assert [entry.nanoseconds for entry in older] == [(START + 1) * 1000, (START + 2) * 1000]


def test_a_stream_that_continues_the_sequences_of_an_earlier_one_is_restored_with_it(archive: Archive) -> None:
    write(archive, [1, 2, 3, 4, 5], "a")
    write(archive, [6, 7, 8], "a", created=LATER)
    for created in (None, LATER):
        found = planned(archive, created=created)
        assert (found.created, found.continued, found.others, found.begins) == (LATER, (CREATED,), (), 1)
        assert restored(archive, found) == expected(list(range(1, 9)))
    assert restored(archive, planned(archive, 4, 7)) == expected([4, 5, 6, 7])
    assert restored(archive, planned(archive, created=CREATED)) == expected([1, 2, 3, 4, 5])
    again = "2026-05-01T14:00:00Z"
    write(archive, [9], "b", created=again)
    found = planned(archive)
    assert (found.created, found.continued) == (again, (CREATED, LATER))
    assert restored(archive, found) == expected(list(range(1, 10)))


def test_what_cannot_be_restored_is_said_in_one_line(archive: Archive) -> None:
    files = archive_of(archive)
    write(archive, [1, 2])
    with pytest.raises(JetcaptureError, match="no messages in this range"):
        planned(archive, 3)
    with pytest.raises(JetcaptureError, match=r"no archive of stream OTHER under .*; there are: ORDERS"):
        plan_restore(files, "OTHER", first=1, last=None, created=None)
    name = archive.write([3])
    path = archive.root / name.path
    write_parquet(pq.ParquetFile(path).read().drop_columns([layout.PAYLOAD]), path)
    with pytest.raises(JetcaptureError, match=r"1 object of stream ORDERS were stored without payload .*keep_payload"):
        planned(archive)
    path.rename(path.with_suffix(".csv"))
    with pytest.raises(JetcaptureError, match=r"1 object of stream ORDERS in csv: only messages .* in Parquet"):
        planned(archive)
    (wanted,) = planned(archive, 1, 2).parts
    assert len(wanted.objects) == 1
    archive.write([2, 3], "b", timestamps=[START + 77, START + 78])
    with pytest.raises(JetcaptureError, match="sequence 2 has two messages"):
        restored(archive, planned(archive, 1, 2))


def test_fields_that_are_called_like_columns_of_the_quarantine_are_not_headers(archive: Archive) -> None:
    columns = {"raw_headers": pa.array([1, 2]), "stage": pa.array(["subject"] * 2)}
    columns |= {layout.NANOS: pa.array([nanos(1), nanos(2)], pa.int16())}
    archive.write([1, 2], "a", payloads=[b"1", b"2"], columns=columns, created=CREATED)
    assert restored(archive, planned(archive)) == expected([1, 2])
