"""Every rule of the machine that decides what may be acknowledged, how to leave it out, and what notices that.

Most rules guard others, so that few schedules of the model need them: then a sequence of calls notices it.
"""

from __future__ import annotations
import __future__

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jetcapture_py.jetstream import ordered
from jetcapture_py.jetstream.ordered import Ack, Mark, OrderedAcks, Phase, Position
from tests.support.ordered_world import failure

Machine = type[OrderedAcks]
LEADER = "leader"


class Rule(NamedTuple):
    """Without it, `code` is `other`. `kept` tells whether a machine keeps it; or the schedule fails without it."""

    code: str
    other: str
    kept: Callable[[Machine], bool] | Sequence[int]


def receive(acks: OrderedAcks, numbers: Sequence[int], seqs: Sequence[int], later: int = 0) -> Any:
    """Receive messages, stored at the time of their sequence."""
    return acks.received(np.array(numbers), np.array(seqs), np.array(seqs) + later, "pin")


def running(machine: Machine) -> OrderedAcks:
    """Messages 2, 4, 6 and 8 are stored, none is acknowledged."""
    acks, seqs = machine(), np.array([2, 4, 6, 8])
    receive(acks, [1], [2])
    acks.reset(acks.run, 1, LEADER)
    receive(acks, [1, 2, 3, 4], [2, 4, 6, 8])
    acks.stored(seqs, seqs)
    return acks


def again(acks: OrderedAcks, first: int = 1) -> OrderedAcks:
    """A RESET, after which messages have the sequence `first` or a later one."""
    acks.interrupt("reconnected")
    acks.reset(acks.run, first, LEADER)
    return acks


def first_ack(
    acks: OrderedAcks, mark: Mark | None = None, floor: tuple[int, int] = (0, 0), leader: str = LEADER
) -> Ack | None:
    return acks.next_ack(mark or acks.mark(), Position(*floor), leader)


def _keeps_no_answer_of_an_earlier_run(machine: Machine) -> bool:
    acks = running(machine)
    mark = acks.mark()
    receive(again(acks), [1, 2, 3, 4], [2, 4, 6, 8])
    return first_ack(acks, mark) is None


def _drops_what_a_lost_pin_brings(machine: Machine) -> bool:
    acks = running(machine)
    acks.unpinned("pin")
    receive(acks, [5], [10])
    return acks.phase is Phase.STANDBY


def _needs_a_reset_in_this_run(machine: Machine) -> bool:
    acks = running(machine)
    run = acks.run
    acks.interrupt("reconnected")
    acks.reset(run, 1, LEADER)
    return acks.phase is Phase.INTERRUPTED


def _begins_above_the_floor(machine: Machine) -> bool:
    acks = again(running(machine), 5)
    receive(acks, [1], [4])
    return acks.phase is Phase.RESET


def _begins_with_the_last_reset(machine: Machine) -> bool:
    acks = again(running(machine))
    receive(acks, [1, 2, 1, 2, 3], [2, 4, 2, 4, 6])
    return acks.phase is Phase.RUNNING


def _counts_no_ack_of_an_earlier_run(machine: Machine) -> bool:
    acks = running(machine)
    ack = first_ack(acks)
    acks.interrupt("reconnected")
    return ack is not None and acks.acked(ack) == 0


def _ends_with_an_unconfirmed_ack(machine: Machine) -> bool:
    acks = running(machine)
    ack = first_ack(acks)
    assert ack is not None
    acks.unconfirmed(ack)
    return acks.phase is Phase.INTERRUPTED


def _keeps_the_newest_message_of_a_sequence(machine: Machine) -> bool:
    acks = again(running(machine))
    receive(acks, [1, 2], [2, 4], later=1)  # a restored stream has others
    return not receive(again(acks), [1, 2], [2, 4], later=1).any()


RULES = {
    "another leader": Rule(
        " or leader != self._leader:", ":", lambda machine: first_ack(running(machine), leader="another") is None
    ),
    "a floor below the run": Rule(
        "0 <= known <= len(rows) and before <= floor.seq",
        "0 <= known <= len(rows)",
        lambda machine: first_ack(running(machine), floor=(2, 3)) is None,
    ),
    "a floor above the run": Rule(
        "(known < len(rows) and floor.seq >= rows.seqs[known])",
        "False",
        lambda machine: first_ack(running(machine), floor=(1, 4)) is None,
    ),
    "an answer for an earlier run": Rule(
        "self.phase is not Phase.RUNNING or mark.run != self.run",
        "self.phase is not Phase.RUNNING",
        _keeps_no_answer_of_an_earlier_run,
    ),
    "what arrived after the question": Rule(
        "rows.stored[: max(0, mark.delivery - self._acked.delivery)]",
        "rows.stored",
        (200640, 198979, 236359, 4353, 155461, 144325, 131547, 254276, 140288, 133187, 49627),
    ),
    "what is not stored": Rule(
        "len(safe) if safe.all() else int(np.argmin(safe))",
        "len(safe)",
        (42821, 154949, 7616, 20929, 126533, 32964, 245827, 234817, 160837, 230341, 207429),
    ),
    "the first ack alone": Rule(
        "            count = 1\n",
        "            pass\n",
        lambda machine: getattr(first_ack(running(machine)), "position", None) == Position(1, 2),
    ),
    "two acks": Rule(
        "Ack(self.run, floor.delivery, position)",
        "Ack(self.run, position.delivery, position)",
        (178245, 26048, 49859, 155137, 133573, 242368, 136643, 90203, 122112, 142683, 219355),
    ),
    "numbers without a gap": Rule(
        "fits = deliveries[start:] == np.arange(self._last.delivery + 1, self._last.delivery + 1 + len(seqs) - start)",
        "fits = np.ones(len(seqs) - start, bool)",
        (83648, 143051, 168772, 163521, 107845, 42821, 154949, 23937, 167886),
    ),
    "the order of sequences": Rule(
        "        fits &= seqs[start:] > previous\n",
        "",
        (8832, 139525, 65285, 4481, 11268, 198404, 226695, 56897, 257686, 47680, 48321),
    ),
    "a lost pin": Rule(" or pin == self._lost_pin:", ":", _drops_what_a_lost_pin_brings),
    "another pin": Rule('            self._interrupt("pinned")\n', "", ()),
    "the time of a message": Rule(
        " & (self.times[index] == times)",
        "",
        (
            *(229021, 193349, 257348, 258075, 233413, 119237, 169051, 159581, 134019, 58503, 143233, 188997, 141509),
            *(182469, 234141),
        ),
    ),
    "what was dropped": Rule(
        "self._held.where(self._held.stored)",
        "self._held",
        (0, 15107, 10627, 35329, 49667, 13315, 32771, 44801, 22412, 24067, 3136, 21313, 24451, 1811),
    ),
    "a RESET for an earlier run": Rule(
        "if run == self.run and self.phase is", "if self.phase is", _needs_a_reset_in_this_run
    ),
    "a first delivery from before the RESET": Rule(
        "(deliveries == 1) & (seqs > self._acked.seq)", "deliveries == 1", _begins_above_the_floor
    ),
    "the last of several first deliveries": Rule("int(first[-1])", "int(first[0])", _begins_with_the_last_reset),
    "an ack in an earlier run": Rule(
        "        if ack.run != self.run:\n            return 0\n", "", _counts_no_ack_of_an_earlier_run
    ),
    "an unconfirmed ack": Rule('self.interrupt("an ack was not confirmed")', "pass", _ends_with_an_unconfirmed_ack),
    "what does not arrive": Rule(
        'self._interrupt(f"{mark.delivery} deliveries arrived of {delivered}")',
        "pass",
        (207883, 257797, 103616, 9153, 61828, 259972, 121220, 105153, 103438),
    ),
    "what has arrived meanwhile": Rule(
        "waiting and mark == self.mark() and", "waiting and", (252224, 260928, 115840, 206464, 100608, 14464)
    ),
    "the newest message of a sequence": Rule(
        "np.append(np.diff(rows.seqs[order]) > 0, True)[: len(order)]",
        "np.append(True, np.diff(rows.seqs[order]) > 0)[: len(order)]",
        _keeps_the_newest_message_of_a_sequence,
    ),
    "held messages that are acknowledged": Rule(
        "self._held = self._held.where(self._held.seqs > ack.position.seq)",
        "pass",
        (83648, 143051, 168772, 163521, 107845, 42821, 154949, 23937, 167886),
    ),
    "held messages below a RESET": Rule(
        "            self._held = self._held.where(self._held.seqs >= first)\n",
        "",
        lambda machine: again(running(machine), 5).unacknowledged == 2,
    ),
    "held messages that are stored": Rule(
        "        self._held.mark(seqs, times)\n",
        "",
        (207883, 215552, 257797, 103616, 9153, 72068, 259972, 121220, 39105, 105153, 103438),
    ),
    "an abandoned consumer": Rule("not self.active and not pinned and unacked > 0", "False", (135232, 171725)),
}


def keeps(machine: Machine, name: str) -> bool:
    """Whether a machine keeps a rule, as far as what notices it can tell."""
    kept = RULES[name].kept
    return kept(machine) if callable(kept) else failure(kept, machine) is None


def without(name: str) -> Machine:
    code, other, _ = RULES[name]
    source = inspect.getsource(ordered)
    assert source.count(code) == 1, f"{name}: {source.count(code)} times in the source"
    _, start, text = source.replace(code, other).partition("@dataclass(slots=True, eq=False)\n")
    names: dict[str, Any] = dict(vars(ordered))
    exec(compile(start + text, f"without {name}", "exec", __future__.annotations.compiler_flag), names)
    machine: Machine = names["OrderedAcks"]
    return machine
