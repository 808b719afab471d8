"""A message without a time of its own goes to the quarantine, or takes the stream's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from jetcapture_py.archive import layout
from jetcapture_py.config.units import microseconds_of, moment_of
from tests.support.nats_server import NatsServer
from tests.support.running import (
    capture_all,
    config,
    objects,
    publish,
    rows,
)

Start = Callable[..., NatsServer]


def test_messages_without_a_time_are_in_the_quarantine_or_take_the_streams(nats_server: Start, tmp_path: Path) -> None:
    server = nats_server()
    headers = [("X-At", "2026-05-01T12:00:00Z")], [("X-At", "soon")], None
    asyncio.run(publish(server.url, [("orders.new", b"x", each) for each in headers]))
    block = {"time": "header.X-At", "interval": "1h"}
    asyncio.run(capture_all(config(server.url, tmp_path / "a", block=block)))
    quarantined = rows(tmp_path / "a", quarantine=True)
    assert [row["stage"] for row in quarantined] == ["time", "time"]
    assert all(not name.event_time for name in objects(tmp_path / "a") if name.quarantine)
    assert [row[layout.SEQ] for row in rows(tmp_path / "a")] == [1]

    other = config(server.url, tmp_path / "b", block={**block, "time_fallback": "timestamp"}, source={"consumer": "b"})
    asyncio.run(capture_all(other))
    found = {row[layout.SEQ]: row for row in rows(tmp_path / "b")}
    assert all(name.event_time for name in objects(tmp_path / "b"))
    assert min(name.bucket for name in objects(tmp_path / "b")) == datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
    assert not rows(tmp_path / "b", quarantine=True)
    assert found[1][layout.TIME] == moment_of(microseconds_of(datetime(2026, 5, 1, 12, tzinfo=UTC)))
    assert all(found[seq][layout.TIME] == found[seq][layout.TIMESTAMP] for seq in (2, 3))
