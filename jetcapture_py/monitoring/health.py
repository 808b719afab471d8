"""Whether a capture does its work just now: connected, consuming, decoding, storing, and if not, why.

It may be asked in any thread: everything here is read from attributes that the capture keeps anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jetcapture_py.capture import side_tasks

if TYPE_CHECKING:
    from jetcapture_py.capture.state import CaptureState

DECODER_STUCK, DECODER_STUCK_PER_MESSAGE = 300.0, 0.1
"""Seconds for a batch, or for each of its messages if that is longer, after which a decoder will never return: only a
restart can help. A decoder that is merely slow would be restarted for ever otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`connected` to NATS; `consuming`: the server serves our pulls; `decoding`: the decoder returns in time;
    `storing`: nothing waits for a failing store.

    `trouble` has a line for each that is not so.
    """

    connected: bool
    consuming: bool
    decoding: bool
    storing: bool
    trouble: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """Whether all is well."""
        return not self.trouble


def health(state: CaptureState) -> Health:
    """How the capture is."""
    trouble = []
    connected = state.opened and state.source.connected
    undeliverable = state.source.pulls.stuck if state.opened else None
    consuming = connected and state.source.pulls.consuming and not state.draining and undeliverable is None
    decoding = _decoding(state, side_tasks.DECODER_SLOW)
    store = state.stats.storing.trouble(time.monotonic())
    if undeliverable is not None and not state.draining:
        trouble.append(f"consuming: {undeliverable}")
    if not connected:
        trouble.append("connected: no connection to NATS" if state.opened else "connected: not yet")
    elif state.draining:
        trouble.append("consuming: draining, nothing is pulled any more")
    elif not consuming and undeliverable is None:
        trouble.append("consuming: the server does not answer our pulls")
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
    """Why only a restart can help, in one line; None while it need not."""
    return _decoding(state, max(DECODER_STUCK, DECODER_STUCK_PER_MESSAGE * len(state.preparing)))


def _decoding(state: CaptureState, limit: float) -> str | None:
    """What is wrong when a batch has been in the decoder for longer than `limit` seconds."""
    messages, seconds = len(state.preparing), state.decoding_for()
    if not messages or seconds <= limit:
        return None
    return f"decoding: a batch of {messages} messages has been in the decoder for {seconds:.0f} s"
