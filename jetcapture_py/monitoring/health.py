"""Health of a capture: connected, consuming, decoding, storing, and what is wrong.

Safe to call from any thread: it only reads attributes that the capture keeps anyway.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetcapture_py.capture import side_tasks
from jetcapture_py.text import age, plural

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

DECODER_STUCK, DECODER_STUCK_PER_MESSAGE = 300.0, 0.1
"""Seconds per batch, or per message if that is longer, after which a decoder counts as stuck and only a restart helps.
The limit is generous so that a slow decoder is not restarted in a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of a capture at one moment."""

    connected: bool
    """To NATS."""
    consuming: bool
    """The server serves our pulls."""
    storing: bool
    """Nothing waits for a failing store."""
    trouble: Mapping[str, str]
    """The checks that fail, and why: running, connected, consuming, decoding and storing."""
    expected: Container[str]
    """The checks that fail because the capture starts or drains."""

    @property
    def ready(self) -> bool:
        return not self.trouble

    @property
    def lines(self) -> Sequence[str]:
        return [f"{check}: {text}" for check, text in self.trouble.items()]


def health(state: CaptureState) -> Health:
    """Return the current health."""
    expected = {*(() if state.opened else ("connected",)), *(("consuming",) if state.draining else ())}
    if state.ended is not None:
        failed = {"running": f"it has failed: {state.ended}"}
        trouble = failed if state.ended else {"consuming": "drained and ended"}
        return Health(connected=False, consuming=False, storing=True, trouble=trouble, expected=expected)
    trouble = {}
    connected = state.opened and state.source.connected
    consuming = connected and state.source.pulls.consuming and not state.draining
    if not connected:
        reason = state.source.connection_error
        lost = f"no connection to NATS{f': {reason}' if reason else ''}"
        trouble["connected"] = lost if state.opened else "not connected yet"
    elif state.draining:
        trouble["consuming"] = "draining, no more pulls"
    elif not consuming:
        trouble["consuming"] = "the server does not answer pulls"
    if (decoding := _decoding(state, side_tasks.DECODER_SLOW)) is not None:
        trouble["decoding"] = decoding
    if (storing := state.stats.storing.trouble(time.monotonic())) is not None:
        trouble["storing"] = storing
    return Health(connected=connected, consuming=consuming, storing=storing is None, trouble=trouble, expected=expected)


def stuck(state: CaptureState) -> str | None:
    """Return in one line why a restart is needed; None if it is not."""
    if state.ended is not None:
        return None
    reason = _decoding(state, max(DECODER_STUCK, DECODER_STUCK_PER_MESSAGE * len(state.preparing)))
    return None if reason is None else f"decoding: {reason}"


def _decoding(state: CaptureState, limit: float) -> str | None:
    """Return what is wrong when a batch has been in the decoder for longer than `limit` seconds."""
    messages, seconds = len(state.preparing), state.decoding_for()
    if not messages or seconds <= limit:
        return None
    return f"a batch of {plural(messages, 'message')} has been in the decoder for {age(seconds)}"
