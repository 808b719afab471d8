"""Health of a capture: connected, consuming, decoding, storing, and what is wrong.

Safe to call from any thread: it only reads attributes that the capture keeps anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetcapture_py.capture import side_tasks
from jetcapture_py.text import plural

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

DECODER_STUCK, DECODER_STUCK_PER_MESSAGE = 300.0, 0.1
"""Seconds per batch, or per message if that is longer, after which a decoder counts as stuck and only a restart helps.
The limit is generous so that a slow decoder is not restarted in a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`connected` to NATS; `consuming`: the server serves our pulls; `decoding`: the decoder returns in time;
    `storing`: nothing waits for a failing store.

    `trouble` has one line per failing check.
    """

    connected: bool
    consuming: bool
    decoding: bool
    storing: bool
    trouble: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """Whether no check fails."""
        return not self.trouble


def health(state: CaptureState) -> Health:
    """Return the current health."""
    if state.ended is not None:
        line = f"running: it has failed: {state.ended}" if state.ended else "consuming: drained and ended"
        return Health(connected=False, consuming=False, decoding=True, storing=True, trouble=(line,))
    trouble = []
    connected = state.opened and state.source.connected
    undeliverable = state.source.pulls.stuck if state.opened else None
    consuming = connected and state.source.pulls.consuming and not state.draining and undeliverable is None
    decoding = _decoding(state, side_tasks.DECODER_SLOW)
    store = state.stats.storing.trouble(time.monotonic())
    if undeliverable is not None and not state.draining:
        trouble.append(f"consuming: {undeliverable}")
    if not connected:
        trouble.append("connected: no connection to NATS" if state.opened else "connected: not connected yet")
    elif state.draining:
        trouble.append("consuming: draining, no more pulls")
    elif not consuming and undeliverable is None:
        trouble.append("consuming: the server does not answer pulls")
    if decoding is not None:
        trouble.append(decoding)
    if store is not None:
        trouble.append(f"storing: {store}")
    return Health(
        connected=connected,
        consuming=consuming,
        decoding=decoding is None,
        storing=store is None,
        trouble=tuple(trouble),
    )


def stuck(state: CaptureState) -> str | None:
    """Return in one line why a restart is needed; None if it is not."""
    if state.ended is not None:
        return None
    return _decoding(state, max(DECODER_STUCK, DECODER_STUCK_PER_MESSAGE * len(state.preparing)))


def _decoding(state: CaptureState, limit: float) -> str | None:
    """Return what is wrong when a batch has been in the decoder for longer than `limit` seconds."""
    messages, seconds = len(state.preparing), state.decoding_for()
    if not messages or seconds <= limit:
        return None
    return f"decoding: a batch of {plural(messages, 'message')} has been in the decoder for {seconds:.0f} s"
