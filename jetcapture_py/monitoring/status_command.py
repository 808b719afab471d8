"""The `status` command: once or repeatedly, as text or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.monitoring.status import CaptureStatus, Observed

EVERY = 2.0


def run(config: Config, *, watch: bool, as_json: bool) -> int:
    """Print the status; return 1 when something could not be read, else 0. Raises SourceError."""
    try:
        return asyncio.run(_watch(config, as_json=as_json) if watch else _once(config, as_json=as_json))
    except KeyboardInterrupt:
        return 0


async def _once(config: Config, *, as_json: bool) -> int:
    async with Observed(config) as observed:
        found = await observed.status()
    Console(soft_wrap=True).print(_shown(found, as_json=as_json))
    return 1 if found.problems else 0


async def _watch(config: Config, *, as_json: bool) -> int:
    """Repeat until interrupted, also while the server is unreachable."""
    console = Console(soft_wrap=True)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    async with Observed(config) as observed:
        with live or contextlib.nullcontext():
            while True:
                try:
                    shown = _shown(await observed.status(), as_json=as_json)
                except SourceError as error:
                    shown = Text(json.dumps({"problems": [str(error)]}) if as_json else str(error))
                if live is not None:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                await asyncio.sleep(EVERY)


def _shown(status: CaptureStatus, *, as_json: bool) -> Text:
    if as_json:
        return Text(json.dumps(status.fields()))
    lines = [f"{name:<13}{value:<22}{meaning}".rstrip() for name, value, meaning in status.lines()]
    return Text("\n".join([f"{status.stream} / {status.consumer} at {status.time:%Y-%m-%d %H:%M:%S} UTC", *lines]))
