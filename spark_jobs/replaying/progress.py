"""A replay's progress bar. It reads the target streams' state, so it works wherever the tasks run."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jetcapture_py.config.model import NatsConfig
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.read_session import ReadSession
from spark_jobs.replaying.target import Stream

_INTERVAL = 0.5
_CONNECT_TIMEOUT = 20.0


@contextmanager
def progress(
    login: NatsConfig, streams: Sequence[Stream], total: int, console: Console | None = None
) -> Iterator[None]:
    """Show how many of `total` messages the streams have stored since they were listed.

    Only on a terminal. Inaccurate if others publish or streams drop duplicates.
    """
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        watch = _Watch(login, streams, lambda done: bar.update(task, completed=min(done, total)))
        watch.start()
        try:
            yield
        finally:
            watch.stop()


class _Watch(threading.Thread):
    """Polls the streams and reports to `at`; keeps polling while the server is unreachable."""

    def __init__(self, login: NatsConfig, streams: Sequence[Stream], at: Callable[[int], None]) -> None:
        super().__init__(name="replay progress", daemon=True)
        self._login, self._streams, self._at = login, streams, at
        self._ended = threading.Event()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Poll until stopped."""
        with suppress(SourceError):  # the publishing tasks report it
            asyncio.run(self._watch())

    async def _watch(self) -> None:
        async with ReadSession(self._login, "jetcapture replay", timeout=_CONNECT_TIMEOUT) as session:
            while not await asyncio.to_thread(self._ended.wait, _INTERVAL):
                with suppress(UnavailableError, ApiError):
                    lasts = [await session.api.request(f"STREAM.INFO.{stream.name}") for stream in self._streams]
                    before = sum(stream.last for stream in self._streams)
                    self._at(sum(info["state"]["last_seq"] for info in lasts) - before)
