"""What the process has done so far, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counters since the start: messages, rows, bytes of stored objects, blocks by seal reason, errors and retries."""

    received: int = 0
    redelivered: int = 0
    strays: int = 0
    quarantined: int = 0
    stored_messages: int = 0
    stored_rows: int = 0
    stored_bytes: int = 0
    stored_blocks: int = 0
    acked: int = 0
    sealed_by: Counter[str] = field(default_factory=Counter)
    store_errors: int = 0
    unconfirmed_acks: int = 0

    def fields(self) -> dict[str, Any]:
        """All counters by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "sealed_by": dict(self.sealed_by)}
