"""Refuse streams and notifications that would feed themselves, and streams past their last sequence.

Captures, `source.streams`, `check`, `tap`, `verify` and the Spark source share this rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jetcapture_py.config.stream import origins
from jetcapture_py.config.subjects import covers, matches, overlaps
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import Api

LAST_SEQ = (1 << 62) - 1
"""Servers deliver no later message to any client."""


def unreadable(api: Api, info: Mapping[str, Any]) -> str | None:
    """Return in one line why the stream of this answer to STREAM.INFO cannot be read; None if it can."""
    name, last = info["config"]["name"], int(info["state"]["last_seq"])
    if last >= LAST_SEQ:
        return (
            f"stream {name} ends at sequence {last}, and servers deliver nothing from sequence {LAST_SEQ + 1} on; "
            "create the stream again, with sequences from 1 on"
        )
    return _stores_deliveries(api, info["config"], f"stream {name}")


async def unreadable_with_origins(api: Api, info: Mapping[str, Any]) -> str | None:
    """Like `unreadable`, also for the stream's sources and mirrored streams, if the user may look them up."""
    if problem := unreadable(api, info):
        return problem
    configs, seen = [info["config"]], set[str]()
    while configs:
        for origin in origins(configs.pop()):
            name = origin["name"]
            if origin.get("external") or name in seen:
                continue
            seen.add(name)
            with suppress(SourceError):
                configs.append((await api.request(f"STREAM.INFO.{name}"))["config"])
                if problem := _stores_deliveries(
                    api, configs[-1], f"stream {name}, from which stream {info['config']['name']} copies,"
                ):
                    return problem
    return None


def _stores_deliveries(api: Api, config: Mapping[str, Any], stream: str) -> str | None:
    for subject in config.get("subjects") or ():
        if used := next((pattern for pattern in api.subjects if overlaps(subject, pattern)), None):
            return (
                f"{stream} takes {subject}, which overlaps {used}, so it would store every delivery again, "
                "without end; give it other subjects"
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifier:
    """A capture with `on_stored.subject`, its stream's subjects `taken`, and its `filters`."""

    stream: str
    subject: str
    taken: Sequence[str]
    filters: Sequence[str]

    def receives(self, subject: str) -> bool:
        """Whether this capture receives messages on `subject`."""
        return any(covers(pattern, subject) for pattern in self.taken) and matches(subject, self.filters)


def notification_loop(capture: Notifier, others: Iterable[Notifier]) -> str | None:
    """Say in one line how a capture's notifications come back to it, perhaps through `others`; None if they do not."""
    captures = [other for other in others if other != capture]
    senders, seen = [capture], {capture.subject}
    while senders:
        sender = senders.pop()
        if capture.receives(sender.subject):
            whose = "" if sender is capture else f", notifications of stream {sender.stream} that follow from its own"
            back = f"stream {capture.stream} takes {sender.subject}{whose}"
            return f"{back}, so that every object would cause another; use a subject that is not captured"
        reached = [other for other in captures if other.receives(sender.subject) and other.subject not in seen]
        seen |= {other.subject for other in reached}
        senders += reached
    return None
