"""The `status` command: once or repeatedly, as text or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.monitoring import terminal
from jetcapture_py.monitoring.replica import ask_replica
from jetcapture_py.monitoring.status import CaptureStatus, Observed

EVERY = 2.0
TREND = 180
"""Samples that `--watch` keeps."""


def run(config: Config, *, watch: bool, as_json: bool) -> int:
    """Print the status; return 1 if there are problems, else 0. Raises SourceError."""
    try:
        return asyncio.run(_watch(config, as_json=as_json) if watch else _once(config, as_json=as_json))
    except KeyboardInterrupt:
        return 0


async def _once(config: Config, *, as_json: bool) -> int:
    async with Observed(config) as observed:
        found = await observed.status()
    Console(soft_wrap=True).print(await _View(config, as_json=as_json).of(found))
    return 1 if found.problems else 0


async def _watch(config: Config, *, as_json: bool) -> int:
    """Repeat until interrupted, also while the server is unreachable."""
    console = Console()
    redraws = console.is_terminal and not console.is_dumb_terminal and not as_json
    console.soft_wrap = not redraws  # where a display is redrawn, Rich cuts off what it does not wrap
    live = Live(console=console, auto_refresh=False) if redraws else None
    view = _View(config, as_json=as_json)
    async with Observed(config) as observed:
        with live or contextlib.nullcontext():
            while True:
                try:
                    shown = await view.of(await observed.status())
                except SourceError as error:
                    shown = await view.of(None, str(error))
                if live is not None:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                await asyncio.sleep(EVERY)


class _View:
    """What is printed, with the facts of the replica on this machine, and the trend of what was printed before."""

    def __init__(self, config: Config, *, as_json: bool) -> None:
        self._config, self._as_json = config, as_json
        self._seen: deque[CaptureStatus] = deque(maxlen=TREND)

    async def of(self, status: CaptureStatus | None, problem: str = "") -> Text:
        """Return a status, or the `problem` in place of one, as text or JSON."""
        replica = await asyncio.to_thread(ask_replica, self._config)
        if status is not None:
            self._seen.append(status)
        if self._as_json:
            fields = {"problems": [problem]} if status is None else status.fields()
            return Text(json.dumps({**fields, "replica": replica}))
        return Text("\n".join(terminal.lines(status, problem, replica, self._trend())))

    def _trend(self) -> terminal.Trend:
        if len(self._seen) < 2:
            return {}
        return {
            "lag": [each.lag or 0.0 for each in self._seen],
            "pending": [each.pending for each in self._seen],
            "unacked": [each.unacked for each in self._seen],
        }
