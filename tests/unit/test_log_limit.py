from __future__ import annotations

from jetcapture_py.log_limit import LogLimit


def test_what_happens_often_is_logged_now_and_then_with_its_count() -> None:
    limit = LogLimit(every=10.0)
    assert limit.due(0.0) == 1
    assert [limit.due(float(second)) for second in range(1, 10)] == [0] * 9
    assert limit.due(10.0, 5) == 14
    assert limit.due(30.0, 0) == 0
    assert limit.due(30.0, 2) == 2
