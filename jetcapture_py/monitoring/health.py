"""Health of a capture: connected, consuming, decoding, storing, and the reasons of failures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jetcapture_py.capture import side_tasks
from jetcapture_py.monitoring.metrics import gauge
from jetcapture_py.text import age, plural

if TYPE_CHECKING:
    from jetcapture_py.capture.pipeline import Capture

DECODER_STUCK, DECODER_STUCK_PER_MESSAGE = 300.0, 0.1
"""Seconds per batch, or per message if that is longer, after which a decoder counts as stuck and only a restart helps.
The limit is generous so that a slow decoder is not restarted in a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of a capture at one moment."""

    connected: Annotated[bool, gauge("connected", "1 when connected to NATS")]
    consuming: Annotated[bool, gauge("consuming", "1 when the server answers pulls")]
    storing: Annotated[bool, gauge("storing", "1 unless the store is failing or hanging")]
    decoding_seconds: Annotated[float, gauge("decoding_seconds", "Age of the batch in the decoder and key function")]
    trouble: Mapping[str, str]
    """Failing checks with their reasons: running, connected, consuming, decoding and storing."""
    expected: Sequence[str]
    """The checks that fail because the capture starts or drains."""
    stuck: str
    """Why only a restart helps; "" if none is needed."""

    @property
    def ready(self) -> bool:
        return not self.trouble

    @property
    def lines(self) -> Sequence[str]:
        return [f"{check}: {text}" for check, text in self.trouble.items()]


def health(capture: Capture) -> Health:
    """Return the current health."""
    starting, draining, ended = not capture.opened, capture.draining, capture.ended
    messages, seconds = len(capture.archiver.decoding.batch), capture.archiver.decoding.seconds
    connected = capture.opened and ended is None and capture.source.connected
    consuming = connected and capture.source.pulls.consuming and not draining
    decoding = (
        f"a batch of {plural(messages, 'message')} has been in the decoder for {age(seconds)}" if messages else ""
    )
    storing = capture.archiver.uploads.storing.trouble(time.monotonic()) if ended is None else None
    stuck = False
    trouble = {}
    if ended is not None:
        trouble = {"running": f"it has failed: {ended}"} if ended else {"consuming": "drained and ended"}
    else:
        if not connected:
            reason = capture.source.link.problem
            lost = f"no connection to NATS{f': {reason}' if reason else ''}"
            waits = "waiting for the store" if storing is not None else "not connected yet"
            trouble["connected"] = waits if starting else lost
        elif not consuming:
            trouble["consuming"] = "draining, no more pulls" if draining else "the server does not answer pulls"
        if decoding and seconds > side_tasks.DECODER_SLOW:
            trouble["decoding"] = decoding
            stuck = seconds > max(DECODER_STUCK, DECODER_STUCK_PER_MESSAGE * messages)
        if storing is not None:
            trouble["storing"] = storing
    return Health(
        connected=connected,
        consuming=consuming,
        storing=storing is None,
        decoding_seconds=seconds,
        trouble=trouble,
        expected=(*["connected"] * starting, *["consuming"] * draining),
        stuck=f"decoding: {decoding}" if stuck else "",
    )
