"""Whether a capture does its work just now: connected, consuming, storing, and if not, why."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetcapture_py.capture import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`connected` to NATS; `consuming`: the server serves our pulls; `storing`: nothing waits for a failing store.

    `trouble` has a line for each that is not so.
    """

    connected: bool
    consuming: bool
    storing: bool
    trouble: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """Whether all is well."""
        return not self.trouble


def health(capture: Capture) -> Health:
    """How the capture is. Call it in its event loop."""
    trouble = []
    connected = capture.opened and capture.source.connected
    stuck = capture.source.stuck if capture.opened else None
    consuming = connected and capture.source.consuming and not capture.draining and stuck is None
    store = capture.stats.storing.trouble(asyncio.get_running_loop().time())
    if stuck is not None and not capture.draining:
        trouble.append(f"consuming: {stuck}")
    if not connected:
        trouble.append("connected: no connection to NATS" if capture.opened else "connected: not yet")
    elif capture.draining:
        trouble.append("consuming: draining, nothing is pulled any more")
    elif not consuming and stuck is None:
        trouble.append("consuming: the server does not answer our pulls")
    if store is not None:
        trouble.append(f"storing: {store}")
    return Health(connected=connected, consuming=consuming, storing=store is None, trouble=tuple(trouble))
