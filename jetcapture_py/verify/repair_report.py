"""The report of a repair, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from jetcapture_py.archive import layout
from jetcapture_py.archive.writer import EncodedBlock
from jetcapture_py.text import escaped, plural
from jetcapture_py.verify.ranges import Sequences
from jetcapture_py.verify.report import SHOWN, Report
from jetcapture_py.verify.scan import MOST_LISTED

_count = partial(plural, grouped=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrepairable:
    """A damaged object, and a range of its sequences that neither another object nor the stream has."""

    path: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The result of a repair. `messages` were stored again, `quarantined` of them in the quarantine.

    They are in `stored` new objects, the first of which are `objects`, and `bytes` large; `replaced` of these have
    replaced a damaged object. `gone` are ranges of sequences that left the stream before they could be read, and
    `unrepairable` those of damaged objects that are nowhere else.
    """

    messages: int = 0
    quarantined: int = 0
    stored: int = 0
    bytes: int = 0
    replaced: int = 0
    objects: tuple[str, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    unrepairable: tuple[Unrepairable, ...] = ()

    def with_object(self, encoded: EncodedBlock, *, replaced: bool) -> Self:
        """Count an object that has been stored."""
        return replace(
            self,
            messages=self.messages + encoded.messages,
            quarantined=self.quarantined + (encoded.messages if encoded.name.quarantine else 0),
            stored=self.stored + 1,
            bytes=self.bytes + encoded.data.size,
            replaced=self.replaced + replaced,
            objects=(*self.objects, encoded.name.path) if self.stored < MOST_LISTED else self.objects,
        )

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    def lines(self, after: Report) -> Iterator[str]:
        """Yield lines of text; `after` is the proof after the repair."""
        if not self.stored:
            yield "repair: nothing was stored, because no message of the stream is known to be missing"
        else:
            parts = [f"{_count(self.messages, 'message')} stored in {_count(self.stored, 'object')}"]
            parts += [f"{self.replaced:,} replaced a damaged one"] if self.replaced else []
            parts += [f"{_count(self.quarantined, 'message')} went to the quarantine"] if self.quarantined else []
            yield f"repair: {', '.join(parts)}"
            yield from _some([escaped(path) for path in self.objects], self.stored)
        lost = [f"{first} to {last}: left the stream before the repair" for first, last in self.gone]
        lost += [f"{each.first} to {each.last}: {escaped(each.path)} is damaged" for each in self.unrepairable]
        if lost:
            yield "cannot be repaired: neither the stream nor another object has these sequences"
            yield from _some(lost, len(lost))
        if after.damaged and not after.missing and after.proven:
            yield (
                "readers fail on the damaged objects until they are removed; try to get them back from a copy first"
                if lost
                else "remove the damaged objects: all of their messages are stored in other objects"
            )


def unrepairable(before: Report, archived: Sequences) -> tuple[Unrepairable, ...]:
    """Return which sequences of objects that were damaged are not in the archive after the repair.

    The stream does not have them either. Those of deleted messages, which were never in the object, are among them.
    """
    if not before.proven:
        return ()
    found: list[Unrepairable] = []
    for each in before.damaged:
        name = layout.parse_path(each.path)
        gaps = archived.gaps(name.first_seq, name.last_seq) if name else iter(())
        for starts, ends in gaps:
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            found += [Unrepairable(path=each.path, first=first, last=last) for first, last in pairs]
            if len(found) > MOST_LISTED:
                return tuple(found[:MOST_LISTED])
    return tuple(found)


def _some(lines: list[str], count: int) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:SHOWN])
    if count > SHOWN:
        yield f"  and {count - SHOWN:,} more"
