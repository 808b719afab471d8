"""Captures for tests: in this process, or the real command; and what they left in the archive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from nats.aio.client import Client

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.config.model import Config, parse
from jetcapture_py.jetstream import pulls
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.monitoring import facts, http
from jetcapture_py.monitoring.history import History
from jetcapture_py.monitoring.http_server import HttpServer
from jetcapture_py.monitoring.status import CaptureStatus, examine
from jetcapture_py.store.archive import ASIDE
from tests.support.publishing import Headers, Publisher, connect

STREAM = "ORDERS"
CONSUMER = "archive"
Message = tuple[str, bytes, Headers | None]

SITES: dict[int, http.Site] = {}
"""What `serve` serves, by port: a test may want facts of this moment."""

# every drain waits for the open pulls to end, and most tests have an idle stream then
pulls.TIMING = pulls.PullTiming(expires=0.1)


def settings(url: str, archive: str | Path, **sections: Any) -> dict[str, Any]:
    """A configuration for `STREAM`; `sections` are merged into its sections, or replace its plain values.

    Buckets last a day, so that hardly any test sees one end while it publishes.
    """
    found: dict[str, Any] = {
        "nats": {"servers": [url]},
        "source": {"stream": STREAM, "consumer": CONSUMER},
        "store": {"url": str(archive)},
        "http": None,
        "log": {"format": "json"},
    }
    for name, value in sections.items():
        found[name] = {**(found.get(name) or {}), **value} if isinstance(value, dict) else value
    if not found["source"].keys() & {"bucket", "object_store"}:
        found.setdefault("key", "{subject}")
    if "interval" not in found.setdefault("block", {}):
        found["block"] = {"interval": "1d", "max_age": "15m", **found["block"]}
    return found


def config(url: str, archive: str | Path, **sections: Any) -> Config:
    return parse(settings(url, archive, **sections))


@contextlib.asynccontextmanager
async def connection(url: str) -> AsyncIterator[Client]:
    """A client that survives the server's restarts and says nothing about them."""

    async def quiet(error: Exception) -> None:
        """Restarts are the tests' own doing."""

    client = await connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=quiet)
    try:
        yield client
    finally:
        await client.close()


async def publish(url: str, messages: Iterable[Message], *, subjects: Sequence[str] = ("orders.>",)) -> int:
    """Create the stream where it is missing, publish, and return how many messages it holds."""
    async with connection(url) as client:
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=list(subjects))
        async with Publisher(client) as publisher:
            for subject, payload, headers in messages:
                await publisher.publish(subject, payload, headers)
            await publisher.flush()
        return int((await stream.stream_info(STREAM)).state.messages)


async def consumer(url: str) -> Any:
    async with connection(url) as client:
        return await client.jetstream().consumer_info(STREAM, CONSUMER)


@contextlib.asynccontextmanager
async def running(configuration: Config, **parts: Any) -> AsyncIterator[Capture]:
    """The state of a capture that drains at the end of the block; `parts` replace its decoder, key, store and so on."""
    capture = Capture(configuration, **parts)
    stop = asyncio.Event()
    task = asyncio.create_task(capture.run(stop))
    waiting = asyncio.create_task(until(lambda: capture.opened, "the capture has started"))
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        yield capture
    finally:
        stop.set()
        await task


@contextlib.contextmanager
def serve(state: Capture, listen: str) -> Iterator[int]:
    """Serve a capture's page, probes and metrics on `listen` inside the block; the port."""
    site = http.Site(single=True)
    site.show({"capture": state}, {})
    try:
        server = HttpServer(listen, site)
        SITES[server.port] = site
        try:
            yield server.port
        finally:
            server.stop()
            del SITES[server.port]
    finally:
        site.stop()


def metrics(state: Capture) -> str:
    return facts.capture_metrics({"": facts.gather(History(state), facts.this_process())}).text().decode()


async def capture_all(configuration: Config, **parts: Any) -> Capture:
    """Capture until caught up; the state at the end."""
    capture = Capture(configuration, **parts)
    await asyncio.wait_for(capture.run(asyncio.Event(), until_caught_up=True), 300)
    return capture


def publish_and_capture(url: str, archive: str | Path, messages: Iterable[Message], **sections: Any) -> Config:
    """Publish, and capture until caught up; the configuration."""
    found = config(url, archive, **sections)

    async def both() -> None:
        await publish(url, messages)
        await capture_all(found)

    asyncio.run(both())
    return found


async def status_of(configuration: Config) -> CaptureStatus:
    async with ReadSession(configuration.nats, "test", timeout=5) as session:
        return await examine(configuration, session)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout
    while asyncio.get_running_loop().time() < deadline:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"after {timeout} s it is still not so that {what}")


_NO_OBJECTS = tuple(f"_{name}/" for name in ("probe", "watermark", "streams", "columns", "erased", "expired", "table"))


def objects(root: Path) -> list[layout.ObjectName]:
    """The names of all objects of an archive; a foreign file among them is an error, or a half one that stays."""
    found = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        other = relative == layout.MARKER or path.name.endswith(ASIDE)
        if path.is_file() and not relative.startswith(_NO_OBJECTS) and not other:
            name = layout.parse_path(relative)
            if name is None and path.name.endswith(".tmp"):  # a running capture may be writing it at this moment
                assert _goes(path), f"{relative} was left behind half"
                continue
            assert name is not None, f"{relative} is not an object of the archive"
            found.append(name)
    return found


def remove_unfinished(root: Path) -> None:
    """Remove what a kill left unfinished: temporary files, which nobody reads."""
    for path in root.rglob(".*.tmp"):
        path.unlink()


def _goes(path: Path, timeout: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def rows(root: Path, *, quarantine: bool = False) -> list[dict[str, Any]]:
    """All rows of the archive or its quarantine by sequence, each message once, with its `key`."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in objects(root):
        if name.quarantine is quarantine:
            with pa.memory_map(str(root / name.path)) as file:
                table = pq.read_table(file)
            assert table.num_rows == name.rows
            for row in table.to_pylist():
                identity = (row[layout.SEQ], row[layout.TIMESTAMP], row.get(layout.ROW) or 0, row[layout.STREAM])
                assert quarantine or name.bundle or row[layout.KEY] == name.key
                found[identity] = {**row, "key": name.key}
    return [found[identity] for identity in sorted(found)]


def seqs(root: Path) -> list[int]:
    return [row[layout.SEQ] for row in rows(root)]


class Command:
    """The real `jetcapture` command as a process; its log is in `log`."""

    def __init__(
        self,
        directory: Path,
        configuration: dict[str, Any],
        name: str = "replica",
        environment: Mapping[str, str] | None = None,
        module: str = "jetcapture_py",
        python: str = sys.executable,
    ) -> None:
        self._environment = environment or {}
        self._module, self._python = module, python
        self.path = directory / f"{name}.yaml"
        self.path.write_text(yaml.safe_dump(configuration))
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def log(self) -> str:
        """What it has written to standard error, over all its lives."""
        return self._log.read_text()

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self.log.splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == name:
                    yield entry

    def start(self, *options: str, before: Sequence[str] = ()) -> Self:
        """Start it, `before` in front of the command; it may run again after it has ended."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*before, self._python, "-m", self._module, "run", str(self.path), *options],
                stderr=log,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONWARNINGS": "default", **self._environment},
            )
        return self

    def wait(self, timeout: float = 300) -> int:
        return self.process.wait(timeout)

    def drain(self) -> None:
        """SIGTERM; it has to end without an error."""
        self.process.send_signal(signal.SIGTERM)
        assert self.wait() == 0, self.log

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
