"""Count and log what the pipeline has done."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.capture.recent import MAX_OBJECTS, RecentObject
from jetcapture_py.capture.state import CaptureState, StoredBlock
from jetcapture_py.log import event
from jetcapture_py.transform.prepare import Prepared

log = logging.getLogger("jetcapture.capture")


def count_prepared(state: CaptureState, prepared: Prepared) -> None:
    """Count a batch that has been put into blocks."""
    stats = state.stats
    stats.received += prepared.messages
    stats.redelivered += prepared.redelivered
    stats.strays += prepared.strays
    stats.quarantined += prepared.quarantine.num_rows
    if frames := state.stray_limit.due(time.monotonic(), prepared.strays):
        event(log, logging.WARNING, "receive.strays", frames=frames)
    if prepared.quarantine.num_rows:
        reasons = state.recent.quarantined(prepared.quarantine, datetime.now(UTC))
        state.quarantine_log.add(prepared.quarantine, reasons)


def count_stored(state: CaptureState, stored: list[StoredBlock], *, confirmed: bool) -> None:
    """Count and log blocks that are stored, and acknowledged unless the server has not `confirmed` it."""
    stats = state.stats
    messages = sum(each.encoded.messages for each in stored)
    rows = sum(each.encoded.name.rows for each in stored)
    size = sum(each.encoded.data.size for each in stored)
    stats.stored_blocks += len(stored)
    stats.stored_messages += messages
    stats.stored_rows += rows
    stats.stored_bytes += size
    stats.acked += messages if confirmed else 0
    now = datetime.now(UTC)
    state.last_object = stored[-1].encoded.name.path, now
    for each in stored[-MAX_OBJECTS:]:
        state.recent.objects.appendleft(_stored_object(each, now))
    reasons = ",".join(sorted({each.block.sealed_by for each in stored}))
    fields: dict[str, Any] = {
        "blocks": len(stored),
        "messages": messages,
        "rows": rows,
        "bytes": size,
        "sealed_by": reasons,
    }
    if len(stored) == 1:
        fields["object"] = stored[0].encoded.name.path
    event(log, logging.INFO, "blocks.stored", **fields)


def _stored_object(stored: StoredBlock, now: datetime) -> RecentObject:
    encoded = stored.encoded
    return RecentObject(
        path=encoded.name.path,
        location=stored.location,
        messages=encoded.messages,
        rows=encoded.name.rows,
        bytes=encoded.data.size,
        sealed_by=stored.block.sealed_by,
        acknowledged=now,
    )
