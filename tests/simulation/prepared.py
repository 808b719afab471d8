"""Archives that actors have left, also killed ones, and what actors say of the files of one."""

from __future__ import annotations

from functools import cache, partial

from tests.simulation import catalogue
from tests.simulation.actors import ACTORS, Outcome
from tests.simulation.catalogue import BEGIN, DAY
from tests.simulation.scheduler import Actor, Run
from tests.simulation.store import CHANGES, Content, Files, Operation, StoredFile

END = 1 << 30
"""More operations than any actor has."""
LATER = float(BEGIN + 5 * DAY)
"""When everything is run again."""
RUNNABLE = {name: Actor(name, work) for name, work in ACTORS.items()}
TABLES: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {
    "unmade": ("two", ()),
    "tabled": ("one", (("maintain", END),)),
    "grown": ("one", (("maintain", END), ("write", 3))),
    "committed": ("three", (("maintain", 5),)),
    "aged": ("old", (("maintain", END),)),
}
"""Archives with a table, which has not been made, or has other objects."""
KILLED = {
    "tombstone": ("two", (("erase", 1),)),
    "merged": ("three", (("maintain", 1),)),
    "expiring": ("old", (("expire", 1),)),
    "erased": ("hole", (("erase", END),)),
    "expired": ("past", (("expire", END),)),
    **TABLES,
}
"""Archives with actors that were killed after so many changes, or have ended before."""
ORIGINS = {name: origin for name, (origin, *_) in KILLED.items()}
READERS = ("read", "select", "query", "latest", "restore", "inspect")
PLAYERS = ("maintain", "expire", "erase", "redecode", "repair", "write", "other", "again", "failing", *READERS)
ARCHIVES = (*catalogue.ARCHIVES, *KILLED)


@cache
def prepared(archive: str) -> tuple[Content, float, tuple[str, ...]]:
    """The files of an archive, the time, and who has changed it."""
    if archive not in KILLED:
        return catalogue.files(archive), float(BEGIN), ()
    origin, actors = KILLED[archive]
    store, now = Files(catalogue.files(origin)), float(BEGIN)

    def clock() -> float:
        return now

    for name, count in actors:
        run = Run(RUNNABLE[name], clock, table=f"prepared {name}" if archive in TABLES else "")
        while count and not run.over:
            assert isinstance(run.request, Operation)
            count -= run.request.kind in CHANGES
            now += run.request.argument if run.request.kind == "sleep" else 0
            run.answer(store.do(run.request, now))
        run.close()
    return store.files, now, tuple(name for name, _ in actors)


_OBSERVED: dict[tuple[str, bool, frozenset[tuple[str, bytes]]], Outcome] = {}


def observed(name: str, files: Content, store: str) -> Outcome:
    """What an actor that changes nothing says of these files."""
    key = (name, store == "local", frozenset((path, file.content) for path, file in files.items()))
    if key not in _OBSERVED:
        run = Run(RUNNABLE[name], lambda: LATER, store)
        there = Files({path: StoredFile(file.content, float(BEGIN)) for path, file in files.items()}, store)
        _OBSERVED[key] = run.finish(partial(there.do, now=LATER))
    return _OBSERVED[key]
