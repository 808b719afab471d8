"""An API that passes only the first answer to a request is told from a server that hangs."""

from __future__ import annotations

from jetcapture_py.jetstream.pulls import PullAnswers

OPEN = 10


def test_only_one_answer_passes_if_more_pulls_than_are_open_fall_silent_after_one() -> None:
    answers = PullAnswers(OPEN + 1)
    assert [answers.ended(1, silent=True) for _ in range(OPEN + 1)] == [False] * OPEN + [True]


def test_pulls_that_a_hanging_server_leaves_unanswered_do_not_count() -> None:
    answers = PullAnswers(OPEN + 1)
    ended = [answers.ended(1, silent=True) for _ in range(OPEN)]  # each had one message before
    ended += [answers.ended(0, silent=True) for _ in range(OPEN)]
    assert not any(ended)


def test_one_pull_with_several_answers_shows_that_they_pass() -> None:
    answers = PullAnswers(1)
    assert not answers.ended(2, silent=False)
    assert not answers.ended(1, silent=True)


def test_a_pull_for_one_message_that_got_it_says_nothing() -> None:
    assert not PullAnswers(1).ended(1, silent=False)
