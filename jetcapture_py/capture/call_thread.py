"""Call a user's function in a thread that cannot keep the process alive or stop its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

from jetcapture_py.errors import JetcaptureError

Call = Callable[[], object]
Done = Callable[[BaseException | None], None]


class CallThread:
    """Makes one call at a time. An awaitable result is awaited for at most `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._work: queue.SimpleQueue[tuple[Call, Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None

    async def run(self, call: Call) -> None:
        """Make the call and wait. Raises its exception, or JetcaptureError if an earlier call has not returned."""
        if self._since is not None:
            waited = time.monotonic() - self._since
            raise JetcaptureError(f"an earlier call has not returned for {waited:.0f} s")
        if self._thread is None:
            self._thread = threading.Thread(
                target=copy_context().run, args=(self._work_off,), name="on_stored", daemon=True
            )
            self._thread.start()
        loop = asyncio.get_running_loop()
        returned: asyncio.Future[BaseException | None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not returned.done():  # nobody waits after the timeout
                returned.set_result(error)

        def done(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, error)

        self._since = time.monotonic()
        self._work.put((call, done))
        error = await returned
        if error is not None:
            raise error if isinstance(error, Exception) else JetcaptureError(f"it raised {type(error).__name__}")

    def close(self) -> None:
        """End the thread, once its call has returned."""
        self._work.put(None)

    def _work_off(self) -> None:
        with asyncio.Runner() as runner:
            while (work := self._work.get()) is not None:
                call, done = work
                error: BaseException | None = None
                try:
                    result = call()
                    if inspect.isawaitable(result):
                        runner.run(self._awaited(result))
                except BaseException as raised:  # also sys.exit, which must not end the thread
                    error = raised
                self._since = None
                done(error)

    async def _awaited(self, result: Awaitable[Any]) -> None:
        async with asyncio.timeout(self._timeout):
            await result
