"""One schedule of actors on one archive, and a model that says what must be in it; it shares no code with the product.

Messages are pairs of a sequence and a time, read from the objects with PyArrow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial

import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulation import catalogue, iceberg
from tests.simulation.actors import CAPTURES, ERASED, GROUPS, SELECTED, Outcome
from tests.simulation.catalogue import (
    AGAIN,
    CREATED,
    DAMAGED,
    DAY,
    FIRST,
    GRACE,
    INTERVAL,
    KEEP,
    LAST,
    NEWEST,
    SECOND,
    UNREADABLE,
    Identity,
    Stream,
    damaged,
)
from tests.simulation.prepared import END, LATER, ORIGINS, READERS, RUNNABLE, TABLES, observed, prepared
from tests.simulation.scheduler import Ended, Run
from tests.simulation.store import CHANGES, Answer, Content, Files, Operation, StoredFile, is_hidden

FAULTS = ("stop", "lost", "not done", "jump", "damaged")
"""The process ends; the operation is done, or not done, and its answer is lost; an hour passes; an object that is made
of others is damaged."""
REWRITING = ("maintain", "erase", "redecode", "repair")
"""The actors whose objects may be damaged."""
OLD = "old"
"""From this operation on, the actor's listings show the files as they were before the last change by another one."""
HOUR = 3600.0
SETTLING = ("write", "other", "again", "failing", "repair", "expire", "erase", "redecode", "maintain")
"""What is run again in the end, if it ran before."""
Fault = tuple[int, int, str]
"""Number of an actor, of its operation, and one of `FAULTS` or `OLD`."""


@dataclass(frozen=True)
class Schedule:
    """Actors on an archive: whose turn it is for how many operations, then the rest of each; and what goes wrong."""

    archive: str
    actors: tuple[str, ...]
    turns: tuple[tuple[int, int], ...]
    """Numbers of an actor and of operations."""
    faults: tuple[Fault, ...] = ()
    store: str = "conditional"
    """One of `STORES`."""


class ViolationError(AssertionError):
    """What must not be."""


@lru_cache(1 << 14)
def contents(data: bytes) -> tuple[Identity, ...]:
    if data in DAMAGED:
        return ()
    table = pq.ParquetFile(pa.BufferReader(data)).read(["_nats_seq", "_nats_timestamp", "_nats_payload"])
    rows = zip(*(table[name].cast(type_).to_pylist() for name, type_ in _COLUMNS.items()), strict=True)
    found = []
    for seq, time, payload in rows:
        assert payload == b"%d" % seq
        found.append((seq, time))
    return tuple(found)


_COLUMNS = {"_nats_seq": pa.int64(), "_nats_timestamp": pa.int64(), "_nats_payload": pa.binary()}


MESSAGES, QUARANTINE = (f"archive/{part}{catalogue.STREAM}/" for part in ("", "_quarantine/"))


def stored(files: Content, *parts: str, hidden: bool = False) -> Counter[Identity]:
    """How many objects have each message of these parts, or of both; with `hidden`, also unfinished local files."""
    found: Counter[Identity] = Counter()
    for path, file in files.items():
        if not path.startswith(parts or (MESSAGES, QUARANTINE)):
            continue
        if path.endswith(".parquet") or (hidden and is_hidden(path) and ".parquet." in path):
            found.update(contents(file.content))
    return found


def _age(message: Identity) -> tuple[bool, int]:
    """The order of messages of two lives."""
    return message[1] >= SECOND, message[0]


@dataclass
class Player:
    """An actor in a schedule."""

    run: Run
    required: set[Identity] = field(default_factory=set)
    """What it has to find, if it reads."""
    begun: int = 0
    """How often others had changed the archive when it began."""
    removed: set[Identity] = field(default_factory=set)
    """What had been removed on purpose by then."""
    old: bool = False
    """Whether its listings are old: a reader may miss what is new, and an erasure what was stored again."""
    earlier: Files | None = None
    """The files before the last change by another one, and what it has changed itself since."""
    asked: list[str] = field(default_factory=list)
    """The kinds of its operations; "" for a listing that found nothing."""


class World:
    """An archive while a schedule runs. States are checked if `checked`; `told` gets the story."""

    def __init__(self, schedule: Schedule, *, checked: bool = True, told: list[str] | None = None) -> None:
        self.schedule, self.checked, self.told = schedule, checked, told
        files, self.now, changed = prepared(schedule.archive)
        self.files = Files(dict(files), schedule.store)
        self.involved = {*schedule.actors, *changed}
        origin = ORIGINS.get(schedule.archive, schedule.archive)
        self.published = catalogue.messages(origin)
        self.acked = {*stored(catalogue.files(origin))}
        self.archived = {*stored(catalogue.files(origin), MESSAGES)}
        """Messages that have left the quarantine, or have never been there: they stay in the archive."""
        self.delivered = {*range(FIRST, LAST + 1)}
        """What the server knows to be acknowledged."""
        self.positions: dict[str, int] = {}
        """Up to which sequence a capture that has begun has acknowledged everything."""
        self.listed: dict[str, list[int]] = {}
        """How often others had changed the archive each time that an actor listed objects."""
        self.changes: Counter[str] = Counter()
        """How often each actor has changed it."""
        self.removed = set[Identity]()
        """What had been removed on purpose when the actor began whose turn it is."""
        self.locks: dict[str, Player] = {}
        self.begun: Counter[str] = Counter()
        """How often each actor has begun."""
        self.players: list[Player] = []
        self.in_table = frozenset(path for path, _ in iceberg.current(files))
        """Paths of the table's files."""
        self.dropped: dict[str, float] = {}
        """When the table has lost files."""
        self.settling = False
        """Whether everything has been run again."""
        self.story = ""
        """What happened, if it fails."""

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Raises ViolationError."""
        self.play()
        self._settle()

    def play(self) -> None:
        """Run without what is done in the end. Raises ViolationError."""
        self.players = players = [Player(self._run(name)) for name in self.schedule.actors]
        faults = {(number, step): fault for number, step, fault in self.schedule.faults}
        rest = [(number, END) for number in range(len(players))]
        try:
            for number, count in (*self.schedule.turns, *rest * len(rest)):  # who waits for a lock goes on after others
                player = players[number]
                for _ in range(count):
                    if player.run.over or self._is_waiting(player.run):
                        break
                    self._step(player, faults.get((number, player.run.steps)))
            if not all(player.run.over for player in players):
                raise ViolationError("each waits for a lock that another one has")
        finally:
            for player in players:
                player.run.close()

    def _run(self, name: str) -> Run:
        self.begun[name] += 1
        table = f"{name} {self.begun[name]}" if self.schedule.archive in TABLES else ""
        return Run(RUNNABLE[name], lambda: self.now, self.schedule.store, table)

    def _is_waiting(self, run: Run) -> bool:
        """Whether another one has the lock."""
        return run.request[0] == "lock" and run.request[1] in self.locks

    def _step(self, player: Player, fault: str | None) -> None:
        run, name = player.run, player.run.actor.name
        operation = run.request
        assert isinstance(operation, Operation)
        if not run.steps:
            player.required, player.begun, player.removed = self.required(name), self._others(name), self.gone()
        if fault == "stop":
            self._tell(name, "is killed")
            run.stopped = True
            self.locks = {path: holder for path, holder in self.locks.items() if holder is not player}
            return
        if fault == "jump":
            self._tell(name, "waits for an hour")
            self.now += HOUR
        if fault == OLD:
            player.old = True
        self.removed = set() if player.old else player.removed  # it may not see the tombstone
        if operation.kind == "list" and player.old and player.earlier:
            self._tell(name, f"list {operation.path} as before the last change by another")
            answer = player.earlier.do(operation, self.now)
        else:
            if operation.kind in CHANGES:
                self._remember(player, operation)
            answer = self._done(name, operation, fault)
        player.asked.append(operation.kind if answer.value or operation.kind != "list" else "")
        if operation.kind == "lock" and not answer.error:
            self.locks[operation.path] = player
        elif operation.kind == "unlock":
            del self.locks[operation.path]
        run.answer(answer)
        if isinstance(run.request, Ended):
            self._tell(name, f"ends: {run.request.outcome}")
            if not player.old:
                disturbed = self._is_disturbed(player)
                self._check_outcome(name, run.request.outcome, player.required, disturbed=disturbed)

    def _is_disturbed(self, player: Player) -> bool:
        name = player.run.actor.name
        faulty = any(self.players[number] is player for number, *_ in self.schedule.faults)
        return faulty or self.schedule.actors.count(name) > 1 or player.begun != self._others(name)

    def _remember(self, player: Player, operation: Operation) -> None:
        """Keep the files as they are before an operation for the listings of the others."""
        if player.earlier:
            player.earlier.do(operation, self.now)
        for other in self.players:
            if other is not player:
                other.earlier = Files(dict(self.files.files), self.schedule.store)

    def _done(self, name: str, operation: Operation, fault: str | None = None) -> Answer:
        kind, path, argument = operation
        if kind == "sleep":
            self.now += argument
            self._tell(name, f"sleeps {argument} s")
            return Answer()
        if kind == "stream":
            self._tell(name, "asks the server")
            return Answer(self._stream())
        if kind == "acknowledge":
            self._tell(name, f"acknowledges {argument}")
            self.delivered |= {*argument}
            self.acked |= {catalogue.identity(seq) for seq in argument}
            self.positions[name] = max(self.positions[name], *argument)
            return Answer()
        if kind == "begin":
            self.positions.setdefault(name, LAST)
            return Answer()
        if kind == "remove" and name == "maintain" and not iceberg.belongs(path):
            self._check_grace(path)
        if kind == "remove" and "erase" not in self.involved and self.dropped.get(path, 0) > self.now - GRACE:
            raise ViolationError(f"removed before queries of the table have ended: {path}")
        if kind == "lock" and fault == "not done":
            answer = Answer(error="locked")  # it has been waited for too long
        elif kind in CHANGES and fault in ("lost", "not done"):
            answer = Answer(error="lost")
            if fault == "lost":
                self.files.do(operation, self.now)
        elif fault == "damaged" and kind in ("write", "create") and name in REWRITING and path.endswith(".parquet"):
            answer = self.files.do(Operation(kind, path, (damaged(argument[0]), argument[1])), self.now)
        else:
            answer = self.files.do(operation, self.now)
        if self.told is not None:
            rest = f" {argument[1] or ''}" if kind in ("write", "rename") else ""
            told = f" ({fault})" if fault and kind in CHANGES else ""
            self._tell(
                name, f"{kind} {path.removeprefix('archive/')}{rest}{told}{answer.error and f': {answer.error}'}"
            )
        if kind == "list" and f"{path}/" == QUARANTINE:  # the part that a search lists first
            self.listed.setdefault(name, []).append(self._others(name))
        elif kind in CHANGES:
            self.changes[name] += 1
            self.archived |= stored(self.files.files, MESSAGES).keys()
            if name == "repair":  # what it has stored once, stays
                made = argument[0] if kind in ("write", "create") and path.endswith(".parquet") else None
                if made and (back := self.removed & {*contents(made)}):
                    raise ViolationError(f"removed before, and stored again: {back}")
                self.acked |= stored(self.files.files).keys()
            self._check_state()
        return answer

    def _others(self, name: str) -> int:
        return self.changes.total() - self.changes[name]

    def _tell(self, name: str, line: str) -> None:
        if self.told is not None:
            self.told.append(f"{name}: {line}")

    def _alone(self, name: str) -> Outcome:
        """Run an actor to its end, and change what it changes."""
        run = self._run(name)
        self.removed = self.gone()
        outcome: Outcome = run.finish(partial(self._done, name))
        self._tell(name, f"ends: {outcome}")
        return outcome

    # ------------------------------------------------------------------ the model

    @property
    def damaged(self) -> bool:
        """Whether an object is: then it is only said that nothing else is removed."""
        files = self.files.files
        return any(path.endswith(".parquet") and file.content in DAMAGED for path, file in files.items())

    def _stream(self) -> Stream:
        """What captures get has been published before."""
        floor = min({*range(FIRST, NEWEST + 2)} - self.delivered) - 1
        return Stream(self.published, floor, AGAIN if self.schedule.archive == "lives" else CREATED)

    def gone(self) -> set[Identity]:
        """Messages that may have been removed on purpose, because that was recorded first."""
        return {each for each in {*self.acked, *self.published} if self._is_erased(each) or self._is_expired(each)}

    def _is_erased(self, message: Identity) -> bool:
        tombstones = f"archive/_erased/{catalogue.STREAM}/"
        return message[0] == ERASED and any(
            path.startswith(tombstones) and not is_hidden(path) for path in self.files.files
        )

    def _is_expired(self, message: Identity) -> bool:
        end = (message[1] // 1_000_000 // INTERVAL + 1) * INTERVAL
        return end <= self.now - KEEP and f"archive/_expired/{catalogue.STREAM}.json" in self.files.files

    def required(self, reader: str = "") -> set[Identity]:
        """The messages that must be there; those that a reader must find."""
        required = self.acked - self.gone()
        if reader == "inspect":
            return required - self.archived
        if reader == "select":
            required &= {catalogue.identity(SELECTED)}
        if reader == "restore":  # the last life
            return {message for message in required if message[1] >= SECOND} or required
        return required & self.archived if reader in READERS else required

    def _check_state(self) -> None:
        """After a change: nothing is lost, and whoever reads now gets each message once."""
        if not self.checked:
            return
        self._check_table()
        files = self.archive
        at = frozenset((path, file.content) for path, file in files.items())
        key = (
            self.schedule.store == "local",
            at,
            frozenset(self.acked),
            frozenset(self.archived),
            frozenset(self.involved),
            *sorted(self.positions.items()),
        )
        if key in _CHECKED:
            return
        required = self.required()
        if lost := required - stored(files).keys():
            raise ViolationError(f"lost: {sorted(lost)}")
        if self.damaged:
            return
        for name in ("read", "select", "restore", "inspect"):  # the others are slow
            self._check_read(observed(name, files, self.schedule.store), self.required(name), alone=True)
        said = observed("mark", files, self.schedule.store)
        if said[0] == "marked" and self.positions and said[1] > min(self.positions.values()):
            raise ViolationError(f"the watermark is {said[1]}, captures are at {self.positions}")
        self._check_proof()
        _CHECKED.add(key)

    @property
    def archive(self) -> Content:
        """The files without those of the table."""
        return {path: file for path, file in self.files.files.items() if not iceberg.belongs(path)}

    def _check_table(self) -> None:
        """After a change: the files of the table are there, and have each message once."""
        if self.schedule.archive not in TABLES:
            return
        files = self.files.files
        try:
            table = iceberg.current(files)
        except KeyError as error:
            raise ViolationError(f"the table names metadata that is gone: {error}") from None
        paths = frozenset(path for path, _ in table)
        self.dropped |= dict.fromkeys(self.in_table - paths, iceberg.updated(files))
        self.in_table = paths
        # without conditional writes, a redelivery may replace an object by another one with the same messages
        sized = self.schedule.store != "plain" or self.involved.isdisjoint(CAPTURES)
        wrong = [path for path, size in table if path not in files or (sized and len(files[path].content) != size)]
        # an erasure does not wait for queries, and a commit that began before it looks again for what is gone
        settled = self.settling or all(player.run.ended or not player.run.steps for player in self.players)
        if wrong and (settled or "erase" not in self.involved):
            raise ViolationError(f"the table names what is gone: {wrong}")
        if self.damaged or wrong:
            return
        counts = Counter(message for path, _ in table for message in contents(files[path].content))
        if twice := [message for message, count in counts.items() if count > 1]:
            raise ViolationError(f"twice in the table: {twice}")

    def _check_grace(self, removed: str) -> None:
        """What compaction removes is in objects that readers have had time to find; an erasure may touch them."""
        files, part = self.files.files, QUARANTINE if removed.startswith(QUARANTINE) else MESSAGES
        if part == QUARANTINE and "redecode" in self.involved:
            return
        if removed not in files or "erase" in self.involved or self.schedule.store == "plain":
            return
        old = {path: file for path, file in files.items() if path != removed and file.modified <= self.now - GRACE}
        if missing := set(contents(files[removed].content)) - stored(old, part).keys() - self.gone():
            raise ViolationError(f"removed before its grace has passed: {sorted(missing)}")

    def _check_read(self, outcome: Outcome, required: set[Identity], *, alone: bool) -> None:
        if outcome[0] == "refused":
            if required and (alone or "read it again" not in outcome[-1]):
                raise ViolationError(f"cannot be read: {outcome}")
            return
        counts = Counter[Identity](outcome[1])
        if twice := [message for message, count in counts.items() if count > 1]:
            raise ViolationError(f"read twice: {twice}")
        if outcome[0] == "restored" and list(counts) != sorted(counts):
            raise ViolationError(f"out of order: {outcome[1]}")
        if outcome[0] == "restored" and alone and (erased := [each for each in counts if self._is_erased(each)]):
            raise ViolationError(f"erased, and restored: {erased}")
        if outcome[0] == "newest":
            newest = {message[0] % GROUPS: message for message in sorted(required, key=_age)}
            read = {message[0] % GROUPS: message for message in counts}
            if len(read) < len(counts) or any(_age(read.get(group, (0, 0))) < _age(newest[group]) for group in newest):
                raise ViolationError(f"not the newest: {read}, {newest}")
            return
        if left_out := required - counts.keys():
            raise ViolationError(f"not read: {sorted(left_out)}")

    def _check_outcome(self, name: str, outcome: Outcome, required: set[Identity], *, disturbed: bool = False) -> None:
        if outcome[0] == "repaired":
            self._check_complete(outcome[1], outcome[2])
        if self.damaged:
            return
        if name in READERS:
            self._check_read(outcome, required & self.required(name), alone=False)
        elif not disturbed and (
            (outcome[0] == "refused" and self.required())
            or (outcome[0] in ("passed", "redecoded", "repaired") and outcome[-1])
        ):
            raise ViolationError(f"refused, though nobody disturbs it: {outcome}")
        elif outcome == ("erased", ()) and self.listed[name][-2] == self._others(name):  # the last one is no search
            there = [message for message in stored(self.files.files, hidden=True) if message[0] == ERASED]
            if there:
                raise ViolationError(f"the certificate says that nothing remains: {there}")
            if there := set(iceberg.named(self.files.files)) - self.files.files.keys():
                raise ViolationError(f"the certificate says that nothing remains in the table: {there}")

    def _check_complete(self, complete: bool, floor: int) -> None:
        """What a repair calls complete has every message of the stream up to the ack floor."""
        there = stored(self.files.files).keys() | self.gone()
        lacking = {message for message in self.published if message[0] <= floor} - there
        if complete and (lacking or self.damaged):
            raise ViolationError(f"called complete: {lacking or 'an object is damaged'}")

    def _check_proof(self) -> None:
        files = self.archive
        counted, gone = observed("verify", files, self.schedule.store), {seq for seq, _ in self.gone()}
        if counted[0] != "counted":
            raise ViolationError(f"cannot be verified: {counted}")
        seqs = set(counted[1])
        there = {seq for seq, _ in stored(files)}
        if wrong := seqs - there - gone:
            raise ViolationError(f"verify counts what is not there: {wrong}")
        if missed := {seq for seq, _ in self.required()} - seqs:
            raise ViolationError(f"verify misses what is there: {missed}")

    # ------------------------------------------------------------------ the end

    def _settle(self) -> None:
        """Run everything again until nothing is left to do."""
        self._tell("the end", "everything is run again")
        self.now = LATER
        self.files.files = {path: StoredFile(file.content, self.now - DAY) for path, file in self.files.files.items()}
        chosen = [name for name in SETTLING if name in {*self.involved, "maintain"}]
        key = (self.schedule.store, frozenset(self.files.files.items()), tuple(chosen), frozenset(self.acked))
        if self.told is None and key in _SETTLED:
            return
        for name in filter(CAPTURES.__contains__, chosen):  # messages without an acknowledgement come again
            self._check_outcome(name, self._alone(name), set())
        for _ in range(4):
            before = {path: file.content for path, file in self.files.files.items()}
            for name in chosen:
                if name not in CAPTURES:
                    outcome = self._alone(name)
                    self._check_outcome(name, outcome, set())
                    if name == "repair" and outcome[:2] != ("repaired", True):
                        raise ViolationError(f"not repaired: {outcome}")
            self.settling = True
            if before == {path: file.content for path, file in self.files.files.items()}:
                break
            if self.damaged and self.schedule.archive in TABLES:
                break  # erase takes the object out of the table, and maintain puts it back
            self.now += HOUR + GRACE
        else:
            raise ViolationError("it does not come to an end")
        found = stored(self.files.files)
        if self.damaged:
            return
        if there := [message for message in found if self._is_erased(message)]:
            raise ViolationError(f"erased, and still stored: {there}")
        if there := [message for message in found if self._is_expired(message)]:
            raise ViolationError(f"expired, and still stored: {there}")
        archived, quarantined = (stored(self.files.files, part) for part in (MESSAGES, QUARANTINE))
        for found in (archived + quarantined,) if "redecode" in chosen else (archived, quarantined):
            if copies := [message for message, count in found.items() if count > 1]:
                raise ViolationError(f"copies are left: {copies}")
        if there := [message for message in quarantined if "redecode" in chosen and message[0] != UNREADABLE]:
            raise ViolationError(f"decodable, and still in the quarantine: {there}")
        self._check_state()
        if self.schedule.archive in TABLES:
            table = stored({path: self.files.files[path] for path in self.in_table})
            if table != archived:
                raise ViolationError(f"the table has {table}, the archive {archived}")
            if any(len(self.files.files[path].content) != size for path, size in iceberg.current(self.files.files)):
                raise ViolationError("the table has other sizes than the objects")
        _SETTLED.add(key)


_CHECKED: set[tuple[object, ...]] = set()
_SETTLED: set[tuple[object, ...]] = set()
