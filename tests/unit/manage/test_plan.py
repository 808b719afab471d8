"""Which changes may delete messages: every setting, in both directions."""

from __future__ import annotations

from typing import Any

from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.stream import ConsumerSection, StreamSection
from jetcapture_py.jetstream.consumer import Difference, consumer_config
from jetcapture_py.manage.plan import FIXED, HARMLESS, RULES, consumer_changes, stream_change

DAY = 86_400 * 10**9
SAFE, MAY, FIX = "safe", "may delete", "cannot be changed"
INACTIVE = {"inactive_threshold": DAY}
STREAM: list[tuple[str, Any, Any, str]] = [
    *(("description", None, "new", SAFE), ("metadata.team", "a", "b", SAFE), ("compression", "none", "s2", SAFE)),
    *(("subjects", ["s.a"], ["s.a", "s.b"], SAFE), ("subjects", ["s.a", "s.*.c"], ["s.>"], SAFE)),
    *(("subjects", ["s.>"], ["s.*"], MAY), ("subjects", ["s.a", "s.b"], ["s.b"], MAY)),
    *(("retention", "interest", "limits", SAFE), ("retention", "limits", "interest", MAY)),
    *(("retention", "limits", "workqueue", FIX), ("retention", "workqueue", "limits", FIX)),
    *((name, 5, 6, SAFE) for name in ("max_consumers", "max_msgs", "max_bytes", "max_age", "num_replicas")),
    *((name, 5, 4, MAY) for name in ("max_consumers", "max_msgs", "max_bytes", "max_age", "num_replicas")),
    *((name, 5, -1, SAFE) for name in ("max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size")),
    *((name, -1, 5, MAY) for name in ("max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size")),
    *(("max_age", DAY, 0, SAFE), ("max_age", 0, DAY, MAY)),
    *(("discard", "old", "new", MAY), ("discard", "new", "old", MAY), ("discard_new_per_subject", None, True, MAY)),
    *(("storage", "file", "memory", FIX), ("no_ack", True, False, SAFE), ("no_ack", None, True, MAY)),
    *(("duplicate_window", 2, 1, SAFE), ("duplicate_window", 1, 2, MAY), ("placement", None, {"cluster": "c"}, MAY)),
    *(("mirror", None, {"name": "O"}, FIX), ("mirror", {"name": "O"}, None, MAY)),
    *(("sources", None, [{"name": "O"}], MAY), ("sources", [{"name": "O"}], [], MAY), ("first_seq", None, 100, FIX)),
    *(("subject_transform", None, {"dest": "x.>"}, MAY), ("republish", None, {"dest": "y.>"}, SAFE)),
    *((name, None, True, SAFE) for name in ("deny_delete", "deny_purge", "allow_direct", "mirror_direct")),
    *((name, True, False, FIX) for name in ("sealed", "deny_delete", "deny_purge", "allow_msg_ttl")),
    *((name, None, True, MAY) for name in ("sealed", "allow_rollup_hdrs", "allow_msg_ttl", "allow_msg_schedules")),
    *(("allow_rollup_hdrs", True, False, MAY), ("subject_delete_marker_ttl", None, DAY, MAY)),
    *((name, None, True, SAFE) for name in ("allow_atomic", "allow_batched")),
    *((name, True, False, MAY) for name in ("allow_atomic", "allow_batched")),
    *(("allow_msg_counter", None, True, FIX), ("allow_msg_schedules", True, False, FIX)),
    *(("persist_mode", None, "async", FIX), ("consumer_limits", None, INACTIVE, MAY)),
    ("consumer_limits", INACTIVE, {"inactive_threshold": 2 * DAY}, SAFE),
    ("consumer_limits", INACTIVE, {"max_ack_pending": 5}, SAFE),
]
CONSUMER: list[tuple[str, Any, Any, str]] = [
    *((name, 1, 2, SAFE) for name in ("ack_wait", "max_ack_pending", "max_batch", "max_bytes", "max_expires")),
    *((name, 2, 1, SAFE) for name in ("ack_wait", "max_ack_pending", "max_batch", "max_bytes", "max_expires")),
    *(("priority_timeout", 1, 2, SAFE), ("description", "a", "b", SAFE), ("metadata.team", "a", None, SAFE)),
    *(("backoff", None, [1, 2], SAFE), ("sample_freq", None, "50", SAFE)),
    *(("pause_until", None, "2100-01-01T00:00:00Z", SAFE), ("max_deliver", 5, -1, SAFE), ("max_deliver", -1, 5, MAY)),
    *(("inactive_threshold", DAY, 2 * DAY, SAFE), ("inactive_threshold", None, 36_500 * DAY, SAFE)),
    *(("inactive_threshold", None, DAY, MAY), ("num_replicas", 3, 0, SAFE), ("num_replicas", 3, 1, MAY)),
    *((name, 1, 2, FIX) for name in sorted(FIXED["consumer"])),
]


def verdict(change: Any) -> str:
    return FIX if change.refusal else MAY if change.may_delete else SAFE


def test_a_change_of_a_stream_may_delete_messages_as_the_table_says() -> None:
    verdicts = [
        (setting, old, new, verdict(stream_change(Difference(name=setting, configured=new, actual=old))))
        for setting, old, new, _ in STREAM
    ]
    assert verdicts == STREAM


def test_a_change_of_a_consumer_may_delete_messages_as_the_table_says() -> None:
    verdicts = []
    for setting, old, new, _ in CONSUMER:
        difference = Difference(name=setting, configured=new, actual=old)
        (change,) = consumer_changes([difference], {}, {"retention": "interest"})
        verdicts.append((setting, old, new, verdict(change)))
    assert verdicts == CONSUMER


def test_filters_may_delete_where_consumers_decide_what_is_kept() -> None:
    difference = Difference(name="filter_subjects", configured=["s.a"], actual=["s.b"])
    for retention, expected in [("limits", SAFE), ("interest", MAY), ("workqueue", MAY)]:
        (change,) = consumer_changes([difference], {}, {"retention": retention})
        assert verdict(change) == expected


def test_any_change_may_make_a_consumer_take_the_threshold_of_its_stream() -> None:
    for threshold, configured, expected in [(None, None, MAY), (DAY, None, SAFE), (None, 36_500 * DAY, SAFE)]:
        differ = [Difference(name="ack_wait", configured=2, actual=1)]
        if configured is not None:
            differ.append(Difference(name="inactive_threshold", configured=configured, actual=threshold))
        stream = {"retention": "limits", "consumer_limits": {"inactive_threshold": DAY}}
        found = consumer_changes(differ, {"inactive_threshold": threshold}, stream)
        assert {verdict(change) for change in found} == {expected}


def test_every_setting_is_judged() -> None:
    judged = {kind: HARMLESS[kind] | FIXED[kind] | RULES[kind].keys() for kind in ("stream", "consumer")}
    assert judged["stream"] == StreamSection.model_fields.keys() - {"name"}
    assert {row[0].partition(".")[0] for row in STREAM} == judged["stream"]
    ordered = SourceConfig(stream="S", consumer="c", mode="ordered")
    names = {*consumer_config(ordered), *ConsumerSection.model_fields, "filter_subjects"}
    assert judged["consumer"] == (names | {"opt_start_seq", "opt_start_time"}) - {"name", "durable_name"}
