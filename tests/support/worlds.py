"""Small worlds: programs change one archive, a scheduler decides who goes on, and a model says what must be in it.

A world follows from its seed alone. Programs run in threads, of which one at a time goes on, up to its next change of
the file system: before it, another one may go on, and a program may be killed. The clock is the world's. What is stored
is read with PyArrow, what was promised is in sets of sequences: the model shares no code with the product.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog

from jetcapture_py import threads
from jetcapture_py.archive.removed import Erased
from jetcapture_py.capture import decoding, storing
from jetcapture_py.capture.recapture import Recapture
from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import JetcaptureError, VanishedError
from jetcapture_py.maintain import compact
from jetcapture_py.maintain.compact import CompactionSettings
from jetcapture_py.manage import erase
from jetcapture_py.reading.arrow import read_archive
from jetcapture_py.rewriting import erase as erasure
from jetcapture_py.rewriting.redecode import QuarantineSelection, redecode
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store import read_erased, root
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.transform.frames import received_of
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import survey
from jetcapture_py.verify.scope import Removed
from tests.support.maintaining import Maintenance

STREAM, CONSUMER = "ORDERS", "archive"
DAY = 86_400
BEGIN = 47_482 * DAY
"""When the first day of messages begins, in seconds since the epoch: later than what PyIceberg's own clock says."""
MESSAGES = 12
GRACE = 10
STEPS = 110
PROGRAMS = 4
"""How many run at a time."""
TABLE = 25
"""One of so many worlds has an Iceberg table, whose commits take most of its time."""
SUSPENDED = 0.1, 0.4
"""Probability that a program waits before a change until three others have started, and before a removal."""
KILLED = 0.03
"""Probability that a program is killed instead of going on."""


@dataclass(frozen=True)
class Message:
    seq: int
    day: int
    key: str
    bad: bool
    """Whether it cannot be decoded by the first configuration."""

    @property
    def payload(self) -> bytes:
        return (b"bad %d" if self.bad else b'{"n":%d}') % self.seq


class KilledError(BaseException):
    """The process ends here."""


class AtOnce(Executor):
    """Does the work in the program's own thread, so that a world follows from its seed."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, do: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(do(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done


class Program:
    """A thread that runs while the scheduler waits, and waits while the scheduler runs."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self._work = name, work
        self.killed = self.ended = False
        self.waits = 0
        self.error: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def go_on(self) -> None:
        self._go.release()
        self._stopped.acquire()

    def pause(self) -> None:
        """Called by the program's threads: let the scheduler run."""
        if not self.killed:
            self._stopped.release()
            self._go.acquire()
        if self.killed:
            raise KilledError

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()


@dataclass
class World:
    """One archive, its programs, and what is known of its messages."""

    root: Path
    seed: int
    story: list[str] = field(default_factory=list)
    acked: set[int] = field(default_factory=set)
    """Messages that a capture has stored and acknowledged."""
    erasing: set[int] = field(default_factory=set)
    """Messages that an erasure may have removed."""
    now: float = BEGIN + 4 * DAY

    def __post_init__(self) -> None:
        self.table = self.seed % TABLE == 0
        self.chance = random.Random(self.seed)
        self.messages = {
            seq: Message(seq, (seq - 1) * 2 // MESSAGES, self.chance.choice("aab"), self.chance.random() < 0.2)
            for seq in range(1, MESSAGES + 1)
        }
        self.keep = self.now - BEGIN - DAY + self.chance.choice([60.0, 3 * DAY])
        """In seconds: the first day expires within the story, or never."""
        self.first, self.later = self._config("json"), self._config("raw")
        self.redecoding = self.changed = False
        self.blocks: list[list[int]] = []
        self.ranges: list[tuple[int, int]] = []
        self.maintained: list[Maintenance] = []
        self.programs: list[Program] = []
        self.running: Program | None = None
        self.started = 0
        self._contents: dict[tuple[str, int, int], list[int]] = {}

    def _config(self, format_: str) -> Config:
        maintain: dict[str, Any] = {
            "compact": {"after": "0s", "grace": f"{GRACE}s", "target": "1MiB"},
            "keep": f"{round(self.keep)}s",
        }
        if self.table:
            catalog = {"type": "sql", "uri": f"sqlite:///{self.root}.db"}
            maintain["table"] = {"name": "nats.orders", "catalog": catalog}
        return parse(
            {
                "source": {"stream": STREAM, "consumer": CONSUMER},
                "store": {"url": str(self.root), "concurrency": 1, "retry_for": "0s"},
                "key": "{subject}",
                "decode": {"format": format_},
                "block": {"interval": "1d"},
                "maintain": maintain,
            }
        )

    # ------------------------------------------------------------------ the scheduler

    def run(self) -> None:
        """Tell the story. Raises AssertionError with all of it."""
        try:
            with self._watched():
                for _ in range(STEPS):
                    self._step()
                while self.programs:
                    self._go_on(self.chance.choice(self.programs))
                self.story.append("the end: everything is run until nothing is left to do")
                self._finish()
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            story = "\n".join(f"  {line}" for line in self.story)
            raise AssertionError(f"seed {self.seed}: {error!r}\n{story}") from error

    def _step(self) -> None:
        self.now += self.chance.choice([0, 1, 1, 5])
        if len(self.programs) < PROGRAMS and self.chance.random() < (0.3 if self.programs else 1):
            actor, weight = zip(*ACTORS.items(), strict=True)
            (chosen,) = self.chance.choices(actor, weight)
            self._start(chosen.__name__, chosen(self))
            return
        awake = [program for program in self.programs if program.waits < self.started] or self.programs
        program = self.chance.choice(awake)
        if self.chance.random() < KILLED:
            program.killed = True
            self.story.append(f"{program.name} is killed")
        self._go_on(program)

    def _start(self, name: str, work: Iterator[str]) -> None:
        """Start a program; what it yields first is told before it goes on, and each time it stops there, too."""
        self.started += 1
        title = f"{name} {self.started}"

        def run() -> None:
            for line in work:
                self.story.append(f"{title} {line}")
                program.pause()

        program = Program(title, run)
        self.programs.append(program)

    def _go_on(self, program: Program) -> None:
        self.running = program
        program.go_on()
        self.running = None
        if program.ended:
            self.programs.remove(program)
            error = program.error
            self.story.append(f"{program.name} ends{f': {error!r}' if error else ''}")
            if error and not program.killed and not isinstance(error, JetcaptureError):
                raise error
        if self.changed:
            lost = self.required() - self.stored().keys()
            assert not lost, f"{sorted(lost)} are lost"
            self.changed = False

    def _program(self) -> Program | None:
        """The program that calls this; None for the scheduler, and threads that are not the world's."""
        running = self.running
        return running if running is not None and threading.current_thread() is running.thread else None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Stop programs before every change of a file, on the world's clock, and without threads of their own."""

        def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def change(*paths: Any, **how: Any) -> Any:
                program = self._program()
                if name == "rmdir" and any(Path(paths[0]).iterdir()):
                    raise OSError(errno.ENOTEMPTY, "not empty")
                if program is not None:
                    if self.chance.random() < SUSPENDED[name == "remove"]:
                        program.waits = self.started + 3
                    program.pause()
                    self.story.append(f"{program.name}: {name} {_short(paths[-1])}")
                    self.changed = True
                result = real(*paths, **how)
                if program is not None and name in ("replace", "link"):
                    os.utime(paths[1], (self.now, self.now), dir_fd=how.get("dst_dir_fd"))
                return result

            return change

        def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
            if (program := self._program()) is None:
                return real(seconds)
            self.now += seconds
            program.waits = self.started + 1  # another one has the lock, or has to go on meanwhile
            return program.pause()

        with ExitStack() as stack:
            for name in ("replace", "link", "unlink", "remove", "rmdir"):
                stack.enter_context(mock.patch.object(os, name, watched(name, getattr(os, name))))
            for owner, name, value in (
                (time, "time", lambda: self.now),
                (time, "sleep", sleep),
                (os, "fsync", lambda _: None),
                (root, "LOCK_TIMEOUT", math.inf),
                (erasure, "THREADS", 1),
                (compact, "_AHEAD", 0),
                *((module, "ThreadPoolExecutor", AtOnce) for module in (threads, compact, decoding, storing)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    # ------------------------------------------------------------------ the model

    def expired(self) -> set[int]:
        days = (self.now - self.keep - BEGIN) // DAY
        return {seq for seq, message in self.messages.items() if message.day < days}

    def required(self) -> set[int]:
        """Messages that must be in the archive or its quarantine."""
        return self.acked - self.erasing - self.expired()

    def stored(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for path in self.root.rglob("*.parquet"):
            stat = path.stat()
            at = str(path), stat.st_ino, stat.st_mtime_ns
            if at not in self._contents:
                table = pq.ParquetFile(path).read(["_nats_seq", "_nats_payload"], use_threads=False)
                for seq, payload in zip(*(column.to_pylist() for column in table.columns), strict=True):
                    assert payload == self.messages[seq].payload
                self._contents[at] = table["_nats_seq"].to_pylist()
            found.update(self._contents[at])
        return found

    def check_read(self, read: Iterable[int], required: set[int]) -> None:
        counts = Counter(read)
        assert max(counts.values(), default=1) == 1, f"read twice: {counts}"
        assert required <= counts.keys(), f"not read: {required - counts.keys()}"

    def check_proof(self) -> None:
        """What verify takes for archived, or removed on purpose, is exactly that."""
        files = ArchiveFiles(str(self.root), {})
        scan = survey(ObjectExaminer(files, None, files.erased(STREAM)), STREAM, 1 << 40)
        removed = Removed.read(files, STREAM, None)
        accounted = Sequences.union(scan.sequences, removed.expired, removed.erased)
        counted = {seq for seq in self.messages if accounted.count(seq, seq)}
        gone = self.erasing | self.expired()
        assert counted <= self.stored().keys() | gone, "verify counts what is not there"
        assert self.acked - gone <= counted, "verify misses what is there"
        assert not scan.findings() or all(finding.kind.name != "DAMAGED" for finding in scan.findings())

    def _finish(self) -> None:
        """Run everything again until nothing is left to do, and compare all with the model."""
        self.now += 2 * 3600  # files of killed processes are abandoned
        for path in self.root.rglob("*.tmp"):
            os.utime(path, (BEGIN, BEGIN))
        for first, last in dict.fromkeys(self.ranges):
            _until(lambda first=first, last=last: _erase(self, first, last) == 0)  # type: ignore[misc]
        if self.redecoding and self.stored():
            _until(lambda: not asyncio.run(redecode(self.later, QuarantineSelection())).waiting)
        maintenance, begun = Maintenance(self.later), bool(self.acked or self.stored())
        for _ in range(3):
            result = maintenance.run() if begun else None
            assert result is None or not result.errors, result
            self.now += 3600  # and the table's snapshots expire
        if self.table and begun:
            assert sorted(_tabulated(self)) == sorted(_read(self, quarantine=False)), "the table has other messages"
        stored = self.stored()
        assert not stored.keys() & self.erasing, f"erased, and still stored: {stored.keys() & self.erasing}"
        assert not self.required() - stored.keys(), f"lost: {self.required() - stored.keys()}"
        self.check_read([seq for part in (False, True) for seq in _read(self, quarantine=part)], self.required())
        assert max(stored.values(), default=1) == 1, f"copies are left: {stored}"
        self.check_proof()


def _tabulated(world: World) -> list[int]:
    """The messages that a query of the Iceberg table returns; none if the table has not begun."""
    assert world.later.maintain
    assert world.later.maintain.table
    with load_catalog("jetcapture", **world.later.maintain.table.catalog) as catalog:
        if not catalog.table_exists("nats.orders"):
            return []
        return list(catalog.load_table("nats.orders").scan().to_arrow()["_nats_seq"].to_pylist())


def _short(path: Any) -> str:
    """A path as a story tells it: without what all have in common."""
    return str(path).partition(f"{STREAM}/")[2] or str(path).rpartition("/")[2]


def _until(done: Callable[[], bool]) -> None:
    assert any(done() for _ in range(4)), "it does not come to an end"


# ---------------------------------------------------------------------- actors


class _Capture(Recapture):
    """A capture without a server: what is delivered to it is decoded, encoded and put as the daemon does it."""

    async def deliver(self, rows: pa.RecordBatch) -> None:
        await self.add(CONSUMER, received_of(rows, CONSUMER))
        await self.flush()


def capture(world: World) -> Iterator[str]:
    """Deliver new messages, or some again; acknowledge them once they are stored."""
    chance, before = world.chance, world.blocks
    new = sorted(set(world.messages) - {seq for block in before for seq in block})
    kind = chance.random()
    if before and (kind < 0.6 or not new):
        near = [block for block in before if world.erasing & set(block)]
        block = chance.choice(near if near and chance.random() < 0.7 else before)
    elif before and kind < 0.7:
        block = sorted(chance.sample([seq for block in before for seq in block], 2))
    else:
        block = new[: chance.randint(2, 5)]
        before.append(block)
    config = world.later if world.redecoding and chance.random() < 0.7 else world.first
    yield f"has {block} delivered"
    with _Capture(config, "age", lambda rows, runs, _: (rows, runs)) as capture:
        capture.archiver.encoding.erased = read_erased(capture.notes, STREAM, Erased())
        if chance.random() < 0.3:
            yield "has read the tombstones"
        asyncio.run(capture.deliver(_rows([world.messages[seq] for seq in block])))
    yield "has stored everything"
    world.acked |= set(block)


def _rows(messages: Sequence[Message]) -> pa.RecordBatch:
    times = [(BEGIN + message.day * DAY) * 1_000_000 + message.seq for message in messages]
    size = len(messages)
    return pa.RecordBatch.from_pydict(
        {
            "_nats_stream": pa.array([STREAM] * size),
            "_nats_subject": pa.array([message.key for message in messages]),
            "_nats_seq": pa.array([message.seq for message in messages], pa.int64()),
            "_nats_timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "_nats_nanos": pa.array([0] * size, pa.int16()),
            "_nats_delivered": pa.array([1] * size, pa.int32()),
            "_nats_headers": pa.nulls(size, pa.map_(pa.string(), pa.list_(pa.string()))),
            "_nats_payload": pa.array([message.payload for message in messages], pa.binary()),
        }
    )


def maintain(world: World) -> Iterator[str]:
    """Make a pass, with what an earlier one of this process has left."""
    idle = world.maintained
    maintenance = idle.pop() if idle and world.chance.random() < 0.8 else Maintenance(world.first)
    yield "makes a pass"
    result = maintenance.run()
    world.maintained.append(maintenance)
    yield f"has removed {result.removed}, waits for {result.waiting}"


def compact_now(world: World) -> Iterator[str]:
    """Compact, and remove what is due: all of it without a grace, else what an earlier run has left."""
    grace = world.chance.choice([0.0, GRACE])
    yield f"begins, with a grace of {grace:g}s"
    result = Maintenance(world.first, compact=CompactionSettings(target=1 << 20, after=0, grace=grace)).run()
    yield f"has removed {result.removed}, leaves {result.waiting}"


def erase_some(world: World) -> Iterator[str]:
    """Erase a few sequences. If nothing else ran meanwhile, nothing is left once it says so."""
    first = world.chance.choice(sorted(world.acked) or [1])
    last = min(MESSAGES, first + world.chance.choice([0, 0, 1]))
    if world.ranges and world.chance.random() < 0.5:
        first, last = world.chance.choice(world.ranges)
    chosen = set(range(first, last + 1))
    yield f"begins with {first} to {last}"
    world.ranges.append((first, last))
    world.erasing |= chosen
    alone, started = len(world.programs) == 1, world.started
    code = _erase(world, first, last)
    if alone and started == world.started and code == 0:
        assert not chosen & world.stored().keys(), f"{chosen} are reported as erased"
    yield f"says {code}"


def _erase(world: World, first: int, last: int) -> int:
    try:
        return erase.run(world.first, Condition.parse(None, None, f"{first}-{last}", None), "r").code
    except JetcaptureError as error:
        if re.search("no archive|has no objects", str(error)):
            return 0
        raise


def redecode_all(world: World) -> Iterator[str]:
    yield "begins"
    world.redecoding = True
    done = asyncio.run(redecode(world.later, QuarantineSelection()))
    yield f"has decoded {done.decoded}, removed {done.removed}"


def reader(world: World) -> Iterator[str]:
    """Plan, let others go on, and read."""
    quarantine = world.chance.random() < 0.2
    yield "begins"
    bad = {seq for seq, message in world.messages.items() if message.bad}
    before = set() if quarantine else world.required() - bad
    with suppress(VanishedError):
        opened = read_archive(str(world.root), STREAM, quarantine=quarantine)
        yield "has planned"
        world.check_read(opened.read_all()["_nats_seq"].to_pylist(), before & world.required())


def _read(world: World, *, quarantine: bool) -> list[int]:
    try:
        return list(read_archive(str(world.root), STREAM, quarantine=quarantine).read_all()["_nats_seq"].to_pylist())
    except JetcaptureError as error:
        if not re.search("no archive|has no objects|has only|no quarantine", str(error)):
            raise
        return []


def verifier(world: World) -> Iterator[str]:
    yield "begins"
    world.check_proof()


ACTORS: dict[Callable[[World], Iterator[str]], float] = {
    capture: 5,
    maintain: 4,
    compact_now: 1,
    erase_some: 3,
    redecode_all: 1,
    reader: 2,
    verifier: 1,
}
