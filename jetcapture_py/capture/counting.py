"""Count and log what the pipeline has done."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.archive import layout
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.capture.blocks import Block
from jetcapture_py.capture.state import CaptureState
from jetcapture_py.capture.stats import Stats
from jetcapture_py.log import event
from jetcapture_py.transform.prepare import Prepared

log = logging.getLogger("jetcapture.capture")


def count_prepared(stats: Stats, prepared: Prepared) -> None:
    """Count a batch that has been put into blocks."""
    stats.received += prepared.messages
    stats.redelivered += prepared.redelivered
    stats.strays += prepared.strays
    stats.quarantined += prepared.quarantine.num_rows
    if prepared.strays:
        event(log, logging.WARNING, "receive.strays", frames=prepared.strays)
    if prepared.quarantine.num_rows:
        first = prepared.quarantine.slice(0, 1).to_pylist()[0]
        event(
            log,
            logging.WARNING,
            "messages.quarantined",
            messages=prepared.quarantine.num_rows,
            first_seq=first[layout.SEQ],
            first_stage=first["stage"],
            first_error=first["error"],
        )


def count_stored(state: CaptureState, stored: list[tuple[Block, EncodedBlock]], *, confirmed: bool) -> None:
    """Count and log blocks that are stored, and acknowledged unless the server has not `confirmed` it."""
    stats = state.stats
    messages = sum(encoded.messages for _, encoded in stored)
    rows = sum(encoded.name.rows for _, encoded in stored)
    size = sum(encoded.data.size for _, encoded in stored)
    stats.stored_blocks += len(stored)
    stats.stored_messages += messages
    stats.stored_rows += rows
    stats.stored_bytes += size
    stats.acked += messages if confirmed else 0
    state.last_object = stored[-1][1].name.path, datetime.now(UTC)
    reasons = ",".join(sorted({block.sealed_by for block, _ in stored}))
    fields: dict[str, Any] = {
        "blocks": len(stored),
        "messages": messages,
        "rows": rows,
        "bytes": size,
        "sealed_by": reasons,
    }
    if len(stored) == 1:
        fields["object"] = stored[0][1].name.path
    event(log, logging.INFO, "blocks.stored", **fields)
