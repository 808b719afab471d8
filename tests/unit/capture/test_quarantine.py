"""Quarantined messages are logged when it begins and once a minute, whatever the batches they come in."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.capture import stats
from jetcapture_py.capture.stats import MAX_LOGGED_REASONS, Quarantine
from jetcapture_py.log import FIELDS
from tests.support.running import until


def rows(first_seq: int, *errors: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            layout.SEQ: pa.array(range(first_seq, first_seq + len(errors)), pa.int64()),
            layout.SUBJECT: ["orders"] * len(errors),
            layout.STAGE: ["decode"] * len(errors),
            layout.ERROR: [f"error {error}" for error in errors],
        }
    )


def test_a_line_at_the_beginning_then_summaries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats, "SUMMARY_EVERY", 0.2)
    caplog.set_level(logging.WARNING, "jetcapture")
    quarantine = Quarantine()

    def lines() -> list[dict[str, Any]]:
        assert {record.msg for record in caplog.records} <= {"messages.quarantined"}
        return [getattr(record, FIELDS) for record in caplog.records]

    async def scenario() -> None:
        quarantine.add(rows(1, 1, 1, 1))
        assert lines() == [
            {
                "messages": 3,
                "first_seq": 1,
                "first_stage": "decode",
                "first_error": "error 1",
                "reasons": {"decode: error 1": 3},
            }
        ]
        for seq in range(10, 1010):
            quarantine.add(rows(seq, seq, seq % 10 if seq % 3 else -seq))
        assert len(lines()) == 1
        await until(lambda: len(lines()) == 2, "the summary is logged")
        summary = lines()[1]
        assert (summary["messages"], summary["first_seq"], summary["first_error"]) == (2000, 10, "error 10")
        assert len(summary["reasons"]) == MAX_LOGGED_REASONS + 1
        assert sum(summary["reasons"].values()) == 2000
        await until(lambda: quarantine._timer is None, "it is over")
        quarantine.add(rows(2000, 2000))
        assert len(lines()) == 3, "it begins again"
        quarantine.add(rows(2001, 2001))
        quarantine.end()
        quarantine.end()
        assert [line["messages"] for line in lines()] == [3, 2000, 1, 1]

    asyncio.run(scenario())
