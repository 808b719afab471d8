"""What an archive holds of a stream: every object looked at, in parallel, into sets of sequences of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from jetcapture_py.errors import StoreError
from jetcapture_py.layout import ObjectName
from jetcapture_py.shelf import File, GoneError, Shelf
from jetcapture_py.verify_object import DamagedError, Held, Life, examine
from jetcapture_py.verify_ranges import Sequences

MOST_LISTED = 10_000
"""Problems that are kept, of each kind; all are counted."""
ROUNDS = 10
"""Times that objects are listed again because some were gone: compaction moves their messages into others."""
_DEEP_THREADS = 4
_ATTEMPTS = 3

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much it is. From any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An object that is not as it should be: its path, and in what."""

    path: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was found. `messages` counts every copy of the present life's messages, `quarantined` those in quarantine.

    `older` counts messages of earlier lives. `damaged` and `foreign` are the first of so many. `newest` is the latest
    timestamp, in microseconds, in objects that end at or before the sequence of interest, 0 without one.
    """

    sequences: Sequences = field(default_factory=Sequences)
    objects: int = 0
    size: int = 0
    messages: int = 0
    quarantined: int = 0
    older: int = 0
    newest: int = 0
    damaged: list[Problem] = field(default_factory=list)
    damaged_count: int = 0
    foreign: list[str] = field(default_factory=list)
    foreign_count: int = 0
    restless: bool = False


def survey(shelf: Shelf, stream: str, life: Life | None, bound: int, *, deep: bool, progress: Progress) -> Survey:
    """Look at every object of the stream. Blocks; call it in a thread. Raises StoreError when nothing can be listed."""
    found = Survey()
    seen: set[str] = set()
    for _ in range(ROUNDS):
        files = [file for file in shelf.files(stream) if file.place not in seen]
        seen.update(file.place for file in files)
        gone = _look(shelf, files, life, bound, found, deep=deep, progress=progress)
        if not gone:
            break
    else:
        found.restless = True
    found.damaged.sort(key=lambda problem: problem.path)
    found.foreign.sort()
    return found


def _look(
    shelf: Shelf,
    files: list[File],
    life: Life | None,
    bound: int,
    found: Survey,
    *,
    deep: bool,
    progress: Progress,
) -> bool:
    """Add what these files hold; whether any of them was gone."""
    for file in files:
        if file.name is None and not _hidden(file.path):
            found.foreign_count += 1
            found.foreign += [file.path] if len(found.foreign) < MOST_LISTED else []
    # in the order of the stream, so that the set of sequences is dense wherever it ends
    named = sorted(((file, file.name) for file in files if file.name), key=lambda pair: pair[1].first_seq)
    gone = False
    workers = max(2, min(shelf.threads, _DEEP_THREADS)) if deep else shelf.threads

    def look(file: File, name: ObjectName) -> Outcome:
        return _examined(shelf, file, name, life, deep=deep)

    with ThreadPoolExecutor(workers, "verify") as threads:
        if workers > 1:
            outcomes = _ahead(threads, look, named, workers * 4)
        else:  # a footer is read faster than it is handed to a thread
            outcomes = ((file, look(file, name)) for file, name in named)
        for done, (file, outcome) in enumerate(outcomes, 1):
            if outcome is None:
                gone = True
            elif isinstance(outcome, Held):
                _add(found, outcome, bound)
            else:
                found.damaged_count += 1
                found.damaged += [Problem(path=file.path, reason=outcome)] if len(found.damaged) < MOST_LISTED else []
            progress("objects", done, len(named))
    return gone


def _hidden(path: str) -> bool:
    """Whether it is what a store leaves when it is killed before an object is whole; nobody reads it."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(".tmp")


def _add(found: Survey, held: Held, bound: int) -> None:
    found.objects += 1
    found.size += held.size
    found.messages += held.messages
    found.older += held.older
    if held.name.quarantine:
        found.quarantined += held.messages
    if held.range is not None:
        found.sequences.add_range(*held.range)
    elif held.messages:
        found.sequences.add(held.seqs)
    if held.messages and held.name.last_seq <= bound:
        found.newest = max(found.newest, held.newest)


Outcome = Held | str | None


def _examined(shelf: Shelf, file: File, name: ObjectName, life: Life | None, *, deep: bool) -> Outcome:
    """What an object holds, why it is damaged, or None when it is gone. Damage is looked at twice.

    The same messages may have been stored once more meanwhile, as the same object in other bytes.
    """
    reason = ""
    for attempt in range(_ATTEMPTS):
        try:
            return examine(shelf, shelf.again(file) if attempt else file, name, life, deep=deep)
        except GoneError:
            return None
        except DamagedError as error:
            if reason == str(error):
                break
            reason = str(error)
        except StoreError as error:
            reason = str(error)
    return reason


def _ahead(
    threads: ThreadPoolExecutor,
    work: Callable[[File, ObjectName], Outcome],
    files: Iterable[tuple[File, ObjectName]],
    most: int,
) -> Iterator[tuple[File, Outcome]]:
    """`work` done with every file, in order, and no more than `most` of them at a time: results take memory."""
    pending: deque[tuple[File, Future[Outcome]]] = deque()
    for file, name in files:
        if len(pending) >= most:
            done, future = pending.popleft()
            yield done, future.result()
        pending.append((file, threads.submit(work, file, name)))
    while pending:
        done, future = pending.popleft()
        yield done, future.result()
