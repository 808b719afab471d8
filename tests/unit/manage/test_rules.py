"""What a change of a consumer would make the server delete, from what the server says of stream and consumers."""

from __future__ import annotations

from typing import Any

import pytest

from jetcapture_py.jetstream.consumer import Difference, consumer_state
from jetcapture_py.manage.plan import ConsumerChange

STORED = {"s.a": 10, "s.b.1": 1, "s.b.2": 2, "s.b.3": 3, "s.b.4": 4}
KEEPS = {"durable_name": "other"}


def refused(
    before: list[str],
    after: list[str],
    *others: tuple[dict[str, Any], int],
    retention: str = "interest",
    pending: int = 20,
    delivered: int = 0,
) -> str | None:
    """Change the filters of a consumer beside others, each with its settings and the last sequence it received."""
    info = {
        "config": {"filter_subjects": before},
        "num_pending": pending,
        "delivered": {"stream_seq": delivered},
    }
    stream = {"state": {"first_seq": 5}}
    change = ConsumerChange(stream, {"retention": retention}, consumer_state(info), {"filter_subjects": after})
    for settings, seq in others:
        change.add_consumer({"config": settings, "delivered": {"stream_seq": seq}})
    for subject, count in STORED.items():
        change.add(subject, count)
    refusal = change.refusal([Difference(name="filter_subjects", configured=after, actual=before)])
    assert refusal is None or refusal[0] == "filter_subjects"
    return refusal and refusal[1]


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ([], "10 messages (s.b.1, s.b.2, s.b.3, …)"),
        ([(KEEPS, 4)], None),
        ([(KEEPS, 5)], "up to 10 messages"),
        ([({**KEEPS, "filter_subjects": ["s.b.*"]}, 4)], None),
        ([({**KEEPS, "filter_subjects": ["s.b.1"]}, 4)], "9 messages (s.b.2, s.b.3, s.b.4)"),
        ([({**KEEPS, "filter_subjects": ["s.a"]}, 4)], "10 messages"),
        ([({}, 4)], "up to 10 messages"),
        ([({**KEEPS, "inactive_threshold": 10**9}, 4)], "up to 10 messages"),
        ([(KEEPS, 5), (KEEPS, 4)], None),
    ],
)
def test_only_a_durable_consumer_that_received_nothing_is_sure_to_keep_messages(
    others: list[tuple[dict[str, Any], int]], lost: str | None
) -> None:
    refusal = refused([], ["s.a"], *others)
    assert refusal is None if lost is None else f"the server would delete {lost}" in str(refusal)


def test_a_consumer_that_needs_nothing_more_leaves_messages_to_others() -> None:
    assert refused([], ["s.a"], (KEEPS, 7), pending=0) is None
    assert refused([], ["s.a"], pending=0) is not None  # the server still keeps them, for whatever reason


def test_filters_may_select_what_is_not_stored_or_still_comes() -> None:
    for retention in ("interest", "workqueue"):
        assert refused(["s.>"], ["s.a", "s.b.*", "s.c"], retention=retention, delivered=9) is None
        assert refused(["s.a"], ["s.a", "s.b.*"], retention=retention, delivered=4) is None
    past = refused(["s.a"], ["s.a", "s.b.*"], retention="workqueue", delivered=5)
    assert "the consumer is past up to 10 messages (s.b.1, s.b.2, s.b.3, …)" in str(past)
    assert refused(["s.>"], ["s.a"], retention="workqueue", delivered=9) is None
