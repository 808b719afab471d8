"""Actors that run the real code one operation at a time, and what they did before as a tree.

An actor's next operation follows from the answers that it has got. So each sequence of answers is run once: from then
on the tree says what the actor asks for next, and a schedule costs a few look-ups. Only where a schedule leaves the
tree, a thread runs the code, from its beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.simulation.store import Answer, Operation


class KilledError(BaseException):
    """The process ends here."""


class Ended(NamedTuple):
    """The end of an actor, and what it says then."""

    outcome: Any


class Node:
    """A state of an actor: what it asks for, and the states that answers lead to."""

    __slots__ = ("following", "request")

    def __init__(self, request: Operation | Ended) -> None:
        self.request = request
        self.following: dict[Answer, Node] = {}


class Live:
    """A thread that runs an actor's code, and stands still at each operation."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.answered = 0
        self._work, self._killed = work, False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._answer = Answer()
        self._request: Operation | Ended | BaseException = Ended(None)
        self._thread = threading.Thread(target=self._run, daemon=True)
        BY_THREAD[self._thread] = self
        self._thread.start()
        self._go.release()
        self._stopped.acquire()

    @property
    def request(self) -> Operation | Ended:
        if isinstance(self._request, BaseException):
            raise self._request
        return self._request

    def answer(self, answer: Answer) -> None:
        self.answered += 1
        self._answer = answer
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        if not isinstance(self._request, Operation):
            return
        self._killed = True
        self._go.release()
        self._thread.join()

    def ask(self, operation: Operation) -> Answer:
        """Called by the actor's code."""
        if self._killed:
            raise KilledError
        self._request = operation
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise KilledError
        return self._answer

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._request = Ended(self._work())
        except BaseException as error:
            self._request = error
        del BY_THREAD[self._thread]
        self._stopped.release()


BY_THREAD: dict[threading.Thread, Live] = {}


def ask(operation: Operation) -> Answer:
    """Ask for an operation on behalf of the actor whose code calls this."""
    return BY_THREAD[threading.current_thread()].ask(operation)


class Actor:
    """An actor, and all that it has ever done."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.work = name, work
        self.root: Node | None = None


NOW, STORE, TABLE = Operation("now"), Operation("store"), Operation("table")
"""The questions for the time, the kind of store, and what is in the names of an actor's files of the table, "" without
a table. They are no change of turn."""


class Run:
    """An actor in one schedule; `clock` tells it the time."""

    def __init__(self, actor: Actor, clock: Callable[[], float], store: str = "conditional", table: str = "") -> None:
        self.actor, self.steps, self._clock = actor, 0, clock
        self._told = {STORE: store, TABLE: table}
        self.stopped = False
        self._answers: list[Answer] = []
        self._live: Live | None = None
        if actor.root is None:
            actor.root = Node(self._caught_up().request)
        self._node = actor.root
        self._tell()

    @property
    def request(self) -> Operation | Ended:
        return self._node.request

    @property
    def over(self) -> bool:
        return self.stopped or self.ended

    @property
    def ended(self) -> bool:
        return isinstance(self._node.request, Ended)

    def answer(self, answer: Answer) -> None:
        self.steps += 1
        self._follow(answer)
        self._tell()

    def finish(self, do: Callable[[Operation], Answer]) -> Any:
        """Do all that the actor asks for; what it says in the end."""
        try:
            while isinstance(operation := self.request, Operation):
                self.answer(do(operation))
            return operation.outcome
        finally:
            self.close()

    def _tell(self) -> None:
        while (request := self._node.request) in (NOW, STORE, TABLE):
            self._follow(Answer(self._clock() if request == NOW else self._told[request]))

    def _follow(self, answer: Answer) -> None:
        self._answers.append(answer)
        node = self._node.following.get(answer)
        if node is None:
            node = self._node.following[answer] = Node(self._caught_up().request)
        self._node = node

    def close(self) -> None:
        if self._live is not None:
            self._live.kill()

    def _caught_up(self) -> Live:
        """The thread, after it has got all answers."""
        live = self._live
        if live is None:
            live = self._live = Live(self.actor.work)
            node = self.actor.root
        else:
            node = None
        for answer in self._answers[live.answered :]:
            assert node is None or live.request == node.request, f"not repeatable: {live.request} {node.request}"
            node = None if node is None else node.following.get(answer)
            live.answer(answer)
        return live
