"""When a range of a stream has been read, and when something of it is missing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jetcapture_py.jetstream.stream_reader import _Pull

PLAIN = "$JS.ACK.S.C.1.{seq}.{count}.1700000000000000000.{pending}"
LONG = "$JS.ACK.hub.ACCOUNT.S.C.1.{seq}.{count}.1700000000000000000.{pending}.random"


@pytest.fixture
def pull() -> _Pull:
    return _Pull(cast("Any", None), (), 1, 100)


def reply(form: str, seq: int, count: int, pending: int = 5) -> bytes:
    return form.format(seq=seq, count=count, pending=pending).encode()


@pytest.mark.parametrize("form", [PLAIN, LONG])
def test_it_ends_at_or_beyond_the_last_sequence_or_with_nothing_pending(pull: _Pull, form: str) -> None:
    pull._note(reply(form, 50, 3), 3)
    before = pull.finished
    pull._note(reply(form, 103, 4), 1)
    assert (before, pull.finished, pull.trouble) == (False, True, "")
    other = _Pull(cast("Any", None), (), 1, 100)
    other._note(reply(form, 50, 3, pending=0), 3)
    assert other.finished
    assert not other.trouble


@pytest.mark.parametrize("form", [PLAIN, LONG])
def test_messages_that_the_server_sent_and_that_did_not_come_are_noticed(pull: _Pull, form: str) -> None:
    pull._note(reply(form, 50, 3), 3)
    pull._note(reply(form, 100, 7, pending=0), 3)
    assert pull.trouble
    assert not pull.finished
