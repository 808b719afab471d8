"""A NATS connection for synchronous code, with an event loop in its own thread so that pings are always answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from jetcapture_py.jetstream.read_session import ReadSession
from spark_jobs.datasource.options import ReadOptions

T = TypeVar("T")


class Session:
    """A `ReadSession` whose event loop runs in a thread; a context manager. Raises SourceError without a server."""

    def __init__(self, options: ReadOptions, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nats", daemon=True)
        self._thread.start()
        self.reads = ReadSession(options.nats, name, timeout=options.timeout)
        try:
            self.run(self.reads.open())
        except BaseException:
            self._end()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the connection's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Close the connection and end the thread."""
        try:
            self.run(self._close())
        finally:
            self._end()

    async def _close(self) -> None:
        await self.reads.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
