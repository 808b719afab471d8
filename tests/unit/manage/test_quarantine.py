"""`quarantine show`: which messages have a sequence."""

from __future__ import annotations

from pathlib import Path

from jetcapture_py.config.model import parse
from jetcapture_py.manage.quarantine import run_show
from tests.support.archives import HOUR, Archive


def test_copies_in_buckets_of_two_lengths_are_one_message_and_two_of_a_recreated_stream_are_two(tmp_path: Path) -> None:
    archive, columns = Archive(tmp_path), {"stage": ["decode"], "error": ["truncated"]}
    for bucket, time in ((HOUR, 0), (HOUR - 900, 0), (HOUR, 1)):
        archive.write(
            [5], bucket=bucket, timestamps=[HOUR * 1_000_000 + time], quarantine=True, columns=columns, payloads=[b"{"]
        )
    config = parse({"source": {"stream": "ORDERS", "consumer": "archive"}, "store": {"url": str(tmp_path)}})
    records = list(run_show(config, 5).records)
    assert [record["timestamp"] for record in records] == ["2026-05-01T12:00:00Z", "2026-05-01T12:00:00.000001Z"]
