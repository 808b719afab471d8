"""A restore knows what has expired or was erased: it is not missing, and does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from jetcapture_py.archive import stream_config
from jetcapture_py.archive.removed import Expired, expired_path
from jetcapture_py.archive.stream_config import StreamConfig
from jetcapture_py.restoring import command
from jetcapture_py.store import LocalStore
from tests.integration.restoring.test_refusals import CREATED, error, kept
from tests.support.archives import HOUR, Archive
from tests.support.erasing import bury
from tests.support.nats_server import NatsServer
from tests.support.restores import main, request, state_of

__all__ = ["kept"]
MAY = datetime(2026, 5, 1, 13, tzinfo=UTC)


@pytest.fixture
def shortened(kept: Archive) -> Archive:
    """Messages 1 to 10 of the archive have expired; of 11 to 30, 13 and 17 were erased, 17 not yet from its object."""
    (name,) = kept.root.glob("ORDERS/**/*.parquet")
    name.unlink()
    for seqs in ([*range(11, 16), 17], [*range(18, 31)]):
        kept.write([seq for seq in seqs if seq != 13], created=CREATED)
    kept.write([16], created=CREATED, quarantine=False, key="b")
    expired = Expired(stream="ORDERS", until=MAY).with_messages(CREATED, np.arange(1, 11), MAY, MAY)
    LocalStore(str(kept.root)).write_note(expired_path("ORDERS"), expired.encode())
    times = {seq: datetime.fromtimestamp(HOUR, UTC).replace(microsecond=seq) for seq in (13, 17)}
    bury(kept.root, [{"_nats_seq": seq, "_nats_timestamp": time} for seq, time in times.items()])
    return kept


def test_what_was_removed_on_purpose_is_no_hole_and_does_not_come_back(
    nats_server: Callable[..., NatsServer], shortened: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    server = nats_server()
    assert main([shortened.url, "ORDERS", "--servers", server.url, "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "12 sequences have expired or were erased; the stream begins later" in lines
    assert not [line for line in lines if "missing" in line]
    assert error(capfd, shortened, server.url, "--to-seq", "9") == (
        "the archive of stream ORDERS has no messages in this range; 10 messages up to 2026-05-01T13:00:00Z expired"
    )
    assert main([shortened.url, "ORDERS", "--servers", server.url]) == 0
    state = asyncio.run(state_of(server.url, "ORDERS"))
    assert (state["first_seq"], state["last_seq"], state["messages"]) == (11, 30, 18)
    assert sorted(state["deleted"]) == [13, 17]


@pytest.mark.parametrize("continues", [True, False])
def test_an_erased_message_of_a_mirror_that_was_created_again_is_no_hole(kept: Archive, *, continues: bool) -> None:
    """It is older than the mirror, and than the mirror of that name before."""
    again = "2026-06-01T00:00:00Z"
    kept.write([1, 2, 4], created=again)
    bury(kept.root, [{"_nats_seq": 3, "_nats_timestamp": datetime.fromtimestamp(HOUR, UTC).replace(microsecond=3)}])
    config = StreamConfig(stream="ORDERS", created=again, config={"subjects": ["orders.>"]}, continues=continues)
    (kept.root / stream_config.path("ORDERS", again)).write_bytes(config.encode())
    prepared = command.prepare(request(kept.url))
    survey = prepared.survey
    assert (prepared.plan.created, survey.messages, bool(survey.absent)) == (again, 3, not continues)


def test_what_a_compaction_replaces_while_it_is_surveyed_is_planned_again(
    kept: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = command.survey_part

    def compacted(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(command, "survey_part", survey)
        (replaced,) = kept.root.glob("ORDERS/**/*.parquet")
        kept.write(list(range(1, 12)), created=CREATED)
        replaced.unlink()
        return survey(*arguments, **options)

    monkeypatch.setattr(command, "survey_part", compacted)
    prepared = command.prepare(request(kept.url))
    assert (prepared.survey.messages, len(prepared.plan.parts[0].objects)) == (11, 1)


def test_other_gaps_are_still_holes(
    nats_server: Callable[..., NatsServer], shortened: Archive, capfd: pytest.CaptureFixture[str]
) -> None:
    next(shortened.root.glob("ORDERS/key=b/**/*.parquet")).unlink()
    (shortened.root / expired_path("ORDERS")).unlink()
    text = error(capfd, shortened, nats_server().url, "--from-seq", "9")
    assert text.startswith("the archive of stream ORDERS lacks 1 sequence between 11 and 30: 16; 2 sequences at the ")
    assert "at the beginning: 9 to 10" in text
