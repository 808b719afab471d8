"""What runs in a simulation: the real commands on the simulated archive, in threads of their own."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any
from unittest import mock

import pyarrow as pa

from jetcapture_py import threads
from jetcapture_py.archive.removed import Erased
from jetcapture_py.archive.watermark import ConsumerWatermark, Filters, path
from jetcapture_py.capture import decoding, storing
from jetcapture_py.capture.encoding import without_erased
from jetcapture_py.config.model import Config, parse
from jetcapture_py.errors import JetcaptureError, StoreError
from jetcapture_py.maintain import compact
from jetcapture_py.maintain.passes import PassRequest, run_pass
from jetcapture_py.manage import query as sql
from jetcapture_py.manage.query import QueryRequest
from jetcapture_py.options import ChosenArchive
from jetcapture_py.reading import arrow, duckdb
from jetcapture_py.reading.arrow import read_planned
from jetcapture_py.reading.latest import read_latest
from jetcapture_py.reading.plan import ReadRequest
from jetcapture_py.reading.selection import Selection
from jetcapture_py.restoring import part as restoring
from jetcapture_py.restoring.command import prepare
from jetcapture_py.restoring.request import RestoreRequest
from jetcapture_py.rewriting import erase as erasure
from jetcapture_py.rewriting import redecode as redecoding
from jetcapture_py.rewriting.select import Condition
from jetcapture_py.store import change_note, object_file, open_store, read_erased
from jetcapture_py.store.archive import open_archive
from jetcapture_py.store.objects import ObjectStore
from jetcapture_py.verify.examine import ObjectExaminer
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.scan import survey
from jetcapture_py.verify.scope import Removed
from tests.simulation import table
from tests.simulation.catalogue import (
    BEGIN,
    BUCKET,
    CREATED,
    FIRST,
    GRACE,
    KEEP,
    LAST,
    NEWEST,
    STREAM,
    batch,
    encoder,
)
from tests.simulation.local import patches
from tests.simulation.loop import AtOnce
from tests.simulation.loop import run as run_loop
from tests.simulation.repairing import PATCHES, repaired
from tests.simulation.scheduler import BY_THREAD, NOW, STORE, TABLE, ask
from tests.simulation.store import Operation

URL = "memory://archive"
ERASED = 3
"""The sequence that `erase` removes."""
Outcome = tuple[Any, ...]


def _config(table: Mapping[str, object] | None) -> Config:
    maintain: dict[str, object] = {
        "compact": {"after": "0s", "grace": f"{GRACE}s", "target": "1MiB"},
        "keep": f"{KEEP}s",
    }
    if table:
        maintain["table"] = table
    source = {"stream": STREAM, "consumer": "archive"}
    return parse({"source": source, "key": "a", "store": {"url": URL, "concurrency": 1}, "maintain": maintain})


CONFIG, WITH_TABLE = _config(None), _config({"name": table.NAME, "catalog": table.CATALOG})
REQUEST = PassRequest.of(CONFIG)


def config() -> Config:
    return WITH_TABLE if ask(TABLE).value else CONFIG


def maintain() -> Outcome:
    """Two passes, of which the second one removes what the first one replaced."""
    return _passes(PassRequest(compact=REQUEST.compact))


def expire() -> Outcome:
    return _passes(PassRequest(compact=None, keep=REQUEST.keep), rounds=1)


def _passes(request: PassRequest, rounds: int = 2) -> Outcome:
    last = None
    for number in range(rounds):
        if number:
            time.sleep(GRACE + 1)
        last = run_pass(config(), open_archive(URL, {}), request, last)
    assert last is not None
    return ("passed", last.waiting, tuple(last.errors))


def erase() -> Outcome:
    """Says what remains."""
    work = erasure.erase(config(), Condition(seqs=(ERASED, ERASED)), "a request")
    try:
        work.send(None)
    except StopIteration as end:
        return ("erased", tuple(end.value.remaining))
    raise AssertionError("it waits for something else than the store")


def redecode() -> Outcome:
    done = run_loop(redecoding.redecode(CONFIG, redecoding.QuarantineSelection()))
    return ("redecoded", done.waiting, tuple(done.errors))


def repair() -> Outcome:
    return repaired(CONFIG)


def read() -> Outcome:
    return _read(Selection())


def inspect() -> Outcome:
    """Reads the quarantine."""
    return _read(Selection(), quarantine=True)


SELECTED = 4
"""The sequence that `select` begins with, in its key in every archive."""


def select() -> Outcome:
    """Reads a key from a time on."""
    return _read(Selection(keys=["a"], start=datetime.fromtimestamp(BUCKET, UTC) + timedelta(microseconds=SELECTED)))


def _read(selection: Selection, *, quarantine: bool = False) -> Outcome:
    request = ReadRequest(files=open_archive(URL, {}), stream=STREAM, selection=selection, quarantine=quarantine)
    rows = [row for part in read_planned(request.plan) for row in _identities(part)]
    return ("read", tuple(sorted(rows)))


IDENTITY = "_nats_seq", "_nats_timestamp"


def _identities(part: pa.RecordBatch) -> Iterator[tuple[int, ...]]:
    return zip(*(part.column(name).cast(pa.int64()).to_pylist() for name in IDENTITY), strict=True)


def query() -> Outcome:
    """Runs SQL as `jetcapture query` does, in the one thread that DuckDB gets here."""
    chosen = [ChosenArchive(url=URL, stream=STREAM, options={})]
    request = QueryRequest(
        archives=chosen,
        selection=Selection(),
        complete_only=False,
        dedupe="auto",
        parquet_only=False,
        form="table",
        output=None,
    )
    rows: list[tuple[int, ...]] = []
    with sql._session(request) as session:

        def write(batches: Iterable[pa.RecordBatch]) -> None:
            for number, part in enumerate(batches):
                if not number:
                    session._begin()
                rows.extend(_identities(part))

        with mock.patch.object(session, "_write", write):
            session.run(f"SELECT {', '.join(IDENTITY)} FROM archive")
    return ("read", tuple(sorted(rows)))


GROUPS = 2
"""The sequences have so many remainders, of each of which `latest` reads the newest one."""


def latest() -> Outcome:
    rows = read_latest(URL, STREAM, by=f"_nats_seq % {GROUPS}", columns=IDENTITY)
    return ("newest", tuple(sorted(row for part in rows for row in _identities(part))))


def restore() -> Outcome:
    """What would be published, in this order."""
    prepared = prepare(RestoreRequest(files=open_archive(URL, {}), stream=STREAM, target=STREAM))
    parts = [restoring._read(prepared.reading, part, restoring._RESTORED) for part in prepared.plan.parts]
    rows = [row for part in parts for row in zip(part.seqs.tolist(), (part.nanoseconds // 1000).tolist(), strict=True)]
    return ("restored", tuple(rows))


CAPTURES: dict[str, Sequence[tuple[int, ...]]] = {
    "write": ((3, 4), (LAST + 1, LAST + 2), (LAST + 1, LAST + 2)),
    "other": ((LAST + 3, NEWEST),),
    "again": ((3, 4),),
    "failing": ((3, 4), (4, 5)),
}
"""What is delivered to captures, one delivery after the other. `failing` cannot decode it."""


def _capture(consumer: str) -> Outcome:
    """Store what is delivered, acknowledge it, and move the watermark: as a capture does."""
    store, quarantine = open_store(URL, {}), consumer == "failing"
    erased = read_erased(store, STREAM, Erased())
    _move(store, consumer, LAST)
    ask(Operation("begin"))
    for seqs in CAPTURES[consumer]:
        batches, _ = without_erased([batch(seqs, quarantine=quarantine)], erased)
        if sum(part.num_rows for part in batches):
            block = encoder(batches, quarantine=quarantine)
            for attempt in range(3):
                try:
                    store.put(block.name, block.data)
                    break
                except StoreError:
                    if attempt == 2:
                        raise
        ask(Operation("acknowledge", argument=seqs))
    _move(store, consumer, CAPTURES[consumer][-1][-1])
    return ("stored",)


def _move(store: ObjectStore, consumer: str, seq: int) -> None:
    file, at = path(STREAM, consumer), datetime.fromtimestamp(BEGIN, UTC)
    filters = (Filters(after=0, subjects=(f"{consumer}.>",)),)

    def change(data: bytes | None) -> bytes:
        before = 0 if data is None else ConsumerWatermark.decode(data, STREAM, file).seq
        mark = ConsumerWatermark(
            stream=STREAM, consumer=consumer, created=CREATED, seq=max(seq, before), time=at, filters=filters
        )
        return mark.encode()

    change_note(store, file, change)


def mark() -> Outcome:
    watermark = open_archive(URL, {}).watermark(STREAM)
    return ("marked", 0 if watermark is None else watermark.seq)


def verify() -> Outcome:
    """The sequences that verify counts as archived or removed on purpose."""
    files = open_archive(URL, {})
    scan = survey(ObjectExaminer(files, None, files.erased(STREAM)), STREAM, 1 << 40)
    removed = Removed.read(files, STREAM, None)
    accounted = Sequences.union(scan.sequences, removed.expired, removed.erased)
    return ("counted", tuple(seq for seq in range(FIRST, LAST + 9) if accounted.count(seq, seq)))


def refused(work: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """An error that the product explains ends an actor as well."""

    def run() -> Outcome:
        try:
            return work()
        except JetcaptureError as error:
            return ("refused", type(error).__name__, str(error))

    return run


ACTORS: dict[str, Callable[[], Outcome]] = {
    work.__name__: refused(work)
    for work in (
        *(maintain, expire, erase, redecode, repair, read, select, query, latest, restore, inspect),
        *(mark, verify),
    )
} | {name: refused(partial(_capture, name)) for name in CAPTURES}


class _Moment(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.fromtimestamp(time.time(), tz)


@contextmanager
def simulated() -> Iterator[None]:
    """Give actors the simulated store and clock, and no threads of their own."""
    real_time, real_sleep = time.time, time.sleep

    def is_actor() -> bool:
        return threading.current_thread() in BY_THREAD

    def sleep(seconds: float) -> None:
        if is_actor():
            ask(Operation("sleep", argument=seconds))
        else:
            real_sleep(seconds)

    with ExitStack() as stack:
        logging.disable()
        stack.callback(logging.disable, logging.NOTSET)
        for owner, name, value in (
            *patches(ask, lambda: bool(ask(STORE).value == "local")),
            *table.patches(is_actor, _Moment),
            (time, "time", lambda: ask(NOW).value if is_actor() else real_time()),
            (time, "sleep", sleep),
            (random, "uniform", max),
            (erasure, "datetime", _Moment),
            (compact, "_AHEAD", 0),
            *PATCHES,
            (duckdb, "_REMOTE_THREADS", "1; SET async_threads = 0"),  # all in the thread of the actor
            (ObjectStore, "probe", lambda _: None),  # the name of its object is random
            *(
                (module, "ThreadPoolExecutor", AtOnce)
                for module in (threads, compact, arrow, object_file, decoding, storing, sql)
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
