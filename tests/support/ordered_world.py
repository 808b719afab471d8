"""A model of a server with one pinned consumer (`ack_policy: all`) and two replicas of a capture, without time or I/O.

The server does what nats-server 2.15's consumer.go does with acks, RESETs and pins. Everything between it and the
replicas waits in queues, of which a schedule decides what comes next: a list of numbers, each an action and its
argument. The world checks after each step that no message that the stream has is acknowledged and not archived.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from jetcapture_py.jetstream.ordered import Ack, Mark, OrderedAcks, Phase, Position

CREDIT = 40
MAX_ACK_PENDING = 60
STEPS = 120
ROUNDS = 40
"""Rounds without faults in which everything must be stored and acknowledged."""


class LostMessageError(AssertionError):
    """A message was acknowledged without being archived."""


class Delivery(NamedTuple):
    number: int
    seq: int
    time: int
    pin: str


@dataclass
class Consumer:
    """A consumer's state on the server, as it is written to disk."""

    next_seq: int = 1
    next_number: int = 1
    floor: Position = field(default_factory=lambda: Position(0, 0))
    pending: dict[int, int] = field(default_factory=dict)


@dataclass
class Pull:
    owner: Replica
    pin: str
    credit: int


class Server:
    """A stream and its consumer. `archive` has every message that is stored, as pairs of sequence and time."""

    def __init__(self) -> None:
        self.messages: dict[int, int] = {}
        self.last = 0
        self.consumer = Consumer()
        self.snapshots = [Consumer()]
        self.leader = 0
        self.pin = ""
        self.pins = count(1)
        self.clock = count(1)
        self.pulls: deque[Pull] = deque()
        self.archive: set[tuple[int, int]] = set()

    def publish(self, messages: int, gap: int) -> None:
        for _ in range(messages):
            self.last += 1 + gap  # sequences between do not match the filter
            self.messages[self.last] = next(self.clock)

    def _next_pull(self) -> Pull | None:
        for _ in range(len(self.pulls)):
            pull = self.pulls[0]
            if pull.owner.dead:
                self.pulls.popleft()
                continue
            if pull.pin == self.pin and (self.pin or not pull.pin):
                if not self.pin:
                    self.pin = pull.pin = f"pin{next(self.pins)}"
                return pull
            self.pulls.popleft()
            if pull.pin:
                pull.owner.answers.append(("unpinned", pull.pin))
            else:
                self.pulls.append(pull)
        return None

    def _send(self, seq: int) -> bool:
        pull = self._next_pull()
        if pull is None:
            return False
        pull.credit -= 1
        if not pull.credit:
            self.pulls.remove(pull)
        number = self.consumer.next_number
        self.consumer.next_number += 1
        self.consumer.pending[seq] = number
        pull.owner.arriving.append(Delivery(number, seq, self.messages[seq], pull.pin))
        return True

    def deliver(self, messages: int) -> None:
        for seq in sorted(seq for seq in self.messages if seq >= self.consumer.next_seq)[:messages]:
            if len(self.consumer.pending) >= MAX_ACK_PENDING or not self._send(seq):
                return
            self.consumer.next_seq = seq + 1

    def redeliver(self) -> None:
        """`ack_wait` of the first pending message is over."""
        first = min((seq for seq in self.consumer.pending if seq in self.messages), default=None)
        if first is not None:
            self._send(first)

    def ack(self, position: Position) -> bool:
        consumer = self.consumer
        if position.seq >= consumer.next_seq:
            return False
        if position.delivery > consumer.floor.delivery and position.seq > consumer.floor.seq:
            consumer.floor = position
            consumer.pending = {seq: number for seq, number in consumer.pending.items() if seq > position.seq}
        return True

    def reset(self) -> int:
        seq = self.consumer.floor.seq + 1
        self.consumer = Consumer(next_seq=seq, floor=Position(0, seq - 1))
        return seq

    def step_down(self, unsent: int, forgotten: int) -> None:
        """Another leader: some messages count as delivered and never were, or the last deliveries are forgotten."""
        self.leader += 1
        self.pin = ""
        self.pulls.clear()
        consumer = self.consumer
        for seq in sorted(seq for seq in self.messages if seq >= consumer.next_seq)[:unsent]:
            consumer.pending[seq] = consumer.next_number
            consumer.next_number += 1
            consumer.next_seq = seq + 1
        for seq in [] if unsent else sorted(consumer.pending)[::-1][:forgotten]:
            if consumer.pending[seq] == consumer.next_number - 1:
                del consumer.pending[seq]
                consumer.next_number -= 1
                consumer.next_seq = seq

    def restart(self, snapshot: int, lost: int) -> None:
        """Start with an older state of the consumer, and without the stream's last messages."""
        self.consumer = deepcopy(self.snapshots[snapshot % len(self.snapshots)])
        for seq in sorted(self.messages)[len(self.messages) - min(lost, len(self.messages)) :]:
            del self.messages[seq]
        if lost:
            self.last = max(self.messages, default=0)
            self.snapshots = [state for state in self.snapshots if state.next_seq <= self.last + 1] or [Consumer()]
        consumer = self.consumer
        consumer.next_seq = min(consumer.next_seq, self.last + 1)
        consumer.floor = Position(consumer.floor.delivery, min(consumer.floor.seq, self.last))
        consumer.pending = {seq: number for seq, number in consumer.pending.items() if seq <= self.last}
        self.pin = ""
        self.pulls.clear()

    def expire(self, messages: int) -> None:
        """The stream's limits remove its first messages; the consumer gives up on those that are pending."""
        for seq in sorted(self.messages)[:messages]:
            del self.messages[seq]
            if seq in self.consumer.pending and seq > self.consumer.floor.seq:
                number = self.consumer.pending.pop(seq)
                if number > self.consumer.floor.delivery:
                    self.consumer.floor = Position(number, seq)

    def check(self) -> None:
        floor = self.consumer.floor.seq
        missing = [seq for seq, time in self.messages.items() if seq <= floor and (seq, time) not in self.archive]
        if missing:
            raise LostMessageError(f"acknowledged up to {floor}, but not archived: {missing}")


Request = tuple[Any, ...]


class Replica:
    """What `PullSource` and the pipeline do with the machine under test."""

    def __init__(self, server: Server, machine: type[OrderedAcks]) -> None:
        self.server = server
        self.acks = machine()
        self.arriving: deque[Delivery] = deque()
        self.answers: deque[Request] = deque()
        self.requests: deque[tuple[Replica, Request]] = deque()
        self.waits: dict[str, Request] = {}
        """Requests without an answer: a RESET, and an ack or what comes before it, at the same time."""
        self.pulled = False
        self.frozen = self.dead = False
        self.blocks: list[tuple[int, int]] = []
        self.captured: list[tuple[int, int]] = []

    def receive(self, messages: int) -> None:
        taken = [self.arriving.popleft() for _ in range(min(messages, len(self.arriving)))]
        if not taken:
            return
        numbers = np.array([delivery[:3] for delivery in taken], np.int64)
        keep = self.acks.received(numbers[:, 0], numbers[:, 1], numbers[:, 2], taken[-1].pin)
        kept = [(delivery.seq, delivery.time) for delivery, kept in zip(taken, keep.tolist(), strict=True) if kept]
        self.blocks += kept
        self.captured += kept

    def store(self, which: int, size: int) -> None:
        """Store some of the messages, not only the first ones."""
        if not self.blocks:
            return
        start = which % len(self.blocks)
        block, self.blocks[start : start + size] = self.blocks[start : start + size], []
        self.server.archive.update(block)
        seqs, times = np.array(sorted(block), np.int64).T
        self.acks.stored(seqs, times)

    def pull(self) -> None:
        if self.acks.phase is not Phase.INTERRUPTED:
            credit = CREDIT if self.acks.active else 1
            self.requests.append((self, ("pull", self.acks.pin, credit)))

    def ask(self, *request: Any) -> None:
        if _kind(request[0]) not in self.waits:
            self.waits[_kind(request[0])] = request
            self.requests.append((self, request))

    def begin_ack(self) -> None:
        if self.acks.phase is Phase.RUNNING:
            self.ask("floor", self.acks.mark())

    def begin_reset(self) -> None:
        if self.acks.phase is Phase.INTERRUPTED:
            self.ask("reset", self.acks.run)

    def begin_idle(self) -> None:
        if self.acks.phase in (Phase.RESET, Phase.RUNNING) and not self.arriving:
            self.ask("idle", self.acks.mark())

    def begin_watch(self) -> None:
        if not self.acks.active:
            self.ask("watch", None)

    def give_up(self) -> None:
        """A request was not answered in time; it may still arrive."""
        name, asked = self.waits.get("ack", ("", None))
        if name == "ack":
            self.acks.unconfirmed(asked)
        self.waits.clear()

    def answered(self, answers: int = 1) -> None:
        for _ in range(min(answers, len(self.answers))):
            self._answered(*self.answers.popleft())

    def _answered(self, name: str, *values: Any) -> None:
        if name == "unpinned":
            self.acks.unpinned(values[0])
        elif name == "reconnected":
            self.give_up()
            self.acks.interrupt("reconnected")
        elif self.waits.get(_kind(name)) == values[0]:
            self._use(name, *values)

    def _use(self, name: str, request: Request, *values: Any) -> None:
        del self.waits[_kind(name)]
        asked = request[1]
        if name == "floor":
            assert isinstance(asked, Mark)
            if (ack := self.acks.next_ack(asked, *values)) is not None:
                self.ask("ack", ack)
        elif name == "watch":
            if self.acks.abandoned(*values):
                self.ask("reset", self.acks.run)
        elif name == "reset":
            self.acks.reset(asked, *values)
        elif name == "idle":
            if not self.arriving:
                self.acks.idle(asked, *values)
        else:
            assert isinstance(asked, Ack)
            self.acks.acked(asked)


def _kind(name: str) -> str:
    return "reset" if name == "reset" else "ack"


def serve(replica: Replica, requests: int = 1) -> None:
    """Have the server handle the next requests of a replica, or of one that died in its place."""
    for _ in range(min(requests, len(replica.requests))):
        _serve(replica.server, *replica.requests.popleft())
        replica.server.check()


def _serve(server: Server, owner: Replica, request: Request) -> None:
    name, *values = request
    consumer = server.consumer
    if name == "pull":
        pin, credit = values
        if pin and server.pin not in ("", pin):
            owner.answers.append(("unpinned", pin))
        else:
            server.pulls.append(Pull(owner, pin, credit))
    elif name == "floor":
        owner.answers.append((name, request, consumer.floor, str(server.leader)))
    elif name == "idle":
        owner.answers.append((name, request, consumer.next_number - 1))
    elif name == "reset":
        owner.answers.append((name, request, server.reset(), str(server.leader)))
    elif name == "watch":
        owner.answers.append((name, request, server.pin, len(consumer.pending)))
    elif name == "unpin":
        server.pin = ""
    else:
        ack = values[0]
        server.ack(Position(ack.before, ack.position.seq))
        if server.ack(ack.position):
            owner.answers.append((name, request))


class World:
    """The server and two replicas under a schedule."""

    def __init__(self, machine: type[OrderedAcks] = OrderedAcks) -> None:
        self.server = Server()
        self._machine = machine
        self.replicas = [Replica(self.server, machine), Replica(self.server, machine)]

    def step(self, number: int) -> None:
        number, which = divmod(number, RADIX)
        action = _ACTIONS[which]
        replica = self.replicas[number & 1]
        action(self, replica, number >> 1)
        self.server.check()

    def settle(self) -> None:
        """Work without faults until all is stored and acknowledged, also if nothing is published any more."""
        for replica in self.replicas:
            replica.frozen = False
        for messages in (0, 3):
            self.server.publish(messages, 0)
            self._work()

    def _work(self) -> None:
        server = self.server
        for turn in range(ROUNDS):
            if server.consumer.floor.seq >= max(server.messages, default=0) and turn > 2:
                break
            for replica in self.replicas:
                replica.receive(1000)
                replica.store(0, 1000)
                while replica.requests or replica.answers:
                    while replica.requests:
                        serve(replica)
                    replica.answered()
                replica.give_up()
                replica.begin_reset()
                (replica.begin_idle if turn % 3 == 2 else replica.begin_ack)()
                replica.begin_watch()
                replica.pull()
            server.deliver(20)
            if turn % 8 == 7 and not any(replica.acks.pin == server.pin for replica in self.replicas):
                server.pin = ""  # nobody renewed it
        server.check()
        floor, last = server.consumer.floor.seq, max(server.messages, default=0)
        phases = [replica.acks.phase.name for replica in self.replicas]
        assert floor >= last, f"stuck at {floor} of {last}: {phases}"
        for acks in (replica.acks for replica in self.replicas):
            assert not (acks._held.seqs <= acks._acked.seq).any(), "acknowledged messages are held"

    # ------------------------------------------------------------------ faults

    def _lose(self, replica: Replica, number: int) -> None:
        """A connection between two servers breaks: some of what was sent does not arrive."""
        lost = list(replica.arriving)
        start = number % (len(lost) + 1)
        del lost[start : start + 1 + number % 5]
        replica.arriving = deque(lost)

    def _reset_unseen(self, replica: Replica, number: int) -> None:
        """Another replica requests a RESET late, and what arrives next has just the number that is expected."""
        self.server.reset()
        expected = replica.acks.mark().delivery + 1
        self.server.deliver(expected + number % 5)
        while replica.arriving and replica.arriving[0].number != expected:
            replica.arriving.popleft()

    def _kill_server(self, _: Replica, number: int) -> None:
        for replica in self.replicas:
            replica.arriving.clear()
            replica.requests.clear()
            replica.answers = deque([("reconnected",)])
        self.server.restart(number, number % 4 if number % 3 == 0 else 0)
        self.server.leader += 1

    def _replace_end(self, replica: Replica, number: int) -> None:
        """The server is killed and loses its last messages, which were stored; others get their sequences."""
        replica.receive(100)
        replica.store(0, 100)
        self.server.snapshots.append(deepcopy(self.server.consumer))
        lost = 1 + number % 3
        self._kill_server(replica, -1)
        self.server.restart(-1, lost)
        self.server.publish(lost, 0)

    def _restart_elsewhere(self, _: Replica, number: int) -> None:
        """The consumer's server restarts with an older state; the replicas are connected to others."""
        self.server.restart(number, 0)
        self.server.leader += number & 1

    def _die(self, replica: Replica, number: int) -> None:
        """A replica is killed, or stopped; what it has sent may still arrive."""
        if number & 1:
            replica.requests.append((replica, ("unpin",)))
        replica.dead, successor = True, Replica(self.server, self._machine)
        successor.requests = replica.requests
        self.replicas[self.replicas.index(replica)] = successor

    def _reset_before_ack(self, replica: Replica, number: int) -> None:
        """Another replica requests a RESET after the ack floor was looked up, and before the ack arrives."""
        if replica.frozen:
            return
        self._look_up(replica)
        replica.answered(len(replica.answers))
        self.server.reset()
        self.server.deliver(number % 9)
        serve(replica, len(replica.requests))

    def _reset_before_answer(self, replica: Replica, number: int) -> None:
        """It does so before the answer arrives, and what is delivered then has just the numbers that are expected."""
        if replica.frozen:
            return
        self._look_up(replica)
        self._reset_unseen(replica, number)
        replica.receive(100)
        replica.store(0, 100)
        replica.answered(len(replica.answers))
        serve(replica, len(replica.requests))

    def _look_up(self, replica: Replica) -> None:
        serve(replica, len(replica.requests))
        replica.answered(len(replica.answers))
        replica.begin_ack()
        serve(replica, len(replica.requests))

    def _forget(self, replica: Replica, _: int) -> None:
        """A standby drops what it holds."""
        if not replica.acks.active:
            replica.blocks.clear()
            replica.acks.forget()


def _awake(work: Callable[[Replica, int], object]) -> Callable[[World, Replica, int], None]:
    def action(_: World, replica: Replica, number: int) -> None:
        if not replica.frozen:
            work(replica, number)

    return action


def _freeze(_: World, replica: Replica, number: int) -> None:
    replica.frozen = number % 3 == 0


def _turn(world: World, replica: Replica, number: int) -> None:
    """A replica that is not disturbed: requests and answers arrive, and it does what is due."""
    if replica.frozen:
        return
    while replica.requests:
        serve(replica)
    while replica.answers:
        replica.answered()
    replica.receive(number % 12)
    replica.begin_reset()
    replica.begin_ack()
    if not any(pull.owner is replica and pull.pin == replica.acks.pin for pull in world.server.pulls):
        replica.pull()


_WORK: Sequence[Callable[[World, Replica, int], object]] = (
    lambda world, _, number: world.server.publish(1 + number % 6, number % 2),
    lambda world, _, number: world.server.deliver(1 + number % 9),
    _awake(lambda replica, number: replica.store(number, 1 + number % 8)),
    _turn,
    _turn,
    _turn,
    _awake(lambda replica, number: replica.receive(1 + number % 9)),
    lambda _, replica, number: serve(replica, 1 + number % 3),
    _awake(lambda replica, number: replica.answered(1 + number % 3)),
    _awake(lambda replica, _: replica.begin_ack()),
    _awake(lambda replica, _: replica.begin_reset()),
    _awake(lambda replica, _: replica.pull()),
)
_FAULTS: Sequence[Callable[[World, Replica, int], object]] = (
    lambda world, _, __: setattr(world.server, "pin", ""),
    lambda world, _, number: world.server.step_down(number % 6, number % 5),
    World._lose,
    World._reset_unseen,
    World._kill_server,
    World._restart_elsewhere,
    World._die,
    World._forget,
    _freeze,
    lambda world, _, __: world.server.snapshots.append(deepcopy(world.server.consumer)),
    lambda world, _, __: world.server.redeliver(),
    lambda world, _, number: world.server.expire(1 + number % 3),
    _awake(lambda replica, _: replica.give_up()),
    _awake(lambda replica, _: replica.begin_idle()),
    World._reset_before_ack,
    World._reset_before_answer,
    _awake(lambda replica, _: replica.begin_watch()),
    World._replace_end,
)
_ACTIONS = (*_WORK, *_FAULTS)
RADIX = 64
"""A step is an action's index plus this times its argument: schedules stay the same when actions are added."""


def schedule(seed: int) -> list[int]:
    numbers = random.Random(seed)
    faults = numbers.sample(range(len(_WORK), len(_ACTIONS)), numbers.randrange(4))
    weights = [numbers.choice((1, 2, 8)) for _ in _WORK]
    rate = numbers.choice((0.03, 0.06, 0.15)) if faults else 0.0
    steps = []
    for _ in range(STEPS):
        fault = numbers.random() < rate
        action = numbers.choice(faults) if fault else numbers.choices(range(len(_WORK)), weights)[0]
        steps.append(action + RADIX * numbers.randrange(1 << 12))
    return steps


def play(steps: Sequence[int], machine: type[OrderedAcks] = OrderedAcks) -> World:
    world = World(machine)
    for number in steps:
        world.step(number)
    world.settle()
    return world


def failure(steps: Sequence[int], machine: type[OrderedAcks] = OrderedAcks) -> str | None:
    try:
        play(steps, machine)
    except AssertionError as error:
        return str(error)
    return None


def shrink(steps: Sequence[int], machine: type[OrderedAcks] = OrderedAcks) -> list[int]:
    """Return a schedule that still fails and from which no step can be left out."""
    shortest, size = list(steps), len(steps) // 2
    while size:
        start = 0
        while start < len(shortest):
            shorter = shortest[:start] + shortest[start + size :]
            if failure(shorter, machine) is not None:
                shortest = shorter
            else:
                start += size
        size //= 2
    return shortest
