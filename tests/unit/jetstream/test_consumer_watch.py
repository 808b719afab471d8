"""Which answers of the server are about the consumer that is captured from."""

from __future__ import annotations

from jetcapture_py.archive.incarnations import Progress
from jetcapture_py.jetstream.consumer_watch import ConsumerWatch


def followed() -> ConsumerWatch:
    """A watch that has seen a consumer work for a while; the next answer comes at 20 s."""
    watch = ConsumerWatch(Progress(0, 0), 0.0)
    for second in range(1, 20):
        assert watch.continues(Progress(second * 1000, second * 1000 - 500), float(second)) is not False
    return watch


def test_a_consumer_that_starts_again_is_another_one() -> None:
    for progress, continues in (
        (Progress(20_000, 19_500), True),
        (Progress(18_000, 17_900), True),  # a killed server forgets the last moments
        (Progress(0, 0), False),
        (Progress(3_000, 29_000), False),
        (Progress(30_000, 2_000), False),
    ):
        assert followed().continues(progress, 20.0) is continues
    assert ConsumerWatch(Progress(0, 0), 0.0).continues(Progress(50, 50), 1.0) is None, "it had not delivered anything"


def test_a_missing_consumer_is_gone_only_when_distinct_moments_agree() -> None:
    watch = followed()
    assert not any(watch.is_gone(20.0 + step / 100) for step in range(10)), "ten callers that ask at the same moment"
    assert not watch.is_gone(20.6)
    assert watch.is_gone(21.2)


def test_an_answer_between_takes_the_doubt_away() -> None:
    watch = followed()
    assert not any(watch.is_gone(at) for at in (20.0, 20.6))
    assert watch.continues(Progress(21_000, 20_000), 21.0)
    assert not any(watch.is_gone(at) for at in (21.5, 22.1))
    assert watch.is_gone(22.7)
